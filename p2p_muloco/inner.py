"""Model, inner optimizer and place in the text: single inner steps. Knows nothing of peers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from p2p_muloco.chain import Law
from p2p_muloco.data import Stream
from p2p_muloco.model import GPT, initial_weights
from p2p_muloco.muon import MuonAdamW, clip_gradients, fresh_factor
from p2p_muloco.packet import Layout
from p2p_muloco.snapshot import State

__all__ = ["InnerLoop", "flat_weights", "genesis_state", "heldout_loss", "load_flat"]

log = logging.getLogger(__name__)


def genesis_state(law: Law) -> State:
    """Entry 0: a pure function of the law."""
    weights = initial_weights(law.config.model, law.config.run.seed)
    anchor = torch.cat([weights[name].reshape(-1) for name in law.layout.names])
    return State(law.genesis, anchor, torch.zeros_like(anchor))


def flat_weights(model: GPT) -> Tensor:
    """All weights as one fp32 CPU vector, in the model's order."""
    return torch.cat([p.detach().reshape(-1).float().cpu() for p in model.parameters()])


@torch.no_grad()
def load_flat(model: GPT, layout: Layout, flat: Tensor) -> None:
    for parameter, (_, shape, place) in zip(model.parameters(), layout.tensor_slices(), strict=True):
        parameter.copy_(flat[place].view(shape))


@torch.no_grad()
def heldout_loss(model: GPT, windows: Tensor, batch_size: int) -> float:
    """Mean cross entropy in nats of windows (n, T + 1), `batch_size` at once."""
    device = next(model.parameters()).device
    losses = [float(model.loss(part.to(device))) * len(part) for part in windows.split(batch_size)]
    return sum(losses) / len(windows)


class InnerLoop:
    """Model, inner optimizer and place in the text: takes single inner steps, knows nothing of peers."""

    def __init__(self, law: Law, model: GPT, stream: Stream, *, micro_batch: int | None = None,
                 compiled: bool = False) -> None:
        self.law, self.model, self.stream = law, model, stream
        self.optimizer = MuonAdamW(model.named_parameters(), law.config.inner)
        self.device = next(model.parameters()).device
        self.micro_batch = micro_batch or law.config.inner.batch_size
        self.cursor = 0
        self.fresh_steps = 0  # since the optimizer's state was zero
        self.skipped_in_row = 0
        self._loss: Callable[[Tensor], Tensor] = torch.compile(model.loss) if compiled else model.loss

    def step(self, lr: float) -> float:
        """One optimizer step on the run's tokens a step; return the loss, NaN if the step was skipped."""
        tokens = self.stream.batch(self.cursor).to(self.device)
        self.cursor += 1
        loss = self._gradients(tokens)
        norm = clip_gradients(self.model.parameters(), self.law.config.inner.clip_norm)
        if not (math.isfinite(norm) and math.isfinite(loss)):
            self.skipped_in_row += 1
            return math.nan
        self.optimizer.set_lr(lr * fresh_factor(self.fresh_steps))
        self.optimizer.step()
        self.fresh_steps += 1
        self.skipped_in_row = 0
        return loss

    def _gradients(self, tokens: Tensor) -> float:
        """Accumulate over micro-batches; a smaller one is taken for good where the accelerator's memory ends."""
        while True:
            try:
                self.optimizer.zero_grad(set_to_none=True)
                total = 0.0
                for part in tokens.split(self.micro_batch):
                    with self._precision():
                        loss = self._loss(part) * (len(part) / len(tokens))
                    loss.backward()
                    total += float(loss.detach())
                return total
            except torch.OutOfMemoryError:
                if self.micro_batch == 1:
                    raise
                self.micro_batch //= 2
                log.warning("the device's memory is full: %d sequences at once from now on", self.micro_batch)

    def _precision(self) -> Any:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def restart(self) -> None:
        """Forget the optimizer's state, after its weights went wrong."""
        self.optimizer = MuonAdamW(self.model.named_parameters(), self.law.config.inner)
        self.fresh_steps = self.skipped_in_row = 0
