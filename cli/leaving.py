"""Ctrl-C and SIGTERM. Once: leave in order. Again, or too long after a SIGTERM: leave now."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn

import psutil

__all__ = ["Leaving"]

TERM_S = 8.0  # after SIGTERM; `docker stop` kills after 10 s, systemd after 90 s
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Leaving:
    """While it is entered, signals only become bytes in a pipe, which a thread reads: so they are heard at once,
    whatever the main thread computes, loads or waits for.

    `in_order` asks for an orderly leave; while it is None there is nothing to finish, and the first signal ends the
    process. To leave now is to stop all processes of this peer: files appear by rename, so the last checkpoint stays.
    """

    def __init__(self, say: Callable[[str], None], before_exit: Callable[[], None]) -> None:
        self.in_order: Callable[[], None] | None = None
        self._say, self._before_exit = say, before_exit
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def __enter__(self) -> Leaving:
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # a handler of Python's is what makes it write to the pipe
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="p2p-muloco-signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    def _listen(self) -> None:
        until: float | None = None
        heard = 0
        while True:
            limit_s = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self._read], [], [], limit_s)[0]:
                self._leave_now(signal.SIGTERM, f"not done within {TERM_S:.0f} s of SIGTERM")
            for number in os.read(self._read, 64):
                heard += number in SIGNALS
                if number not in SIGNALS:
                    continue
                if self.in_order is None:
                    self._leave_now(number, "nothing had begun")
                if heard > 1:
                    self._leave_now(number, "left at once")
                self._say("leaving: the running exchange is finished and everything saved"
                          + ("; Ctrl-C again leaves at once" if number == signal.SIGINT else f", within {TERM_S:.0f} s"))
                self.in_order()
                until = time.monotonic() + TERM_S if number == signal.SIGTERM else None

    def _leave_now(self, number: int, why: str) -> NoReturn:
        with contextlib.suppress(Exception):
            self._say(f"{why}: the same command goes on from the last checkpoint")
            self._before_exit()
        children = [child.pid for child in psutil.Process().children(recursive=True)]
        for pid in children:  # no call between these lines gives the main thread time to wonder
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(128 + number)
