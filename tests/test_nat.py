"""Clients: peers that nobody can dial. Counted as all are, they lead nothing, reduce nothing, and hear each other by nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import netlab
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import Driver, Swarm, assert_agree, established, identity, law
from peers import stage

from p2p_muloco.chain import CLIENT, NODE, Signed, Tip, advance, check_entry, check_start
from p2p_muloco.errors import BadPacket
from p2p_muloco.exchange import Committed
from p2p_muloco.gathering import choose_members
from p2p_muloco.local import Fault, LocalNetwork


def swarm(n: int, clients: Sequence[int]) -> Swarm:
    return Swarm(law(min_peers=n), n, network=LocalNetwork(), clients=clients)


@pytest.mark.parametrize(("n", "clients"), [(3, [1, 2]), (3, [0]), (5, [0, 1, 2, 3]), (6, [1, 3, 4, 5]), (4, [0, 1])])
def test_clients_are_counted_in_every_entry(n: int, clients: list[int]) -> None:
    driver = Driver(swarm(n, clients))
    assert driver.run(4, 60.0)
    assert_agree(driver)
    for checked in driver.peers[0].entries.values():
        assert len(checked.counted) == n
        modes = {hello.peer: mode for hello, mode in zip(checked.start.hellos, checked.start.start.modes, strict=True)}
        assert [modes[driver.swarm.members[i].me] for i in range(n)] == [CLIENT if i in clients else NODE for i in range(n)]
        ids = {driver.swarm.members[i].me for i in clients}
        assert not ids & {span.reducer for span in checked.start.spans} and checked.start.start.leader not in ids
        assert ids == set(driver.swarm.members[0].tip.clients)
        assert len(checked.entry.confirms) == n, "each has heard of all others"
    assert driver.network.now < 30.0, "nobody has waited for what can't come"


def test_a_node_serves_four_clients_at_most() -> None:
    driver = Driver(Swarm(law(min_peers=5), 7, network=LocalNetwork(), clients=range(1, 7)))
    assert driver.run(3, 200.0)
    assert_agree(driver)
    assert all(len(checked.counted) == 5 for checked in driver.peers[0].entries.values())


def test_clients_alone_say_what_is_missing_and_train_on() -> None:
    run_law = law()
    tip = established(run_law, 3)
    tip = dataclasses.replace(tip, clients=tip.members)
    made = Swarm(run_law, 3, tip=tip, network=LocalNetwork(), clients=[0, 1, 2])
    made.begin()
    made.network.wait(lambda: False, 60.0)
    assert all("no peer of this run can be reached from outside" in m.waiting_for(made.network.now) for m in made.members)
    assert not any(isinstance(outcome, Committed) for m in made.members for outcome in m.outcomes)


def running(n: int, clients: Sequence[int], faults: Sequence[Fault]) -> Driver:
    """After a first entry of all."""
    run_law, hidden = law(), {identity(i).peer_id for i in clients}
    tip = established(run_law, n)
    tip = dataclasses.replace(tip, clients=tuple(peer for peer in tip.members if peer in hidden))
    return Driver(Swarm(run_law, n, tip=tip, network=LocalNetwork(faults=faults), clients=clients))


@pytest.mark.parametrize("nth", range(0, 60, 3))
def test_a_node_killed_at_any_moment_is_followed_by_another(nth: int) -> None:
    driver = running(5, [0, 1, 2], [Fault("kill", 3, nth)])
    assert driver.run(4, 120.0)
    assert_agree(driver)


FAULTS = st.builds(Fault, st.sampled_from(["kill", "freeze", "delay", "duplicate", "drop"]), st.integers(0, 7),
                   st.integers(0, 150), st.sampled_from([0.5, 3.0, 8.0]))


@settings(max_examples=100, deadline=None)
@given(n=st.integers(3, 8), nodes=st.integers(2, 4), faults=st.lists(FAULTS, max_size=3))
def test_whatever_happens_clients_and_nodes_agree(n: int, nodes: int, faults: list[Fault]) -> None:
    clients = range(min(nodes, n), n)
    faults = [dataclasses.replace(f, peer=f.peer % n) for f in faults]
    faults = [f for f in faults if f.kind != "kill" or f.peer not in (0, 1)]  # a node of which each knows stays
    driver = running(n, clients, faults)
    assert driver.run(4, 400.0)
    assert_agree(driver)


def test_a_tip_names_its_clients() -> None:
    driver = Driver(swarm(3, [2]))
    assert driver.run(1, 30.0)
    entry = driver.peers[0].entries[1].entry
    run_law = driver.swarm.law
    tip = advance(run_law, run_law.genesis, check_entry(run_law, run_law.genesis, entry))
    assert tip.clients == (driver.swarm.members[2].me,) and Tip.unpack(tip.pack()) == tip


@pytest.mark.processes
@pytest.mark.skipif(not netlab.is_possible(), reason="an internet of namespaces needs root, `ip` and /dev/net/tun")
def test_two_real_peers_behind_nat_and_one_public_one_are_counted_in_every_round(tmp_path: Path) -> None:
    link = {"rate_mbit": 100, "delay_ms": 20}
    hosts = [link, link, {**link, "nat": True}, {**link, "nat": True}]
    with netlab.internet(*hosts), stage(tmp_path, min_peers=3, inner_steps=20, host=1) as s:
        public, *hidden = (s.join(name, host=host) for host, name in enumerate(("public", "hidden-1", "hidden-2"), start=2))
        everybody = (public, *hidden)
        s.until("all are counted", lambda: any(r["members"] == 3 for r in public.rounds()), 120.0)  # a busy machine starts slowly
        first = min(r["round"] for r in public.rounds() if r["members"] == 3)
        s.until("eight rounds", lambda: min(p.round() for p in everybody) >= first + 8, 60.0)
        assert all("takes part as a client" in p.words() for p in hidden) and "as a client" not in public.words()
        for peer in everybody:
            since = [r for r in peer.rounds() if first <= r["round"] <= first + 8]
            assert len(since) == 9 and all(r["counted"] and r["members"] == 3 for r in since), peer.words()
        assert len({p.heads()[first + 8] for p in everybody}) == 1


def test_a_leader_spares_half_of_the_nodes_at_most_and_lets_no_client_reduce() -> None:
    driver = Driver(swarm(5, [4]))
    assert driver.run(1, 30.0)
    run_law, checked = driver.swarm.law, driver.peers[0].entries[1]
    start, leader = checked.start.start, checked.start.start.leader
    who = next(one for one in driver.swarm.identities if one.peer_id == leader)
    at = checked.start.members.index(driver.swarm.members[4].me)
    nodes = [i for i in range(5) if i != at]

    def with_modes(reducing: Sequence[int]) -> None:
        modes = tuple(int(i in reducing) for i in range(5))
        check_start(run_law, run_law.genesis, Signed.make(dataclasses.replace(start, modes=modes), who))

    with_modes(nodes)
    with_modes(nodes[:2])
    for wrong in (nodes[:1], [*nodes, at], [], [at]):
        with pytest.raises(BadPacket, match="START lets"):
            with_modes(wrong)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 12))
def test_a_group_is_full_and_holds_no_more_clients_than_its_nodes_serve(are_clients: list[bool], max_group: int) -> None:
    joins = [identity(i).peer_id for i in range(len(are_clients))]
    clients = {peer for peer, is_client in zip(joins, are_clients, strict=True) if is_client and peer != joins[0]}
    chosen = choose_members(joins[0], bytes(32), joins, clients, max_group)
    held = sum(peer in clients for peer in chosen)
    assert joins[0] in chosen and len(set(chosen)) == len(chosen) <= max_group and held <= 4 * (len(chosen) - held)
    nodes = len(joins) - len(clients)
    assert len(chosen) >= min(max_group, nodes) and len(chosen) >= min(max_group, nodes + min(len(clients), 4 * nodes))
