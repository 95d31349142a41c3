"""The simulation: the same bits every time, the bits of a real swarm, and a world read from a file."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from peers import cli, stage
from test_trainer import corpus, law

from p2p_muloco.chain import Law
from p2p_muloco.config import RunConfig
from p2p_muloco.errors import ConfigError
from p2p_muloco.simulate import Simulation, worker_identity
from p2p_muloco.world import Cut, TimedFault, Worker, World

QUICK = Worker(step_s=0.5)


def simulate(folder: Path, run_law: Law, world: World, limit_s: float = math.inf, seed: int = 0) -> Simulation:
    simulation = Simulation(run_law, corpus(), world, folder, seed)
    simulation.run(limit_s)
    return simulation


def rounds(simulation: Simulation, number: int) -> list[dict[str, Any]]:
    return [r for r in simulation.workers[number - 1].records if r["event"] == "round"]


def assert_one_head_one_state(simulation: Simulation) -> None:
    states: dict[str, set[str]] = {}
    for one in simulation.workers:
        for record in rounds(simulation, one.number):
            states.setdefault(record["digest"], set()).add(record["state"])
    assert states and all(len(found) == 1 for found in states.values())


def test_the_same_arguments_give_the_same_records(tmp_path: Path) -> None:
    world = World((QUICK, QUICK, dataclasses.replace(QUICK, step_s=1.3, latency_ms=80.0)),
                  (TimedFault(kind="freeze", worker=2, at_s=9.0, for_s=8.0),))
    run_law = law(3, rounds=8, overlap="keep", clock="time", min_peers=2)
    first, second = (simulate(tmp_path / name, run_law, world) for name in "ab")
    other = simulate(tmp_path / "c", run_law, world, seed=1)
    assert [one.records for one in first.workers] == [one.records for one in second.workers]
    assert first.living()[0].state.digest != other.living()[0].state.digest


def test_who_comes_late_leaves_dies_or_is_cut_off(tmp_path: Path) -> None:
    late, five = dataclasses.replace(QUICK, joins_at_s=20.0), [QUICK] * 5
    world = World((*five, late), (TimedFault(kind="kill", worker=1, at_s=30.0), TimedFault(kind="leave", worker=2, at_s=40.0)),
                  (Cut(workers=(3,), from_s=50.0, to_s=90.0),))
    simulation = simulate(tmp_path, law(5, rounds=10**4, inner_steps=4, overlap="keep", clock="time", min_peers=5), world, 200.0)
    assert_one_head_one_state(simulation)
    assert len(simulation.living()) == 5, "who left is there, and does nothing"
    assert rounds(simulation, 6)[0]["at_s"] >= 20.0 and any(r["counted"] for r in rounds(simulation, 6))
    assert rounds(simulation, 1)[-1]["at_s"] <= 30.0 and rounds(simulation, 2)[-1]["at_s"] < 45.0
    last = [rounds(simulation, number)[-1] for number in (3, 4, 5, 6)]
    assert {r["digest"] for r in last} == {last[0]["digest"]} and last[0]["members"] == 4


def test_a_slow_link_makes_an_exchange_long(tmp_path: Path) -> None:
    run_law = law(2, rounds=3)
    packet = run_law.layout.up_bytes
    slow = Worker(step_s=0.5, upload_mbit=packet * 8e-6 / 2)  # a packet takes two seconds
    took = [rounds(simulate(tmp_path / str(i), run_law, World((worker,) * 2)), 1)[-1]["exchange_s"]
            for i, worker in enumerate((QUICK, slow))]
    assert took[0] < 0.5 and 1.0 < took[1] < 3.5, "half a packet to the reducer, half an average back"


@pytest.mark.processes
def test_a_real_swarm_holds_the_same_weights_after_every_entry(tmp_path: Path) -> None:
    budget = 4 * 5 * 6 * 4 * 64  # peers, entries, steps, sequences, tokens
    with stage(tmp_path, min_peers=4, inner_steps=6, budget=budget, clock="steps", overlap="off") as s:
        peers = []
        for number in range(1, 5):
            worker_identity(7, number).save(tmp_path / f"peer-{number}" / "identity.key")
            peers.append(s.join(f"peer-{number}"))
        s.until("the end of the run", lambda: all(p.process.poll() == 0 for p in peers), 150.0)
        real = [[r["state"] for r in p.rounds()] for p in peers]
        run_law = Law.of(RunConfig.from_bytes((tmp_path / "peer-1" / "run.msgpack").read_bytes()))
    simulation = simulate(tmp_path / "simulated", run_law, World((QUICK,) * 4), seed=7)
    assert real == [[r["state"] for r in rounds(simulation, number)] for number in range(1, 5)] and len(real[0]) == 5


def test_the_command_tells_and_writes_what_came_of_it(tmp_path: Path) -> None:
    config = law(2, rounds=3).config
    (tmp_path / "run.toml").write_text(config.to_toml())
    (tmp_path / "faults.toml").write_text("step_s = 0.2\n[[worker]]\nnumber = 2\nlatency_ms = 9\n")
    arguments = [str(tmp_path / "run.toml"), "--workers", "2", "--faults", str(tmp_path / "faults.toml")]
    done = cli("simulate", *arguments, "--json", str(tmp_path / "figures.json"))
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert done.returncode == 0 and "1 head at the end, 0 heads with more than one state" in done.stderr, done.stderr
    assert [r["round"] for r in figures["rounds"]] == [1, 2, 3] and figures["silent_differences"] == 0
    simulation = simulate(tmp_path / "same", Law.of(config), World.from_toml((tmp_path / "faults.toml").read_text(), 2))
    assert figures["rounds"][-1]["state"] == simulation.living()[0].state.digest.hex()


GOOD = """
step_s = 2
latency_ms = 10.0
[[worker]]
number = 2
step_s = 0.25
[[fault]]
kind = "kill"
worker = 1
at_s = 5
[[partition]]
workers = [1, 2]
from_s = 1.0
to_s = 2.0
"""


def test_a_world_is_read_from_a_file() -> None:
    usual = Worker(step_s=2.0, latency_ms=10.0)
    assert World.from_toml(GOOD, 3) == World(
        (usual, dataclasses.replace(usual, step_s=0.25), usual), (TimedFault(kind="kill", worker=1, at_s=5.0),),
        (Cut(workers=(1, 2), from_s=1.0, to_s=2.0),))
    assert World.from_toml("", 2) == World((Worker(), Worker()))


@pytest.mark.parametrize(("text", "said"), [
    ("step = 1", "'step' is no field"), ("step_s = -1", "step_s = -1: must be float, finite and not negative"),
    ("step_s = nan", "finite"), ("step_s = true", "must be float"), ("a = [", "not TOML"), ("fault = [1]", "several"),
    ("[worker]\nnumber = 1", r"\[\[worker\]\]"),
    ("[[worker]]\nstep_s = 1", "worker None: must be a number from 1 to 3"), ("[[worker]]\nnumber = 4", "1 to 3"),
    ("[[fault]]\nkind = 'kill'\nworker = 1", "at_s is missing"),
    ("[[fault]]\nkind = 'nap'\nworker = 1\nat_s = 1", "'nap': must be one of kill, freeze, leave"),
    ("[[fault]]\nkind = 'kill'\nworker = 9\nat_s = 1", "worker 9"),
    ("[[partition]]\nworkers = 1\nfrom_s = 1\nto_s = 2", "a list of whole numbers"),
    ("[[partition]]\nworkers = [0]\nfrom_s = 1\nto_s = 2", "worker 0"), ("worker = 3", r"\[\[worker\]\]"),
    ("[[worker]]\nnumber = 1\nstep_s = 0", "step_s = 0: must be more than 0"),
    ("upload_mbit = 0", "upload_mbit = 0: must be more than 0"),
])
def test_a_wrong_world_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        World.from_toml(text, 3)
