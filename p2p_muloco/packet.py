"""From a flat vector to bytes by parts, and who reduces which parts.

The weights of a model are one flat fp32 vector: its tensors in the model's order. A `Layout` cuts the vector into parts
at row borders of 2-D tensors; every peer computes the same table, so only bytes travel. A part is the unit of decoding,
checking, counting and pipelining. A span is a run of whole pieces that one member reduces; a piece is what can't be
cut: a part, or a whole matrix where the merge needs its spectrum.

Cost: a table of (parameters / part_elements) rows. 10B parameters at 2^20 elements: 10,000 parts, a 5.4 GB packet at
4 bits, which 20 Mbit/s moves up in 36 minutes; that is what streaming fragments and H are for.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from p2p_muloco.codec import Codec, make_codec
from p2p_muloco.config import RunConfig
from p2p_muloco.errors import BadPacket
from p2p_muloco.merge import is_flattened, is_scaled

__all__ = ["Layout", "Packet", "Part", "Span", "plan_spans"]

TINY_ELEMENTS = 1024  # smaller tensors and all 1-D ones (norm gains) travel uncompressed


@dataclass(frozen=True)
class Part:
    """Elements [start, stop) of the flat vector, all of one tensor."""

    tensor: int
    start: int
    stop: int
    up: Codec
    down: Codec
    flattened: bool  # Iso-C applies to its tensor
    scaled: bool  # takes the mean norm ratio of the flattened tensors instead

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Span:
    """Parts [first, stop) are reduced by the member with this peer id; `index` is the place in the plan."""

    index: int
    reducer: bytes
    first: int
    stop: int

    @property
    def n_parts(self) -> int:
        return self.stop - self.first


class Layout:
    """The part table of a run: a pure function of the tensors' shapes and the law."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], config: RunConfig) -> None:
        self.names = tuple(shapes)
        self.shapes = tuple(tuple(shape) for shape in shapes.values())
        self.spectral = config.outer.method in ("iso_c", "isoloco")
        self.parts = tuple(itertools.chain.from_iterable(self._cut(config)))
        self.n_elements = sum(part.size for part in self.parts)
        sizes_up = [part.up.size(part.size) for part in self.parts]
        sizes_down = [part.down.size(part.size) for part in self.parts]
        self.up_offsets = (0, *itertools.accumulate(sizes_up))
        self.down_offsets = (0, *itertools.accumulate(sizes_down))

    def _cut(self, config: RunConfig) -> Iterator[list[Part]]:
        up = make_codec(config.codec.up, config.codec.topk_fraction)
        down = make_codec(config.codec.down)
        plain, start = make_codec("fp32"), 0
        for tensor, (name, shape) in enumerate(zip(self.names, self.shapes, strict=True)):
            elements = math.prod(shape)
            tiny = len(shape) < 2 or elements < TINY_ELEMENTS
            row = math.prod(shape[1:]) if len(shape) > 1 else 1
            step = max(1, config.codec.part_elements // row) * row
            flattened = self.spectral and is_flattened(name, shape, config.flattens_embeddings)
            scaled = self.spectral and is_scaled(name, shape, config.flattens_embeddings)
            codecs = (plain, plain) if tiny else (up, down)
            yield [Part(tensor, start + at, start + min(at + step, elements), *codecs, flattened, scaled)
                   for at in range(0, elements, step)]
            start += elements

    @cached_property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """Runs of parts that one member must reduce: [first, stop) each."""
        keys = [(p.tensor, 0 if p.flattened else i) for i, p in enumerate(self.parts)]
        runs, first = [], 0
        for _, group in itertools.groupby(keys):
            stop = first + len(list(group))
            runs.append((first, stop))
            first = stop
        return tuple(runs)

    def tensor_slices(self) -> Iterator[tuple[str, tuple[int, ...], slice]]:
        """Name, shape and place in the flat vector of each tensor."""
        start = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            stop = start + math.prod(shape)
            yield name, shape, slice(start, stop)
            start = stop

    @property
    def up_bytes(self) -> int:
        return self.up_offsets[-1]

    @property
    def down_bytes(self) -> int:
        return self.down_offsets[-1]

    def merge_s(self) -> float:
        """Generous seconds of one core for all spectral merges, for deadlines: 20 m n min(m, n) flop at 5 Gflop/s."""
        flattened = {part.tensor for part in self.parts if part.flattened}
        return sum(20 * math.prod(self.shapes[t]) * min(self.shapes[t]) for t in flattened) / 5e9

    def decode(self, payload: bytes) -> Tensor:
        """D(q) of a whole packet: (elements,) fp32."""
        values = [self.decode_up(i, self.up_slice(payload, i, i + 1)) for i in range(len(self.parts))]
        return torch.cat(values)

    def encode(self, x: Tensor) -> bytes:
        """The payload of a packet: (elements,) fp32 to `up_bytes` bytes, part after part."""
        assert x.shape == (self.n_elements,) and x.dtype == torch.float32
        payload = b"".join(part.up.encode(x[part.start : part.stop]) for part in self.parts)
        assert len(payload) == self.up_bytes
        return payload

    def decode_up(self, index: int, data: bytes | memoryview) -> Tensor:
        part = self.parts[index]
        return part.up.decode(data, part.size)

    def decode_down(self, index: int, data: bytes | memoryview) -> Tensor:
        part = self.parts[index]
        return part.down.decode(data, part.size)

    def up_slice(self, payload: bytes | memoryview, first: int, stop: int) -> memoryview:
        """The bytes of parts [first, stop) of a whole payload, not copied."""
        return memoryview(payload)[self.up_offsets[first] : self.up_offsets[stop]]

    def up_parts(self, first: int, stop: int, data: bytes | memoryview) -> list[memoryview]:
        return _split(self.up_offsets, first, stop, data)

    def down_parts(self, first: int, stop: int, data: bytes | memoryview) -> list[memoryview]:
        return _split(self.down_offsets, first, stop, data)

    def frames(self, offsets: Sequence[int], first: int, stop: int, frame_bytes: int) -> Iterator[tuple[int, int]]:
        """Cut parts [first, stop) into runs of at most `frame_bytes` (one part at least)."""
        at = first
        while at < stop:
            end = at + 1
            while end < stop and offsets[end + 1] - offsets[at] <= frame_bytes:
                end += 1
            yield at, end
            at = end


def _split(offsets: Sequence[int], first: int, stop: int, data: bytes | memoryview) -> list[memoryview]:
    if not 0 <= first < stop < len(offsets) or len(data) != offsets[stop] - offsets[first]:
        raise BadPacket(f"parts {first}..{stop} do not fit {len(data)} bytes")
    view, base = memoryview(data), offsets[first]
    return [view[offsets[i] - base : offsets[i + 1] - base] for i in range(first, stop)]


@dataclass(frozen=True)
class Packet:
    """What one peer says for one entry: the same bytes in every attempt. `digest` stands in its signed HELLO."""

    payload: bytes
    inner_steps: int  # h: that the payload holds
    pace_mhz: int  # thousandths of inner steps a second
    state: bytes  # sha256 of the anchor and momentum it was measured from, so that a silent difference is seen
    limits: tuple[float, ...] = ()  # of each part's norm, for each step of any sender (bounds.step_limits); never sent

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(self.payload).digest()


def plan_spans(layout: Layout, reducers: Sequence[tuple[bytes, int]], head: bytes) -> tuple[Span, ...]:
    """Cut the parts among (peer id, upload rate) in shares of their rates; the same integers on every machine.

    A share is at most 2/r of the whole (r = number of reducers), or the largest piece. The order is shuffled by `head`,
    so that nobody reduces the same tensors for ever. Members whose share is empty get no span.
    """
    ordered = sorted(reducers, key=lambda r: hashlib.sha256(head + r[0]).digest())
    shares = _capped([max(1, rate) for _, rate in ordered])
    total, sum_shares = layout.up_bytes, sum(shares)
    borders = [total * reached // sum_shares for reached in itertools.accumulate(shares)]
    spans: list[Span] = []
    at, pieces = 0, list(layout.pieces)
    for (peer, _), border in zip(ordered, borders, strict=True):
        first = stop = pieces[at][0] if at < len(pieces) else len(layout.parts)
        while at < len(pieces) and (
            border == total or (layout.up_offsets[pieces[at][0]] + layout.up_offsets[pieces[at][1]]) // 2 < border
        ):
            stop, at = pieces[at][1], at + 1
        if stop > first:
            spans.append(Span(len(spans), peer, first, stop))
    assert spans[-1].stop == len(layout.parts)
    return tuple(spans)


def _capped(rates: list[int]) -> list[int]:
    """Lower what stands above twice the mean until nothing does; it shrinks by a third or more each pass."""
    while max(rates) > (limit := 2 * sum(rates) // len(rates)):
        rates = [min(rate, limit) for rate in rates]
    return rates
