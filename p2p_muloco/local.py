"""The exchange in memory: any number of `Member`s in one process, over real frames, on a virtual clock, with faults as data.

Whatever holds here holds for the protocol; only sockets and processes are left to the hivemind edge.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from p2p_muloco.chain import CLIENT, Tip
from p2p_muloco.errors import BadPacket, StateUnavailable
from p2p_muloco.exchange import Committed, Outcome, Traffic
from p2p_muloco.member import Member
from p2p_muloco.messages import KINDS, Averaged, Parts
from p2p_muloco.packet import Packet
from p2p_muloco.requests import BUSY, WantChunk, WantEntry, serve
from p2p_muloco.snapshot import Store
from p2p_muloco.transfer import Uploads
from p2p_muloco.waypoint import Waypoint
from p2p_muloco.wire import Record, read_frame, write_frame

__all__ = ["Fault", "Link", "LocalExchange", "LocalNetwork", "Partition"]


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


@dataclass(frozen=True)
class Link:
    """Of one member: rates for packets, averages and states; other messages are small and overtake them."""

    upload_bytes_per_s: float = math.inf
    download_bytes_per_s: float = math.inf
    latency_s: float = 0.005  # to the middle of the network


@dataclass(order=True)
class _Event:
    at: float
    order: int
    to: bytes = field(compare=False)
    sender: bytes = field(compare=False)
    frame: bytes | None = field(compare=False)  # None: the connection to `sender` broke


@dataclass
class _Fetch:
    """A question for stored bytes; `answer` hears once how it ended."""

    asker: bytes
    donor: bytes
    request: Record
    answer: Callable[[bytes | str], None]
    ended: bool = False

    def end(self, answer: bytes | str) -> None:
        if not self.ended:
            self.ended = True
            self.answer(answer)


class LocalNetwork:
    """Members in one process. `choose` may pick which of the pending events comes next, to explore interleavings."""

    def __init__(self, latency_s: float = 0.01, faults: Sequence[Fault] = (), choose: Callable[[int], int] | None = None,
                 partitions: Sequence[Partition] = (), upload_bytes_per_s: float = math.inf) -> None:
        """`latency_s` between two and `upload_bytes_per_s` hold for members without a link of their own in `links`."""
        self.now = 0.0
        self.partitions = partitions
        self.links: dict[bytes, Link] = {}
        self._usual = Link(upload_bytes_per_s, math.inf, latency_s / 2)
        self.behind_nat: set[bytes] = set()  # members that only those can reach whom they have reached before
        self._connected: set[tuple[bytes, bytes]] = set()
        self._sent_until: dict[bytes, float] = {}
        self._received_until: dict[bytes, float] = {}
        self._wakes: dict[bytes, float | None] = {}  # what members said since something happened to them
        self.faults, self._choose = list(faults), choose
        self.members: dict[bytes, Member] = {}
        self.traffic: dict[bytes, Traffic] = {}
        self.stores: dict[bytes, Store] = {}
        self.uploads: dict[bytes, Uploads] = {}
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._fetches: list[_Fetch] = []
        self._index: dict[bytes, int] = {}
        self._sent: dict[bytes, int] = {}
        self._frozen: dict[bytes, float] = {}
        self._dead: set[bytes] = set()
        self._events: list[_Event] = []
        self._order = itertools.count()

    def number(self, peer: bytes) -> int:
        """By which faults and partitions name it: in order of the first mention."""
        return self._index.setdefault(peer, len(self._index))

    def add(self, member: Member) -> None:
        self._dead.discard(member.me)
        self.members[member.me] = member
        self.number(member.me)
        self._sent.setdefault(member.me, 0)
        self.traffic.setdefault(member.me, Traffic())
        for one in self.alive():
            alive = self.alive()
            one.set_roster([other.me for other in alive], self.now, [other.me for other in alive if other.mode == CLIENT])
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
        for fetch in self._fetches:
            if fetch.donor == peer:
                heard_at = self.now + self._latency_s(peer, fetch.asker)
                self.call_at(heard_at, functools.partial(fetch.end, "the connection broke"))
        for member in self.alive():
            self._push(self.now + self._latency_s(peer, member.me), member.me, peer, None)

    def freeze(self, peer: bytes, seconds: float) -> None:
        """Its process stands still; what comes meanwhile waits."""
        self._frozen[peer] = self.now + seconds

    def thaws_at(self, peer: bytes) -> float:
        return self._frozen.get(peer, 0.0)

    def _link(self, peer: bytes) -> Link:
        return self.links.get(peer, self._usual)

    def _latency_s(self, one: bytes, other: bytes) -> float:
        return self._link(one).latency_s + self._link(other).latency_s

    def _through(self, sender: bytes, to: bytes, size: int, begins_at: float) -> float:
        """When so many bytes have arrived: each link carries one transfer after the other."""
        sent_at = max(begins_at, self._sent_until.get(sender, 0.0)) + size / self._link(sender).upload_bytes_per_s
        self._sent_until[sender] = sent_at
        came_at = max(sent_at + self._latency_s(sender, to), self._received_until.get(to, 0.0))
        if math.isfinite(rate := self._link(to).download_bytes_per_s):
            first_at = sent_at + self._latency_s(sender, to) - size / self._link(sender).upload_bytes_per_s
            came_at = max(came_at, max(first_at, self._received_until.get(to, 0.0)) + size / rate)
            self._received_until[to] = came_at
        return came_at

    def flush(self, member: Member) -> None:
        """Put what a member wants to say on the wire: to be called after whatever is done to it."""
        self._wakes.pop(member.me, None)
        outbox, member.outbox = member.outbox, []
        for to, record in outbox:
            if member.me in self._dead:
                return
            self._send(member.me, to, b"".join(map(bytes, write_frame(record))))

    def _send(self, sender: bytes, to: bytes, frame: bytes) -> None:
        nth, at = self._sent[sender], max(self.now, self._frozen.get(sender, 0.0)) + self._latency_s(sender, to)
        self._sent[sender] += 1
        if self.is_cut(sender, to):
            return
        if frame[4] in (Parts.KIND, Averaged.KIND):
            at = max(at, self._through(sender, to, len(frame), self.now))
        if to not in self.members or to in self._dead or not self._can_dial(sender, to):
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

    def _can_dial(self, one: bytes, other: bytes) -> bool:
        """Whether there is a connection, or can be one from now on."""
        if other not in self.behind_nat:
            self._connected |= {(one, other), (other, one)}
        return (one, other) in self._connected

    def _push(self, at: float, to: bytes, sender: bytes, frame: bytes | None) -> None:
        heapq.heappush(self._events, _Event(at, next(self._order), to, sender, frame))

    def call_at(self, at: float, act: Callable[[], None]) -> None:
        """Let something that is no message happen at a moment."""
        heapq.heappush(self._calls, (max(at, self.now), next(self._order), act))

    def ask(self, fetch: _Fetch) -> None:
        """There, served as a peer serves, and back."""
        self._fetches = [other for other in self._fetches if not other.ended] + [fetch]
        self.call_at(self.now + self._latency_s(fetch.asker, fetch.donor), lambda: self._serve(fetch))

    def _serve(self, fetch: _Fetch) -> None:
        donor, back_at = fetch.donor, self.now + self._latency_s(fetch.donor, fetch.asker)
        store, uploads = self.stores.get(donor), self.uploads.setdefault(donor, Uploads(math.inf))
        if store is None or donor in self._dead or self.is_cut(fetch.asker, donor) or not self._can_dial(fetch.asker, donor):
            return self.call_at(back_at, lambda: fetch.end("the donor can't be reached"))
        if self.is_frozen(donor):
            return self.call_at(self._frozen[donor], lambda: self._serve(fetch))
        is_chunk = isinstance(fetch.request, WantChunk)
        if is_chunk and not uploads.begin():
            return self.call_at(back_at, lambda: fetch.end(BUSY))
        data = serve(store, fetch.request, store.config_bytes) or self._uncommitted(donor, fetch.request)
        allowed_at = self.now + (uploads.wait_s(len(data), self.now) if is_chunk else 0.0)
        arrives_at = max(allowed_at, self._through(donor, fetch.asker, len(data), self.now))

        def arrived() -> None:
            if is_chunk:
                uploads.end()
            heard_at = max(self.now, self._frozen.get(donor, 0.0))
            self.call_at(heard_at, lambda: fetch.end("the connection broke" if self.is_cut(fetch.asker, donor) else data))

        self.call_at(arrives_at, arrived)

    def _uncommitted(self, donor: bytes, request: Record) -> bytes:
        """An entry that the donor's member has and its trainer has not written yet."""
        for outcome in self.members[donor].outcomes if donor in self.members else ():
            if isinstance(outcome, Committed) and isinstance(request, WantEntry) and outcome.checked.k == request.k:
                return outcome.checked.entry.pack()
        return b""

    def next_at(self) -> float | None:
        """When something happens next: a message arrives or a member's time has come."""
        times = [event.at for event in self._events[:1]] + [at for at, _, _ in self._calls[:1]]
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
        if self._calls and self._calls[0][0] <= at:
            heapq.heappop(self._calls)[2]()
        elif self._events and self._events[0].at <= at:
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

    def wait(self, until: Callable[[], bool], timeout_s: float) -> None:
        """As `run`, and time goes by where nothing happens."""
        end = self.now + timeout_s
        if not self.run(until, timeout_s):
            self.now = max(self.now, end)

    def advance_to(self, at: float) -> None:
        """Let everything up to a moment happen."""
        self._wakes.clear()
        while (next_at := self.next_at()) is not None and next_at <= at:
            self.step(next_at)
        self.now = max(self.now, at)


class LocalExchange:
    """One member's exchange on a `LocalNetwork`."""

    def __init__(self, network: LocalNetwork, member: Member, store: Store | None = None,
                 serve_bytes_per_s: float = math.inf) -> None:
        """`serve_bytes_per_s`: of chunks of its pinned states."""
        self.network, self.member = network, member
        self._tickets, self._answers = itertools.count(), dict[int, bytes | str]()
        self.peer_id = member.me
        network.add(member)
        if store is not None:
            network.stores[member.me] = store
            network.uploads[member.me] = Uploads(serve_bytes_per_s)

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

    def show_waypoint(self, waypoint: Waypoint) -> None:
        self.member.show_waypoint(waypoint)
        self.network.flush(self.member)

    def ask(self, donor: bytes, request: Record, max_bytes: int) -> int:
        ticket = next(self._tickets)

        def answer(data: bytes | str) -> None:
            fits = isinstance(data, str) or len(data) <= max_bytes
            self._answers[ticket] = data if fits else f"{len(data)} bytes are the answer; at most {max_bytes} are read"

        self.network.ask(_Fetch(self.peer_id, donor, request, answer))
        return ticket

    def answers(self, timeout_s: float) -> list[tuple[int, bytes | str]]:
        self.network.wait(lambda: bool(self._answers), timeout_s)
        answers, self._answers = self._answers, {}
        return list(answers.items())

    def fetch(self, donor: bytes, request: Record, max_bytes: int) -> bytes:
        ticket = self.ask(donor, request, max_bytes)
        self.network.run(lambda: ticket in self._answers)
        answer = self._answers.pop(ticket, "the network stands still")
        if isinstance(answer, str):
            raise StateUnavailable(answer)
        return answer

    def waiting_for(self) -> str:
        return self.member.waiting_for(self.network.now)

    def now(self) -> float:
        return self.network.now
