"""Many peers in one process: the same trainer and state machine over `LocalNetwork`, on a virtual clock.

An inner step of a worker takes `step_s` of virtual time, messages take the network's latency; nothing depends on how fast
this machine is, so a run is a pure function of its arguments.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from pathlib import Path

from p2p_muloco.chain import Law
from p2p_muloco.data import Corpus, Stream
from p2p_muloco.identity import Identity
from p2p_muloco.inner import InnerLoop, genesis_state
from p2p_muloco.local import LocalExchange, LocalNetwork
from p2p_muloco.member import Member
from p2p_muloco.metrics import RecordSink
from p2p_muloco.model import GPT
from p2p_muloco.snapshot import Store
from p2p_muloco.trainer import Trainer

__all__ = ["local_trainer", "run_swarm"]

IDLE_S = 0.05


def local_trainer(law: Law, identity: Identity, network: LocalNetwork, corpus: Corpus, home: Path, *,
                  record: RecordSink = lambda record: None, max_rounds: int | None = None,
                  member: Callable[..., Member] = Member) -> Trainer:
    """One worker on a local network, from the run's first weights. `member` builds its side of the protocol."""
    config, state = law.config, genesis_state(law)
    store = Store(home, law.layout, config.to_bytes(), clock=lambda: network.now)
    if not store.pinned():
        store.pin(state)
    exchange = LocalExchange(network, member(law, identity, state.tip), store)
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
