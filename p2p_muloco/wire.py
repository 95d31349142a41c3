"""Records as bytes: strict, bounded, typed msgpack. One declaration makes the packer, the checker and the reader.

A record is a frozen dataclass whose fields are declared with `raw`, `integer`, `real`, `text` or `many`.
`pack()` gives msgpack of [kind, field, ...]; `unpack` gives the record back or raises BadPacket, and never
allocates more than the bytes it was handed. A field called `data` (bulk) is not packed but trails the record.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import msgpack

from p2p_muloco.errors import BadPacket

__all__ = ["MAX_ITEMS", "Record", "integer", "many", "raw", "read_frame", "real", "text", "write_frame"]

MAX_ITEMS = 128  # in any tuple of any record

Check = Callable[[Any], bool]


def _field(check: Check, rule: str) -> Any:
    return field(metadata={"check": check, "rule": rule})


def raw(low: int, high: int | None = None) -> Any:
    """Bytes of low..high (inclusive) length; one number = exactly that many."""
    top = low if high is None else high
    return _field(lambda v: type(v) is bytes and low <= len(v) <= top, f"{low}..{top} bytes")


def integer(low: int, high: int) -> Any:
    return _field(lambda v: type(v) is int and low <= v <= high, f"an integer {low}..{high}")


def real(low: float, high: float) -> Any:
    return _field(lambda v: type(v) is float and math.isfinite(v) and low <= v <= high, f"a number {low}..{high}")


def text(high: int) -> Any:
    return _field(lambda v: type(v) is str and len(v) <= high and v.isprintable(), f"text of at most {high}")


def many(item: Any, low: int, high: int) -> Any:
    """A tuple of low..high items, each declared like a field."""
    check, rule = item.metadata["check"], item.metadata["rule"]

    def all_checked(v: Any) -> bool:
        return type(v) is tuple and low <= len(v) <= high and all(map(check, v))

    return _field(all_checked, f"{low}..{high} times {rule}")


@dataclass(frozen=True)
class Record:
    """Base of all records. Subclasses set `KIND` and `MAX_BYTES`."""

    KIND: ClassVar[int] = 0
    MAX_BYTES: ClassVar[int] = 4096  # of the record itself, bulk data not counted

    def pack(self) -> bytes:
        values = [getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "data"]
        packed: bytes = msgpack.packb([self.KIND, *values])
        return packed

    @classmethod
    def unpack(cls, packed: bytes, data: bytes | memoryview = b"") -> Self:
        """Raise BadPacket that names the field and the rule."""
        if len(packed) > cls.MAX_BYTES:
            raise BadPacket(f"{cls.__name__}: {len(packed)} bytes, at most {cls.MAX_BYTES}")
        values = _plain(packed)
        fields = [f for f in dataclasses.fields(cls) if f.name != "data"]
        if not isinstance(values, tuple) or len(values) != len(fields) + 1 or values[0] != cls.KIND:
            raise BadPacket(f"{cls.__name__}: not a record of kind {cls.KIND} with {len(fields)} fields")
        for declared, value in zip(fields, values[1:], strict=True):
            if not declared.metadata["check"](value):
                raise BadPacket(f"{cls.__name__}.{declared.name}: must be {declared.metadata['rule']}")
        extra = {"data": data} if len(fields) < len(dataclasses.fields(cls)) else {}
        record = cls(*values[1:], **extra)
        if record.pack() != packed:
            raise BadPacket(f"{cls.__name__}: its bytes are not canonical")
        return record


def _plain(packed: bytes) -> Any:
    # A header may claim any length, and a tuple of that length is made before its items are read: hence the limit.
    try:
        return msgpack.unpackb(packed, use_list=False, strict_map_key=True, max_array_len=MAX_ITEMS, max_map_len=0)
    except Exception:  # msgpack raises many kinds on hostile bytes
        raise BadPacket("not msgpack") from None


def write_frame(record: Record) -> tuple[bytes, bytes | memoryview]:
    """(head, data) to be sent one after the other: three bytes of length, the record, its bulk data."""
    packed = record.pack()
    assert len(packed) <= record.MAX_BYTES < 2**24
    return len(packed).to_bytes(3, "big") + packed, getattr(record, "data", b"")


def read_frame(frame: bytes | memoryview, kinds: dict[int, type[Record]]) -> Record:
    """The record in `frame`, one of `kinds`; raise BadPacket."""
    view = memoryview(frame)
    size = int.from_bytes(view[:3], "big")
    packed = bytes(view[3 : 3 + size])
    if len(view) < 3 or len(packed) != size or not size:
        raise BadPacket("frame: shorter than its record")
    # fixarray (0x9n) or array16 (0xdc) of [kind, ...]: the kind is a small positive integer right after it
    at = 3 if packed[0] == 0xDC else 1
    kind = kinds.get(packed[at] if len(packed) > at else 0)
    if kind is None:
        raise BadPacket("frame: unknown kind of record")
    data = view[3 + size :]
    if len(data) and "data" not in {f.name for f in dataclasses.fields(kind)}:
        raise BadPacket(f"{kind.__name__}: {len(data)} bytes trail it")
    return kind.unpack(packed, data)
