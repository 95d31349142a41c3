"""Faults by plan: the plan, the judge, members that misbehave, and the command that brings them together on real peers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import Driver, Peer, Swarm, established, law
from peers import cli

from p2p_muloco.chain import Checked, Law, advance, check_entry, merged_update
from p2p_muloco.chaos import MISBEHAVIOURS, QUIET_S, RECOVERY_S, max_out, plan
from p2p_muloco.exchange import Failed
from p2p_muloco.home import StepCount
from p2p_muloco.local import LocalExchange
from p2p_muloco.metrics import JsonTail
from p2p_muloco.misbehave import Misbehaving
from p2p_muloco.outer import outer_step
from p2p_muloco.verdict import Deed, Observed, executed_steps, growth, judge

# -- the plan


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), minutes=st.floats(0.1, 60), rate=st.floats(0, 60), peers=st.integers(1, 16))
def test_a_plan_leaves_the_honest_present_a_majority(seed: int, minutes: float, rate: float, peers: int) -> None:
    faults = plan(seed, 60 * minutes, rate, peers)
    assert faults == plan(seed, 60 * minutes, rate, peers)
    assert [f.at_s for f in faults] == sorted(f.at_s for f in faults)
    for now in faults:
        there = [f for f in faults if f.at_s <= now.at_s < f.until_s + RECOVERY_S.get(f.kind, 0.0)]
        out = [f.victim for f in there if f.kind in RECOVERY_S]
        assert len(out) == len(set(out)) <= max_out(peers) and 2 * len(out) < peers
        assert 2 * sum(f.kind == "poison" for f in there) < peers - len(out)
        last_s = 60 * minutes - (QUIET_S if now.kind in RECOVERY_S else 0.0)
        assert now.at_s > 0 and now.until_s <= last_s + 1e-6
        assert (now.victim < peers) == (now.kind in RECOVERY_S) and bool(now.how) == (now.kind == "poison")
    new = [f.victim for f in faults if f.victim >= peers]
    assert new == list(range(peers, peers + len(new)))


def test_a_long_plan_has_everything_at_its_rate() -> None:
    faults = plan(7, 4 * 3600.0, 4.0, 12)
    assert {f.kind for f in faults} == {"kill", "freeze", "join", "poison"}
    assert {f.how for f in faults} == {"", *MISBEHAVIOURS}
    assert 0.5 * 4 * 240 < len(faults) < 1.1 * 4 * 240
    assert plan(8, 4 * 3600.0, 4.0, 12) != faults and plan(7, 600.0, 0.0, 6) == []


# -- the judge


def a_round(at: float, number: int, *, steps: int = 10, head: str = "", state: str = "", loss: float | None = None,
            total: int = 0) -> dict[str, Any]:
    return {"event": "round", "time": at, "round": number, "digest": head or f"head{number}", "state": state or f"state{number}",
            "counted": steps > 0, "inner_steps": steps, "total_steps": total, "heldout_loss": loss or 5.0 / (1 + number)}


def a_run(n: int = 3, seconds: int = 40, **more: Any) -> Observed:
    """A round each 2 s, 10 inner steps of everybody in each."""
    histories = {f"peer-{i}": [a_round(2.0 * k + 0.1 * i, k) for k in range(1, seconds // 2)] for i in range(n)}
    executed = {peer: 10 * len(history) for peer, history in histories.items()}
    run = Observed(2.0, float(seconds), (), histories, executed, staying=frozenset(histories))
    return dataclasses.replace(run, **more)


def test_a_good_run_breaks_no_promise() -> None:
    result = judge(a_run())
    assert result["broken_promises"] == [] and result["step_efficiency"] == 1.0 and result["rounds"] == 19
    assert result["heldout_loss_end"] < result["heldout_loss_start"] and result["longest_pause_s"] == 2.0


def test_a_kill_is_timed_to_the_survivors_next_round_and_to_the_victims_return() -> None:
    run = a_run(deeds=[Deed(9.0, "kill", "peer-1"), Deed(13.0, "start", "peer-1"), Deed(15.0, "start", "peer-3")])
    run.histories["peer-1"][:] = [r for r in run.histories["peer-1"] if r["time"] < 9.0 or r["time"] > 21.0]
    result = judge(run)
    assert result["commit_after_kill_s"] == [1.0]  # round 5 at peer-0
    assert result["rejoin_s"] == [9.1]  # round 11 at peer-1; peer-3 comes for the first time
    assert result["step_efficiency"] == pytest.approx((57 - 6) / 57, abs=1e-4)


def test_a_round_that_others_had_before_the_kill_is_no_new_one() -> None:
    run = a_run(deeds=[Deed(8.05, "kill", "peer-2")])
    assert judge(run)["commit_after_kill_s"] == [1.95]  # peer-1 has round 4 at 8.1, but peer-0 had it at 8.0


def test_a_replayed_entry_and_one_of_a_lost_fork_hold_no_steps() -> None:
    run = a_run()
    run.histories["peer-0"].append(a_round(39.0, 19))
    assert judge(run)["step_efficiency"] == 1.0
    run.histories["peer-0"].append(a_round(39.5, 20, head="fork-a"))
    run.histories["peer-1"].append(a_round(39.5, 20, head="fork-b"))
    run.histories["peer-2"].append(a_round(39.6, 20, head="fork-b"))
    run = dataclasses.replace(run, executed={peer: n + 10 for peer, n in run.executed.items()})
    assert judge(run)["step_efficiency"] == pytest.approx(59 / 60, abs=1e-4)


@pytest.mark.parametrize(("change", "word"), [
    ({"ended": 75.0}, "no round for over 30 s"),
    ({"left": ["p2pd 4711"]}, "1 processes stayed behind"),
    ({"executed": {"peer-0": 1000}}, "step efficiency"),
    ({"deeds": [Deed(39.0, "kill", "peer-0")]}, "nothing was committed after the kill of peer-0"),
    ({"troubles": ["peer-1 ended with code 70"]}, "peer-1 ended with code 70"),
])
def test_each_broken_promise_is_named(change: dict[str, Any], word: str) -> None:
    broken = judge(a_run(**change))["broken_promises"]
    assert any(word in line for line in broken), broken


def test_what_records_show_is_judged() -> None:
    two_states, absent, diverging = a_run(), a_run(), a_run()
    two_states.histories["peer-2"][3]["state"] = "another"
    assert judge(two_states)["silent_differences"] == 1 and len(judge(two_states)["broken_promises"]) == 1
    absent.histories["peer-2"][:] = absent.histories["peer-2"][:2]
    assert any("peer-2 was counted in nothing" in line for line in judge(absent)["broken_promises"])
    diverging.histories["peer-0"].append(a_round(39.9, 20, loss=9.0))
    assert any("held-out loss" in line for line in judge(diverging)["broken_promises"])
    diverging.histories["peer-0"][-1]["heldout_loss"] = None  # not finite
    assert any("held-out loss" in line for line in judge(diverging)["broken_promises"])
    assert judge(a_run(histories={}, executed={}, staying=frozenset()))["broken_promises"]


def test_what_grows_in_a_calm_run_is_named() -> None:
    flat = [[5.0 * i, 1e8 + 1e6 * (i % 3), 40 + i % 2, 9] for i in range(40)]
    leak = [[5.0 * i, 1e8 + 1e6 * i, 40 + i // 4, 9] for i in range(40)]
    assert growth({"peer-1 trainer": flat}) == []
    lines = growth({"peer-1 trainer": flat, "peer-2 p2pd": leak})
    assert [line.split(" grew")[0] for line in lines] == ["peer-2 p2pd: resident bytes", "peer-2 p2pd: open files"]


def test_executed_steps_are_the_homes_own_count_where_there_is_one(tmp_path: Path) -> None:
    history = [a_round(1.0, 1, total=30), a_round(2.0, 2, total=25)]
    assert executed_steps(tmp_path, history) == 30 and executed_steps(tmp_path, []) == 0
    count = StepCount(tmp_path / "executed", at_least=76)  # as a peer writes it
    count.add()
    count.close()
    assert executed_steps(tmp_path, history) == 77


def test_a_growing_file_is_read_once_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = JsonTail(path)
    tail.update()
    for text in ('{"a": 1}\n{"a"', ": 2}\n", '{"a": \n{"a": 3}\n'):
        with open(path, "a") as file:
            file.write(text)
        tail.update()
        tail.update()
    assert tail.records == [{"a": 1}, {"a": 2}, {"a": 3}]


# -- members that misbehave


class Credulous(Peer):
    """Believes what its exchange says of its own packet."""

    def apply(self, law: Law, checked: Checked) -> None:
        true = check_entry(law, self.tip, checked.entry)
        outer_step(self.anchor, self.momentum, merged_update(law, true), 0.5, 0.5)
        self.tip = advance(law, self.tip, checked)
        self.entries[checked.k] = true
        assert advance(law, self.tip, checked).members == advance(law, self.tip, true).members


def with_one_wrong(kind: str, honest: int = 4) -> Driver:
    small = law(part_elements=1024)
    swarm = Swarm(small, honest + 1, tip=established(small, honest + 1))
    swarm.members[-1] = Misbehaving(kind, small, swarm.identities[-1], swarm.members[-1].tip)  # type: ignore[call-overload]
    swarm.exchanges[-1] = LocalExchange(swarm.network, swarm.members[-1])
    driver = Driver(swarm)
    last = driver.peers[-1]
    driver.peers[-1] = Credulous(last.tip, last.anchor, last.momentum, retry_at=last.retry_at)
    return driver


@pytest.mark.parametrize("kind", MISBEHAVIOURS)
def test_the_honest_go_on_and_agree_beside_a_peer_that_misbehaves(kind: str) -> None:
    driver = with_one_wrong(kind)
    assert driver.run(6, limit_s=60.0)
    honest, me = driver.peers[:-1], driver.swarm.members[-1].me
    assert len({peer.tip.head for peer in honest}) == 1
    assert all(torch.equal(peer.anchor, honest[0].anchor) for peer in honest)
    counted = [any(n for _, n in checked.counted_parts(me)) for checked in honest[0].entries.values()]
    if kind in ("nan", "huge", "h", "equivocate"):
        assert not any(counted)
    if kind == "stale":
        assert counted[0] and not any(counted[1:])
    if not kind.startswith("flip"):  # of these small spans no direction is judged
        assert any(me in member.opinion.named for member in driver.swarm.members[:-1])
    failures = [sum(isinstance(o, Failed) for o in peer.outcomes) for peer in honest]
    assert max(failures) <= (3 if kind in ("equivocate", "h") else 1), "a wrong peer ends no attempt after attempt"


# -- the command


@pytest.mark.processes
def test_real_peers_under_faults_are_judged(tmp_path: Path) -> None:
    figures = tmp_path / "chaos.json"
    options = ("--peers", "5", "--minutes", "0.9", "--rate", "15", "--out", str(tmp_path / "out"), "--json", str(figures))
    result = cli("demo", "--chaos", "34", *options, timeout_s=280)
    chaos = json.loads(figures.read_text())
    assert {"faults", "commit_after_kill_s", "rejoin_s", "step_efficiency", "silent_differences", "hangs", "processes_left",
            "heldout_loss_end", "broken_promises"} <= chaos.keys()
    assert chaos["faults"] == {"freeze": 1, "kill": 1}
    assert result.returncode == bool(chaos["broken_promises"])
    assert chaos["silent_differences"] == chaos["processes_left"] == chaos["hangs"] == 0
    assert "kill -9 of peer-" in result.stderr and "wakes up" in result.stderr and "s after the kill of" in result.stderr


def test_no_minority_of_two_can_be_killed(tmp_path: Path) -> None:
    result = cli("demo", "--chaos", "3", "--peers", "2", "--out", str(tmp_path / "out"))
    assert result.returncode == 2 and "--peers 2" in result.stderr
