"""Taking the state from many donors at once. Pure but for the two loops at the end, which ask through an exchange.

Chunks are named by a manifest and entries by the chain, so whoever has them may serve them: the donor whose chain is
followed, and all it names. `Download` decides which chunk to ask of whom, and is told what came of it; `Uploads` is the other
side: what a donor serves beside its training. Joiners spread over the donors by hashing, so that no donor gets them all.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from p2p_muloco.chain import Checked, Entry, Law, Tip, advance, check_entry
from p2p_muloco.errors import BadPacket, StateUnavailable
from p2p_muloco.partial import Partial
from p2p_muloco.requests import BUSY, Manifest, WantChunk, WantEntry, fetch_manifest
from p2p_muloco.snapshot import State, max_entry_bytes
from p2p_muloco.wire import Record

__all__ = ["SLOWEST_BYTES_PER_S", "Asking", "AskingUntil", "Download", "Progress", "Uploads", "fetch_entries", "fetch_state"]

SLOWEST_BYTES_PER_S = 62_500  # of an answer: 0.5 Mbit/s, or another donor is asked

WIDTH = 2  # chunks in flight at one donor: the second fills the pause between two
AT_ONCE = 8  # in flight in all, those that are late not counted
FAILURES = 3  # in a row, after which a donor is gone
REST_S, LONGEST_REST_S = 0.25, 1.0  # of a donor that was busy or failed; doubled each time
LATE, SOONEST_LATE_S = 2.0, 0.5  # of the usual time of a chunk: then a second donor is asked
FIRST_LATE_S = 2.0  # while no time is usual yet
FIRST_BYTES_PER_S = 1e6  # expected of a donor of entries that nothing is known of yet
PACE_S = 10.0  # over which the rate is measured
TURN_S = 0.25  # between two looks of the loops
TELL_S = 0.5  # between two words about progress

STREAMS = 4  # of chunks that a donor serves at once
BURST_S = 0.1

ENTRIES_AHEAD, ENTRIES_BYTES = 4, 64 * 2**20
JUDGED_AFTER_S = 10.0


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


@dataclass(frozen=True)
class Progress:
    """Of a download: bytes that are here and verified, of how many, how many donors serve, and seconds left if known."""

    bytes: int
    of: int
    donors: int
    seconds_left: float | None


@dataclass
class _Donor:
    width: int = WIDTH  # chunks in flight; less once it was busy with ours
    failures: int = 0  # in a row
    busy: int = 0  # answers in a row
    rests_until: float = -math.inf
    gone: str = ""  # why it is never asked again


class Download:
    """A manifest's chunks from several donors: `asks` says what to ask of whom, `answered` and `failed` what came of it."""

    def __init__(self, me: bytes, manifest: Manifest, donors: Iterable[bytes], held: Iterable[int] = ()) -> None:
        self.me, self.manifest = me, manifest
        self.held = set(held)
        self._donors = {donor: _Donor() for donor in donors if donor != me}
        self._wanted = collections.deque(i for i in range(len(manifest.digests)) if i not in self.held)
        self._flying: dict[tuple[bytes, int], float] = {}  # (donor, chunk) -> when it was asked
        self._took_s: collections.deque[float] = collections.deque(maxlen=15)
        self._came: collections.deque[tuple[float, int]] = collections.deque()
        self._bytes = sum(map(manifest.length, self.held))
        self._began_at: float | None = None

    @property
    def done(self) -> bool:
        return len(self.held) == len(self.manifest.digests)

    @property
    def trouble(self) -> str:
        """Why this can't go on: all donors are gone; '' while it can."""
        if self.done or not all(donor.gone for donor in self._donors.values()):
            return ""
        reasons = sorted({donor.gone for donor in self._donors.values()})
        return f"none of {len(self._donors)} donors has the rest of the state: {'; '.join(reasons)}"

    def asks(self, now: float) -> list[tuple[bytes, int]]:
        """(donor, chunk) to ask now; they count as asked."""
        self._began_at = now if self._began_at is None else self._began_at
        asks = []
        while not self.done and (ask := self._next(now)) is not None:
            self._flying[ask] = now
            asks.append(ask)
        return asks

    def _next(self, now: float) -> tuple[bytes, int] | None:
        load = collections.Counter(donor for donor, _ in self._flying)
        free = [peer for peer, d in self._donors.items() if not d.gone and load[peer] < d.width and d.rests_until <= now]
        asked_at = {index: at for (_, index), at in self._flying.items() if index not in self.held}  # the last time, of each
        late = [index for index, at in asked_at.items() if now > at + self._patience_s()]
        if self._wanted:
            if not free or len(asked_at) - len(late) >= AT_ONCE:
                return None
            index = self._wanted.popleft()
            return min(free, key=lambda peer: self._rank(peer, index)), index
        for index in late:
            others = [peer for peer in free if (peer, index) not in self._flying]
            if others:
                return min(others, key=lambda peer: self._rank(peer, index)), index
        return None

    def _rank(self, donor: bytes, index: int) -> bytes:
        """Rendezvous hashing: each joiner has its own order of donors for each chunk."""
        return hashlib.sha256(self.me + donor + index.to_bytes(4, "big")).digest()

    def _patience_s(self) -> float:
        if not self._took_s:
            return FIRST_LATE_S
        return max(SOONEST_LATE_S, LATE * sorted(self._took_s)[len(self._took_s) // 2])

    def answered(self, donor: bytes, index: int, data: bytes, now: float) -> bool:
        """True if these bytes are a chunk that was not here yet: keep them. Whoever lies is never asked again."""
        state, asked_at = self._donors[donor], self._land(donor, index)
        if self.manifest.holds(index, data):
            state.failures = state.busy = 0
            state.rests_until = now
            self._took_s.append(now - asked_at)
            return self._take(index, len(data), now)
        if data == BUSY:
            ours = sum(serving == donor for serving, _ in self._flying)
            state.busy += 1
            state.width = max(1, min(state.width, ours))
            state.rests_until = now if ours else now + _rest_s(state.busy)
        else:
            state.gone = "a chunk is not what the manifest says" if data else "they hold another one"
        self._want_again(index)
        return False

    def failed(self, donor: bytes, index: int, reason: str, now: float) -> None:
        """There is no answer: the connection broke, or time was up."""
        state = self._donors[donor]
        self._land(donor, index)
        state.failures += 1
        state.rests_until = now + _rest_s(state.failures)
        if state.failures >= FAILURES:
            state.gone = reason
        self._want_again(index)

    def _land(self, donor: bytes, index: int) -> float:
        return self._flying.pop((donor, index))

    def _want_again(self, index: int) -> None:
        if index not in self.held and all(flying != index for _, flying in self._flying):
            self._wanted.appendleft(index)

    def _take(self, index: int, size: int, now: float) -> bool:
        if index in self.held:
            return False
        self.held.add(index)
        self._bytes += size
        self._came.append((now, size))
        return True

    def rate(self, now: float) -> float:
        """Bytes a second of the last `PACE_S`, or since the beginning."""
        while self._came and self._came[0][0] < now - PACE_S:
            self._came.popleft()
        seconds = min(PACE_S, now - self._began_at) if self._began_at is not None else 0.0
        return sum(size for _, size in self._came) / seconds if seconds > 0 else 0.0

    def progress(self, now: float) -> Progress:
        rate, serving = self.rate(now), len({donor for donor, _ in self._flying})
        return Progress(self._bytes, self.manifest.size, serving, (self.manifest.size - self._bytes) / rate if rate else None)


def _rest_s(times: int) -> float:
    return float(min(LONGEST_REST_S, REST_S * 2 ** (times - 1)))


class Uploads:
    """The donor's side: at most `STREAMS` chunks at once, and a token bucket over them, so that exchanges keep their share."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._most = int(min(STREAMS, max(1.0, bytes_per_s / SLOWEST_BYTES_PER_S)))
        self._streams = 0
        self._spent_until = -math.inf

    def begin(self) -> bool:
        """Whether one more chunk may be served now; `end` it then."""
        admitted = self._streams < self._most
        self._streams += admitted
        return admitted

    def end(self) -> None:
        self._streams -= 1
        assert self._streams >= 0

    def wait_s(self, n_bytes: int, now: float) -> float:
        """How long to wait before these bytes are sent."""
        self._spent_until = max(self._spent_until, now - BURST_S) + n_bytes / self._bytes_per_s
        return max(0.0, self._spent_until - now)


# -- the loops


def fetch_state(law: Law, net: Asking, theirs: Tip, donors: Sequence[bytes], folder: Path,
                progress: Callable[[Progress], None]) -> State:
    """The state that the first donor, who stands at `theirs`, has pinned, from all of them; `folder` keeps what has come.

    Raise StateUnavailable if nobody has it or this link can't keep up with the run, BadPacket if it breaks a rule, DiskFull.
    """
    partial = Partial(folder, fetch_manifest(law, net.fetch, donors[0]))
    try:
        _fill(law, net, donors, theirs, partial, progress)
    finally:
        partial.close()
    return partial.read(law)


def _fill(law: Law, net: Asking, donors: Sequence[bytes], theirs: Tip, partial: Partial,
          progress: Callable[[Progress], None]) -> None:
    manifest = partial.manifest
    download = Download(net.peer_id, manifest, donors, partial.held())
    tickets: dict[int, tuple[bytes, int]] = {}
    began_at, told_at, judged = net.now(), -math.inf, not theirs.period_ms
    while not download.done:
        suspect = not judged and net.now() > began_at + JUDGED_AFTER_S and download.rate(net.now()) < _needed(law, theirs)
        if suspect and not tickets:  # chunks may be slow because their donors are busy; entries are not
            judged = True
            _judge_link(law, net, donors[0], theirs)
        for donor, index in [] if suspect and not judged else download.asks(net.now()):
            request = WantChunk(manifest.k, index, manifest.digests[index])
            tickets[net.ask(donor, request, max(len(BUSY), manifest.length(index)))] = donor, index
        for ticket, answer in net.answers(TURN_S):
            if ticket not in tickets:
                continue  # of an earlier download
            donor, index = tickets.pop(ticket)
            if isinstance(answer, str):
                download.failed(donor, index, answer, net.now())
            elif download.answered(donor, index, answer, net.now()):
                partial.write(index, answer)
        if download.done or net.now() >= told_at + TELL_S:
            told_at = net.now()
            progress(download.progress(told_at))
        if download.trouble:
            raise StateUnavailable(download.trouble)


def _needed(law: Law, tip: Tip) -> float:
    """Bytes a second of entries; 0 before the first."""
    return law.layout.down_bytes * 1e3 / tip.period_ms if tip.period_ms else 0.0


def _judge_link(law: Law, net: Asking, donor: bytes, theirs: Tip) -> None:
    """Take one entry, with nothing else on the way: it must not take longer than the swarm takes to make the next."""
    began_at = net.now()
    packed = net.fetch(donor, WantEntry(theirs.k), max_entry_bytes(law))
    if packed:
        _require_pace(law, theirs, len(packed) / max(1e-3, net.now() - began_at))


def _require_pace(law: Law, tip: Tip, bytes_per_s: float) -> None:
    needed = _needed(law, tip)
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
                _require_pace(self.law, self.tip, self.law.layout.down_bytes / max(self._usual_s(), 1e-3))
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
