"""The inner optimizer: Muon on the matrices of the blocks, AdamW on everything else, and their learning rate.

Weights are (fan_out, fan_in), as torch.nn.Linear stores them. Without another source: MuLoCo (arXiv 2505.23725).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from p2p_muloco.config import InnerConfig

__all__ = ["COEFFICIENTS", "EMBEDDINGS", "MuonAdamW", "clip_gradients", "fresh_factor", "is_block_matrix",
           "learning_rate", "orthogonalize", "parameter_groups", "quintic_steps", "schedule_progress",
           "update_scale"]

EMBEDDINGS: Final = ("embedding.weight", "head.weight")

# (a, b, c) of each step x <- a x + b x^3 + c x^5 on singular values.
COEFFICIENTS: Final[Mapping[str, tuple[tuple[float, float, float], ...]]] = {
    # MuLoCo's released code (github.com/facebookresearch/MuLoCo); no result above 1.145.
    "muloco": ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
               (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012)),
    # Polar Express (arXiv 2505.16932), the minimax five; no result above 1.141.
    "polar": ((8.1566, -22.4833, 15.8788), (4.0429, -2.8089, 0.5000), (3.8917, -2.7725, 0.5061),
              (3.2858, -2.3681, 0.4645), (2.3465, -1.7098, 0.4232)),
}
CUSHION: Final[Mapping[str, float]] = {"muloco": 1.0, "polar": 1.02}  # of the input norm; Polar Express, section 3.4
ADAMW_EPS: Final = 1e-8
MIN_NORM: Final = 1e-15  # smaller matrices go to zero: fp32 can't square their elements
CPU_BATCH_ELEMENTS: Final = 1 << 18  # of equal shapes at once: 1 MiB stays in the cache (15 % faster than 64 MiB)
GPU_BATCH_ELEMENTS: Final = 1 << 24  # enough to fill one, and bounds the memory of a step


def quintic_steps(x: Tensor, steps: Iterable[tuple[float, float, float]]) -> Tensor:
    """Apply odd quintics to the singular values of each x, (batch, m, n) with m <= n; values must begin in [0, 1]."""
    for a, b, c in steps:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


def orthogonalize(g: Tensor, coefficients: str) -> Tensor:
    """Return about U V^T for each U S V^T of g, (..., m, n), in g's dtype: singular values near 1; zero stays zero.

    `coefficients` is "muloco" or "polar". Computes in fp32 on a CPU, where bf16 is 3 times slower, in bf16 on CUDA.
    """
    x = g.reshape(-1, *g.shape[-2:]).float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    norm = x.square().sum((-2, -1), keepdim=True).sqrt_()
    x = x / (norm * CUSHION[coefficients]).clamp_(min=MIN_NORM)
    x = quintic_steps(x.bfloat16() if x.is_cuda else x, COEFFICIENTS[coefficients])
    return (x.mT if tall else x).reshape(g.shape).to(g.dtype)


def update_scale(shape: Sequence[int], scale: str) -> float:
    """Return the factor between lr U V^T and Muon's update: "spectral" (MuLoCo) or "rms" (Moonlight, arXiv 2502.16982).

    So lr is the update's spectral norm between RMS norms, or 5 times the RMS of its elements.
    """
    fan_out, fan_in = shape
    return math.sqrt(fan_out / fan_in) if scale == "spectral" else 0.2 * math.sqrt(max(fan_out, fan_in))


def is_block_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon trains this parameter: every matrix but embedding and head, which are known by name."""
    return len(shape) == 2 and name not in EMBEDDINGS


def parameter_groups(named_parameters: Iterable[tuple[str, Tensor]], optimizer: str) -> list[dict[str, Any]]:
    """Return torch's groups: block matrices under `optimizer` ("muon" or "adamw"), then the rest under AdamW.

    The groups partition the parameters, in the order given; one that would be empty is left out.
    """
    named = list(named_parameters)
    matrices = [(name, p) for name, p in named if is_block_matrix(name, p.shape)]
    others = [(name, p) for name, p in named if not is_block_matrix(name, p.shape)]
    names = {name for name, _ in matrices} | {name for name, _ in others}
    assert len(names) == len(matrices) + len(others) == len(named), "two parameters share a name"
    groups: list[dict[str, Any]] = [{"params": matrices, "method": optimizer, "matrices": True},
                                    {"params": others, "method": "adamw", "matrices": False}]
    return [group for group in groups if group["params"]]


class MuonAdamW(torch.optim.Optimizer):
    """Muon and AdamW as one optimizer; with `inner.optimizer == "adamw"` all of it is AdamW (DiLoCo).

    Muon's half: M <- momentum M + G, W <- (1 - lr wd) W - lr scale orthogonalize(M), without Nesterov. Build it after
    the model is on its device. Its state exists from the beginning: `momentum`, or `exp_avg` and `exp_avg_sq`, of each
    parameter and one count of steps; a parameter without a gradient keeps its weight and state, but is counted on.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]], inner: InnerConfig) -> None:
        self._inner = inner
        groups = parameter_groups(named_parameters, inner.optimizer)
        super().__init__(groups, {"lr": inner.lr, "step": 0})
        for group in self.param_groups:
            keys = ("momentum",) if group["method"] == "muon" else ("exp_avg", "exp_avg_sq")
            for p in group["params"]:
                self.state[p] = {key: torch.zeros_like(p, memory_format=torch.contiguous_format) for key in keys}
        self.set_lr(inner.lr)

    def set_lr(self, lr: float) -> None:
        """Set the rate of the next steps; embeddings, head and gains take lr x adamw_lr_scale."""
        for group in self.param_groups:
            group["lr"] = lr if group["matrices"] else lr * self._inner.adamw_lr_scale

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            group["step"] += 1
            params = [p for p in group["params"] if p.grad is not None]
            if group["method"] == "adamw":
                self._adamw(params, group["lr"], group["step"])
                continue
            for batch in _equal_shapes(params):
                self._muon(batch, group["lr"])

    def _muon(self, params: list[Tensor], lr: float) -> None:
        inner, momenta = self._inner, [self.state[p]["momentum"] for p in params]
        torch._foreach_mul_(momenta, inner.momentum)
        torch._foreach_add_(momenta, _gradients(params))
        updates = orthogonalize(torch.stack(momenta), inner.coefficients)
        torch._foreach_mul_(params, 1 - lr * inner.weight_decay)
        torch._foreach_add_(params, list(updates), alpha=-lr * update_scale(params[0].shape, inner.scale))

    def _adamw(self, params: list[Tensor], lr: float, step: int) -> None:
        """Bit for bit torch.optim.AdamW(foreach=False) on a CPU."""
        if not params:
            return
        beta1, beta2, grads = self._inner.beta1, self._inner.beta2, _gradients(params)
        means, squares = ([self.state[p][key] for p in params] for key in ("exp_avg", "exp_avg_sq"))
        torch._foreach_mul_(params, 1 - lr * self._inner.weight_decay)
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, (1 - beta2**step) ** 0.5)
        torch._foreach_add_(roots, ADAMW_EPS)
        torch._foreach_addcdiv_(params, means, roots, value=-(lr / (1 - beta1**step)))

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the live state by name, as safetensors holds it: "NAME/momentum", "NAME/exp_avg", ... and "step"."""
        found = {"step": torch.tensor(self.param_groups[0]["step"])}
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                found |= {f"{name}/{key}": tensor for key, tensor in self.state[p].items()}
        return found

    @torch.no_grad()
    def load_state_tensors(self, saved: Mapping[str, Tensor]) -> None:
        """Take over what `state_tensors` gave; ValueError, with nothing changed, if a name or shape is another."""
        live = self.state_tensors()
        shapes, wanted = ({key: tuple(tensor.shape) for key, tensor in side.items()} for side in (saved, live))
        if wrong := [key for key in sorted(shapes.keys() | wanted.keys()) if shapes.get(key) != wanted.get(key)]:
            raise ValueError(f"optimizer state: {wrong[0]} has shape {shapes.get(wrong[0])}, must be "
                             f"{wanted.get(wrong[0])} ({len(wrong)} such); it belongs to another model")
        for key, tensor in live.items():
            tensor.copy_(saved[key])
        for group in self.param_groups:
            group["step"] = int(saved["step"])


def _gradients(params: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def _equal_shapes(params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    by_shape: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
    for p in params:
        by_shape[p.shape].append(p)
    for shape, same in by_shape.items():
        limit = CPU_BATCH_ELEMENTS if same[0].device.type == "cpu" else GPU_BATCH_ELEMENTS
        size = max(1, limit // shape.numel())
        yield from (same[i : i + size] for i in range(0, len(same), size))


@torch.no_grad()
def clip_gradients(params: Iterable[Tensor], max_norm: float) -> float:
    """Scale the gradients to a joint norm of at most `max_norm` (0: leave them); return the norm from before.

    A norm that is not finite changes nothing: the caller skips the step.
    """
    params = list(params)
    norm = float(torch.nn.utils.get_total_norm(_gradients(params)))
    if max_norm > 0 and max_norm < norm < math.inf:
        torch._foreach_mul_(_gradients(params), max_norm / norm)
    return norm


def schedule_progress(
    counted_tokens: int, last_entry_tokens: int, step_in_round: int, inner_steps: int, budget: int
) -> float:
    """Return how far the run is, 0 to 1: the chain's counted tokens and the part of the next entry done, of the budget.

    The next entry is taken to count as much as the last one; a peer that makes more than H steps stands still.
    """
    return min(1.0, (counted_tokens + min(step_in_round / inner_steps, 1.0) * last_entry_tokens) / budget)


def learning_rate(inner: InnerConfig, progress: float) -> float:
    """Return lr at `progress` in [0, 1]: linear warmup from 0, then a cosine down to final_lr x lr."""
    if progress < inner.warmup:
        return inner.lr * progress / inner.warmup
    cosine = 0.5 * (1 + math.cos(math.pi * (progress - inner.warmup) / (1 - inner.warmup)))
    return inner.lr * (inner.final_lr + (1 - inner.final_lr) * cosine)


def fresh_factor(step: int) -> float:
    """Return the share of lr for step 0, 1, ... of a peer whose inner state is fresh: full from the tenth step on."""
    return min(1.0, (step + 1) / 10)
