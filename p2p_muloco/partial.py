"""A state on its way here: the chunks that have come, on disk. No network."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

from p2p_muloco.chain import Law
from p2p_muloco.errors import BadPacket, DiskFull
from p2p_muloco.requests import Manifest
from p2p_muloco.snapshot import State, read_state

__all__ = ["Partial"]


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
