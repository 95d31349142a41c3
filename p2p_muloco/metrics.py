"""Records of what happened: one JSON object a line, for scripts, tables and plots."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["JsonLines", "JsonTail", "RecordSink", "read_json_lines"]

RecordSink = Callable[[dict[str, Any]], None]


class JsonLines:
    """Appends records to a file, each flushed at once, with the wall time in seconds under "time"."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the peer lives

    def __call__(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps({"time": round(time.time(), 3), **record}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file that may still be growing; a torn last line is left out."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


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
