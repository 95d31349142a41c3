"""`p2p-muloco demo --chaos SEED`: real peers, real kill -9 and SIGSTOP, poisoners among them, and a verdict at the end."""

from __future__ import annotations

import contextlib
import json
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

from p2p_muloco.cli.processes import DEMO_MODEL, Processes, Watch, last_line, start_bootstrap, start_peer
from p2p_muloco.cli.view import console
from rich.console import Console
from rich.live import Live
from rich.table import Table

from p2p_muloco.chaos import Fault, max_out, plan
from p2p_muloco.config import InnerConfig, RunConfig, RunSection
from p2p_muloco.errors import ConfigError, MulocoError
from p2p_muloco.metrics import JsonTail
from p2p_muloco.verdict import Deed, Observed, commit_after, counted_after, executed_steps, growth, judge, rounds

START_S = 120.0  # for all peers to be counted once, on a busy machine
TICK_S = 0.25
LEFT = (0, 130, -signal.SIGINT)  # exit codes after Ctrl-C: in order, or while it started
LINE_S = 10.0  # of silence, before a line on how far the run is where there is no live table


def chaos_config() -> RunConfig:
    """The demo's model, rounds of a few seconds for six peers on two cores, and no end: time ends it.

    Without a budget there is no schedule either: the learning rate stays where it is.
    """
    run = RunSection(name="chaos", inner_steps=20, min_peers=2, token_budget=10**15, window_s=5.0, snapshot_every=10)
    return RunConfig(run=run, model=DEMO_MODEL, inner=InnerConfig(batch_size=4, lr=0.01, warmup=0.0))


def run(out: Path, seed: int, seconds: float, rate: float, peers: int, json_path: Path | None) -> None:
    """Play the plan of `seed` for so many seconds and judge the swarm; MulocoError if a promise broke."""
    if rate and not max_out(peers):
        raise ConfigError(f"--peers {peers}: of fewer than 3, no minority can be killed; take 3 or more, or --rate 0")
    faults, screen = plan(seed, seconds, rate, peers), console()
    (out / "run.toml").write_text(chaos_config().to_toml())
    screen.print(f"{peers} peers, {len(faults)} faults in {seconds / 60:g} minutes as seed {seed} decides; logs go to {out}/")
    with Processes() as processes:
        watch = Watch(processes)
        swarm = Swarm(processes, watch, out, start_bootstrap(processes, out), screen)
        with swarm.live:
            swarm.begin(peers)
            swarm.play(faults, seconds)
        swarm.say("Ctrl-C to everybody")
    result = {"seed": seed, "peers": peers, "faults": _by_kind(faults), **judge(swarm.observed(watch.left()))}
    if not faults:
        result["resources"] = watch.samples
        result["broken_promises"] += growth({key: rows for key, rows in watch.samples.items() if len(rows) >= 4})
    if json_path:
        json_path.write_text(json.dumps(result) + "\n")
    _print_report(screen, result)
    if result["broken_promises"]:
        raise MulocoError("broken promises: " + "; ".join(result["broken_promises"]))


@dataclass
class _Peer:
    process: Popen[str]
    log: JsonTail
    how: str  # it misbehaves; "" if it is honest
    doing: str = ""


class Swarm:
    """The peers on this machine, what is done to them, and what they write meanwhile."""

    def __init__(self, processes: Processes, watch: Watch, out: Path, join: str, screen: Console) -> None:
        self.processes, self.watch, self.out, self.join, self.screen = processes, watch, out, join, screen
        self.peers: dict[str, _Peer] = {}
        self.deeds: list[Deed] = []
        self.troubles: list[str] = []
        self.began = self.ended = time.time()
        live = Live(console=screen, refresh_per_second=4, get_renderable=self._table, transient=True)
        self.live = live if screen.is_terminal else contextlib.nullcontext()
        self._questions: list[tuple[str, Callable[[], float | None]]] = []  # asked until there is an answer in seconds
        self._said_at = time.monotonic()

    @property
    def histories(self) -> dict[str, list[dict[str, Any]]]:
        """What honest peers wrote."""
        return {name: peer.log.records for name, peer in self.peers.items() if not peer.how}

    def begin(self, peers: int) -> None:
        """Start peers, and return when each has been counted."""
        for number in range(peers):
            self._start(_name(number))
        until = time.monotonic() + START_S
        while any(counted_after(history, 0.0) is None for history in self.histories.values()):
            self._tick()
            if time.monotonic() > until or self.troubles:
                words = "; ".join(f"{log.stem}: {last_line(log)}" for _, log in self.processes.running[1:])
                raise MulocoError(f"not every peer was counted within {START_S:.0f} s; their last words: {words}")
        self.began = time.time()
        self.watch.samples.clear()  # what it takes to start is no growth

    def play(self, faults: list[Fault], seconds: float) -> None:
        """Do to the peers what the plan says, at its times; return after `seconds`."""
        due = sorted([(f.at_s, self._commit, f) for f in faults] + [(f.until_s, self._undo, f) for f in faults],
                     key=lambda row: row[0])
        while (at_s := time.time() - self.began) < seconds:
            while due and due[0][0] <= at_s:
                _, act, fault = due.pop(0)
                act(_name(fault.victim), fault)
            self._tick()
        self.ended = time.time()

    def observed(self, left: list[str]) -> Observed:
        """All of it, once everybody has ended."""
        for name, peer in self.peers.items():
            peer.log.update()
            if not peer.how and peer.doing != "ended" and peer.process.poll() not in LEFT:
                self._trouble(name)
        executed = {name: executed_steps(self.out / name, history) for name, history in self.histories.items()}
        gone = {deed.peer for deed in self.deeds if deed.what == "leave"}
        return Observed(self.began, self.ended, self.deeds, self.histories, executed, frozenset(self.histories) - gone, left,
                        self.troubles)

    # -- deeds

    def _commit(self, name: str, fault: Fault) -> None:
        match fault.kind:
            case "kill":
                at = self._did("kill", name, f"kill -9 of {name}; it starts again in {fault.seconds:.0f} s", "killed")
                self.processes.kill(self.peers[name].process)
                self._ask(f"a new round {{:.1f}} s after the kill of {name}", lambda: commit_after(self.histories, name, at))
            case "freeze":
                self._did("freeze", name, f"{name} is frozen for {fault.seconds:.0f} s", "frozen")
                self.processes.freeze(self.peers[name].process)
            case "join":
                self.say(f"{name} comes late, for {fault.seconds:.0f} s")
                self._start(name)
            case "poison":
                self.say(f"{name} comes as a poisoner ({fault.how}), for {fault.seconds:.0f} s")
                self._start(name, fault.how)

    def _undo(self, name: str, fault: Fault) -> None:
        match fault.kind:
            case "kill":
                self.say(f"{name} starts again")
                self._start(name)
            case "freeze":
                at = self._did("wake", name, f"{name} wakes up")
                self.processes.wake(self.peers[name].process)
                self._ask(f"{name} counted again {{:.1f}} s after it woke up",
                          lambda: counted_after(self.peers[name].log.records, at))
            case _:
                self._did("leave", name, f"{name} leaves", "left")
                self.peers[name].process.send_signal(signal.SIGINT)

    def _start(self, name: str, how: str = "") -> None:
        process = start_peer(self.processes, self.out / name, self.join, 1, *(("--misbehave", how) if how else ()))
        log = self.peers[name].log if name in self.peers else JsonTail(self.out / name / "metrics.jsonl")
        self.peers[name] = _Peer(process, log, how)
        at = self._did("start", name)
        self._ask(f"{name} counted {{:.1f}} s after its start", lambda: counted_after(log.records, at))

    def _did(self, what: str, name: str, text: str = "", doing: str = "") -> float:
        """Note and say it; the caller does it."""
        at = time.time()
        self.deeds.append(Deed(at, what, name))
        self.peers[name].doing = doing
        if text:
            self.say(text)
        return at

    # -- what is seen

    def say(self, text: str) -> None:
        self._said_at = time.monotonic()
        since = time.time() - self.began if self.began != self.ended else 0.0
        self.screen.print(f"{since:6.1f} s  {text}", soft_wrap=True)

    def _ask(self, text: str, ask: Callable[[], float | None]) -> None:
        self._questions.append((text, ask))

    def _tick(self) -> None:
        time.sleep(TICK_S)
        self.watch.look()
        for name, peer in self.peers.items():
            peer.log.update()
            if not peer.doing and peer.process.poll() is not None:
                peer.doing = "ended"
                self._trouble(name)
        for text, ask in list(self._questions):
            if (seconds := ask()) is not None:
                self._questions.remove((text, ask))
                self.say(text.format(seconds))
        if not self.screen.is_terminal and time.monotonic() > self._said_at + LINE_S:
            self.say(self._line())

    def _trouble(self, name: str) -> None:
        peer = self.peers[name]
        text = f"{name} ended with code {peer.process.returncode}: {last_line(self.out / f'{name}.log')}"
        self.say(text)
        if not peer.how:
            self.troubles.append(text)

    def _line(self) -> str:
        last = max((r for history in self.histories.values() for r in rounds(history)), key=lambda r: r["round"], default=None)
        return "nobody has been counted yet" if last is None else _describe(last)

    def _table(self) -> Table:
        table = Table(title="what a swarm bears")
        for heading in ("peer", "round", "held-out", "group", "head", ""):
            table.add_column(heading)
        for name, peer in self.peers.items():
            if peer.doing != "left":
                last = (rounds(peer.log.records) or [None])[-1]
                shown = ["-"] * 4 if last is None else [
                    str(last["round"]), _loss(last["heldout_loss"]), str(last["members"]), last["digest"][:12]]
                table.add_row(name, *shown, peer.doing or peer.how)
        return table


def _describe(record: dict[str, Any]) -> str:
    return (f"round {record['round']:<4} held-out {_loss(record['heldout_loss'])}  group of {record['members']}  "
            f"head {record['digest'][:12]}")


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.3f}"


def _name(number: int) -> str:
    return f"peer-{number + 1}"


def _by_kind(faults: list[Fault]) -> dict[str, int]:
    return {kind: sum(f.kind == kind for f in faults) for kind in sorted({fault.kind for fault in faults})}


def _print_report(screen: Console, r: dict[str, Any]) -> None:
    def seconds(values: list[float]) -> str:
        return f"median {statistics.median(values):.1f} s, at most {max(values):.1f} s" if values else "-"

    screen.print(
        f"\nfaults         {', '.join(f'{n} {kind}' for kind, n in r['faults'].items()) or 'none'}\n"
        f"after a kill   next commit: {seconds(r['commit_after_kill_s'])}\n"
        f"back again     from the start of a killed peer until it is counted: {seconds(r['rejoin_s'])}\n"
        f"efficiency     {r['step_efficiency']:.3f} of {r['inner_steps']} inner steps are in committed entries\n"
        f"agreement      {r['rounds']} rounds, {r['silent_differences']} heads with more than one state\n"
        f"pauses         {r['hangs']} over 30 s; the longest {r['longest_pause_s']:.1f} s\n"
        f"processes      {r['processes_left']} left behind\n"
        f"held-out loss  {_loss(r['heldout_loss_start'])} -> {_loss(r['heldout_loss_end'])} nats a byte\n"
        f"promises       {len(r['broken_promises']) or 'none'} broken",
        soft_wrap=True,
    )
