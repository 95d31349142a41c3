"""How long each stage of an exchange may take: from sizes and rates, known to all before it begins. Pure."""

from __future__ import annotations

from p2p_muloco.allreduce import LENGTHENED
from p2p_muloco.chain import Law

__all__ = ["deadlines_s", "longest_exchange_s"]

FLOOR_S = 5.0  # of every stage of an exchange, whatever its size
MIN_RATE_KBPS = 500  # no stage waits longer than such a link needs, whatever a peer says of its own


def deadlines_s(law: Law, rate_kbps: int, members: int) -> tuple[float, float, float]:
    """Seconds after START for scatter, gather and confirm: three times what the slowest link needs, above a floor."""
    layout, bytes_per_s = law.layout, 125 * max(MIN_RATE_KBPS, rate_kbps)
    scatter = FLOOR_S + 3 * layout.up_bytes / bytes_per_s
    gather = scatter + FLOOR_S + 3 * layout.down_bytes / bytes_per_s + layout.merge_s() / members
    return scatter, gather, gather + FLOOR_S


def longest_exchange_s(law: Law) -> float:
    """No exchange of this run lasts longer, whoever leads it."""
    return LENGTHENED * deadlines_s(law, MIN_RATE_KBPS, 1)[2] + 1.0
