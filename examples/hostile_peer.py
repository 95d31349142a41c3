"""One peer of four does wrong, in every way that p2p_muloco.misbehave knows: what does it do to the others' model?

    python examples/hostile_peer.py --rounds 12

For each way: the held-out loss of the honest three, against a run of these three alone, in how many entries the bad peer was
counted, and what the others say of it. Toy size and one seed: a direction, not an effect size.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from p2p_muloco.chain import Law
from p2p_muloco.chaos import MISBEHAVIOURS
from p2p_muloco.config import InnerConfig, ModelConfig, OuterConfig, RunConfig, RunSection
from p2p_muloco.data import heldout_windows, load_corpus
from p2p_muloco.identity import Identity
from p2p_muloco.inner import heldout_loss, load_flat
from p2p_muloco.local import LocalNetwork
from p2p_muloco.misbehave import Misbehaving
from p2p_muloco.opinion import WHY
from p2p_muloco.simulate import local_trainer, run_swarm

HONEST = 3
SMALL = ModelConfig(d_model=64, n_layers=4, n_heads=4, d_mlp=176, seq_len=128)


@dataclass
class Result:
    loss: float  # of the honest peers' anchor, nats a byte
    counted: int  # entries that hold a part of the bad peer's packet
    entries: int
    said: list[str]  # why the honest name it
    states: int  # different states under the last head among the honest


def run(kind: str | None, rounds: int, inner_steps: int, *, model: ModelConfig = SMALL, aggregate: str = "mean") -> Result:
    """`rounds` entries of three honest peers, and of a fourth that does `kind` wrong (None: that isn't there)."""
    inner = InnerConfig(batch_size=4, lr=0.02, final_lr=1.0)  # a constant rate: who is counted must not move the schedule
    section = RunSection(inner_steps=inner_steps, min_peers=HONEST, token_budget=10**12, window_s=5.0, overlap="off")
    warm = 2 * inner_steps * HONEST * inner.batch_size * model.seq_len / section.token_budget
    inner = InnerConfig(batch_size=4, lr=0.02, final_lr=1.0, warmup=warm)
    outer = OuterConfig(aggregate=aggregate)
    law = Law.of(RunConfig(run=section, model=model, inner=inner, outer=outer))
    corpus, network, entries = load_corpus(law.config.data), LocalNetwork(), []

    def record(event: dict[str, Any]) -> None:
        if event["event"] == "round" and event["counted"]:
            entries.append(event["round"])

    with tempfile.TemporaryDirectory() as folder:
        def worker(i: int, **more: Any) -> Any:
            return local_trainer(law, Identity(bytes([i + 1]) * 32), network, corpus, Path(folder) / str(i), **more)

        honest = [worker(i, max_rounds=rounds) for i in range(HONEST)]
        bad = [worker(9, record=record, member=partial(Misbehaving, kind))] if kind else []
        run_swarm(network, honest + bad, [0.1] * (HONEST + len(bad)), until=lambda: all(t.finished for t in honest))
    load_flat(honest[0].inner.model, law.layout, honest[0].state.anchor)
    windows = heldout_windows(corpus, model.seq_len, 64)
    named = [t.exchange.member.opinion.named for t in honest]
    said = sorted({WHY[n[b.exchange.peer_id][0]] for b in bad for n in named if b.exchange.peer_id in n})
    last = max(t.state.tip.k for t in honest)
    states = {t.state.digest for t in honest if t.state.tip.k == last}
    return Result(heldout_loss(honest[0].inner.model, windows, 32), len(set(entries)), last, said, len(states))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--inner-steps", type=int, default=15)
    parser.add_argument("--aggregate", choices=("mean", "trimmed"), default="mean")
    parser.add_argument("--only", choices=MISBEHAVIOURS, help="try this one alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    absent = run(None, args.rounds, args.inner_steps, aggregate=args.aggregate)
    print(f"{'absent':14} {absent.loss:.4f}")
    for kind in [args.only] if args.only else MISBEHAVIOURS:
        result = run(kind, args.rounds, args.inner_steps, aggregate=args.aggregate)
        print(f"{kind:14} {result.loss:.4f}  {100 * (result.loss / absent.loss - 1):+5.1f} %  counted in {result.counted} of "
              f"{result.entries}  {'; '.join(result.said) or '-'}", flush=True)


if __name__ == "__main__":
    main()
