"""State on disk: snapshots and the log of entries. Pure and disk, no network.

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
from p2p_muloco.errors import BadPacket
from p2p_muloco.packet import Layout

__all__ = ["CHUNKS", "MAX_CHUNK_BYTES", "State", "Store", "chunk_bytes", "max_entry_bytes", "max_state_bytes", "read_state",
           "state_digest", "write_atomically"]

MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 64 * 2**10, 4 * 2**20
CHUNKS = 16  # of a small state, so that several donors share it
KEPT_SNAPSHOTS = 2
KEPT_IN_USE, IN_USE_S = 2, 60.0  # older ones that somebody takes: how many, and for how long after the last chunk
IN_USE_BYTES = 4  # of entries since such a one, in states: whose link needs longer can never follow the run

def chunk_bytes(size: int) -> int:
    """Of all chunks but the last of a snapshot of `size` bytes."""
    return min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, -(-size // CHUNKS)))


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


def max_entry_bytes(law: Law) -> int:
    return law.layout.down_bytes + 512 * 1024


def max_state_bytes(law: Law) -> int:
    return 8 * law.layout.n_elements + 2**20 + 512 * len(law.layout.names)


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


