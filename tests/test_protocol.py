"""The protocol over real frames in virtual time: every single fault at every message, and what must hold whatever happens.

A fault hits the nth message of a peer. Afterwards all live peers must stand at one head, having committed or replayed the
same bytes, and the entry must be the mean of exactly what its records count (kit.assert_agree). `Driver` is a trainer
without learning: it begins again after Failed and replays when Behind.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import time

import pytest
import torch
from kit import VECTORS, Driver, Swarm, assert_agree, established, identity, law, packet, vector

from p2p_muloco.allreduce import Attempt, Lost
from p2p_muloco.chain import Hello, Signed, SpanRecord, Start, advance, check_start, leader_order
from p2p_muloco.deadlines import deadlines_s, longest_exchange_s
from p2p_muloco.exchange import Behind, Committed, Failed
from p2p_muloco.gathering import ANSWER_S
from p2p_muloco.local import Fault, LocalExchange, LocalNetwork
from p2p_muloco.member import MAX_JOINS, Member
from p2p_muloco.messages import (
    EXCHANGING,
    GATHERING,
    KINDS,
    TRAINING,
    Abandon,
    Averaged,
    Confirm,
    Fetch,
    Join,
    Parts,
    Poll,
    Reassign,
    RecordMessage,
    StartMessage,
    TipMessage,
)
from p2p_muloco.wire import Record

H = [8, 8, 5, 1, 8, 7, 16, 3, 9]
RATES = [20_000, 5_000, 100_000, 20_000, 1_000, 700, 20_000, 20_000, 8_000]
KINDS_OF_FAULT = [("kill", 0.0), ("freeze", 1.0), ("freeze", 4.0), ("freeze", 12.0), ("freeze", 60.0), ("delay", 4.0),
                  ("delay", 12.0), ("delay", 60.0), ("drop", 0.0), ("corrupt", 0.0), ("duplicate", 0.0),
                  ("duplicate", 12.0)]


def run(n: int, *faults: Fault, genesis: bool = False, entries: int = 2, limit_s: float = 120.0) -> Driver:
    """A swarm through two entries, E of the first being the members of the second."""
    run_law = law(VECTORS, min_peers=min(n, 2))
    tip = run_law.genesis if genesis else established(run_law, n)
    driver = Driver(Swarm(run_law, n, h=H[:n], rates=RATES[:n], faults=faults, tip=tip))
    assert driver.run(tip.k + entries, limit_s), [m.waiting_for(driver.network.now) for m in driver.swarm.members]
    assert_agree(driver)
    return driver


def messages_sent(driver: Driver) -> list[int]:
    return list(driver.network._sent.values())


@pytest.mark.parametrize("genesis", [False, True])
@pytest.mark.parametrize("n", range(1, 10))
def test_without_faults_all_commit_the_same_at_once(n: int, genesis: bool) -> None:
    driver = run(n, genesis=genesis)
    assert driver.network.now < 0.5
    for peer in driver.peers:
        assert [len(checked.counted) for checked in peer.entries.values()] == [n, n]
        assert all(isinstance(outcome, Committed | Behind) for outcome in peer.outcomes)


@pytest.mark.parametrize("kind,seconds", KINDS_OF_FAULT)
def test_two_members_and_a_fault_at_every_message(kind: str, seconds: float) -> None:
    for peer, sent in enumerate(messages_sent(run(2))):
        for nth in range(sent + 2):
            driver = run(2, Fault(kind, peer, nth, seconds))
            assert driver.network.now <= seconds + longest_exchange_s(driver.swarm.law)


@pytest.mark.parametrize("kind,seconds", [("freeze", 12.0), ("delay", 12.0), ("drop", 0.0)])
def test_three_members_and_a_fault_at_every_message(kind: str, seconds: float) -> None:
    for peer, sent in enumerate(messages_sent(run(3))):
        for nth in range(sent // 2 + 2):
            driver = run(3, Fault(kind, peer, nth, seconds), entries=1)
            assert driver.network.now <= seconds + longest_exchange_s(driver.swarm.law)


@pytest.mark.parametrize("seed", range(6))
def test_many_members_and_sampled_faults(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(12):
        n, (kind, seconds) = rng.randint(3, 9), rng.choice(KINDS_OF_FAULT)
        driver = run(n, Fault(kind, rng.randrange(n), rng.randrange(50), seconds), genesis=rng.random() < 0.3)
        assert driver.network.now <= seconds + longest_exchange_s(driver.swarm.law)


@pytest.mark.parametrize("seed", range(3))
def test_two_faults_neither_hang_nor_split_when_nobody_is_cut_off(seed: int) -> None:
    """Kills, drops and duplicates, two at once: short of a partition, so still one chain."""
    rng = random.Random(100 + seed)
    for _ in range(20):
        n = rng.randint(2, 6)
        faults = [Fault(rng.choice(["kill", "drop", "duplicate"]), rng.randrange(n), rng.randrange(40), rng.choice([0, 7.0]))
                  for _ in range(2)]
        run(n, *faults)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_killed_member_costs_no_deadline(n: int) -> None:
    """Broken connections close everything early, and a dead reducer's span goes to another: at most a second of asking."""
    for peer, sent in enumerate(messages_sent(run(n, entries=1))):
        for nth in range(sent):
            driver = run(n, Fault("kill", peer, nth), entries=1)
            assert driver.network.now < 1.1
            leads = leader_order(established(driver.swarm.law, n).head, [m.me for m in driver.swarm.members])[0]
            for i in driver.live():  # START of a dead leader may have reached too few
                failures = sum(isinstance(outcome, Failed) for outcome in driver.peers[i].outcomes)
                assert failures <= (driver.swarm.members[peer].me == leads)


def test_the_leader_killed_or_frozen_before_start() -> None:
    run_law = law(VECTORS)
    tip = established(run_law, 4)
    ids = [identity(i).peer_id for i in range(4)]
    leader = ids.index(leader_order(tip.head, ids)[0])
    for fault, limit_s in ((Fault("kill", leader, 0), 0.5), (Fault("freeze", leader, 0, 1e4), 3 * ANSWER_S)):
        driver = Driver(Swarm(run_law, 4, faults=[fault], tip=tip))
        others = [i for i in range(4) if i != leader]
        driver.live = lambda others=others: others  # type: ignore[method-assign]
        assert driver.run(2, limit_s)
        assert ids[leader] not in driver.peers[others[0]].tip.members
        assert_agree(driver)


def test_a_frozen_member_costs_at_most_the_deadlines() -> None:
    """Frozen for good right after START: two attempts at most, each bounded."""
    for nth in range(2, 8):
        driver = Driver(Swarm(law(VECTORS), 3, faults=[Fault("freeze", 2, nth, 1e5)], tip=established(law(VECTORS), 3)))
        driver.live = lambda: [0, 1]  # type: ignore[method-assign]
        assert driver.run(2, longest_exchange_s(driver.swarm.law) + 2 * ANSWER_S + driver.swarm.law.config.run.window_s)
        assert_agree(driver)


def test_a_newcomer_that_is_not_in_e_joins() -> None:
    run_law = law(VECTORS)
    driver = Driver(Swarm(run_law, 4, tip=established(run_law, 3)), late_s=[0.02, 0.02, 0.02, 0.0])
    assert driver.run(3, 30.0)
    assert_agree(driver)
    assert [len(peer.tip.members) for peer in driver.peers] == [4] * 4


def test_a_newcomer_at_genesis_replays_and_joins() -> None:
    run_law = law(VECTORS, min_peers=3)
    swarm = Swarm(run_law, 3)
    driver = Driver(swarm)
    assert driver.run(2, 30.0)
    late = Member(run_law, identity(3), run_law.genesis)
    swarm.members.append(late)
    swarm.h.append(4)
    swarm.exchanges.append(LocalExchange(driver.network, late))
    zeros = [torch.zeros(run_law.layout.n_elements) for _ in range(2)]
    driver.peers.append(dataclasses.replace(driver.peers[0], tip=run_law.genesis, anchor=zeros[0], momentum=zeros[1],
                                            entries={}, outcomes=[], retry_at=driver.network.now))
    assert driver.run(4, 60.0)
    for peer in driver.peers[:3]:  # the others still train when the newcomer, level now, is ready
        peer.retry_at = driver.network.now + 1.0
    assert driver.run(5, 60.0)
    assert_agree(driver)
    assert isinstance(driver.peers[3].outcomes[0], Behind)
    assert late.me in driver.peers[0].tip.members


def test_genesis_waits_for_min_peers_and_says_so() -> None:
    swarm = Swarm(law(VECTORS, min_peers=3), 2)
    swarm.begin()
    swarm.network.advance_to(600.0)
    assert all(not member.outcomes for member in swarm.members)
    leader = next(m for m in swarm.members if m._gathering and m._gathering.leader == m.me)
    assert leader.waiting_for(600.0) == "waiting for 1 more peer to begin the run; share the join string"
    third = Member(swarm.law, identity(7), swarm.law.genesis)
    exchange = LocalExchange(swarm.network, third)
    exchange.begin(packet(swarm.law, vector(swarm.law, 7)))
    assert swarm.network.run(lambda: bool(third.outcomes), 10.0)
    assert isinstance(third.outcomes[0], Committed) and len(third.tip.members) == 3


def test_a_peer_alone_commits_alone_only_if_no_member_answers() -> None:
    run_law = law(VECTORS)
    tip = established(run_law, 2)
    alive = Swarm(run_law, 2, tip=tip)
    alive.begin(0)  # the other trains on: it answers, and is waited for
    alive.network.advance_to(1000.0)
    assert not alive.members[0].outcomes
    alive.network.kill(alive.members[1].me)
    assert alive.network.run(lambda: bool(alive.members[0].outcomes), 1.5)
    assert alive.members[0].tip.members == (alive.members[0].me,)
    silent = Swarm(run_law, 2, tip=tip)
    silent.network._frozen[silent.members[1].me] = 1e9
    silent.begin(0)
    assert silent.network.run(lambda: bool(silent.members[0].outcomes), 4 * ANSWER_S)


def test_a_member_that_stops_answering_after_it_answered_is_not_waited_for_ever() -> None:
    swarm = Swarm(law(VECTORS), 2, tip=established(law(VECTORS), 2))
    swarm.begin(0)
    swarm.network.advance_to(20.0)
    swarm.network._frozen[swarm.members[1].me] = 1e9
    assert swarm.network.run(lambda: bool(swarm.members[0].outcomes), 3 * ANSWER_S)


def test_the_ready_do_not_wait_longer_than_the_window_for_a_slow_member() -> None:
    run_law = law(VECTORS, window_s=5.0)
    driver = Driver(Swarm(run_law, 4, tip=established(run_law, 4)), late_s=[0, 0, 0, 500.0])
    driver.live = lambda: [0, 1, 2]  # type: ignore[method-assign]
    assert driver.run(2, 5.0 + 3 * ANSWER_S)
    del driver.live  # type: ignore[method-assign]
    assert driver.run(2, 600.0)
    assert_agree(driver)


def test_who_stood_still_asks_before_it_commits() -> None:
    """All spans are held and confirmed by nobody; the machine sleeps; the others go on; it must not commit its own."""
    swarm = Swarm(law(VECTORS), 2, tip=established(law(VECTORS), 2))
    swarm.begin()
    assert swarm.network.run(lambda: any(m.attempt and m.attempt._root for m in swarm.members))
    holder = next(m for m in swarm.members if m.attempt and m.attempt._root)
    holder.on_time(swarm.network.now + 3600.0)
    (outcome,) = holder.outcomes
    assert isinstance(outcome, Failed) and "stood still" in outcome.reason and holder.tip.k == 1


def start_of(swarm: Swarm) -> StartMessage:
    """Let the network run until somebody has started an attempt, and give its START."""
    assert swarm.network.run(lambda: any(m.attempt for m in swarm.members))
    member = next(m for m in swarm.members if m.attempt)
    assert member.attempt is not None
    return StartMessage(member.attempt.start.signed.body, member.attempt.start.signed.signature)


def test_an_old_start_is_never_entered_again() -> None:
    """A second run of one attempt could commit alone, or sign a second version of a span."""
    swarm = Swarm(law(VECTORS), 3, tip=established(law(VECTORS), 3))
    swarm.begin()
    start = start_of(swarm)
    assert swarm.network.run(lambda: all(m.attempt for m in swarm.members))
    for member in swarm.members:
        assert member.attempt is not None
        member.attempt.abandon("for this test")
        member.on_time(swarm.network.now)
        swarm.network.flush(member)
    swarm.network.advance_to(swarm.network.now + 0.5)
    follower = next(m for m in swarm.members if m.me != leader_order(m.tip.head, m.tip.members)[0])
    follower.begin(swarm.packets[swarm.members.index(follower)], swarm.network.now)
    follower.deliver(leader_order(follower.tip.head, follower.tip.members)[0], start, swarm.network.now)
    assert follower.phase == GATHERING


def test_the_leaders_question_from_before_its_start_may_come_after_it() -> None:
    """Found by the model check: taken for a word that it gathers anew, it ended every attempt, for ever."""
    swarm = Swarm(law(VECTORS), 3, tip=established(law(VECTORS), 3))
    swarm.begin()
    leader, *others = leader_order(swarm.members[0].tip.head, swarm.members[0].tip.members)
    follower, third = (next(m for m in swarm.members if m.me == peer) for peer in others)
    assert swarm.network.run(lambda: follower.attempt is not None)
    assert follower.attempt is not None
    question = Poll(follower.tip.head, 1, GATHERING)
    follower.deliver(leader, question, swarm.network.now)
    assert follower.attempt.result is None and not follower.attempt._left
    follower.deliver(third.me, question, swarm.network.now)  # another member that gathers is not in this attempt
    assert follower.attempt.result is None and follower.attempt._left == {third.me}


def test_a_start_with_endless_deadlines_or_of_a_stranger_is_refused() -> None:
    run_law = law(VECTORS)
    swarm = Swarm(run_law, 3, tip=established(run_law, 3))
    tip, ids = swarm.members[0].tip, {m.me: who for m, who in zip(swarm.members, swarm.identities, strict=True)}
    leader, follower = leader_order(tip.head, tip.members)[:2]
    me = next(m for m in swarm.members if m.me == follower)
    me.begin(swarm.packets[swarm.members.index(me)], 0.0)
    assert me._hello is not None
    hellos = {follower: me._hello}
    for peer in tip.members:
        hello = Hello(peer=peer, head=tip.head, k=2, h=8, pace_mhz=1000, client=0, digest=bytes(32), state=bytes(32))
        hellos.setdefault(peer, Signed.make(hello, ids[peer]))
    rows = [hellos[peer] for peer in sorted(hellos)]
    good = Start(leader=leader, head=tip.head, k=2, attempt=0, hellos=tuple(r.body for r in rows),
                 signatures=tuple(r.signature for r in rows), modes=(1, 1, 1), rates=(9, 9, 9), scatter_ms=5000,
                 gather_ms=10_000, confirm_ms=15_000)
    third = leader_order(tip.head, tip.members)[2]
    for start in (dataclasses.replace(good, confirm_ms=2**31), dataclasses.replace(good, leader=third)):
        signed = Signed.make(start, ids[start.leader])
        check_start(run_law, tip, signed)  # a valid START, only not one to follow
        me.outbox.clear()
        me.deliver(start.leader, StartMessage(signed.body, signed.signature), 0.0)
        assert me.phase == GATHERING and all(isinstance(message, Abandon) for _, message in me.outbox)
    signed = Signed.make(good, ids[leader])
    me.deliver(leader, StartMessage(signed.body, signed.signature), 0.0)
    assert me.phase == EXCHANGING


def test_two_leaders_at_one_head_become_one() -> None:
    """Every peer begins as its own leader, as if each had suspected all others; one entry comes of it."""
    for n in (2, 3, 5):
        run_law = law(VECTORS)
        swarm = Swarm(run_law, n, tip=established(run_law, n))
        for member in swarm.members:
            for other in swarm.members:
                if other is not member:
                    member.opinion.suspect(other.me, 0.0)
        driver = Driver(swarm)
        assert driver.run(2, 30.0)
        assert_agree(driver)
        assert len(driver.peers[0].entries[2].counted) == n


def test_two_versions_of_a_span_void_the_attempt_and_name_the_reducer() -> None:
    swarm = Swarm(law(VECTORS), 2, tip=established(law(VECTORS), 2))
    swarm.begin()
    assert swarm.network.run(lambda: any(m.attempt and m.attempt._root for m in swarm.members))
    holder = next(m for m in swarm.members if m.attempt and m.attempt._root)
    liar = next(who for who in swarm.identities if who.peer_id != holder.me)
    attempt = holder.attempt
    assert attempt is not None
    held = next(held for held in attempt.held if held.span.reducer == liar.peer_id)
    assert held.whole is not None
    other = dataclasses.replace(SpanRecord.unpack(held.whole.record.body), digest=bytes(32))
    signed = Signed.make(other, liar)
    attempt.on_message(liar.peer_id, RecordMessage(attempt.start.group, signed.body, signed.signature), 0.0)
    assert isinstance(attempt.result, Lost) and attempt.result.suspects == {liar.peer_id}


def test_a_reducer_that_withholds_its_span_reduces_nothing_in_the_next_attempt() -> None:
    run_law = law(VECTORS)
    swarm = Swarm(run_law, 3, tip=established(run_law, 3))
    liar, network = swarm.members[0].me, swarm.network
    send = network._send
    hidden = (Averaged.KIND, RecordMessage.KIND)
    network._send = lambda sender, to, frame: (  # type: ignore[method-assign]
        None if sender == liar and frame[4] in hidden else send(sender, to, frame)
    )
    driver = Driver(swarm)
    assert driver.run(2, 2 * longest_exchange_s(run_law))
    failures = [sum(isinstance(outcome, Failed) for outcome in peer.outcomes) for peer in driver.peers]
    assert max(failures) <= 1
    assert_agree(driver)


# -- a hostile member, and memory


def honest(n: int = 3) -> Swarm:
    return Swarm(law(VECTORS), n, tip=established(law(VECTORS), n))


def test_behind_is_told_once_until_the_trainer_has_dealt_with_it() -> None:
    member = honest().members[0]
    better = TipMessage(9, (member.tip.head, b"\x09" * 32), 10**6, TRAINING, b"", b"")
    for i in range(1000):
        member.deliver(identity(i + 10).peer_id, better, float(i))
    assert member.outcomes == [Behind(9, b"\x09" * 32, (identity(10).peer_id,))]
    member.distrust(identity(10).peer_id, 2000.0)
    member.deliver(identity(10).peer_id, better, 2000.0)
    assert len(member.outcomes) == 1
    member.deliver(identity(11).peer_id, better, 2000.0)
    assert len(member.outcomes) == 2


def test_a_stranger_that_claims_to_be_ahead_stops_no_exchange() -> None:
    swarm = honest()
    swarm.begin()
    start_of(swarm)
    member = next(m for m in swarm.members if m.attempt)
    member.deliver(identity(99).peer_id, TipMessage(9, (b"\x09" * 32,), 10**9, TRAINING, b"", b""), swarm.network.now)
    assert member.phase == EXCHANGING and not member.outcomes


def test_memory_is_bounded_against_strangers() -> None:
    run_law = law(VECTORS)
    member = Member(run_law, identity(0), established(run_law, 3))
    member.begin(packet(run_law, vector(run_law, 0)), 0.0)
    for i in range(2000):
        who = identity(i + 10)
        hello = Hello(peer=who.peer_id, head=member.tip.head, k=2, h=1, pace_mhz=1, client=0, digest=bytes(32), state=bytes(32))
        if i < 2 * MAX_JOINS:
            signed = Signed.make(hello, who)
            member.deliver(who.peer_id, Join(signed.body, signed.signature, 1), 0.0)
        member.deliver(who.peer_id, TipMessage(0, (b"\x07" * 32,), 0, TRAINING, b"", b""), 0.0)
        for group in range(3):
            member.deliver(who.peer_id, Parts(bytes([group]) * 32, 0, 1, bytes(1000)), 0.0)
        member.gone(who.peer_id, 0.0) if i >= 2 * MAX_JOINS else None
        member.outbox.clear()
    assert member._gathering is not None and len(member._gathering.answers) <= 3
    assert len(member._joins) <= MAX_JOINS and len(member.opinion._until["suspected"]) <= 1024
    held = sum(len(m.data) for _, messages, _ in member._early.values() for m in messages if isinstance(m, Parts))
    assert held <= 4 * run_law.layout.up_bytes + 1_000_000
    assert not member.outcomes


@pytest.mark.parametrize("clients", itertools.product([False, True], repeat=2))
def test_nobody_is_woken_for_what_it_will_not_do(clients: tuple[bool, ...]) -> None:
    """A time to wake at that stays in the past once acted upon makes the network loop spin on a whole core."""
    run_law = law()
    member, outside = Member(run_law, identity(0), established(run_law, 3)), [identity(7).peer_id, identity(8).peer_id]
    member.set_roster([identity(i).peer_id for i in (1, 2)] + outside, 0.0,
                      [peer for peer, is_client in zip(outside, clients, strict=True) if is_client])
    for now in (0.0, 61.0, 500.0, 500.0):
        member.on_time(now)
        assert member.wake_at is None or member.wake_at > now
        assert (member.wake_at is None) == all(clients)


def random_message(rng: random.Random, swarm: Swarm, seen: list[Record]) -> Record:
    """A valid record of any kind, most of it about what is really going on."""
    if seen and rng.random() < 0.4:
        return rng.choice(seen)
    groups = [m.attempt.start.group for m in swarm.members if m.attempt] + [bytes(32)]
    heads = [m.tip.head for m in swarm.members] + [b"\x05" * 32]
    group, head, n = rng.choice(groups), rng.choice(heads), rng.randint(0, 5)
    peer = rng.choice(swarm.members).me
    return rng.choice([
        Poll(head, n, rng.randint(0, 2)), TipMessage(n, (rng.choice(heads), head), n * 20, rng.randint(0, 2), peer, b""),
        TipMessage(n, (head,), n, GATHERING, b"", b""), Join(rng.randbytes(40), rng.randbytes(64), 1),
        StartMessage(rng.randbytes(50), rng.randbytes(64)), Parts(group, n, n + 1, rng.randbytes(rng.choice([0, 256, 384]))),
        Averaged(group, n, rng.randint(0, 2), n, n + 1, rng.randbytes(256)), Fetch(group, n),
        RecordMessage(group, rng.randbytes(50), rng.randbytes(64)), Confirm(group, peer, rng.randbytes(32), rng.randbytes(64)),
        Reassign(group, rng.randbytes(50), rng.randbytes(64)), Abandon(group),
    ])


@pytest.mark.parametrize("seed", range(8))
def test_a_member_survives_any_message_at_any_time(seed: int) -> None:
    """Valid records of every kind, true ones replayed included, from members and strangers; then the swarm goes on."""
    rng, seen = random.Random(seed), []
    swarm = honest(3)
    deliver = Member.deliver

    def spying(member: Member, sender: bytes, message: Record, now: float) -> None:
        seen.append(message)
        deliver(member, sender, message, now)

    driver = Driver(swarm)
    for member in swarm.members:
        member.deliver = spying.__get__(member)  # type: ignore[method-assign]
    for _ in range(400):
        driver.run(3, rng.choice([0.0, 0.01, 0.3]))
        member, sender = rng.choice(swarm.members), rng.choice([*swarm.identities, identity(50)]).peer_id
        if sender != member.me and not (driver.peers[0].tip.k == 3 == driver.peers[1].tip.k == driver.peers[2].tip.k):
            message = random_message(rng, swarm, seen)
            if not isinstance(message, TipMessage) or message.recent[-1] in (m.tip.head for m in swarm.members):
                deliver(member, sender, message, driver.network.now)
                driver.network.flush(member)
    assert set(map(type, seen)) <= set(KINDS.values())
    assert driver.run(4, 20 * longest_exchange_s(swarm.law))


def test_deadlines_are_bounded_whatever_a_peer_says_of_its_link() -> None:
    run_law = law()
    for rate, n in itertools.product((1, 100, 500, 20_000, 10**7), (1, 2, 32)):
        assert deadlines_s(run_law, rate, n)[2] < longest_exchange_s(run_law)
    assert deadlines_s(run_law, 1, 2)[2] == deadlines_s(run_law, 500, 2)[2]


def test_more_ready_than_max_group_leaves_the_rest_waiting_then_behind() -> None:
    run_law = law(VECTORS, max_group=4)
    driver = Driver(Swarm(run_law, 6, tip=established(run_law, 6)))
    assert driver.run(4, 60.0)
    assert_agree(driver)
    assert {len(checked.counted) for checked in driver.peers[0].entries.values()} == {4}


def test_replaying_from_the_first_entry_gives_the_same_tip() -> None:
    driver = run(3, genesis=True, entries=3)
    tip = driver.swarm.law.genesis
    for k in (1, 2, 3):
        tip = advance(driver.swarm.law, tip, driver.peers[0].entries[k])
    assert tip == driver.peers[0].tip == driver.swarm.members[1].tip


def test_virtual_time_takes_no_time() -> None:
    before = time.monotonic()
    LocalNetwork().advance_to(1e6)
    assert time.monotonic() - before < 1.0


def test_an_attempt_says_what_it_waits_for() -> None:
    swarm = honest(2)
    swarm.begin()
    start_of(swarm)
    leader = next(m for m in swarm.members if m.attempt)
    assert isinstance(leader.attempt, Attempt)
    assert leader.waiting_for(swarm.network.now).startswith("averaging with 1 peers: ")
    assert swarm.network.run(lambda: bool(leader.attempt and leader.attempt._root) or bool(leader.outcomes))
