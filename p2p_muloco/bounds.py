"""What bounds an honest packet, and what a reducer makes of senders that differ. Pure functions of tensors.

A part of r full rows of an m x n matrix that Muon trains moves in one step by at most

    1.2 s lr sqrt(min(r, n)) + wd lr ||anchor part||      Frobenius; s = muon.update_scale, 1.2 > any singular value

for an update's singular values are near 1 and r rows have rank min(r, n) at most. What AdamW trains moves in each
element by at most K lr + wd lr |anchor|. An error-feedback packet says h such steps and what earlier ones could not:
x = delta + beta e with ||e|| <= rho ||x||, so ||x|| <= h steps / (1 - rho beta), and a decoded part is at most `_gain`
times as long as x. Nobody is rejected for speaking again of more than that, since who sends clips x itself
(`clip_to_limits`) and the rest stays in its e. It is a bound for sanity: a turned sign passes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from p2p_muloco.chain import RECENT_TOKENS, Law
from p2p_muloco.codec import Codec
from p2p_muloco.config import InnerConfig
from p2p_muloco.muon import is_block_matrix, learning_rate, update_scale
from p2p_muloco.packet import Layout, Part

__all__ = ["LR_HISTORY", "Cosines", "clip_factors", "clip_to_limits", "far_longer", "largest_lr", "over_limit", "part_norms",
           "step_limits", "trimmed_mean"]

LR_HISTORY: Final = RECENT_TOKENS - 1  # entries: a peer that missed more has clipped what it brings
LARGEST_SINGULAR: Final = 1.2  # of an orthogonalised update; 1.145 in fp32 (muon.COEFFICIENTS), bf16 adds to it
PROJECTIONS: Final = ("fp32", "fp16", "statistical4", "statistical2", "topk")  # codecs that lengthen no part
SAYING_LITTLE: Final = ("absmax2", "topk")  # typical errors .84 and .7 to .96 of what they are given; all others under .5
SLACK: Final = 1.001  # fp32 and fp16 rounding, and sums that differ in the last bits between machines
MEDIAN_FACTOR: Final = 1.5
FAR, FAR_OF_ADAMW = 3.0, 6.0  # times that limit: no honest sender is so much longer a step, whatever it still had to say


def largest_lr(law: Law, tokens_history: Sequence[int]) -> float:
    """Return the largest inner lr that a peer can have used since the oldest of these entries.

    `tokens_history` holds the chain's counted tokens after each of the last entries, oldest first, the tip's last: up
    to LR_HISTORY + 1 numbers, with genesis' 0 where the chain is shorter. Warmup and cosine have one peak, so this is
    exact from the oldest number to two entries after the tip.
    """
    run, inner = law.config.run, law.config.inner
    assumed = run.inner_steps * law.config.tokens_per_step * run.min_peers  # as the trainer, before the first entry
    counted = [after - before or assumed for before, after in itertools.pairwise(tokens_history)]
    longest = max(counted + [assumed] * (tokens_history[0] == 0), default=assumed)
    first, last = (tokens / run.token_budget for tokens in (tokens_history[0], tokens_history[-1] + 2 * longest))
    return learning_rate(inner, min(1.0, max(first, min(inner.warmup, last))))


def step_limits(law: Law, anchor: Tensor, lr_max: float) -> Tensor:
    """Return the largest norm of each decoded part, for each inner step of its packet: (parts,) fp64.

    A packet of h steps may be h times as long, `over_limit` a little longer. `anchor` is flat, (elements,) fp32.
    inf where AdamW's betas bound nothing (beta1^2 >= beta2).
    """
    parts, inner = law.layout.parts, law.config.inner
    steps = torch.tensor([_largest_step(law.layout, part, inner) for part in parts], dtype=torch.float64)
    rates = torch.tensor([_lr_scale(law.layout, part, inner) for part in parts], dtype=torch.float64) * lr_max
    said_again = [_gain(part.up) / (1 - part.up.contraction * law.config.codec.beta) for part in parts]
    return torch.tensor(said_again, dtype=torch.float64) * rates * (steps + inner.weight_decay * part_norms(law.layout, anchor))


def part_norms(layout: Layout, x: Tensor) -> Tensor:
    """Return the Frobenius norm of each part of x, (elements,) fp32: (parts,) fp64."""
    return torch.stack([_norm(x[part.start : part.stop]) for part in layout.parts])


def over_limit(values: Tensor, limit: float) -> bool:
    """Whether a decoded part is longer than an honest sender's can be; `limit` = h x its `step_limits`."""
    return float(_norm(values)) > limit * SLACK


def clip_to_limits(layout: Layout, x: Tensor, limits: Tensor, h: int) -> Tensor:
    """Return x with each part shortened so that it is within h x `limits` once decoded; x itself if all of them are.

    A sender encodes this; what was cut off stays in its residual, which is the whole x less what was decoded.
    """
    wanted = limits * h / torch.tensor([_gain(part.up) for part in layout.parts], dtype=torch.float64)
    norms, clipped = part_norms(layout, x), x
    for index in (norms > wanted).nonzero().flatten().tolist():
        part = layout.parts[index]
        clipped = clipped.clone() if clipped is x else clipped
        clipped[part.start : part.stop] *= float(wanted[index] / norms[index])
    return clipped


def clip_factors(norms: Sequence[float], h: Sequence[int]) -> list[float]:
    """Return what each sender's part is multiplied by: 1, or less for who is far longer a step than most.

    At most 1.5 x the lower median of norm / h, times max(h, median h), for who makes few steps is longer a step. Senders
    of zeros have no say: rows of an embedding that most had no use for would be nobody's. All 1 with fewer than three
    others. `norms` and `h` are of those counted in the part. Honest senders are touched in none of 29,568 parts
    that Muon trains, one sender at 1/8 speed included; in 1.1 % of those AdamW trains, and in 8 % of parts of 64 rows of an
    embedding, where rare rows move with one sender's text [measured].
    """
    speaking = [(norm / steps, steps) for norm, steps in zip(norms, h, strict=True) if norm > 0]
    if len(speaking) < 3:
        return [1.0] * len(norms)
    a_step = MEDIAN_FACTOR * _lower_median([length for length, _ in speaking])
    typical_h = _lower_median([steps for _, steps in speaking])
    limits = [a_step * max(steps, typical_h) for steps in h]
    return [limit / norm if norm > limit else 1.0 for norm, limit in zip(norms, limits, strict=True)]


def far_longer(layout: Layout, index: int, inner: InnerConfig, factors: Sequence[float]) -> list[bool]:
    """Whose part is so long that it is not shortened but not counted: `factors` are those of `clip_factors`.

    In runs of Muon, whose honest senders are at most 1.6 times over that limit in its matrices, one at 1/8 speed included, and
    3.5 times in what AdamW trains (4.8 times in runs of AdamW) [measured over 200 entries]. Not of codecs that say little of what
    they are given: there, who has long been a member may say several times as much as newcomers.
    """
    part = layout.parts[index]
    judged = inner.optimizer == "muon" and part.up.name not in SAYING_LITTLE
    far = FAR if is_block_matrix(layout.names[part.tensor], layout.shapes[part.tensor]) else FAR_OF_ADAMW
    return [judged and factor < 1 / far for factor in factors]


def trimmed_mean(values: Tensor) -> Tensor:
    """Return the mean of each column of values, (n, size), without its largest and smallest n // 4, one at least.

    n >= 3. The same bits for every order of rows: they are summed in the order of their values.
    """
    n = len(values)
    assert n >= 3, "nothing would be left"
    cut = max(1, n // 4)
    kept = values.sort(dim=0).values[cut : n - cut]
    total = kept[0].clone()
    for row in kept[1:]:
        total.add_(row)
    return total.div_(len(kept))


class Cosines:
    """The cosine of each of n senders with the sum of the others, over the parts that were added. Keeps n x n numbers."""

    def __init__(self, n: int) -> None:
        self.elements = 0
        self._gram = torch.zeros(n, n, dtype=torch.float64)

    def add(self, values: Tensor) -> None:
        """Take the next decoded part of all senders, (n, size); zeros for who isn't counted in it."""
        rows = values.double()
        self._gram.add_(rows @ rows.mT)
        self.elements += values.shape[1]

    def with_others(self) -> list[float]:
        """0 for a sender, or others, that said nothing. For n >= 4 and spans of 1e5 elements.

        Honest senders, of four [measured]: equal ones are never negative from 5e4 elements on, under Muon and AdamW; one at
        1/8 speed never from 1e5 on under Muon (2 % at 5e4, 8 % at 1e4), but 4 % at 1e5 under AdamW (12 %, 14 %).
        """
        own, with_all = self._gram.diagonal(), self._gram.sum(1)
        dots = with_all - own
        others = (with_all.sum() - 2 * with_all + own).clamp_(min=0)  # ||sum - q||^2
        lengths = (own * others).sqrt_()
        cosines: list[float] = torch.where(lengths > 0, dots / lengths, 0.0).clamp_(-1, 1).tolist()
        return cosines


def _largest_step(layout: Layout, part: Part, inner: InnerConfig) -> float:
    """Frobenius norm of the longest step of a part at lr 1, without weight decay."""
    name, shape = layout.names[part.tensor], layout.shapes[part.tensor]
    if inner.optimizer == "muon" and is_block_matrix(name, shape):
        rows = part.size // shape[1]
        return LARGEST_SINGULAR * update_scale(shape, inner.scale) * math.sqrt(min(rows, shape[1]))
    return _largest_adamw(inner) * math.sqrt(part.size)


def _largest_adamw(inner: InnerConfig) -> float:
    """K: the largest |m| / sqrt(v), bias corrected, of any gradients, by Cauchy-Schwarz; 2.35 at (.9, .99)."""
    beta1, beta2 = inner.beta1, inner.beta2
    if beta1 == 0:
        return 1 / math.sqrt(1 - beta2)
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2)) if beta1**2 < beta2 else math.inf


def _lr_scale(layout: Layout, part: Part, inner: InnerConfig) -> float:
    return 1.0 if is_block_matrix(layout.names[part.tensor], layout.shapes[part.tensor]) else inner.adamw_lr_scale


def _gain(codec: Codec) -> float:
    """The largest ||decode(encode(x))|| / ||x||, but for SLACK."""
    return 1.0 if codec.name in PROJECTIONS else 1 + codec.contraction


def _norm(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values, dtype=torch.float64)


def _lower_median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]
