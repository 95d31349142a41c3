"""Real peers as processes, for the tests that need sockets, signals and kill -9."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import netlab

from p2p_muloco.metrics import read_json_lines

RUN = """
[run]
name = "test"
inner_steps = {inner_steps}
token_budget = {budget}
min_peers = {min_peers}
clock = "{clock}"
overlap = "{overlap}"
window_s = 8.0
snapshot_every = 3
[model]
d_model = 32
n_layers = 2
n_heads = 2
d_mlp = 96
seq_len = 64
[inner]
batch_size = 4
"""


def cli(*arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "p2p_muloco.cli.main", *arguments], capture_output=True, text=True,
                          timeout=timeout_s, check=False)


class PeerProcess:
    def __init__(self, home: Path, *arguments: str, prefix: Sequence[str] = ()) -> None:
        self.home, self.log = home, home.with_suffix(".log")
        with open(self.log, "w") as file:
            self.process = subprocess.Popen([*prefix, sys.executable, "-m", "p2p_muloco.cli.main", *arguments],
                                            stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True)

    def rounds(self) -> list[dict[str, Any]]:
        return [r for r in read_json_lines(self.home / "metrics.jsonl") if r["event"] == "round"]

    def heads(self) -> dict[int, tuple[str, str]]:
        return {r["round"]: (r["digest"], r["state"]) for r in self.rounds()}

    def round(self) -> int:
        return max(self.heads(), default=0)

    def words(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """kill -9 of the peer's own process; what it started must end by itself."""
        self.process.kill()
        self.process.wait()


class Stage:
    """One test's run: a bootstrap node, peers, and nothing left behind."""

    def __init__(self, folder: Path, *, min_peers: int = 2, inner_steps: int = 8, budget: int = 10**9,
                 clock: str = "time", overlap: str = "keep", host: int | None = None) -> None:
        """`host`: of the bootstrap node, on an internet of netlab."""
        self.folder = folder
        self.processes: list[PeerProcess] = []
        law = RUN.format(min_peers=min_peers, inner_steps=inner_steps, budget=budget, clock=clock, overlap=overlap)
        (folder / "run.toml").write_text(law)
        listen = "127.0.0.1:0" if host is None else "0.0.0.0:31337"
        arguments = (str(folder / "run.toml"), "--listen", listen, "--home", str(folder / "bootstrap"))
        self.bootstrap = self._start("bootstrap", "bootstrap", *arguments, host=host)
        assert self.bootstrap.process.stdout is not None
        self.join_string = self.bootstrap.process.stdout.readline().strip()
        assert self.join_string, self.bootstrap.words()

    def _start(self, name: str, *arguments: str, host: int | None = None) -> PeerProcess:
        process = PeerProcess(self.folder / name, *arguments, prefix=netlab.within(host) if host else ())
        self.processes.append(process)
        return process

    def join(self, name: str, *more: str, host: int | None = None) -> PeerProcess:
        listen = "0.0.0.0:0" if host else "127.0.0.1:0"
        return self._start(name, "join", self.join_string, "--home", str(self.folder / name), "--name", name, "--threads", "1",
                           "--device", "cpu", "--listen", listen, *more, host=host)

    def until(self, what: str, condition: Callable[[], bool], limit_s: float = 90.0) -> float:
        """Wait for what real processes do; return the seconds it took."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > limit_s:
                words = "\n".join(f"--- {p.home.name}\n{p.words()[-1500:]}" for p in self.processes)
                raise AssertionError(f"{what}: not within {limit_s} s\n{words}")
            time.sleep(0.05)
        return time.monotonic() - began

    def close(self) -> None:
        for number, wait_s in ((signal.SIGINT, 20.0), (signal.SIGKILL, 5.0)):
            alive = [p.process for p in self.processes if p.process.poll() is None]
            for process in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)
            for process in alive:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(wait_s)
        for p in self.processes:
            if p.process.stdout is not None:
                p.process.stdout.close()


@contextlib.contextmanager
def stage(folder: Path, **law: Any) -> Iterator[Stage]:
    it = Stage(folder, **law)
    try:
        yield it
    finally:
        it.close()
