"""Hostile bytes: BadPacket or ConfigError, or an equal record; nothing else, and no large allocation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import VECTORS, Driver, Swarm, law

from p2p_muloco.chain import Entry, Hello, Order, SpanRecord, Start, Tip
from p2p_muloco.config import JoinString, RunConfig
from p2p_muloco.errors import BadPacket, ConfigError
from p2p_muloco.messages import (
    KINDS,
    Abandon,
    Averaged,
    Confirm,
    Fetch,
    Join,
    Parts,
    Poll,
    Proof,
    Reassign,
    RecordMessage,
    StartMessage,
    TipMessage,
)
from p2p_muloco.wire import Record, integer, many, raw, read_frame, real, text, write_frame

HASH, PEER, SIGNATURE = b"\x11" * 32, b"\x22" * 38, b"\x33" * 64
HELLO = Hello(peer=PEER, head=HASH, k=3, h=8, pace_mhz=1000, client=1, digest=HASH, state=HASH)
START = Start(leader=PEER, head=HASH, k=3, attempt=0, hellos=(HELLO.pack(),) * 2, signatures=(SIGNATURE,) * 2,
              modes=(0, 1), rates=(5, 10**7), scatter_ms=5, gather_ms=6, confirm_ms=2**31)
TIP = Tip(k=3, head=HASH, members=(PEER,), tokens=5, last_tokens=2, weight=9, period_ms=100, recent=(HASH,), recent_tokens=(3, 5),
          clients=(PEER,), banned=(PEER,), banned_until=(9,), banned_why=(3,))
RECORDS: list[Record] = [
    HELLO, START, TIP, Order(start=HASH, span=1, turn=2, by=PEER),
    SpanRecord(start=HASH, span=1, turn=2, digest=HASH, counts=(1, 2**24), reasons=(0, 3), ratio_sum=0.5, ratio_count=1),
    Poll(HASH, 2**40, 1), TipMessage(3, (HASH,) * 8, 2**60, 2, b"", b""), Join(HELLO.pack(), SIGNATURE, 1),
    StartMessage(START.pack(), SIGNATURE), Parts(HASH, 0, 2**24, b"data"), Averaged(HASH, 63, 1, 5, 6, b""),
    RecordMessage(HASH, b"body", SIGNATURE), Confirm(HASH, PEER, HASH, SIGNATURE), Fetch(HASH, 0),
    Reassign(HASH, b"body", SIGNATURE), Abandon(HASH), Proof(START.leader, (b"a", b"b"), (SIGNATURE, SIGNATURE)),
]
FRAMED = [record for record in RECORDS if type(record).KIND in KINDS]


@functools.cache
def entry_bytes() -> bytes:
    driver = Driver(Swarm(law(VECTORS, min_peers=2), 2))
    assert driver.run(1, 60.0)
    return driver.peers[0].entries[1].entry.pack()


def unpacked(kind: type[Record], packed: bytes) -> Record | None:
    """None where it was refused as it should be."""
    try:
        return kind.unpack(packed)
    except BadPacket:
        return None


def test_there_is_a_sample_of_every_message() -> None:
    assert {type(record) for record in FRAMED} == set(KINDS.values())


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: type(r).__name__)
def test_round_trip(record: Record) -> None:
    assert type(record).unpack(record.pack(), getattr(record, "data", b"")) == record
    assert len(record.pack()) <= record.MAX_BYTES


@pytest.mark.parametrize("record", FRAMED, ids=lambda r: type(r).__name__)
def test_frame_round_trip(record: Record) -> None:
    head, data = write_frame(record)
    assert read_frame(head + bytes(data), KINDS) == record


def damaged(whole: bytes) -> st.SearchStrategy[bytes]:
    """Cut off, one bit turned, a few bytes replaced, or something appended."""
    cut = st.integers(0, len(whole)).map(lambda n: whole[:n])
    turned = st.integers(0, 8 * len(whole) - 1).map(
        lambda bit: whole[: bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1 :]
    )
    replaced = st.tuples(st.integers(0, len(whole)), st.binary(max_size=6)).map(
        lambda at: whole[: at[0]] + at[1] + whole[at[0] + len(at[1]) :]
    )
    return st.one_of(cut, turned, replaced, st.binary(max_size=9).map(lambda more: whole + more))


any_record = st.sampled_from(RECORDS)


@settings(max_examples=400, deadline=None)
@given(any_record.flatmap(lambda record: st.tuples(st.just(type(record)), damaged(record.pack()))))
def test_damaged_records(case: tuple[type[Record], bytes]) -> None:
    kind, packed = case
    record = unpacked(kind, packed)
    assert record is None or record.pack() == packed  # what is accepted is exactly what was sent


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(FRAMED).flatmap(lambda record: damaged(b"".join(map(bytes, write_frame(record))))))
def test_damaged_frames(frame: bytes) -> None:
    try:
        record = read_frame(frame, KINDS)
    except BadPacket:
        return
    assert b"".join(map(bytes, write_frame(record))) == frame


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([type(record) for record in RECORDS]))
def test_random_bytes(noise: bytes, kind: type[Record]) -> None:
    unpacked(kind, noise)
    for frame in (noise, len(noise).to_bytes(3, "big") + noise):
        with contextlib.suppress(BadPacket):
            read_frame(frame, KINDS)


anything: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.binary(max_size=40),
              st.text(max_size=10)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None)
@given(any_record, st.data())
def test_any_value_in_any_field(record: Record, data: st.DataObject) -> None:
    """Well-formed msgpack with a value of another type or size somewhere."""
    values = list(msgpack.unpackb(record.pack()))
    values[data.draw(st.integers(0, len(values) - 1))] = data.draw(anything)
    packed = msgpack.packb(values)
    accepted = unpacked(type(record), packed)
    assert accepted is None or accepted.pack() == packed


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_entries(data: st.DataObject) -> None:
    whole = entry_bytes()
    packed = data.draw(st.one_of(damaged(whole), st.binary(max_size=100)))
    try:
        entry = Entry.unpack(packed, len(whole) + 100)
    except BadPacket:
        return
    assert entry.pack() == packed


@settings(max_examples=200, deadline=None)
@given(anything)
def test_entries_of_anything(value: Any) -> None:
    for shape in (value, [value] * 4, [b"", b"", [value], []], [b"", b"", [], [value]], [b"", b"", [[value, value]], []]):
        packed = msgpack.packb(shape)
        with contextlib.suppress(BadPacket):
            assert Entry.unpack(packed, 10**6).pack() == packed


@settings(max_examples=150, deadline=None)
@given(st.one_of(damaged(RunConfig().to_bytes()), anything.map(msgpack.packb), anything.map(lambda v: msgpack.packb((1, v)))))
def test_damaged_configs(packed: bytes) -> None:
    try:
        config = RunConfig.from_bytes(packed)
    except ConfigError:
        return
    assert config.to_bytes() == packed


JOIN = str(JoinString(addresses=("/ip4/203.0.113.7/tcp/31337/p2p/12D3KooWGRUaJ4hB6W7jVZqW4rZ1bq9xQ5Uu6mZ8Z6hQvQ9Zk3aB",),
                      run_id="my-run-" + HASH.hex()[:12], config_hash=HASH))


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(max_size=60), st.text(max_size=60).map("muloco1".__add__),
                 damaged(JOIN.encode()).map(lambda b: b.decode(errors="replace"))))
def test_damaged_join_strings(given_text: str) -> None:
    try:
        join = JoinString.parse(given_text)
    except ConfigError:
        return
    assert str(join) == given_text.strip()


def nested(depth: int, claimed: int, padding: int) -> bytes:
    """`depth` array headers inside each other that each claim `claimed` items."""
    return (b"\xdd" + claimed.to_bytes(4, "big")) * depth + b"\x00" * padding


@pytest.mark.parametrize("claimed", [2**32 - 1, 4000, 200, 2**20])
def test_claimed_lengths_allocate_nothing(claimed: int) -> None:
    """A tuple is made for the claimed length before its items are read: 500 nested ones would be 16 GB."""
    tracemalloc.start()
    try:
        for kind in (Start, Poll, Tip):
            assert unpacked(kind, nested(500, claimed, 1000)) is None
        with pytest.raises(BadPacket):
            Entry.unpack(nested(500, claimed, 2**20), 2**22)
        with pytest.raises(ConfigError):
            RunConfig.from_bytes(nested(500, claimed, 10_000))
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()


def test_longer_than_the_kind_allows_is_refused_unread() -> None:
    for record in RECORDS:
        with pytest.raises(BadPacket, match="at most"):
            type(record).unpack(bytes(record.MAX_BYTES + 1))


BOUNDS = [
    (raw(3), [b"abc"], [b"ab", b"abcd", "abc", bytearray(b"abc"), None]),
    (raw(1, 2), [b"a", b"ab"], [b"", b"abc"]),
    (integer(-1, 5), [-1, 0, 5], [-2, 6, True, 1.0, "1", None]),
    (real(0.0, 2.0), [0.0, 2.0], [-0.1, 2.1, float("nan"), float("inf"), 1, True, None]),
    (text(3), ["", "abc"], ["abcd", "a\n", b"a", "\x1b", 1]),
    (many(integer(0, 1), 1, 2), [(0,), (1, 0)], [(), (0, 0, 0), (2,), [0], 0]),
]


@pytest.mark.parametrize("declared,good,bad", BOUNDS, ids=["raw", "raw range", "integer", "real", "text", "many"])
def test_bounds_of_each_field_type(declared: Any, good: list[Any], bad: list[Any]) -> None:
    check = declared.metadata["check"]
    assert all(check(value) for value in good) and not any(check(value) for value in bad)


def test_only_the_canonical_form_is_read() -> None:
    """A longer way to write the same values would give one record two hashes."""
    poll = Poll(HASH, 5, 1)
    packed = poll.pack()
    at = packed.index(HASH) + 32
    longer = packed[:at] + b"\xcd\x00\x05" + packed[at + 1 :]
    assert msgpack.unpackb(longer) == msgpack.unpackb(packed)
    with pytest.raises(BadPacket, match="canonical"):
        Poll.unpack(longer)
    array16 = b"\xdc\x00\x04" + packed[1:]
    with pytest.raises(BadPacket, match="canonical"):
        read_frame(len(array16).to_bytes(3, "big") + array16, KINDS)
    whole = entry_bytes()
    with pytest.raises(BadPacket, match="canonical"):
        Entry.unpack(b"\xdc\x00\x04" + whole[1:], 10**6)
    with pytest.raises(ConfigError, match="canonical"):
        RunConfig.from_bytes(b"\xdc\x00\x02" + RunConfig().to_bytes()[1:])


def test_a_frame_of_another_set_of_kinds_and_bytes_that_trail_are_refused() -> None:
    head, _ = write_frame(Abandon(HASH))
    with pytest.raises(BadPacket, match="unknown kind"):
        read_frame(head, {})
    with pytest.raises(BadPacket, match="trail"):
        read_frame(head + b"x", KINDS)
    for frame in (b"", b"\0\0", b"\0\0\0", b"\0\0\x05abc"):
        with pytest.raises(BadPacket, match="shorter"):
            read_frame(frame, KINDS)


def test_messages_name_the_field_and_the_rule() -> None:
    with pytest.raises(BadPacket, match=r"Hello\.h: must be an integer 1\.\.40000"):
        Hello.unpack(dataclasses.replace(HELLO, h=0).pack())
