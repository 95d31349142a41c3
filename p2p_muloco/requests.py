"""What peers ask each other for stored bytes, and what they answer. Pure, and the disk's `Store`.

An answer is named by a hash the asker knows or is told, or must be proven by what follows; b'' stands for 'not here'.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import msgpack

from p2p_muloco.chain import Law, Tip
from p2p_muloco.errors import BadPacket, StateUnavailable
from p2p_muloco.snapshot import CHUNKS, MAX_CHUNK_BYTES, Store, chunk_bytes, max_state_bytes
from p2p_muloco.waypoint import Waypoint, read_waypoint
from p2p_muloco.wire import Record, integer, raw, read_frame, write_frame

__all__ = ["BUSY", "REQUESTS", "Fetch", "Manifest", "WantChunk", "WantDial", "WantEntry", "WantManifest", "WantRun", "WantTime",
           "WantTip", "WantWaypoint", "fetch_manifest", "fetch_tip", "fetch_waypoint", "pack_request", "read_request", "serve"]

BUSY = b"busy"  # in place of a chunk: ask another donor, or again later

Fetch = Callable[[bytes, Record, int], bytes]
"""(peer id, request, most bytes to read) -> the answer's bytes; raises StateUnavailable."""


@dataclass(frozen=True)
class WantRun(Record):
    """The run's canonical config bytes."""

    KIND = 40
    config_hash: bytes = raw(32)


@dataclass(frozen=True)
class WantEntry(Record):
    """Entry k, packed; empty if it is not in the log."""

    KIND = 41
    k: int = integer(1, 2**40)


@dataclass(frozen=True)
class WantManifest(Record):
    """The newest pinned snapshot: its entry, size and the sha256 of each chunk; empty if there is none."""

    KIND = 42


@dataclass(frozen=True)
class WantChunk(Record):
    """One chunk of the state pinned after entry k; empty if there is none with this sha256, `BUSY` if too many ask."""

    KIND = 43
    k: int = integer(0, 2**40)
    index: int = integer(0, 2**24)
    digest: bytes = raw(32)


@dataclass(frozen=True)
class WantTip(Record):
    """The tip of the donor's chain as its disk has it; empty if there is none."""

    KIND = 44


@dataclass(frozen=True)
class WantTime(Record):
    """The other's clock: unix milliseconds, 8 bytes, big-endian. Answered by every node itself."""

    KIND = 45


@dataclass(frozen=True)
class WantWaypoint(Record):
    """The newest waypoint that the donor's chain holds; empty if it knows of none."""

    KIND = 46


@dataclass(frozen=True)
class WantDial(Record):
    """'Can you dial me anew at this TCP port?' One byte, 1 or 0. Answered by every node itself."""

    KIND = 47
    port: int = integer(1, 65_535)


REQUESTS: dict[int, type[Record]] = {
    r.KIND: r for r in (WantRun, WantEntry, WantManifest, WantChunk, WantTip, WantTime, WantWaypoint, WantDial)
}


@dataclass(frozen=True)
class Manifest:
    """A pinned snapshot's entry, size in bytes and the sha256 of each chunk."""

    k: int
    size: int
    digests: tuple[bytes, ...]

    def start(self, index: int) -> int:
        return index * chunk_bytes(self.size)

    def length(self, index: int) -> int:
        """Bytes of one chunk."""
        return min(chunk_bytes(self.size), self.size - self.start(index))

    def holds(self, index: int, data: bytes) -> bool:
        return len(data) == self.length(index) and hashlib.sha256(data).digest() == self.digests[index]

    @property
    def name(self) -> str:
        return f"{self.k:09d}-{hashlib.sha256(b''.join(self.digests)).hexdigest()[:16]}"


def serve(store: Store, request: Record, config_bytes: bytes) -> bytes:
    """The answer to one request: bytes that are named by a hash the asker knows or is told; b'' for 'not here'."""
    match request:
        case WantTime() | WantDial():  # not stored: the node answers it
            return b""
        case WantRun():
            return config_bytes if hashlib.sha256(config_bytes).digest() == request.config_hash else b""
        case WantEntry():
            return store.entry(request.k)
        case WantManifest():
            return store.manifest()
        case WantTip():
            return store.tip()
        case WantWaypoint():
            return store.waypoint()
        case WantChunk():
            return store.chunk(request.k, request.index, request.digest)
    raise BadPacket("not a request")


def _max_chunks(law: Law) -> int:
    return max(CHUNKS, -(-max_state_bytes(law) // MAX_CHUNK_BYTES))


def fetch_manifest(law: Law, fetch: Fetch, donor: bytes) -> Manifest:
    """Of a donor's newest pinned state; raise StateUnavailable."""
    packed, most = fetch(donor, WantManifest(), 64 + 40 * _max_chunks(law)), _max_chunks(law)
    try:  # a tuple of the claimed length is made before its items are read
        k, size, digests = msgpack.unpackb(packed, use_list=False, max_array_len=most, max_map_len=0)
        if type(k) is type(size) is int and 0 <= k < 2**40 and 0 < size <= max_state_bytes(law):
            hashes = type(digests) is tuple and all(type(digest) is bytes and len(digest) == 32 for digest in digests)
            if hashes and len(digests) == -(-size // chunk_bytes(size)):
                return Manifest(k, size, digests)
    except Exception:  # msgpack raises many kinds on hostile bytes
        pass
    raise StateUnavailable("the donor has pinned no state yet, or its manifest breaks a rule")


def fetch_tip(fetch: Fetch, donor: bytes) -> Tip:
    """The donor's tip: a claim that entries or a state must prove; raise BadPacket or StateUnavailable."""
    packed = fetch(donor, WantTip(), Tip.MAX_BYTES)
    if not packed:
        raise StateUnavailable("that peer has no entry yet")
    return Tip.unpack(packed)


def fetch_waypoint(law: Law, fetch: Fetch, donor: bytes) -> Waypoint | None:
    """The newest that the donor's chain is said to hold; raise BadPacket if the owner did not sign it, or StateUnavailable."""
    return read_waypoint(law, fetch(donor, WantWaypoint(), Waypoint.MAX_BYTES))


def pack_request(request: Record) -> bytes:
    head, _ = write_frame(request)
    return head


def read_request(frame: bytes) -> Record:
    return read_frame(frame, REQUESTS)
