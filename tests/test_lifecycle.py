"""Comings and goings of real peers: Ctrl-C once and twice, SIGTERM, kill -9 of any process, a lid that is closed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from peers import PeerProcess, Stage, stage

pytestmark = pytest.mark.processes

FROZEN_S = 18.0  # longer than any exchange of these peers, and than any lease


def family(peer: PeerProcess) -> list[psutil.Process]:
    """The peer's own process, and all it started: its network, the daemon, the daemon's guard."""
    own = psutil.Process(peer.process.pid)
    return [own, *own.children(recursive=True)]


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            pass
    return found


def signalled(s: Stage, peer: PeerProcess, *numbers: int, within_s: float) -> int:
    """The exit code after signals that arrive at the same moment; nothing of the peer lives then."""
    processes = family(peer)
    for number in (signal.SIGSTOP, *numbers, signal.SIGCONT):  # stopped, or it may have left before the second is sent
        peer.process.send_signal(number)
    s.until(f"the end after signals {numbers}", lambda: peer.process.poll() is not None, within_s)
    s.until("nothing of it lives", lambda: not alive(processes), 5.0)
    return peer.process.returncode


def executed(peer: PeerProcess) -> int:
    return int((peer.home / "executed").read_text())


def agree(peers: list[PeerProcess]) -> bool:
    heads = [peer.heads() for peer in peers]
    return all(len({known[k] for known in heads if k in known}) == 1 for k in set().union(*heads))


def test_peers_leave_return_and_sleep_and_nothing_is_lost(tmp_path: Path) -> None:
    """One story, for starting a peer takes seconds."""
    with stage(tmp_path, min_peers=3, inner_steps=12) as s:
        early, brief, first, second, third = (s.join(name) for name in ("early", "brief", "first", "second", "third"))
        s.until("a peer that starts", lambda: "entering the network" in early.words())
        assert signalled(s, early, signal.SIGINT, within_s=5.0) == 130 and "nothing had begun" in early.words()
        s.until("a peer that looks for the others", lambda: "joined test" in brief.words())
        assert signalled(s, brief, signal.SIGTERM, within_s=15.0) == 0 and "within 8 s" in brief.words()
        assert "left the run" in brief.words() and list((brief.home / "checkpoints").glob("*.safetensors"))
        s.until("rounds of three", lambda: all(len(p.rounds()) >= 3 for p in (first, second, third)))

        asleep = family(third)
        for process in asleep:
            process.suspend()
        woken_at = time.monotonic() + FROZEN_S
        returned, before = leave_and_return(s, first, second)
        time.sleep(max(0.0, woken_at - time.monotonic()))
        s.until("rounds without the sleeper", lambda: first.round() > before)
        missed = first.round()
        for process in asleep:
            process.resume()
        s.until("it takes part again", lambda: any(r["counted"] and r["round"] > missed for r in third.rounds()), 30.0)
        assert agree([first, third, returned]) and not any(said in third.words() for said in ("WARNING", "error"))

        stopped = family(third)
        for process in stopped:  # as a service manager does: the network is gone before the trainer has heard
            with contextlib.suppress(psutil.NoSuchProcess):  # one of them takes others with it
                process.terminate()
        s.until("all of it has ended", lambda: third.process.poll() is not None and not alive(stopped), 15.0)
        assert third.process.returncode == 0 and "left the run" in third.words(), third.words()
        killed_at_any_process(s, returned, first)
        last, steps = first.round(), executed(first)
        again = s.join("first")
        s.until("a killed one goes on", lambda: any(r["counted"] and r["round"] > last for r in again.rounds()), 40.0)
        assert executed(again) > steps and agree([again, returned, third])
        # two kinds, for of one kind the system may make one signal out of two; which of them is heard first is its choice
        assert signalled(s, again, signal.SIGINT, signal.SIGTERM, within_s=5.0) in (130, 143)
        assert "left at once" in again.words()


def leave_and_return(s: Stage, staying: PeerProcess, leaving: PeerProcess) -> tuple[PeerProcess, int]:
    """Ctrl-C once, then the very command that was told. Returns the peer that came back, and the round it came back at."""
    assert signalled(s, leaving, signal.SIGINT, within_s=15.0) == 0, leaving.words()
    words, end = leaving.words(), json.loads((leaving.home / "metrics.jsonl").read_text().splitlines()[-1])
    assert re.search(rf"{end['inner_steps']} inner steps, {end['tokens']} tokens, {end['rounds_counted']} rounds counted", words)
    assert end["inner_steps"] == executed(leaving) > 0 and end["rounds_counted"] >= 3
    told = re.search(r"to go on from here:  p2p-muloco (.*)", words)
    assert told is not None
    last = leaving.round()
    back = s._start(leaving.home.name, *shlex.split(told.group(1)))
    s.until("it is counted again", lambda: any(r["counted"] and r["round"] > last + 1 for r in back.rounds()), 40.0)
    assert f"going on after {end['total_inner_steps']} inner steps" in back.words()
    first = next(r for r in back.rounds() if r["round"] > last)
    assert first["total_steps"] >= end["total_inner_steps"] and executed(back) > end["inner_steps"]
    return back, staying.round()


def killed_at_any_process(s: Stage, one: PeerProcess, other: PeerProcess) -> None:
    """kill -9 of the network alone, and of network and trainer at once; the trainer alone is in test_processes."""
    processes = family(one)
    processes[1].kill()
    s.until("the trainer has ended too", lambda: one.process.poll() is not None, 15.0)
    assert one.process.returncode == 4 and "its state is on disk" in one.words()
    s.until("nothing of it lives", lambda: not alive(processes), 5.0)
    processes = family(other)
    for process in processes[:2]:
        os.kill(process.pid, signal.SIGKILL)
    s.until("nothing of the other lives", lambda: not alive(processes), 5.0)
    other.process.wait()


BUSY = """
import hashlib, subprocess, sys
from p2p_muloco.cli import leaving
leaving.TERM_S = 0.3
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
with leaving.Leaving(lambda text: print(text, flush=True), lambda: None) as it:
    it.in_order = lambda: None
    print(child.pid, flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes without a line of Python
"""


@pytest.mark.parametrize(("signals", "code"), [([signal.SIGTERM], 143), ([signal.SIGINT, signal.SIGINT], 130),
                                               ([signal.SIGINT, signal.SIGTERM], 143), ([signal.SIGTERM, signal.SIGINT], 130)])
def test_a_signal_is_heard_whatever_the_main_thread_does(signals: list[int], code: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    for number in signals:
        process.send_signal(number)
        assert "leaving" in process.stdout.readline() or number == signals[-1]
    assert process.wait(10.0) == code and not alive([child])
    process.stdout.close()
