"""The seam between trainer and network, and its in-memory twin.

An `Exchange` takes a packet and gives back how the attempt ended; the trainer knows nothing else of the network.
`LocalNetwork` joins any number of `Member`s in one process over real frames, with a virtual clock and faults as data,
so whatever holds here holds for the protocol; only sockets and processes are left to the hivemind edge.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from p2p_muloco.chain import Tip
from p2p_muloco.errors import BadPacket, StateUnavailable
from p2p_muloco.member import Behind, Committed, Failed, Member, Outcome
from p2p_muloco.messages import KINDS, Averaged, Parts
from p2p_muloco.packet import Packet
from p2p_muloco.snapshot import Store, serve
from p2p_muloco.wire import Record, read_frame, write_frame

__all__ = ["Behind", "Committed", "Exchange", "Failed", "Fault", "LocalExchange", "LocalNetwork", "Outcome", "Partition",
           "Traffic"]


@dataclass
class Traffic:
    """Bytes of all frames, heads included, since the peer began."""

    sent: int = 0
    received: int = 0


class Exchange(Protocol):
    """What a trainer needs of a network. No call blocks but `wait` and `fetch`."""

    peer_id: bytes

    @property
    def traffic(self) -> Traffic: ...

    def begin(self, packet: Packet) -> None:
        """Bring a packet into the next entry."""

    def withdraw(self) -> None:
        """Take the packet back if no attempt holds it yet."""

    def poll(self) -> Outcome | None:
        """How the attempt ended, or that somebody is ahead; None while neither is known."""

    def wait(self, timeout_s: float) -> Outcome | None:
        """`poll`, for at most this long."""

    def adopt(self, tip: Tip) -> None:
        """The trainer is at `tip` now, by catching up."""

    def distrust(self, peer: bytes) -> None: ...

    def fetch(self, donor: bytes, request: Record, max_bytes: int) -> bytes:
        """Ask one peer for stored bytes; raise StateUnavailable."""

    def waiting_for(self) -> str:
        """One line for people, or ''."""

    def now(self) -> float:
        """Seconds of this exchange's clock."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong: with the `nth` message that `peer` sends (from 0), counted over the whole run.

    kill: the peer is gone from then on; the others learn of it by broken connections.
    freeze: the peer does nothing for `seconds`, then goes on.     delay: the message takes `seconds` longer.
    drop: the message vanishes.   corrupt: one byte of it is flipped.   duplicate: it arrives twice, `seconds` apart.
    """

    kind: str
    peer: int
    nth: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Partition:
    """From `begin_s` to `end_s` nothing crosses between the members in `side` (in order of their adding) and the others."""

    begin_s: float
    end_s: float
    side: frozenset[int]


@dataclass(order=True)
class _Event:
    at: float
    order: int
    to: bytes = field(compare=False)
    sender: bytes = field(compare=False)
    frame: bytes | None = field(compare=False)  # None: the connection to `sender` broke


class LocalNetwork:
    """Members in one process. `choose` may pick which of the pending events comes next, to explore interleavings."""

    def __init__(self, latency_s: float = 0.01, faults: Sequence[Fault] = (), choose: Callable[[int], int] | None = None,
                 partitions: Sequence[Partition] = (), upload_bytes_per_s: float = math.inf) -> None:
        """`upload_bytes_per_s`: of each member, for packets and averages; other messages are small and overtake them."""
        self.now = 0.0
        self.partitions, self.upload_bytes_per_s = partitions, upload_bytes_per_s
        self._sent_until: dict[bytes, float] = {}
        self._wakes: dict[bytes, float | None] = {}  # what members said since something happened to them
        self.latency_s, self.faults, self._choose = latency_s, list(faults), choose
        self.members: dict[bytes, Member] = {}
        self.traffic: dict[bytes, Traffic] = {}
        self.stores: dict[bytes, Store] = {}
        self._index: dict[bytes, int] = {}
        self._sent: dict[bytes, int] = {}
        self._frozen: dict[bytes, float] = {}
        self._dead: set[bytes] = set()
        self._events: list[_Event] = []
        self._order = itertools.count()

    def add(self, member: Member) -> None:
        self._dead.discard(member.me)
        self.members[member.me] = member
        self._index.setdefault(member.me, len(self._index))
        self._sent.setdefault(member.me, 0)
        self.traffic.setdefault(member.me, Traffic())
        for one in self.alive():
            one.set_roster([other.me for other in self.alive()], self.now)
            self.flush(one)

    def alive(self) -> list[Member]:
        return [member for peer, member in self.members.items() if peer not in self._dead]

    def is_dead(self, peer: bytes) -> bool:
        return peer in self._dead

    def is_cut(self, one: bytes, other: bytes) -> bool:
        """Whether a partition lies between two members now."""
        pair = self._index.get(one, -1), self._index.get(other, -1)
        return any(p.begin_s <= self.now < p.end_s and (pair[0] in p.side) != (pair[1] in p.side) for p in self.partitions)

    def is_frozen(self, peer: bytes) -> bool:
        return self._frozen.get(peer, 0.0) > self.now

    def kill(self, peer: bytes) -> None:
        self._dead.add(peer)
        for member in self.alive():
            self._push(self.now + self.latency_s, member.me, peer, None)

    def flush(self, member: Member) -> None:
        """Put what a member wants to say on the wire: to be called after whatever is done to it."""
        self._wakes.pop(member.me, None)
        outbox, member.outbox = member.outbox, []
        for to, record in outbox:
            if member.me in self._dead:
                return
            self._send(member.me, to, b"".join(map(bytes, write_frame(record))))

    def _send(self, sender: bytes, to: bytes, frame: bytes) -> None:
        nth, at = self._sent[sender], max(self.now, self._frozen.get(sender, 0.0)) + self.latency_s
        self._sent[sender] += 1
        if self.is_cut(sender, to):
            return
        if math.isfinite(self.upload_bytes_per_s) and frame[4] in (Parts.KIND, Averaged.KIND):
            self._sent_until[sender] = max(self.now, self._sent_until.get(sender, 0.0)) + len(frame) / self.upload_bytes_per_s
            at = max(at, self._sent_until[sender] + self.latency_s)
        if to not in self.members or to in self._dead:
            self._push(at, sender, to, None)
            return
        for fault in self.faults:
            if (fault.peer, fault.nth) != (self._index[sender], nth):
                continue
            match fault.kind:
                case "kill":
                    return self.kill(sender)
                case "freeze":
                    self._frozen[sender] = self.now + fault.seconds
                    at += fault.seconds
                case "delay":
                    at += fault.seconds
                case "drop":
                    return
                case "corrupt":
                    place = (nth * 7919) % len(frame)
                    frame = frame[:place] + bytes([frame[place] ^ 0x55]) + frame[place + 1 :]
                case "duplicate":
                    self._push(at + fault.seconds, to, sender, frame)
        self.traffic[sender].sent += len(frame)
        self._push(at, to, sender, frame)

    def _push(self, at: float, to: bytes, sender: bytes, frame: bytes | None) -> None:
        heapq.heappush(self._events, _Event(at, next(self._order), to, sender, frame))

    def next_at(self) -> float | None:
        """When something happens next: a message arrives or a member's time has come."""
        times = [event.at for event in self._events[:1]]
        for peer in self.members.keys() - self._dead:
            if (at := self._wake_at(peer)) is not None:
                times.append(max(at, self._frozen.get(peer, 0.0)))
        return max(self.now, min(times)) if times else None

    def step(self, at: float | None = None) -> bool:
        """Let the next thing happen, at `next_at()`; False if nothing will."""
        at = self.next_at() if at is None else at
        if at is None:
            return False
        self.now = at
        if self._events and self._events[0].at <= at:
            plain = self._choose is None
            due = [] if plain else sorted(event for event in self._events if event.at <= at)
            self._deliver(heapq.heappop(self._events) if plain else self._pick(due))
        else:
            for member in self.alive():
                wake_at = self._wake_at(member.me)
                if wake_at is not None and wake_at <= at and self._frozen.get(member.me, 0.0) <= at:
                    member.on_time(at)
                    self.flush(member)
        return True

    def _wake_at(self, peer: bytes) -> float | None:
        if peer not in self._wakes:
            self._wakes[peer] = self.members[peer].wake_at
        return self._wakes[peer]

    def _pick(self, due: list[_Event]) -> _Event:
        assert self._choose is not None
        event = due[self._choose(len(due))]
        self._events.remove(event)
        heapq.heapify(self._events)
        return event

    def _deliver(self, event: _Event) -> None:
        if event.to in self._dead or event.to not in self.members:
            return
        thawed_at = self._frozen.get(event.to, 0.0)
        if thawed_at > self.now:
            self._push(thawed_at, event.to, event.sender, event.frame)
            return
        member = self.members[event.to]
        if event.frame is None:
            member.gone(event.sender, self.now)
        else:
            self.traffic[event.to].received += len(event.frame)
            try:
                member.deliver(event.sender, read_frame(event.frame, KINDS), self.now)
            except BadPacket:
                member.gone(event.sender, self.now)  # as a transport does: whoever breaks framing is cut off
        self.flush(member)

    def run(self, until: Callable[[], bool], limit_s: float = 3600.0) -> bool:
        """Let things happen until `until()`; False if time or events run out first."""
        end = self.now + limit_s
        self._wakes.clear()
        while not until():
            at = self.next_at()
            if at is None or at > end:
                return False
            self.step(at)
        return True

    def advance_to(self, at: float) -> None:
        """Let everything up to a moment happen."""
        self._wakes.clear()
        while (next_at := self.next_at()) is not None and next_at <= at:
            self.step(next_at)
        self.now = max(self.now, at)


class LocalExchange:
    """One member's exchange on a `LocalNetwork`."""

    def __init__(self, network: LocalNetwork, member: Member, store: Store | None = None) -> None:
        self.network, self.member = network, member
        self.peer_id = member.me
        network.add(member)
        if store is not None:
            network.stores[member.me] = store

    @property
    def traffic(self) -> Traffic:
        return self.network.traffic[self.peer_id]

    def begin(self, packet: Packet) -> None:
        self.member.begin(packet, self.network.now)
        self.network.flush(self.member)

    def withdraw(self) -> None:
        self.member.withdraw(self.network.now)
        self.network.flush(self.member)

    def poll(self) -> Outcome | None:
        return self.member.outcomes.pop(0) if self.member.outcomes else None

    def wait(self, timeout_s: float) -> Outcome | None:
        self.network.run(lambda: bool(self.member.outcomes), timeout_s)
        return self.poll()

    def adopt(self, tip: Tip) -> None:
        self.member.adopt(tip)
        self.network.flush(self.member)

    def distrust(self, peer: bytes) -> None:
        self.member.distrust(peer, self.network.now)
        self.network.flush(self.member)

    def fetch(self, donor: bytes, request: Record, max_bytes: int) -> bytes:
        store = self.network.stores.get(donor)
        if store is None or self.network.is_dead(donor) or self.network.is_cut(self.peer_id, donor):
            raise StateUnavailable("the donor can't be reached")
        answer = serve(store, request, store.config_bytes)
        if len(answer) > max_bytes:
            raise StateUnavailable(f"the donor answers with {len(answer)} bytes; at most {max_bytes} are read")
        return answer

    def waiting_for(self) -> str:
        return self.member.waiting_for(self.network.now)

    def now(self) -> float:
        return self.network.now
