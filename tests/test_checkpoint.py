"""What one peer alone knows outlives it: bit for bit where it left, and nothing is counted twice where it was killed."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_trainer import behind_of, corpus, entry_of, law, scripted

from p2p_muloco.chain import Law
from p2p_muloco.checkpoint import Checkpoint, Checkpoints
from p2p_muloco.errors import ConfigError
from p2p_muloco.exchange import Committed
from p2p_muloco.healing import Way
from p2p_muloco.home import StepCount, locked_home
from p2p_muloco.identity import Identity
from p2p_muloco.inner import flat_weights
from p2p_muloco.local import LocalNetwork
from p2p_muloco.metrics import JsonLines, read_json_lines
from p2p_muloco.simulate import local_trainer
from p2p_muloco.trainer import Trainer

ME = Identity(bytes([1]) * 32)


def checkpoints(law: Law, home: Path, said: list[str] | None = None, identity: Identity = ME) -> Checkpoints:
    """Of a disk that takes no time, so that every save is due."""
    say = (said if said is not None else []).append
    return Checkpoints(home / "checkpoints", law.config_hash, identity.peer_id, say, lambda: 0.0)


def start(law: Law, home: Path, identity: Identity = ME, network: LocalNetwork | None = None, **more: Any) -> Trainer:
    """A life of one peer from what its folder holds."""
    trainer = local_trainer(law, identity, network or LocalNetwork(), corpus(), home, **more)
    trainer.pace_s = 0.05
    trainer.resume(checkpoints(law, home, identity=identity))
    return trainer


def tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    c = trainer.checkpoint()
    optimizer = {name: tensor.clone() for name, tensor in c.optimizer.items()}
    return {"anchor": c.anchor, "momentum": c.momentum, "residual": c.residual, "theta": c.theta, **optimizer}


def assert_same(a: Trainer, b: Trainer) -> None:
    assert a.state.tip == b.state.tip and a.digest == b.digest
    mine, other = tensors(a), tensors(b)
    for name in mine.keys() | other.keys():
        assert torch.equal(mine[name], other[name]), name
    ignored = {"pace_s": 0.0, "last_heldout": 0.0}
    assert dataclasses.replace(a.checkpoint().numbers, **ignored) == dataclasses.replace(b.checkpoint().numbers, **ignored)


def one_by_one(trainer: Trainer, things: int = 10**9) -> None:
    """As `run` does, for so many things; the pace is given, since it stands in HELLOs."""
    while things and not trainer.finished:
        things -= 1
        trainer.advance()
        trainer.pace_s = 0.05


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trainer]:
    whole = {}
    for optimizer in ("muon", "adamw"):
        whole[optimizer] = start(optimized(optimizer), tmp_path_factory.mktemp(optimizer))
        one_by_one(whole[optimizer])
    return whole


def optimized(optimizer: str) -> Law:
    l = law(1, rounds=3, overlap="keep")  # noqa: E741
    return Law.of(dataclasses.replace(l.config, inner=dataclasses.replace(l.config.inner, optimizer=optimizer)))


stops = st.tuples(st.integers(1, 17), st.booleans())


@settings(max_examples=10, deadline=None, derandomize=True)
@given(first=stops, second=stops, optimizer=st.sampled_from(["muon", "adamw"]))
def test_stopped_or_killed_twice_anywhere_a_lone_peer_ends_with_the_same_bits(
        golden: dict[str, Trainer], tmp_path_factory: pytest.TempPathFactory, first: tuple[int, bool], second: tuple[int, bool],
        optimizer: str) -> None:
    l, home = optimized(optimizer), tmp_path_factory.mktemp("home")  # noqa: E741
    for things, in_order in (first, second):
        trainer = start(l, home)
        one_by_one(trainer, things)
        if in_order:
            trainer.stop()
            trainer.run()
    last = start(l, home)
    one_by_one(last)
    assert_same(last, golden[optimizer])


@pytest.mark.parametrize("cut", ["in mid-round", "with a packet out", "after a commit"])
def test_a_checkpoint_is_all_that_the_next_step_depends_on(tmp_path: Path, cut: str) -> None:
    l = law(1, rounds=9, overlap="keep")  # noqa: E741
    trainer, exchange = scripted(l, tmp_path / "a")
    conditions = {"in mid-round": lambda: trainer.steps == 3, "with a packet out": lambda: bool(exchange.begun),
                  "after a commit": lambda: trainer.state.tip.k == 1}
    while not conditions[cut]():
        if exchange.begun:
            trainer.on_outcome(Committed(entry_of(l, {1: exchange.begun[0]})))
        trainer.advance()
    if cut == "with a packet out":
        trainer.advance()  # progress after theta_begin
    store = checkpoints(l, tmp_path)
    store.load()
    assert store.save(trainer.checkpoint())
    saved = checkpoints(l, tmp_path).load()
    assert saved is not None
    other, again = scripted(l, tmp_path / "b")
    other.restore(saved)
    assert_same(trainer, other)
    if cut == "with a packet out":  # the same bytes go out again, and what was learned since is kept on top
        other.advance()
        assert again.begun == exchange.begun and again.begun[0].payload == exchange.begun[0].payload
        for one in (trainer, other):
            one.on_outcome(Committed(entry_of(l, {1: exchange.begun[0]})))
    for one in (trainer, other):
        one.pace_s = 1.0
        one.advance()
    assert_same(trainer, other)


def test_killed_with_a_packet_out_that_the_others_counted_it_is_said_once(tmp_path: Path) -> None:
    l = law(2, rounds=4, overlap="keep", beta=1.0, eta=1.0, mu=0.0)  # noqa: E741
    network = LocalNetwork()
    other = Identity(bytes([2]) * 32)
    a, b = start(l, tmp_path / "a", ME, network), start(l, tmp_path / "b", other, network)
    while a._round is None or b._round is None:
        for one in (a, b):
            one.advance()
            one.pace_s = 0.05
    x, anchor = (a.state.anchor - a._round.theta_begin).clone(), a.state.anchor.clone()
    payload = a._round.packet.payload
    a.advance()  # lost with the crash
    network.run(lambda: bool(b.exchange.member.outcomes))  # type: ignore[attr-defined]
    one_by_one(b, 1)
    assert b.state.tip.k == 1 and ME.peer_id in b.state.tip.members

    again = start(l, tmp_path / "a", ME, network)
    assert again.state.tip.k == 0 and again._round is not None and again._round.packet.payload == payload
    again.catch_up(behind_of(b, other.peer_id))
    assert again.state.digest == b.state.digest and again.rounds == 1 and again.steps == 0
    said = torch.cat([l.layout.decode_up(i, p) for i, p in enumerate(l.layout.up_parts(0, len(l.layout.parts), payload))])
    assert torch.equal(again.residual, x - said)
    assert torch.equal(flat_weights(again.inner.model), again.state.anchor) and not torch.equal(anchor, again.state.anchor)


@pytest.mark.parametrize("how", ["entries", "state"])
def test_a_packet_that_a_crash_made_unknown_leaves_nothing_to_be_said_twice(tmp_path: Path, how: str) -> None:
    """No time to save the packet: the last checkpoint is older, and what it holds was in the packet that others counted."""
    l = law(1, rounds=9, overlap="keep", snapshot_every=1 if how == "state" else 100)  # noqa: E741
    trainer, exchange = scripted(l, tmp_path)
    store = checkpoints(l, tmp_path)
    store.load()
    trainer.residual.fill_(0.25)
    for _ in range(2):
        trainer.advance()
    store.save(trainer.checkpoint())
    while not exchange.begun:
        trainer.advance()
    trainer.on_outcome(Committed(entry_of(l, {1: exchange.begun[0]})))
    assert trainer.store.pinned() == ([1] if how == "state" else [])
    if how == "state":
        (tmp_path / "log" / "entry-000000001.bin").unlink()

    again, _ = scripted(l, tmp_path)
    assert again.resume(checkpoints(l, tmp_path))
    assert again.state.digest == trainer.state.digest and again.steps == 0 and again.total_steps == 2
    assert torch.equal(flat_weights(again.inner.model), again.state.anchor) and not again.residual.any()


def test_who_left_in_order_keeps_its_progress_under_another_state(tmp_path: Path) -> None:
    l = law(1, rounds=9, overlap="keep")  # noqa: E741
    trainer, _ = scripted(l, tmp_path)
    trainer.resume(checkpoints(l, tmp_path))
    trainer.advance()
    trainer.stop()
    trainer.run()
    progress = flat_weights(trainer.inner.model) - trainer.state.anchor
    again, _ = scripted(l, tmp_path)
    again.resume(checkpoints(l, tmp_path))
    state = dataclasses.replace(again.state, anchor=again.state.anchor + 1.0)
    again._rebase(state, Way(state, [], []))
    assert again.steps == 1 and torch.equal(flat_weights(again.inner.model), progress + state.anchor)


# -- files


def saved_twice(l: Law, home: Path) -> tuple[Trainer, list[Path]]:  # noqa: E741
    trainer = start(l, home)
    one_by_one(trainer)
    return trainer, sorted((home / "checkpoints").glob("*"))


def damage(path: Path, how: str) -> None:
    whole = bytearray(path.read_bytes())
    if how == "flipped":
        whole[len(whole) * 2 // 3] ^= 1
    path.write_bytes({"empty": b"", "truncated": bytes(whole[:-100]), "flipped": bytes(whole), "text": b"a note" * 99}[how])


@pytest.mark.parametrize("how", ["empty", "truncated", "flipped", "text"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(tmp_path: Path, how: str) -> None:
    l, said = law(1, rounds=3), []  # noqa: E741
    whole, files = saved_twice(l, tmp_path)
    assert len(files) == 2
    damage(files[1], how)
    store = checkpoints(l, tmp_path, said)
    found = store.load()
    assert found is not None and not found.last_word
    assert len(said) == 1 and str(files[1]) in said[0] and "the one before is taken" in said[0]
    assert_same(start(l, tmp_path), whole)  # the log brings it to where it was
    store.save(found)
    kept = sorted(store.folder.glob("*"))
    assert files[0] in kept and files[1] not in kept and len(kept) == 2

    said.clear()
    for path in kept:
        damage(path, how)
    assert checkpoints(l, tmp_path, said).load() is None
    assert len(said) == 2 and "pinned state" in said[1]
    fresh = start(l, tmp_path)
    assert fresh.digest == whole.digest and fresh.state.tip == whole.state.tip


@pytest.mark.parametrize("foreign", ["run", "peer"])
def test_anothers_checkpoint_is_refused_and_left_alone(tmp_path: Path, foreign: str) -> None:
    l = law(1, rounds=1)  # noqa: E741
    _, files = saved_twice(l, tmp_path)
    before = [path.read_bytes() for path in files]
    other = checkpoints(law(1, rounds=2), tmp_path) if foreign == "run" else checkpoints(l, tmp_path, None, Identity(b"2" * 32))
    with pytest.raises(ConfigError, match=f"another {foreign}.*move .*checkpoints away"):
        other.load()
    assert [path.read_bytes() for path in files] == before


@pytest.fixture
def full_disk() -> Iterator[Any]:
    """No file of this process grows beyond so many bytes: a write fails in its middle, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_costs_the_checkpoint_and_nothing_else(tmp_path: Path, full_disk: Any) -> None:
    l, said, records = law(1, rounds=4, snapshot_every=1), [], []  # noqa: E741
    trainer = local_trainer(l, ME, LocalNetwork(), corpus(), tmp_path, record=records.append)
    trainer.resume(checkpoints(l, tmp_path, said))
    while trainer.state.tip.k < 1:
        trainer.advance()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    full_disk(1000)
    while trainer.state.tip.k < 3:
        trainer.advance()
    assert len(said) == 1 and "bytes are needed" in said[0]
    assert len([r for r in records if r["event"] == "not_written"]) >= 1
    assert all(path.read_bytes() == whole for path, whole in before.items())
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before.keys()
    full_disk(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    while trainer.state.tip.k < 4:
        trainer.advance()
    assert start(l, tmp_path).state.digest == trainer.state.digest and len(said) == 1


def test_records_go_on_after_a_full_disk_and_after_a_torn_line(tmp_path: Path, full_disk: Any) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"event": "torn')
    lines = JsonLines(path)
    lines({"event": "a"})
    full_disk(path.stat().st_size + 10)
    lines({"event": "lost"})
    lines({"event": "lost"})
    full_disk(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    lines({"event": "b"})
    lines.close()
    assert [record["event"] for record in read_json_lines(path)] == ["a", "b"]


def test_saving_costs_at_most_its_share_of_the_time(tmp_path: Path) -> None:
    l = law(1, rounds=99)  # noqa: E741
    trainer, _ = scripted(l, tmp_path)
    now = [0.0]

    def clock() -> float:
        return now[0]

    class Slow(Checkpoints):
        def _drop_others(self) -> None:  # what a big model takes
            now[0] += 1.0

    slow = Slow(tmp_path / "checkpoints", l.config_hash, ME.peer_id, print, clock)
    slow.load()
    spent = 0
    for _ in range(1000):
        now[0] += 0.5
        if slow.is_due():
            spent += slow.save(trainer.checkpoint())
    assert 2 <= spent <= 1 + 0.026 * now[0]


def test_a_checkpoint_survives_the_file_as_a_value(tmp_path: Path) -> None:
    l = law(1)  # noqa: E741
    trainer, _ = scripted(l, tmp_path)
    trainer.advance()
    store = checkpoints(l, tmp_path)
    store.load()
    given = trainer.checkpoint()
    store.save(given)
    found = checkpoints(l, tmp_path).load()
    assert isinstance(found, Checkpoint) and found.numbers.cursor == 1 and found.tip == given.tip
    assert all(torch.equal(found.optimizer[name], given.optimizer[name]) for name in given.optimizer)


def test_executed_steps_are_counted_over_all_lives(tmp_path: Path) -> None:
    path = tmp_path / "executed"
    for life in range(3):
        count = StepCount(path)
        assert count.n == 5 * life
        for _ in range(5):
            count.add()
        assert int(path.read_text()) == count.n  # before any goodbye
        count.close()
    assert StepCount(path, at_least=99).n == 99


def test_a_home_is_waited_for_while_what_a_killed_process_started_still_ends(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", (
        "import sys, time\nfrom pathlib import Path\nfrom p2p_muloco.home import locked_home\nimport os\n"
        f"with locked_home(Path({str(tmp_path)!r})):\n"
        "    if os.fork() == 0:\n        print('held', flush=True); time.sleep(1.0); os._exit(0)\n    time.sleep(60)")],
        stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match="another peer runs"), locked_home(tmp_path):
        pass
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # dead, and nobody has asked how
    with locked_home(tmp_path):  # though its child holds the lock for a moment
        pass
    holder.wait()
    holder.stdout.close()


def test_a_long_sleep_is_no_slow_step(tmp_path: Path) -> None:
    trainer, exchange = scripted(law(1, rounds=9), tmp_path)
    trainer.pace_s = 0.1
    exchange.time = 0.0
    trainer._measure(3600.0)
    assert trainer.pace_s < 0.12


@settings(max_examples=4, deadline=None, derandomize=True)
@given(lives=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_a_peer_that_is_killed_again_and_again_agrees_with_the_other(tmp_path_factory: pytest.TempPathFactory,
                                                                     lives: list[int]) -> None:
    """After so many of its inner steps each, on a real protocol and a virtual clock."""
    lives = list(lives)
    l, home = law(2, rounds=5, overlap="keep"), tmp_path_factory.mktemp("home")  # noqa: E741
    network, other = LocalNetwork(), Identity(bytes([2]) * 32)
    a, b = start(l, home / "a", ME, network), start(l, home / "b", other, network)
    born_at = 0
    while not (a.finished and b.finished):
        assert network.now < 60.0
        network.advance_to(network.now + 0.05)
        for trainer in (b, a):  # the donor writes an entry before it is asked for it
            one_by_one(trainer, 1)
        if lives and a.total_steps >= born_at + lives[0]:
            lives.pop(0)
            network.kill(ME.peer_id)
            network.advance_to(network.now + 0.5)
            a = start(l, home / "a", ME, network)
            born_at = a.total_steps
    assert a.state.digest == b.state.digest and a.state.tip == b.state.tip
