"""The outer step, bit for bit the same on every machine, and its two rates.

Equal heads must mean bit-equal anchors, so here are only elementwise fp32 operations of one rounding each on the CPU.
An `alpha=`, lerp, addcmul, fused optimizer, compiler or GPU may contract two roundings into one (FMA).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from p2p_muloco.config import OuterConfig

__all__ = ["effective_peers", "eta_mu", "outer_step"]

CHUNK_ELEMENTS: Final = 1 << 16  # 256 KiB: the scratch stays in the cache

# (log2 of peers, eta, mu). MuLoCo (arXiv 2505.23725), tuned values of its two families for 1, 8 and 16 workers;
# DiLoCo's eta at one worker isn't published: MuLoCo's is assumed.
RATES: Final[Mapping[str, tuple[tuple[float, float, float], ...]]] = {
    "muon": ((0.0, 0.7, 0.6), (3.0, 0.9, 0.8), (4.0, 1.0, 0.9)),
    "adamw": ((0.0, 0.7, 0.8), (3.0, 0.9, 0.9), (4.0, 1.0, 0.9)),
}


@torch.no_grad()
def outer_step(anchor: Tensor, momentum: Tensor, d: Tensor, eta: float, mu: float) -> None:
    """Nesterov in place: b <- mu b + d, u = d + mu b, anchor <- anchor - eta u (torch.optim.SGD's; DiLoCo, 2311.08105).

    All three are contiguous fp32 CPU tensors of one size; d, the merged update, is left as it is. Needs denormals, as
    torch has them by default. mu = 0: anchor - eta d.
    """
    for tensor in (anchor, momentum, d):
        assert tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
        assert tensor.numel() == d.numel()
    chunks = (tensor.view(-1).split(CHUNK_ELEMENTS) for tensor in (anchor, momentum, d))
    for a, b, change in zip(*chunks, strict=True):
        b.mul_(mu)
        b.add_(change)
        u = b * mu
        u.add_(change)
        u.mul_(eta)
        a.sub_(u)


def effective_peers(h: Sequence[int]) -> float:
    """Return (sum h)^2 / sum(h^2), h = inner steps of each counted member: n if all are equal, 1 if one did it all."""
    return sum(h) ** 2 / sum(steps * steps for steps in h)


def eta_mu(outer: OuterConfig, optimizer: str, h: Sequence[int], earlier_entries: int) -> tuple[float, float]:
    """Return (eta, mu) for an entry with these h after `earlier_entries` of its fragment: the law's, or "auto"'s.

    "auto" is linear between the published points in log2 of `effective_peers`, constant outside, rounded to 1/1024.
    mu is at most r / (r + 3), r = earlier entries: until then momentum has nothing to average.
    `optimizer` is the inner one, "muon" or "adamw". The same floats on every machine.
    """
    if not (isinstance(outer.eta, str) or isinstance(outer.mu, str)):
        return outer.eta, outer.mu
    eta, mu = _interpolate(RATES[optimizer], _log2(effective_peers(h)))
    return eta, min(mu, (1024 * earlier_entries // (earlier_entries + 3)) / 1024)


def _interpolate(points: Sequence[tuple[float, float, float]], x: float) -> tuple[float, float]:
    x = min(max(x, points[0][0]), points[-1][0])
    for (x0, eta0, mu0), (x1, eta1, mu1) in itertools.pairwise(points):
        if x <= x1:
            t = (x - x0) / (x1 - x0)
            return _round(eta0 + t * (eta1 - eta0)), _round(mu0 + t * (mu1 - mu0))
    raise AssertionError("x was clamped to the last point")


def _round(value: float) -> float:
    return round(value * 1024) / 1024


def _log2(x: float) -> float:
    """Return log2 cut to 30 binary digits, by squaring: only IEEE multiplications, for libm differs by platform."""
    mantissa, exponent = math.frexp(x)
    square, result = 2 * mantissa, exponent - 1.0
    for digit in range(1, 31):
        square *= square
        if square >= 2:
            square, result = square / 2, result + 0.5**digit
    return result
