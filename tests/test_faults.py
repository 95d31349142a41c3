"""What an exchange does when members die, freeze, stall or vanish while it runs: who is lost costs seconds, not the round."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from kit import VECTORS, Driver, Swarm, assert_agree, established, law

from p2p_muloco import deadlines as deadlines_module
from p2p_muloco.allreduce import SILENCE_S, Attempt
from p2p_muloco.chain import TOO_LATE, VANISHED, leader_order
from p2p_muloco.exchange import Failed
from p2p_muloco.local import Fault, LocalNetwork
from p2p_muloco.member import ANSWER_S
from p2p_muloco.messages import Averaged, RecordMessage

WIDE = {f"t{i}": (64, 64) for i in range(8)}  # eight pieces, so that each of up to eight members reduces one


def exchanging(n: int, *faults: Fault, **network: object) -> Driver:
    """Members that have all entered the first attempt."""
    run_law = law(WIDE, part_elements=4096)
    net = LocalNetwork(faults=faults, **network)  # type: ignore[arg-type]
    driver = Driver(Swarm(run_law, n, tip=established(run_law, n), network=net))
    for i in range(n):
        driver._react(i, 2)
    assert net.run(lambda: all(m.attempt for m in driver.swarm.members))
    return driver


def attempts(driver: Driver) -> list[Attempt]:
    found = [m.attempt or m._last for m in driver.swarm.members]
    assert all(found)
    return [attempt for attempt in found if attempt]


def index_of(driver: Driver, peer: bytes) -> int:
    return [m.me for m in driver.swarm.members].index(peer)


def failures(driver: Driver) -> int:
    return sum(isinstance(outcome, Failed) for i in driver.live() for outcome in driver.peers[i].outcomes)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_a_reducer_killed_at_any_moment_has_its_span_reduced_by_another_in_the_same_attempt(n: int) -> None:
    for steps in range(0, 60, 7):
        driver = exchanging(n)
        reducer = attempts(driver)[0].start.spans[0].reducer
        for _ in range(steps):
            driver.network.step()
        if all(m.attempt is None for m in driver.swarm.members):
            break
        driver.network.kill(reducer)
        assert driver.run(2, 2.0), steps
        assert_agree(driver)
        assert failures(driver) == 0


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_leader_killed_in_mid_exchange_is_followed_by_the_next(n: int) -> None:
    """Its own span, and another reducer's that dies after it, are given away by the next in order."""
    driver = exchanging(n)
    leader = attempts(driver)[0].start.start.leader
    driver.network.kill(leader)
    if n > 4:
        driver.network.kill(next(span.reducer for span in attempts(driver)[0].start.spans if span.reducer != leader))
    assert driver.run(2, 2.0)
    assert_agree(driver)
    assert failures(driver) == 0


def test_most_reducers_one_after_another() -> None:
    driver = exchanging(8)
    spans = attempts(driver)[0].start.spans
    for span in spans[:4]:
        driver.network.kill(span.reducer)
        driver.network.advance_to(driver.network.now + 0.025)
    assert driver.run(2, 2.0)
    assert_agree(driver)
    assert failures(driver) == 0


def test_with_more_than_half_gone_the_attempt_ends_at_once_and_the_rest_go_on_alone() -> None:
    driver = exchanging(5)
    for span in attempts(driver)[0].start.spans[:3]:
        driver.network.kill(span.reducer)
    assert driver.run(2, 3.0)
    assert_agree(driver)
    assert len(driver.peers[driver.live()[0]].tip.members) == 2


@pytest.mark.parametrize("n", [3, 6])
def test_a_frozen_member_is_lost_after_the_silence_and_its_span_reduced_by_another(n: int) -> None:
    """SIGSTOP breaks no connection: only silence tells."""
    driver = exchanging(n)
    frozen = attempts(driver)[0].start.spans[0].reducer
    driver.network._frozen[frozen] = 1e9
    others = [i for i in range(n) if i != index_of(driver, frozen)]
    driver.live = lambda: others  # type: ignore[method-assign]
    began = driver.network.now
    assert driver.run(2, 2 * SILENCE_S + 3.0)
    assert driver.network.now - began < SILENCE_S + 3.0
    assert_agree(driver)
    assert failures(driver) == 0
    reasons = {record.reasons[attempts(driver)[0].start.members.index(frozen)]
               for record in driver.peers[others[0]].entries[2].records}
    assert reasons <= {0, VANISHED}


def test_a_frozen_member_that_thaws_gives_up_and_follows() -> None:
    driver = exchanging(3)
    frozen = attempts(driver)[0].start.spans[0].reducer
    driver.network._frozen[frozen] = driver.network.now + 20.0
    assert driver.run(3, 60.0)
    assert_agree(driver)


def test_a_reducer_that_answers_but_never_delivers_is_replaced_at_the_deadline() -> None:
    """Stalled in mid-stream: alive, so only the deadline of the gather stage tells."""
    driver = exchanging(4)
    staller = attempts(driver)[0].start.spans[0].reducer
    send = driver.network._send
    hidden = (Averaged.KIND, RecordMessage.KIND)
    driver.network._send = lambda sender, to, frame: (  # type: ignore[method-assign]
        None if sender == staller and frame[4] in hidden else send(sender, to, frame))
    deadline_s = attempts(driver)[0].gather_s
    assert driver.run(2, 3 * deadline_s)
    assert_agree(driver)
    assert failures(driver) == 0


def test_a_sender_that_answers_but_never_sends_is_not_counted_after_the_deadline() -> None:
    run_law = law(WIDE, part_elements=4096)
    driver = Driver(Swarm(run_law, 4, tip=established(run_law, 4)))
    order = leader_order(driver.swarm.members[0].tip.head, [m.me for m in driver.swarm.members])
    staller, send = order[1], driver.network._send
    driver.network._send = lambda sender, to, frame: (  # type: ignore[method-assign]
        None if sender == staller and frame[4] == 20 else send(sender, to, frame))
    assert driver.run(2, 60.0)
    assert_agree(driver)
    (entry,) = driver.peers[0].entries.values()
    at = entry.start.members.index(staller)
    assert {r.reasons[at] for r in entry.records if entry.reducer(r) != staller} == {TOO_LATE}


def test_who_holds_what_the_lost_reducer_made_passes_it_on() -> None:
    """The reducer dies after one member has its whole span: that member's version becomes everybody's."""
    for n in (3, 5):
        driver = exchanging(n)
        reducer = attempts(driver)[0].start.spans[0].reducer
        lucky = next(m.me for m in driver.swarm.members if m.me != reducer)
        send = driver.network._send
        hidden = (Averaged.KIND, RecordMessage.KIND)
        driver.network._send = lambda sender, to, frame, reducer=reducer, lucky=lucky, send=send, hidden=hidden: (  # type: ignore[method-assign,misc]
            None if sender == reducer and to != lucky and frame[4] in hidden else send(sender, to, frame))
        holder = next(m for m in driver.swarm.members if m.me == lucky)
        assert driver.network.run(lambda holder=holder: holder.attempt.held[0].whole is not None)  # type: ignore[union-attr,misc]
        made = holder.attempt.held[0].whole  # type: ignore[union-attr]
        driver.network.kill(reducer)
        assert driver.run(2, 3.0)
        assert_agree(driver)
        assert made is not None and driver.peers[driver.live()[0]].entries[2].entry.data[0] == made.data
        assert driver.peers[driver.live()[0]].entries[2].records[0].turn == 0


def test_zombies_of_old_attempts_are_dropped() -> None:
    """Every message of a lost attempt, delivered again in the next one, changes nothing."""
    driver = exchanging(3)
    seen: list[tuple[bytes, bytes, bytes]] = []
    send = driver.network._send

    def spy(sender: bytes, to: bytes, frame: bytes) -> None:
        seen.append((sender, to, frame))
        send(sender, to, frame)

    driver.network._send = spy  # type: ignore[method-assign]
    for _ in range(10):
        driver.network.step()
    for m in driver.swarm.members:
        if m.attempt:
            m.attempt.abandon("for this test")
            m.on_time(driver.network.now)
            driver.network.flush(m)
    zombies, driver.network._send = list(seen), send  # type: ignore[method-assign]
    assert zombies
    for late_s in (0.005, 0.25, 0.45, 1.0):
        for sender, to, frame in zombies:
            driver.network._push(driver.network.now + late_s, to, sender, frame)
    assert driver.run(2, 10.0)
    assert_agree(driver)


@pytest.mark.parametrize("seed", range(2))
def test_an_exchange_of_15_minutes_among_32_members_that_live_an_hour_commits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight or so die while it runs; their spans move on, what they had sent whole parts of is counted."""
    rng, n = random.Random(seed), 32
    monkeypatch.setattr(deadlines_module, "MIN_RATE_KBPS", 1)
    run_law = law({f"t{i}": (32, 32) for i in range(64)}, part_elements=1024)
    bytes_per_s = 2 * run_law.layout.up_bytes / 900  # a packet up, and its averages
    net = LocalNetwork(upload_bytes_per_s=bytes_per_s)
    tip = established(run_law, n)
    rate = max(1, round(bytes_per_s * 8 / 1000))
    driver = Driver(Swarm(run_law, n, tip=tip, network=net, rates=[rate] * n))
    deaths = sorted((rng.expovariate(1 / 3600), i) for i in range(n))
    for i in range(n):
        driver._react(i, 2)
    for at, i in deaths:
        driver.network.run(lambda: bool(driver.swarm.members[i].tip.k == 2), max(0.0, at - net.now))  # noqa: B023
        if any(m.tip.k == 2 for m in driver.swarm.members):
            break
        net.kill(driver.swarm.members[i].me)
    assert driver.run(2, 3600.0)
    died = n - len(driver.live())
    assert_agree(driver)
    assert died >= 3 and failures(driver) == 0
    assert 600 < net.now < 3 * 900, net.now
    entry = driver.peers[driver.live()[0]].entries[2]
    assert len(entry.counted) >= n - died and any(record.turn for record in entry.records)


def test_random_faults_on_a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills and freezes at random moments of a long exchange; it commits or the next one does, and all agree."""
    monkeypatch.setattr(deadlines_module, "MIN_RATE_KBPS", 1)
    rng = random.Random(7)
    for _ in range(12):
        n = rng.randint(2, 7)
        net = LocalNetwork(upload_bytes_per_s=2_000.0)
        run_law = law(WIDE, part_elements=4096)
        driver = Driver(Swarm(run_law, n, tip=established(run_law, n), network=net, rates=[16] * n))
        for i in range(n):
            driver._react(i, 2)
        for _ in range(rng.randint(1, 2)):
            net.advance_to(net.now + rng.random() * 10)
            victim = rng.choice(driver.swarm.members).me
            if rng.random() < 0.5 and len(driver.live()) > 1:
                net.kill(victim)
            else:
                net._frozen[victim] = net.now + rng.choice([3.0, 8.0, 30.0])
        assert driver.run(2, 300.0)
        assert_agree(driver)


def test_virtual_links_take_their_time() -> None:
    """Hand-computed: two frames of 1000 bytes at 1000 bytes/s arrive after 1 and 2 s, a question at once."""
    times = [at for at, _ in itertools.islice(arrivals(), 3)]
    assert times == pytest.approx([0.01, 1.01, 2.01], abs=0.15)


def arrivals() -> list[tuple[float, int]]:
    from p2p_muloco.messages import KINDS, Parts, Poll
    from p2p_muloco.wire import read_frame, write_frame

    net = LocalNetwork(upload_bytes_per_s=1000.0)
    run_law = law(VECTORS)
    Swarm(run_law, 2, network=net)
    one, other = list(net.members)
    found: list[tuple[float, int]] = []
    net.members[other].deliver = lambda sender, message, now: found.append((now, message.KIND))  # type: ignore[method-assign]
    for record in (Parts(bytes(32), 0, 1, bytes(950)), Parts(bytes(32), 1, 2, bytes(950)), Poll(bytes(32), 0, 0)):
        net._send(one, other, b"".join(map(bytes, write_frame(record))))
    net.advance_to(10.0)
    assert {kind for _, kind in found} <= set(KINDS)
    assert read_frame is not None
    return sorted(found)


def test_silence_is_longer_than_an_answer() -> None:
    assert SILENCE_S > ANSWER_S and torch.get_num_threads() == 1
