"""Reports: who is named in them, and that they stay small."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_muloco.chain import Signed
from p2p_muloco.errors import BadPacket
from p2p_muloco.identity import Identity
from p2p_muloco.opinion import WHY
from p2p_muloco.reports import MAX_NAMED, Named, Report, Said, pack_report, read_report, said_of, with_named

PEERS = [Identity(bytes([i]) * 32) for i in range(6)]
IDS = [identity.peer_id for identity in PEERS]
names = st.builds(Named, st.sampled_from(IDS), st.integers(0, len(WHY) - 1), st.integers(0, 2**40))


def report(sender: int = 0, *named: Named) -> Report:
    short = Report(run_id="r-000000000000", peer=IDS[sender], name="n", k=1, head=b"h" * 32, inner_steps=1, tokens_total=1,
                   tokens_per_s=1.0, loss=1.0, client=0, device="cpu", version="0.1.0", at_s=1, named=(), named_why=(),
                   named_round=())
    return with_named(short, named)


LONGEST = replace(report(), run_id="r" * 48, name="n" * 32, k=2**40, inner_steps=2**50, tokens_total=2**60, device="d" * 48,
                  version="v" * 16, at_s=2**40)


@given(st.lists(names, max_size=5), st.sampled_from(["n" * 32, "\u00fc" * 32, "\U0001f427" * 32, ""]))
def test_a_report_with_names_is_read_and_within_its_size(named: list[Named], name: str) -> None:
    full = with_named(replace(LONGEST, name=name), named)
    assert read_report(pack_report(Signed.make(full, PEERS[0]))) == full
    others = [one for one in named if one.peer != IDS[0]]
    assert full.names() == others[len(others) - len(full.names()):]
    if name.isascii():
        assert len(full.names()) == min(MAX_NAMED, len(others))


def test_names_without_reason_or_round_cost_the_report() -> None:
    named = Named(IDS[1], 3, 41)
    for torn in (replace(report(0, named), named=()), replace(report(0, named), named_why=()),
                 replace(report(0, named), named_round=(1, 2)), replace(report(0, named), named_why=(len(WHY),))):
        with pytest.raises(BadPacket):
            read_report(pack_report(Signed.make(torn, PEERS[0])))


def test_what_is_said_of_a_peer_is_what_most_say_and_then_the_last() -> None:
    first, second, third = Named(IDS[4], 3, 40), Named(IDS[4], 3, 41), Named(IDS[5], 4, 7)
    said = said_of([report(0, first), report(1, second, third), report(2, second), report(3)])
    assert said == [Said(second, 3), Said(third, 1)]
    assert said_of([report(0, first), report(1, second)]) == [Said(second, 2)]


def test_who_names_a_peer_twice_counts_once() -> None:
    assert said_of([report(0, Named(IDS[4], 3, 40), Named(IDS[4], 4, 41))]) == [Said(Named(IDS[4], 4, 41), 1)]
