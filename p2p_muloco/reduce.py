"""The reducer of one span: decode, check and sum parts as they arrive, merge, encode once. Pure.

Parts of a piece are summed as soon as every member still open has delivered them, in order of peer id, so a reducer
holds encoded bytes of what waits and decoded values of one part of all members only.

A part longer than any honest member's can be is not counted, nor what follows it. Of three members or more, one that is
longer a step than most is shortened (bounds.clip_factors), and not counted if it is far longer (bounds.far_longer); its e
takes a part that was shortened as said in full, for a liar's loss is no one else's. Of four or more, the record says who
pulls against the sum of all others (algorithms of bounds.Cosines).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from p2p_muloco.bounds import Cosines, clip_factors, far_longer, over_limit, trimmed_mean
from p2p_muloco.chain import AGAINST, BROKE_RULE, COUNTED, LARGEST_ELEMENT, CheckedStart, Law, SpanRecord
from p2p_muloco.errors import BadPacket
from p2p_muloco.merge import counted_weight, iso_c, norm_ratio
from p2p_muloco.messages import FRAME_BYTES
from p2p_muloco.muon import EMBEDDINGS
from p2p_muloco.packet import Span

__all__ = ["SpanReducer"]

COSINE_ELEMENTS = 50_000  # of a span: from here on no honest member of equal speed pointed away from the others
COSINE_MEMBERS = 4
AGAINST_COSINE = -0.05  # honest members: .05 to .6; a turned sign: the negative of that


class SpanReducer:
    """`add` and `close` change it; `take` returns what was averaged since the last call."""

    def __init__(self, law: Law, start: CheckedStart, span: Span, limits: Sequence[float] = (), turn: int = 0) -> None:
        """`limits`: of each part's norm for each inner step (bounds.step_limits); none are checked where it is empty."""
        self.law, self.start, self.span, self.limits, self.turn = law, start, span, limits, turn
        n = len(start.hellos)
        self._waiting: list[dict[int, bytes]] = [{} for _ in range(n)]  # part -> encoded bytes, by member
        self._next = [span.first] * n  # first part that a member has not delivered
        self._open = [True] * n
        self.reasons = [COUNTED] * n
        self._pieces = [p for p in law.layout.pieces if span.first <= p[0] < span.stop]
        self._fresh: list[tuple[int, int, bytes]] = []
        self.averaged: list[bytes] = []
        self.ratio_sum, self.ratio_count = 0.0, 0
        self._cosines = Cosines(n) if n >= COSINE_MEMBERS else None

    @property
    def finished(self) -> bool:
        return not self._pieces

    def missing(self) -> list[int]:
        """Indices of members that have not delivered all and are not closed."""
        return [i for i, at in enumerate(self._next) if self._open[i] and at < self.span.stop]

    def add(self, member: int, first: int, stop: int, data: bytes | memoryview) -> None:
        """Take parts [first, stop) of a member, in any order, once each; raise BadPacket if they don't fit the span."""
        if not self.span.first <= first < stop <= self.span.stop:
            raise BadPacket(f"parts {first}..{stop} are not of span {self.span.index}")
        slices = self.law.layout.up_parts(first, stop, data)
        if not self._open[member]:
            return
        for part, piece in enumerate(slices, start=first):
            if part >= self._next[member]:
                self._waiting[member].setdefault(part, bytes(piece))
        while self._next[member] in self._waiting[member]:
            if self._next[member] >= self.span.stop:
                break
            self._next[member] += 1
        self._reduce_ready()

    def close(self, member: int, reason: int) -> None:
        """Count nothing of a member from its first missing part on."""
        if self._open[member]:
            self._open[member] = False
            if self._next[member] < self.span.stop:
                self.reasons[member] = reason
            self._reduce_ready()

    def take(self) -> list[tuple[int, int, bytes]]:
        """(first, stop, bytes) runs of averaged parts, in order, bundled up to a frame's size."""
        runs: list[tuple[int, int, bytes]] = []
        for first, stop, data in self._fresh:
            if runs and len(runs[-1][2]) + len(data) <= FRAME_BYTES:
                runs[-1] = (runs[-1][0], stop, runs[-1][2] + data)
            else:
                runs.append((first, stop, data))
        self._fresh = []
        return runs

    def record(self, digest: bytes) -> SpanRecord:
        assert self.finished
        counts = tuple(at - self.span.first for at in self._next)
        return SpanRecord(
            start=self.start.group, span=self.span.index, turn=self.turn, digest=digest, counts=counts,
            reasons=tuple(self._judged()), ratio_sum=self.ratio_sum, ratio_count=self.ratio_count,
        )

    def _judged(self) -> list[int]:
        """The reasons, with AGAINST for who was counted whole and pulled the other way."""
        whole = [at == self.span.stop for at in self._next]
        if self._cosines is None or sum(whole) < COSINE_MEMBERS or self._cosines.elements < COSINE_ELEMENTS:
            return self.reasons
        usual = sorted(self.start.h)[(len(whole) - 1) // 2]  # who made few steps may point anywhere
        judged = [is_whole and 2 * h >= usual for is_whole, h in zip(whole, self.start.h, strict=True)]
        rows = zip(self.reasons, judged, self._cosines.with_others(), strict=True)
        return [AGAINST if is_judged and cosine < AGAINST_COSINE else reason for reason, is_judged, cosine in rows]

    def _reduce_ready(self) -> None:
        while self._pieces:
            first, stop = self._pieces[0]
            if any(is_open and at < stop for is_open, at in zip(self._open, self._next, strict=True)):
                return
            self._pieces.pop(0)
            means = [self._mean(part) for part in range(first, stop)]
            encoded = b"".join(
                self.law.layout.parts[first + i].down.encode(d) for i, d in enumerate(self._merge(first, means))
            )
            self._fresh.append((first, stop, encoded))
            self.averaged.append(encoded)

    def _mean(self, part: int) -> Tensor:
        """tau sum(q_i) / sum(h_i) over the members counted in this part (design, 4), or their trimmed mean."""
        size, outer = self.law.layout.parts[part].size, self.law.config.outer
        decoded = [self._decode(member, part) for member in range(len(self.start.hellos))]
        factors = self._factors(part, decoded)
        values = [v for v in decoded if v is not None]
        hs = [hello.h for hello, v in zip(self.start.hellos, decoded, strict=True) if v is not None]
        if self._cosines is not None:
            # as directions: else one that is far longer than all others would turn the others' sum against each of them
            self._cosines.add(torch.stack([torch.zeros(size) if v is None else _direction(v) for v in decoded]))
        total = torch.zeros(size)
        if outer.aggregate == "trimmed" and len(values) >= 3:
            return trimmed_mean(torch.stack(values))
        for v, factor in zip(values, factors, strict=True):
            total.add_(v * factor if factor < 1 else v)
        return total.mul_(counted_weight(hs, self.law.config.run.inner_steps)) if hs else total

    def _factors(self, part: int, decoded: list[Tensor | None]) -> list[float]:
        """By what each part that is counted is multiplied; one that is far too long is taken out of `decoded`."""
        config = self.law.config
        while True:
            members = [member for member, v in enumerate(decoded) if v is not None]
            if config.outer.aggregate == "trimmed" or not self._clips(part):
                return [1.0] * len(members)
            norms = [float(torch.linalg.vector_norm(decoded[member], dtype=torch.float64)) for member in members]
            factors = clip_factors(norms, [self.start.hellos[member].h for member in members])
            far = far_longer(self.law.layout, part, config.inner, factors)
            if not any(far):
                return factors
            for member in itertools.compress(members, far):
                self._refuse(member, part)
                decoded[member] = None

    def _clips(self, part: int) -> bool:
        """Not of a few rows of an embedding: members whose text lacks those tokens are short there for good reason."""
        layout = self.law.layout
        tensor = layout.parts[part].tensor
        return layout.names[tensor] not in EMBEDDINGS or 2 * layout.parts[part].size > math.prod(layout.shapes[tensor])

    def _decode(self, member: int, part: int) -> Tensor | None:
        data = self._waiting[member].pop(part, None)
        if data is None or part >= self._next[member]:
            return None
        try:
            values = self.law.layout.decode_up(part, data)
            if values.abs().max() > LARGEST_ELEMENT:
                raise BadPacket(f"part {part} holds a value over {LARGEST_ELEMENT:g}")
            if self.limits and over_limit(values, self.start.hellos[member].h * self.limits[part]):
                raise BadPacket(f"part {part} is longer than {self.start.hellos[member].h} inner steps can be")
        except BadPacket:
            self._refuse(member, part)
            return None
        return values

    def _refuse(self, member: int, part: int) -> None:
        """Count nothing of a member from this part on."""
        self._open[member], self._next[member], self.reasons[member] = False, part, BROKE_RULE

    def _merge(self, first: int, means: list[Tensor]) -> list[Tensor]:
        """Iso-C of a whole matrix, or the mean as it is."""
        part = self.law.layout.parts[first]
        if not part.flattened:
            return means
        whole = torch.cat(means)
        try:
            flat = iso_c(whole.view(self.law.layout.shapes[part.tensor])).reshape(-1)
        except torch.linalg.LinAlgError:  # it did not converge: the mean is a valid update too
            return means
        self.ratio_sum += norm_ratio(whole, flat)
        self.ratio_count += 1
        return list(flat.split([len(mean) for mean in means]))


def _direction(values: Tensor) -> Tensor:
    """The part at an rms of 1, so that it weighs as its size; zero stays zero."""
    return values * (math.sqrt(len(values)) / max(float(torch.linalg.vector_norm(values)), 1e-30))
