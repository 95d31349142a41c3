"""One attempt at one entry: a compressed butterfly all-reduce as a state machine over messages.

No sockets, no clock of its own: `on_message`, `on_gone` and `on_time` are called with the time, `outbox` says what to
send, `wake_at` when to call again, `result` how it ended.

    scatter  each member sends parts of its packet to the member that reduces them
    gather   each reducer sends its averaged bytes, encoded once, and a signed record of them
    confirm  each member signs the root of the records it holds
    commit   all members that are left signed one root, or more than half of START's did and the others had a second more

A lost sender is counted up to its first missing part. A lost reducer's span goes to the next candidate by order of the
coordinator: the leader, or the first after it in leader_order that is not lost, so a lost leader costs nothing either. Who
holds what the lost reducer made says so to the new one, which then passes that on instead of making it again. Lost means:
the transport says so, it gave up, it broke a rule, it answered nothing for SILENCE_S though asked, or what it owes is overdue.

Why nobody differs: a root needs half of START's members, more than half if one of them gave up, for it may be agreeing
with others on something else; a later turn's version of a span replaces an earlier one before that; and two versions of one
turn are proof against their reducer and void the attempt.

Cost for a member: 2 (n-1)/n of a packet each way, whatever n; plus about 1 kB a member for lists and records, and 2/n of a
packet for each reducer that is lost.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from p2p_muloco.chain import (
    BROKE_RULE,
    TOO_LATE,
    VANISHED,
    Checked,
    CheckedStart,
    Entry,
    Law,
    Order,
    Signed,
    Tip,
    check_record,
    confirms_root,
    leader_order,
    next_head,
    root_of,
    sign_root,
)
from p2p_muloco.errors import BadPacket
from p2p_muloco.held import HeldSpan, TwoVersions, Version
from p2p_muloco.identity import Identity
from p2p_muloco.messages import (
    EXCHANGING,
    FRAME_BYTES,
    Abandon,
    Averaged,
    Confirm,
    Fetch,
    Parts,
    Poll,
    Proof,
    Reassign,
    RecordMessage,
)
from p2p_muloco.packet import Packet
from p2p_muloco.reduce import SpanReducer
from p2p_muloco.wire import Record

__all__ = ["SILENCE_S", "Attempt", "Lost"]

ASK_S = 1.0  # between two questions to a member from which nothing comes; 1 % of a long exchange's deadline
SILENCE_S = 5.0  # a member from which nothing comes for so long is lost; 5 % of a long exchange's deadline
GRACE_S = 1.0  # and a tenth of the time so far: for those that confirm after more than half have
SHOWN = 8  # times that records are shown to one member that confirms other roots
LENGTHENED = 3  # an attempt whose reducers are lost lasts at most so many times what START says


@dataclass(frozen=True)
class Lost:
    """An attempt that ended without an entry; the state is as it was."""

    reason: str
    suspects: frozenset[bytes] = frozenset()  # whose span was lost with them
    left: frozenset[bytes] = frozenset()  # who gave up before this member did
    proof: Proof | None = None


class Attempt:
    """This peer's side of one attempt. `start` is checked and holds this peer; `packet` is its own."""

    def __init__(self, law: Law, identity: Identity, tip: Tip, start: CheckedStart, packet: Packet, now: float) -> None:
        self.law, self.identity, self.tip, self.start, self.packet = law, identity, tip, start, packet
        self.me = identity.peer_id
        self.others = [peer for peer in start.members if peer != self.me]
        self.reach = start.within_reach(self.me)
        s = start.start
        self.scatter_s, self.gather_s, self.confirm_s = s.scatter_ms / 1e3, s.gather_ms / 1e3, s.confirm_ms / 1e3
        self._ask_s = max(ASK_S, self.gather_s / 100)
        self.confirm_at, self.ends_at = now + self.confirm_s, now + LENGTHENED * self.confirm_s
        self.outbox: list[tuple[bytes, Record]] = []
        self.result: Checked | Lost | None = None
        self.held = [HeldSpan(law, start, span, packet.limits) for span in start.spans]
        self.reducers: dict[int, SpanReducer] = {}
        self._scatter_at: dict[int, float] = {}  # of each span that this member reduces
        self._due_at = [now + self.gather_s] * len(self.held)
        self._heard_at = dict.fromkeys(self.others, now)
        self.began_at = self._asked_at = now
        self._lost: dict[bytes, int] = {}  # peer -> why, as in chain.REASONS
        self._spoke: set[bytes] = set()  # members that are known to have entered
        self._left: set[bytes] = set()  # of the lost: who gave up, so it may be reached
        self._suspects: set[bytes] = set()  # whose span was lost with them
        self._pending: dict[int, tuple[Order, Reassign]] = {}  # orders of who is no coordinator to this member (yet)
        self._roots: dict[bytes, tuple[bytes, bytes]] = {}  # peer -> root, signature
        self._root: bytes | None = None
        self._half_at: float | None = None
        self._wake_at: float | None = None
        self._showed: set[tuple[bytes, bytes, bytes]] = set()
        self._order = [s.leader, *(p for p in leader_order(tip.head, start.members) if p != s.leader)]
        for held in self.held:
            if held.span.reducer == self.me:
                self._reduce(held, now)
        self._scatter()
        self._settle(now)

    # -- what happens to it

    def on_message(self, sender: bytes, message: Record, now: float) -> None:
        if sender not in self.others:
            return
        self.hear(sender, now)
        self._spoke.add(sender)
        if self.result is not None:
            if isinstance(self.result, Checked) and isinstance(message, Fetch) and message.span < len(self.held):
                self._on_fetch(sender, self.held[message.span])  # a straggler may still finish by itself
            return
        try:
            match message:
                case Parts():
                    self._on_parts(sender, message)
                case Averaged() if message.span < len(self.held):
                    if sender == self.held[message.span].source:
                        self.held[message.span].add(message.turn, message.first, message.stop, message.data)
                case RecordMessage():
                    self._on_record(sender, Signed(message.body, message.signature))
                case Confirm():
                    self._on_confirm(sender, message)
                case Fetch() if message.span < len(self.held):
                    self._on_fetch(sender, self.held[message.span])
                case Reassign():
                    self._on_reassign(message, now)
                case Abandon():
                    self._left.add(sender)
                    self._lose(sender, VANISHED, now)
        except TwoVersions as found:
            self._void(found)
        except BadPacket:
            self._lose(sender, BROKE_RULE, now)
        self._settle(now)

    def on_gone(self, peer: bytes, now: float) -> None:
        if self.result is None and peer in self.others:
            self._lose(peer, VANISHED, now)
            self._settle(now)

    def on_regrouping(self, peer: bytes, now: float) -> None:
        """A member gathers at this head, so it is not in here (any more).

        The leader gathered before its START, and that word may come late: when it gives up it says so itself.
        """
        if peer != self.start.start.leader and peer in self.others:
            self.on_message(peer, Abandon(self.start.group), now)

    def on_outside(self, peer: bytes, now: float) -> None:
        """A member says that it is in no exchange at this head; START can't reach it any more if its leader is lost."""
        if peer in self.others and peer not in self._spoke and self.start.start.leader in self._lost:
            self.on_message(peer, Abandon(self.start.group), now)

    def on_committed(self) -> None:
        """Another member has committed what this one holds too: nothing is left to wait for but signatures."""
        if self.result is None and self._root is not None and self._are_enough(len(self._confirming())):
            self._commit()

    def hear(self, peer: bytes, now: float) -> None:
        if peer in self._heard_at:
            self._heard_at[peer] = now

    def on_time(self, now: float) -> None:
        if self.result is not None:
            return
        for index, reducer in self.reducers.items():
            if now >= self._scatter_at[index]:
                for member in reducer.missing():
                    reducer.close(member, TOO_LATE)
        if now >= self._asked_at + self._ask_s:
            self._ask_silent(now)
        for held in self.held:
            if held.whole is None and now >= self._due_at[held.span.index] and self.result is None:
                self._due_at[held.span.index] = now + self.gather_s
                self._overdue(held, now)
        self._settle(now)
        if now >= min(self.confirm_at, self.ends_at):
            self.decide()

    def decide(self) -> None:
        """End it now: with the entry if half of its members hold the same spans, else without."""
        if self.result is not None:
            return
        lacking = [held.reducer for held in self.held if held.whole is None]
        if lacking:
            self.abandon("not all averaged spans arrived in time", frozenset(lacking) - {self.me})
        elif not self._are_enough(len(self._confirming())):
            self.abandon("too few of its members confirmed it in time")
        else:
            self._commit()

    def abandon(self, reason: str, suspects: frozenset[bytes] = frozenset(), proof: Proof | None = None) -> None:
        if self.result is None:
            self.result = Lost(reason, suspects | self._suspects, frozenset(self._left), proof)
            self.outbox += [(peer, Abandon(self.start.group)) for peer in self.reach]

    @property
    def wake_at(self) -> float | None:
        if self.result is not None:
            return None
        if self._wake_at is None:
            self._wake_at = self._next_deadline()
        return self._wake_at

    def _next_deadline(self) -> float:
        times = [self.confirm_at, self.ends_at, self._asked_at + self._ask_s]
        times += [self._scatter_at[index] for index, reducer in self.reducers.items() if reducer.missing()]
        times += [self._due_at[held.span.index] for held in self.held if held.whole is None]
        if self._half_at is not None:
            times.append(self._grace_until())
        return min(times)

    @property
    def head(self) -> bytes:
        """What the entry's head will be if this member commits now; b'' while it holds too little."""
        return b"" if self._root is None else next_head(self.tip, self.start, self._root)

    def progress(self) -> str:
        """For people: what it waits for."""
        spans = sum(held.whole is not None for held in self.held)
        lost = f" ({len(self._lost)} lost)" if self._lost else ""
        if self._root is None:
            return f"averaging with {len(self.others)} peers{lost}: {spans} of {len(self.held)} spans"
        return f"confirming: {len(self._confirming())} of {len(self.start.members)} agree{lost}"

    # -- sending and reducing

    def _scatter(self) -> None:
        """A frame to each reducer in turn, so that all of them can begin."""
        rows = []
        for held in self.held:
            if held.reducer != self.me:
                rows.append([(held.reducer, parts) for parts in self._own_parts(held)])
        for row in itertools.zip_longest(*rows):
            self.outbox += [message for message in row if message is not None]

    def _own_parts(self, held: HeldSpan) -> list[Parts]:
        layout, span = self.law.layout, held.span
        frames = layout.frames(layout.up_offsets, span.first, span.stop, FRAME_BYTES)
        return [Parts(self.start.group, first, stop, layout.up_slice(self.packet.payload, first, stop))
                for first, stop in frames]

    def _reduce(self, held: HeldSpan, now: float) -> None:
        reducer = SpanReducer(self.law, self.start, held.span, self.packet.limits, held.turn)
        self.reducers[held.span.index] = reducer
        self._scatter_at[held.span.index] = now + self.scatter_s
        held.expect(self.me)
        for peer, reason in self._lost.items():
            reducer.close(self.start.members.index(peer), reason)
        for parts in self._own_parts(held):
            reducer.add(self.start.members.index(self.me), parts.first, parts.stop, parts.data)

    def _say_parts(self, held: HeldSpan) -> None:
        """Send the span once more, to the reducer whose turn it is now; once a turn, however often it asks."""
        if held.said < held.turn:
            held.said = held.turn
            self.outbox += [(held.reducer, parts) for parts in self._own_parts(held)]

    def _on_parts(self, sender: bytes, message: Parts) -> None:
        for reducer in self.reducers.values():
            if reducer.span.first <= message.first < reducer.span.stop:
                reducer.add(self.start.members.index(sender), message.first, message.stop, message.data)

    def _publish(self, reducer: SpanReducer) -> None:
        held, span = self.held[reducer.span.index], reducer.span
        for first, stop, data in reducer.take():
            message = Averaged(self.start.group, span.index, reducer.turn, first, stop, data)
            self.outbox += [(peer, message) for peer in self._present()]
        if reducer.finished and reducer.turn not in held.records:
            data = b"".join(reducer.averaged)
            record = reducer.record(hashlib.sha256(data).digest())
            if max(record.counts) < span.n_parts:  # not even this member's own: it is wrong itself
                self.abandon(f"no member's packet can be counted in span {span.index}")
                return
            signed = Signed.make(record, self.identity)
            held.keep(Version(reducer.turn, signed, data))
            self._send_record(self._present(), signed)

    # -- spans

    def _on_record(self, sender: bytes, signed: Signed) -> None:
        record = check_record(self.start, signed)
        held, turn = self.held[record.span], record.turn
        held.add_record(turn, signed)
        if held.reducer == self.me and turn < held.turn and held.whole is None and sender not in held.holders:
            held.holders.append(sender)
            if held.source == self.me:
                self._take_over_version(held)
        later = held.whole is not None and turn > held.whole.turn
        if later and sender in self._roots and (turn > held.turn or held.source in self._lost):
            held.turn = max(held.turn, turn)  # it confirmed a later version than this member will get from elsewhere
            held.expect(sender)
            self.outbox.append((sender, Fetch(self.start.group, held.span.index)))

    def _take_over_version(self, held: HeldSpan) -> None:
        """An earlier turn's version is held by somebody: pass it on instead of making another."""
        if held.holders:
            held.expect(held.holders[0])
            self.outbox.append((held.holders[0], Fetch(self.start.group, held.span.index)))
        else:
            held.expect(self.me)

    def _on_fetch(self, sender: bytes, held: HeldSpan) -> None:
        if held.whole is not None:
            if held.fetched.get(sender) != held.whole.turn:  # once a version: 40 bytes must not fetch megabytes for ever
                held.fetched[sender] = held.whole.turn
                self._send_span(sender, held)
        else:
            held.wanted_by.add(sender)

    def _send_span(self, peer: bytes, held: HeldSpan) -> None:
        version, layout, span = held.whole, self.law.layout, held.span
        assert version is not None
        base = layout.down_offsets[span.first]
        for first, stop in layout.frames(layout.down_offsets, span.first, span.stop, FRAME_BYTES):
            data = memoryview(version.data)[layout.down_offsets[first] - base : layout.down_offsets[stop] - base]
            self.outbox.append((peer, Averaged(self.start.group, span.index, version.turn, first, stop, data)))
        self._send_record([peer], version.record)

    def _send_record(self, peers: list[bytes], signed: Signed) -> None:
        self.outbox += [(peer, RecordMessage(self.start.group, signed.body, signed.signature)) for peer in peers]

    # -- members and reducers that are lost

    def _present(self) -> list[bytes]:
        return [peer for peer in self.others if peer not in self._lost]

    def _within_reach(self) -> list[bytes]:
        return [peer for peer in self.reach if peer not in self._lost]

    def _coordinator(self) -> bytes:
        """The leader, or who follows it: a node, as long as one is left."""
        left = [peer for peer in self._order if peer not in self._lost]
        return next((peer for peer in left if peer in self.start.nodes), left[0])

    def _ask_silent(self, now: float) -> None:
        self._asked_at = now
        for peer in self._within_reach():
            if now >= self._heard_at[peer] + self._ask_s * SILENCE_S / ASK_S:
                self._lose(peer, VANISHED, now)
            elif now >= self._heard_at[peer] + self._ask_s:
                self._ask([peer])

    def _ask(self, peers: Iterable[bytes]) -> None:
        self.outbox += [(peer, Poll(self.tip.head, self.tip.k, EXCHANGING)) for peer in peers]

    def _lose(self, peer: bytes, reason: int, now: float) -> None:
        """A member is gone, silent, gave up or broke a rule: nothing more is expected of it."""
        if peer in self._lost:
            return
        self._lost[peer] = reason
        if peer == self.start.start.leader:  # perhaps before START had reached everybody
            self._ask(p for p in self._within_reach() if p not in self._spoke)
        coordinator = self._coordinator()
        if coordinator == self.me:
            self._pass_on(*self._roots)
        for reducer in self.reducers.values():
            reducer.close(self.start.members.index(peer), reason)
        for held in self.held:
            held.holders = [holder for holder in held.holders if holder != peer]
            if held.whole is None and held.source in (peer, None):
                self._source_lost(held, now)
        for order, message in list(self._pending.values()):
            if order.by == coordinator:
                self._obey(order, message, now)

    def _overdue(self, held: HeldSpan, now: float) -> None:
        """Who answers but does not deliver in time is no better than lost: it may be the coordinator, too."""
        late = held.source if held.source is not None else self._coordinator()
        if late in self._lost or late == self.me:
            self._source_lost(held, now)
        else:
            self._suspects.add(late)
            self._lose(late, TOO_LATE, now)

    def _source_lost(self, held: HeldSpan, now: float) -> None:
        """The one from whom a span should come won't send it."""
        coordinator = self._coordinator()
        if held.reducer == self.me:
            self._take_over_version(held)
        elif coordinator == self.me:
            self._suspects.add(held.reducer)
            self._reassign(held, now)
        elif held.source != coordinator:
            held.expect(coordinator)
            self.outbox.append((coordinator, Fetch(self.start.group, held.span.index)))

    def _reassign(self, held: HeldSpan, now: float) -> None:
        candidates = self.start.candidates(held.span.index)
        turns = [t for t in range(held.turn + 1, len(candidates)) if candidates[t] not in self._lost]
        if not turns:
            self.abandon(f"span {held.span.index} is lost with all who could reduce it")
            return
        order = Order(start=self.start.group, span=held.span.index, turn=turns[0], by=self.me)
        signed = Signed.make(order, self.identity)
        self._obey(order, Reassign(self.start.group, signed.body, signed.signature), now)

    def _on_reassign(self, message: Reassign, now: float) -> None:
        order = Order.unpack(message.body)
        if not (order.start == self.start.group and order.by in self.start.members and order.span < len(self.held)
                and order.turn < len(self.start.candidates(order.span))
                and Signed(message.body, message.signature).by("Order", order.by)):
            raise BadPacket("an order of another group, or not signed by a member")
        if order.by == self._coordinator():
            self._obey(order, message, now)
        else:
            self._pending[order.span] = (order, message)

    def _obey(self, order: Order, message: Reassign, now: float) -> None:
        held = self.held[order.span]
        self._pending.pop(order.span, None)
        if order.turn <= held.turn:
            if (order.turn, order.by) == (held.turn, self.me) and held.whole is None:
                self._say_parts(held)  # the new reducer shows this coordinator's own order: now it is ready for parts
            return
        held.turn = order.turn
        self._due_at[order.span] = now + self.gather_s
        self.confirm_at = max(self.confirm_at, now + self.confirm_s)
        if held.reducer == self.me:
            self.outbox += [(peer, message) for peer in self._present()]
            self._take_turn(held, now)
        else:
            self.reducers.pop(order.span, None)
            if order.by == self.me:
                self.outbox.append((held.reducer, message))
            held.expect(held.reducer)
            if held.whole is not None:
                self._send_record([held.reducer], held.whole.record)
            elif order.by != self.me:
                self._say_parts(held)
        if held.reducer in self._lost:
            self._source_lost(held, now)

    def _take_turn(self, held: HeldSpan, now: float) -> None:
        if held.whole is None:
            self._reduce(held, now)
        else:
            held.expect(self.me)
            for peer in self._present():
                self._send_span(peer, held)

    # -- agreeing

    def _on_confirm(self, sender: bytes, message: Confirm) -> None:
        peer = message.peer
        if peer not in self.others or not confirms_root(peer, self.start.group, message.root, message.signature):
            raise BadPacket("a confirmation that no other member signed")
        if sender in (peer, self._coordinator()) or peer not in self._roots:
            self._roots[peer] = (message.root, message.signature)
        if peer == sender and self._coordinator() == self.me:
            self._pass_on(peer)

    def _pass_on(self, *peers: bytes) -> None:
        """Clients' confirmations to the other clients."""
        clients = [peer for peer in self._present() if peer not in self.start.nodes]
        for peer in peers:
            if peer not in self.start.nodes and peer in self._roots:
                message = Confirm(self.start.group, peer, *self._roots[peer])
                self.outbox += [(other, message) for other in clients if other != peer]

    def _confirming(self) -> list[bytes]:
        """Members, this one included, that hold what this one holds."""
        return [p for p in self.start.members if p == self.me or self._roots.get(p, (b"",))[0] == self._root]

    def _settle(self, now: float) -> None:
        """Whatever has become possible: publish averaged parts, settle spans, confirm, commit."""
        self._wake_at = None
        if self.result is not None:
            return
        for reducer in list(self.reducers.values()):
            self._publish(reducer)
        for held in self.held:
            self._settle_span(held, now)
            if self.result is not None:
                return
        self._confirm()
        if not self._are_enough(max(1 + len(self._present()), len(self._confirming()))):
            self.abandon("too few of its members are left")
            return
        if self._root is not None:
            self._compare()
            self._end_if_agreed(now)

    def _settle_span(self, held: HeldSpan, now: float) -> None:
        try:
            if not held.settle():
                return
        except BadPacket:  # its source, or the reducer that signed it
            source = held.source
            held.expect(None)
            if source is not None and source != self.me:
                self._lose(source, BROKE_RULE, now)
            return
        if held.reducer == self.me and held.span.index in self.reducers:  # an earlier turn's, from one who held it
            del self.reducers[held.span.index]
            for peer in self._present():
                self._send_span(peer, held)
        for peer in held.wanted_by:
            self._send_span(peer, held)
        held.wanted_by = set()

    def _confirm(self) -> None:
        if any(held.whole is None for held in self.held):
            return
        root = root_of([held.whole.record for held in self.held if held.whole])
        if root != self._root:
            self._root, self._half_at = root, None
            message = Confirm(self.start.group, self.me, root, sign_root(self.identity, self.start.group, root))
            self.outbox += [(peer, message) for peer in self.reach]

    def _compare(self) -> None:
        """Show the records to whoever confirmed another root: a reducer's two versions meet, or a later turn's is seen."""
        assert self._root is not None
        for peer, (root, _) in self._roots.items():
            key = (peer, root, self._root)
            shown = sum(seen[0] == peer for seen in self._showed)
            if root != self._root and key not in self._showed and shown < SHOWN and peer in self.reach:
                self._showed.add(key)
                for held in self.held:
                    if held.whole is not None:
                        self._send_record([peer], held.whole.record)

    def _are_enough(self, members: int) -> bool:
        """Half of them if all others can't be reached; else more, for who gave up may agree with others on another."""
        n = len(self.start.members)
        return 2 * members > n or (2 * members == n and not self._left)

    def _grace_until(self) -> float:
        assert self._half_at is not None
        return self._half_at + GRACE_S + (self._half_at - self.began_at) / 10

    def _end_if_agreed(self, now: float) -> None:
        confirming = self._confirming()
        if 2 * len(confirming) > len(self.start.members) and self._half_at is None:
            self._half_at = now
        all_left_agree = set(self._present()) <= set(confirming) and self._are_enough(len(confirming))
        if all_left_agree or (self._half_at is not None and now >= self._grace_until()):
            self._commit()

    def _void(self, found: TwoVersions) -> None:
        first, second = found.records
        proof = Proof(found.peer, (first.body, second.body), (first.signature, second.signature))
        self.abandon("a reducer signed two versions of one span", frozenset([found.peer]) - {self.me}, proof)

    def _commit(self) -> None:
        assert self._root is not None
        mine = sign_root(self.identity, self.start.group, self._root)
        confirms = tuple((self.start.members.index(p), mine if p == self.me else self._roots[p][1]) for p in self._confirming())
        versions = [held.whole for held in self.held if held.whole is not None]
        entry = Entry(self.start.signed, tuple(v.record for v in versions), tuple(v.data for v in versions), confirms)
        assert len(versions) == len(self.held) and self.start.is_half(len(confirms))
        self.result = Checked(entry, self.start, tuple(check_record(self.start, v.record) for v in versions), self.head)
