"""What a member holds of one span: one whole version, and the one that it is receiving. Pure.

A version is what one reducer made of the span: its signed record and averaged bytes. When a reducer is lost another member
takes its turn; of two whole versions the later turn's is the span's. Memory: two versions, encoded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from p2p_muloco.chain import CheckedStart, Law, Signed, check_averaged, check_record
from p2p_muloco.errors import BadPacket
from p2p_muloco.packet import Span

__all__ = ["HeldSpan", "TwoVersions", "Version"]

RECEIVED_SLACK = 2.0  # over the longest honest average: receivers must not differ by rounding


class TwoVersions(Exception):
    """A reducer signed two records of one span in one turn: the proof against it."""

    def __init__(self, peer: bytes, first: Signed, second: Signed) -> None:
        super().__init__("a reducer signed two versions of one span")
        self.peer, self.records = peer, (first, second)


@dataclass(frozen=True)
class Version:
    turn: int
    record: Signed
    data: bytes


class HeldSpan:
    """`expect` names the one member it is taken from; `add` and `add_record` take what comes, `settle` completes it."""

    def __init__(self, law: Law, start: CheckedStart, span: Span, limits: Sequence[float]) -> None:
        self.law, self.start, self.span, self.limits = law, start, span, limits
        self.turn = 0  # of the last order that was obeyed
        self.said = 0  # the turn for whose reducer the own parts were sent
        self.source: bytes | None = span.reducer
        self.whole: Version | None = None
        self.fetched: dict[bytes, int] = {}  # peer: turn of the version it was sent for the asking
        self.wanted_by: set[bytes] = set()  # who asked for it while it was not whole
        self.holders: list[bytes] = []  # who told this reducer that they hold an earlier turn's version
        self.records: dict[int, Signed] = {}  # by turn, from whomever
        self._parts: dict[int, bytes] = {}
        self._parts_turn = 0

    @property
    def reducer(self) -> bytes:
        """Whose turn it is."""
        return self.start.candidates(self.span.index)[self.turn]

    def expect(self, source: bytes | None) -> None:
        self.source, self._parts = source, {}

    def add(self, turn: int, first: int, stop: int, data: bytes | memoryview) -> None:
        """Take averaged parts [first, stop) of one version; raise BadPacket if they don't fit."""
        if not self.span.first <= first < stop <= self.span.stop:
            raise BadPacket(f"averaged parts {first}..{stop} are not of span {self.span.index}")
        if turn != self._parts_turn:
            self._parts, self._parts_turn = {}, turn
        for part, piece in enumerate(self.law.layout.down_parts(first, stop, data), start=first):
            self._parts.setdefault(part, bytes(piece))

    def add_record(self, turn: int, signed: Signed) -> None:
        """Keep the checked record of a turn; raise TwoVersions, with the proof, if it is another than the one that is known."""
        known = self.records.setdefault(turn, signed)
        if known.body != signed.body:
            raise TwoVersions(self.start.candidates(self.span.index)[turn], known, signed)

    def settle(self) -> bool:
        """True if a later version than the one held has just become whole; raise BadPacket if it isn't what was signed."""
        record = self.records.get(self._parts_turn)
        if record is None or len(self._parts) < self.span.n_parts:
            return False
        data = b"".join(self._parts[part] for part in range(self.span.first, self.span.stop))
        if hashlib.sha256(data).digest() != check_record(self.start, record).digest:
            raise BadPacket(f"span {self.span.index} is not what its reducer signed")
        self._check(data)
        self._parts = {}
        return self.keep(Version(self._parts_turn, record, data))

    def keep(self, version: Version) -> bool:
        if self.whole is not None and self.whole.turn >= version.turn:
            return False
        self.records[version.turn] = version.record
        self.whole = version
        return True

    def _check(self, data: bytes) -> None:
        """The mean of honest packets is no longer than tau honest steps, flattened or not."""
        check_averaged(self.law, self.span, data)
        if not self.limits:
            return
        layout, steps = self.law.layout, min(max(self.start.h), 2 * self.law.config.run.inner_steps)
        pieces = layout.down_parts(self.span.first, self.span.stop, data)
        for first, stop in layout.pieces:
            if self.span.first <= first < self.span.stop:
                decoded = [layout.decode_down(at, pieces[at - self.span.first]) for at in range(first, stop)]
                norm = math.sqrt(sum(float(torch.linalg.vector_norm(d, dtype=torch.float64)) ** 2 for d in decoded))
                longest = math.sqrt(sum(self.limits[at] ** 2 for at in range(first, stop)))
                if norm > RECEIVED_SLACK * steps * longest * (1 + layout.parts[first].down.contraction):
                    raise BadPacket(f"span {self.span.index} holds an average that no honest members can have")
