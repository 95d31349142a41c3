"""p2p-muloco: train one language model together over the internet (MuLoCo and IsoLoCo over hivemind)."""

from __future__ import annotations

__version__ = "0.1.0"
