"""What one peer knows while it looks for the others of the next entry, and whom a leader takes into it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from p2p_muloco.chain import leader_order
from p2p_muloco.messages import TipMessage

__all__ = ["ANSWER_S", "Gathering", "choose_members"]

ANSWER_S = 3.0  # a peer that answers no question for this long is taken for gone: three asked, a second for each
CLIENTS_A_NODE = 4  # whose packets and averages a node can carry beside its own


@dataclass
class Gathering:
    """While no attempt runs: whom this peer follows, and what it has heard since its packet was ready."""

    leader: bytes
    since: float
    turn_at: float  # since when it follows this leader, or leads
    asked_at: float
    answers: dict[bytes, TipMessage] = field(default_factory=dict)
    heard_at: dict[bytes, float] = field(default_factory=dict)
    lost: set[bytes] = field(default_factory=set)  # gone or silent
    passed: set[bytes] = field(default_factory=set)  # had their turn to lead and were not ready
    enough_at: float | None = None

    def hear(self, peer: bytes, now: float) -> None:
        self.heard_at[peer] = now
        self.lost.discard(peer)

    def lose(self, peer: bytes) -> None:
        self.lost.add(peer)
        self.answers.pop(peer, None)

    def silent(self, peer: bytes, now: float) -> bool:
        return now > max(self.turn_at, self.heard_at.get(peer, 0.0)) + ANSWER_S


def choose_members(me: bytes, head: bytes, ready: Iterable[bytes], clients: set[bytes], max_group: int) -> list[bytes]:
    """The leader, and of the others that are ready as many as a group may have, in an order that each head shuffles anew.

    Of clients no more than the nodes can serve: one that finds no place yet comes after the nodes.
    """
    chosen, waiting = [me], list[bytes]()

    def places() -> int:
        held = sum(peer in clients for peer in chosen)
        return CLIENTS_A_NODE * (len(chosen) - held) - held

    for peer in leader_order(head, list(ready)):
        if peer in clients and places() <= 0:
            waiting.append(peer)
        elif peer != me:
            chosen.append(peer)
    return [*chosen, *waiting[: max(0, places())]][:max_group]
