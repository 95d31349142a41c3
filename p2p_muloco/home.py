"""The folder of one peer or bootstrap node."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from p2p_muloco.errors import ConfigError

__all__ = ["locked_home"]


@contextlib.contextmanager
def locked_home(home: Path) -> Iterator[None]:
    """One process a home: two would share an identity and spoil each other's state."""
    home.mkdir(parents=True, exist_ok=True)
    with open(home / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--home {home}: another peer runs from this folder; give this one another --home") from None
        file.write(str(os.getpid()))
        file.flush()
        yield
