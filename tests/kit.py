"""What several tests share: small laws, identities, packets, and swarms on a `LocalNetwork`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from p2p_muloco.chain import Law, Tip
from p2p_muloco.config import CodecConfig, OuterConfig, RunConfig, RunSection
from p2p_muloco.exchange import Fault, LocalExchange, LocalNetwork
from p2p_muloco.identity import Identity
from p2p_muloco.member import Member
from p2p_muloco.packet import Layout, Packet

SHAPES = {
    "embedding.weight": (24, 16),
    "blocks.0.attention.q.weight": (48, 64),
    "blocks.0.mlp.down.weight": (64, 40),
    "blocks.0.norm.weight": (64,),
    "norm.weight": (16,),
}


def identity(i: int) -> Identity:
    return Identity(i.to_bytes(32, "big"))


def law(shapes: dict[str, tuple[int, ...]] | None = None, *, up: str = "absmax4", down: str = "absmax4",
        method: str = "nesterov", min_peers: int = 1, inner_steps: int = 8, part_elements: int = 1024,
        window_s: float = 5.0, max_group: int = 32) -> Law:  # fmt: skip
    mu = 0.0 if method == "iso_c" else 0.5
    config = RunConfig(
        run=RunSection(inner_steps=inner_steps, min_peers=min_peers, window_s=window_s, max_group=max_group),
        outer=OuterConfig(method=method, eta=0.5, mu=mu),
        codec=CodecConfig(up=up, down=down, part_elements=part_elements),
    )
    return Law(config, Layout(shapes or SHAPES, config))


def vector(law: Law, seed: int) -> Tensor:
    return torch.randn(law.layout.n_elements, generator=torch.Generator().manual_seed(seed)) * 0.01


def packet(law: Law, x: Tensor, h: int = 8, state: bytes = bytes(32)) -> Packet:
    return Packet(payload=law.layout.encode(x), inner_steps=h, pace_mhz=1000, state=state)


class Swarm:
    """n members with one random packet each, on one network."""

    def __init__(self, law: Law, n: int, *, rates: Sequence[int] = (), h: Sequence[int] = (),
                 faults: Sequence[Fault] = (), tip: Tip | None = None, network: LocalNetwork | None = None) -> None:  # fmt: skip
        self.law = law
        self.network = network or LocalNetwork(faults=faults)
        self.h = list(h) or [8] * n
        self.xs = [vector(law, seed) for seed in range(n)]
        self.packets = [packet(law, x, h) for x, h in zip(self.xs, self.h, strict=True)]
        self.identities = [identity(i) for i in range(n)]
        rates = rates or [20_000] * n
        tip = tip or law.genesis
        self.members = [Member(law, who, tip, rate_kbps=r) for who, r in zip(self.identities, rates, strict=True)]
        self.exchanges = [LocalExchange(self.network, member) for member in self.members]

    def begin(self, *indices: int) -> None:
        for i in indices or range(len(self.members)):
            self.exchanges[i].begin(self.packets[i])

    def alive(self) -> list[int]:
        return [i for i, m in enumerate(self.members) if not self.network.is_dead(m.me)]


def established(law: Law, n: int, tokens: int = 100) -> Tip:
    """A tip at entry 1 whose members are the first n identities."""
    peers = tuple(sorted(identity(i).peer_id for i in range(n)))
    head = b"\x01" * 32
    return dataclasses.replace(law.genesis, k=1, head=head, members=peers, tokens=tokens, last_tokens=tokens,
                               weight=8 * n, period_ms=1000, recent=(law.genesis.head, head))  # fmt: skip
