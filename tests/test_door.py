"""Real processes at the door: a wrong clock, an identity that is in use, and peers that others name."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
def first(one_stage: Stage) -> PeerProcess:
    return one_stage.join("first")


def enter(s: Stage, home: Path, ahead_s: float) -> str:
    """Enter the network with a shifted clock; return the warning."""
    join = JoinString.parse(s.join_string)
    exchange = HivemindExchange.start(NetworkOptions(
        home / "identity.key", join.run_id, ("/ip4/127.0.0.1/tcp/0",), join.addresses, clock=lambda: time.time() + ahead_s))
    exchange.close()
    return exchange.warning


def test_a_wrong_clock_is_measured_and_refused(one_stage: Stage, first: PeerProcess, tmp_path: Path) -> None:
    assert enter(one_stage, tmp_path, 0.0) == ""
    assert "s ahead of" in enter(one_stage, tmp_path, 1.8)
    with pytest.raises(ClockError, match=r"clock is [34]\.\d s behind [12] peer.*timedatectl"):
        enter(one_stage, tmp_path, -4.0)


def test_a_copied_identity_is_refused_and_a_killed_peer_comes_back(one_stage: Stage, first: PeerProcess) -> None:
    one_stage.until("the first takes part", lambda: "joined" in first.words())
    home = one_stage.folder / "copy"
    home.mkdir()
    shutil.copy(first.home / "identity.key", home)
    copy = one_stage.join("copy")
    seconds = one_stage.until("the copy is refused", lambda: copy.process.poll() is not None, 30.0)
    assert copy.process.returncode == 2 and seconds < 25.0
    assert f"stop the other, or delete {home / 'identity.key'} to join as a new peer" in " ".join(copy.words().split())

    first.kill()
    again = one_stage.join("first")
    one_stage.until("it is back", lambda: "joined" in again.words() or again.process.poll() is not None, 30.0)
    assert "joined" in again.words()


def test_a_peer_that_did_wrong_is_named_to_everybody(one_stage: Stage) -> None:
    one_stage.join("second")
    homes = [one_stage.folder / name for name in ("first", "second")]

    def records(event: str) -> list[dict[str, Any]]:
        return [r for home in homes for r in read_json_lines(home / "metrics.jsonl") if r["event"] == event]

    one_stage.until("a round of two", lambda: any(r["members"] == 2 for r in records("round")))
    one_stage.join("bad", "--misbehave", "nan")
    one_stage.until("both name the bad peer", lambda: len(records("named")) == 2)
    named = records("named")[0]
    assert named["name"] in ("bad", "") and named["why"] == "sent bytes that break a rule"

    found: list[dict[str, Any]] = []
    one_stage.until("status says it", lambda: bool(found.extend(said_in_status(one_stage)) or found), 30.0)
    assert (found[0]["peer_id"], found[0]["why"]) == (named["peer_id"], named["why"]) and found[0]["said_by"] in (1, 2)
    assert "(bad): sent bytes that break a rule" in " ".join(cli("status", one_stage.join_string).stderr.split())
    assert len(records("named")) == 2, "once each, whatever number of rounds the ban lasts"


def said_in_status(s: Stage) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(cli("status", s.join_string, "--json").stdout)["named"]
    return found
