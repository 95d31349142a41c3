"""What goes wrong and when: a plan of faults for a real swarm, a pure function of a seed."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

__all__ = ["MISBEHAVIOURS", "Fault", "max_out", "max_poisoners", "plan"]

MISBEHAVIOURS = ("nan", "huge", "length", "stale", "h", "flip", "flip1.8", "flip10", "equivocate", "huge-average")

# of each kind: how often among all faults, and for how many seconds, until it starts again, wakes up or leaves
KINDS = {"kill": (4, 3.0, 10.0), "freeze": (3, 5.0, 25.0), "join": (1, 40.0, 80.0), "poison": (2, 40.0, 80.0)}
RECOVERY_S = {"kill": 20.0, "freeze": 10.0}  # a peer counts as out for this long after it started again or woke up
QUIET_S = 30.0  # at the end, so that everything can heal


@dataclass(frozen=True)
class Fault:
    """At `at_s`, for `seconds`: peer number `victim` is killed or frozen, or a new one with this number comes."""

    at_s: float
    kind: str
    victim: int
    seconds: float
    how: str = ""  # what a poisoner does

    @property
    def until_s(self) -> float:
        return self.at_s + self.seconds


def max_out(peers: int) -> int:
    """How many may be killed or frozen at once: a minority."""
    return (peers - 1) // 2


def max_poisoners(peers: int) -> int:
    """How many may be there at once: fewer than half of the honest peers that are there at worst."""
    return (peers - max_out(peers) - 1) // 2


def plan(seed: int, duration_s: float, rate: float, peers: int) -> list[Fault]:
    """A Poisson process of `rate` faults a minute among `peers` peers, less those that would take a majority out.

    Peers that come are numbered from `peers` on. Everybody is there again `QUIET_S` before the end.
    """
    rng, faults, at_s = random.Random(seed), list[Fault](), 0.0
    new, hows = itertools.count(peers), itertools.cycle(rng.sample(MISBEHAVIOURS, len(MISBEHAVIOURS)))
    while rate and (at_s := at_s + rng.expovariate(1.0) * 60.0 / rate) < duration_s - QUIET_S:
        [kind] = rng.choices(list(KINDS), [weight for weight, _, _ in KINDS.values()])
        victim, seconds = rng.randrange(peers), rng.uniform(*KINDS[kind][1:])
        if kind in RECOVERY_S:
            out = {f.victim for f in faults if f.kind in RECOVERY_S and at_s < f.until_s + RECOVERY_S[f.kind]}
            if victim not in out and len(out) < max_out(peers) and at_s + seconds < duration_s - QUIET_S:
                faults.append(Fault(at_s, kind, victim, seconds))
        elif _present(faults, kind, at_s) < (max_poisoners(peers) if kind == "poison" else 1 + peers // 4):
            how = next(hows) if kind == "poison" else ""
            faults.append(Fault(at_s, kind, next(new), min(seconds, duration_s - at_s), how))
    return faults


def _present(faults: list[Fault], kind: str, at_s: float) -> int:
    return sum(fault.kind == kind and at_s < fault.until_s for fault in faults)
