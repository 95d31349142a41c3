"""One wrong peer of four beside real trainers: the honest three's model is as good as without it, and it is named."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from p2p_muloco.chaos import MISBEHAVIOURS

PATH = Path(__file__).parents[1] / "examples" / "hostile_peer.py"


@cache
def example() -> Any:
    spec = importlib.util.spec_from_file_location("hostile_peer", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hostile_peer"] = module
    spec.loader.exec_module(module)
    return module


ROUNDS = 6  # one peer more or less changes the first three by 3 %, whatever it does


@cache
def absent() -> float:
    loss: float = example().run(None, ROUNDS, 5).loss
    return loss


@pytest.mark.parametrize("kind", ["huge", "flip10", "equivocate", "huge-average"])
def test_a_wrong_peer_does_not_move_the_model(kind: str) -> None:
    """All kinds at full length: python examples/hostile_peer.py."""
    result = example().run(kind, ROUNDS, 5)
    assert result.states == 1 and result.loss < 1.02 * absent()
    assert result.said and result.counted <= (ROUNDS if kind == "huge-average" else 1)


def test_the_example_knows_every_kind() -> None:
    assert set(MISBEHAVIOURS) >= {"nan", "huge", "length", "stale", "h", "other-head", "flip", "equivocate", "huge-average"}
