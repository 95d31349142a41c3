"""Hostile input in depth: bytes whose hashes and signatures are right, headers that lie, floods of well-typed messages.

`test_wire` damages single records; here a stranger or a member signs what it likes. Nothing but the errors of the tree
may come out, and nothing that a claim of a length or a shape could make large. tracemalloc sees Python's memory, which is
where claimed lengths go; tensors are as long as the bytes that were handed over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import hashlib
import json
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kit
import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_muloco.addresses import check_address
from p2p_muloco.chain import (
    CheckedStart,
    Entry,
    Hello,
    Law,
    Order,
    Signed,
    SpanRecord,
    Start,
    Tip,
    advance,
    check_entry,
    check_start,
    merged_update,
    root_of,
    sign_root,
)
from p2p_muloco.codec import make_codec
from p2p_muloco.config import CODECS, JoinString, RunConfig
from p2p_muloco.errors import BadPacket, ConfigError, StateUnavailable
from p2p_muloco.identity import PEER_ID_BYTES, Identity
from p2p_muloco.member import EARLY_FACTOR, Member
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
from p2p_muloco.packet import plan_spans
from p2p_muloco.reduce import SpanReducer
from p2p_muloco.reports import Report, pack_report, read_report, read_reports
from p2p_muloco.requests import REQUESTS, WantManifest, fetch_manifest, pack_request, read_request, serve
from p2p_muloco.snapshot import State, Store, chunk_bytes, max_state_bytes, read_state
from p2p_muloco.transfer import fetch_state
from p2p_muloco.waypoint import Waypoint
from p2p_muloco.wire import Record, read_frame

HASH = b"\x11" * 32
LAW = kit.law()
N = 4
TIP = kit.established(LAW, N)
ME, *OTHERS = (kit.identity(i) for i in range(N))
STRANGER = kit.identity(77)


def state_of(law: Law, whole: bytes) -> State:
    with tempfile.NamedTemporaryFile() as file:
        file.write(whole)
        file.flush()
        return read_state(law, Path(file.name))


@contextlib.contextmanager
def at_most(size_bytes: int) -> Iterator[None]:
    """Fails if more of Python's memory than this was in use at any moment."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] <= size_bytes
    finally:
        tracemalloc.stop()


def refused_or(read: Callable[[], Any]) -> Any:
    """What it read, or None where it was refused in the words of the tree; any other error fails the test."""
    try:
        return read()
    except (BadPacket, ConfigError, StateUnavailable):
        return None


def spoiled(whole: bytes) -> st.SearchStrategy[bytes]:
    """A few bytes replaced, taken out or put in, at up to three places."""
    def at(places: list[tuple[int, int, bytes]]) -> bytes:
        result = whole
        for place, gone, put in places:
            result = result[:place] + put + result[place + gone :]
        return result

    return st.lists(st.tuples(st.integers(0, len(whole)), st.integers(0, 40), st.binary(max_size=12)), max_size=3).map(at)


msgpack_heads = st.sampled_from([b"\xdd\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xdd\0\0\0\x7f", b"\xdf\xff\xff\xff\xff", b"\x9f",
                                 b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\x81\x90"])
lying = st.lists(msgpack_heads, min_size=1, max_size=800).map(b"".join)  # heads that claim what does not follow


# -- bytes from the wire


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([*KINDS, *REQUESTS]), lying | st.binary(max_size=300), st.booleans(), st.integers(0, 200))
def test_frames_of_every_kind_read_or_refuse_in_little_memory(kind: int, body: bytes, array16: bool, bulk: int) -> None:
    record = (b"\xdc\x00\x04" if array16 else b"\x94") + bytes([kind]) + body
    for frame in (len(record).to_bytes(3, "big") + record + bytes(bulk), (2**24 - 1).to_bytes(3, "big") + record):
        with at_most(8 * len(frame) + 2**20):
            refused_or(lambda frame=frame: read_frame(frame, KINDS))
            refused_or(lambda frame=frame: read_request(frame))


@settings(max_examples=40, deadline=None)
@given(lying, st.integers(0, 3000))
def test_claimed_lengths_allocate_little_anywhere(body: bytes, padding: int) -> None:
    packed = body + bytes(padding)
    with at_most(8 * len(packed) + 2**20):
        for read in (Hello.unpack, Start.unpack, SpanRecord.unpack, Tip.unpack, read_report, RunConfig.from_bytes,
                     lambda packed: Entry.unpack(packed, 10**6), JoinString._from_body,
                     lambda packed: fetch_manifest(LAW, lambda donor, request, most: packed, b"")):
            assert refused_or(lambda read=read: read(packed)) is None


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(CODECS), st.integers(1, 9000), st.data())
def test_parts_of_any_bytes_are_finite_and_as_long_as_they_should_be(name: str, n: int, data: st.DataObject) -> None:
    codec = make_codec(name)
    whole = bytearray(codec.encode(torch.randn(n)))
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), max_size=20)):
        whole[place] = value
    values = refused_or(lambda: codec.decode(bytes(whole), n))
    assert values is None or (values.shape == (n,) and bool(values.isfinite().all()))


# -- what members sign


def hello_of(who: Identity, **changed: Any) -> Signed:
    hello = Hello(peer=who.peer_id, head=TIP.head, k=TIP.k + 1, h=8, pace_mhz=1000, client=0, digest=HASH, state=HASH)
    return Signed.make(dataclasses.replace(hello, **changed), who)


def start_of(people: list[Identity], leader: Identity, hellos: dict[bytes, Signed] | None = None, **changed: Any) -> Signed:
    people = sorted(people, key=lambda who: who.peer_id)
    signed = [(hellos or {}).get(who.peer_id) or hello_of(who) for who in people]
    n = len(people)
    start = Start(leader=leader.peer_id, head=TIP.head, k=TIP.k + 1, attempt=0, hellos=tuple(s.body for s in signed),
                  signatures=tuple(s.signature for s in signed), modes=(1,) * n, rates=(20_000,) * n,
                  scatter_ms=5000, gather_ms=10_000, confirm_ms=15_000)
    return Signed.make(dataclasses.replace(start, **changed), leader)


peers = st.sampled_from([ME, *OTHERS, STRANGER])
heads = st.sampled_from([TIP.head, LAW.genesis.head, HASH])
ks = st.sampled_from([0, 1, 2, 3, 2**40])
hs = st.integers(1, 40_000)
signatures = st.binary(min_size=64, max_size=64)
spans = st.integers(0, 3) | st.integers(0, 63)
turns = st.integers(0, 3) | st.integers(0, 63)


@st.composite
def hellos(draw: st.DrawFn) -> Signed:
    who = draw(peers)
    changed = draw(st.fixed_dictionaries({}, optional={
        "head": heads, "k": ks.filter(bool), "h": hs, "pace_mhz": st.integers(1, 10**9), "peer": peers.map(lambda p: p.peer_id),
    }))
    signed = hello_of(who, **changed)
    return draw(st.sampled_from([signed, dataclasses.replace(signed, signature=bytes(64))]))


@st.composite
def starts(draw: st.DrawFn) -> Signed:
    people = draw(st.lists(peers, min_size=1, max_size=N, unique_by=lambda who: who.peer_id))
    own = {who.peer_id: draw(hellos()) for who in people if draw(st.integers(0, 9)) == 0}
    n = st.integers(0, N + 1)
    changed = draw(st.fixed_dictionaries({}, optional={
        "head": heads, "k": ks.filter(bool), "attempt": st.integers(0, 10**6),
        "modes": st.lists(st.integers(0, 1), min_size=1, max_size=N + 1).map(tuple),
        "rates": st.lists(st.integers(1, 10**7), min_size=1, max_size=N + 1).map(tuple),
        "signatures": n.map(lambda k: (bytes(64),) * max(1, k)), "scatter_ms": st.integers(1, 2**31),
        "gather_ms": st.integers(1, 2**31), "confirm_ms": st.integers(1, 2**31),
    }))
    if draw(st.booleans()):
        changed = {}
    return start_of(people, draw(st.sampled_from(people) | peers), own, **changed)


@settings(max_examples=60, deadline=None)
@given(starts())
def test_a_start_is_refused_or_plans_every_part_once(signed: Signed) -> None:
    start = refused_or(lambda: check_start(LAW, TIP, signed))
    if start is not None:
        assert [at for span in start.spans for at in range(span.first, span.stop)] == list(range(len(LAW.layout.parts)))
        assert all(hello.h <= LAW.max_h for hello in start.hellos)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=64), st.binary(min_size=32, max_size=32))
def test_any_rates_make_a_plan(rates: list[int], head: bytes) -> None:
    reducers = [(i.to_bytes(PEER_ID_BYTES, "big"), rate) for i, rate in enumerate(rates)]
    spans = plan_spans(LAW.layout, reducers, head)
    assert [at for span in spans for at in range(span.first, span.stop)] == list(range(len(LAW.layout.parts)))


@functools.cache
def checked_start() -> CheckedStart:
    return check_start(LAW, TIP, start_of([ME, *OTHERS], ME))


def by_peer(peer: bytes) -> Identity:
    return next(who for who in (ME, *OTHERS) if who.peer_id == peer)


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    """What a group of liars could sign together: any data, counts and reasons, under true hashes and signatures."""
    start, records, data = checked_start(), [], []
    liar = draw(st.sampled_from([None, *(span.index for span in start.spans)]))
    for span in start.spans:
        rng = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        x = torch.randn(LAW.layout.n_elements, generator=rng) * 10.0 ** draw(st.integers(-40, 30))
        averaged = b"".join(part.down.encode(x[part.start : part.stop]) for part in LAW.layout.parts[span.first : span.stop])
        counts = [span.n_parts, *draw(st.lists(st.integers(0, span.n_parts), min_size=N - 1, max_size=N - 1))]
        lies: dict[str, Any] = {}
        if span.index == liar:
            noise = bytes(torch.randint(256, (len(averaged),), generator=rng).tolist())
            averaged = draw(st.sampled_from([averaged, noise, averaged[:-1], averaged + b"\0", b""]))
            lies = draw(st.fixed_dictionaries({}, optional={
                "span": spans, "start": st.just(HASH), "digest": st.just(HASH), "turn": turns,
                "counts": st.lists(st.integers(0, 2**24), min_size=1, max_size=N + 1).map(tuple),
            }))
        turn = draw(st.integers(0, N - 1))
        record = SpanRecord(
            start=start.group, span=span.index, turn=turn, digest=hashlib.sha256(averaged).digest(), counts=tuple(counts),
            reasons=tuple(draw(st.lists(st.integers(0, 5), min_size=N, max_size=N))), ratio_sum=draw(st.floats(0, 1)),
            ratio_count=draw(st.sampled_from([0, 1, 2**24])),
        )
        signer = by_peer(start.candidates(span.index)[turn])
        records.append(Signed.make(dataclasses.replace(record, **lies), signer))
        data.append(averaged)
    root = root_of(records)
    confirms = draw(st.just(range(N)) | st.lists(st.integers(-1, N), max_size=N))
    said = draw(st.sampled_from([root, root, root, HASH]))
    signatures = [(i, sign_root(by_peer(start.members[i % N]), start.group, said)) for i in confirms]
    return Entry(start.signed, tuple(records), tuple(data), tuple(signatures))


@settings(max_examples=40, deadline=None)
@given(entries())
def test_an_entry_is_refused_or_can_be_applied_stored_and_sent_on(entry: Entry) -> None:
    checked = refused_or(lambda: check_entry(LAW, TIP, entry))
    if checked is None:
        return
    assert bool(merged_update(LAW, checked).isfinite().all())
    tip = advance(LAW, TIP, checked)
    assert Tip.unpack(tip.pack()) == tip
    packed = entry.pack()
    assert Entry.unpack(packed, len(packed)) == entry


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_reducers_take_any_parts(data: st.DataObject) -> None:
    """Of any member, in any order, of any bytes: refused, or averaged into whole and finite spans."""
    start = checked_start()
    span = data.draw(st.sampled_from(start.spans))
    reducer, layout, taken = SpanReducer(LAW, start, span), LAW.layout, []
    payload = layout.encode(kit.vector(LAW, 1))
    for _ in range(data.draw(st.integers(0, 25))):
        member, at = data.draw(st.integers(0, N - 1)), st.integers(-1, len(layout.parts) + 1)
        first, stop = data.draw(st.tuples(at, at) | st.just((span.first, span.stop)))
        sound = bytes(layout.up_slice(payload, *(min(max(i, 0), len(layout.parts)) for i in (first, stop))))
        piece = data.draw(st.sampled_from([sound, sound, bytes(len(sound)), b"\xff" * len(sound), sound[1:], b""]))
        refused_or(lambda m=member, f=first, s=stop, p=piece: reducer.add(m, f, s, p))
        if data.draw(st.integers(0, 9)) == 0:
            reducer.close(member, data.draw(st.integers(1, 3)))
        taken += reducer.take()
    for member in reducer.missing():
        reducer.close(member, 2)
    taken += reducer.take()
    assert reducer.finished and [run[0] for run in taken[1:]] == [run[1] for run in taken[:-1]]
    averaged = b"".join(run[2] for run in taken)
    for at, piece in enumerate(layout.down_parts(span.first, span.stop, averaged), start=span.first):
        layout.decode_down(at, piece)
    assert reducer.record(HASH).pack()


# -- states, manifests, requests


@functools.cache
def sound_state(law: Law = LAW) -> bytes:
    x = kit.vector(law, 3)
    tensors = {}
    for name, shape, place in law.layout.tensor_slices():
        tensors |= {f"anchor/{name}": x[place].view(shape).clone(), f"momentum/{name}": x[place].view(shape).clone()}
    from safetensors.torch import save

    return save(tensors, {"tip": TIP.pack().hex(), "format": "p2p-muloco-state-1"})


def with_header(change: Callable[[dict[str, Any]], Any], body: bytes | None = None) -> bytes:
    whole = sound_state()
    size = int.from_bytes(whole[:8], "little")
    header = change(json.loads(whole[8 : 8 + size]))
    coded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(coded).to_bytes(8, "little") + coded + (whole[8 + size :] if body is None else body)


ANY = "anchor/norm.weight"
LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "empty": lambda h: {}, "list": lambda h: [], "null": lambda h: b"null", "not json": lambda h: b"{",
    "no tip": lambda h: h | {"__metadata__": {}}, "tip of no hex": lambda h: h | {"__metadata__": {"tip": "\u0661\u0662"}},
    "tip that is no record": lambda h: h | {"__metadata__": {"tip": "00" * 20_000}},
    "metadata null": lambda h: h | {"__metadata__": None}, "metadata of numbers": lambda h: h | {"__metadata__": {"tip": 3}},
    "other dtype": lambda h: h | {ANY: h[ANY] | {"dtype": "I32"}}, "no such dtype": lambda h: h | {ANY: h[ANY] | {"dtype": "F3"}},
    "four bits": lambda h: h | {ANY: h[ANY] | {"dtype": "F4"}}, "other shape": lambda h: h | {ANY: h[ANY] | {"shape": [4, 4]}},
    "negative": lambda h: h | {ANY: h[ANY] | {"shape": [-16]}}, "overflow": lambda h: h | {ANY: h[ANY] | {"shape": [2**62, 64]}},
    "many axes": lambda h: h | {ANY: h[ANY] | {"shape": [1] * 500 + [16]}},
    "offsets beyond": lambda h: h | {ANY: h[ANY] | {"data_offsets": [0, 2**60]}},
    "offsets shared": lambda h: h | {ANY: h[ANY] | {"data_offsets": h["anchor/embedding.weight"]["data_offsets"]}},
    "offsets turned": lambda h: h | {ANY: h[ANY] | {"data_offsets": h[ANY]["data_offsets"][::-1]}},
    "one less": lambda h: {k: v for k, v in h.items() if k != ANY},
    "nothing of a huge shape": lambda h: {"x": {"dtype": "F32", "shape": [0, 2**40, 2**40], "data_offsets": [0, 0]}, **h},
    "nothing of the largest": lambda h: {"x": {"dtype": "F32", "shape": [0, 2**64 - 1], "data_offsets": [0, 0]}, **h},
    "deep": lambda h: b'{"__metadata__":' + b"[" * 40_000, "deep maps": lambda h: b'{"a":' * 40_000,
    "spaces": lambda h: b" " * 100_000 + json.dumps(h).encode()[:-1],
    "3,000 nothings": lambda h: h | {f"x{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(3000)},
}


def test_a_sound_state_is_read_in_memory_of_its_size() -> None:
    whole = sound_state()
    with at_most(8 * len(whole) + 2**20):
        assert state_of(LAW, whole).tip == TIP


@pytest.mark.parametrize("lie", LIES)
def test_headers_of_states_that_lie_are_refused(lie: str) -> None:
    whole = with_header(LIES[lie])
    with at_most(8 * len(whole) + 2**20):
        assert refused_or(lambda: state_of(LAW, whole)) is None


@pytest.mark.parametrize("size", [0, 7, 10**6, 2**63, 2**64 - 1])
def test_a_header_size_that_lies_is_refused(size: int) -> None:
    for rest in (b"", b"{}", sound_state()[8:]):
        with at_most(8 * len(sound_state()) + 2**20), pytest.raises(BadPacket):
            state_of(LAW, size.to_bytes(8, "little") + rest)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_spoiled_states_are_refused_or_whole_and_finite(data: st.DataObject) -> None:
    """Anywhere in the file, most often in its header; JSON of any values in the header."""
    whole = sound_state()
    size = int.from_bytes(whole[:8], "little")
    field = st.sampled_from(["dtype", "shape", "data_offsets"])
    value = st.one_of(st.none(), st.integers(-(2**70), 2**70), st.text(max_size=4), st.lists(st.integers(-1, 2**64), max_size=4))
    packed = data.draw(st.one_of(
        spoiled(whole), spoiled(whole[: 8 + size]).map(lambda head: head + whole[8 + size :]),
        st.tuples(field, value).map(lambda c: with_header(lambda h: h | {ANY: h[ANY] | {c[0]: c[1]}})),
    ))
    state = refused_or(lambda: state_of(LAW, packed))
    if state is not None:
        assert len(state.anchor) == len(state.momentum) == LAW.layout.n_elements
        assert bool(torch.isfinite(state.anchor).all() and torch.isfinite(state.momentum).all())


anything: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.binary(max_size=40),
              st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3),
                            st.dictionaries(st.text(max_size=2) | st.integers(0, 9), inner, max_size=2)),
    max_leaves=5,
)


def take(donor: Callable[[Record], bytes], folder: Path) -> list[Record]:
    """A state from one donor; what it was asked."""
    asked: list[Record] = []

    def answer(peer: bytes, request: Record, most: int) -> bytes:
        assert type(request).unpack(request.pack()) == request, "we ask for nothing that breaks a rule"
        asked.append(request)
        return donor(request)

    net, tip = kit.Answering(answer), LAW.genesis
    assert refused_or(lambda: fetch_state(LAW, net, tip, [b"donor"], folder, lambda progress: None)) is None
    return asked


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.binary(max_size=100), anything.map(msgpack.packb), st.tuples(anything, anything, anything).map(msgpack.packb),
                 st.tuples(st.integers(-1, 2**40), st.integers(-1, 5000), st.lists(anything, max_size=2)).map(msgpack.packb)),
       st.binary(max_size=50))
def test_a_donor_that_answers_anything_is_refused(manifest: bytes, chunk: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        take(lambda request: manifest if isinstance(request, WantManifest) else chunk, Path(folder))


def test_a_donor_can_send_no_more_than_a_state(tmp_path: Path) -> None:
    """A manifest of the largest size and true hashes of short chunks: none of it is kept."""
    size, chunk = max_state_bytes(LAW), b"x" * 1000
    manifest = msgpack.packb((3, size, [hashlib.sha256(chunk).digest()] * -(-size // chunk_bytes(size))))
    with at_most(2**20):
        asked = take(lambda request: manifest if isinstance(request, WantManifest) else chunk, tmp_path)
    assert len(asked) <= 5


def test_any_request_is_served_or_has_no_answer(tmp_path: Path) -> None:
    store = Store(tmp_path, LAW.layout, LAW.config.to_bytes())
    store.pin(State(LAW.genesis, torch.zeros(LAW.layout.n_elements), torch.zeros(LAW.layout.n_elements)))
    served = set()

    @settings(max_examples=50, deadline=None)
    @given(st.sampled_from(list(REQUESTS)), st.lists(st.integers(-1, 2**63) | st.binary(max_size=33), max_size=3),
           st.just(b"") | st.binary(max_size=3))
    def ask(kind: int, fields: list[Any], trailing: bytes) -> None:
        packed = msgpack.packb([kind, *fields]) + trailing
        request = refused_or(lambda: read_request(len(packed).to_bytes(3, "big") + packed))
        if request is not None:
            assert pack_request(request)[3:] == packed
            served.add(len(serve(store, request, store.config_bytes)))

    ask()
    for request in (REQUESTS[41](2**40), REQUESTS[43](2**40, 2**24, HASH), REQUESTS[43](0, 2**24, HASH)):
        assert serve(store, request, store.config_bytes) == b""
    assert served


# -- reports, configs, join strings


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_reports_are_read_or_cost_one_record(data: st.DataObject) -> None:
    report = Report(run_id="r", peer=ME.peer_id, name="n", k=1, head=HASH, inner_steps=1, tokens_total=1, tokens_per_s=1.0,
                    loss=1.0, client=0, device="cpu", version="1", at_s=1,
                    named=(ME.peer_id,), named_why=(3,), named_round=(1,))
    sound = pack_report(Signed.make(report, ME))
    packed = data.draw(st.one_of(spoiled(sound), anything, anything.map(msgpack.packb), st.binary(max_size=600)))
    read = refused_or(lambda: read_report(packed))
    assert read is None or packed == sound
    subkey = data.draw(st.sampled_from([ME.peer_id, b"", None, "x", 5]))
    assert set(read_reports({subkey: packed, 7: sound}, "r")) <= {ME.peer_id}


toml_values = st.one_of(
    st.integers(), st.floats().map(repr), st.sampled_from(["true", "[]", "{}", "[[1]]", "1979-05-27", "''", "'auto'", "nan",
                                                           "1" + "0" * 400, "0x" + "f" * 5000, "9" * 5000, "[" * 3000]),
    st.text(max_size=8).map(json.dumps),
).map(str)


@settings(max_examples=60, deadline=None)
@given(st.one_of(
    st.text(max_size=80), spoiled(RunConfig().to_toml().encode()).map(lambda b: b.decode(errors="replace")),
    st.tuples(st.sampled_from(["run", "inner", "codec", "x"]), st.sampled_from(["seed", "lr", "up", "beta", "name", "y"]),
              toml_values).map(lambda c: f"[{c[0]}]\n{c[1]} = {c[2]}\n"),
))
def test_run_files_are_read_or_refused(text: str) -> None:
    config = refused_or(lambda: RunConfig.from_toml(text))
    assert config is None or RunConfig.from_bytes(config.to_bytes()) == config


@settings(max_examples=50, deadline=None)
@given(st.one_of(st.tuples(st.just(1), anything), st.tuples(anything, st.just({})), st.tuples(st.just(1), st.dictionaries(
    st.sampled_from(["run", "inner", "codec", "x"]),
    st.dictionaries(st.sampled_from(["seed", "lr", "up", "y"]) | st.binary(max_size=3), anything, max_size=2) | anything,
    max_size=2))).map(msgpack.packb))
def test_configs_of_anything_are_read_or_refused(packed: bytes) -> None:
    config = refused_or(lambda: RunConfig.from_bytes(packed))
    assert config is None or config.to_bytes() == packed


@settings(max_examples=50, deadline=None)
@given(st.one_of(st.binary(max_size=100), anything.map(msgpack.packb), st.tuples(
    st.just("my-run-" + HASH.hex()[:12]), st.just(HASH), st.sampled_from([b"", HASH, b"x", None]),
    st.lists(st.text(max_size=90) | anything, max_size=40)).map(msgpack.packb)))
def test_bodies_of_join_strings_are_read_or_refused(body: bytes) -> None:
    join = refused_or(lambda: JoinString._from_body(body))
    assert join is None or JoinString.parse(str(join)) == join


@settings(max_examples=50, deadline=None)
@given(st.one_of(st.text(max_size=80), st.tuples(st.text(max_size=8), st.integers(-1, 10**6) | st.text(max_size=3)).map(
    lambda c: f"/ip4/{c[0]}/tcp/{c[1]}/p2p/12D3KooW{'1' * 44}")))
def test_what_passes_for_an_address_has_a_port_that_exists(text: str) -> None:
    if refused_or(lambda: check_address(text)) is not None:
        assert 0 <= int(text.split("/")[4]) <= 65535 and text.isascii() and text.isprintable()


# -- a member among strangers


def member() -> Member:
    """One of four that share a head, with a packet on its way to a leader."""
    fresh = Member(LAW, ME, TIP)
    fresh.set_roster([STRANGER.peer_id], 0.0)
    fresh.begin(kit.packet(LAW, kit.vector(LAW, 0)), 0.0)
    return fresh


def join_of(one: Member) -> tuple[bytes, Signed]:
    """Whom it asked to lead, and the HELLO it brought."""
    return next((to, Signed(record.hello, record.signature)) for to, record in one.outbox if isinstance(record, Join))




def empty_record(group: bytes, count: int, digest: bytes) -> SpanRecord:
    return SpanRecord(start=group, span=0, turn=0, digest=digest, counts=(count,) * N, reasons=(0,) * N, ratio_sum=0.0,
                      ratio_count=0)


@st.composite
def messages(draw: st.DrawFn, true: Signed) -> Record:
    """Any well-typed record, more often one that fits where the member stands."""
    kind = draw(st.sampled_from(list(KINDS.values())))
    payload = LAW.layout.encode(torch.zeros(LAW.layout.n_elements))
    at = st.integers(0, len(LAW.layout.parts))
    start = draw(st.just(true) | starts())
    group = draw(st.sampled_from([true.hash, true.hash, HASH]))
    if kind is Poll:
        return Poll(draw(heads), draw(ks), draw(st.integers(0, 2)))
    if kind is TipMessage:
        recent = tuple(draw(st.lists(heads, min_size=1, max_size=8)))
        leader = draw(peers.map(lambda p: p.peer_id) | st.binary(max_size=PEER_ID_BYTES))
        signed = st.builds(Waypoint.sign, peers, st.integers(1, 9), heads).map(Waypoint.pack)
        waypoint = draw(st.just(b"") | st.binary(max_size=Waypoint.MAX_BYTES) | signed)
        return TipMessage(draw(ks), recent, draw(st.integers(0, 2**60)), draw(st.integers(0, 2)), leader, waypoint)
    if kind is Join:
        hello = draw(hellos())
        return Join(draw(st.just(hello.body) | st.binary(min_size=1, max_size=256)), hello.signature, 9)
    if kind is StartMessage:
        body = draw(st.just(start.body) | st.binary(min_size=1, max_size=99))
        return StartMessage(body, draw(st.just(start.signature) | signatures))
    if kind is Parts:
        first, stop = sorted(draw(st.tuples(at, at)))
        data = draw(st.sampled_from([b"", b"x" * 100, bytes(LAW.layout.up_slice(payload, first, stop))]))
        return Parts(group, first, stop, data)
    if kind is Averaged:
        first, stop = sorted(draw(st.tuples(at, at)))
        size = LAW.layout.down_offsets[stop] - LAW.layout.down_offsets[first]
        return Averaged(group, draw(spans), draw(turns), first, stop, bytes(draw(st.sampled_from([0, 7, size]))))
    if kind is RecordMessage:
        span = draw(st.sampled_from(check_start(LAW, TIP, true).spans))
        record = empty_record(group, span.n_parts, draw(st.sampled_from([HASH, bytes(32)])))
        record = dataclasses.replace(record, span=draw(st.just(span.index) | spans), turn=draw(turns))
        candidates = check_start(LAW, TIP, true).candidates(span.index)
        signed = Signed.make(record, draw(st.just(by_peer(candidates[record.turn % N])) | peers))
        return RecordMessage(group, draw(st.just(signed.body) | st.binary(min_size=1, max_size=99)), signed.signature)
    if kind is Confirm:
        root = draw(st.sampled_from([HASH, bytes(32)]))
        who = draw(peers)
        return Confirm(group, who.peer_id, root, draw(st.just(sign_root(who, group, root)) | signatures))
    if kind is Abandon:
        return Abandon(group)
    if kind is Reassign:
        by = draw(peers)
        signed = Signed.make(Order(start=group, span=draw(spans), turn=draw(turns.filter(bool)), by=by.peer_id), by)
        return Reassign(group, draw(st.just(signed.body) | st.binary(min_size=1, max_size=99)), signed.signature)
    if kind is Proof:
        cheat, digests = draw(peers), [draw(st.sampled_from([HASH, bytes(32)])) for _ in range(2)]
        two = [Signed.make(empty_record(group, 1, digest), cheat) for digest in digests]
        return Proof(draw(peers).peer_id, tuple(one.body for one in two), tuple(one.signature for one in two))
    assert kind is Fetch
    return Fetch(group, draw(spans))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_member_survives_any_messages_in_any_order(data: st.DataObject) -> None:
    """From members and strangers, before and in an attempt, with breaks and time between; what it says can be packed."""
    one, now = member(), 0.0
    leader, hello = join_of(one)
    true = start_of([ME, *OTHERS], by_peer(leader), {ME.peer_id: hello})
    if data.draw(st.booleans()):
        one.deliver(leader, StartMessage(true.body, true.signature), now)
        assert one.attempt is not None
    for _ in range(data.draw(st.integers(1, 15))):
        sender = data.draw(peers.map(lambda p: p.peer_id).filter(lambda p: p != ME.peer_id))
        match data.draw(st.sampled_from(["message"] * 6 + ["gone", "time", "roster"])):
            case "message":
                one.deliver(sender, data.draw(messages(true)), now)
            case "gone":
                one.gone(sender, now)
            case "time":
                now += data.draw(st.sampled_from([0.0, 0.5, 1.0, 4.0, 30.0]))
                one.on_time(now)
            case "roster":
                one.set_roster([sender], now)
        for _, record in one.outbox:
            assert len(record.pack()) <= record.MAX_BYTES
        one.outbox = []
        one.waiting_for(now)
    assert len(one.outcomes) < 10


FLOOD = 1500


def flood(kind: str, i: int) -> Record:
    """The i-th message of a flood: all different, all well-typed, each as large as its kind allows where that is kept."""
    unique = hashlib.sha256(i.to_bytes(8, "big")).digest()
    match kind:
        case "polls":
            return Poll(unique, i, 1)
        case "tips":
            return TipMessage(5, (unique,) * 8, 2**60 - i, 1, unique, b"")
        case "joins":
            return Join(hello_of(kit.identity(1000 + i)).body, bytes(64), 1)
        case "starts of nobody":
            return StartMessage(b"\0" * 32_000 + unique, bytes(64))
        case "parts of no group":
            return Parts(unique, 0, 1, bytes(1000))
        case "parts of one group":
            return Parts(HASH, 0, 1, bytes(1000))
        case "confirms":
            return Confirm(unique, unique + b"peerid", unique, bytes(64))
        case "proofs of nothing":
            return Proof(unique + b"peerid", (unique * 60, b"\0"), (bytes(64),) * 2)
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["polls", "tips", "joins", "starts of nobody", "parts of no group", "parts of one group",
                                  "confirms", "proofs of nothing"])
@pytest.mark.parametrize("senders", [1, FLOOD])
def test_floods_leave_a_member_bounded(kind: str, senders: int) -> None:
    """What is kept after 1,500 messages of one stranger or of 1,500: early packets of EARLY_FACTOR, and 1 MB of all else."""
    one = member()
    sent = [flood(kind, i) for i in range(FLOOD)]
    names = [kit.identity(1000 + i).peer_id for i in range(senders)]
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for i, message in enumerate(sent):
            one.deliver(names[i % senders], dataclasses.replace(message), 0.1)
            one.outbox = []
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept <= 3 * (EARLY_FACTOR * LAW.layout.up_bytes + 2**20)
    assert len(one.outcomes) <= 1




@pytest.mark.parametrize("kind", [Parts, Averaged, RecordMessage, Confirm, Fetch, Reassign, Proof])
def test_floods_in_an_attempt_leave_a_member_bounded(kind: type[Record]) -> None:
    """Of members, who may say everything: kept are one packet each way of each, and 1 MB of all else."""
    one = member()
    leader, hello = join_of(one)
    true = start_of([ME, *OTHERS], by_peer(leader), {ME.peer_id: hello})
    one.deliver(leader, StartMessage(true.body, true.signature), 0.0)
    whole, start = len(LAW.layout.parts), check_start(LAW, TIP, true)

    def message(i: int) -> Record:
        unique = hashlib.sha256(i.to_bytes(8, "big")).digest()
        first = i % whole
        match kind.__name__:
            case "Parts":
                size = LAW.layout.up_offsets[first + 1] - LAW.layout.up_offsets[first]
                return Parts(true.hash, first, first + 1, bytes(size))
            case "Averaged":
                size = LAW.layout.down_offsets[first + 1] - LAW.layout.down_offsets[first]
                return Averaged(true.hash, i % N, i % 64, first, first + 1, bytes(size))
            case "RecordMessage":
                return RecordMessage(true.hash, unique * 60, bytes(64))
            case "Confirm":
                who = OTHERS[i // whole % len(OTHERS)]
                return Confirm(true.hash, who.peer_id, unique, sign_root(who, true.hash, unique))
            case "Reassign":
                by = OTHERS[i // whole % len(OTHERS)]
                order = Signed.make(Order(start=true.hash, span=i % len(start.spans), turn=1 + i % (N - 1), by=by.peer_id), by)
                return Reassign(true.hash, order.body, order.signature)
            case "Proof":
                return Proof(unique + b"peerid", (unique * 60, b"\0"), (bytes(64),) * 2)
        return Fetch(true.hash, i % N)

    sent = [message(i) for i in range(FLOOD)]
    one.outbox = []
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for i, record in enumerate(sent):
            one.deliver(OTHERS[i // whole % len(OTHERS)].peer_id, record, 0.1)
            one.outbox = []
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept <= N * (LAW.layout.up_bytes + LAW.layout.down_bytes) + 2**20
