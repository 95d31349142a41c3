"""Before a peer takes part: is its clock right, is its identity its own, can others dial it? Else that fails later, silently."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import re
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from p2p_muloco.errors import ConfigError, StateUnavailable
from p2p_muloco.identity import Identity, parse_peer_id
from p2p_muloco.requests import WantDial, WantTime
from p2p_muloco.skew import Answer, Skew, skew
from p2p_muloco.swarm import Node

__all__ = ["is_within_reach", "measure_skew", "refuse_twin", "visitor"]

ASKED_PEERS = 3
QUESTIONS = 3  # to each: the first one pays for the connection
ANSWER_S = 5.0  # for all of them
ORPHAN_S = 4.0  # what a killed peer left behind may answer for this long
TIME_BYTES = 8


@contextlib.asynccontextmanager
async def visitor(run_id: str, addresses: Sequence[str]) -> AsyncIterator[Node]:
    """A node under a name of its own that only looks, and is forgotten after."""
    with tempfile.TemporaryDirectory() as folder:
        node = await Node.start(Path(folder) / "identity.key", run_id, ("/ip4/127.0.0.1/tcp/0",), addresses, dht_client=True)
        try:
            yield node
        finally:
            await node.stop()


async def measure_skew(node: Node, addresses: Sequence[str]) -> Skew | None:
    """Ask the peers at `addresses`, and others this node is connected to, for their time; None if nobody says it."""
    peers = await _somebody(node, addresses)
    answers: dict[bytes, list[Answer]] = {peer: [] for peer in peers}
    await asyncio.gather(*(_ask(node, peer, answers[peer]) for peer in peers))
    return skew(answers)


async def _somebody(node: Node, addresses: Sequence[str]) -> list[bytes]:
    met = [address.rpartition("/")[2] for address in (*addresses, *await node.known_addresses())]
    return [peer for peer in map(parse_peer_id, dict.fromkeys(met)) if peer != node.identity.peer_id][:ASKED_PEERS]


async def is_within_reach(node: Node, addresses: Sequence[str] = ()) -> bool:
    """Whether others can dial this node: most of the few peers that are asked to try say so. True if nobody answers."""
    own = [address for address in await node.addresses() if "p2p-circuit" not in address]  # of a relay: not our port
    ports = collections.Counter(int(found.group(1)) for address in own if (found := re.search(r"/tcp/(\d+)", address)))
    tries = [_can_dial(node, peer, port) for peer in await _somebody(node, addresses) for port, _ in ports.most_common(1)]
    answers = [answer for answer in await asyncio.gather(*tries) if answer is not None]
    return 2 * sum(answers) > len(answers) if answers else True


async def _can_dial(node: Node, peer: bytes, port: int) -> bool | None:
    with contextlib.suppress(StateUnavailable, TimeoutError):
        async with asyncio.timeout(2 * ANSWER_S):
            return await node.fetch(peer, WantDial(port), 1) == b"\1"
    return None


async def _ask(node: Node, peer: bytes, answers: list[Answer]) -> None:
    with contextlib.suppress(StateUnavailable, TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            for _ in range(QUESTIONS):
                sent_s = node.clock()
                packed = await node.fetch(peer, WantTime(), TIME_BYTES)
                if len(packed) == TIME_BYTES:
                    answers.append(Answer(sent_s, int.from_bytes(packed, "big") / 1000, node.clock()))


async def refuse_twin(identity_path: Path, run_id: str, addresses: Sequence[str]) -> None:
    """Raise ConfigError if a peer with this identity is in the swarm, and is more than the remains of a killed one."""
    me, until = Identity.load_or_create(identity_path).peer_id, time.monotonic() + ORPHAN_S
    async with visitor(run_id, addresses) as node:
        while await _is_there(node, me):
            if time.monotonic() > until:
                raise ConfigError(f"identity {identity_path}: another peer of this run has the same one; stop the other, or "
                                  f"delete {identity_path} to join as a new peer")
            await asyncio.sleep(0.5)


async def _is_there(node: Node, peer: bytes) -> bool:
    answers: list[Answer] = []
    await _ask(node, peer, answers)
    return bool(answers)
