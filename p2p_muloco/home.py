"""The folder of one peer or bootstrap node."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil

from p2p_muloco.errors import ConfigError

__all__ = ["StepCount", "locked_home"]

ORPHANS_S = 10.0  # for what a killed process started to end: it holds the lock, and perhaps the port, until then


@contextlib.contextmanager
def locked_home(home: Path) -> Iterator[None]:
    """One process a home: two would share an identity and spoil each other's state."""
    home.mkdir(parents=True, exist_ok=True)
    with open(home / "lock", "a+") as file:
        until = time.monotonic() + ORPHANS_S
        while not _take(file):
            if _holder_lives(file) or time.monotonic() > until:
                raise ConfigError(f"--home {home}: another peer runs from this folder; give this one another --home")
            time.sleep(0.1)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _take(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder_lives(file: IO[str]) -> bool:
    file.seek(0)
    pid = file.read()
    try:
        return not pid.isdecimal() or psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class StepCount:
    """HOME/executed: how many inner steps this home ever took, those lost by crashes included; a decimal, never less.

    Rewritten in place at every step (2 us), which outlives a kill -9 of the process; after a power cut `at_least` counts.
    """

    def __init__(self, path: Path, at_least: int = 0) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        text = os.pread(self._file, 32, 0).strip()
        self.n = max(at_least, int(text) if text.isdigit() else 0)

    def add(self) -> None:
        self.n += 1
        with contextlib.suppress(OSError):  # a full disk can fail the first one, and costs no training
            os.pwrite(self._file, b"%019d\n" % self.n, 0)

    def close(self) -> None:
        os.close(self._file)
