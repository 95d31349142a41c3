"""Forks: islands that meet, a loner, and what is carried across. After healing one chain, one state, no work lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from kit import Driver, Swarm, established
from kit import law as small_law
from test_trainer import behind_of, corpus, law, swarm
from torch import Tensor

from p2p_muloco.chain import Law
from p2p_muloco.exchange import Behind
from p2p_muloco.healing import Way, _own_branch, carried_work, decoded_parts
from p2p_muloco.identity import Identity
from p2p_muloco.inner import flat_weights
from p2p_muloco.local import Fault, LocalNetwork, Partition
from p2p_muloco.replay import fetch_entries
from p2p_muloco.simulate import local_trainer, run_swarm
from p2p_muloco.trainer import Trainer
from p2p_muloco.waypoint import due_waypoint


def islands(folder: Path, n: int, *partitions: Partition, until_s: float, faults: tuple[Fault, ...] = (),
            snapshot_every: int = 50, owner: Identity | None = None) -> tuple[list[Trainer], list[dict[str, Any]]]:
    """n trainers with rounds of one step of 4 s, run to a moment on the virtual clock. The owner's peer is the first."""
    l = law(n, rounds=10**6, inner_steps=1, overlap="keep", clock="time", snapshot_every=snapshot_every, min_peers=1)  # noqa: E741
    if owner is not None:
        l = Law.of(dataclasses.replace(l.config, run=dataclasses.replace(l.config.run, owner=owner.public_key.hex())))  # noqa: E741
    network = LocalNetwork(partitions=partitions, faults=faults)
    records: list[dict[str, Any]] = []

    def sink(i: int) -> Any:
        def take(record: dict[str, Any]) -> None:
            records.append({"peer": i, **record})
            if owner is not None and i == 0 and (waypoint := due_waypoint(owner, trainers[0].state.tip)):
                trainers[0].exchange.show_waypoint(waypoint)

        return take

    trainers = [local_trainer(l, Identity(bytes([i + 1]) * 32), network, corpus(), folder / str(i), record=sink(i))
                for i in range(n)]
    run_swarm(network, trainers, [4.0] * n, until=lambda: network.now > until_s)
    living = [t for t in trainers if not network.is_dead(t.exchange.peer_id)]
    return living, records


def assert_one_head_one_state(records: list[dict[str, Any]]) -> None:
    states: dict[str, set[str]] = {}
    for record in records:
        if record["event"] == "round":
            states.setdefault(record["digest"], set()).add(record["state"])
    assert all(len(found) == 1 for found in states.values())


def assert_healed(trainers: list[Trainer]) -> None:
    """One chain: whoever is an entry ahead has the other's head among its last."""
    longest = max((t.state.tip for t in trainers), key=lambda tip: tip.k)
    assert all(t.state.tip.head in longest.recent for t in trainers)
    assert longest.k - min(t.state.tip.k for t in trainers) <= 2
    assert set(longest.members) == {t.exchange.peer_id for t in trainers}, "all take part in the same entry again"


@pytest.mark.parametrize("side", [{0, 1}, {3}, {0, 1, 2}], ids=["halves", "a loner", "another loner"])
@pytest.mark.parametrize("snapshot_every", [50, 5], ids=["from the own log", "from the others' state"])
def test_islands_that_meet_become_one_chain(tmp_path: Path, side: set[int], snapshot_every: int) -> None:
    cut = Partition(20.0, 90.0, frozenset(side))
    trainers, records = islands(tmp_path, 4, cut, until_s=230.0, snapshot_every=snapshot_every)
    assert_one_head_one_state(records)
    assert_healed(trainers)
    rebased = [r for r in records if r["event"] == "rebased"]
    assert {r["peer"] for r in rebased} in (side, set(range(4)) - side) and all(r["carried_steps"] > 0 for r in rebased)
    heads = {(r["round"], r["digest"]) for r in records if r["event"] == "round"}
    assert len({head for number, head in heads if number == max(r["from"] for r in rebased)}) == 2, "there was a fork"


def test_two_partitions_one_after_another(tmp_path: Path) -> None:
    cuts = Partition(20.0, 60.0, frozenset({0})), Partition(160.0, 200.0, frozenset({0, 1}))
    trainers, records = islands(tmp_path, 3, *cuts, until_s=330.0)
    assert_one_head_one_state(records)
    assert_healed(trainers)


def test_a_member_that_committed_alone_and_vanished_takes_nothing_with_it(tmp_path: Path) -> None:
    cut = Partition(20.0, 45.0, frozenset({2}))
    alone, _ = islands(tmp_path / "a", 3, cut, until_s=44.0)
    dead_at = alone[2].exchange.network._sent[alone[2].exchange.peer_id]  # type: ignore[attr-defined]
    trainers, records = islands(tmp_path / "b", 3, cut, until_s=120.0, faults=(Fault("kill", 2, dead_at + 1),))
    assert len(trainers) == 2
    assert_one_head_one_state(records)
    assert_healed(trainers)


# -- what is carried


def two_branches() -> tuple[Driver, Driver]:
    """Entry 2 by members 0 and 1 alone, and by all three with the same packets."""
    run_law = small_law(up="fp32", down="fp32")
    tip = established(run_law, 3)
    both, three = Driver(Swarm(run_law, 3, tip=tip)), Driver(Swarm(run_law, 3, tip=tip))
    both.network.kill(both.swarm.members[2].me)
    assert both.run(2, 30.0) and three.run(2, 30.0)
    return both, three


@pytest.mark.parametrize("me", [0, 2])
def test_a_packet_in_both_branches_is_carried_once(me: int) -> None:
    both, three = two_branches()
    run_law, peer = both.swarm.law, three.swarm.members[me].me
    packet = three.packet(me, 2)
    payloads = {packet.digest: packet.payload}
    mine, theirs = both.peers[0].entries[2], three.peers[0].entries[2]
    work, steps = carried_work(run_law, peer, Way(None, [theirs], [mine], is_own=True), payloads)
    x, inside = three.x(me, 2), me == 0  # member 2 is in their branch only: what was still out is out no more
    assert torch.equal(work, torch.zeros_like(x) if inside else -x) and steps == (0 if inside else -three.swarm.h[me])
    back, steps = carried_work(run_law, peer, Way(None, [mine], [theirs], is_own=True), payloads)
    assert torch.equal(back, torch.zeros_like(x) if inside else x) and steps == (0 if inside else three.swarm.h[me])
    assert carried_work(run_law, peer, Way(None, [mine], [theirs]), {})[1] == 0  # a packet that is no longer known


def test_decoded_parts_are_those_that_were_counted() -> None:
    both, _ = two_branches()
    checked, run_law = both.peers[0].entries[2], both.swarm.law
    assert torch.equal(decoded_parts(run_law, both.packet(0, 2).payload, checked, both.swarm.members[0].me), both.x(0, 2))
    uncounted = tuple(dataclasses.replace(record, counts=(0,) * len(record.counts)) for record in checked.records)
    cut = dataclasses.replace(checked, records=uncounted)
    assert not decoded_parts(run_law, both.packet(0, 2).payload, cut, both.swarm.members[0].me).any()


# -- random plans

FAULTS = st.builds(Fault, st.sampled_from(["kill", "freeze", "delay", "drop", "duplicate"]), st.integers(0, 8),
                   st.integers(5, 120), st.sampled_from([1.0, 4.0, 12.0]))
CUTS = st.builds(lambda at, length, side: Partition(at, at + length, frozenset(side)), st.floats(5, 40), st.floats(1, 40),
                 st.sets(st.integers(0, 8), min_size=1, max_size=4))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(n=st.integers(2, 9), faults=st.lists(FAULTS, max_size=3), cuts=st.lists(CUTS, max_size=1))
def test_whatever_happens_equal_heads_are_equal_states_and_one_chain_is_left(
    tmp_path_factory: pytest.TempPathFactory, n: int, faults: list[Fault], cuts: list[Partition],
) -> None:
    faults = [dataclasses.replace(fault, peer=fault.peer % n) for fault in faults]
    killed = {fault.peer for fault in faults if fault.kind == "kill"}
    faults = [fault for fault in faults if fault.kind != "kill" or fault.peer != min(killed) or len(killed) < n]
    trainers, records = islands(tmp_path_factory.mktemp("plan"), n, *cuts, until_s=300.0, faults=tuple(faults))
    assert_one_head_one_state(records)
    assert_healed(trainers)
    for t in trainers:
        assert torch.isfinite(t.state.anchor).all() and torch.isfinite(t.residual).all()


# -- what was learned is counted or carried

@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(n=st.integers(2, 9), faults=st.lists(FAULTS, min_size=1, max_size=4),
       up=st.sampled_from(["statistical4", "absmax2", "topk"]), overlap=st.sampled_from(["keep", "eager"]))
def test_all_that_a_peer_learned_is_counted_or_carried(
    tmp_path_factory: pytest.TempPathFactory, n: int, faults: list[Fault], up: str, overlap: str,
) -> None:
    """beta = 1 and no fork: for each element, minus all inner progress = sum of counted D(q) + (anchor - theta) + e.

    Where an eager peer trains on from a guess, theta stands for what it began with and what it learned since.
    """
    folder = tmp_path_factory.mktemp("plan")
    faults = [dataclasses.replace(fault, peer=fault.peer % n) for fault in faults if fault.kind != "kill" or fault.peer % n]
    l = law(n, rounds=10**6, inner_steps=2, overlap=overlap, clock="time", snapshot_every=10**4, min_peers=1, beta=1.0,  # noqa: E741
            up=up)
    network = LocalNetwork(faults=tuple(faults))
    events: list[str] = []
    trainers = [local_trainer(l, Identity(bytes([i + 1]) * 32), network, corpus(), folder / str(i),
                              record=lambda record: events.append(record["event"])) for i in range(n)]
    learned = [torch.zeros(l.layout.n_elements, dtype=torch.float64) for _ in trainers]
    for trainer, total in zip(trainers, learned, strict=True):
        trainer.inner.step = _counting(trainer, total)  # type: ignore[method-assign]
    run_swarm(network, trainers, [2.0] * n, until=lambda: network.now > 120.0)
    assert "rolled_back" not in events and max(t.state.tip.k for t in trainers) > 5
    assume("rebased" not in events)
    for trainer, total in zip(trainers, learned, strict=True):
        out = trainer._round
        theta = flat_weights(trainer.inner.model).double()
        theta += 0.0 if out is None else (out.theta_begin - out.base).double()
        unsaid = trainer.state.anchor.double() - theta + trainer.residual
        assert_close(_counted(l, trainer) + unsaid, -total)


def _counting(trainer: Trainer, total: Tensor) -> Any:
    step = trainer.inner.step

    def counted(lr: float) -> float:
        before = flat_weights(trainer.inner.model)
        loss = step(lr)
        total.add_((flat_weights(trainer.inner.model) - before).double())
        return loss

    return counted


def _counted(l: Any, trainer: Trainer) -> Tensor:  # noqa: E741
    me, packets = trainer.exchange.peer_id, trainer.store.own_packets()
    said = torch.zeros(l.layout.n_elements, dtype=torch.float64)
    for checked in trainer.store.replayable(l, l.genesis):
        for hello in checked.counted:
            if hello.peer == me:
                said += decoded_parts(l, packets[hello.digest], checked, me)
    return said


def assert_close(a: Tensor, b: Tensor) -> None:
    assert float((a - b).abs().max()) < 1e-5 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize(("their_k", "named", "shared", "left"), [
    (12, 13, 12, []), (14, 15, 12, []),  # they stand where this peer stands, or two entries on
    (14, 15, 4, range(5, 13)),  # a fork after entry 4
    (14, 7, 4, range(8, 13)),  # a fork before the heads that they name, 8 to 14: what is older may be theirs
    (200, 64, 0, []),  # all of it may be: what it holds is not said again
])
def test_only_entries_that_are_known_not_to_be_theirs_are_a_branch(
    tmp_path: Path, their_k: int, named: int, shared: int, left: Sequence[int],
) -> None:
    run_law = law(2, rounds=12, inner_steps=1, snapshot_every=100)
    trainer = swarm(run_law, 2, tmp_path)[0]
    own = trainer.state.tip
    heads = tuple(own.recent[k] if k <= shared else bytes([k]) * 32 for k in range(their_k - named + 1, their_k + 1))
    theirs = dataclasses.replace(own, k=their_k, head=heads[-1], recent=heads)
    assert [checked.k for checked in _own_branch(run_law, trainer.store, theirs, own)] == list(left)


# -- which way, and from whom

@pytest.mark.parametrize("frozen", [0, 1], ids=["the one that is followed", "another"])
def test_a_frozen_donor_of_entries_costs_seconds(tmp_path: Path, frozen: int) -> None:
    """A frozen process keeps its connections: only time tells."""
    run_law = law(2, rounds=12, snapshot_every=100)
    trainers = swarm(run_law, 2, tmp_path)
    network, donors = LocalNetwork(), [b"first", b"second"]
    network.stores |= {donor: trainer.store for donor, trainer in zip(donors, trainers, strict=True)}
    network._frozen[donors[frozen]] = 60.0
    fresh = local_trainer(run_law, Identity(bytes([9]) * 32), network, corpus(), tmp_path / "fresh")
    entries = fetch_entries(run_law, fresh.exchange, donors, run_law.genesis)
    assert [checked.k for checked in entries] == list(range(1, 13)) and network.now < 5.0


@pytest.mark.parametrize(("rounds", "taken"), [(3, False), (40, True)])
def test_a_state_is_taken_before_entries_that_are_more_bytes(tmp_path: Path, rounds: int, taken: bool) -> None:
    run_law, events = law(2, rounds=rounds, inner_steps=1, snapshot_every=rounds), list[str]()
    trainers = swarm(run_law, 2, tmp_path)
    store = trainers[0].store
    assert store.entry(1) and rounds in store.pinned(), "both ways are open"
    network = LocalNetwork()
    network.stores[b"donor"] = store
    fresh = local_trainer(run_law, Identity(bytes([9]) * 32), network, corpus(), tmp_path / "fresh",
                          record=lambda record: events.append(record["event"]))
    fresh.catch_up(behind_of(trainers[0], b"donor"))
    assert fresh.state.tip == trainers[0].state.tip and fresh.state.digest == trainers[0].state.digest
    assert ("downloading" in events) == taken


@pytest.mark.parametrize("killed", [0, 1], ids=["the one that is followed", "another"])
def test_a_donor_that_is_killed_at_any_moment_costs_no_second_download(tmp_path: Path, killed: int) -> None:
    run_law = law(3, rounds=9, inner_steps=1, snapshot_every=5)
    trainers = swarm(run_law, 3, tmp_path)
    donors = [bytes([i]) * 38 for i in range(3)]
    for i, at_s in enumerate([0.05 * n for n in range(12)] + [0.7, 1.0, 2.0, 4.0]):
        network, events = LocalNetwork(upload_bytes_per_s=50_000.0), list[str]()
        network.stores |= {donor: trainer.store for donor, trainer in zip(donors, trainers, strict=True)}
        fresh = local_trainer(run_law, Identity(bytes([9]) * 32), network, corpus(), tmp_path / f"fresh{i}",
                              record=lambda record, events=events: events.append(record["event"]))  # type: ignore[misc]
        network.call_at(at_s, lambda network=network: network.kill(donors[killed]))  # type: ignore[misc]
        fresh.catch_up(Behind(9, trainers[0].state.tip.head, tuple(donors)))
        assert fresh.state.tip == trainers[0].state.tip
        first_failed = events[:1] == ["catch_up_failed"]  # it was dead before it had said what it has
        assert events.count("catch_up_failed") <= first_failed and events.count("rebased") == 1
