"""What one peer alone knows, saved so that its next life takes the very step this one would have taken. Pure and disk.

    HOME/checkpoints/000000042.safetensors     the last two stay

One file holds the tensors and, as metadata, the numbers, whose it is, and the sha256 of both. It appears by rename, so a
crash or a full disk leaves the one before. Costs 4 bytes a parameter for each of anchor, momentum, residual, theta and
Muon's momentum (two for AdamW), with a packet out 4 more and the packet: about 25 bytes a parameter, twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from p2p_muloco.chain import Tip
from p2p_muloco.errors import BadPacket, ConfigError
from p2p_muloco.packet import Packet
from p2p_muloco.snapshot import write_atomically

__all__ = ["Checkpoint", "Checkpoints", "Numbers", "Pending"]

FORMAT = "p2p-muloco-checkpoint-1"
KEPT = 2
SHARE = 0.025  # of the time, at most, goes into saving
VECTORS = ("anchor", "momentum", "residual", "theta")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Pending:
    """A packet whose fate is not known, and the weights it was measured at."""

    packet: Packet
    theta_begin: Tensor


@dataclass(frozen=True)
class Numbers:
    """The integers and floats that the next step depends on; the inner lr follows from them and the tip."""

    cursor: int  # place in the text
    steps: int
    total_steps: int
    rounds: int
    fresh_steps: int
    skipped_in_row: int
    pace_s: float
    last_heldout: float


@dataclass(frozen=True)
class Checkpoint:
    """All that the next step of a peer depends on. Vectors are flat fp32 on the CPU, in the model's order."""

    tip: Tip
    anchor: Tensor
    momentum: Tensor
    residual: Tensor
    theta: Tensor
    optimizer: Mapping[str, Tensor]
    pending: Pending | None
    numbers: Numbers
    last_word: bool  # nothing was said to others after it: not so if the peer went on from here and crashed


class Checkpoints:
    """The folder of one peer in one run. `load` first; one writer. What goes wrong is said, once, and never ends training."""

    def __init__(self, folder: Path, config_hash: bytes, peer: bytes, say: Say,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self._say, self._clock = folder, say, clock
        self._owner = {"run": config_hash.hex(), "peer": peer.hex()}
        self._whole: list[Path] = []  # oldest first
        self._number = 0
        self._cost_s, self._saved_at = 0.0, clock()
        self._in_trouble = False
        folder.mkdir(parents=True, exist_ok=True)

    def load(self) -> Checkpoint | None:
        """The newest undamaged one; ConfigError if it is another run's or another peer's."""
        paths = sorted(self.folder.glob("*.safetensors"))
        self._number = max((int(path.stem) for path in paths if path.stem.isdecimal()), default=0)
        for at in reversed(range(len(paths))):
            try:
                checkpoint = self._read(paths[at])
            except ConfigError:
                raise
            except (SafetensorError, OSError, BadPacket, ValueError, KeyError, TypeError) as error:
                instead = "the one before is taken" if at else "this peer starts from its pinned state and the run's log"
                self._say(f"checkpoint {paths[at]} is damaged ({error}): {instead}")
                continue
            self._whole = paths[: at + 1]
            newest = at == len(paths) - 1
            return dataclasses.replace(checkpoint, last_word=checkpoint.last_word and newest)
        return None

    def is_due(self) -> bool:
        """Whether one more save stays within the share of the time that saving may cost."""
        return self._cost_s <= SHARE * (self._clock() - self._saved_at)

    def save(self, checkpoint: Checkpoint) -> bool:
        """Write it, and drop all but the last two; False if there is no room, which is said once."""
        began = self._clock()
        tensors, fields = _parts_of(checkpoint)
        metadata = {"format": FORMAT, **self._owner, "fields": fields}
        metadata["sha256"] = _digest(metadata, tensors)
        path = self.folder / f"{self._number + 1:09d}.safetensors"
        try:
            write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=metadata))
        except OSError as error:
            if not self._in_trouble:
                needed = sum(tensor.nbytes for tensor in tensors.values())
                self._say(f"no checkpoint could be written: {error}; {needed} bytes are needed in {self.folder}; the last one "
                          "stays, training goes on, and what it learns from here is lost if this peer crashes")
            self._in_trouble = True
        else:
            self._in_trouble = False
            self._number += 1
            self._whole = [*self._whole, path][-KEPT:]
            self._drop_others()
        self._cost_s, self._saved_at = self._clock() - began, self._clock()
        return not self._in_trouble

    def _drop_others(self) -> None:
        for path in self.folder.glob("*.safetensors"):
            if path not in self._whole:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _read(self, path: Path) -> Checkpoint:
        with safe_open(path, "pt") as file:
            metadata = dict(file.metadata() or {})
            if metadata.get("format") != FORMAT:
                raise ValueError(f"not a {FORMAT} file")
            # before its content: another peer's damaged checkpoint is not ours to drop either
            if other := [key for key, value in self._owner.items() if metadata.get(key) != value]:
                raise _foreign(path, other[0], metadata.get(other[0], ""), self._owner[other[0]])
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping
        if metadata.pop("sha256", None) != _digest(metadata, tensors):
            raise ValueError("its content does not have the sha256 it states")
        return _checkpoint_of(tensors, json.loads(metadata["fields"]))


def _foreign(path: Path, what: str, found: str, own: str) -> ConfigError:
    return ConfigError(f"checkpoint {path} was written by another {what} ({found[:12]}..., this one is {own[:12]}...); it was "
                       f"left as it is: give this peer the --home of its own, or move {path.parent} away to start without it")


def _parts_of(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], str]:
    tensors = {name: getattr(checkpoint, name) for name in VECTORS}
    tensors |= {f"optimizer/{name}": tensor.cpu() for name, tensor in checkpoint.optimizer.items()}
    fields: dict[str, Any] = {"tip": checkpoint.tip.pack().hex(), "numbers": dataclasses.asdict(checkpoint.numbers),
                              "last_word": checkpoint.last_word, "packet": None}
    if checkpoint.pending is not None:
        packet = checkpoint.pending.packet
        tensors["theta_begin"] = checkpoint.pending.theta_begin
        tensors["payload"] = torch.frombuffer(bytearray(packet.payload), dtype=torch.uint8)
        fields["packet"] = {"inner_steps": packet.inner_steps, "pace_mhz": packet.pace_mhz, "state": packet.state.hex()}
    return tensors, json.dumps(fields, sort_keys=True)


def _checkpoint_of(tensors: dict[str, Tensor], fields: dict[str, Any]) -> Checkpoint:
    pending = None
    if (packet := fields["packet"]) is not None:
        payload = tensors["payload"].numpy().tobytes()
        pending = Pending(Packet(payload, packet["inner_steps"], packet["pace_mhz"], bytes.fromhex(packet["state"])),
                          tensors["theta_begin"])
    return Checkpoint(
        tip=Tip.unpack(bytes.fromhex(fields["tip"])), pending=pending, numbers=Numbers(**fields["numbers"]),
        last_word=fields["last_word"], **{name: tensors[name] for name in VECTORS},
        optimizer={name.removeprefix("optimizer/"): t for name, t in tensors.items() if name.startswith("optimizer/")},
    )


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Hex sha256 of all metadata and all tensors with their names, types and shapes; about 1 s a gigabyte."""
    total = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
