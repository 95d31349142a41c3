"""Records of what happened: one JSON object a line, for scripts, tables and plots."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["JsonLines", "JsonTail", "RecordSink", "read_json_lines"]

log = logging.getLogger(__name__)

RecordSink = Callable[[dict[str, Any]], None]


class JsonLines:
    """Appends records to a file, each flushed at once, with the wall time in seconds under "time".

    A record that a full disk can't take is left out, which is said once.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open as long as the peer lives
        self._torn = not _ends_a_line(path)  # by a crash or a full disk
        self._in_trouble = False

    def __call__(self, record: dict[str, Any]) -> None:
        line = json.dumps({"time": round(time.time(), 3), **record}) + "\n"
        packed = (b"\n" if self._torn else b"") + line.encode()
        try:
            self._torn = self._file.write(packed) < len(packed)
            self._in_trouble = False
        except OSError as error:
            if not self._in_trouble:
                log.warning("%s takes no records now: %s", self._path, error)
            self._in_trouble = True

    def close(self) -> None:
        self._file.close()


def _ends_a_line(path: Path) -> bool:
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 1))
        return file.read(1) in (b"", b"\n")


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file that may still be growing; torn lines are left out."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


class JsonTail:
    """The records of a file that grows: each `update` reads what has come since the last one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []
        self._at = 0

    def update(self) -> None:
        """Take in whole lines; one that a crash has torn is left out."""
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            file.seek(self._at)
            lines = file.read().split(b"\n")
        for line in lines[:-1]:
            self._at += len(line) + 1
            with contextlib.suppress(json.JSONDecodeError):
                self.records.append(json.loads(line))
