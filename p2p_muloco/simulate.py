"""Many peers in one process: the same trainer and state machine over `LocalNetwork`, on a virtual clock.

An inner step of a worker takes `step_s` of virtual time, messages take the network's latency; nothing depends on how fast
this machine is, so a run is a pure function of its arguments. Costs, a worker: its model, optimizer, anchor, momentum and
residual (about 7 x 4 bytes a parameter) and the real time of its inner steps, one after the other.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from p2p_muloco.chain import CLIENT, NODE, Law
from p2p_muloco.data import Corpus, Stream
from p2p_muloco.exchange import Behind
from p2p_muloco.identity import Identity
from p2p_muloco.inner import InnerLoop, genesis_state
from p2p_muloco.local import Link, LocalExchange, LocalNetwork, Partition
from p2p_muloco.member import Member
from p2p_muloco.metrics import RecordSink
from p2p_muloco.model import GPT
from p2p_muloco.snapshot import Store
from p2p_muloco.trainer import Trainer
from p2p_muloco.transfer import Uploads
from p2p_muloco.world import TimedFault, Worker, World

__all__ = ["Simulation", "local_trainer", "run_swarm", "worker_identity"]

IDLE_S = 0.05


def local_trainer(law: Law, identity: Identity, network: LocalNetwork, corpus: Corpus, home: Path, *,
                  record: RecordSink = lambda record: None, max_rounds: int | None = None,
                  member: Callable[..., Member] = Member, rate_kbps: int = 20_000, mode: int = NODE) -> Trainer:
    """One worker on a local network, from the run's first weights. `member` builds its side of the protocol."""
    config, state = law.config, genesis_state(law)
    store = Store(home, law.layout, config.to_bytes(), clock=lambda: network.now)
    if not store.pinned():
        store.pin(state)
    exchange = LocalExchange(network, member(law, identity, state.tip, rate_kbps=rate_kbps, mode=mode), store)
    model = GPT(config.model)
    stream = Stream(corpus.train, config.run.seed, identity.stream, config.model.seq_len, config.inner.batch_size)
    inner = InnerLoop(law, model, stream)
    return Trainer(law, state, inner, exchange, store, record=record, max_rounds=max_rounds)


def run_swarm(network: LocalNetwork, trainers: Sequence[Trainer], step_s: Sequence[float],
              on_step: Callable[[], None] = lambda: None, until: Callable[[], bool] = lambda: False) -> None:
    """Let all trainers run until each has finished or its peer was killed, or until `until()`."""
    due = [(0.0, i) for i in range(len(trainers))]
    heapq.heapify(due)
    while due and not until():
        at, i = heapq.heappop(due)
        network.advance_to(at)
        trainer = trainers[i]
        if trainer.finished or network.is_dead(trainer.exchange.peer_id):
            continue
        before = trainer.total_steps
        trainer.advance()
        stepped = trainer.total_steps > before
        if stepped:
            trainer.pace_s = step_s[i]
            on_step()
        heapq.heappush(due, (network.now + (step_s[i] if stepped else IDLE_S), i))


def worker_identity(seed: int, number: int) -> Identity:
    """The key of simulated worker `number`, from 1; a real peer with this key reads the same text."""
    return Identity(hashlib.sha256(f"p2p-muloco worker {number} of seed {seed}".encode()).digest())


@dataclass
class _Simulated:
    number: int
    worker: Worker
    identity: Identity
    trainer: Trainer | None = None  # None before it joins
    records: list[dict[str, Any]] = field(default_factory=list)


class Simulation:
    """Workers that join, train, fail and leave as a `World` says. Build it, then `run`; read `workers` at any time."""

    def __init__(self, law: Law, corpus: Corpus, world: World, folder: Path, seed: int = 0,
                 on_record: Callable[[int, dict[str, Any]], None] = lambda number, record: None) -> None:
        cuts = [Partition(cut.from_s, cut.to_s, frozenset(number - 1 for number in cut.workers)) for cut in world.partitions]
        self.law, self.corpus, self._folder, self._on_record = law, corpus, folder, on_record
        self.network = LocalNetwork(partitions=cuts)
        self.workers = [_Simulated(i, worker, worker_identity(seed, i)) for i, worker in enumerate(world.workers, start=1)]
        for one in self.workers:
            worker, peer = one.worker, one.identity.peer_id
            self.network.links[peer] = Link(125e3 * worker.upload_mbit, 125e3 * worker.download_mbit, worker.latency_ms / 2e3)
            if worker.nat:
                self.network.behind_nat.add(peer)
            self.network.number(peer)  # partitions name workers that may join later
            self._at(one.worker.joins_at_s, one, self._join)
        for fault in world.faults:
            self._at(fault.at_s, self.workers[fault.worker - 1], functools.partial(self._befall, fault))

    def _befall(self, fault: TimedFault, one: _Simulated) -> None:
        match fault.kind:
            case "kill":
                self.network.kill(one.identity.peer_id)
            case "freeze":
                self.network.freeze(one.identity.peer_id, fault.for_s)
            case "leave" if one.trainer is not None:
                one.trainer.stop()

    def _at(self, at_s: float, one: _Simulated, act: Callable[[_Simulated], None]) -> None:
        self.network.call_at(at_s, lambda: act(one))

    def living(self) -> list[Trainer]:
        return [one.trainer for one in self.workers if one.trainer and not self.network.is_dead(one.identity.peer_id)]

    def run(self, limit_s: float = math.inf) -> bool:
        """Until every worker that lives has finished; False if that takes longer than `limit_s` of virtual time."""
        return self.network.run(self._is_over, limit_s)

    def _is_over(self) -> bool:
        waiting = any(one.trainer is None and not self.network.is_dead(one.identity.peer_id) for one in self.workers)
        return not waiting and all(trainer.finished for trainer in self.living())

    def _join(self, one: _Simulated) -> None:
        def record(record: dict[str, Any]) -> None:
            record = {"at_s": round(self.network.now, 3), **record}
            one.records.append(record)
            self._on_record(one.number, record)

        ahead = max((trainer.state.tip for trainer in self.living()), key=lambda tip: tip.k, default=None)
        one.trainer = local_trainer(self.law, one.identity, self.network, self.corpus, self._folder / str(one.number),
                                    record=record, rate_kbps=max(1, round(one.worker.upload_mbit * 1000)),
                                    mode=CLIENT if one.worker.nat else NODE)
        self.network.uploads[one.identity.peer_id] = Uploads(62.5e3 * one.worker.upload_mbit)
        if ahead is not None and ahead.k:
            donors = tuple(t.exchange.peer_id for t in self.living() if t.state.tip.head == ahead.head)
            one.trainer.catch_up(Behind(ahead.k, ahead.head, donors))
        self._turn(one)

    def _turn(self, one: _Simulated) -> None:
        trainer, peer = one.trainer, one.identity.peer_id
        assert trainer is not None
        if self.network.is_dead(peer):
            return
        if (thaws_at := self.network.thaws_at(peer)) > self.network.now:
            return self._at(thaws_at, one, self._turn)
        before = trainer.total_steps
        if not trainer.finished:
            trainer.advance()
        stepped = trainer.total_steps > before
        if stepped:
            trainer.pace_s = one.worker.step_s
        if not trainer.finished or trainer.ended:
            self._at(self.network.now + (one.worker.step_s if stepped else IDLE_S), one, self._turn)
