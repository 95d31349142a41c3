"""Real processes at the door: a wrong clock, an identity that is in use, and peers that others name."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from peers import PeerProcess, Stage, cli, stage

from p2p_muloco.config import JoinString
from p2p_muloco.errors import ClockError
from p2p_muloco.hive import HivemindExchange, NetworkOptions
from p2p_muloco.metrics import read_json_lines

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def one_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("stage")) as s:
        yield s


@pytest.fixture(scope="module")
def bad(one_stage: Stage) -> PeerProcess:
    return one_stage.join("bad", "--misbehave", "nan")


def enter(s: Stage, home: Path, ahead_s: float) -> str:
    """Enter the network with a shifted clock; return the warning."""
    join = JoinString.parse(s.join_string)
    exchange = HivemindExchange.start(NetworkOptions(
        home / "identity.key", join.run_id, ("/ip4/127.0.0.1/tcp/0",), join.addresses, clock=lambda: time.time() + ahead_s))
    try:
        return exchange.warning
    finally:
        exchange.close()


def test_a_wrong_clock_is_measured_and_refused(one_stage: Stage, bad: PeerProcess, tmp_path: Path) -> None:
    assert enter(one_stage, tmp_path, 0.0) == ""
    assert "s ahead of" in enter(one_stage, tmp_path, 1.8)
    with pytest.raises(ClockError, match=r"clock is [34]\.\d s behind [12] peer.*timedatectl"):
        enter(one_stage, tmp_path, -4.0)


def test_a_copied_identity_is_refused_and_a_killed_peer_comes_back(one_stage: Stage, bad: PeerProcess) -> None:
    first, copy = one_stage.join("first"), one_stage.folder / "copy"
    one_stage.until("the first takes part", lambda: "joined" in first.words())
    copy.mkdir()
    shutil.copy(first.home / "identity.key", copy)
    began = time.monotonic()
    result = cli("join", one_stage.join_string, "--home", str(copy), "--listen", "127.0.0.1:0")
    assert result.returncode == 2 and time.monotonic() - began < 25.0
    assert f"stop the other, or delete {copy / 'identity.key'} to join as a new peer" in " ".join(result.stderr.split())

    first.kill()
    again = one_stage.join("first")
    one_stage.until("it is back", lambda: "joined" in again.words() or again.process.poll() is not None, 30.0)
    assert "joined" in again.words()


def test_a_peer_that_did_wrong_is_named_to_everybody(one_stage: Stage, bad: PeerProcess) -> None:
    homes = [one_stage.folder / "first", one_stage.folder / "second"]
    one_stage.join("second")

    def named() -> list[dict[str, object]]:
        return [r for home in homes for r in read_json_lines(home / "metrics.jsonl") if r["event"] == "named"]

    one_stage.until("somebody names the bad peer", lambda: bool(named()))
    assert named()[0]["name"] == "bad" and named()[0]["why"] == "sent bytes that break a rule"
    found: list[dict[str, object]] = []

    def said() -> bool:
        found[:] = json.loads(cli("status", one_stage.join_string, "--json").stdout)["named"]
        return bool(found)

    one_stage.until("status says it", said)
    assert found[0]["peer_id"] == named()[0]["peer_id"] and found[0]["said_by"] in (1, 2)
    assert "(bad): sent bytes that break a rule" in cli("status", one_stage.join_string).stderr
