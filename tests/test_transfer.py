"""The state from many donors: whatever they do, what arrives is whole and true; nobody carries it alone, nobody stops for it."""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import itertools
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import kit
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_muloco.chain import Law, Tip
from p2p_muloco.config import InnerConfig, ModelConfig, RunConfig, RunSection
from p2p_muloco.data import Corpus, load_corpus
from p2p_muloco.errors import DiskFull, StateUnavailable
from p2p_muloco.local import LocalExchange, LocalNetwork
from p2p_muloco.member import Member
from p2p_muloco.partial import Partial
from p2p_muloco.replay import fetch_entries
from p2p_muloco.requests import BUSY, Manifest, WantChunk, WantEntry, fetch_manifest, serve
from p2p_muloco.simulate import local_trainer
from p2p_muloco.snapshot import State, Store, chunk_bytes, read_state
from p2p_muloco.trainer import Trainer
from p2p_muloco.transfer import Download, Progress, Uploads, fetch_state
from p2p_muloco.wire import Record

LAW = kit.law({"w": (512, 512)})  # a state of 2 MiB: 16 chunks


def a_state(law: Law = LAW, k: int = 5, period_ms: int = 3000) -> State:
    tip = dataclasses.replace(kit.established(law, 3), k=k, period_ms=period_ms)
    return State(tip, kit.vector(law, 1), kit.vector(law, 2))


def a_store(folder: Path, state: State | None = None, law: Law = LAW) -> Store:
    store = Store(folder, law.layout, law.config.to_bytes())
    store.restart_from(state or a_state(law))
    return store


def manifest_of(store: Store, law: Law = LAW) -> Manifest:
    return fetch_manifest(law, lambda donor, request, most: serve(store, request, b""), b"")


def chunk_of(store: Store, manifest: Manifest, index: int) -> bytes:
    return serve(store, WantChunk(manifest.k, index, manifest.digests[index]), b"")


# -- files


def test_a_small_state_is_cut_in_sixteen_and_a_large_one_in_4_mib() -> None:
    assert [chunk_bytes(n) for n in (1, 2**16, 2**20, 2**24 + 1, 2**26, 2**40)] == [
        2**16, 2**16, 2**16, 2**20 + 1, 2**22, 2**22]


def test_all_peers_pin_the_same_bytes(tmp_path: Path) -> None:
    """Also one that took the state from another, and one whose disk held others before."""
    manifests = []
    for i in range(4):
        store = a_store(tmp_path / str(i))
        manifests.append(store.manifest())
        taken = read_state(LAW, store.snapshots / "000000005.safetensors")
        store.pin(a_state(k=6))
        store.restart_from(taken)
        manifests.append(store.manifest())
    assert len(set(manifests)) == 1


def test_a_state_that_somebody_takes_stays(tmp_path: Path) -> None:
    """Until it is no longer asked for, and two such at most; whoever came first is served to the end."""
    store = a_store(tmp_path)
    for k in (6, 7, 8, 9):
        for taken in store.pinned()[-1:] if k < 9 else ():
            manifest = manifest_of(store)
            assert store.chunk(taken, 0, manifest.digests[0])
        store.pin(a_state(k=k))
    assert store.pinned() == [5, 6, 8, 9], "7 is in use as well, but the third"
    for used in store.snapshots.glob("*.used"):
        os.utime(used, (0.0, 0.0))
    store.pin(a_state(k=10))
    assert store.pinned() == [9, 10] and not list(store.snapshots.glob("*.used"))


def test_a_state_is_not_kept_for_a_link_that_can_never_follow(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    longest = 4 * 8 * LAW.layout.n_elements // LAW.layout.down_bytes
    assert store.chunk(5, 0, manifest_of(store).digests[0])
    store.pin(a_state(k=5 + longest - 1))
    store.pin(a_state(k=5 + longest))
    assert store.pinned()[0] == 5
    store.pin(a_state(k=6 + longest))
    assert store.pinned() == [5 + longest, 6 + longest]


def test_a_chunk_that_the_donors_disk_has_spoiled_is_not_served(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    manifest, path = manifest_of(store), store.snapshots / "000000005.safetensors"
    whole = bytearray(path.read_bytes())
    whole[manifest.start(3) + 7] ^= 1
    path.write_bytes(whole)
    assert chunk_of(store, manifest, 3) == b"" and manifest.holds(4, chunk_of(store, manifest, 4))


def test_a_download_goes_on_after_a_restart_with_what_is_true(tmp_path: Path) -> None:
    store = a_store(tmp_path / "donor")
    manifest = manifest_of(store)
    partial = Partial(tmp_path / "partial", manifest)
    for index in (15, 3, 7):
        partial.write(index, chunk_of(store, manifest, index))
    partial.close()
    with open(partial.path, "r+b") as file:
        file.seek(manifest.start(7) + 100)
        file.write(b"spoiled")
    again = Partial(tmp_path / "partial", manifest)
    assert again.held() == {3, 15}
    for index in range(len(manifest.digests)):
        again.write(index, chunk_of(store, manifest, index))
    state = again.read(LAW)
    assert state.digest == a_state().digest and state.tip == a_state().tip
    assert Partial(tmp_path / "partial", manifest).held() == set(range(16)), "it stays until it is pinned"
    mine = a_store(tmp_path)
    assert not mine.partial.exists()


def test_only_one_download_is_kept_on_disk(tmp_path: Path) -> None:
    store = a_store(tmp_path / "donor")
    manifest = manifest_of(store)
    first = Partial(tmp_path / "partial", manifest)
    first.write(0, chunk_of(store, manifest, 0))
    first.close()
    Partial(tmp_path / "partial", dataclasses.replace(manifest, k=6)).close()
    assert Partial(tmp_path / "partial", manifest).held() == set()


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DiskFull, match=r"needs \d+ MB there and \d+ MB are free; make room"):
        Partial(tmp_path, Manifest(1, 2**60, (bytes(32),)))


# -- which chunk of whom


KINDS = ["honest", "slow", "busy", "silent", "dead", "dies", "liar", "elsewhere"]


class Tiny(Manifest):
    """Chunks of 1000 bytes, so that there are many."""

    def start(self, index: int) -> int:
        return 1000 * index

    def length(self, index: int) -> int:
        return min(1000, self.size - self.start(index))


class Donors:
    """Donors by kind, each with its time for an answer, driven on a virtual clock against one download."""

    def __init__(self, kinds: Sequence[str], seed: int, n_chunks: int = 20) -> None:
        self.random = random.Random(seed)
        self.chunks = [self.random.randbytes(1000) for _ in range(n_chunks - 1)] + [b"the end"]
        size = sum(map(len, self.chunks))
        self.manifest = Tiny(1, size, tuple(hashlib.sha256(chunk).digest() for chunk in self.chunks))
        self.kinds = {bytes([i]): kind for i, kind in enumerate(kinds)}
        self.download = Download(b"me", self.manifest, self.kinds)
        self.asked: list[tuple[bytes, int]] = []
        self.lied: set[bytes] = set()
        self.got: dict[int, bytes] = {}

    def run(self, limit_s: float = 1000.0) -> float:
        now, order, events = 0.0, itertools.count(), list[tuple[float, int, bytes, int]]()
        while not self.download.done and not self.download.trouble and now < limit_s:
            for donor, index in self.download.asks(now):
                assert donor not in self.lied, "whoever lied is asked again"
                self.asked.append((donor, index))
                heapq.heappush(events, (now + self._takes_s(donor), next(order), donor, index))
            in_flight = Counter(donor for _, _, donor, _ in events)
            assert max(in_flight.values(), default=0) <= 2
            now = min(now + 0.25, events[0][0]) if events else now + 0.25
            while events and events[0][0] <= now:
                _, _, donor, index = heapq.heappop(events)
                self._answer(donor, index, now)
        return now

    def _takes_s(self, donor: bytes) -> float:
        return {"slow": 15.0, "silent": 80.0}.get(self.kinds[donor], self.random.uniform(0.05, 0.3))

    def _answer(self, donor: bytes, index: int, now: float) -> None:
        match self.kinds[donor]:
            case "dead" | "silent":
                return self.download.failed(donor, index, "the connection broke", now)
            case "dies":
                self.kinds[donor] = "dead"
            case "busy" if self.random.random() < 0.7:
                assert not self.download.answered(donor, index, BUSY, now)
                return
            case "liar":
                self.lied.add(donor)
                assert not self.download.answered(donor, index, b"x" * len(self.chunks[index]), now)
                return
            case "elsewhere":
                assert not self.download.answered(donor, index, b"", now)
                return
        if self.download.answered(donor, index, self.chunks[index], now):
            assert index not in self.got
            self.got[index] = self.chunks[index]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(KINDS), max_size=6), st.sampled_from(["honest", "slow", "busy"]), st.integers(0, 2**30))
def test_one_good_donor_is_enough_whatever_the_others_do(others: list[str], good: str, seed: int) -> None:
    donors = Donors([*others, good], seed)
    donors.run()
    assert donors.download.done and donors.got == dict(enumerate(donors.chunks))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["dead", "liar", "elsewhere", "silent"]), max_size=6), st.integers(0, 2**30))
def test_without_a_good_donor_it_ends_with_the_reasons(kinds: list[str], seed: int) -> None:
    donors = Donors(kinds, seed)
    donors.run()
    assert not donors.download.done
    assert donors.download.trouble.startswith(f"none of {len(kinds)} donors has the rest of the state")


def test_a_donor_that_falls_silent_costs_seconds() -> None:
    usual = Donors(["honest"] * 3, 1).run()
    assert Donors(["honest"] * 3 + ["silent"], 1).run() < usual + 2.0
    assert Donors(["honest"] * 3 + ["slow"] * 2, 1).run() < usual + 2.0


def test_all_donors_share_and_little_is_sent_twice() -> None:
    donors = Donors(["honest"] * 5, 1, n_chunks=200)
    donors.run()
    load = Counter(donor for donor, _ in donors.asked)
    assert len(load) == 5 and max(load.values()) < 1.5 * min(load.values())
    assert len(donors.asked) <= 202


# -- the donor's side


def test_a_donor_serves_four_chunks_at_once_and_fewer_on_a_thin_line() -> None:
    for rate, streams in ((math.inf, 4), (1e6, 4), (130_000.0, 2), (1000.0, 1)):
        uploads = Uploads(rate)
        assert [uploads.begin() for _ in range(6)] == [True] * streams + [False] * (6 - streams)
        uploads.end()
        assert uploads.begin() and not uploads.begin()


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 2**20)), max_size=50))
def test_the_upload_never_passes_its_rate(sends: list[tuple[float, int]]) -> None:
    uploads, now, total = Uploads(1e6), 0.0, 0
    for pause_s, size in sends:
        now += pause_s
        total += size
        done_at = now + uploads.wait_s(size, now)
        assert total <= 1e6 * (done_at + 0.1) + 1


# -- on a network, in virtual time


def joiner(network: LocalNetwork, i: int, law: Law = LAW) -> LocalExchange:
    return LocalExchange(network, Member(law, kit.identity(i), law.genesis))


def donor(network: LocalNetwork, i: int, folder: Path, rate: float, law: Law = LAW) -> LocalExchange:
    return LocalExchange(network, Member(law, kit.identity(i), law.genesis), a_store(folder / str(i), law=law), rate)


def take(exchange: LocalExchange, donors: Sequence[LocalExchange], folder: Path, law: Law = LAW,
         progress: Callable[[Progress], None] = lambda progress: None) -> State:
    return fetch_state(law, exchange, a_state(law).tip, [d.peer_id for d in donors], folder, progress)


def test_donors_are_added_up_and_progress_is_told(tmp_path: Path) -> None:
    network, seen = LocalNetwork(), list[Progress]()
    donors = [donor(network, i, tmp_path, 50_000.0) for i in range(4)]
    state = take(joiner(network, 9), donors, tmp_path / "partial", progress=seen.append)
    assert state.digest == a_state().digest
    size = manifest_of(network.stores[donors[0].peer_id]).size
    assert 0.95 * size / 200_000 < network.now < 1.2 * size / 200_000 + 2.0
    assert seen[-1].bytes == seen[-1].of == size and max(p.donors for p in seen) == 4
    later = next(p for p in seen if p.bytes > size / 2)
    assert later.seconds_left == pytest.approx((size - later.bytes) / 200_000, rel=0.3)


def test_a_killed_donor_costs_at_most_two_seconds(tmp_path: Path) -> None:
    times = []
    for kills in (False, True):
        network = LocalNetwork(upload_bytes_per_s=100_000.0)
        donors = [donor(network, i, tmp_path / str(kills), 100_000.0) for i in range(4)]
        if kills:
            network.call_at(2.0, lambda network=network, donors=donors: network.kill(donors[1].peer_id))  # type: ignore[misc]
        state = take(joiner(network, 9), donors, tmp_path / str(kills) / "partial")
        assert state.digest == a_state().digest
        times.append(network.now)
    assert times[1] < times[0] * 4 / 3 + 2.0


def test_a_download_that_lost_all_donors_goes_on_where_it_was(tmp_path: Path) -> None:
    network = LocalNetwork()
    first = donor(network, 0, tmp_path, 100_000.0)
    network.call_at(10.0, lambda: network.kill(first.peer_id))
    me = joiner(network, 9)
    with pytest.raises(StateUnavailable, match="none of"):
        take(me, [first], tmp_path / "partial")
    began, second = network.now, donor(network, 1, tmp_path, 100_000.0)
    seen: list[Progress] = []
    take(me, [second], tmp_path / "partial", progress=seen.append)
    assert seen[0].bytes > 800_000 and network.now - began < 14.0


def test_twenty_joiners_load_four_donors_alike(tmp_path: Path) -> None:
    network, served = LocalNetwork(), Counter[bytes]()
    donors = [donor(network, i, tmp_path, 1e6) for i in range(4)]
    manifest = manifest_of(network.stores[donors[0].peer_id])
    joiners = [joiner(network, 10 + i) for i in range(20)]
    downloads = [Download(one.peer_id, manifest, [d.peer_id for d in donors]) for one in joiners]
    tickets: list[dict[int, tuple[bytes, int]]] = [{} for _ in joiners]
    while not all(download.done for download in downloads):
        assert network.now < 60.0
        for one, download, asked in zip(joiners, downloads, tickets, strict=True):
            for peer, index in download.asks(network.now):
                asked[one.ask(peer, WantChunk(5, index, manifest.digests[index]), 2**20)] = peer, index
            for ticket, answer in one.answers(0.0):
                peer, index = asked.pop(ticket)
                assert isinstance(answer, bytes)
                download.answered(peer, index, answer, network.now)
                served[peer] += len(answer) if answer != BUSY else 0
        network.advance_to(network.now + 0.05)
    assert max(served.values()) < 2 * min(served.values())
    assert network.now < 1.6 * 20 * manifest.size / 4e6, "donors had pauses"


def test_a_link_that_can_never_keep_up_is_told_the_number_it_needs(tmp_path: Path) -> None:
    network = LocalNetwork(upload_bytes_per_s=5_000.0)
    one = donor(network, 0, tmp_path, math.inf)
    entry = bytes(LAW.layout.down_bytes)
    (network.stores[one.peer_id].log / "entry-000000005.bin").write_bytes(entry)
    with pytest.raises(StateUnavailable) as told:
        take(joiner(network, 9), [one], tmp_path / "partial")
    need = len(entry) * 8e-6 / 3
    assert str(told.value) == (f"entries reach this peer at 0.04 Mbit/s; this run needs at least {need:.2g} Mbit/s down "
                               f"(an entry of {len(entry) / 1e6:.2g} MB every 3 s)")


def test_busy_donors_are_no_slow_link(tmp_path: Path) -> None:
    """Chunks come slower than the run needs, as a donor spares its upload; entries would come in time."""
    network = LocalNetwork(upload_bytes_per_s=1e6)
    one = donor(network, 0, tmp_path, 20_000.0)
    (network.stores[one.peer_id].log / "entry-000000005.bin").write_bytes(bytes(LAW.layout.down_bytes))
    assert take(joiner(network, 9), [one], tmp_path / "partial").digest == a_state().digest


# -- entries


@pytest.fixture(scope="module")
def chain() -> tuple[Law, Tip, dict[int, bytes]]:
    """Ten entries of three members."""
    law = kit.law()
    driver = kit.Driver(kit.Swarm(law, 3))
    assert driver.run(10, 300.0)
    return law, law.genesis, {k: checked.entry.pack() for k, checked in driver.peers[0].entries.items()}


def other_chain(law: Law) -> dict[int, bytes]:
    driver = kit.Driver(kit.Swarm(law, 2))
    assert driver.run(10, 300.0)
    return {k: checked.entry.pack() for k, checked in driver.peers[0].entries.items()}


@pytest.mark.parametrize("bad", ["none", "dead", "behind", "another chain", "garbage", "first dead"])
def test_entries_of_the_first_donors_chain_whatever_the_others_serve(chain: tuple[Law, Tip, dict[int, bytes]], bad: str) -> None:
    law, tip, entries = chain
    others, asked = other_chain(law), Counter[bytes]()

    def answer(donor: bytes, request: Record, most: int) -> bytes:
        assert isinstance(request, WantEntry)
        asked[donor] += 1
        if donor == b"bad" or (bad == "first dead" and donor == b"first" and request.k > 4):
            match bad:
                case "dead" | "first dead":
                    raise StateUnavailable("the connection broke")
                case "behind":
                    return entries.get(request.k, b"") if request.k < 4 else b""
                case "another chain":
                    return others.get(request.k, b"")
                case "garbage":
                    return b"garbage"
        return entries.get(request.k, b"")

    found = fetch_entries(law, kit.Answering(answer), [b"first", b"second", b"bad"], tip)
    assert [checked.entry.pack() for checked in found] == list(entries.values())
    assert sum(asked.values()) < 2 * len(entries) + 8 and asked[b"second"] > 1


def test_entries_of_dead_donors_are_an_error_and_of_none_an_end(chain: tuple[Law, Tip, dict[int, bytes]]) -> None:
    law, tip, _ = chain

    def dead(donor: bytes, request: Record, most: int) -> bytes:
        raise StateUnavailable("the connection broke")

    with pytest.raises(StateUnavailable, match="the connection broke"):
        fetch_entries(law, kit.Answering(dead), [b"first", b"second"], tip)
    assert fetch_entries(law, kit.Answering(lambda donor, request, most: b""), [b"first", b"second"], tip) == []


# -- a swarm that goes on while somebody joins


CORPUS: list[Corpus] = []


def a_run() -> Law:
    """0.2 M parameters: a state of 1.5 MB."""
    model = ModelConfig(d_model=64, n_layers=2, n_heads=2, d_mlp=128, seq_len=16)
    run = RunSection(inner_steps=6, min_peers=2, token_budget=10**9, clock="time", snapshot_every=5, window_s=5.0)
    return Law.of(RunConfig(run=run, model=model, inner=InnerConfig(batch_size=1)))


class LiveSwarm:
    """Trainers whose turns are calls of the network: one that waits for its state holds up nobody else."""

    def __init__(self, folder: Path, serve_s: float, n: int = 4, step_s: float = 0.5) -> None:
        """`serve_s`: how long all donors together need to serve one state."""
        CORPUS or CORPUS.append(load_corpus(RunConfig().data))
        self.law, self.folder, self.step_s = a_run(), folder, step_s
        self.rate = 8 * self.law.layout.n_elements / serve_s / n
        self.network = LocalNetwork(upload_bytes_per_s=10 * self.rate)
        self.trainers: list[Trainer] = []
        self.records: list[list[tuple[float, dict[str, object]]]] = []
        for i in range(n):
            self.add(i)

    def add(self, i: int) -> Trainer:
        records: list[tuple[float, dict[str, object]]] = []
        trainer = local_trainer(self.law, kit.identity(i), self.network, CORPUS[0], self.folder / str(i),
                                record=lambda record: records.append((self.network.now, record)))
        self.network.uploads[trainer.exchange.peer_id] = Uploads(self.rate)
        self.trainers.append(trainer)
        self.records.append(records)
        self.network.call_at(self.network.now, lambda: self._turn(trainer))
        return trainer

    def _turn(self, trainer: Trainer) -> None:
        if self.network.is_dead(trainer.exchange.peer_id):
            return
        before = trainer.total_steps
        trainer.advance()
        stepped = trainer.total_steps > before
        if stepped:
            trainer.pace_s = self.step_s
        self.network.call_at(self.network.now + (self.step_s if stepped else 0.05), lambda: self._turn(trainer))

    def until(self, condition: Callable[[], bool], limit_s: float) -> float:
        began = self.network.now
        assert self.network.run(condition, limit_s), f"not within {limit_s} s"
        return self.network.now - began

    def level(self, trainer: Trainer) -> bool:
        return trainer.state.tip.k > 0 and trainer.state.tip.k >= max(t.state.tip.k for t in self.trainers)


@pytest.mark.parametrize("kills", [False, True])
def test_a_newcomer_is_level_in_20_s_where_rounds_take_3_s_and_the_state_10(tmp_path: Path, kills: bool) -> None:
    torch.manual_seed(0)
    swarm = LiveSwarm(tmp_path, serve_s=10.0)
    first = swarm.trainers[0]
    swarm.until(lambda: first.state.tip.k >= 11, 200.0)
    members = swarm.trainers[:]
    steps, k, began = [t.total_steps for t in members], first.state.tip.k, swarm.network.now
    newcomer = swarm.add(9)
    if kills:
        victim = members[2].exchange.peer_id
        swarm.network.call_at(began + 5.0, lambda: swarm.network.kill(victim))
    took_s = swarm.until(lambda: swarm.level(newcomer), 60.0)
    assert took_s < 20.0 + 2.0 * kills
    downloaded = [at for at, record in swarm.records[-1] if record["event"] == "downloading"]
    assert downloaded[-1] - downloaded[0] > 5.0, "the state was throttled"
    assert first.state.tip.k - k >= took_s / 3.0 - 2, "rounds went on"
    for trainer, before in zip(members, steps, strict=True):
        if not swarm.network.is_dead(trainer.exchange.peer_id):
            assert trainer.total_steps - before >= 0.95 * took_s / swarm.step_s - 1
    swarm.until(lambda: any(record.get("counted") for _, record in swarm.records[-1]), 20.0)
    swarm.until(lambda: newcomer.state.tip.head == first.state.tip.head, 5.0)
    assert newcomer.digest == first.digest
