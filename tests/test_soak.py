"""Nothing grows: 200 rounds of four peers in one process, some attempts lost, memory and files flat."""

from __future__ import annotations

import gc
import os
import statistics
import threading
from pathlib import Path

import psutil

from p2p_muloco.chain import Law
from p2p_muloco.config import CodecConfig, InnerConfig, ModelConfig, RunConfig, RunSection
from p2p_muloco.data import load_corpus
from p2p_muloco.identity import Identity
from p2p_muloco.local import Fault, LocalNetwork
from p2p_muloco.simulate import local_trainer, run_swarm
from p2p_muloco.trainer import Trainer

ROUNDS, PEERS, STEPS = 200, 4, 1
FLAT = 1.03  # last quarter against the second
SLACK = {"items held": PEERS * PEERS}  # few things: it depends on where in a round they are counted


def law() -> Law:
    model, inner = ModelConfig(d_model=16, n_layers=1, n_heads=2, d_mlp=32, seq_len=16), InnerConfig(batch_size=2)
    run = RunSection(inner_steps=STEPS, min_peers=PEERS, token_budget=PEERS * ROUNDS * STEPS * 2 * 16, clock="steps",
                     overlap="off", snapshot_every=10, window_s=5.0)
    return Law.of(RunConfig(run=run, model=model, inner=inner, codec=CodecConfig(up="absmax4")))


def held(*things: object) -> int:
    """Items in all tables and lists that these objects hold by name."""
    return sum(len(value) for thing in things for value in vars(thing).values() if isinstance(value, dict | list | set))


def test_two_hundred_rounds_leave_no_trace(tmp_path: Path) -> None:
    faults = [Fault(kind, peer, nth, 4.0) for nth in range(50, 10_000, 150)
              for kind, peer in (("drop", nth % PEERS), ("freeze", (nth + 1) % PEERS), ("duplicate", (nth + 2) % PEERS))]
    network, corpus, me = LocalNetwork(faults=faults), load_corpus(RunConfig().data), psutil.Process()
    failed: list[int] = []

    def note(record: dict[str, object]) -> None:
        failed.extend([1] * (record["event"] == "failed"))

    trainers = [local_trainer(law(), Identity(bytes([i + 1]) * 32), network, corpus, tmp_path / str(i), record=note)
                for i in range(PEERS)]
    rows: list[dict[str, float]] = []

    def on_step() -> None:
        if trainers[0].state.tip.k < 4 * len(rows):
            return
        gc.collect()
        rows.append({
            "resident bytes": me.memory_info().rss, "files": me.num_fds(), "threads": threading.active_count(),
            "objects": len(gc.get_objects()), "items held": sum(map(_held_by, trainers)) + held(network),
            "files on disk": sum(len(files) for _, _, files in os.walk(tmp_path)),
        })

    run_swarm(network, trainers, step_s=[0.05] * PEERS, on_step=on_step)
    assert len({trainer.state.digest for trainer in trainers}) == 1 and trainers[0].state.tip.k >= ROUNDS
    assert len(failed) > 5, "lost attempts leave nothing either"
    quarter = len(rows) // 4
    for what in rows[0]:
        second = statistics.mean(row[what] for row in rows[quarter : 2 * quarter])
        last = statistics.mean(row[what] for row in rows[-quarter:])
        assert last <= FLAT * second + SLACK.get(what, 0), f"{what} grew from {second:.0f} to {last:.0f}"


def _held_by(trainer: Trainer) -> int:
    member = trainer.exchange.member  # type: ignore[attr-defined]
    attempts = [attempt for attempt in (member.attempt, member._last) if attempt is not None]
    return held(trainer, member, *attempts)
