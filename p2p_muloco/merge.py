"""What a reducer does with the sum it received: weighting by inner steps, and Iso-C. Pure functions of tensors.

Iso-C: arXiv 2502.04959; as an outer step, IsoLoCo, arXiv 2607.03011.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from p2p_muloco.muon import EMBEDDINGS, is_block_matrix, quintic_steps

__all__ = ["counted_weight", "is_flattened", "is_scaled", "iso_c", "iso_c_iterative", "norm_ratio"]

CUTOFF: Final = 1e-7  # of the largest singular value: what a Gram matrix in fp64 resolves

# Polar Express (arXiv 2505.16932) for singular values down to about 1e-6 of the norm.
POLAR_STEPS: Final[tuple[tuple[float, float, float], ...]] = (
    (8.2393, -22.9971, 16.5291), (4.1196, -2.8746, 0.5165), (4.1194, -2.8746, 0.5165), (4.1187, -2.8744, 0.5166),
    (4.1158, -2.8737, 0.5167), (4.1035, -2.8705, 0.5171), (4.0535, -2.8579, 0.5189), (3.8621, -2.8126, 0.5274),
    (3.1315, -2.3018, 0.4727), (2.1599, -1.5139, 0.3873), (1.8632, -1.2205, 0.3575), (1.875, -1.25, 0.375),
)


def counted_weight(h: Sequence[int], inner_steps: int) -> float:
    """Return the factor of sum(q_i): tau / sum(h), tau = min(sum(h^2) / sum(h), 2H), h = inner steps of each packet.

    Each q_i is itself a sum over h_i steps, so sum(q) / sum(h) is the mean step, and tau how many of those to take:
    FedNova, arXiv 2007.07481. n equal peers with h <= 2H: exactly 1/n. At least one h must be positive.
    """
    total = sum(h)
    tau = min(sum(steps * steps for steps in h) / total, 2 * inner_steps)
    return tau / total


def is_flattened(name: str, shape: Sequence[int], flattens_embeddings: bool) -> bool:
    """Whether Iso-C flattens this parameter's spectrum: block matrices, and embedding and head on request."""
    return is_block_matrix(name, shape) or (flattens_embeddings and name in EMBEDDINGS)


def is_scaled(name: str, shape: Sequence[int], flattens_embeddings: bool) -> bool:
    """Whether this parameter takes the mean times the average `norm_ratio`: embedding and head that aren't flattened.

    What is neither flattened nor scaled takes the plain mean.
    """
    return name in EMBEDDINGS and not is_flattened(name, shape, flattens_embeddings)


def norm_ratio(before: Tensor, after: Tensor) -> float:
    """Return ||after|| / ||before|| (Frobenius, summed in fp64); 1 if `before` is zero: nothing was shrunk."""
    norms = [float(torch.linalg.vector_norm(side, dtype=torch.float64)) for side in (before, after)]
    return norms[1] / norms[0] if norms[0] > 0 else 1.0


def iso_c(d: Tensor) -> Tensor:
    """Return mean(s) U V^T for d = U diag(s) V^T, (..., m, n) fp32, the mean over all min(m, n) values.

    Directions under 1e-7 of the largest stay zero. Error on a CPU, of the result's norm [measured]: 4e-8 up to
    condition 1e4; at 1e6, 6e-6 if the values are spread evenly in their logarithm, 5e-4 if half are the smallest.
    Not bit-stable between machines: a reducer does it once, before encoding. LinAlgError or NaN if d is not finite.
    """
    if d.is_cuda:
        return iso_c_iterative(d)
    tall = d.shape[-2] > d.shape[-1]
    x = (d.mT if tall else d).double()  # fp32 would err by up to 0.7: a Gram matrix squares the condition
    squares, u = torch.linalg.eigh(_lower_gram(x))
    s = squares.clamp_(min=0).sqrt_()
    gain = torch.where(s > CUTOFF * s[..., -1:], s.mean(-1, keepdim=True) / s, 0.0)
    flat = ((u * gain.unsqueeze(-2)) @ u.mT @ x).float()
    return flat.mT.contiguous() if tall else flat


def _lower_gram(x: Tensor, rows: int = 128) -> Tensor:
    """Return x x^T without most of its upper triangle, which eigh does not read: little over half the work."""
    size = x.shape[-2]
    gram = x.new_zeros(*x.shape[:-2], size, size)
    for start in range(0, size, rows):
        end = min(start + rows, size)
        gram[..., start:end, :end] = x[..., start:end, :] @ x[..., :end, :].mT
    return gram


def iso_c_iterative(d: Tensor) -> Tensor:
    """Return `iso_c` by twelve matrix polynomials in d's dtype, for GPUs, where eigh is slow; d is (..., m, n).

    Error in fp32 [measured]: 9e-6 up to condition 100, 7e-4 at 1e4. Rounding noise in the null space is amplified: 0.1
    at rank 5 of 64 to 256, where fp64 has 1e-9 and bf16 1.8; so TF32 is a RuntimeError.
    """
    if torch.get_float32_matmul_precision() != "highest":
        raise RuntimeError(f"Iso-C: float32 matmul precision is {torch.get_float32_matmul_precision()!r}, must be "
                           "'highest'; call torch.set_float32_matmul_precision('highest')")
    x = d.reshape(-1, *d.shape[-2:])
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    polar = quintic_steps(x / norm.clamp(min=torch.finfo(x.dtype).tiny), POLAR_STEPS)
    flat = polar * ((x * polar).sum((-2, -1), keepdim=True) / x.shape[-2])
    return (flat.mT if tall else flat).reshape(d.shape)
