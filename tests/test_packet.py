"""Parts, spans and the reducer: everything once, in fair shares, and a bad member costs only itself."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import SHAPES, established, identity, law, packet, vector, weight_by_hand

from p2p_muloco.chain import (
    BROKE_RULE,
    COUNTED,
    TOO_LATE,
    VANISHED,
    CheckedStart,
    Hello,
    Law,
    Signed,
    Start,
    check_record,
    check_start,
)
from p2p_muloco.errors import BadPacket
from p2p_muloco.merge import iso_c
from p2p_muloco.packet import Layout, plan_spans
from p2p_muloco.reduce import SpanReducer

LAWS = [law(), law(method="iso_c"), law(up="topk", down="fp16"), law({"w": (3, 5000), "x": (7,), "y": (2, 3, 400)})]


@pytest.mark.parametrize("run_law", LAWS)
def test_parts_cover_each_element_once_and_are_cut_at_rows(run_law: Law) -> None:
    layout, at = run_law.layout, 0
    tensors = {name: (i, shape, place) for i, (name, shape, place) in enumerate(layout.tensor_slices())}
    for part in layout.parts:
        assert part.start == at < part.stop
        at = part.stop
        tensor, shape, place = tensors[layout.names[part.tensor]]
        assert tensor == part.tensor and place.start <= part.start < part.stop <= place.stop
        row = math.prod(shape[1:])
        assert (part.start - place.start) % row == 0 and (part.stop - place.start) % row == 0
        assert part.size <= max(run_law.config.codec.part_elements, row)
    assert at == layout.n_elements == sum(math.prod(shape) for shape in layout.shapes)


@pytest.mark.parametrize("run_law", LAWS)
def test_tiny_tensors_travel_uncompressed_and_encoding_is_sized_exactly(run_law: Law) -> None:
    layout, x = run_law.layout, vector(run_law, 1)
    payload = layout.encode(x)
    assert len(payload) == layout.up_bytes
    for i, (part, data) in enumerate(zip(layout.parts, layout.up_parts(0, len(layout.parts), payload), strict=True)):
        tiny = len(layout.shapes[part.tensor]) < 2 or math.prod(layout.shapes[part.tensor]) < 1024
        assert (part.up.name == "fp32") == tiny
        values = layout.decode_up(i, data)
        lost = (values - x[part.start : part.stop]).norm() / x[part.start : part.stop].norm()
        assert lost <= part.up.contraction
        assert part.up.encode(values) == bytes(data) or not tiny
        assert bytes(layout.up_slice(payload, i, i + 1)) == bytes(data)


def test_frames_cover_the_parts_and_keep_to_their_size() -> None:
    layout = law().layout
    for first, stop, size in itertools.product((0, 2), (3, len(layout.parts)), (1, 2000, 10**6)):
        frames = list(layout.frames(layout.up_offsets, first, stop, size))
        assert [at for frame in frames for at in range(*frame)] == list(range(first, stop))
        assert all(b - a == 1 or layout.up_offsets[b] - layout.up_offsets[a] <= size for a, b in frames)


def test_parts_that_do_not_fit_their_bytes_are_refused() -> None:
    layout = law().layout
    for first, stop, n in ((0, 1, 3), (1, 1, 0), (2, 1, 0), (0, 99, 10), (5, 6, layout.up_bytes)):
        with pytest.raises(BadPacket):
            layout.up_parts(first, stop, bytes(n))


reducers = st.lists(st.integers(1, 10**7), min_size=1, max_size=20)


@settings(max_examples=150, deadline=None)
@given(reducers, st.sampled_from(LAWS), st.binary(min_size=32, max_size=32), st.randoms(use_true_random=False))
def test_plan_spans(rates: list[int], run_law: Law, head: bytes, rng) -> None:
    layout, rows = run_law.layout, [(identity(i).peer_id, rate) for i, rate in enumerate(rates)]
    spans = plan_spans(layout, rows, head)
    assert [s.index for s in spans] == list(range(len(spans)))
    assert [at for s in spans for at in range(s.first, s.stop)] == list(range(len(layout.parts)))
    assert len({s.reducer for s in spans}) == len(spans) and {s.reducer for s in spans} <= {peer for peer, _ in rows}
    borders = {first for first, _ in layout.pieces} | {len(layout.parts)}
    assert all({s.first, s.stop} <= borders for s in spans)
    sizes = {s.reducer: layout.up_offsets[s.stop] - layout.up_offsets[s.first] for s in spans}
    largest = max(layout.up_offsets[b] - layout.up_offsets[a] for a, b in layout.pieces)
    assert max(sizes.values()) <= max(2 / len(rows) * layout.up_bytes, largest) + largest
    if max(rates) * len(rates) <= 2 * sum(rates):  # nobody is capped: shares are the rates', within one piece
        for peer, rate in rows:
            assert abs(sizes.get(peer, 0) - layout.up_bytes * rate / sum(rates)) <= largest + 1
    rng.shuffle(rows)
    assert plan_spans(layout, rows, head) == spans


def test_one_fast_reducer_among_many_is_capped() -> None:
    """1e7 to 1: eight halvings were not enough."""
    layout = law({f"t{i:03d}": (64,) for i in range(180)}).layout
    for n in (3, 5, 9, 20):
        rows = [(identity(i).peer_id, 10**7 if i == 0 else 1) for i in range(n)]
        share = max(s.n_parts for s in plan_spans(layout, rows, bytes(32)) if s.reducer == rows[0][0])
        assert share <= 2 / n * 180 + 1


def test_one_reducer_takes_all_and_more_reducers_than_pieces_leave_some_out() -> None:
    layout = law().layout
    (span,) = plan_spans(layout, [(identity(1).peer_id, 7)], bytes(32))
    assert (span.first, span.stop) == (0, len(layout.parts))
    many = [(identity(i).peer_id, 1000) for i in range(64)]
    assert len(plan_spans(layout, many, bytes(32))) <= len(layout.pieces)
    assert len({plan_spans(layout, many, bytes([i]) * 32)[0].reducer for i in range(20)}) > 5


def test_spectral_merges_get_whole_matrices() -> None:
    layout = law(method="isoloco").layout
    runs = {layout.names[layout.parts[first].tensor]: stop - first for first, stop in layout.pieces}
    assert layout.parts[layout.pieces[1][0]].flattened
    for first, stop in layout.pieces:
        tensors = {layout.parts[at].tensor for at in range(first, stop)}
        assert len(tensors) == 1
    assert runs["blocks.0.attention.q.weight"] == 3  # 48 rows of 64, 16 a part


# -- the reducer of a span


def started(run_law: Law, h: tuple[int, ...]) -> CheckedStart:
    """A START whose only node, and so only reducer, is the leader."""
    who = sorted((identity(i) for i in range(len(h))), key=lambda one: one.peer_id)
    tip = established(run_law, len(h))
    hellos = [Signed.make(Hello(peer=one.peer_id, head=tip.head, k=2, h=steps, pace_mhz=1, client=int(one is not who[0]),
                                digest=bytes(32), state=bytes(32)), one) for one, steps in zip(who, h, strict=True)]
    start = Start(leader=who[0].peer_id, head=tip.head, k=2, attempt=0, hellos=tuple(s.body for s in hellos),
                  signatures=tuple(s.signature for s in hellos), modes=(1, *[0] * (len(h) - 1)), rates=(1,) * len(h),
                  scatter_ms=1, gather_ms=1, confirm_ms=1)
    return check_start(run_law, tip, Signed.make(start, who[0]))


def reduced(run_law: Law, h: tuple[int, ...]) -> tuple[SpanReducer, list[torch.Tensor]]:
    start = started(run_law, h)
    return SpanReducer(run_law, start, start.spans[0]), [vector(run_law, i) for i in range(len(h))]


def feed(reducer: SpanReducer, member: int, payload: bytes, first: int = 0, stop: int | None = None) -> None:
    layout = reducer.law.layout
    stop = len(layout.parts) if stop is None else stop
    reducer.add(member, first, stop, layout.up_slice(payload, first, stop))


def result(reducer: SpanReducer) -> torch.Tensor:
    layout, data = reducer.law.layout, b"".join(reducer.averaged)
    parts = layout.down_parts(0, len(layout.parts), data)
    return torch.cat([layout.decode_down(at, piece) for at, piece in enumerate(parts)])


FLAT = law(up="fp32", down="fp32")


def test_equal_h_is_the_plain_mean() -> None:
    reducer, xs = reduced(FLAT, (8, 8, 8, 8))
    for member in (2, 0, 3, 1):
        feed(reducer, member, FLAT.layout.encode(xs[member]))
    assert reducer.finished
    assert torch.equal(result(reducer), (xs[0] + xs[1] + xs[2] + xs[3]) * 0.25)
    assert reducer.record(bytes(32)).counts == (len(FLAT.layout.parts),) * 4


def test_a_slow_member_weighs_by_its_steps() -> None:
    """h = 8, 8, 8, 1: tau = 193/25, so each sum is taken 7.72/25 = 0.3088 times."""
    reducer, xs = reduced(FLAT, (8, 8, 8, 1))
    for member, x in enumerate(xs):
        feed(reducer, member, FLAT.layout.encode(x))
    torch.testing.assert_close(result(reducer), sum(xs) * 0.3088, rtol=1e-6, atol=1e-8)
    assert weight_by_hand((8, 8, 8, 1), 8) == pytest.approx(0.3088)


def test_tau_is_at_most_twice_h() -> None:
    assert weight_by_hand((32, 32), 8) == 16 / 64
    reducer, xs = reduced(FLAT, (32, 32))
    for member, x in enumerate(xs):
        feed(reducer, member, FLAT.layout.encode(x))
    assert torch.equal(result(reducer), (xs[0] + xs[1]) * 0.25)


@pytest.mark.parametrize("reason", [VANISHED, TOO_LATE])
def test_a_member_closed_early_is_counted_in_leading_parts_only(reason: int) -> None:
    reducer, xs = reduced(FLAT, (8, 8))
    layout = FLAT.layout
    feed(reducer, 0, layout.encode(xs[0]))
    feed(reducer, 1, layout.encode(xs[1]), 0, 2)
    feed(reducer, 1, layout.encode(xs[1]), 4, 5)  # part 2 and 3 are missing, so this one is not counted either
    assert not reducer.finished and reducer.missing() == [1]
    reducer.close(1, reason)
    assert reducer.finished
    record = reducer.record(bytes(32))
    assert record.counts == (len(layout.parts), 2) and record.reasons == (COUNTED, reason)
    border = layout.parts[1].stop
    d = result(reducer)
    assert torch.equal(d[:border], (xs[0] + xs[1])[:border] * 0.5) and torch.equal(d[border:], xs[0][border:])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, 2e6])
@pytest.mark.parametrize("at_part", [0, 3])
def test_bad_values_of_a_member_cost_only_that_member(value: float, at_part: int) -> None:
    reducer, xs = reduced(FLAT, (8, 8, 8))
    layout = FLAT.layout
    payload = bytearray(layout.encode(xs[1]))
    at = layout.up_offsets[at_part]
    payload[at : at + 4] = torch.tensor([value]).numpy().tobytes()
    for member, bytes_ in ((1, bytes(payload)), (0, layout.encode(xs[0])), (2, layout.encode(xs[2]))):
        feed(reducer, member, bytes_)
    record = reducer.record(bytes(32))
    assert record.counts == (len(layout.parts), at_part, len(layout.parts))
    assert record.reasons == (COUNTED, BROKE_RULE, COUNTED)
    start = layout.parts[at_part].start
    assert torch.equal(result(reducer)[start:], ((xs[0] + xs[2]) * 0.5)[start:])
    assert result(reducer).isfinite().all()


def test_bytes_that_do_not_fit_raise_and_repeats_change_nothing() -> None:
    reducer, xs = reduced(FLAT, (8, 8))
    layout, n = FLAT.layout, len(FLAT.layout.parts)
    for first, stop, size in ((0, 1, 5), (n - 1, n + 1, 10), (1, 1, 0), (3, 2, 0)):
        with pytest.raises(BadPacket):
            reducer.add(1, first, stop, bytes(size))
    for _ in range(2):
        feed(reducer, 1, layout.encode(xs[1]))
        feed(reducer, 1, layout.encode(xs[0]))  # its second version of a part is not taken
        feed(reducer, 0, layout.encode(xs[0]))
    assert torch.equal(result(reducer), (xs[0] + xs[1]) * 0.5)
    taken = reducer.take()
    assert [at for first, stop, _ in taken for at in range(first, stop)] == list(range(n)) and not reducer.take()


def test_parts_in_any_order_give_the_same_bytes() -> None:
    run_law, results = law(), []
    for order in ((0, 1, 2), (2, 1, 0)):
        reducer, xs = reduced(run_law, (8, 5, 3))
        n = len(run_law.layout.parts)
        for member in order:
            for at in range(n) if order[0] == 0 else reversed(range(n)):
                feed(reducer, member, run_law.layout.encode(xs[member]), at, at + 1)
        results.append(b"".join(reducer.averaged))
    assert results[0] == results[1]


def test_iso_c_merges_whole_matrices_of_the_mean() -> None:
    run_law = law(method="iso_c", up="fp32", down="fp32")
    reducer, xs = reduced(run_law, (8, 8))
    for member, x in enumerate(xs):
        feed(reducer, member, run_law.layout.encode(x))
    d, mean = result(reducer), (xs[0] + xs[1]) * 0.5
    for name, shape, place in run_law.layout.tensor_slices():
        whole = mean[place].view(shape)
        wanted = iso_c(whole) if name.startswith("blocks") and len(shape) == 2 else whole
        torch.testing.assert_close(d[place].view(shape), wanted)
    assert reducer.ratio_count == 2 and 0 < reducer.ratio_sum < 2


def test_a_record_of_nobody_is_refused() -> None:
    reducer, xs = reduced(FLAT, (8, 8))
    feed(reducer, 0, FLAT.layout.encode(xs[0]))
    reducer.close(1, VANISHED)
    start = reducer.start
    record = reducer.record(bytes(32))
    who = next(identity(i) for i in range(2) if identity(i).peer_id == start.start.leader)
    assert check_record(start, Signed.make(record, who)) == record
    with pytest.raises(BadPacket, match="counts"):
        check_record(start, Signed.make(dataclasses.replace(record, counts=(0, 0)), who))


def test_a_packet_digest_names_its_payload() -> None:
    run_law = law()
    one, two = (packet(run_law, vector(run_law, seed)) for seed in (1, 2))
    assert one.digest != two.digest and one == packet(run_law, vector(run_law, 1))


def test_layout_is_a_pure_function_of_shapes_and_law() -> None:
    run_law = law()
    assert Layout(SHAPES, run_law.config).parts == run_law.layout.parts
