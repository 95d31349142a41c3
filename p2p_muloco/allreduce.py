"""One attempt at one entry: a compressed butterfly all-reduce as a state machine over messages.

No sockets, no clock of its own: `on_message`, `on_gone` and `on_time` are called with the time, `outbox` says what to
send, `wake_at` when to call again, `result` how it ended.

    scatter  each member sends parts of its packet to the member that reduces them
    gather   each reducer sends its averaged bytes, encoded once, and a signed record of them
    confirm  members compare roots; who lacks a span whose reducer is lost asks members who may hold it
    commit   all spans are held under one root, and every member has confirmed it, gave up, is gone, or time is up

Why nobody differs: a span has one signed record; two versions of it void the attempt. Who gives up while the others
commit learns of it before it commits anything else, because a leader asks all members first (member.py). And nobody
commits alone what all others who answer gave up: they may be about to agree on something else.

Cost for a member: 2 (n-1)/n of a packet each way, whatever n; plus about 1 kB a member for lists and records.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from p2p_muloco.chain import (
    Checked,
    CheckedStart,
    Entry,
    Law,
    Signed,
    Span,
    Tip,
    check_averaged,
    check_record,
    root_of,
)
from p2p_muloco.errors import BadPacket
from p2p_muloco.identity import Identity
from p2p_muloco.messages import (
    FRAME_BYTES,
    Abandon,
    Averaged,
    Confirm,
    Fetch,
    Lacking,
    Parts,
    RecordMessage,
)
from p2p_muloco.reduce import BROKE_RULE, TOO_LATE, VANISHED, SpanReducer
from p2p_muloco.wire import Record

__all__ = ["Attempt", "Lost"]


@dataclass(frozen=True)
class Lost:
    """An attempt that ended without an entry; the state is as it was."""

    reason: str
    suspects: frozenset[bytes] = frozenset()


class HeldSpan:
    """What this member holds of one span: encoded averaged parts, and the reducer's record."""

    def __init__(self, law: Law, span: Span) -> None:
        self.law, self.span = law, span
        self.source: bytes | None = span.reducer  # the only member it is taken from
        self.asked: set[bytes] = set()
        self.record: Signed | None = None
        self.data: bytes | None = None  # once whole and checked
        self._parts: dict[int, bytes] = {}

    def add(self, first: int, stop: int, data: bytes | memoryview) -> None:
        if self.span.first <= first < stop <= self.span.stop:
            for part, piece in enumerate(self.law.layout.down_parts(first, stop, data), start=first):
                self._parts.setdefault(part, bytes(piece))

    def settle(self, start: CheckedStart) -> bool:
        """True if the span has just become whole; raise BadPacket if its bytes are not those that were signed."""
        if self.data is not None or self.record is None or len(self._parts) < self.span.n_parts:
            return False
        data = b"".join(self._parts[part] for part in range(self.span.first, self.span.stop))
        if hashlib.sha256(data).digest() != check_record(start, self.record).digest:
            raise BadPacket(f"span {self.span.index} is not what its reducer signed")
        check_averaged(self.law, self.span, data)
        self.data, self._parts = data, {}
        return True

    def forget(self) -> None:
        self.source, self.record, self._parts = None, None, {}


class Attempt:
    """This peer's side of one attempt. `start` is checked and holds this peer; `payload` is its whole packet."""

    def __init__(self, law: Law, identity: Identity, tip: Tip, start: CheckedStart, payload: bytes, now: float) -> None:
        self.law, self.identity, self.tip, self.start, self.payload = law, identity, tip, start, payload
        self.me = identity.peer_id
        self.others = [peer for peer in start.members if peer != self.me]
        limits = start.start
        self.scatter_at = now + limits.scatter_ms / 1e3
        self.gather_at = now + limits.gather_ms / 1e3
        self.confirm_at = now + limits.confirm_ms / 1e3
        self.outbox: list[tuple[bytes, Record]] = []
        self.result: Checked | Lost | None = None
        self.held = [HeldSpan(law, span) for span in start.spans]
        self.reducers = {s.index: SpanReducer(law, start, s) for s in start.spans if s.reducer == self.me}
        self._gone: set[bytes] = set()  # the transport says so
        self._left: set[bytes] = set()  # gave up, or broke a rule
        self._roots: dict[bytes, bytes] = {}
        self._root: bytes | None = None
        self._showed: set[bytes] = set()
        self._scatter()
        self._settle(now)

    # -- what happens to it

    def on_message(self, sender: bytes, message: Record, now: float) -> None:
        if sender not in self.others:
            return
        if self.result is not None:
            if isinstance(self.result, Checked) and isinstance(message, Fetch) and message.span < len(self.held):
                self._send_span(sender, self.held[message.span])  # a straggler may still finish by itself
            return
        try:
            match message:
                case Parts():
                    self._on_parts(sender, message)
                case Averaged() if message.span < len(self.held):
                    held = self.held[message.span]
                    if sender == held.source and held.data is None:
                        held.add(message.first, message.stop, message.data)
                case RecordMessage():
                    self._on_record(sender, Signed(message.body, message.signature))
                case Confirm():
                    self._roots[sender] = message.root
                case Fetch() if message.span < len(self.held):
                    self._on_fetch(sender, self.held[message.span])
                case Lacking() if message.span < len(self.held):
                    if self.held[message.span].source == sender:
                        self._seek(self.held[message.span])
                case Abandon():
                    self._left.add(sender)
                    self._lose(sender, VANISHED)
        except BadPacket:
            self._left.add(sender)
            self._lose(sender, BROKE_RULE)
        self._settle(now)

    def on_gone(self, peer: bytes, now: float) -> None:
        if self.result is None and peer in self.others:
            self._gone.add(peer)
            self._lose(peer, VANISHED)
            self._settle(now)

    def on_regrouping(self, peer: bytes, now: float) -> None:
        """A member gathers at this head, so it is not in here; with the leader lost, START did not reach everybody.

        The leader gathered before its START, and that word may come late: when it gives up it says so itself.
        """
        if peer == self.start.start.leader:
            return
        self.on_message(peer, Abandon(self.start.group), now)
        if self._root is None and self.start.start.leader in self._gone | self._left:
            self.abandon("its leader is lost and others gather anew")

    def on_time(self, now: float) -> None:
        if self.result is None and now >= self.scatter_at:
            for reducer in self.reducers.values():
                for member in reducer.missing():
                    reducer.close(member, TOO_LATE)
        if self.result is None and now >= self.gather_at:
            for held in self.held:
                if held.data is None and held.source == held.span.reducer:
                    self._seek(held)
        self._settle(now)
        if self.result is None and now >= self.confirm_at:
            self.decide()

    def decide(self) -> None:
        """End it now: with the entry if every span is held, else without."""
        if self.result is not None:
            return
        if self._root is None:
            lacking = [held.span.reducer for held in self.held if held.data is None]
            self.abandon("not all averaged spans arrived in time", frozenset(lacking) - {self.me})
        elif self._left and self._root not in self._roots.values():
            self.abandon("nobody else confirmed it, and not all are gone")
        else:
            self._commit()

    def abandon(self, reason: str, suspects: frozenset[bytes] = frozenset()) -> None:
        if self.result is None:
            self.result = Lost(reason, suspects)
            self.outbox += [(peer, Abandon(self.start.group)) for peer in self.others]

    @property
    def wake_at(self) -> float | None:
        if self.result is not None:
            return None
        if any(reducer.missing() for reducer in self.reducers.values()):
            return self.scatter_at
        if any(held.data is None and held.source == held.span.reducer for held in self.held):
            return self.gather_at
        return self.confirm_at

    def progress(self) -> str:
        """For people: what it waits for."""
        spans = sum(held.data is not None for held in self.held)
        if self._root is None:
            return f"averaging with {len(self.others)} peers: {spans} of {len(self.held)} spans"
        agreeing = 1 + sum(root == self._root for root in self._roots.values())
        return f"confirming: {agreeing} of {len(self.start.members)} agree"

    # -- what it does

    def _scatter(self) -> None:
        for span in self.start.spans:
            for first, stop in self.law.layout.frames(self.law.layout.up_offsets, span.first, span.stop, FRAME_BYTES):
                data = self.law.layout.up_slice(self.payload, first, stop)
                if span.reducer == self.me:
                    self.reducers[span.index].add(self.start.members.index(self.me), first, stop, data)
                else:
                    self.outbox.append((span.reducer, Parts(self.start.group, first, stop, data)))

    def _on_parts(self, sender: bytes, message: Parts) -> None:
        for reducer in self.reducers.values():
            if reducer.span.first <= message.first < reducer.span.stop:
                reducer.add(self.start.members.index(sender), message.first, message.stop, message.data)

    def _on_record(self, sender: bytes, signed: Signed) -> None:
        record = check_record(self.start, signed)
        held = self.held[record.span]
        if held.record is not None and held.record.body != signed.body:
            reducer = held.span.reducer
            self.abandon(f"the reducer of span {record.span} signed two versions of it", frozenset([reducer]))
        elif sender == held.source:
            held.record = signed

    def _on_fetch(self, sender: bytes, held: HeldSpan) -> None:
        if held.data is not None and held.record is not None:
            self._send_span(sender, held)
        else:
            self.outbox.append((sender, Lacking(self.start.group, held.span.index)))

    def _lose(self, peer: bytes, reason: int) -> None:
        """A member is gone, gave up or broke a rule: nothing more is expected of it."""
        for reducer in self.reducers.values():
            reducer.close(self.start.members.index(peer), reason)
        for held in self.held:
            if held.data is None and held.source == peer:
                self._seek(held)

    def _seek(self, held: HeldSpan) -> None:
        """Ask the next member for a span whose source is lost; give up when nobody is left to ask."""
        held.forget()
        left = [p for p in self.others if p not in self._gone | self._left | held.asked and p != held.span.reducer]
        left.sort(key=lambda peer: peer not in self._roots)  # who confirmed holds it
        if held.span.reducer == self.me or not left:
            self.abandon(f"span {held.span.index} is lost with its reducer", frozenset([held.span.reducer]) - {self.me})
            return
        held.source = left[0]
        held.asked.add(left[0])
        self.outbox.append((left[0], Fetch(self.start.group, held.span.index)))

    def _settle(self, now: float) -> None:
        """Whatever has become possible: publish averaged parts, settle spans, confirm, commit."""
        if self.result is not None:
            return
        for reducer in self.reducers.values():
            self._publish(reducer)
        for held in self.held:
            try:
                held.settle(self.start)
            except BadPacket:
                self._seek(held)
            if self.result is not None:
                return
        if self._root is None and all(held.data is not None for held in self.held):
            self._root = root_of([held.record for held in self.held if held.record])
            self.outbox += [(peer, Confirm(self.start.group, self._root)) for peer in self.others]
        if self._root is not None:
            self._compare()
            waited_for = set(self.others) - self._gone - self._left
            if all(self._roots.get(peer) == self._root for peer in waited_for):
                self.decide()

    def _publish(self, reducer: SpanReducer) -> None:
        held, span = self.held[reducer.span.index], reducer.span
        for first, stop, data in reducer.take():
            held.add(first, stop, data)
            self.outbox += [(peer, Averaged(self.start.group, span.index, first, stop, data)) for peer in self.others]
        if reducer.finished and held.record is None:
            record = reducer.record(hashlib.sha256(b"".join(reducer.averaged)).digest())
            held.record = Signed.make(record, self.identity)
            self._send_records(self.others, [held])

    def _send_span(self, peer: bytes, held: HeldSpan) -> None:
        assert held.data is not None and held.record is not None
        layout, span = self.law.layout, held.span
        base = layout.down_offsets[span.first]
        for first, stop in layout.frames(layout.down_offsets, span.first, span.stop, FRAME_BYTES):
            data = memoryview(held.data)[layout.down_offsets[first] - base : layout.down_offsets[stop] - base]
            self.outbox.append((peer, Averaged(self.start.group, span.index, first, stop, data)))
        self._send_records([peer], [held])

    def _send_records(self, peers: list[bytes], spans: list[HeldSpan]) -> None:
        for held in spans:
            assert held.record is not None
            message = RecordMessage(self.start.group, held.record.body, held.record.signature)
            self.outbox += [(peer, message) for peer in peers]

    def _compare(self) -> None:
        """Show the records to whoever confirmed another root, so that a reducer's two versions meet."""
        for peer, root in self._roots.items():
            if root != self._root and peer not in self._showed:
                self._showed.add(peer)
                self._send_records([peer], self.held)

    def _commit(self) -> None:
        records = tuple(held.record for held in self.held if held.record)
        entry = Entry(self.start.signed, records, tuple(held.data for held in self.held if held.data is not None))
        assert len(records) == len(entry.data) == len(self.held)
        head = hashlib.sha256(self.tip.head + self.start.group + root_of(records)).digest()
        self.result = Checked(entry, self.start, tuple(check_record(self.start, r) for r in records), head)

