"""The owner's word on which fork is the run: a signed (entry, head). Pure.

Optional. Without it the heavier chain wins, so whoever can make most of the counted steps can also make the past anew. A
chain that holds a newer waypoint wins whatever its weight. A peer keeps the newest one that its own chain holds, tells it to
whoever asks where it stands, and follows nobody to a chain that can't show it or a newer one. Costs 115 bytes a message.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

from p2p_muloco.chain import Law, Tip, heavier
from p2p_muloco.errors import BadPacket
from p2p_muloco.identity import PEER_ID_PREFIX, Identity, verify
from p2p_muloco.wire import Record, integer, raw

__all__ = ["WAYPOINT_EVERY", "Waypoint", "claims_more", "due_waypoint", "newer", "read_waypoint", "require_better"]

WAYPOINT_EVERY = 16  # entries; a quarter of the heads that a tip names, so that each tip shows the newest one


@dataclass(frozen=True)
class Waypoint(Record):
    """'Entry k of my run is the one with this head.' Beside its head, no other can be signed for any other run."""

    KIND = 6
    MAX_BYTES = 128
    k: int = integer(1, 2**40)
    head: bytes = raw(32)
    signature: bytes = raw(64)

    @classmethod
    def sign(cls, owner: Identity, k: int, head: bytes) -> Self:
        return cls(k, head, owner.sign(b"Waypoint", _said(k, head)))

    def holds(self, law: Law) -> bool:
        """Whether the owner of this run signed it."""
        owner = bytes.fromhex(law.config.run.owner)
        return verify(PEER_ID_PREFIX + owner, b"Waypoint", _said(self.k, self.head), self.signature)

    def is_on(self, tip: Tip) -> bool:
        """Whether `tip` names its head; a waypoint older than the heads that a tip names is on none."""
        at = self.k - (tip.k - len(tip.recent) + 1)
        return 0 <= at < len(tip.recent) and tip.recent[at] == self.head


def _said(k: int, head: bytes) -> bytes:
    return k.to_bytes(8, "big") + head


def due_waypoint(owner: Identity, tip: Tip) -> Waypoint | None:
    """What the owner signs after the entry at `tip`, if anything."""
    return Waypoint.sign(owner, tip.k, tip.head) if tip.k and tip.k % WAYPOINT_EVERY == 0 else None


def read_waypoint(law: Law, packed: bytes) -> Waypoint | None:
    """What a peer or the own disk says the owner signed; None for nothing. BadPacket if the owner didn't."""
    if not packed:
        return None
    waypoint = Waypoint.unpack(packed)
    if not waypoint.holds(law):
        raise BadPacket("a waypoint that the run's owner did not sign")
    return waypoint


def newer(waypoint: Waypoint | None, than: Waypoint | None) -> bool:
    return waypoint is not None and (than is None or waypoint.k > than.k)


def claims_more(own: Tip, held: Waypoint | None, claimed: Waypoint | None) -> bool:
    """Whether a peer on another chain says that it holds a newer waypoint, which the own chain does not hold."""
    return claimed is not None and newer(claimed, held) and not claimed.is_on(own)


def require_better(own: Tip, held: Waypoint | None, theirs: Tip, their_heads: Collection[bytes], their_waypoint: Waypoint | None,
                   parted_at: int) -> None:
    """Raise BadPacket unless another chain wins over the own one: by its newest waypoint, then by its weight.

    `their_heads` are those that it has shown; the chains share all entries up to `parted_at` (0 where that is unknown).
    """
    def rank(waypoint: Waypoint | None, is_held: bool) -> int:
        return waypoint.k if waypoint is not None and is_held else 0

    theirs_held = their_waypoint is not None and their_waypoint.head in their_heads
    shared = held is not None and (held.k <= parted_at or held.head in their_heads)
    their_rank = max(rank(their_waypoint, theirs_held), rank(held, shared))
    own_rank = max(rank(held, True), rank(their_waypoint, their_waypoint is not None and their_waypoint.is_on(own)))
    if their_rank < own_rank:
        raise BadPacket(f"a chain without entry {own_rank} as the run's owner signed it; if the owner has not signed for long, "
                        "an empty --home follows the heavier chain")
    if their_rank == own_rank and not heavier(theirs.weight, theirs.head, own.weight, own.head):
        raise BadPacket("a chain with fewer steps than this one")
