"""Codecs: one part of a packet to bytes and back.

A part is a flat fp32 CPU tensor of n >= 1 elements, a piece of one tensor. A codec is a value without state: error
feedback belongs to the caller, who keeps `residual(x, decode(encode(x), n))`. On the wire, little-endian, kind by kind:

    fp32, fp16       n values
    absmax b bits    a scale (fp32) for each block | n codes of b bits, the first in the low bits
    statistical b    a scale (fp32) for each block | 2^b bin means (fp16, in scales) for each block | n codes of b bits
    topk             a scale (fp32) for each chunk | kept values (fp16, in scales) | places: low 8 bits | high 4 bits

The last block is as long as what is left, so no padding enters its statistics. A scale is the largest magnitude of its
block. Decoding is a look-up and one fp32 product an element, and no product is subnormal, so every machine decodes the
same bits, whether or not it fuses multiply-adds or flushes subnormal numbers to zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from p2p_muloco.errors import BadPacket, ConfigError

__all__ = ["Codec", "make_codec", "residual"]

CHUNK: Final = 4096  # of topk: what 12 bits can address (SparseLoCo, arXiv 2508.15706)
FLOOR: Final = 2.0**-100  # a block below it is sent as zero: FLOOR times the least fp16 (2^-24) is still a normal fp32

Layout: TypeAlias = tuple[tuple[str, int], ...]  # (numpy kind, elements) of the arrays that follow each other
Fitted: TypeAlias = tuple[Tensor, Tensor, Tensor]  # of rows (blocks, length): scales (blocks,), levels, codes


class Codec(Protocol):
    """A lossy code for one part; equal values of the same codec agree on every size."""

    @property
    def name(self) -> str: ...

    @property
    def contraction(self) -> float:
        """rho, the worst ||x - decode(encode(x))|| / ||x||, if rms(x) >= 2^-14 and |x| < 65504; never over 1."""

    def size(self, n: int) -> int:
        """Bytes that n elements take, exactly."""

    def encode(self, x: Tensor) -> bytes:
        """Code x (n,): finite, fp32, contiguous, on the CPU."""

    def decode(self, data: bytes | memoryview, n: int) -> Tensor:
        """Return (n,) fp32, finite; raise BadPacket for any bytes that can't mean that."""


def make_codec(name: str, topk_fraction: float = 0.02) -> Codec:
    """Return the codec of that name in `config.CODECS`; `topk_fraction` is the share of elements that topk keeps."""
    # Contractions. fp16 rounds by 2^-11 and loses 2^-25 below its normal range. absmax is worst when one element sets
    # the scale and all others lie half a step from zero. The worst statistical blocks found by search have one outlier
    # that shares an open bin with 1-9 % at its border: .853 at 4 bits, .952 at 2. (Gaussian: .13, .84 and .11, .42.)
    known: tuple[Codec, ...] = (
        _Float("fp32", torch.float32, contraction=0.0),
        _Float("fp16", torch.float16, contraction=2**-10),
        _Blocks("absmax8", 8, 1024, statistical=False, contraction=0.125),
        _Blocks("absmax4", 4, 512, statistical=False, contraction=0.8502),
        _Blocks("absmax2", 2, 512, statistical=False, contraction=0.9962),
        _Blocks("statistical4", 4, 1024, statistical=True, contraction=0.87),
        _Blocks("statistical2", 2, 512, statistical=True, contraction=0.96),
        _TopK(topk_fraction),
    )
    for codec in known:
        if codec.name == name:
            return codec
    raise ConfigError(f"codec {name!r}: must be one of {', '.join(codec.name for codec in known)}")


def residual(x: Tensor, decoded: Tensor) -> Tensor:
    """Return what the wire lost of x; the caller adds a share of it to the next x (error feedback)."""
    return x - decoded


class _Wire:
    """What the codecs share: a layout of arrays that is a pure function of n, and how it is read from strangers."""

    name: str

    def _layout(self, n: int) -> Layout:
        raise NotImplementedError

    def _arrays(self, x: Tensor) -> list[Tensor]:
        raise NotImplementedError

    def size(self, n: int) -> int:
        assert n >= 1
        return sum(np.dtype(kind).itemsize * count for kind, count in self._layout(n))

    def encode(self, x: Tensor) -> bytes:
        assert x.dtype == torch.float32 and x.dim() == 1 and x.is_contiguous() and x.isfinite().all(), "not a part"
        return b"".join(array.numpy().tobytes() for array in self._arrays(x))

    def _read(self, data: bytes | memoryview, n: int) -> list[Tensor]:
        """Return copies of the arrays, once the length of data is right."""
        got, size, offset, arrays = memoryview(data).nbytes, self.size(n), 0, []
        self._require(got == size, f"{got} bytes for {n} elements, must be {size}")
        for kind, count in self._layout(n):
            arrays.append(torch.from_numpy(np.frombuffer(data, kind, count, offset).copy()))
            offset += arrays[-1].nbytes
        return arrays

    def _require_scaled(self, scales: Tensor, levels: Tensor) -> None:
        # Comparisons are false for NaN; with |level| <= 1 no product overflows.
        sound = (scales == 0) | (scales >= FLOOR) & (scales < math.inf)
        self._require(bool(sound.all()), "a scale is negative, not finite or under 2^-100")
        self._require(bool((levels.abs() <= 1).all()), "a level is not within [-1, 1]")

    def _require(self, fine: bool, fault: str) -> None:
        if not fine:
            raise BadPacket(f"{self.name} part: {fault}; the part is not counted")


@dataclass(frozen=True)
class _Float(_Wire):
    name: str
    dtype: torch.dtype
    contraction: float

    def _layout(self, n: int) -> Layout:
        return ((f"<f{self.dtype.itemsize}", n),)

    def _arrays(self, x: Tensor) -> list[Tensor]:
        limit = torch.finfo(self.dtype).max
        return [x.clamp(-limit, limit).to(self.dtype)]

    def decode(self, data: bytes | memoryview, n: int) -> Tensor:
        (values,) = self._read(data, n)
        self._require(bool(values.isfinite().all()), "a value is not finite")
        return values.float()


@dataclass(frozen=True)
class _Blocks(_Wire):
    """A scale and a table of 2^bits levels in [-1, 1] for each block; the table is fixed or comes with the block."""

    name: str
    bits: int
    block: int
    statistical: bool
    contraction: float

    def _layout(self, n: int) -> Layout:
        blocks = -(-n // self.block)
        return ("<f4", blocks), ("<f2", blocks << self.bits if self.statistical else 0), ("u1", -(-n * self.bits // 8))

    def _arrays(self, x: Tensor) -> list[Tensor]:
        fit = _fit_statistical if self.statistical else _fit_absmax
        scales, levels, codes = _concatenated([fit(rows, 1 << self.bits) for rows in _rows(x, self.block)])
        return [scales, levels, _pack(codes, self.bits)]

    def decode(self, data: bytes | memoryview, n: int) -> Tensor:
        scales, levels, packed = self._read(data, n)
        self._require_scaled(scales, levels)
        bins = 1 << self.bits
        table = scales[:, None] * (levels.float().view(-1, bins) if self.statistical else _symmetric_levels(bins))
        whole = len(scales) * self.block * self.bits // 8
        codes = _unpack(F.pad(packed, (0, whole - len(packed))), self.bits)
        return table.gather(1, codes.long().view(-1, self.block)).view(-1)[:n]


@dataclass(frozen=True)
class _TopK(_Wire):
    """The largest `fraction` of each chunk, at least one element; the rest is zero."""

    fraction: float
    name: str = "topk"

    @property
    def contraction(self) -> float:
        return math.sqrt(1 - self.fraction + 2**-20)  # equal magnitudes are the worst case; 2^-20 covers fp16

    def _kept(self, length: int) -> int:
        return max(1, math.ceil(self.fraction * length))

    def _layout(self, n: int) -> Layout:
        full, rest = divmod(n, CHUNK)
        kept = full * self._kept(CHUNK) + (self._kept(rest) if rest else 0)
        return ("<f4", full + bool(rest)), ("<f2", kept), ("u1", kept), ("u1", -(-kept // 2))

    def _arrays(self, x: Tensor) -> list[Tensor]:
        scales, values, places = _concatenated([self._select(rows) for rows in _rows(x, CHUNK)])
        return [scales, values, (places & 255).to(torch.uint8), _pack((places >> 8).to(torch.uint8), 4)]

    def _select(self, rows: Tensor) -> Fitted:
        scales, unit = _normalised(rows)
        places = rows.abs().topk(self._kept(rows.shape[1]), dim=1, sorted=False).indices.sort(1).values
        return scales, unit.gather(1, places).half(), places

    def decode(self, data: bytes | memoryview, n: int) -> Tensor:
        scales, values, low, high = self._read(data, n)
        self._require_scaled(scales, values)
        chunks = torch.arange(len(scales)).repeat_interleave(self._kept(CHUNK))[: len(values)]
        places = chunks * CHUNK + (_unpack(high, 4)[: len(low)].long() << 8 | low)
        ascending = bool((places.diff() > 0).all()) and int(places[-1]) < n
        self._require(ascending, "places don't ascend inside their chunk")
        return torch.zeros(n).scatter_(0, places, values.float() * scales[chunks])


def _fit_absmax(rows: Tensor, bins: int) -> Fitted:
    scales, unit = _normalised(rows)
    half = bins // 2 - 1
    return scales, unit.new_empty(0, dtype=torch.half), unit.mul_(half).round_().add_(half).to(torch.uint8)


def _symmetric_levels(bins: int) -> Tensor:
    half = bins // 2 - 1
    return ((torch.arange(bins) - half) / half).clamp_(max=1)  # the last code, which no encoder writes, means 1 too


def _fit_statistical(rows: Tensor, bins: int) -> Fitted:
    """Bins 6 std / bins wide about the mean, the outer ones open (MuLoCo); their means make it a projection."""
    scales, unit = _normalised(rows)
    centred = unit - unit.mean(1, keepdim=True)
    std = centred.square().mean(1, keepdim=True).sqrt_()
    per_bin = torch.where(std > 0, bins / 6 / std, 0)
    codes = centred.mul_(per_bin).round_().add_(bins // 2).clamp_(0, bins - 1).to(torch.uint8)
    index, zeros = codes.long(), unit.new_zeros(len(rows), bins)
    sums = zeros.scatter_add(1, index, unit)
    counts = zeros.scatter_add(1, index, unit.new_ones(1).expand_as(unit))
    return scales, (sums / counts.clamp_(min=1)).half(), codes


def _rows(x: Tensor, width: int) -> list[Tensor]:
    """Return views of x (n,): (n // width, width), then what is left as (1, rest); neither if empty."""
    whole = len(x) - len(x) % width
    return [part.view(-1, min(width, len(part))) for part in (x[:whole], x[whole:]) if len(part)]


def _normalised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales (blocks,) and rows / scales, within [-1, 1]; a division, as 1 / 3e38 would be subnormal."""
    peaks = rows.abs().amax(1)
    return torch.where(peaks < FLOOR, 0, peaks), rows / peaks.clamp(min=FLOOR)[:, None]


def _concatenated(fitted: list[Fitted]) -> list[Tensor]:
    return [torch.cat([piece.flatten() for piece in kind]) for kind in zip(*fitted, strict=True)]


def _pack(codes: Tensor, bits: int) -> Tensor:
    while bits < 8:
        codes = F.pad(codes, (0, len(codes) % 2))
        codes, bits = codes[0::2] | codes[1::2] << bits, 2 * bits
    return codes


def _unpack(packed: Tensor, bits: int) -> Tensor:
    return torch.stack([packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], 1).flatten()
