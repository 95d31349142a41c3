"""The owner's word on a fork: who may say it, when it wins, and that a run without one goes by weight."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from kit import identity
from test_healing import assert_healed, assert_one_head_one_state, islands

from p2p_muloco.chain import Law, Tip
from p2p_muloco.config import RunConfig, RunSection
from p2p_muloco.errors import BadPacket
from p2p_muloco.identity import Identity
from p2p_muloco.local import Partition
from p2p_muloco.waypoint import WAYPOINT_EVERY, Waypoint, claims_more, due_waypoint, read_waypoint, require_better

OWNER = Identity(b"o" * 32)
LAW = Law.of(RunConfig(run=RunSection(owner=OWNER.public_key.hex())))


def head(branch: str, k: int) -> bytes:
    return branch.encode() * 28 + k.to_bytes(4, "big")


def tip(branch: str, k: int, weight: int, parted_at: int = 0) -> Tip:
    """Of a chain that shares entries up to `parted_at` with all others."""
    heads = tuple(head("_" if i <= parted_at else branch, i) for i in range(max(0, k - 63), k + 1))
    return dataclasses.replace(LAW.genesis, k=k, head=heads[-1], recent=heads, weight=weight)


def waypoint(branch: str, k: int) -> Waypoint:
    return Waypoint.sign(OWNER, k, head(branch, k))


def test_only_the_owner_can_sign_one() -> None:
    good = waypoint("a", 7)
    assert read_waypoint(LAW, good.pack()) == good and read_waypoint(LAW, b"") is None
    for false in (dataclasses.replace(good, k=8), dataclasses.replace(good, head=head("b", 7)),
                  Waypoint.sign(identity(3), 7, good.head)):
        with pytest.raises(BadPacket, match="did not sign"):
            read_waypoint(LAW, false.pack())
    nobodys = Law.of(RunConfig())
    assert not good.holds(nobodys), "a run without an owner has no waypoints"


def test_the_owner_signs_one_entry_in_sixteen() -> None:
    signed = [k for k in range(1, 65) if due_waypoint(OWNER, tip("a", k, k)) is not None]
    assert signed == [16, 32, 48, 64] and WAYPOINT_EVERY == 16


@pytest.mark.parametrize(("k", "on"), [(36, False), (37, True), (100, True), (101, False)])
def test_a_tip_shows_the_waypoints_among_its_64_heads(k: int, on: bool) -> None:
    assert waypoint("a", k).is_on(tip("a", 100, 1)) == on and not waypoint("b", k).is_on(tip("a", 100, 1))


@pytest.mark.parametrize(("held", "claimed", "wins"), [
    (None, None, False), (None, ("b", 60), True), (("a", 60), ("b", 59), False), (("a", 60), ("b", 61), True),
    (("a", 60), ("a", 61), False), (("_", 40), None, False),
])
def test_a_newer_waypoint_on_another_chain_is_a_reason_to_look(
    held: tuple[str, int] | None, claimed: tuple[str, int] | None, wins: bool,
) -> None:
    own = tip("a", 70, 1000, parted_at=50)
    assert claims_more(own, held and waypoint(*held), claimed and waypoint(*claimed)) == wins


@pytest.mark.parametrize(("held", "shown", "their_weight", "parted_at", "wins"), [
    (None, None, 1001, 50, True),  # by weight
    (None, None, 999, 50, False),
    (None, ("b", 60), 1, 50, True),  # the owner's word wins over any weight
    (("a", 60), ("b", 60), 2000, 50, True),  # the owner signed both: weight again
    (("a", 60), ("b", 59), 2000, 50, False),
    (("a", 60), None, 2000, 50, False),
    (("_", 40), None, 1001, 50, True),  # both hold it
    (("_", 3), None, 1001, 50, True),  # both hold it, though no tip names that old an entry
    (("_", 3), None, 1001, 0, False),  # where they part is unknown
    (None, ("c", 60), 999, 50, False),  # one that their chain does not hold
])
def test_which_chain_wins(held: tuple[str, int] | None, shown: tuple[str, int] | None, their_weight: int, parted_at: int,
                          wins: bool) -> None:
    own, theirs = tip("a", 70, 1000, parted_at=50), tip("b", 71, their_weight, parted_at=50)
    said = held and waypoint(*held), shown and waypoint(*shown)
    if wins:
        return require_better(own, said[0], theirs, theirs.recent, said[1], parted_at)
    with pytest.raises(BadPacket):
        require_better(own, said[0], theirs, theirs.recent, said[1], parted_at)


@pytest.mark.parametrize("signs", [False, True])
@pytest.mark.parametrize("snapshot_every", [50, 5], ids=["from the own log", "from the others' state"])
def test_the_owners_island_wins_though_it_is_lighter(tmp_path: Path, signs: bool, snapshot_every: int) -> None:
    """Peer 0 is alone from second 20 to 110, with entries of 4 s; it signs entry 16 there."""
    cut = Partition(20.0, 110.0, frozenset({0}))
    trainers, records = islands(tmp_path, 4, cut, until_s=250.0, snapshot_every=snapshot_every,
                                owner=OWNER if signs else None)
    assert_one_head_one_state(records)
    assert_healed(trainers)
    assert {r["peer"] for r in records if r["event"] == "rebased"} == ({1, 2, 3} if signs else {0})
    if signs:
        kept = {t.store.waypoint() for t in trainers}
        assert len(kept) == 1 and read_waypoint(trainers[0].law, kept.pop()).is_on(trainers[0].state.tip)  # type: ignore[union-attr]
