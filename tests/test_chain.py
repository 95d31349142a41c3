"""Heads, counts, clock and fork choice by hand; every single tampering with an entry is refused."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable

import msgpack
import pytest
from kit import VECTORS, Driver, Swarm, assert_agree, established, identity, law

from p2p_muloco.chain import (
    AGAINST,
    BAN_ENTRIES,
    BROKE_RULE,
    Checked,
    Entry,
    Hello,
    Law,
    Signed,
    SpanRecord,
    Start,
    Tip,
    advance,
    check_entry,
    heavier,
    leader_order,
    merged_update,
    root_of,
    sign_root,
)
from p2p_muloco.errors import BadPacket
from p2p_muloco.identity import Identity
from p2p_muloco.snapshot import state_digest

WHO = sorted((identity(i) for i in range(3)), key=lambda who: who.peer_id)


def committed(run_law: Law, n: int = 3, entries: int = 1, h: tuple[int, ...] = (8, 8, 8)) -> tuple[Driver, Tip]:
    tip = established(run_law, n)
    driver = Driver(Swarm(run_law, n, h=h, tip=tip))
    assert driver.run(tip.k + entries, 60.0)
    assert_agree(driver)
    return driver, tip


@pytest.fixture(scope="module")
def case() -> tuple[Law, Tip, Checked]:
    run_law = law(VECTORS)
    driver, tip = committed(run_law)
    return run_law, tip, driver.peers[0].entries[2]


def test_heads_by_hand(case: tuple[Law, Tip, Checked]) -> None:
    run_law, tip, checked = case
    assert run_law.genesis.head == hashlib.sha256(run_law.config.hash).digest()
    records = b"".join(hashlib.sha256(signed.body).digest() for signed in checked.entry.records)
    start = hashlib.sha256(checked.entry.start.body).digest()
    assert checked.head == hashlib.sha256(tip.head + start + hashlib.sha256(records).digest()).digest()


def signed_by(record: Start | Hello | SpanRecord, peer: bytes) -> Signed:
    return Signed.make(record, next(who for who in WHO if who.peer_id == peer))


def restarted(checked: Checked, **changes: object) -> Entry:
    """The entry with a changed START that its leader signed, all records made to fit it."""
    start = dataclasses.replace(checked.start.start, **changes)
    signed = signed_by(start, start.leader)
    records = []
    for span, record in zip(checked.start.spans, checked.records, strict=True):
        records.append(signed_by(dataclasses.replace(record, start=signed.hash), span.reducer))
    return confirmed(Entry(signed, tuple(records), checked.entry.data, ()))


def confirmed(entry: Entry, *members: int, by: tuple[Identity, ...] = ()) -> Entry:
    """The entry with what its members (all, or those of these indices) sign of it."""
    who = by or tuple(WHO)
    root = root_of(entry.records)
    confirms = tuple((i, sign_root(who[i], entry.start.hash, root)) for i in members or range(3))
    return dataclasses.replace(entry, confirms=confirms)


def rerecorded(checked: Checked, index: int = 0, signer: Identity | None = None, **changes: object) -> Entry:
    record = dataclasses.replace(checked.records[index], **changes)
    reducer = checked.start.spans[index].reducer
    signed = Signed.make(record, signer) if signer else signed_by(record, reducer)
    records = list(checked.entry.records)
    records[index] = signed
    return confirmed(dataclasses.replace(checked.entry, records=tuple(records)))


def rehelloed(checked: Checked, index: int = 0, **changes: object) -> Entry:
    hello = dataclasses.replace(checked.start.hellos[index], **changes)
    signed = signed_by(hello, WHO[index].peer_id)
    start = checked.start.start
    hellos = (*start.hellos[:index], signed.body, *start.hellos[index + 1 :])
    return restarted(checked, hellos=hellos, signatures=(*start.signatures[:index], signed.signature,
                                                         *start.signatures[index + 1 :]))


def other_signer(checked: Checked) -> Identity:
    return next(who for who in WHO if who.peer_id != checked.start.spans[0].reducer)


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def swapped(items: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return (items[1], items[0], *items[2:])


TAMPERINGS: dict[str, Callable[[Checked], Entry]] = {
    "START signature": lambda c: dataclasses.replace(
        c.entry, start=Signed(c.entry.start.body, flipped(c.entry.start.signature))),
    "START signed by another": lambda c: dataclasses.replace(c.entry, start=signed_by(
        c.start.start, next(p for p in c.start.members if p != c.start.start.leader))),
    "leader is no member": lambda c: restarted_by(c, identity(50)),
    "HELLO signature": lambda c: restarted(
        c, signatures=(flipped(c.start.start.signatures[0]), *c.start.start.signatures[1:])),
    "HELLO swapped signatures": lambda c: restarted(c, signatures=swapped(c.start.start.signatures)),
    "START head": lambda c: restarted(c, head=bytes(32)),
    "START k": lambda c: restarted(c, k=3),
    "HELLO head": lambda c: rehelloed(c, head=bytes(32)),
    "HELLO k": lambda c: rehelloed(c, k=1),
    "HELLO h over the law": lambda c: rehelloed(c, h=33),
    "unsorted members": lambda c: restarted(
        c, hellos=swapped(c.start.start.hellos), signatures=swapped(c.start.start.signatures)),
    "a member twice": lambda c: restarted(
        c, hellos=(c.start.start.hellos[0], *c.start.start.hellos[:2]),
        signatures=(c.start.start.signatures[0], *c.start.start.signatures[:2])),
    "too few modes": lambda c: restarted(c, modes=c.start.start.modes[1:]),
    "too few rates": lambda c: restarted(c, rates=c.start.start.rates[1:]),
    "deadlines out of order": lambda c: restarted(c, scatter_ms=10**6),
    "rates that move the spans": lambda c: restarted(c, rates=(10**6, 1, 1)),
    "counts too small for anybody": lambda c: rerecorded(c, counts=(0, 0, 0)),
    "counts beyond the span": lambda c: rerecorded(c, counts=(99, 1, 1)),
    "counts of two members": lambda c: rerecorded(c, counts=c.records[0].counts[1:]),
    "reasons of two members": lambda c: rerecorded(c, reasons=c.records[0].reasons[1:]),
    "record of another group": lambda c: rerecorded(c, start=bytes(32)),
    "record of another span": lambda c: rerecorded(c, span=1),
    "record of a span that is not": lambda c: rerecorded(c, span=9),
    "record signed by another": lambda c: rerecorded(c, signer=other_signer(c)),
    "wrong digest": lambda c: rerecorded(c, digest=bytes(32)),
    "wrong data": lambda c: dataclasses.replace(c.entry, data=(flipped(c.entry.data[0]), *c.entry.data[1:])),
    "swapped data": lambda c: dataclasses.replace(c.entry, data=swapped(c.entry.data)),
    "swapped records": lambda c: confirmed(dataclasses.replace(c.entry, records=c.entry.records[::-1])),
    "swapped spans": lambda c: confirmed(dataclasses.replace(
        c.entry, records=c.entry.records[::-1], data=c.entry.data[::-1])),
    "a span too few": lambda c: confirmed(dataclasses.replace(c.entry, records=c.entry.records[1:], data=c.entry.data[1:])),
    "record of a turn nobody has": lambda c: rerecorded(c, turn=9),
    "record of another's turn": lambda c: rerecorded(c, turn=1),
    "confirmed by nobody": lambda c: dataclasses.replace(c.entry, confirms=()),
    "confirmed by one of three": lambda c: confirmed(c.entry, 0),
    "confirmed by one of three, twice": lambda c: confirmed(c.entry, 0, 0),
    "confirmed out of order": lambda c: confirmed(c.entry, 1, 0),
    "confirmed by a stranger": lambda c: confirmed(c.entry, by=(WHO[0], WHO[1], identity(50))),
    "confirmed by a member that is not": lambda c: confirmed(c.entry, 0, 1, 3, by=(*WHO, WHO[0])),
    "another root is confirmed": lambda c: dataclasses.replace(c.entry, confirms=tuple(
        (i, sign_root(who, c.start.group, bytes(32))) for i, who in enumerate(WHO))),
    "data too few": lambda c: dataclasses.replace(c.entry, data=c.entry.data[1:]),
    "not a number, signed": lambda c: nan_signed(c),
}


def restarted_by(checked: Checked, who: Identity) -> Entry:
    start = dataclasses.replace(checked.start.start, leader=who.peer_id)
    return dataclasses.replace(checked.entry, start=Signed.make(start, who))


def nan_signed(checked: Checked) -> Entry:
    data = b"\xff" * len(checked.entry.data[0])
    entry = rerecorded(checked, digest=hashlib.sha256(data).digest())
    return dataclasses.replace(entry, data=(data, *entry.data[1:]))


@pytest.mark.parametrize("name", TAMPERINGS)
def test_check_entry_refuses(case: tuple[Law, Tip, Checked], name: str) -> None:
    run_law, tip, checked = case
    assert check_entry(run_law, tip, restarted(checked)).entry.data == checked.entry.data  # the helpers are sound
    with pytest.raises(BadPacket):
        check_entry(run_law, tip, TAMPERINGS[name](checked))


def test_check_entry_refuses_an_entry_of_another_tip_or_run(case: tuple[Law, Tip, Checked]) -> None:
    run_law, tip, checked = case
    with pytest.raises(BadPacket, match="another head"):
        check_entry(run_law, advance(run_law, tip, checked), checked.entry)
    with pytest.raises(BadPacket):
        check_entry(law({**VECTORS, "a": (90,)}), tip, checked.entry)


def test_the_first_entry_needs_min_peers_and_no_entry_more_than_max_group() -> None:
    run_law = law(VECTORS)
    driver = Driver(Swarm(run_law, 2))
    assert driver.run(1, 60.0)
    stricter = dataclasses.replace(run_law, config=law(VECTORS, min_peers=3).config)
    with pytest.raises(BadPacket, match="the run asks for 3"):
        check_entry(stricter, run_law.genesis, driver.peers[0].entries[1].entry)
    smaller = dataclasses.replace(run_law, config=law(VECTORS, max_group=1).config)
    with pytest.raises(BadPacket, match="too many"):
        check_entry(smaller, run_law.genesis, driver.peers[0].entries[1].entry)


def paced(run_law: Law, tip: Tip, checked: Checked, paces: tuple[int, ...]) -> Tip:
    hellos = tuple(dataclasses.replace(h, pace_mhz=p) for h, p in zip(checked.start.hellos, paces, strict=True))
    start = dataclasses.replace(checked.start, hellos=hellos)
    return advance(run_law, tip, dataclasses.replace(checked, start=start))


def test_the_tip_by_hand() -> None:
    """Four parts, one span each of two members' counts (4 of 4) and (1 of 4): tokens by parts, weight by members."""
    run_law = law(VECTORS)
    driver, tip = committed(run_law, h=(8, 6, 3))
    checked = driver.peers[0].entries[2]
    spans = tuple(dataclasses.replace(span, first=at, stop=stop)
                  for span, (at, stop) in zip(checked.start.spans[:2], ((0, 1), (1, 4)), strict=True))
    hs = [hello.h for hello in checked.start.hellos]
    records = (dataclasses.replace(checked.records[0], counts=(1, 1, 0)),
               dataclasses.replace(checked.records[1], counts=(3, 0, 0)))
    partial = Checked(checked.entry, dataclasses.replace(checked.start, spans=spans), records, b"\x09" * 32)
    after = advance(run_law, tip, partial)
    tokens_a_step = run_law.config.inner.batch_size * run_law.config.model.seq_len
    assert after.last_tokens == hs[0] * tokens_a_step * 4 // 4 + hs[1] * tokens_a_step * 1 // 4
    assert after.tokens == tip.tokens + after.last_tokens
    assert after.weight == tip.weight + hs[0] + hs[1]
    assert after.members == (WHO[0].peer_id, WHO[1].peer_id)
    assert (after.k, after.head, after.recent) == (2, b"\x09" * 32, (*tip.recent, b"\x09" * 32))


@pytest.mark.parametrize(
    "paces,last_ms,period_ms",
    [
        ((1000, 1000, 1000), 0, 8000),  # 8 steps at one a second
        ((500, 1000, 4000), 0, 8000),  # the median of three
        ((1000, 1000, 1000), 10_000, 8000),
        ((1000, 1000, 1000), 3000, 6000),  # at most twice the last
        ((1000, 1000, 1000), 20_000, 10_000),  # at least half of it
        ((3, 3, 3), 0, 2_666_666),
        ((10**9, 10**9, 10**9), 0, 1),
    ],
)
def test_the_clock_by_hand(case: tuple[Law, Tip, Checked], paces: tuple[int, ...], last_ms: int, period_ms: int) -> None:
    run_law, tip, checked = case
    assert paced(run_law, dataclasses.replace(tip, period_ms=last_ms), checked, paces).period_ms == period_ms


def test_the_median_of_an_even_number_is_the_lower() -> None:
    run_law = law(VECTORS)
    driver, tip = committed(run_law, n=2, h=(8, 8))
    fresh = dataclasses.replace(tip, period_ms=0)
    assert paced(run_law, fresh, driver.peers[0].entries[2], (1000, 4000)).period_ms == 8000


def test_fork_choice() -> None:
    a, b = b"\x01" * 32, b"\x02" * 32
    assert heavier(2, b, 1, a) and not heavier(1, a, 2, b)
    assert heavier(1, a, 1, b) and not heavier(1, b, 1, a)
    assert not heavier(1, a, 1, a)


def test_leader_order_is_a_shuffle_by_head_of_distinct_peers() -> None:
    peers = [identity(i).peer_id for i in range(5)]
    orders = {tuple(leader_order(bytes([i]) * 32, [*peers, *peers])) for i in range(20)}
    assert all(sorted(order) == sorted(peers) for order in orders) and len(orders) > 10
    assert leader_order(b"x", peers[::-1]) == leader_order(b"x", peers)


def test_entry_and_tip_round_trip(case: tuple[Law, Tip, Checked]) -> None:
    run_law, tip, checked = case
    packed = checked.entry.pack()
    assert Entry.unpack(packed, len(packed)) == checked.entry
    after = advance(run_law, tip, checked)
    assert Tip.unpack(after.pack()) == after
    with pytest.raises(BadPacket, match="at most"):
        Entry.unpack(packed, len(packed) - 1)
    for bad in (dataclasses.replace(after, head=bytes(32)), dataclasses.replace(after, members=after.members[::-1])):
        with pytest.raises(BadPacket):
            Tip.unpack(bad.pack())


def test_a_number_in_the_place_of_bytes_allocates_nothing(case: tuple[Law, Tip, Checked]) -> None:
    """bytes(2**40) would ask for a terabyte."""
    entry = case[2].entry
    rows = [(r.body, r.signature) for r in entry.records]
    for bad in ((2**40, entry.start.signature, rows, entry.data, ()), (entry.start.body, b"", rows, [2**40], ()),
                (entry.start.body, b"", [(2**40, 2**40)], entry.data, ()),
                (entry.start.body, b"", rows, entry.data, [(0, 2**40)]), (entry.start.body, b"", rows, entry.data, [(b"", b"")]),
                (entry.start.body, b"", rows, entry.data, 2**40)):
        with pytest.raises(BadPacket):
            Entry.unpack(msgpack.packb(bad), 10**6)


def test_replay_gives_equal_heads_and_equal_states() -> None:
    """From packed entries alone, at another peer."""
    run_law = law(min_peers=2)
    driver = Driver(Swarm(run_law, 3))
    assert driver.run(3, 60.0)
    assert_agree_on_bytes = [driver.peers[i].entries for i in range(3)]
    fresh = Driver(Swarm(run_law, 1)).peers[0]
    for k in (1, 2, 3):
        packed = assert_agree_on_bytes[k - 1][k].entry.pack()
        fresh.apply(run_law, check_entry(run_law, fresh.tip, Entry.unpack(packed, 10**6)))
    assert fresh.tip == driver.peers[0].tip
    assert {state_digest(p.anchor, p.momentum) for p in driver.peers} == {state_digest(fresh.anchor, fresh.momentum)}


@pytest.mark.parametrize("method", ["nesterov", "iso_c", "isoloco"])
def test_merged_update_scales_what_takes_the_ratio(method: str) -> None:
    run_law = law(method=method, up="fp32", down="fp32", min_peers=2)
    driver = Driver(Swarm(run_law, 2))
    assert driver.run(1, 60.0)
    checked = driver.peers[0].entries[1]
    d = merged_update(run_law, checked)
    mean = (driver.x(0, 1) + driver.x(1, 1)) * 0.5
    scaled = [part for part in run_law.layout.parts if part.scaled]
    assert bool(scaled) == (method != "nesterov")
    ratios = [d[p.start : p.stop].norm() / mean[p.start : p.stop].norm() for p in scaled]
    assert all(0.3 < ratio < 1.0 for ratio in ratios)  # flattening keeps the nuclear norm, so the Frobenius norm shrinks


def judged(checked: Checked, reasons: dict[int, dict[int, int]]) -> Checked:
    """The entry in which reducer (by index among the members) gives members these reasons."""
    records = []
    for span, record in zip(checked.start.spans, checked.records, strict=True):
        said = reasons.get(checked.start.members.index(span.reducer), {})
        records.append(dataclasses.replace(record, reasons=tuple(said.get(i, r) for i, r in enumerate(record.reasons))))
    return dataclasses.replace(checked, records=tuple(records))


@pytest.mark.parametrize("why", [BROKE_RULE, AGAINST])
def test_a_ban_takes_two_reducers_and_most_of_them(case: tuple[Law, Tip, Checked], why: int) -> None:
    run_law, tip, checked = case
    liar = checked.start.members[2]
    banned = advance(run_law, tip, judged(checked, {0: {2: why}, 1: {2: why}, 2: {0: why, 1: why}}))
    assert banned.bans() == {liar: (tip.k + 1 + BAN_ENTRIES, why)}
    assert Tip.unpack(banned.pack()) == banned
    for few in ({0: {2: why}}, {2: {0: why, 1: why}}, {0: {1: why, 2: why}}, {}):
        assert advance(run_law, tip, judged(checked, few)).bans() == {}


def test_a_ban_ends_after_its_entries_and_start_respects_it(case: tuple[Law, Tip, Checked]) -> None:
    run_law, tip, checked = case
    out = dataclasses.replace(tip, banned=(WHO[2].peer_id,), banned_until=(tip.k + 1,), banned_why=(AGAINST,))
    with pytest.raises(BadPacket, match="takes no part"):
        check_entry(run_law, out, checked.entry)
    assert advance(run_law, out, checked).bans() == {}  # the entry after its last one is open to it
    longer = dataclasses.replace(out, banned_until=(tip.k + 2,))
    assert advance(run_law, longer, checked).bans() == {WHO[2].peer_id: (tip.k + 2, AGAINST)}


def test_a_banned_member_is_left_out_and_comes_back() -> None:
    run_law = law(VECTORS)
    tip = established(run_law, 3)
    out = dataclasses.replace(tip, banned=(WHO[0].peer_id,), banned_until=(tip.k + 2,), banned_why=(BROKE_RULE,))
    driver = Driver(Swarm(run_law, 3, tip=out))
    assert driver.run(tip.k + 3, 200.0)
    for member, peer in zip(driver.swarm.members, driver.peers, strict=True):  # the others train for a while
        peer.retry_at = driver.network.now + (0.0 if member.me == WHO[0].peer_id else 1.5)
    assert driver.run(tip.k + 4, 200.0)
    entries = driver.peers[0].entries
    assert [len(entries[tip.k + i].counted) for i in (1, 2)] == [2, 2] and len(entries[tip.k + 4].counted) == 3
    banned = next(m for m in driver.swarm.members if m.me == WHO[0].peer_id)
    assert banned.tip.head == driver.peers[1].tip.head


def test_who_takes_over_a_span_is_known_to_all(case: tuple[Law, Tip, Checked]) -> None:
    _, _, checked = case
    for span in checked.start.spans:
        candidates = checked.start.candidates(span.index)
        assert candidates[0] == span.reducer and sorted(candidates) == sorted(checked.start.members)
