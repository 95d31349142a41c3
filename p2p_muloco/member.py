"""One peer's side of the protocol: who leads, who takes part, which attempt runs, who is ahead. Pure.

Matchmaking without polling a DHT: the members of the last entry are known to all who share its head, and so is the
order in which they lead (chain.leader_order). A peer whose packet is ready sends JOIN to the first in that order that
answers. The leader waits for the members that are alive, at most `window_s`, and sends START. Before the first entry,
and for who has lost everybody, the peers seen in the DHT (`roster`) take the members' place.

Rules that keep two entries from growing on one head, short of a partition:
    - a follower follows one leader at a time, accepts START from no other, and no START twice;
    - a leader starts only when each peer that may be ahead or busy at this head has joined, answered, failed to be
      reached, or been silent for ANSWER_S since this leader asks; and not while one of them is in an exchange;
    - whoever notices that it stood still for LEASE_S gives its attempt up and asks, for others may have gone on;
    - alone, a peer commits only if no member of the last entry answers.

Like `Attempt`, it has no sockets and no clock: `outbox`, `wake_at`, `outcomes`. Call `on_time` at `wake_at`, within a
second; a caller that was late by LEASE_S is taken for one that stood still.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from p2p_muloco.allreduce import Attempt, Lost
from p2p_muloco.chain import (
    BROKE_RULE,
    CLIENT,
    NODE,
    REASONS,
    TOO_LATE,
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
from p2p_muloco.deadlines import deadlines_s, longest_exchange_s
from p2p_muloco.errors import BadPacket
from p2p_muloco.gathering import ANSWER_S, Gathering, choose_members
from p2p_muloco.identity import Identity
from p2p_muloco.messages import EXCHANGING, GATHERING, TRAINING, Abandon, Join, Poll, Proof, StartMessage, TipMessage
from p2p_muloco.opinion import OLD_PACKET, Opinion
from p2p_muloco.packet import Packet
from p2p_muloco.waypoint import Waypoint, claims_more, newer, read_waypoint
from p2p_muloco.wire import Record

__all__ = ["Behind", "Committed", "Failed", "Member", "Outcome"]

LEASE_S = 2.0  # who stood still for less still answers in time: at most a second of ANSWER_S goes into a round trip
MEET_S = 60.0  # between two questions to a peer of the run outside the last entry, so that islands meet
SETTLE_S = 3.0  # before the first entry: from enough peers until the start, for those who come at the same moment
EARLY_FACTOR = 4  # bytes kept of attempts whose START is not here yet, in packets
ALONE_TRIES = 10  # attempts lost at one head before a peer goes on alone though members of the last entry answer
MAX_JOINS = 256  # kept at once
MAX_GROUPS = 256  # attempts that are refused at one head


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


Outcome = Committed | Behind | Failed | Waypoint  # the last: newer than those that this chain was known to hold


class Member:
    def __init__(self, law: Law, identity: Identity, tip: Tip, *, mode: int = NODE, rate_kbps: int = 20_000) -> None:
        self.law, self.identity, self.tip = law, identity, tip
        self.me = identity.peer_id
        self.mode, self.rate_kbps, self._declared_kbps = mode, rate_kbps, rate_kbps
        self.opinion = Opinion(self.me)
        self.waypoint: Waypoint | None = None  # the newest that this chain holds
        self.roster: frozenset[bytes] = frozenset()
        self._clients: frozenset[bytes] = frozenset()  # of the roster: who says that it can't be dialled
        self.outbox: list[tuple[bytes, Record]] = []
        self.outcomes: list[Outcome] = []
        self.attempt: Attempt | None = None
        self._last: Attempt | None = None
        self._packet: Packet | None = None
        self._hello: Signed | None = None
        self._gathering: Gathering | None = None
        self._awake_at = 0.0
        self._tries = 0
        self._joins: dict[bytes, Join] = {}
        self._groups: set[bytes] = set()  # attempts at this head that were entered or refused
        self._early: dict[bytes, tuple[bytes, list[Record], int]] = {}  # by sender: group, messages, bytes
        self._told_behind = False
        self._met, self._meet_at = 0, MEET_S

    # -- what the trainer asks

    def begin(self, packet: Packet, now: float) -> None:
        """Bring `packet` into the next entry. A second call for the same head must bring the same packet."""
        if self._gathering is not None or self.attempt is not None:
            return  # it is under way: the trainer had not yet heard of something that made it ask again
        hello = Hello(peer=self.me, head=self.tip.head, k=self.tip.k + 1, h=packet.inner_steps,
                      pace_mhz=packet.pace_mhz, client=int(self.mode == CLIENT), digest=packet.digest, state=packet.state)
        assert self._packet is None or self._packet == packet
        self._packet, self._hello, self._told_behind = packet, Signed.make(hello, self.identity), False
        self._awake_at = now
        self._seek(now)
        self._harvest(now)

    def withdraw(self, now: float) -> None:
        """Take the packet back if no attempt holds it yet: this peer is leaving."""
        if self.attempt is None and self._gathering is not None:
            self._gathering = None
            self.outcomes.append(Failed("this peer is leaving", now))

    def adopt(self, tip: Tip) -> None:
        """The trainer has caught up to `tip`; what was under way at another head is void."""
        self._told_behind = False
        if tip.head != self.tip.head:
            self._leave()
            self.tip = tip
            self._reset()

    def distrust(self, peer: bytes, now: float) -> None:
        """What it showed for its claim to be ahead was false: no such claim of it is believed for a minute."""
        self.opinion.distrust(peer, now)
        self._told_behind = False

    def awake(self, now: float) -> None:
        """The caller was busy with this member until now: that is no standstill."""
        self._awake_at = now

    def set_roster(self, peers: Iterable[bytes], now: float, clients: Iterable[bytes] = ()) -> None:
        """The peers of this run that the DHT shows now, and which of them say that they can't be dialled."""
        self._wake(now)
        self.roster, self._clients = frozenset(peers) - {self.me}, frozenset(clients)
        if self._gathering is not None and self.tip.k == 0 and self._first_leader(now) != self._gathering.leader:
            self._seek(now)
        self._lead_on(now)
        self._harvest(now)

    def show_waypoint(self, waypoint: Waypoint) -> None:
        """Keep it, if the owner signed it and this chain names its head; from then on whoever asks is told."""
        if newer(waypoint, self.waypoint) and waypoint.is_on(self.tip) and waypoint.holds(self.law):
            self.waypoint = waypoint
            self.outcomes.append(waypoint)

    def ask(self, peer: bytes) -> None:
        """Poll one peer: it answers where it stands."""
        self.outbox.append((peer, Poll(self.tip.head, self.tip.k, self.phase)))

    # -- what the network brings

    def deliver(self, sender: bytes, message: Record, now: float) -> None:
        self._wake(now)
        self.opinion.clear(sender)
        if self.attempt is not None:
            self.attempt.hear(sender, now)
        match message:
            case Poll():
                self._on_poll(sender, message, now)
            case TipMessage():
                self._on_tip(sender, message, now)
            case Join():
                self._on_join(sender, message, now)
            case StartMessage():
                self._on_start(sender, Signed(message.body, message.signature), now)
            case Proof():
                known = message.peer in self._pool(now) | self._joins.keys()  # a stranger needs no conviction
                if known and self.opinion.convict(message, self.tip.k + 1) and self._gathering is not None:
                    self._joins.pop(message.peer, None)
                    self._seek(now)
            case _:
                self._on_exchange(sender, message, now)
        self._harvest(now)

    def gone(self, peer: bytes, now: float) -> None:
        """The transport says: it can't be reached, or its connection broke."""
        self._wake(now)
        self.opinion.suspect(peer, now)
        self._joins.pop(peer, None)
        if self.attempt is not None:
            self.attempt.on_gone(peer, now)
        elif self._gathering is not None:
            if not self._is_client(peer):  # one that can't be dialled may come by itself
                self._gathering.lose(peer)
            if self._gathering.leader == peer:
                self._seek(now)
            self._lead_on(now)
        self._harvest(now)

    def on_time(self, now: float) -> None:
        self._wake(now)
        self._meet(now)
        if self.attempt is not None:
            self.attempt.on_time(now)
        elif self._gathering is not None:
            self._follow_on(now) if self._gathering.leader != self.me else self._lead_on(now)
        self._harvest(now)

    def _outside(self) -> frozenset[bytes]:
        return self.roster.difference(self.tip.members, self._clients)

    def _meet(self, now: float) -> None:
        if (outside := self._outside()) and now >= self._meet_at:
            self.ask(leader_order(self.me, list(outside))[self._met % len(outside)])
            self._met, self._meet_at = self._met + 1, now + MEET_S

    def _wake(self, now: float) -> None:
        """Called first, whatever happens: after a standstill (sleep, swap, SIGSTOP) nothing known is current."""
        stood_s, self._awake_at = now - self._awake_at, now
        if self.attempt is not None and stood_s > LEASE_S + self.law.layout.merge_s():
            self.attempt.abandon(f"this machine stood still for {stood_s:.0f} s")
            self._harvest(now)
        elif self._gathering is not None and stood_s > LEASE_S:
            self._joins, self._gathering.answers = {}, {}
            self._gathering.turn_at = now
            self._ask_again(now)

    @property
    def wake_at(self) -> float | None:
        times = [self._meet_at] if self._outside() else []
        if self.attempt is not None or self._gathering is not None:
            times.append(self._awake_at + ANSWER_S / 3)
        if self.attempt is not None and self.attempt.wake_at is not None:
            times.append(self.attempt.wake_at)
        elif self._gathering is not None:
            times.append(self._gathering.asked_at + ANSWER_S / 3)
        return min(times, default=None)

    @property
    def phase(self) -> int:
        return EXCHANGING if self.attempt is not None else TRAINING if self._gathering is None else GATHERING

    def waiting_for(self, now: float) -> str:
        """One line for people: what this peer waits for and until when; '' if for nothing."""
        if self.attempt is not None:
            return f"{self.attempt.progress()}, at most {max(0.0, self.attempt.confirm_at - now):.0f} s more"
        if self._gathering is None:
            return ""
        if self._gathering.leader == self.me and self._lacks_nodes():
            return ("no peer of this run can be reached from outside, and one at least must average for the others: forward a "
                    "port to --listen, or --announce an address; training goes on")
        if self.me in self.tip.banned:
            until, why = self.tip.bans()[self.me]
            return f"left out by the others until round {until} ({REASONS[why]}); training goes on"
        if self._gathering.leader != self.me:
            return "waiting for the leader to start the round; training goes on"
        missing = self.law.config.run.min_peers - len(self._joins) - 1
        if self.tip.k == 0 and missing > 0:
            peers = "peer" if missing == 1 else "peers"
            return f"waiting for {missing} more {peers} to begin the run; share the join string"
        left = max(0.0, self._gathering.since + self.law.config.run.window_s - now)
        return f"gathering members: {len(self._joins) + 1} ready, at most {left:.0f} s more"

    # -- finding a leader

    def _pool(self, now: float) -> set[bytes]:
        """Who may lead: the last entry's members; the roster too where there are none or none of them answers."""
        members = {peer for peer in self.tip.members if not self.opinion.is_out(peer, self.tip)}
        if any(peer == self.me or not self.opinion.suspects(peer, now) for peer in members):
            return members
        return {peer for peer in members | self.roster if not self.opinion.is_out(peer, self.tip)} | {self.me}

    def _may_lead(self, peer: bytes, now: float) -> bool:
        g = self._gathering
        past = g is not None and peer in g.lost | g.passed
        return peer == self.me or not (past or self.opinion.suspects(peer, now) or peer in self.opinion.stalling)

    def _is_client(self, peer: bytes) -> bool:
        """Of members the chain says it, so that all agree on who leads."""
        if peer in self.tip.members:
            return peer in self.tip.clients
        return self.mode == CLIENT if peer == self.me else peer in self._clients

    def _order(self, peers: Iterable[bytes]) -> list[bytes]:
        """Who leads, and who after that; clients, whom not everybody can reach, after all others."""
        return sorted(leader_order(self.tip.head, list(peers)), key=self._is_client)

    def _first_leader(self, now: float) -> bytes:
        return next((peer for peer in self._order(self._pool(now)) if self._may_lead(peer, now)), self.me)

    def _seek(self, now: float) -> None:
        """Follow the first who may lead; a packet that has just become ready begins a gathering."""
        leader = self._first_leader(now)
        if self._gathering is None:
            self._gathering = Gathering(leader, since=now, turn_at=now, asked_at=now)
        self._gathering.leader, self._gathering.turn_at = leader, now
        self._ask_again(now)
        self._lead_on(now)

    def _follow(self, leader: bytes, now: float) -> None:
        g = self._gathering
        assert g is not None
        if leader != g.leader and leader not in self.opinion.stalling:
            g.leader, g.turn_at = leader, now
            self._ask_again(now)
            self._lead_on(now)

    def _join(self, leader: bytes) -> None:
        assert self._hello is not None
        self.outbox.append((leader, Join(self._hello.body, self._hello.signature, self.rate_kbps)))

    def _ask_again(self, now: float) -> None:
        """JOIN to the leader, or a poll to everybody expected who has not joined."""
        g = self._gathering
        assert g is not None
        g.asked_at = now
        if g.leader != self.me:
            self._join(g.leader)
            return
        for peer in sorted(self._pool(now) - set(self._joins) - {self.me}):
            self.ask(peer)

    def _follow_on(self, now: float) -> None:
        g, window_s = self._gathering, self.law.config.run.window_s
        assert g is not None
        if now < g.asked_at + ANSWER_S / 3:
            return
        answer = g.answers.get(g.leader)
        if g.silent(g.leader, now):
            g.lose(g.leader)
            self.opinion.suspect(g.leader, now)
            self._seek(now)
        elif answer is not None and answer.phase == TRAINING and self.tip.k and self.me not in self.tip.members:
            self._ask_again(now)  # a newcomer does not know when the next round is due: they come to it
        elif answer is not None and answer.phase == TRAINING and now > g.since + window_s:
            g.passed.add(g.leader)
            self._seek(now)
        elif self.tip.k and now > g.turn_at + window_s + 2 * ANSWER_S + longest_exchange_s(self.law):
            self.opinion.stalling.add(g.leader)
            self._seek(now)
        else:
            self._ask_again(now)

    # -- leading

    def _lead_on(self, now: float) -> None:
        g = self._gathering
        if g is None or g.leader != self.me or self.attempt is not None:
            return
        if now >= g.asked_at + ANSWER_S / 3:
            for peer in self._expected(now):
                if g.silent(peer, now):
                    g.lose(peer)
                    self.opinion.suspect(peer, now)
            self._ask_again(now)
        if self._may_start(now):
            self._start(now)

    def _expected(self, now: float) -> set[bytes]:
        """Who may still join or be ahead or busy: not those that joined, are lost, or stand at another head."""
        g = self._gathering
        assert g is not None
        elsewhere = {peer for peer, answer in g.answers.items()
                     if answer.recent[-1] != self.tip.head and not self._is_about_to_follow(answer, now)}
        return self._pool(now) - set(self._joins) - g.lost - elsewhere - {self.me}

    def _is_about_to_follow(self, answer: TipMessage, now: float) -> bool:
        """It has not yet heard that the entry is made which led here; it will within seconds, or it lies."""
        assert self._gathering is not None
        is_young = now < self._gathering.since + ANSWER_S
        return is_young and answer.phase == EXCHANGING and answer.recent[-1:] == self.tip.recent[-2:-1]

    def _may_start(self, now: float) -> bool:
        g, run, present = self._gathering, self.law.config.run, 1 + len(self._joins)
        assert g is not None
        if self.opinion.is_out(self.me, self.tip) or self._lacks_nodes():
            return False
        if self.tip.k == 0 and present < run.min_peers:
            g.enough_at = None
            return False
        g.enough_at = g.enough_at if g.enough_at is not None else now
        reached = self._expected(now)
        if present == 1 and reached & set(self.tip.members) and self._tries < ALONE_TRIES:
            return False
        expected = reached - self.opinion.stalling
        busy = [p for p in expected if p in g.answers and g.answers[p].phase == EXCHANGING]
        if expected - set(g.answers) or (busy and now < g.since + longest_exchange_s(self.law) + run.window_s):
            return False
        if not expected:
            return True
        if self.tip.k == 0:
            return now >= g.enough_at + min(SETTLE_S, run.window_s)
        return now >= g.since + run.window_s

    def _lacks_nodes(self) -> bool:
        """A client that is not the only peer makes no entries of its own: nobody could come and adopt them."""
        return self.mode == CLIENT and bool(self.roster or set(self.tip.members) - {self.me})

    def _start(self, now: float) -> None:
        assert self._hello is not None
        joins = {**self._joins, self.me: Join(self._hello.body, self._hello.signature, self.rate_kbps)}
        clients = {peer for peer, join in joins.items() if Hello.unpack(join.hello).client}
        chosen = sorted(choose_members(self.me, self.tip.head, joins, clients, self.law.config.run.max_group))
        rows = [joins[peer] for peer in chosen]
        nodes = [peer for peer in chosen if peer not in clients]
        spared = [peer for peer in nodes if self.opinion.blames(peer, now)][: len(nodes) // 2]
        modes = tuple(CLIENT if peer in clients or peer in spared else NODE for peer in chosen)
        scatter_s, gather_s, confirm_s = deadlines_s(self.law, min(row.rate for row in rows), len(rows))
        start = Start(
            leader=self.me, head=self.tip.head, k=self.tip.k + 1, attempt=self._tries,
            hellos=tuple(row.hello for row in rows), signatures=tuple(row.signature for row in rows),
            modes=modes, rates=tuple(row.rate for row in rows),
            scatter_ms=round(scatter_s * 1e3), gather_ms=round(gather_s * 1e3), confirm_ms=round(confirm_s * 1e3),
        )
        signed = Signed.make(start, self.identity)
        message = StartMessage(signed.body, signed.signature)
        self.outbox += [(peer, message) for peer in chosen if peer != self.me]
        self._enter(check_start(self.law, self.tip, signed), now)

    # -- messages

    def _on_poll(self, sender: bytes, poll: Poll, now: float) -> None:
        g, here = self._gathering, poll.head == self.tip.head and sender in self._pool(now)
        if g is not None and here and self._precedes(sender, g.leader):
            g.passed.discard(sender)
            self._follow(sender, now)
        elif g is not None and here and sender == g.leader:
            self._join(sender)  # it asks because it has no JOIN of this peer, or has dropped it with a lost attempt
        if self.attempt is not None and (poll.head, poll.phase) == (self.tip.head, GATHERING):
            self.attempt.on_regrouping(sender, now)
            self._harvest(now)
        self._say_tip(sender)

    def _precedes(self, peer: bytes, leader: bytes) -> bool:
        return peer != leader and self._order([peer, leader])[0] == peer

    def _say_tip(self, peer: bytes) -> None:
        leader = self._gathering.leader if self._gathering is not None and self.attempt is None else b""
        waypoint = self.waypoint.pack() if self.waypoint is not None else b""
        self.outbox.append((peer, TipMessage(self.tip.k, self.tip.recent[-8:], self.tip.weight, self.phase, leader, waypoint)))

    def _on_tip(self, sender: bytes, tip: TipMessage, now: float) -> None:
        head, g = tip.recent[-1], self._gathering
        claimed = self._heard_waypoint(sender, tip.waypoint)
        if self.attempt is not None and sender in self.attempt.others and self.attempt.head in tip.recent:
            self.attempt.on_committed()
            return
        if self.attempt is not None and head == self.tip.head and tip.phase != EXCHANGING:
            self.attempt.on_outside(sender, now)
        if head != self.tip.head and self._is_better(tip, claimed) and not self.opinion.distrusts(sender, now):
            self._tell_behind(sender, tip, now)
            return
        if g is None or (sender != g.leader and sender not in self._pool(now)):
            return
        g.answers[sender] = tip
        g.hear(sender, now)
        if head != self.tip.head and g.leader == sender:  # it is behind or on a lighter fork: it can't lead here
            g.passed.add(sender)
            self._seek(now)
        elif head == self.tip.head and tip.phase == GATHERING and tip.leader:
            self._reconsider(sender, tip.leader, now)
        self._lead_on(now)

    def _tell_behind(self, sender: bytes, tip: TipMessage, now: float) -> None:
        """Once, until the trainer has dealt with it. A stranger's claim ends nothing: it costs nothing to make."""
        if self._told_behind or (self.attempt is not None and sender not in self.attempt.others):
            return
        if self.attempt is not None or sender in self._pool(now):
            self._leave()
        self._told_behind = True
        self.outcomes.append(Behind(tip.k, tip.recent[-1], (sender,)))

    def _reconsider(self, sender: bytes, its_leader: bytes, now: float) -> None:
        """Of two leaders at one head the earlier in the order leads; a follower's word redirects."""
        g = self._gathering
        assert g is not None
        if g.leader == self.me and its_leader == sender and self._precedes(sender, self.me):
            self._follow(sender, now)
        elif g.leader == sender and its_leader != sender and self._may_lead(its_leader, now):
            self._follow(its_leader, now)

    def _heard_waypoint(self, sender: bytes, packed: bytes) -> Waypoint | None:
        try:
            waypoint = read_waypoint(self.law, packed)
        except BadPacket:
            self.opinion.name(sender, BROKE_RULE, self.tip.k + 1)
            return None
        if waypoint is not None:
            self.show_waypoint(waypoint)
        return waypoint

    def _is_better(self, tip: TipMessage, claimed: Waypoint | None) -> bool:
        if self.tip.head in tip.recent[:-1]:
            return True
        if tip.recent[-1] in self.tip.recent:
            return False
        is_heavier = heavier(tip.weight, tip.recent[-1], self.tip.weight, self.tip.head)
        return is_heavier or claims_more(self.tip, self.waypoint, claimed)

    def _on_join(self, sender: bytes, join: Join, now: float) -> None:
        try:
            signed = Signed(join.hello, join.signature)
            hello = Hello.unpack(join.hello)
            if hello.peer != sender:
                raise BadPacket("JOIN brings another peer's HELLO")
            if hello.head == self.tip.head and not self._is_refused(hello):
                check_hello(self.law, self.tip, hello, signed)
                self._keep_join(sender, join, now)
                if self.attempt is not None and self.attempt.start.start.leader != self.me:
                    self.attempt.on_regrouping(sender, now)  # it follows this peer, not who led this attempt
            elif hello.k > self.tip.k + 1:
                self.ask(sender)
            elif hello.k == self.tip.k + 1 and hello.head != self.tip.head:
                self.opinion.elsewhere(sender, hello.k)
        except BadPacket:
            self.opinion.name(sender, BROKE_RULE, self.tip.k + 1)
            return
        self._say_tip(sender)
        self._lead_on(now)

    def _is_refused(self, hello: Hello) -> bool:
        """Whether it takes no part: by the chain, by proof, for its packet was counted before, or for it gave up too often."""
        if self.opinion.is_old(hello.digest):
            self.opinion.name(hello.peer, OLD_PACKET, hello.k)
            return True
        return self.opinion.is_out(hello.peer, self.tip) or hello.peer in self.opinion.stalling

    def _keep_join(self, sender: bytes, join: Join, now: float) -> None:
        if len(self._joins) < MAX_JOINS or sender in self._joins or sender in self.tip.members:
            self._joins[sender] = join
        if self._gathering is not None and sender in self._pool(now):
            self._gathering.hear(sender, now)

    def _on_start(self, sender: bytes, signed: Signed, now: float) -> None:
        try:
            start = check_start(self.law, self.tip, signed)
        except BadPacket:
            if self._gathering is not None and self._gathering.leader == sender:
                self.opinion.failed(sender)
                self.opinion.name(sender, BROKE_RULE, self.tip.k + 1)
                self._gathering.passed.add(sender)
                self._seek(now)
            self._say_tip(sender)
            return
        if start.group in self._groups or self.me not in start.members:
            return
        for cheat in self.opinion.proofs.keys() & set(start.members):
            self.outbox.append((sender, self.opinion.proofs[cheat]))
        g, mine = self._gathering, self._hello is not None and self._hello.body in start.start.hellos
        mine = mine and self.opinion.proofs.keys().isdisjoint(start.members)
        bounded = start.start.confirm_ms <= 1e3 * longest_exchange_s(self.law)
        if g is None or g.leader != start.start.leader or not (mine and bounded):
            if len(self._groups) < MAX_GROUPS:
                self._groups.add(start.group)
                self.outbox += [(peer, Abandon(start.group)) for peer in start.within_reach(self.me)]
            return
        self._enter(start, now)

    def _enter(self, start: CheckedStart, now: float) -> None:
        assert self._packet is not None
        self._gathering = None
        self._groups.add(start.group)
        self.attempt = Attempt(self.law, self.identity, self.tip, start, self._packet, now)
        for peer in self.attempt.reach:
            if self.opinion.suspects(peer, now):  # it broke off after its JOIN: if nobody is there, the question fails at once
                self.ask(peer)
        early, self._early = self._early, {}
        for sender, (group, messages, _) in early.items():
            if group == start.group:
                for message in messages:
                    self.attempt.on_message(sender, message, now)

    def _on_exchange(self, sender: bytes, message: Record, now: float) -> None:
        group: bytes | None = getattr(message, "group", None)
        for attempt in (self.attempt, self._last):
            if attempt is not None and group == attempt.start.group:
                attempt.on_message(sender, message, now)
                return
        if self._gathering is not None and group is not None:
            self._keep_early(sender, group, message)

    def _keep_early(self, sender: bytes, group: bytes, message: Record) -> None:
        """Other members' parts can outrun the leader's START. Of one sender: one group, one packet each way."""
        known, messages, size = self._early.get(sender, (group, [], 0))
        if known != group:
            messages, size = [], 0
        size += 200 + sum(len(getattr(message, name, b"")) for name in ("data", "body"))
        layout, others = self.law.layout, sum(held for peer, (_, _, held) in self._early.items() if peer != sender)
        fits = size <= layout.up_bytes + layout.down_bytes + 100_000
        if fits and others + size <= EARLY_FACTOR * layout.up_bytes + 1_000_000:
            messages.append(message)
            self._early[sender] = (group, messages, size)

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
            self._lost(self._last, result, now)
        elif result is not None:
            self.tip = advance(self.law, self.tip, result)
            self.opinion.learn(result, self.tip)
            self._measure(result)
            for peer in sorted(set(self._joins) - set(result.start.members)):
                self._say_tip(peer)  # it came while the attempt ran: the sooner it follows, the sooner it takes part
            self._reset()
            self.outcomes.append(Committed(result))

    def _lost(self, attempt: Attempt, lost: Lost, now: float) -> None:
        self._tries += 1
        for peer in lost.suspects:
            self.opinion.blame(peer, now)
        for peer in lost.left | {attempt.start.start.leader}:
            self.opinion.failed(peer)
        if lost.proof is not None and self.opinion.convict(lost.proof, self.tip.k + 1):
            self.outbox += [(peer, lost.proof) for peer in attempt.reach]
        if now >= attempt.began_at + attempt.gather_s:  # no deadline may stay shorter than what the links can do
            self.rate_kbps = max(1, self.rate_kbps // 2)
        self._joins = {}
        self.outcomes.append(Failed(lost.reason, now + min(10.0, 0.1 * 2 ** min(self._tries, 10))))

    def _measure(self, checked: Checked) -> None:
        """A link that was too slow for its rate says half of it next time, and a tenth more after each entry in time."""
        at = checked.start.members.index(self.me)
        late = any(record.reasons[at] == TOO_LATE for record in checked.records)
        more = min(self._declared_kbps, self.rate_kbps + self.rate_kbps // 10 + 1)
        self.rate_kbps = max(1, self.rate_kbps // 2) if late else more

    def _leave(self) -> None:
        """Stop what is under way: somebody else has decided."""
        if self.attempt is not None:
            self.attempt.abandon("somebody else is ahead")
            self.outbox += self.attempt.outbox
            self._tries += 1
        self.attempt = self._gathering = None

    def _reset(self) -> None:
        self._packet = self._hello = self._gathering = None
        self._tries, self._told_behind = 0, False
        self._joins, self._early, self._groups = {}, {}, set()
        self.opinion.new_head()


