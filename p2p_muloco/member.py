"""One peer's side of the protocol: who leads, who takes part, which attempt runs, who is ahead. Pure.

Matchmaking without polling a DHT: the members of the last entry are known to all who share its head, and so is the order
in which they lead (chain.leader_order). A peer whose packet is ready sends JOIN to the first in that order that answers.
The leader waits for the members that are alive, at most `window_s`, and sends START. Before the first entry, and for who
has lost everybody, the peers seen in the DHT (`roster`) take the members' place.

Rules that keep two entries from growing on one head, short of a partition:
    - a follower follows one leader at a time and accepts START from no other;
    - a leader starts nothing while any member is in an exchange at this head, nor while an earlier leader gathers;
    - being asked by a later attempt decides the running one at once;
    - alone, a peer commits only if no member of the last entry answers.

Like `Attempt`, it has no sockets and no clock: `outbox`, `wake_at`, `outcomes`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from p2p_muloco.allreduce import Attempt, Lost
from p2p_muloco.chain import (
    NODE,
    Checked,
    CheckedStart,
    Hello,
    Law,
    Signed,
    Start,
    Tip,
    advance,
    check_hello,
    check_start,
    heavier,
    leader_order,
)
from p2p_muloco.errors import BadPacket
from p2p_muloco.identity import Identity
from p2p_muloco.messages import EXCHANGING, GATHERING, TRAINING, Abandon, Join, Poll, StartMessage, TipMessage
from p2p_muloco.packet import Packet
from p2p_muloco.wire import Record

__all__ = ["Behind", "Committed", "Failed", "Member", "Outcome"]

ANSWER_S = 3.0  # a peer that answers no question for this long is taken for gone: three long round trips and a busy machine
SUSPICION_S = 10.0  # and is not asked again for this long
FLOOR_S = 5.0  # of every stage of an exchange, whatever its size
SETTLE_S = 3.0  # before the first entry: from enough peers until the start, for those who come at the same moment
EARLY_FACTOR = 4  # bytes kept of attempts whose START is not here yet, in packets


@dataclass(frozen=True)
class Committed:
    checked: Checked


@dataclass(frozen=True)
class Behind:
    """Somebody is ahead on this chain, or on a heavier one: catch up from `donors` before the next begin."""

    k: int
    head: bytes
    donors: tuple[bytes, ...]


@dataclass(frozen=True)
class Failed:
    """The attempt was lost, nothing has changed; begin again with the same packet at `retry_at`."""

    reason: str
    retry_at: float


Outcome = Committed | Behind | Failed


@dataclass
class _Gathering:
    """While no attempt runs: whom this peer follows, and what it has heard since its packet was ready."""

    leader: bytes
    since: float
    asked_at: float
    answered_at: float
    answers: dict[bytes, TipMessage]
    enough_at: float | None = None


class Member:
    def __init__(self, law: Law, identity: Identity, tip: Tip, *, mode: int = NODE, rate_kbps: int = 20_000) -> None:
        self.law, self.identity, self.tip = law, identity, tip
        self.me = identity.peer_id
        self.mode, self.rate_kbps = mode, rate_kbps
        self.roster: frozenset[bytes] = frozenset()
        self.outbox: list[tuple[bytes, Record]] = []
        self.outcomes: list[Outcome] = []
        self.attempt: Attempt | None = None
        self._last: Attempt | None = None
        self._packet: Packet | None = None
        self._hello: Signed | None = None
        self._gathering: _Gathering | None = None
        self._tries = 0
        self._joins: dict[bytes, Join] = {}
        self._suspects: dict[bytes, float] = {}
        self._early: dict[bytes, list[tuple[bytes, Record]]] = {}
        self._early_bytes = 0
        self._distrusted: set[bytes] = set()

    # -- what the trainer asks

    def begin(self, packet: Packet, now: float) -> None:
        """Bring `packet` into the next entry. A second call for the same head must bring the same packet."""
        assert self._gathering is None and self.attempt is None
        hello = Hello(peer=self.me, head=self.tip.head, k=self.tip.k + 1, h=packet.inner_steps, pace_mhz=packet.pace_mhz,
                      digest=packet.digest, state=packet.state)  # fmt: skip
        assert self._packet is None or self._packet == packet
        self._packet, self._hello = packet, Signed.make(hello, self.identity)
        self._seek(now)
        self._harvest(now)

    def adopt(self, tip: Tip) -> None:
        """The trainer has caught up to `tip`; what was under way at another head is void."""
        if tip.head != self.tip.head:
            self._leave()
            self.tip = tip
            self._reset()

    def distrust(self, peer: bytes) -> None:
        """Its claim to be ahead could not be verified; nothing it says of its head is believed from now on."""
        self._distrusted.add(peer)

    def set_roster(self, peers: Iterable[bytes], now: float) -> None:
        """The peers of this run that the DHT shows now."""
        self.roster = frozenset(peers) - {self.me}
        if self._gathering is not None and self.tip.k == 0 and self._first_leader(now) != self._gathering.leader:
            self._seek(now)
        self._lead_on(now)
        self._harvest(now)

    def ask(self, peer: bytes) -> None:
        """Poll one peer, so that islands meet."""
        self.outbox.append((peer, Poll(self.tip.head, self.tip.k, self._tries)))

    # -- what the network brings

    def deliver(self, sender: bytes, message: Record, now: float) -> None:
        self._suspects.pop(sender, None)
        match message:
            case Poll():
                self._on_poll(sender, message, now)
            case TipMessage():
                self._on_tip(sender, message, now)
            case Join():
                self._on_join(sender, message, now)
            case StartMessage():
                self._on_start(sender, Signed(message.body, message.signature), now)
            case _:
                self._on_exchange(sender, message, now)
        self._harvest(now)

    def gone(self, peer: bytes, now: float) -> None:
        """The transport says: it can't be reached, or its connection broke."""
        self._suspects[peer] = now + SUSPICION_S
        self._joins.pop(peer, None)
        if self.attempt is not None:
            self.attempt.on_gone(peer, now)
        elif self._gathering is not None:
            self._gathering.answers.pop(peer, None)
            if self._gathering.leader == peer:
                self._seek(now)
            self._lead_on(now)
        self._harvest(now)

    def on_time(self, now: float) -> None:
        if self.attempt is not None:
            self.attempt.on_time(now)
        elif self._gathering is not None:
            self._follow_on(now) if self._gathering.leader != self.me else self._lead_on(now)
        self._harvest(now)

    @property
    def wake_at(self) -> float | None:
        if self.attempt is not None:
            return self.attempt.wake_at
        return None if self._gathering is None else self._gathering.asked_at + ANSWER_S / 3

    @property
    def phase(self) -> int:
        return EXCHANGING if self.attempt is not None else TRAINING if self._gathering is None else GATHERING

    def waiting_for(self, now: float) -> str:
        """One line for people: what this peer waits for and until when; '' if for nothing."""
        if self.attempt is not None:
            return f"{self.attempt.progress()}, at most {max(0.0, self.attempt.confirm_at - now):.0f} s more"
        if self._gathering is None:
            return ""
        if self._gathering.leader != self.me:
            return "waiting for the leader to start the round; training goes on"
        missing = self.law.config.run.min_peers - len(self._joins) - 1
        if self.tip.k == 0 and missing > 0:
            return f"waiting for {missing} more {'peer' if missing == 1 else 'peers'} to begin the run; share the join string"
        left = max(0.0, self._gathering.since + self.law.config.run.window_s - now)
        return f"gathering members: {len(self._joins) + 1} ready, at most {left:.0f} s more"

    # -- finding a leader

    def _pool(self, now: float) -> set[bytes]:
        """Who may lead: the last entry's members; the roster where there are none or none of them answers."""
        members = set(self.tip.members)
        if members and any(peer != self.me and not self._suspect(peer, now) for peer in members):
            return members
        return members | self.roster | {self.me}

    def _suspect(self, peer: bytes, now: float) -> bool:
        return self._suspects.get(peer, now) > now

    def _first_leader(self, now: float) -> bytes:
        order = leader_order(self.tip.head, list(self._pool(now)))
        return next((peer for peer in order if peer == self.me or not self._suspect(peer, now)), self.me)

    def _seek(self, now: float) -> None:
        since = self._gathering.since if self._gathering else now
        self._gathering = _Gathering(self._first_leader(now), since, now, now, {})
        self._ask_again(now)
        self._lead_on(now)

    def _follow(self, leader: bytes, now: float) -> None:
        assert self._gathering is not None
        if leader != self._gathering.leader:
            self._gathering.leader, self._gathering.answered_at = leader, now
            self._ask_again(now)
            self._lead_on(now)

    def _ask_again(self, now: float) -> None:
        """JOIN to the leader, or a poll to everybody expected who has not joined."""
        g = self._gathering
        assert g is not None and self._hello is not None
        g.asked_at = now
        if g.leader != self.me:
            join = Join(self._hello.body, self._hello.signature, self.mode, self.rate_kbps, self._tries)
            self.outbox.append((g.leader, join))
            return
        for peer in sorted(self._pool(now) - set(self._joins) - {self.me}):
            if not self._suspect(peer, now):
                self.ask(peer)

    def _follow_on(self, now: float) -> None:
        g = self._gathering
        assert g is not None
        if now < g.asked_at + ANSWER_S / 3:
            return
        answer, window_s = g.answers.get(g.leader), self.law.config.run.window_s
        silent = now > g.answered_at + ANSWER_S
        late = answer is not None and answer.phase == TRAINING and now > g.since + window_s
        if silent or late:
            self._suspects[g.leader] = now + max(SUSPICION_S, window_s)
            self._seek(now)
        else:
            self._ask_again(now)

    # -- leading

    def _lead_on(self, now: float) -> None:
        g = self._gathering
        if g is None or g.leader != self.me or self.attempt is not None:
            return
        if now >= g.asked_at + ANSWER_S / 3:
            if now > g.since + ANSWER_S:
                silent = self._pool(now) - set(self._joins) - set(g.answers) - {self.me}
                self._suspects.update(dict.fromkeys((p for p in silent if not self._suspect(p, now)), now + SUSPICION_S))
            self._ask_again(now)
        if self._may_start(now):
            self._start(now)

    def _may_start(self, now: float) -> bool:
        g, run = self._gathering, self.law.config.run
        assert g is not None
        at_head = {p: a for p, a in g.answers.items() if a.recent[-1] == self.tip.head and p not in self._joins}
        if any(answer.phase == EXCHANGING for answer in at_head.values()):
            return False
        present = 1 + len(self._joins)
        if self.tip.k == 0 and present < run.min_peers:
            g.enough_at = None
            return False
        g.enough_at = g.enough_at if g.enough_at is not None else now
        open_ = {p for p in self._pool(now) - {self.me} - set(self._joins) if not self._suspect(p, now)}
        open_ -= {p for p, a in g.answers.items() if a.recent[-1] != self.tip.head}  # they are behind
        if not open_:
            return True
        if self.tip.k == 0:
            return now >= g.enough_at + min(SETTLE_S, run.window_s)
        alone = present == 1 and any(p in self.tip.members for p in at_head)
        return not alone and now >= g.since + run.window_s

    def _start(self, now: float) -> None:
        assert self._hello is not None
        mine = Join(self._hello.body, self._hello.signature, self.mode, self.rate_kbps, self._tries)
        joins = {**self._joins, self.me: mine}
        chosen = [self.me, *(p for p in leader_order(self.tip.head, list(joins)) if p != self.me)]
        chosen = sorted(chosen[: self.law.config.run.max_group])
        rows = [joins[peer] for peer in chosen]
        scatter_s, gather_s, confirm_s = self._deadlines(rows)
        start = Start(
            leader=self.me, head=self.tip.head, k=self.tip.k + 1, attempt=max(row.attempt for row in rows),
            hellos=tuple(row.hello for row in rows), signatures=tuple(row.signature for row in rows),
            modes=tuple(row.mode for row in rows), rates=tuple(row.rate for row in rows),
            scatter_ms=round(scatter_s * 1e3), gather_ms=round(gather_s * 1e3), confirm_ms=round(confirm_s * 1e3),
        )  # fmt: skip
        signed = Signed.make(start, self.identity)
        message = StartMessage(signed.body, signed.signature)
        self.outbox += [(peer, message) for peer in chosen if peer != self.me]
        self._enter(check_start(self.law, self.tip, signed), now)

    def _deadlines(self, rows: list[Join]) -> tuple[float, float, float]:
        """Seconds after START for scatter, gather and confirm: three times what the slowest link needs, above a floor."""
        layout = self.law.layout
        bytes_per_s = min(row.rate for row in rows) * 125
        scatter = FLOOR_S + 3 * layout.up_bytes / bytes_per_s
        gather = scatter + FLOOR_S + 3 * layout.down_bytes / bytes_per_s + layout.merge_s() / len(rows)
        return scatter, gather, gather + FLOOR_S

    # -- messages

    def _on_poll(self, sender: bytes, poll: Poll, now: float) -> None:
        running = self.attempt
        if running is not None and poll.head == self.tip.head and poll.attempt > running.start.start.attempt:
            if sender in running.others or sender in self.tip.members:
                running.decide()
                self._harvest(now)
        g = self._gathering
        if g is not None and poll.head == self.tip.head and self.attempt is None and self._precedes(sender, g.leader):
            self._follow(sender, now)
        self._say_tip(sender)

    def _precedes(self, peer: bytes, leader: bytes) -> bool:
        order = leader_order(self.tip.head, [peer, leader])
        return peer != leader and order[0] == peer

    def _say_tip(self, peer: bytes) -> None:
        leader = self._gathering.leader if self._gathering is not None and self.attempt is None else b""
        self.outbox.append((peer, TipMessage(self.tip.k, self.tip.recent[-8:], self.tip.weight, self.phase, leader)))

    def _on_tip(self, sender: bytes, tip: TipMessage, now: float) -> None:
        head, g = tip.recent[-1], self._gathering
        if head != self.tip.head:
            if self._is_better(tip) and sender not in self._distrusted:
                self._leave()
                self.outcomes.append(Behind(tip.k, head, (sender,)))
                return
            if g is not None and g.leader == sender:  # it is behind or on a lighter fork: it can't lead here
                self._suspects[sender] = now + SUSPICION_S
                self._seek(now)
        if g is None or self.attempt is not None:
            return
        g.answers[sender] = tip
        if sender == g.leader:
            g.answered_at = now
        if head == self.tip.head and tip.phase == GATHERING and tip.leader:
            self._reconsider(sender, tip.leader, now)
        self._lead_on(now)

    def _reconsider(self, sender: bytes, its_leader: bytes, now: float) -> None:
        """Of two leaders at one head the earlier in the order leads; a follower's word redirects."""
        g = self._gathering
        assert g is not None
        if g.leader == self.me and its_leader == sender and self._precedes(sender, self.me):
            self._follow(sender, now)
        elif g.leader == sender and its_leader != sender and (its_leader == self.me or not self._suspect(its_leader, now)):
            self._follow(its_leader, now)

    def _is_better(self, tip: TipMessage) -> bool:
        if self.tip.head in tip.recent[:-1]:
            return True
        if tip.recent[-1] in self.tip.recent:
            return False
        return heavier(tip.weight, tip.recent[-1], self.tip.weight, self.tip.head)

    def _on_join(self, sender: bytes, join: Join, now: float) -> None:
        try:
            signed = Signed(join.hello, join.signature)
            hello = Hello.unpack(join.hello)
            if hello.peer != sender:
                raise BadPacket("JOIN brings another peer's HELLO")
            if hello.head == self.tip.head:
                check_hello(self.law, self.tip, hello, signed)
                self._joins[sender] = join
            elif hello.k > self.tip.k + 1:
                self.ask(sender)
        except BadPacket:
            return
        self._say_tip(sender)
        self._lead_on(now)

    def _on_start(self, sender: bytes, signed: Signed, now: float) -> None:
        try:
            start = check_start(self.law, self.tip, signed)
        except BadPacket:
            self._say_tip(sender)
            return
        g = self._gathering
        if self.attempt is not None and self.attempt.start.group == start.group:
            return
        mine = self._hello is not None and self._hello.body in start.start.hellos
        if g is None or self.attempt is not None or g.leader != start.start.leader or not mine:
            self.outbox += [(peer, Abandon(start.group)) for peer in start.members if peer != self.me]
            return
        self._enter(start, now)

    def _enter(self, start: CheckedStart, now: float) -> None:
        assert self._packet is not None
        self._gathering = None
        self.attempt = Attempt(self.law, self.identity, self.tip, start, self._packet.payload, now)
        for sender, message in self._early.pop(start.group, []):
            self.attempt.on_message(sender, message, now)
        self._early, self._early_bytes = {}, 0

    def _on_exchange(self, sender: bytes, message: Record, now: float) -> None:
        group = getattr(message, "group", None)
        for attempt in (self.attempt, self._last):
            if attempt is not None and (group is None or group == attempt.start.group):
                attempt.on_message(sender, message, now)
                return
        if self._gathering is not None and group is not None:  # other members' parts can outrun the leader's START
            size = 200 + len(getattr(message, "data", b""))
            if self._early_bytes + size <= EARLY_FACTOR * self.law.layout.up_bytes + 100_000:
                self._early.setdefault(group, []).append((sender, message))
                self._early_bytes += size

    # -- ends

    def _harvest(self, now: float) -> None:
        attempt = self.attempt if self.attempt is not None else self._last
        if attempt is not None:
            self.outbox += attempt.outbox
            attempt.outbox = []
        if self.attempt is None or self.attempt.result is None:
            return
        self._last, self.attempt = self.attempt, None
        result = self._last.result
        if isinstance(result, Lost):
            self._tries += 1
            for peer in result.suspects:
                self._suspects[peer] = now + SUSPICION_S
                self._joins.pop(peer, None)
            self._joins = {}
            self.outcomes.append(Failed(result.reason, now + min(10.0, 0.1 * 2**self._tries)))
        elif result is not None:
            self.tip = advance(self.law, self.tip, result)
            self._reset()
            self.outcomes.append(Committed(result))

    def _leave(self) -> None:
        """Stop what is under way: somebody else has decided."""
        if self.attempt is not None:
            self.outbox += [(peer, Abandon(self.attempt.start.group)) for peer in self.attempt.others]
        self.attempt = self._gathering = None

    def _reset(self) -> None:
        self._packet = self._hello = self._gathering = None
        self._tries, self._joins, self._suspects = 0, {}, {}
        self._early, self._early_bytes = {}, 0
