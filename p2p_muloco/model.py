"""A llama-like byte GPT, its first weights, and sampling from it.

Shapes: B batch, T tokens, D width, H heads, K = D / H width of a head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from p2p_muloco.config import ModelConfig

__all__ = ["GPT", "generate", "initial_weights", "load_weights", "parameter_count", "parameter_shapes"]

NORM_EPS: Final = 1e-6
ROPE_BASE: Final = 10_000.0
WEIGHT_STD: Final = 0.02
LOGIT_STD: Final = 0.02  # of the first logits: the first loss is ln 256, yet the blocks get a gradient at once
WEIGHTS_COUNTER: Final = 1 << 192  # top word of Philox's counter: data.Stream, with the same seed, leaves it 0


class Norm(nn.RMSNorm):
    """RMSNorm over the last axis, in the dtype of its input: under autocast torch's own leaves the fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.type_as(x), self.eps)


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight)  # normal_, torch's choice, on the meta device imports for 2 s


class Attention(nn.Module):
    """Pre-norm causal self-attention with QK-norm and RoPE: (B, T, D) -> (B, T, D), the residual not added."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, self.n_heads = config.d_model, config.n_heads
        self.norm = Norm(width, NORM_EPS)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.q_norm = Norm(width // config.n_heads, NORM_EPS)
        self.k_norm = Norm(width // config.n_heads, NORM_EPS)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = (linear(x).unflatten(2, (self.n_heads, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        q = _rotate(self.q_norm(q), cos, sin).type_as(v)  # the tables are fp32, under autocast v is not
        k = _rotate(self.k_norm(k), cos, sin).type_as(v)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Pre-norm SwiGLU: (B, T, D) -> (B, T, D), the residual not added."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = Norm(config.d_model, NORM_EPS)
        self.gate = nn.Linear(config.d_model, config.d_mlp, bias=False)
        self.up = nn.Linear(config.d_model, config.d_mlp, bias=False)
        self.down = nn.Linear(config.d_mlp, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(x, cos, sin)
        return x + self.mlp(x)


class GPT(nn.Module):
    """The model of a run. Fresh weights are torch's own; a run loads `initial_weights`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.d_model % (2 * config.n_heads) == 0, "RunConfig refuses an odd or broken head width"
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = Norm(config.d_model, NORM_EPS)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        cos, sin = _rope_tables(config.seq_len, config.d_model // config.n_heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (B, T, V) of the tokens that follow tokens (B, T) int64; ValueError if T > seq_len."""
        length = tokens.shape[1]
        if length > self.config.seq_len:
            raise ValueError(f"{length} tokens: at most model.seq_len = {self.config.seq_len} can be read; cut them")
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the mean cross entropy in nats of each next token of tokens (B, T + 1), computed in fp32."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return each parameter's shape in the module's own order, without allocating any."""
    with torch.device("meta"):
        return _shapes(dict(GPT(config).named_parameters()))


def parameter_count(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def initial_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Return fp32 CPU weights that are a pure function of (config, seed); gains are 1, the rest is drawn.

    Draws are uniform, not normal: raw Philox words, integer arithmetic and one IEEE multiplication give the same
    bits everywhere, while log, cos or erfinv differ between maths libraries in the last bit, and numpy does not
    promise that its distributions stay. Each tensor has its own Philox key, so the order of drawing is irrelevant.
    """
    named = enumerate(parameter_shapes(config).items())
    return {name: _first(name, shape, config, index << 64 | seed) for index, (name, shape) in named}


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into model; ValueError, and nothing copied, unless names and shapes are the model's."""
    wanted, given = _shapes(dict(model.named_parameters())), _shapes(weights)
    for name in sorted(wanted.keys() | given.keys()):
        if wanted.get(name) != given.get(name):
            raise ValueError(f"weight {name}: the model has {wanted.get(name)}, given was {given.get(name)}; "
                             "both must come from one model config")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


@torch.no_grad()
def generate(model: GPT, prompt: bytes, n_bytes: int, seed: int, temperature: float = 0.8) -> bytes:
    """Return n_bytes sampled after prompt (without it); an empty prompt begins a document, temperature 0 is greedy."""
    dice = torch.Generator("cpu").manual_seed(seed)
    tokens = list(prompt or b"\0")
    start = len(tokens)
    for _ in range(n_bytes):
        window = torch.tensor([tokens[-model.config.seq_len :]], device=model.head.weight.device)
        logits = model(window)[0, -1].float().cpu()
        chances = torch.softmax(logits / max(temperature, 1e-6), dim=0)
        tokens.append(int(torch.multinomial(chances, 1, generator=dice)))
    return bytes(tokens[start:])


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _first(name: str, shape: tuple[int, ...], config: ModelConfig, key: int) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name == "head.weight":
        return _uniform(shape, LOGIT_STD / math.sqrt(config.d_model), key)  # its input has RMS 1
    residual = name.endswith(("attention.o.weight", "mlp.down.weight"))
    return _uniform(shape, WEIGHT_STD / math.sqrt(2 * config.n_layers) if residual else WEIGHT_STD, key)


def _uniform(shape: tuple[int, ...], std: float, key: int) -> Tensor:
    count = math.prod(shape)
    raw = np.random.Philox(key=key, counter=WEIGHTS_COUNTER).random_raw((count + 1) // 2)
    top = (raw.astype("<u8", copy=False).view("<u4")[:count] >> 8).astype(np.int32)  # 24 bits: all that fp32 holds
    odd = (2 * top + 1 - 2**24).astype(np.float32)  # exact, symmetric about 0, never 0
    odd *= np.float32(std * math.sqrt(3) / 2**24)  # U(-a, a) has standard deviation a / sqrt(3)
    return torch.from_numpy(odd.reshape(shape))


def _rope_tables(length: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin (length, head_width / 2) fp32 by way of fp64: an fp32 angle of 100,000 has 2 decimals left."""
    # In numpy, as some devices have no fp64 and torch.arange on the meta device imports for 2 s.
    angle = np.outer(np.arange(length), ROPE_BASE ** (-np.arange(0, head_width, 2) / head_width))
    return torch.from_numpy(np.cos(angle).astype(np.float32)), torch.from_numpy(np.sin(angle).astype(np.float32))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + K / 2]) of x (..., T, K) by its position's angle; tables (T, K / 2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
