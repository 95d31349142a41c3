"""A swarm on this machine: a bootstrap node and peers as processes of their own, started, disturbed and ended."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from p2p_muloco.config import ModelConfig
from p2p_muloco.errors import MulocoError

LOOK_S, SAMPLE_S = 1.0, 5.0
LEFT_S = 10.0  # for the last ones to end

__all__ = ["DEMO_MODEL", "Processes", "Watch", "family", "last_line", "start_bootstrap", "start_peer"]

DEMO_MODEL = ModelConfig(d_model=64, n_layers=4, n_heads=4, d_mlp=176, seq_len=128)  # 0.23M parameters


class Processes:
    """Each is the leader of its own session; all end with the block."""

    def __init__(self) -> None:
        self.running: list[tuple[subprocess.Popen[str], Path]] = []
        self._frozen: dict[subprocess.Popen[str], list[psutil.Process]] = {}

    def __enter__(self) -> Processes:
        return self

    def start(self, log: Path, *arguments: str) -> subprocess.Popen[str]:
        # -P: a source tree in the current folder must not hide the installed package
        # two gigabytes of address space a thread arena are nothing on one peer and much on many
        environment = {**os.environ, "MALLOC_ARENA_MAX": "2"}
        with open(log, "a") as file:
            process = subprocess.Popen([sys.executable, "-P", "-m", "p2p_muloco.cli.main", *arguments], stdout=subprocess.PIPE,
                                       stderr=file, text=True, start_new_session=True, env=environment)
        self.running.append((process, log))
        return process

    def check(self) -> None:
        """Raise MulocoError with the last words of a process that failed."""
        for process, log in self.running:
            if process.poll() not in (None, 0):
                raise MulocoError(f"{log.stem} ended with code {process.returncode}: {last_line(log)} (all of it: {log})")

    def kill(self, process: subprocess.Popen[str]) -> None:
        """kill -9 of the process alone; what it started must end by itself."""
        process.kill()
        process.wait()
        self.running = [(other, log) for other, log in self.running if other is not process]

    def freeze(self, process: subprocess.Popen[str]) -> None:
        """SIGSTOP of the process and of all that it started, as when a laptop is shut."""
        self._frozen[process] = family(process)
        _signal(self._frozen[process], signal.SIGSTOP)

    def wake(self, process: subprocess.Popen[str]) -> None:
        _signal(self._frozen.pop(process), signal.SIGCONT)

    def __exit__(self, *_: object) -> None:
        for process in list(self._frozen):
            self.wake(process)
        for number, wait_s in ((signal.SIGINT, 20.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            alive = [process for process, _ in self.running if process.poll() is None]
            for process in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            until = time.monotonic() + wait_s
            for process in alive:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, until - time.monotonic()))


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The process and all that it started, itself first; [] if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        own = psutil.Process(process.pid)
        return [own, *own.children(recursive=True)]
    return []


class Watch:
    """What the processes use, and whether any of them, or of those that they started, outlives them all."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._seen: set[psutil.Process] = set()
        self._began = time.monotonic()
        self._looked_at = self._sampled_at = -math.inf
        self.samples: dict[str, list[list[float]]] = {}
        """"peer role" -> rows of (seconds, resident bytes, open files, threads)"""

    def look(self) -> None:
        """As often as you like: it does something once a second."""
        now = time.monotonic()
        if now < self._looked_at + LOOK_S:
            return
        self._looked_at = now
        families = {log.stem: family(process) for process, log in self._processes.running}
        self._seen.update(itertools.chain.from_iterable(families.values()))
        if now >= self._sampled_at + SAMPLE_S:
            self._sampled_at = now
            for name, members in families.items():
                for process in members:
                    self._sample(f"{name} {_role(process, members[0])}", process)

    def _sample(self, key: str, process: psutil.Process) -> None:
        if key.endswith(" sh"):  # the daemon's guard
            return
        with contextlib.suppress(psutil.Error), process.oneshot():
            row = [round(time.monotonic() - self._began, 1), process.memory_info().rss, process.num_fds(), process.num_threads()]
            self.samples.setdefault(key, []).append(row)

    def left(self) -> list[str]:
        """Name and pid of each that still lives although all should have ended; then end them."""
        until = time.monotonic() + LEFT_S
        while (alive := self._alive()) and time.monotonic() < until:
            time.sleep(0.1)
        names = [f"{_name(process)} {process.pid}" for process in alive]
        _signal(alive, signal.SIGKILL)
        return names

    def _alive(self) -> list[psutil.Process]:
        sessions, alive = {process.pid for process in self._seen}, []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                ours = process in self._seen or os.getsid(process.pid) in sessions
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        return alive


def _role(process: psutil.Process, first: psutil.Process) -> str:
    return "main" if process == first else name if (name := _name(process)) in ("p2pd", "sh") else "network"


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return str(process.name())
    return "ended"


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def start_bootstrap(processes: Processes, out: Path) -> str:
    """Return the join string of the run in OUT/run.toml."""
    arguments = (str(out / "run.toml"), "--listen", "127.0.0.1:0", "--home", str(out / "bootstrap"))
    process = processes.start(out / "bootstrap.log", "bootstrap", *arguments)
    assert process.stdout is not None
    join = process.stdout.readline().strip()
    if not join:
        process.wait(10)
        processes.check()
        raise MulocoError(f"the bootstrap node gave no join string; see {out / 'bootstrap.log'}")
    (out / "join.txt").write_text(join + "\n")
    return join


def start_peer(processes: Processes, home: Path, join: str, threads: int, *more: str) -> subprocess.Popen[str]:
    """A peer called as its home, whose log lies beside it."""
    arguments = ("--home", str(home), "--name", home.name, "--threads", str(threads), "--listen", "127.0.0.1:0")
    return processes.start(home.with_name(f"{home.name}.log"), "join", join, *arguments, "--device", "cpu", *more)
