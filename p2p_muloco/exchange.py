"""The seam between trainer and network.

An `Exchange` takes a packet and gives back how the attempt ended; the trainer knows nothing else of the network. There are
two: `LocalExchange` (local.py: in memory, on a virtual clock) and `HivemindExchange` (hive.py: real peers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from p2p_muloco.chain import Tip
from p2p_muloco.member import Behind, Committed, Failed, Outcome
from p2p_muloco.packet import Packet
from p2p_muloco.waypoint import Waypoint
from p2p_muloco.wire import Record

__all__ = ["Behind", "Committed", "Exchange", "Failed", "Outcome", "Traffic"]


@dataclass
class Traffic:
    """Bytes of all frames, heads included, since the peer began, and CPU seconds of the processes that carry them."""

    sent: int = 0
    received: int = 0
    cpu_s: float = 0.0


class Exchange(Protocol):
    """What a trainer needs of a network. No call blocks but `wait`, `answers` and `fetch`."""

    peer_id: bytes

    @property
    def traffic(self) -> Traffic: ...

    def begin(self, packet: Packet) -> None:
        """Bring a packet into the next entry."""

    def withdraw(self) -> None:
        """Take the packet back if no attempt holds it yet."""

    def poll(self) -> Outcome | None:
        """How the attempt ended, or that somebody is ahead; None while neither is known."""

    def wait(self, timeout_s: float) -> Outcome | None:
        """`poll`, for at most this long."""

    def adopt(self, tip: Tip) -> None:
        """The trainer is at `tip` now, by catching up."""

    def distrust(self, peer: bytes) -> None: ...

    def show_waypoint(self, waypoint: Waypoint) -> None:
        """The owner's word on this chain, for all to hear."""

    def ask(self, donor: bytes, request: Record, max_bytes: int) -> int:
        """Ask a peer for stored bytes; returns a ticket at once."""

    def answers(self, timeout_s: float) -> list[tuple[int, bytes | str]]:
        """What came since: (ticket, bytes, or why there are none). Waits this long for the first."""

    def fetch(self, donor: bytes, request: Record, max_bytes: int) -> bytes:
        """Ask and wait; raise StateUnavailable."""

    def waiting_for(self) -> str:
        """One line for people, or ''."""

    def now(self) -> float:
        """Seconds of this exchange's clock."""
