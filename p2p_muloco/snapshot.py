"""State on disk and what others may ask of it. Pure and disk, no network.

    HOME/log/entry-000000042.bin             entries, so that newcomers can replay what they missed
    HOME/snapshots/000000050.safetensors     anchor and momentum, pinned at k = 0 mod `snapshot_every`
    HOME/partial/000000050-HASH.safetensors  somebody's snapshot while its chunks arrive

The last two snapshots stay, older ones that somebody takes, and the entries since the oldest of these. Files appear by rename,
so none is ever half written.
A newcomer takes a snapshot in hashed chunks, then replays entries, which are small. Costs 8 bytes a parameter and
snapshot: 160 GB for two of 10B parameters. All peers that pin a state pin the same bytes, so chunks come from any of them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from p2p_muloco.chain import Checked, Entry, Law, Tip, advance, check_entry
from p2p_muloco.errors import BadPacket, DiskFull, StateUnavailable
from p2p_muloco.packet import Layout
from p2p_muloco.waypoint import Waypoint, read_waypoint
from p2p_muloco.wire import Record, integer, raw, read_frame, write_frame

__all__ = ["BUSY", "REQUESTS", "Fetch", "Manifest", "Partial", "State", "Store", "WantChunk", "WantEntry", "WantManifest",
           "WantRun", "WantTime", "WantTip", "WantWaypoint", "chunk_bytes", "fetch_manifest", "fetch_tip",
           "fetch_waypoint", "serve", "state_digest",
           "write_atomically"]

MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 64 * 2**10, 4 * 2**20
CHUNKS = 16  # of a small state, so that several donors share it
BUSY = b"busy"  # in place of a chunk: ask another donor, or again later
KEPT_SNAPSHOTS = 2
KEPT_IN_USE, IN_USE_S = 2, 60.0  # older ones that somebody takes: how many, and for how long after the last chunk
IN_USE_BYTES = 4  # of entries since such a one, in states: whose link needs longer can never follow the run

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


REQUESTS: dict[int, type[Record]] = {
    r.KIND: r for r in (WantRun, WantEntry, WantManifest, WantChunk, WantTip, WantTime, WantWaypoint)
}


def chunk_bytes(size: int) -> int:
    """Of all chunks but the last of a snapshot of `size` bytes."""
    return min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, -(-size // CHUNKS)))


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


@dataclass
class State:
    """What all peers agree on after entry `tip.k`: flat fp32 CPU vectors of all weights, in the model's order."""

    tip: Tip
    anchor: Tensor
    momentum: Tensor

    @property
    def digest(self) -> bytes:
        return state_digest(self.anchor, self.momentum)


def state_digest(anchor: Tensor, momentum: Tensor) -> bytes:
    """sha256(anchor | momentum), 32 bytes; about 1 s a gigabyte."""
    total = hashlib.sha256(anchor.numpy().data)
    total.update(momentum.numpy().data)
    return total.digest()


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """`write(temporary)`, flush it to the disk, rename: a crash leaves the old file or the new one.

    OSError if the disk is full or fails: then the old file is whole and the temporary one gone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except SafetensorError as error:  # its writer hides the OSError
        temporary.unlink(missing_ok=True)
        raise OSError(str(error)) from None
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)


class Store:
    """The folder that a peer serves others from, and resumes from. One writer, any number of readers."""

    def __init__(self, home: Path, layout: Layout, config_bytes: bytes, clock: Callable[[], float] = time.time) -> None:
        self.log, self.snapshots, self.partial = home / "log", home / "snapshots", home / "partial"
        self.layout, self.config_bytes, self.clock = layout, config_bytes, clock
        self.log.mkdir(parents=True, exist_ok=True)
        self.snapshots.mkdir(parents=True, exist_ok=True)

    def put_entry(self, k: int, entry: Entry, tip: Tip, own_packet: bytes = b"") -> None:
        """Add entry k, the tip after it, and this peer's packet if the entry counts it, for healing a fork."""
        files = {f"entry-{k:09d}.bin": entry.pack(), f"packet-{k:09d}.bin": own_packet, "tip.bin": tip.pack()}
        for name, content in files.items():
            if content:
                write_atomically(self.log / name, lambda path, content=content: path.write_bytes(content))  # type: ignore[misc]

    def entry(self, k: int) -> bytes:
        """Packed bytes, or b'' if it is not kept."""
        try:
            return (self.log / f"entry-{k:09d}.bin").read_bytes()
        except FileNotFoundError:
            return b""

    def tip(self) -> bytes:
        """The packed tip after the last entry that was put, or b''."""
        with contextlib.suppress(FileNotFoundError):
            return (self.log / "tip.bin").read_bytes()
        return b""

    def put_waypoint(self, packed: bytes) -> None:
        """Keep the newest waypoint of this chain."""
        write_atomically(self.log / "waypoint.bin", lambda path: path.write_bytes(packed))

    def waypoint(self) -> bytes:
        """The packed waypoint that was put last, or b''."""
        with contextlib.suppress(FileNotFoundError):
            return (self.log / "waypoint.bin").read_bytes()
        return b""

    def own_packets(self) -> dict[bytes, bytes]:
        """This peer's counted packets in the log, by their sha256."""
        payloads = [path.read_bytes() for path in self.log.glob("packet-*.bin")]
        return {hashlib.sha256(payload).digest(): payload for payload in payloads}

    def cut(self, tip: Tip, after: int) -> None:
        """Stand at `tip`; drop entries and states after entry `after`: they are of a branch that is left."""
        write_atomically(self.log / "tip.bin", lambda path: path.write_bytes(tip.pack()))
        for path in (*self.log.glob("entry-*.bin"), *self.log.glob("packet-*.bin"), *self.snapshots.glob("*.*")):
            number = re.search(r"(\d{9})\.", path.name)
            if number and int(number.group(1)) > after:
                path.unlink(missing_ok=True)

    def pin(self, state: State) -> None:
        """Keep a state; drop what is older than the one before it, and the entries that led there."""
        tensors = {}
        for name, shape, place in self.layout.tensor_slices():
            tensors[f"anchor/{name}"] = state.anchor[place].view(shape)
            tensors[f"momentum/{name}"] = state.momentum[place].view(shape)
        path = self.snapshots / f"{state.tip.k:09d}.safetensors"
        path.with_suffix(".json").unlink(missing_ok=True)
        metadata = {"tip": state.tip.pack().hex()}  # one pair: safetensors writes several in any order
        write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=metadata))
        digests = [hashlib.sha256(chunk).hexdigest() for chunk in _chunks(path)]
        text = json.dumps({"size": path.stat().st_size, "sha256": digests})
        write_atomically(path.with_suffix(".json"), lambda temporary: temporary.write_text(text))
        self._drop_old()

    def restart_from(self, state: State) -> None:
        """Another chain's state takes the place of all that is here."""
        self.cut(state.tip, -1)
        self.pin(state)
        shutil.rmtree(self.partial, ignore_errors=True)

    def pinned(self) -> list[int]:
        """Entry numbers of the kept snapshots, oldest first."""
        return sorted(int(path.stem) for path in self.snapshots.glob("*.safetensors"))

    def _drop_old(self) -> None:
        """All but the last two, those that are being taken, and the entries since the oldest of these.

        Of too many in use the oldest stay: who takes them is nearest to the end.
        """
        pinned = self.pinned()
        if len(pinned) < KEPT_SNAPSHOTS:
            return
        longest = IN_USE_BYTES * 8 * self.layout.n_elements // self.layout.down_bytes
        in_use = [k for k in pinned[:-KEPT_SNAPSHOTS] if k >= pinned[-1] - longest and self._is_in_use(k)]
        kept = {*in_use[:KEPT_IN_USE], *pinned[-KEPT_SNAPSHOTS:]}
        for k in pinned:
            if k not in kept:
                for suffix in (".safetensors", ".json", ".used"):
                    (self.snapshots / f"{k:09d}{suffix}").unlink(missing_ok=True)
        for path in (*self.log.glob("entry-*.bin"), *self.log.glob("packet-*.bin")):
            found = re.fullmatch(r"[a-z]+-(\d+)", path.stem)
            if found and int(found.group(1)) <= min(kept):
                path.unlink(missing_ok=True)

    def _note_use(self, k: int) -> None:
        """For the trainer's process, which drops old ones; this may be the network's."""
        used = self.snapshots / f"{k:09d}.used"
        used.touch()
        os.utime(used, (self.clock(), self.clock()))

    def _is_in_use(self, k: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return self.clock() < (self.snapshots / f"{k:09d}.used").stat().st_mtime + IN_USE_S
        return False

    def manifest(self) -> bytes:
        """msgpack of (k, size in bytes, chunk hashes) of the newest snapshot; b'' if nothing is pinned."""
        for k in reversed(self.pinned()):
            with contextlib.suppress(FileNotFoundError):  # being replaced
                known = json.loads((self.snapshots / f"{k:09d}.json").read_text())
                packed: bytes = msgpack.packb((k, known["size"], [bytes.fromhex(d) for d in known["sha256"]]))
                return packed
        return b""

    def chunk(self, k: int, index: int, digest: bytes) -> bytes:
        """b'' if there is no such chunk here, or the disk has spoiled it."""
        try:
            with open(self.snapshots / f"{k:09d}.safetensors", "rb") as file:
                length = chunk_bytes(os.fstat(file.fileno()).st_size)
                file.seek(index * length)
                chunk = file.read(length)
        except OSError:  # it is gone, or no file of this disk could be that long
            return b""
        with contextlib.suppress(OSError):  # of a full disk
            self._note_use(k)
        return chunk if hashlib.sha256(chunk).digest() == digest else b""

    def resume(self, law: Law) -> tuple[State, list[Checked]] | None:
        """The newest undamaged state, and the verified entries after it; None in a fresh folder."""
        for k in reversed(self.pinned()):
            state = self.state(law, k)
            if state is not None:
                return state, list(self.replayable(law, state.tip))
        return None

    def state(self, law: Law, k: int) -> State | None:
        """The state pinned after entry k; None if it isn't there or is damaged."""
        try:
            return read_state(law, self.snapshots / f"{k:09d}.safetensors")
        except (BadPacket, OSError):
            return None

    def pinned_tip(self, k: int) -> Tip | None:
        """The tip of the state pinned after entry k; None if it isn't there or is damaged."""
        try:
            with _opened(self.snapshots / f"{k:09d}.safetensors") as (tip, _):
                return tip
        except (BadPacket, OSError):
            return None

    def replayable(self, law: Law, tip: Tip, last: int | None = None) -> Iterator[Checked]:
        """The log's entries that hold after `tip`, up to entry `last`."""
        while (last is None or tip.k < last) and (packed := self.entry(tip.k + 1)):
            try:
                checked = check_entry(law, tip, Entry.unpack(packed, max_entry_bytes(law)))
            except BadPacket:
                return
            tip = advance(law, tip, checked)
            yield checked


def _chunks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        length = chunk_bytes(os.fstat(file.fileno()).st_size)
        while chunk := file.read(length):
            yield chunk


class Partial:
    """A snapshot on its way here, chunk by chunk in any order. What is on disk counts after a restart, by its hashes."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Take up the download of this very snapshot, or begin it in place of another; raise DiskFull."""
        self.manifest, self.path = manifest, folder / f"{manifest.name}.safetensors"
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if path != self.path:
                path.unlink()
        self._file = open(self.path, "r+b" if self.path.exists() else "w+b")  # noqa: SIM115 - until `close`
        self._require_room()

    def _require_room(self) -> None:
        """For the rest of it, and for the copy that is pinned in the end."""
        free = shutil.disk_usage(self.path.parent).free
        needed = 2 * self.manifest.size - 512 * os.fstat(self._file.fileno()).st_blocks
        if free < needed:
            self.close()
            raise DiskFull(f"--home {self.path.parent.parent}: taking the run's state needs {needed / 1e6:.0f} MB there and "
                           f"{free / 1e6:.0f} MB are free; make room and start this peer again, it goes on from here")

    def held(self) -> set[int]:
        """Indices of the chunks that are here and true. Reads all of the file: about 1 s a gigabyte."""
        return {index for index in range(len(self.manifest.digests)) if self.manifest.holds(index, self._read(index))}

    def _read(self, index: int) -> bytes:
        self._file.seek(self.manifest.start(index))
        return self._file.read(self.manifest.length(index))

    def write(self, index: int, chunk: bytes) -> None:
        """Put a verified chunk in its place; raise DiskFull."""
        try:
            self._file.seek(self.manifest.start(index))
            self._file.write(chunk)
            self._file.flush()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self.close()
            raise DiskFull(f"--home {self.path.parent.parent}: the disk is full at chunk {index} of the run's state; make room "
                           "and start this peer again, it goes on from here") from None

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of a full disk: what was not written is asked again
            self._file.close()

    def read(self, law: Law) -> State:
        """The whole state. Raise BadPacket if it breaks a rule; then it is deleted."""
        self.close()
        try:
            return read_state(law, self.path)
        except BadPacket:
            self.path.unlink()
            raise


def max_entry_bytes(law: Law) -> int:
    return law.layout.down_bytes + 512 * 1024


def max_state_bytes(law: Law) -> int:
    return 8 * law.layout.n_elements + 2**20 + 512 * len(law.layout.names)


def serve(store: Store, request: Record, config_bytes: bytes) -> bytes:
    """The answer to one request: bytes that are named by a hash the asker knows or is told; b'' for 'not here'."""
    match request:
        case WantTime():  # not stored: the node answers it
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


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Tip, Any]]:
    """(tip, open safetensors file) of a pinned state, mapped and not read; raise BadPacket or OSError."""
    try:
        with safe_open(path, "pt") as file:
            yield Tip.unpack(bytes.fromhex(file.metadata()["tip"])), file
    except (ValueError, KeyError, TypeError, RuntimeError, SafetensorError):  # torch's of shapes such as (0, 2^40, 2^40)
        raise BadPacket("not a safetensors state of this program") from None


def read_state(law: Law, path: Path) -> State:
    """Check names, shapes, types and finiteness; raise BadPacket. Tensor by tensor, so no copy of the file is made."""
    anchor, momentum = torch.empty(law.layout.n_elements), torch.empty(law.layout.n_elements)
    with _opened(path) as (tip, file):
        if set(file.keys()) != {f"{prefix}/{name}" for name in law.layout.names for prefix in ("anchor", "momentum")}:
            raise BadPacket("a state of other tensors than this model has")
        for name, shape, place in law.layout.tensor_slices():
            for prefix, flat in (("anchor", anchor), ("momentum", momentum)):
                key = f"{prefix}/{name}"
                found = file.get_slice(key)
                if found.get_dtype() != "F32" or tuple(found.get_shape()) != shape:
                    raise BadPacket(f"{key} is not fp32 {shape}")
                flat[place] = file.get_tensor(key).reshape(-1)
    if not (torch.isfinite(anchor).all() and torch.isfinite(momentum).all()):
        raise BadPacket("a state with numbers that are not finite")
    if tip.k and tip.recent[-1] != tip.head:
        raise BadPacket("a state whose chain does not fit")
    return State(tip, anchor, momentum)


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

