"""What several tests share: small laws, identities, packets, and swarms on a `LocalNetwork`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from p2p_muloco.chain import CLIENT, NODE, Checked, Law, Tip, advance, check_entry, merged_update
from p2p_muloco.config import CodecConfig, OuterConfig, RunConfig, RunSection
from p2p_muloco.errors import StateUnavailable
from p2p_muloco.exchange import Behind, Committed, Failed, Outcome
from p2p_muloco.identity import Identity
from p2p_muloco.local import Fault, LocalExchange, LocalNetwork
from p2p_muloco.member import Member
from p2p_muloco.outer import outer_step
from p2p_muloco.packet import Layout, Packet
from p2p_muloco.wire import Record

SHAPES = {
    "embedding.weight": (24, 16),
    "blocks.0.attention.q.weight": (48, 64),
    "blocks.0.mlp.down.weight": (64, 40),
    "blocks.0.norm.weight": (64,),
    "norm.weight": (16,),
}
VECTORS = {"a": (96,), "b": (64,), "c": (64,), "d": (48,)}  # four parts that travel as fp32, so that sums are exact


def identity(i: int) -> Identity:
    return Identity(i.to_bytes(32, "big"))


def law(shapes: dict[str, tuple[int, ...]] | None = None, *, up: str = "absmax4", down: str = "absmax4",
        method: str = "nesterov", min_peers: int = 1, inner_steps: int = 8, part_elements: int = 1024,
        window_s: float = 5.0, max_group: int = 32) -> Law:
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


class Answering:
    """The asking half of an exchange, over any function of (donor, request, most bytes) that returns bytes or raises."""

    peer_id = b"me"

    def __init__(self, answer: Callable[[bytes, Record, int], bytes]) -> None:
        self._answer, self.time = answer, 0.0
        self._came: list[tuple[int, bytes | str]] = []
        self._tickets = itertools.count()

    def ask(self, donor: bytes, request: Record, max_bytes: int) -> int:
        ticket = next(self._tickets)
        try:
            self._came.append((ticket, self._answer(donor, request, max_bytes)))
        except StateUnavailable as error:
            self._came.append((ticket, str(error)))
        return ticket

    def answers(self, timeout_s: float) -> list[tuple[int, bytes | str]]:
        came, self._came = self._came, []
        self.time += 0.0 if came else timeout_s
        return came

    def fetch(self, donor: bytes, request: Record, max_bytes: int) -> bytes:
        return self._answer(donor, request, max_bytes)

    def now(self) -> float:
        return self.time


class Swarm:
    """n members with one random packet each, on one network."""

    def __init__(self, law: Law, n: int, *, rates: Sequence[int] = (), h: Sequence[int] = (),
                 faults: Sequence[Fault] = (), tip: Tip | None = None, network: LocalNetwork | None = None,
                 clients: Sequence[int] = ()) -> None:
        self.law = law
        self.network = network or LocalNetwork(faults=faults)
        self.h = list(h) or [8] * n
        self.xs = [vector(law, seed) for seed in range(n)]
        self.packets = [packet(law, x, h) for x, h in zip(self.xs, self.h, strict=True)]
        self.identities = [identity(i) for i in range(n)]
        rates = rates or [20_000] * n
        tip = tip or law.genesis
        modes = [CLIENT if i in clients else NODE for i in range(n)]
        self.network.behind_nat |= {self.identities[i].peer_id for i in clients}
        self.members = [Member(law, who, tip, rate_kbps=r, mode=m)
                        for who, r, m in zip(self.identities, rates, modes, strict=True)]
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
                               weight=8 * n, period_ms=1000, recent=(law.genesis.head, head), recent_tokens=(0, tokens))


@dataclasses.dataclass
class Peer:
    """What a trainer keeps of the chain: nothing of learning, all of committing, adopting and beginning again."""

    tip: Tip
    anchor: Tensor
    momentum: Tensor
    entries: dict[int, Checked] = dataclasses.field(default_factory=dict)
    retry_at: float | None = None
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)

    def apply(self, law: Law, checked: Checked) -> None:
        """Replay and live commit are one function; the entry is verified from its bytes alone."""
        assert check_entry(law, self.tip, checked.entry) == checked
        outer_step(self.anchor, self.momentum, merged_update(law, checked), 0.5, 0.5)
        self.tip = advance(law, self.tip, checked)
        self.entries[checked.k] = checked


class Driver:
    """Trainers in virtual time: each begins a packet an entry, again after Failed, and adopts when Behind."""

    def __init__(self, swarm: Swarm, late_s: Sequence[float] = ()) -> None:
        self.swarm, self.network = swarm, swarm.network
        late_s = late_s or [0.0] * len(swarm.members)
        self._packets: dict[tuple[int, int], Packet] = {}
        zeros = [torch.zeros(swarm.law.layout.n_elements) for _ in range(2)]
        self.peers = [Peer(m.tip, *[z.clone() for z in zeros], retry_at=self.network.now + late)
                      for m, late in zip(swarm.members, late_s, strict=True)]

    def live(self) -> list[int]:
        return self.swarm.alive()

    def run(self, k: int, limit_s: float) -> bool:
        """Until each live peer stands at entry k or later; False if that takes longer than `limit_s`."""
        end = self.network.now + limit_s
        for i in self.live():
            self._react(i, k)
        while not all(self.peers[i].tip.k >= k for i in self.live()):
            waiting = [(self.peers[i], self.swarm.members[i].me) for i in self.live() if self.peers[i].tip.k < k]
            due = [max(peer.retry_at, self.network.thaws_at(me)) for peer, me in waiting if peer.retry_at is not None]
            event_at = self.network.next_at()
            at = min([t for t in (*due, event_at) if t is not None], default=end + 1)
            if at > end:
                return False
            if event_at is not None and event_at <= at:
                self.network.step()
            self.network.now = max(self.network.now, at)
            for i in self.live():
                self._react(i, k)
        return True

    def _react(self, i: int, k: int) -> None:
        peer, exchange, now = self.peers[i], self.swarm.exchanges[i], self.network.now
        if self.network.is_frozen(exchange.peer_id):
            return
        while (outcome := exchange.poll()) or (peer.retry_at is not None and peer.retry_at <= now and peer.tip.k < k):
            peer.retry_at = now
            match outcome:
                case Committed(checked):
                    peer.apply(self.swarm.law, checked)
                case Failed():
                    peer.retry_at = outcome.retry_at
                case Behind():
                    self._catch_up(i, outcome)
                case None:
                    peer.retry_at = None
                    exchange.begin(self.packet(i, peer.tip.k + 1))
            peer.outcomes += [outcome] if outcome else []

    def _catch_up(self, i: int, behind: Behind) -> None:
        peer, donor = self.peers[i], self._peer_of(behind.donors[0])
        mine, its = peer.entries.get(peer.tip.k), donor.entries.get(peer.tip.k)
        assert (mine and mine.head) == (its and its.head), "a fork"
        while peer.tip.k < donor.tip.k:
            peer.apply(self.swarm.law, donor.entries[peer.tip.k + 1])
        self.swarm.exchanges[i].adopt(peer.tip)

    def _peer_of(self, peer_id: bytes) -> Peer:
        return self.peers[[m.me for m in self.swarm.members].index(peer_id)]

    def packet(self, i: int, k: int) -> Packet:
        """The one packet of peer i for entry k."""
        if (i, k) not in self._packets:
            self._packets[i, k] = packet(self.swarm.law, self.x(i, k), self.swarm.h[i])
        return self._packets[i, k]

    def x(self, i: int, k: int) -> Tensor:
        return vector(self.swarm.law, 1000 * k + i)


def assert_agree(driver: Driver) -> None:
    """What must hold whatever went wrong: one chain, the same bytes, and each packet counted exactly as it says."""
    live = [driver.peers[i] for i in driver.live()]
    longest = max(live, key=lambda peer: peer.tip.k)
    for peer in live:
        for k, checked in peer.entries.items():
            other = longest.entries[k]
            assert checked.head == other.head and checked.entry.data == other.entry.data, f"two entries {k}"
        if peer.tip.head == longest.tip.head:
            assert peer.tip == longest.tip
            assert torch.equal(peer.anchor, longest.anchor) and torch.equal(peer.momentum, longest.momentum)
    if not any(fault.kind == "corrupt" for fault in driver.network.faults):  # then a sum holds what nobody said
        for checked in longest.entries.values():
            assert_accounted(driver, checked)


def assert_accounted(driver: Driver, checked: Checked) -> None:
    """The entry is the weighted mean of exactly the parts that its records count: there x = D(q) + e, else x = e."""
    law = driver.swarm.law
    said: list[list[tuple[Tensor, int]]] = [[] for _ in law.layout.parts]
    for i in sorted(range(len(driver.peers)), key=lambda i: driver.swarm.members[i].me):  # sums are made in this order
        payload = driver.packet(i, checked.k).payload
        for span, n_parts in checked.counted_parts(driver.swarm.members[i].me):
            for at in range(span.first, span.first + n_parts):
                values = law.layout.decode_up(at, law.layout.up_slice(payload, at, at + 1))
                said[at].append((values, driver.swarm.h[i]))
    d = merged_update(law, checked)
    for part, rows in zip(law.layout.parts, said, strict=True):
        total = torch.zeros(part.size)
        for shortened in shortened_by_hand(rows):
            total += shortened
        mean = total * weight_by_hand([h for _, h in rows], law.config.run.inner_steps)
        assert torch.equal(d[part.start : part.stop], part.down.decode(part.down.encode(mean), part.size))


def shortened_by_hand(rows: list[tuple[Tensor, int]]) -> list[Tensor]:
    """Of three members or more: nobody more than 1.5 times the lower median of length a step."""
    if len(rows) < 3:
        return [values for values, _ in rows]
    middle = (len(rows) - 1) // 2
    norms = [float(values.double().norm()) for values, _ in rows]
    a_step = sorted(norm / h for norm, (_, h) in zip(norms, rows, strict=True))[middle]
    usual = sorted(h for _, h in rows)[middle]
    limits = [1.5 * a_step * max(h, usual) for _, h in rows]
    return [values * (limit / norm) if norm > limit else values
            for (values, _), norm, limit in zip(rows, norms, limits, strict=True)]


def weight_by_hand(h: Sequence[int], inner_steps: int) -> float:
    return min(sum(x * x for x in h) / sum(h), 2 * inner_steps) / sum(h)
