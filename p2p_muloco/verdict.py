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

__all__ = ["Deed", "Observed", "commit_after", "counted_after", "executed_steps", "judge"]

HANG_S = 30.0
LEAST_EFFICIENCY = 0.95
COMMIT_S, REJOIN_S = 5.0, 20.0  # medians
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
    ended: float  # the first one was told to leave
    deeds: Sequence[Deed]
    histories: Mapping[str, History]
    executed: Mapping[str, int]  # inner steps of each peer, lost ones included
    staying: frozenset[str]  # peers that were to be there at the end
    left: Sequence[str] = ()  # processes that outlived the run
    troubles: Sequence[str] = ()  # what else was seen to go wrong


def executed_steps(home: Path, history: History) -> int:
    """Inner steps this home ever computed: its own count, or what its records know of."""
    path = home / "executed"
    if path.exists() and len(packed := path.read_bytes()) == 8:
        return int.from_bytes(packed, "little")
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


def judge(observed: Observed) -> dict[str, Any]:
    """The figures of a run, and under "broken_promises" a line for each promise that it broke."""
    o, deeds = observed, observed.deeds
    starts = [(deed, was) for was, deed in _in_pairs(deeds) if deed.what == "start"]
    commits = [(d, commit_after(o.histories, d.peer, d.at)) for d in deeds if d.what == "kill"]
    rejoins = [(d, counted_after(o.histories[d.peer], d.at)) for d, was in starts if was.what == "kill"]
    executed, losses = sum(o.executed.values()), _heldout_losses(o.histories)
    gaps, two_states = pauses(o), heads_with_two_states(o.histories)
    commit_s = [round(s, 2) for _, s in commits if s is not None]
    rejoin_s = [round(s, 2) for _, s in rejoins if s is not None]
    commit, rejoin = _median(commit_s), _median(rejoin_s)
    efficiency = committed_steps(o.histories) / executed if executed else 0.0
    hangs = [gap for gap in gaps if gap > HANG_S]
    promises = {
        f"no pause over {HANG_S:.0f} s; there were {len(hangs)}, up to {max(gaps):.0f} s": not hangs,
        f"one state under every head; {len(two_states)} heads have several": not two_states,
        f"no process stays behind; these did: {', '.join(o.left)}": not o.left,
        f"{LEAST_EFFICIENCY} of all inner steps are committed; {efficiency:.3f} were": efficiency >= LEAST_EFFICIENCY,
        f"a commit within {COMMIT_S:.0f} s of a kill (median); it took {commit:.1f} s": commit <= COMMIT_S,
        f"killed peers are back within {REJOIN_S:.0f} s (median); it took {rejoin:.1f} s": rejoin <= REJOIN_S,
        "held-out loss falls; it was " + " and then ".join(f"{x:.3f}" for x in losses): losses[-1] < losses[0],
    }
    absent = [peer for peer in sorted(o.staying) if counted_after(o.histories[peer], o.ended - ABSENT_S) is None]
    broken = [text for text, kept in promises.items() if not kept]
    broken += [f"{peer} takes part at the end; it was counted in nothing for {ABSENT_S:.0f} s" for peer in absent]
    broken += [f"something is committed after {d.peer} was killed; nothing was" for d, s in commits if s is None]
    return {
        "rounds": max(winning_chain(o.histories), default=0), "seconds": round(o.ended - o.began, 1),
        "commit_after_kill_s": commit_s, "rejoin_s": rejoin_s, "step_efficiency": round(efficiency, 4),
        "inner_steps": executed, "silent_differences": len(two_states), "hangs": len(hangs),
        "longest_pause_s": round(max(gaps), 2), "processes_left": len(o.left), "heldout_loss_start": losses[0], "heldout_loss_end": losses[-1],
        "broken_promises": [*broken, *o.troubles],
    }


def _in_pairs(deeds: Sequence[Deed]) -> list[tuple[Deed, Deed]]:
    """Each deed with the next one to the same peer."""
    by_peer: dict[str, list[Deed]] = defaultdict(list)
    for deed in deeds:
        by_peer[deed.peer].append(deed)
    return [pair for of_one in by_peer.values() for pair in itertools.pairwise(of_one)]


def _heldout_losses(histories: Mapping[str, History]) -> list[float]:
    """By round; NaN alone if nobody measured any."""
    by_round = {r["round"]: r["heldout_loss"] for history in histories.values() for r in rounds(history)
                if r["heldout_loss"] is not None}
    return [by_round[number] for number in sorted(by_round)] or [math.nan]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
