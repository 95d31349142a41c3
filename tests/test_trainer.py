"""The loop on a local network: what is counted is said once, what is lost changes nothing, all agree bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import Answering

from p2p_muloco.chain import Law, merged_update
from p2p_muloco.config import CodecConfig, InnerConfig, ModelConfig, OuterConfig, RunConfig, RunSection
from p2p_muloco.data import Corpus, Stream, load_corpus
from p2p_muloco.exchange import Committed
from p2p_muloco.identity import Identity
from p2p_muloco.inner import InnerLoop, flat_weights, genesis_state, load_flat
from p2p_muloco.local import Fault, LocalNetwork
from p2p_muloco.model import GPT
from p2p_muloco.outer import eta_mu, outer_step
from p2p_muloco.simulate import local_trainer, run_swarm
from p2p_muloco.snapshot import Store, chunk_bytes
from p2p_muloco.trainer import Trainer

CORPUS: list[Corpus] = []


def corpus() -> Corpus:
    if not CORPUS:
        CORPUS.append(load_corpus(RunConfig().data))
    return CORPUS[0]


def law(n: int = 1, rounds: int = 3, *, inner_steps: int = 4, overlap: str = "off", clock: str = "steps",
        up: str = "statistical4", beta: float = 0.9, method: str = "nesterov", snapshot_every: int = 2, min_peers: int = 0,
        **outer: Any) -> Law:
    model = ModelConfig(d_model=16, n_layers=1, n_heads=2, d_mlp=32, seq_len=16)
    inner = InnerConfig(batch_size=2)
    config = RunConfig(
        run=RunSection(inner_steps=inner_steps, min_peers=min_peers or n, token_budget=n * rounds * inner_steps * 2 * 16,
                       clock=clock, overlap=overlap, snapshot_every=snapshot_every, window_s=5.0),
        model=model, inner=inner, outer=OuterConfig(method=method, **outer),
        codec=CodecConfig(up=up, beta=beta, part_elements=1024),
    )
    return Law.of(config)


def swarm(law: Law, n: int, folder: Path, *, faults: Sequence[Fault] = (), records: list[dict[str, Any]] | None = None,
          step_s: Sequence[float] = ()) -> list[Trainer]:
    network = LocalNetwork(faults=faults)
    sink = records.append if records is not None else lambda record: None
    trainers = [local_trainer(law, Identity(bytes([i + 1]) * 32), network, corpus(), folder / str(i), record=sink)
                for i in range(n)]
    run_swarm(network, trainers, step_s or [0.05] * n)
    return trainers


@pytest.mark.parametrize("method", ["nesterov", "isoloco"])
@pytest.mark.parametrize("overlap", ["off", "keep", "mix", "eager"])
def test_all_peers_hold_the_same_bits_after_every_entry(tmp_path: Path, method: str, overlap: str) -> None:
    records: list[dict[str, Any]] = []
    if (method, overlap) == ("isoloco", "eager"):
        return  # refused by the law: tests/test_config.py
    auto = {} if method == "nesterov" else {"eta": 1.0, "mu": 0.5}
    trainers = swarm(law(3, overlap=overlap, method=method, **auto), 3, tmp_path, records=records)
    assert all(t.state.tip.k == 3 and t.ended for t in trainers)
    rounds = [r for r in records if r["event"] == "round"]
    for k in (1, 2, 3):
        assert len({(r["digest"], r["state"]) for r in rounds if r["round"] == k}) == 1
    assert all(r["counted"] and r["inner_steps"] == 4 and r["members"] == 3 for r in rounds)
    assert not any(r["event"] in ("silent_difference", "failed", "rolled_back") for r in records)


def test_a_run_is_a_pure_function_of_its_arguments(tmp_path: Path) -> None:
    a = swarm(law(2, overlap="keep"), 2, tmp_path / "a")
    b = swarm(law(2, overlap="keep"), 2, tmp_path / "b")
    assert a[0].state.digest == b[0].state.digest and a[0].state.tip == b[0].state.tip


def test_entries_replay_to_the_same_heads_and_weights(tmp_path: Path) -> None:
    l = law(2, snapshot_every=100)  # noqa: E741
    trainers = swarm(l, 2, tmp_path)
    network = LocalNetwork()
    fresh = local_trainer(l, Identity(bytes([9]) * 32), network, corpus(), tmp_path / "fresh")
    network.stores[b"donor"] = trainers[0].store
    fresh.catch_up(behind_of(trainers[0], b"donor"))
    assert fresh.state.tip == trainers[0].state.tip and fresh.state.digest == trainers[0].state.digest
    assert torch.equal(flat_weights(fresh.inner.model), fresh.state.anchor)


def test_a_newcomer_loads_a_state_when_the_log_no_longer_holds_the_beginning(tmp_path: Path) -> None:
    l = law(2, rounds=7)  # noqa: E741
    trainers = swarm(l, 2, tmp_path)
    store = trainers[0].store
    assert store.pinned() == [6, 7] and store.entry(1) == b"" and store.entry(7)
    network = LocalNetwork()
    fresh = local_trainer(l, Identity(bytes([9]) * 32), network, corpus(), tmp_path / "fresh")
    network.stores[b"donor"] = store
    fresh.catch_up(behind_of(trainers[0], b"donor"))
    assert fresh.state.digest == trainers[0].state.digest


def behind_of(trainer: Trainer, donor: bytes) -> Any:
    from p2p_muloco.exchange import Behind

    return Behind(trainer.state.tip.k, trainer.state.tip.head, (donor,))


def test_a_folder_resumes_at_its_last_entry(tmp_path: Path) -> None:
    l = law(2, rounds=3)  # noqa: E741
    trainers = swarm(l, 2, tmp_path)
    resumed = Store(tmp_path / "0", l.layout, l.config.to_bytes()).resume(l)
    assert resumed is not None
    assert resumed[0].tip == trainers[0].state.tip and resumed[0].digest == trainers[0].state.digest
    newest = tmp_path / "0" / "snapshots" / "000000003.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    older = Store(tmp_path / "0", l.layout, l.config.to_bytes()).resume(l)
    assert older is not None and older[0].tip.k == 2 and [c.k for c in older[1]] == [3]


class Scripted(Answering):
    """An exchange that answers what a test tells it; everything else of the trainer is real."""

    peer_id = Identity(bytes([1]) * 32).peer_id

    def __init__(self, trainer_law: Law) -> None:
        from p2p_muloco.exchange import Traffic

        super().__init__(lambda donor, request, max_bytes: self.serve(request))
        self.serve: Callable[[Any], bytes] = lambda request: b""
        self.traffic, self.outcome, self.begun = Traffic(), None, []
        self.law = trainer_law

    def begin(self, packet: Any) -> None:
        self.begun.append(packet)

    def poll(self) -> Any:
        outcome, self.outcome = self.outcome, None
        return outcome

    def wait(self, timeout_s: float) -> Any:
        return self.poll()

    def withdraw(self) -> None: ...
    def adopt(self, tip: Any) -> None: ...
    def distrust(self, peer: bytes) -> None: ...
    def waiting_for(self) -> str:
        return ""


def scripted(l: Law, folder: Path) -> tuple[Trainer, Scripted]:  # noqa: E741
    exchange = Scripted(l)
    model = GPT(l.config.model)
    inner = InnerLoop(l, model, Stream(corpus().train, 0, 1, 16, 2))
    return Trainer(l, genesis_state(l), inner, exchange, Store(folder, l.layout, l.config.to_bytes())), exchange


def entry_of(l: Law, packets: dict[int, Any], close: dict[int, int] | None = None) -> Any:  # noqa: E741
    """An entry of given packets (by key number), made by the real state machine; `close` cuts peers out by a fault."""
    from p2p_muloco.local import LocalExchange
    from p2p_muloco.member import Member

    network = LocalNetwork()
    exchanges = [LocalExchange(network, Member(l, Identity(bytes([i]) * 32), l.genesis)) for i in packets]
    for exchange, packet in zip(exchanges, packets.values(), strict=True):
        exchange.begin(packet)
    outcome = exchanges[0].wait(100.0)
    assert isinstance(outcome, Committed)
    return outcome.checked


def test_counted_once_progress_and_residual(tmp_path: Path) -> None:
    """Design, 2: theta' = anchor' + progress since theta_begin; e' = x - D(q)."""
    l = law(1, rounds=9, overlap="keep", eta=0.5, mu=0.0)  # noqa: E741
    trainer, exchange = scripted(l, tmp_path)
    while not exchange.begun:
        trainer.advance()
    theta_begin, anchor = trainer._round.theta_begin.clone(), trainer.state.anchor.clone()  # type: ignore[union-attr]
    trainer.advance()  # one step while the exchange runs
    theta_now = flat_weights(trainer.inner.model)
    checked = entry_of(l, {1: exchange.begun[0]})
    trainer.on_outcome(Committed(checked))
    d = merged_update(l, checked)
    assert torch.allclose(trainer.state.anchor, anchor - 0.5 * d, atol=1e-7)
    assert torch.equal(flat_weights(trainer.inner.model), theta_now - theta_begin + trainer.state.anchor)
    said = torch.cat([l.layout.decode_up(i, p) for i, p in
                      enumerate(l.layout.up_parts(0, len(l.layout.parts), exchange.begun[0].payload))])
    assert torch.equal(trainer.residual, (anchor - theta_begin) - said)
    assert trainer.steps == 1 and trainer.rounds == 1


def test_counted_nowhere_keeps_all_progress_and_the_old_residual(tmp_path: Path) -> None:
    l = law(1, rounds=9, overlap="keep", eta=0.5, mu=0.0)  # noqa: E741
    trainer, exchange = scripted(l, tmp_path)
    while not exchange.begun:
        trainer.advance()
    trainer.residual.fill_(0.25)
    theta, anchor = flat_weights(trainer.inner.model), trainer.state.anchor.clone()
    other = dataclasses.replace(exchange.begun[0])
    trainer.on_outcome(Committed(entry_of(l, {2: other})))
    assert torch.equal(flat_weights(trainer.inner.model), theta - anchor + trainer.state.anchor)
    assert torch.equal(trainer.residual, torch.full_like(trainer.residual, 0.25))
    assert trainer.steps == 4 and trainer.rounds == 0  # the four steps are said in the next packet


def test_a_failed_attempt_changes_nothing_and_the_same_packet_goes_again(tmp_path: Path) -> None:
    from p2p_muloco.exchange import Failed

    l = law(1, rounds=9, overlap="keep")  # noqa: E741
    trainer, exchange = scripted(l, tmp_path)
    while not exchange.begun:
        trainer.advance()
    before = (trainer.state.digest, trainer.residual.clone(), trainer.state.tip)
    exchange.outcome = Failed("a test", retry_at=5.0)
    trainer.advance()
    steps = trainer.total_steps
    trainer.advance()
    assert trainer.total_steps == steps + 1  # training goes on
    exchange.time = 5.0
    trainer.advance()
    assert exchange.begun[1] is exchange.begun[0]
    assert trainer.state.digest == before[0] and torch.equal(trainer.residual, before[1]) and trainer.state.tip == before[2]


def test_past_4h_uncommitted_steps_the_rate_is_held_low(tmp_path: Path) -> None:
    l = law(1, rounds=99, overlap="keep", clock="time")  # noqa: E741
    trainer, _ = scripted(l, tmp_path)
    while trainer.total_steps < 15:
        trainer.advance()
    normal = trainer._lr()
    while trainer.total_steps < 16:
        trainer.advance()
    assert trainer._lr() < 0.2 * normal


def test_nan_at_birth_is_skipped_and_ten_in_a_row_roll_back(tmp_path: Path) -> None:
    l = law(1, rounds=99, inner_steps=50)  # noqa: E741
    trainer, _ = scripted(l, tmp_path)
    trainer.advance()
    with torch.no_grad():
        next(trainer.inner.model.parameters()).fill_(float("nan"))
    for _ in range(10):
        trainer.advance()
    assert torch.equal(flat_weights(trainer.inner.model), trainer.state.anchor) and trainer.steps == 0


def test_micro_batches_give_the_same_step(tmp_path: Path) -> None:
    l = law(1)  # noqa: E741
    results = []
    for micro in (2, 1):
        model = GPT(l.config.model)
        load_flat(model, l.layout, genesis_state(l).anchor)
        inner = InnerLoop(l, model, Stream(corpus().train, 0, 1, 16, 2), micro_batch=micro)
        for _ in range(3):
            inner.step(0.01)
        results.append(flat_weights(model))
    assert torch.allclose(results[0], results[1], atol=1e-4)


@pytest.mark.parametrize("kind", ["kill", "freeze", "drop", "corrupt", "duplicate", "delay"])
def test_training_goes_on_under_each_fault(tmp_path: Path, kind: str) -> None:
    records: list[dict[str, Any]] = []
    faults = [Fault(kind, peer=1, nth=9, seconds=2.0)]
    trainers = swarm(law(3, rounds=4, overlap="keep", min_peers=2), 3, tmp_path, faults=faults, records=records)
    living = [t for i, t in enumerate(trainers) if kind != "kill" or i != 1]
    assert len({(t.state.tip.head, t.state.digest) for t in living}) == 1 and all(t.ended for t in living)
    by_head: dict[str, set[str]] = {}
    for r in (r for r in records if r["event"] == "round"):
        by_head.setdefault(r["digest"], set()).add(r["state"])
    assert all(len(states) == 1 for states in by_head.values())


def test_a_slow_peer_contributes_fewer_steps_and_holds_nobody_up(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = []
    trainers = swarm(law(3, rounds=8, overlap="keep", clock="time"), 3, tmp_path, records=records, step_s=(0.05, 0.05, 0.4))
    assert len({t.state.digest for t in trainers}) == 1
    assert trainers[2].total_steps < trainers[0].total_steps / 3 and trainers[2].rounds >= 2


def test_error_feedback_carries_what_packets_could_not_say(tmp_path: Path) -> None:
    """Over a run with beta = 1, what was said plus what is carried equals what was learned (alone, eta 1, mu 0)."""
    l = law(1, rounds=4, up="absmax2", beta=1.0, eta=1.0, mu=0.0)  # noqa: E741
    network = LocalNetwork()
    trainer = local_trainer(l, Identity(bytes([1]) * 32), network, corpus(), tmp_path)
    learned = torch.zeros_like(trainer.state.anchor)
    said = torch.zeros_like(learned)
    while not trainer.finished:
        outcome = trainer.exchange.poll()
        if isinstance(outcome, Committed):
            round_ = trainer._round
            assert round_ is not None
            learned += trainer.state.anchor - round_.theta_begin
            payload = round_.packet.payload
            said += torch.cat([l.layout.decode_up(i, p) for i, p in
                               enumerate(l.layout.up_parts(0, len(l.layout.parts), payload))])
            trainer.on_outcome(outcome)
        else:
            trainer.advance()
    assert torch.allclose(learned, said + trainer.residual, atol=1e-5)


def test_golden_outer_trajectory_of_small_integers() -> None:
    """Two entries with d = 4 then 2, eta 1, mu 0.5: b = 4, u = 6; b = 4, u = 4; anchor 16 -> 10 -> 6."""
    anchor, momentum = torch.tensor([16.0]), torch.tensor([0.0])
    path = []
    for d in (4.0, 2.0):
        outer_step(anchor, momentum, torch.tensor([d]), 1.0, 0.5)
        path.append((float(anchor), float(momentum)))
    assert path == [(10.0, 4.0), (6.0, 4.0)]
    assert eta_mu(OuterConfig(), "muon", [4], 0) == (717 / 1024, 0.0)


def test_an_outcome_that_comes_late_is_not_applied_to_another_tip(tmp_path: Path) -> None:
    l = law(1, rounds=9, overlap="keep")  # noqa: E741
    trainer, exchange = scripted(l, tmp_path)
    while not exchange.begun:
        trainer.advance()
    checked = entry_of(l, {1: exchange.begun[0]})
    trainer.on_outcome(Committed(checked))
    before = (trainer.state.tip, trainer.state.digest)
    trainer.on_outcome(Committed(checked))
    assert (trainer.state.tip, trainer.state.digest) == before


def test_a_roll_back_with_a_packet_out_keeps_what_the_packet_says(tmp_path: Path) -> None:
    l = law(1, rounds=9, overlap="keep", inner_steps=20, eta=1.0, mu=0.0)  # noqa: E741
    trainer, exchange = scripted(l, tmp_path)
    while not exchange.begun:
        trainer.advance()
    theta_begin = trainer._round.theta_begin.clone()  # type: ignore[union-attr]
    with torch.no_grad():
        next(trainer.inner.model.parameters()).fill_(float("nan"))
    for _ in range(10):
        trainer.advance()
    assert torch.equal(flat_weights(trainer.inner.model), theta_begin)
    trainer.on_outcome(Committed(entry_of(l, {1: exchange.begun[0]})))
    assert torch.equal(flat_weights(trainer.inner.model), trainer.state.anchor)  # no progress since, and none subtracted


def test_the_rate_never_falls_back_while_an_exchange_runs(tmp_path: Path) -> None:
    l = law(1, rounds=20, overlap="keep", clock="time", inner_steps=8)  # noqa: E741
    trainer, _ = scripted(l, tmp_path)
    rates = []
    while trainer.total_steps < 14:
        steps = trainer.total_steps
        rate = trainer._lr()
        trainer.advance()
        if trainer.total_steps > steps:
            rates.append(rate)
    assert rates[0] > 0 and rates == sorted(rates)


@pytest.mark.parametrize("claim", ["weight", "tokens", "stranger", "nested", "truncated", "lighter"])
def test_a_donor_that_lies_about_its_state_changes_nothing(tmp_path: Path, claim: str) -> None:
    l = law(2, rounds=7)  # noqa: E741
    honest = swarm(l, 2, tmp_path)[0]
    trainer, exchange = scripted(l, tmp_path / "own")
    own = honest.state.tip if claim in ("stranger", "lighter") else trainer.state.tip
    trainer.state.tip = dataclasses.replace(own, weight=1) if claim == "stranger" else own
    tip = honest.state.tip
    lies = {"weight": {"weight": 10**9}, "tokens": {"tokens": 10**15}, "lighter": {"weight": tip.weight - 1},
            "stranger": {"recent": (b"\x05" * 32, b"\x06" * 32), "head": b"\x06" * 32}}
    lie = dataclasses.replace(tip, **lies.get(claim, {}))
    store = Store(tmp_path / "liar", l.layout, b"")
    store.restart_from(dataclasses.replace(honest.state, tip=lie))
    path = tmp_path / "liar" / "snapshots" / f"{tip.k:09d}.safetensors"
    if claim == "nested":
        rewrite(store, path, (100_000).to_bytes(8, "little") + b"[" * 100_000)
    if claim == "truncated":
        rewrite(store, path, path.read_bytes()[:-4])
    from p2p_muloco.exchange import Behind
    from p2p_muloco.requests import serve

    exchange.serve = lambda request: serve(store, request, b"")
    before = (trainer.state.tip, trainer.state.digest, trainer.ended)
    trainer.catch_up(Behind(99, lie.head, (b"liar",)))
    assert (trainer.state.tip, trainer.state.digest, trainer.ended) == before


def rewrite(store: Store, path: Path, whole: bytes) -> None:
    """Give a snapshot other bytes, with a manifest that fits them."""
    import hashlib
    import json

    path.write_bytes(whole)
    length = chunk_bytes(len(whole))
    digests = [hashlib.sha256(whole[at : at + length]).hexdigest() for at in range(0, len(whole), length)]
    path.with_suffix(".json").write_text(json.dumps({"size": len(whole), "sha256": digests}))


def test_another_chains_state_takes_the_place_of_the_abandoned_one(tmp_path: Path) -> None:
    l = law(2, rounds=3, snapshot_every=100)  # noqa: E741
    trainers = swarm(l, 2, tmp_path)
    store = trainers[0].store
    assert store.entry(3) and store.pinned() == [0, 3]
    store.restart_from(genesis_state(l))
    assert store.entry(3) == b"" and store.pinned() == [0] and store.manifest()


class Enough(Exception):
    pass


@pytest.mark.parametrize("late_s", [6.0, 6.5, 7.0, 7.5, 8.0])
def test_a_newcomer_is_counted_in_the_second_round_after_it_came_at_the_latest(tmp_path: Path, late_s: float) -> None:
    """It can't know how old the entry is that it caught up to; one that waits a period from then on can miss every round."""
    l = law(3, rounds=100, inner_steps=8, clock="time", overlap="keep", min_peers=2, snapshot_every=100)  # noqa: E741
    network, records = LocalNetwork(latency_s=0.15), list[dict[str, Any]]()

    def stop_when(done: Callable[[], bool]) -> None:
        def on_step() -> None:
            if done():
                raise Enough

        with pytest.raises(Enough):
            run_swarm(network, trainers, [0.3] * len(trainers), on_step)

    trainers = [local_trainer(l, Identity(bytes([i + 1]) * 32), network, corpus(), tmp_path / str(i)) for i in range(3)]
    stop_when(lambda: network.now >= late_s)
    came_at = trainers[0].state.tip
    trainers.append(local_trainer(l, Identity(b"\x09" * 32), network, corpus(), tmp_path / "late", record=records.append))
    trainers[-1].catch_up(behind_of(trainers[0], trainers[0].exchange.peer_id))
    stop_when(lambda: any(r["event"] == "round" and r["counted"] for r in records) or network.now > late_s + 60)
    assert came_at.k < trainers[-1].state.tip.k <= came_at.k + 2


# -- what goes on while an exchange runs

def overlapped(folder: Path, overlap: str) -> tuple[Trainer, dict[str, torch.Tensor]]:
    """One of two peers through one entry, with three inner steps while it is exchanged: its vectors before and after."""
    l = law(2, rounds=9, overlap=overlap, clock="time", eta=0.5, mu=0.5, up="statistical4")  # noqa: E741
    network = LocalNetwork(latency_s=0.15)
    peers = [local_trainer(l, Identity(bytes([i + 1]) * 32), network, corpus(), folder / str(i)) for i in range(2)]
    for peer in peers:
        for _ in range(4):
            peer._inner_step()
    seen = {"theta_begin": flat_weights(peers[0].inner.model), "anchor": peers[0].state.anchor.clone()}
    for peer in peers:
        peer._begin()
    seen["base"] = flat_weights(peers[0].inner.model)
    for _ in range(3):
        peers[0]._inner_step()
    seen["theta_now"] = flat_weights(peers[0].inner.model)
    outcome = peers[0].exchange.wait(30.0)
    assert isinstance(outcome, Committed) and len(outcome.checked.counted) == 2
    packet = peers[0]._round.packet  # type: ignore[union-attr]
    peers[0].on_outcome(outcome)
    seen["said"] = l.layout.decode(packet.payload)
    seen["theta"], seen["anchor_after"] = flat_weights(peers[0].inner.model), peers[0].state.anchor
    return peers[0], seen


def test_keep_keeps_what_was_learned_meanwhile(tmp_path: Path) -> None:
    peer, seen = overlapped(tmp_path, "keep")
    assert torch.equal(seen["base"], seen["theta_begin"]) and peer.steps == 3
    torch.testing.assert_close(seen["theta"], seen["anchor_after"] + (seen["theta_now"] - seen["theta_begin"]))


def test_mix_goes_on_from_a_mix(tmp_path: Path) -> None:
    peer, seen = overlapped(tmp_path, "mix")
    torch.testing.assert_close(seen["theta"], 0.5 * seen["theta_now"] + 0.5 * seen["anchor_after"])
    e = seen["anchor"] - seen["theta_begin"] - seen["said"]
    torch.testing.assert_close(peer.residual, e)


def test_eager_trains_on_from_a_guess_of_the_outer_step(tmp_path: Path) -> None:
    """The first entry of a run has momentum 0: the guess is anchor - eta (1 + mu) D(q)."""
    peer, seen = overlapped(tmp_path, "eager")
    torch.testing.assert_close(seen["base"], seen["anchor"] - 0.5 * 1.5 * seen["said"])
    torch.testing.assert_close(seen["theta"], seen["anchor_after"] + (seen["theta_now"] - seen["base"]))
    torch.testing.assert_close(peer.residual, seen["anchor"] - seen["theta_begin"] - seen["said"])


def test_an_eager_guess_that_no_entry_confirms_leaves_what_was_learned(tmp_path: Path) -> None:
    l = law(1, rounds=9, overlap="eager", eta=0.5, mu=0.0)  # noqa: E741
    peer = local_trainer(l, Identity(bytes([1]) * 32), LocalNetwork(), corpus(), tmp_path)
    for _ in range(4):
        peer._inner_step()
    theta_begin = flat_weights(peer.inner.model)
    peer._begin()
    base = flat_weights(peer.inner.model)
    peer._inner_step()
    now = flat_weights(peer.inner.model)
    assert not torch.equal(base, theta_begin)
    torch.testing.assert_close(peer._unsaid(now.clone()), (now - base) + (theta_begin - peer.state.anchor))
    saved = peer.checkpoint()
    again = local_trainer(l, Identity(bytes([1]) * 32), LocalNetwork(), corpus(), tmp_path / "again")
    again.restore(saved)
    assert torch.equal(again._round.base, base), "it follows from what is saved"  # type: ignore[union-attr]
