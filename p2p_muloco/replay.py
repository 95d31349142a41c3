"""Entries from whoever has them, in order and verified: how a peer that is behind gets level. Pure but for asking.

Entries are named by the chain, so any donor may serve them; the first one says where its chain ends.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from p2p_muloco.chain import Checked, Entry, Law, Tip, advance, check_entry
from p2p_muloco.errors import BadPacket, StateUnavailable
from p2p_muloco.requests import WantEntry
from p2p_muloco.snapshot import max_entry_bytes
from p2p_muloco.wire import Record

__all__ = ["FIRST_LATE_S", "JUDGED_AFTER_S", "LATE", "SOONEST_LATE_S", "TURN_S", "Asking", "AskingUntil", "fetch_entries",
           "needed_bytes_per_s", "require_pace"]

ENTRIES_AHEAD, ENTRIES_BYTES = 4, 64 * 2**20
JUDGED_AFTER_S = 10.0
TURN_S = 0.25  # between two looks of the loops
LATE, SOONEST_LATE_S = 2.0, 0.5  # of the usual time of a chunk: then a second donor is asked
FIRST_LATE_S = 2.0  # while no time is usual yet
FIRST_BYTES_PER_S = 1e6  # expected of a donor of entries that nothing is known of yet


class Asking(Protocol):
    """What is needed of an exchange."""

    @property
    def peer_id(self) -> bytes: ...

    def ask(self, donor: bytes, request: Record, max_bytes: int) -> int:
        """Ask a peer for stored bytes; returns a ticket at once."""

    def answers(self, timeout_s: float) -> list[tuple[int, bytes | str]]:
        """What came since: (ticket, bytes, or why there are none). Waits this long for the first."""

    def fetch(self, donor: bytes, request: Record, max_bytes: int) -> bytes:
        """Ask and wait; raise StateUnavailable."""

    def now(self) -> float: ...


@dataclass(frozen=True)
class AskingUntil:
    """The same, until this peer leaves: then there is nothing to be had."""

    net: Asking
    is_over: Callable[[], bool]

    @property
    def peer_id(self) -> bytes:
        return self.net.peer_id

    def ask(self, donor: bytes, request: Record, max_bytes: int) -> int:
        return self.net.ask(donor, request, max_bytes)

    def answers(self, timeout_s: float) -> list[tuple[int, bytes | str]]:
        self._check()
        return self.net.answers(timeout_s)

    def fetch(self, donor: bytes, request: Record, max_bytes: int) -> bytes:
        self._check()
        return self.net.fetch(donor, request, max_bytes)

    def now(self) -> float:
        return self.net.now()

    def _check(self) -> None:
        if self.is_over():
            raise StateUnavailable("this peer is leaving")


def needed_bytes_per_s(law: Law, tip: Tip) -> float:
    """Bytes a second of entries; 0 before the first."""
    return law.layout.down_bytes * 1e3 / tip.period_ms if tip.period_ms else 0.0


def require_pace(law: Law, tip: Tip, bytes_per_s: float) -> None:
    needed = needed_bytes_per_s(law, tip)
    if bytes_per_s < needed:
        raise StateUnavailable(
            f"entries reach this peer at {bytes_per_s * 8e-6:.2g} Mbit/s; this run needs at least {needed * 8e-6:.2g} Mbit/s "
            f"down (an entry of {law.layout.down_bytes / 1e6:.2g} MB every {tip.period_ms / 1e3:.2g} s)")


def fetch_entries(law: Law, net: Asking, donors: Sequence[bytes], tip: Tip) -> list[Checked]:
    """The entries after `tip` on the first donor's chain, until it has no more; verified in order, not yet applied.

    A few are asked for ahead, of any donor; where one can't serve an entry that holds, the first one is asked.
    Raise StateUnavailable if no donor answers, or if entries come slower than the swarm makes them.
    """
    return _Replay(law, net, donors, tip).run()


class _Replay:
    def __init__(self, law: Law, net: Asking, donors: Sequence[bytes], tip: Tip) -> None:
        self.law, self.net, self.tip = law, net, tip
        self._alive = [donor for donor in dict.fromkeys(donors) if donor != net.peer_id]  # the first is the one that is followed
        self._answers: dict[int, tuple[bytes, bytes]] = {}  # entry -> (donor, packed)
        self._tickets: dict[int, tuple[int, bytes]] = {}
        self._ahead = 1
        self._asked = tip.k
        self._asked_at = 0.0  # the last time, of the entry that is waited for
        self._waits_s: list[float] = []

    def run(self) -> list[Checked]:
        entries = []
        while (checked := self._next()) is not None:
            entries.append(checked)
            self.tip = advance(self.law, self.tip, checked)
            self._ahead = max(1, min(ENTRIES_AHEAD, ENTRIES_BYTES // max_entry_bytes(self.law)))
            if len(self._waits_s) > 4 and sum(self._waits_s) > JUDGED_AFTER_S:
                require_pace(self.law, self.tip, self.law.layout.down_bytes / max(self._usual_s(), 1e-3))
        return entries

    def _usual_s(self) -> float:
        return sorted(self._waits_s)[len(self._waits_s) // 2]

    def _patience_s(self) -> float:
        """A frozen donor keeps its connections for long."""
        if not self._waits_s:
            return FIRST_LATE_S + self.law.layout.down_bytes / FIRST_BYTES_PER_S
        return max(SOONEST_LATE_S, LATE * self._usual_s())

    def _next(self) -> Checked | None:
        """The entry after `tip`; None where the first donor has none, or one of another chain."""
        k = self.tip.k + 1
        while self._asked < self.tip.k + self._ahead:
            self._asked += 1
            self._ask(self._asked, self._alive[0] if self._ahead == 1 else min(self._alive, key=self._rank))
        began_at = self._asked_at = self.net.now()
        while True:
            donor, packed = self._wait(k)
            with contextlib.suppress(BadPacket):
                if packed:
                    checked = check_entry(self.law, self.tip, Entry.unpack(packed, max_entry_bytes(self.law)))
                    self._waits_s.append(self.net.now() - began_at)
                    return checked
            if donor == self._alive[0]:
                return None
            if packed and donor in self._alive:
                self._alive.remove(donor)  # of another chain
            self._ask(k, self._alive[0])

    def _rank(self, donor: bytes) -> bytes:
        return hashlib.sha256(self.net.peer_id + donor + self._asked.to_bytes(8, "big")).digest()

    def _ask(self, k: int, donor: bytes) -> None:
        self._asked_at = self.net.now()
        self._tickets[self.net.ask(donor, WantEntry(k), max_entry_bytes(self.law))] = k, donor

    def _wait(self, k: int) -> tuple[bytes, bytes]:
        """(donor, bytes) of an entry that was asked; a donor that fails is left, and another asked."""
        while k not in self._answers:
            for ticket, answer in self.net.answers(TURN_S):
                asked, donor = self._tickets.pop(ticket, (0, b""))
                if isinstance(answer, bytes):
                    if asked > self.tip.k:
                        self._answers.setdefault(asked, (donor, answer))
                elif asked:
                    if donor in self._alive:
                        self._alive.remove(donor)
                    if not self._alive:
                        raise StateUnavailable(answer)
                    self._ask(asked, self._alive[0])
            if k not in self._answers and self.net.now() > self._asked_at + self._patience_s():
                self._ask_another(k)
        return self._answers.pop(k)

    def _ask_another(self, k: int) -> None:
        """Whoever is late is asked no more, if there is another; if it was followed, the next one is."""
        late = {donor for asked, donor in self._tickets.values() if asked == k}
        self._asked_at = self.net.now()
        if others := [donor for donor in self._alive if donor not in late]:
            self._alive = others
            self._ask(k, others[0])
