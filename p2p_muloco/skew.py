"""How far this machine's clock is from the other peers'. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from p2p_muloco.errors import ClockError

__all__ = ["Answer", "Skew", "skew"]

WARN_S = 1.0
REFUSE_S = 2.5  # at 3 s the DHT drops a peer's reports and says nothing
MAX_ROUND_TRIP_S = 1.0  # of an answer that counts: it is wrong by half of that at most


@dataclass(frozen=True)
class Answer:
    """What another peer's clock showed at some moment between two of this one's; unix seconds."""

    sent_s: float
    theirs_s: float
    received_s: float

    @property
    def round_trip_s(self) -> float:
        return self.received_s - self.sent_s

    @property
    def ahead_s(self) -> float:
        return (self.sent_s + self.received_s) / 2 - self.theirs_s


@dataclass(frozen=True)
class Skew:
    """This machine's clock is `ahead_s` seconds (or behind, if negative) of `peers` others."""

    ahead_s: float
    peers: int

    def warning(self) -> str:
        """What a user should know, or ''; raise ClockError if the clock is too far off to take part."""
        distance_s, others = abs(self.ahead_s), f"{self.peers} peer{'s' * (self.peers != 1)}"
        text = (f"this machine's clock is {distance_s:.1f} s {'ahead of' if self.ahead_s > 0 else 'behind'} {others}; set it: "
                "`sudo timedatectl set-ntp true` (macOS: `sudo sntp -sS time.apple.com`)")
        if distance_s > REFUSE_S:
            raise ClockError(f"{text}; a run bears {REFUSE_S} s")
        return text if distance_s > WARN_S else ""


def skew(answers: Mapping[bytes, Sequence[Answer]]) -> Skew | None:
    """The median over peers, each by its fastest answer; None if no answer was fast enough to tell."""
    fastest = [min(of_one, key=lambda answer: answer.round_trip_s) for of_one in answers.values() if of_one]
    known = [answer.ahead_s for answer in fastest if 0.0 <= answer.round_trip_s <= MAX_ROUND_TRIP_S]
    return Skew(statistics.median(known), len(known)) if known else None
