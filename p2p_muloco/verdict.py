"""What faults did to a swarm, judged from the records that its peers wrote. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Deed", "Observed", "commit_after", "counted_after", "executed_steps", "growth", "judge"]

HANG_S = 30.0
LEAST_EFFICIENCY = 0.95
COMMIT_S, REJOIN_S = 5.0, 20.0  # medians
FLAT = 1.03  # what a process uses in the last quarter of a calm run, against the second
USES = ("resident bytes", "open files", "threads")
SLACK = (4 * 2**20, 2, 2)  # of each: what one more buffer, stream or question in flight is
ABSENT_S = 30.0  # who was counted in nothing for so long at the end is not in the swarm

History = Sequence[dict[str, Any]]  # one peer's records, oldest first


@dataclass(frozen=True)
class Deed:
    """What was done to a peer, and when (unix seconds): start, kill, freeze, wake, leave."""

    at: float
    what: str
    peer: str


@dataclass
class Observed:
    """A whole run. Poisoners are nowhere in here: what they lose is no loss and what they write is no evidence."""

    began: float  # unix seconds: every peer had been counted
    ended: float  # everybody was told to leave
    deeds: Sequence[Deed]
    histories: Mapping[str, History]
    executed: Mapping[str, int]  # inner steps of each peer, lost ones included
    staying: frozenset[str]  # peers that were to be there at the end
    left: Sequence[str] = ()  # processes that outlived the run
    troubles: Sequence[str] = ()  # what else was seen to go wrong


def executed_steps(home: Path, history: History) -> int:
    """Inner steps this home ever computed: its own count, or what its records know of."""
    path = home / "executed"
    if path.exists() and (text := path.read_text().strip()).isdecimal():
        return int(text)
    return max((record["total_steps"] for record in rounds(history)), default=0)


def rounds(history: History) -> list[dict[str, Any]]:
    return [record for record in history if record["event"] == "round"]


def commit_after(histories: Mapping[str, History], victim: str, at: float) -> float | None:
    """Seconds from `at` to the first entry that nobody had then, at any other peer; None if there was none."""
    known = max((r["round"] for history in histories.values() for r in rounds(history) if r["time"] <= at), default=0)
    new = [r["time"] - at for peer, history in histories.items() if peer != victim
           for r in rounds(history) if r["time"] > at and r["round"] > known]
    return min(new, default=None)


def counted_after(history: History, at: float) -> float | None:
    """Seconds from `at` to the first entry that holds steps of this peer."""
    return min((r["time"] - at for r in rounds(history) if r["time"] > at and r["counted"]), default=None)


def heads_with_two_states(histories: Mapping[str, History]) -> list[str]:
    states: dict[str, set[str]] = defaultdict(set)
    for record in itertools.chain.from_iterable(map(rounds, histories.values())):
        states[record["digest"]].add(record["state"])
    return sorted(head for head, seen in states.items() if len(seen) > 1)


def winning_chain(histories: Mapping[str, History]) -> dict[int, str]:
    """Round -> head. Where there was a fork, the head that most peers have."""
    votes: dict[int, Counter[str]] = defaultdict(Counter)
    for history in histories.values():
        for number, head in {(record["round"], record["digest"]) for record in rounds(history)}:
            votes[number][head] += 1
    return {number: max(heads, key=lambda head: (heads[head], head)) for number, heads in votes.items()}


def committed_steps(histories: Mapping[str, History]) -> int:
    """Inner steps in entries of the winning chain; an entry that a peer has logged twice holds its steps once."""
    chain = winning_chain(histories)
    steps = {(peer, r["round"]): r["inner_steps"] for peer, history in histories.items()
             for r in rounds(history) if r["counted"] and chain[r["round"]] == r["digest"]}
    return sum(steps.values())


def pauses(observed: Observed) -> list[float]:
    """Seconds between any two entries that followed each other, from the first to the last moment of the run."""
    first: dict[int, float] = {}
    for record in itertools.chain.from_iterable(map(rounds, observed.histories.values())):
        first[record["round"]] = min(record["time"], first.get(record["round"], math.inf))
    inside = sorted(at for at in first.values() if observed.began <= at <= observed.ended)
    return [b - a for a, b in itertools.pairwise([observed.began, *inside, observed.ended])]


def judge(o: Observed) -> dict[str, Any]:
    """The figures of a run, and under "broken_promises" a line for each promise that it broke."""
    commits = [(d, commit_after(o.histories, d.peer, d.at)) for d in o.deeds if d.what == "kill"]
    starts = [now for before, now in _in_pairs(o.deeds) if (before.what, now.what) == ("kill", "start")]
    losses, gaps, executed = _heldout_losses(o.histories), pauses(o), sum(o.executed.values())
    figures = {
        "rounds": max(winning_chain(o.histories), default=0), "seconds": round(o.ended - o.began, 1),
        "commit_after_kill_s": [round(s, 2) for _, s in commits if s is not None],
        "rejoin_s": [round(s, 2) for d in starts if (s := counted_after(o.histories[d.peer], d.at)) is not None],
        "step_efficiency": round(committed_steps(o.histories) / max(1, executed), 4), "inner_steps": executed,
        "silent_differences": len(heads_with_two_states(o.histories)),
        "hangs": sum(gap > HANG_S for gap in gaps), "longest_pause_s": round(max(gaps), 2),
        "processes_left": len(o.left), "heldout_loss_start": losses[0], "heldout_loss_end": losses[-1],
    }
    dead = [f"nothing was committed after the kill of {deed.peer}" for deed, seconds in commits if seconds is None]
    absent = [f"{peer} was counted in nothing in the last {ABSENT_S:.0f} s" for peer in sorted(o.staying)
              if counted_after(o.histories[peer], o.ended - ABSENT_S) is None]
    return {**figures, "broken_promises": [*_broken(figures), *dead, *absent, *o.troubles]}


def _broken(f: Mapping[str, Any]) -> list[str]:
    commit_s, rejoin_s = (statistics.median(f[key] or [0.0]) for key in ("commit_after_kill_s", "rejoin_s"))
    promises = {
        f"no round for over {HANG_S:.0f} s, {f['hangs']} times": f["hangs"] == 0,
        f"{f['silent_differences']} heads stand for more than one state": f["silent_differences"] == 0,
        f"{f['processes_left']} processes stayed behind": f["processes_left"] == 0,
        f"step efficiency {f['step_efficiency']}, under {LEAST_EFFICIENCY}": f["step_efficiency"] >= LEAST_EFFICIENCY,
        f"the next commit took {commit_s:.1f} s after a kill (median), over {COMMIT_S:.0f} s": commit_s <= COMMIT_S,
        f"killed peers were back after {rejoin_s:.1f} s (median), over {REJOIN_S:.0f} s": rejoin_s <= REJOIN_S,
        f"held-out loss went from {f['heldout_loss_start']} to {f['heldout_loss_end']}": _fell(f),
    }
    return [broken for broken, kept in promises.items() if not kept]


def _fell(f: Mapping[str, Any]) -> bool:
    start, end = f["heldout_loss_start"], f["heldout_loss_end"]
    return start is not None and end is not None and end < start


def growth(samples: Mapping[str, Sequence[Sequence[float]]]) -> list[str]:
    """A line for each use that grew; `samples` has for each process rows of (seconds, *USES), evenly spaced."""
    grown = []
    for process, rows in samples.items():
        quarter = len(rows) // 4
        for column, (use, slack) in enumerate(zip(USES, SLACK, strict=True), start=1):
            second = statistics.mean(row[column] for row in rows[quarter : 2 * quarter])
            last = statistics.mean(row[column] for row in rows[-quarter:])
            if last > FLAT * second + slack:
                grown.append(f"{process}: {use} grew from {second:.0f} to {last:.0f}")
    return grown


def _in_pairs(deeds: Sequence[Deed]) -> list[tuple[Deed, Deed]]:
    """Each deed with the next one to the same peer."""
    by_peer: dict[str, list[Deed]] = defaultdict(list)
    for deed in deeds:
        by_peer[deed.peer].append(deed)
    return [pair for of_one in by_peer.values() for pair in itertools.pairwise(of_one)]


def _heldout_losses(histories: Mapping[str, History]) -> list[float | None]:
    """By round; None where the model's loss is not finite. Who replays several entries measures the last one only."""
    measured: dict[int, float | None] = {}
    for record in itertools.chain.from_iterable(map(rounds, histories.values())):
        if record["counted"]:
            measured[record["round"]] = record["heldout_loss"]
    return [measured[number] for number in sorted(measured)] or [None]
