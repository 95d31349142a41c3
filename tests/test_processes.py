"""Real peers: real hivemind, real sockets, real signals, real kill -9."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
from peers import Stage, cli, stage

from p2p_muloco.config import JoinString, RunConfig

pytestmark = pytest.mark.processes


def agree(a: dict[int, tuple[str, str]], b: dict[int, tuple[str, str]], since: int) -> bool:
    shared = [k for k in a.keys() & b.keys() if k >= since]
    return bool(shared) and all(a[k] == b[k] for k in shared)


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def test_a_swarm_lives_through_comings_and_goings(tmp_path: Path) -> None:
    with stage(tmp_path) as s:
        first, second = s.join("first"), s.join("second")
        s.until("five rounds of two", lambda: min(first.round(), second.round()) >= 5)
        assert agree(first.heads(), second.heads(), 1)

        third = s.join("third")
        s.until("the third is counted", lambda: any(r["counted"] for r in third.rounds()))
        joined_at = min(r["round"] for r in third.rounds() if r["counted"])
        assert joined_at > 5
        s.until("two more rounds", lambda: third.round() >= joined_at + 2)
        s.until("the others have them too", lambda: first.round() >= joined_at + 2)
        assert agree(third.heads(), first.heads(), joined_at + 1)
        assert any(r["members"] == 3 for r in first.rounds())

        report = json.loads(cli("status", s.join_string, "--json").stdout)
        assert {peer["name"] for peer in report["peers"]} == {"first", "second", "third"}
        assert report["round"] >= joined_at and all(re.fullmatch("[0-9a-f]{64}", p["digest"]) for p in report["peers"])

        s.bootstrap.kill()
        before = first.round()
        s.until("rounds without the bootstrap node", lambda: min(first.round(), second.round(), third.round()) >= before + 3)

        address = re.search(r"--initial-peer (/\S+)", first.words())
        assert address is not None
        fourth = s.join("fourth", "--initial-peer", address.group(1))
        s.until("the fourth is counted", lambda: any(r["counted"] for r in fourth.rounds()))
        s.until("a group of four", lambda: any(r["members"] == 4 for r in first.rounds()))

        children = descendants(third.process.pid)
        before = first.round()
        third.kill()
        s.until("the survivors' next rounds", lambda: min(p.round() for p in (first, second, fourth)) >= before + 3, 40.0)
        s.until("nothing of the killed peer lives", lambda: not any(c.is_running() for c in children), 5.0)
        assert agree(first.heads(), second.heads(), 1) and agree(first.heads(), fourth.heads(), before + 1)


def test_the_run_ends_everywhere_with_the_same_saved_state(tmp_path: Path) -> None:
    budget = 2 * 4 * 8 * 4 * 64  # peers, rounds, H, sequences, tokens
    with stage(tmp_path, budget=budget, clock="steps") as s:
        peers = [s.join(name, "--json", str(tmp_path / f"{name}.json")) for name in ("a", "b")]
        s.until("both have ended", lambda: all(p.process.poll() is not None for p in peers))
        assert [p.process.returncode for p in peers] == [0, 0], peers[0].words()
        ends = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("a", "b")]
        assert ends[0]["round"] == ends[1]["round"] == 4 and ends[0]["ended"]
        assert (ends[0]["digest"], ends[0]["state"]) == (ends[1]["digest"], ends[1]["state"])
        models = [(p.home / "model.safetensors").read_bytes() for p in peers]
        assert models[0] == models[1]
        for p in peers:  # mean over peers: 2 (n-1)/n of a packet; each against its own span
            for r in p.rounds():
                own = (r["packet_bytes"] - r["span_bytes"]) + r["span_bytes"] * (2 - 1)
                assert r["bytes_sent"] <= own * 1.05 + 2000


def test_alone_a_peer_trains_on_and_ctrl_c_leaves_in_order(tmp_path: Path) -> None:
    with stage(tmp_path, min_peers=1) as s:
        peer = s.join("alone")
        s.until("rounds of one", lambda: peer.round() >= 3)
        assert all(r["members"] == 1 and r["counted"] for r in peer.rounds())
        children = descendants(peer.process.pid)
        peer.process.send_signal(signal.SIGINT)
        s.until("it has left", lambda: peer.process.poll() is not None, 25.0)
        assert peer.process.returncode == 0 and "left the run" in peer.words()
        assert not any(c.is_running() for c in children)

        again = s.join("alone")
        last = peer.round()
        s.until("it goes on where it was", lambda: again.round() >= last + 2)
        assert sorted(again.heads()) == list(range(1, again.round() + 1))


def test_a_killed_bootstrap_node_leaves_nothing_and_starts_again_as_itself(tmp_path: Path) -> None:
    with stage(tmp_path) as s:
        children = descendants(s.bootstrap.process.pid)
        assert any(c.name() == "p2pd" for c in children)
        s.bootstrap.kill()
        s.until("its daemon has ended", lambda: not any(c.is_running() for c in children), 5.0)
        port = JoinString.parse(s.join_string).addresses[0].split("/")[4]
        again = s._start("again", "bootstrap", str(tmp_path / "run.toml"), "--listen", f"127.0.0.1:{port}", "--home",
                         str(tmp_path / "bootstrap"))
        assert again.process.stdout is not None
        assert again.process.stdout.readline().strip() == s.join_string


@pytest.fixture(scope="module")
def one_stage(tmp_path_factory: pytest.TempPathFactory) -> object:
    with stage(tmp_path_factory.mktemp("stage")) as s:
        yield s


def one_line(result: object) -> str:
    error = result.stderr  # type: ignore[attr-defined]
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in error, error
    return lines[0]


def test_each_wrong_input_is_one_line_with_the_remedy(one_stage: Stage, tmp_path: Path) -> None:
    good = JoinString.parse(one_stage.join_string)
    peer_id = good.addresses[0].rpartition("/")[2]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        unreachable = JoinString(addresses=(f"/ip4/127.0.0.1/tcp/9/p2p/{peer_id}",), run_id=good.run_id,
                                 config_hash=good.config_hash)
        other = RunConfig().hash
        unknown = JoinString(addresses=good.addresses, run_id=RunConfig().run_id, config_hash=other)
        misspelt = tmp_path / "run.toml"
        misspelt.write_text("[run]\ninner_step = 30\n")
        home = ("--home", str(tmp_path / "home"))
        cases = {
            ("join", one_stage.join_string[:-3] + "abc", *home): ("checksum", 2),
            ("join", one_stage.join_string[:40], *home): ("join string", 2),
            ("join", str(unreachable), *home): ("--initial-peer", 4),
            ("join", one_stage.join_string, *home, "--listen", f"127.0.0.1:{port}"): (f"127.0.0.1:{port + 1}", 4),
            ("join", str(unknown), *home, "--listen", "127.0.0.1:0"): ("serves run my-run", 4),
            ("join", one_stage.join_string, *home, "--batch-size", "none"): ("--batch-size", 2),
            ("bootstrap", str(misspelt), "--listen", "127.0.0.1:0"): ("did you mean inner_steps?", 2),
            ("bootstrap", str(tmp_path / "absent.toml")): ("p2p-muloco init", 2),
            ("status", str(unreachable)): ("can be reached", 4),
        }
        for arguments, (remedy, code) in cases.items():
            began = time.monotonic()
            result = cli(*arguments)
            assert remedy in one_line(result), (arguments, result.stderr)
            assert result.returncode == code and time.monotonic() - began < 15.0, arguments


def test_a_home_serves_one_process_at_a_time(one_stage: Stage) -> None:
    one_stage.join("twice")
    one_stage.until("the first has its home", lambda: (one_stage.folder / "twice" / "lock").exists(), 30.0)
    time.sleep(0.5)
    result = cli("join", one_stage.join_string, "--home", str(one_stage.folder / "twice"), "--listen", "127.0.0.1:0")
    assert "another peer runs from this folder" in one_line(result) and result.returncode == 2
