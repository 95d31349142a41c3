"""What peers say to each other. Every message of an all-reduce is keyed by its group (START's hash)."""

from __future__ import annotations

from dataclasses import dataclass

from p2p_muloco.chain import MAX_MEMBERS, Signed, SpanRecord
from p2p_muloco.errors import BadPacket
from p2p_muloco.identity import PEER_ID_BYTES
from p2p_muloco.waypoint import Waypoint
from p2p_muloco.wire import Record, integer, many, raw

__all__ = [
    "EXCHANGING", "FRAME_BYTES", "GATHERING", "KINDS", "TRAINING", "Abandon", "Averaged", "Confirm", "Fetch", "Join", "Parts",
    "Poll", "Proof", "Reassign", "RecordMessage", "StartMessage", "TipMessage",
]

FRAME_BYTES = 256 * 1024  # parts are bundled up to this size; one larger part makes a larger frame
TRAINING, GATHERING, EXCHANGING = 0, 1, 2  # what a peer is doing at its head


@dataclass(frozen=True)
class Poll(Record):
    """'Where are you?' Answered by TipMessage. Who gathers at a head is in no exchange there (any more)."""

    KIND = 10
    head: bytes = raw(32)
    k: int = integer(0, 2**40)
    phase: int = integer(TRAINING, EXCHANGING)


@dataclass(frozen=True)
class TipMessage(Record):
    KIND = 11
    k: int = integer(0, 2**40)
    recent: tuple[bytes, ...] = many(raw(32), 1, 8)  # heads, oldest first; the last is the current one
    weight: int = integer(0, 2**60)
    phase: int = integer(TRAINING, EXCHANGING)
    leader: bytes = raw(0, PEER_ID_BYTES)  # whom it follows while it gathers; itself if it leads
    waypoint: bytes = raw(0, Waypoint.MAX_BYTES)  # the newest that its chain holds, packed; empty if none


@dataclass(frozen=True)
class Join(Record):
    """To a leader: 'take me into the next attempt'. The signed HELLO names head, entry, h, packet, and whether it is a client."""

    KIND = 12
    hello: bytes = raw(1, 256)
    signature: bytes = raw(64)
    rate: int = integer(1, 10**7)


@dataclass(frozen=True)
class StartMessage(Record):
    KIND = 13
    MAX_BYTES = 34 * 1024
    body: bytes = raw(1, 32 * 1024)
    signature: bytes = raw(64)


@dataclass(frozen=True)
class Parts(Record):
    """Scatter: parts [first, stop) of the sender's packet, to the reducer of their span."""

    KIND = 20
    group: bytes = raw(32)
    first: int = integer(0, 2**24)
    stop: int = integer(1, 2**24)
    data: bytes | memoryview = b""


@dataclass(frozen=True)
class Averaged(Record):
    """Gather: averaged parts [first, stop) of span `span`, as the reducer of this turn encoded them once."""

    KIND = 21
    group: bytes = raw(32)
    span: int = integer(0, MAX_MEMBERS - 1)
    turn: int = integer(0, MAX_MEMBERS - 1)
    first: int = integer(0, 2**24)
    stop: int = integer(1, 2**24)
    data: bytes | memoryview = b""


@dataclass(frozen=True)
class RecordMessage(Record):
    """A span's record: at the end of its averaged parts; to a new reducer, 'I hold what the old one made'."""

    KIND = 22
    group: bytes = raw(32)
    body: bytes = raw(1, 2048)
    signature: bytes = raw(64)


@dataclass(frozen=True)
class Confirm(Record):
    """'I, `peer`, hold every span under this root.' The coordinator passes it on to clients, which can't reach each other."""

    KIND = 23
    group: bytes = raw(32)
    peer: bytes = raw(PEER_ID_BYTES)
    root: bytes = raw(32)
    signature: bytes = raw(64)  # chain.sign_root


@dataclass(frozen=True)
class Fetch(Record):
    """'Its reducer is lost to me: send me this span.' Answered by Averaged + RecordMessage, as soon as it is held."""

    KIND = 24
    group: bytes = raw(32)
    span: int = integer(0, MAX_MEMBERS - 1)


@dataclass(frozen=True)
class Reassign(Record):
    """A span's reducer is lost: the coordinator's Order to the next one, which shows it to all members."""

    KIND = 25
    group: bytes = raw(32)
    body: bytes = raw(1, 128)
    signature: bytes = raw(64)


@dataclass(frozen=True)
class Abandon(Record):
    """'I gave this attempt up.'"""

    KIND = 26
    group: bytes = raw(32)


@dataclass(frozen=True)
class Proof(Record):
    """Two records of one span that `peer` signed: whoever sees them knows that it cheats."""

    KIND = 27
    MAX_BYTES = 8192
    peer: bytes = raw(PEER_ID_BYTES)
    bodies: tuple[bytes, ...] = many(raw(1, 2048), 2, 2)
    signatures: tuple[bytes, ...] = many(raw(64), 2, 2)

    @property
    def holds(self) -> bool:
        """Whether both are signed by it and say different things of the same span."""
        try:
            first, second = map(SpanRecord.unpack, self.bodies)
        except BadPacket:
            return False
        same = (first.start, first.span, first.turn) == (second.start, second.span, second.turn)
        signed = [Signed(*pair) for pair in zip(self.bodies, self.signatures, strict=True)]
        return same and first != second and all(one.by("SpanRecord", self.peer) for one in signed)


KINDS: dict[int, type[Record]] = {
    kind.KIND: kind
    for kind in (Poll, TipMessage, Join, StartMessage, Parts, Averaged, RecordMessage, Confirm, Fetch, Reassign, Abandon,
                 Proof)
}
