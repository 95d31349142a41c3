"""The README's first screen is true: its commands are those of the gate, its blocks run."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from peers import PeerProcess, cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_gate_runs_the_readmes_test_command() -> None:
    command = blocks("sh")[1].strip()
    gate = (ROOT / ".ci" / "run").read_text()
    install, test = re.findall(r"pip install (.*?) && (.*)$", command)[0]
    assert install in gate and test in gate


def test_python_blocks_run() -> None:
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_every_command_and_option_shown_exists() -> None:
    helps: dict[str, str] = {}
    for command, rest in re.findall(r"p2p-muloco (\w+)([^\n`]*)", README):
        if command not in helps:
            helps[command] = cli(command, "--help").stdout
            assert "Usage" in helps[command], command
        for option in re.findall(r"--[a-z-]+", rest):
            assert option in helps[command], (command, option)
    for option in re.findall(r"`(--[a-z-]+)", README):
        assert any(option in text for text in helps.values()), option


@pytest.mark.processes
def test_start_a_run_as_written(tmp_path: Path) -> None:
    lines = [line.split()[1:] for line in blocks("sh")[3].strip().splitlines()]
    assert [line[0] for line in lines] == ["init", "bootstrap", "status"]
    run = tmp_path / lines[0][1]
    assert cli("init", str(run)).returncode == 0
    assert cli("init", str(run)).returncode == 2  # it overwrites nothing
    node = PeerProcess(tmp_path / "node", "bootstrap", str(run), "--listen", "127.0.0.1:0")
    try:
        assert node.process.stdout is not None
        join = node.process.stdout.readline().strip()
        status = json.loads(cli("status", join, "--json").stdout)
        assert status["peers"] == [] and status["run_id"].startswith("my-run-")
    finally:
        node.process.send_signal(signal.SIGINT)
        node.process.wait(20)
        node.process.stdout.close()


@pytest.mark.processes
def test_the_demo_shows_what_it_promises(tmp_path: Path) -> None:
    out, figures = tmp_path / "out", tmp_path / "demo.json"
    result = cli("demo", "--peers", "2", "--rounds", "2", "--out", str(out), "--json", str(figures), timeout_s=150)
    assert result.returncode == 0, result.stderr
    demo = json.loads(figures.read_text())
    assert {"rounds", "seconds", "heldout_loss_start", "heldout_loss_end", "heldout_loss_alone", "digests_equal",
            "packet_bytes", "fp32_bytes", "peers"} <= demo.keys()
    assert {"name", "peer_id", "round", "digest", "heldout_loss", "bytes_sent", "bytes_received", "inner_steps",
            "tokens_per_s"} <= demo["peers"][0].keys()
    assert demo["rounds"] == 2 and demo["digests_equal"] and demo["packet_bytes"] <= 0.16 * demo["fp32_bytes"]
    assert abs(demo["heldout_loss_start"] - 5.545) < 0.02 and demo["heldout_loss_end"] < 4.0
    assert demo["bytes_per_round"] == pytest.approx(demo["packet_bytes"], rel=0.05)  # 2 (n-1)/n packets, n = 2
    assert (out / "loss.png").stat().st_size > 10_000
    assert "2 of 2 peers identical" in result.stderr


def test_the_example_runs() -> None:
    command = (sys.executable, str(ROOT / "examples" / "compare_outer.py"))
    size = ("--workers", "2", "--rounds", "1", "--inner-steps", "2")
    result = subprocess.run([*command, *size], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.count("held-out") == 4
