"""Nesterov, Iso-C and IsoLoCo on one machine: the same trainer, the same text, K simulated workers.

    python examples/compare_outer.py --workers 4 --rounds 12

Toy sizes give a direction, not an effect size: published pairs of eta and mu are tuned for longer runs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from p2p_muloco.chain import Law
from p2p_muloco.config import InnerConfig, ModelConfig, OuterConfig, RunConfig, RunSection
from p2p_muloco.data import heldout_windows, load_corpus
from p2p_muloco.identity import Identity
from p2p_muloco.inner import heldout_loss, load_flat
from p2p_muloco.local import LocalNetwork
from p2p_muloco.simulate import local_trainer, run_swarm

ARMS = {
    "mean": OuterConfig(method="nesterov", eta=1.0, mu=0.0),
    "nesterov": OuterConfig(method="nesterov", eta="auto", mu="auto"),
    "iso_c": OuterConfig(method="iso_c", eta=1.5, mu=0.0),
    "isoloco": OuterConfig(method="isoloco", eta=1.0, mu=0.5),
}


def final_loss(outer: OuterConfig, optimizer: str, workers: int, rounds: int, inner_steps: int, seed: int) -> float:
    """Held-out nats a byte after `rounds` entries of `workers` equal workers."""
    model = ModelConfig(d_model=64, n_layers=4, n_heads=4, d_mlp=176, seq_len=128)
    inner = InnerConfig(batch_size=4, optimizer=optimizer, lr=0.02 if optimizer == "muon" else 0.004)
    budget = workers * rounds * inner_steps * inner.batch_size * model.seq_len
    run = RunSection(inner_steps=inner_steps, min_peers=workers, token_budget=budget, clock="steps", seed=seed)
    law = Law.of(RunConfig(run=run, model=model, inner=inner, outer=outer))
    corpus, network = load_corpus(law.config.data), LocalNetwork()
    with tempfile.TemporaryDirectory() as folder:
        trainers = [
            local_trainer(law, Identity(bytes([i + 1]) * 32), network, corpus, Path(folder) / str(i)) for i in range(workers)
        ]
        run_swarm(network, trainers, [0.1] * workers)
    load_flat(trainers[0].inner.model, law.layout, trainers[0].state.anchor)
    return heldout_loss(trainers[0].inner.model, heldout_windows(corpus, model.seq_len, 64), 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--inner-steps", type=int, default=15)
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{args.workers} workers, {args.rounds} rounds of {args.inner_steps} {args.optimizer} steps, seed {args.seed}")
    for name, outer in ARMS.items():
        began = time.monotonic()
        loss = final_loss(outer, args.optimizer, args.workers, args.rounds, args.inner_steps, args.seed)
        print(f"  {name:<10} held-out {loss:.3f}   ({time.monotonic() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
