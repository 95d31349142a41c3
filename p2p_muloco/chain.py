"""One chain, one name for the state: entries, heads, and all that follows from them alone. Pure.

    head_0 = sha256(config hash)
    head_k = sha256(head_{k-1} | sha256(START body) | sha256 of the span records' bodies in span order)

START holds every member's signed HELLO, sorted by peer id, so its hash is the entry's header. Equal heads mean
bit-equal anchor and momentum: the averaged bytes are named by the records, all arithmetic after them is bit-stable.
Beside an entry, not hashed, stand the signatures of at least half of START's members on its root: no reducer can make
an entry alone, though another member may take over a span whose reducer is lost.
From the chain also follow the clock, the schedule's token count, the membership, who is left out for a while, and which
fork wins. Nothing here is read from the DHT. An entry holds one encoded model (`down_bytes`) and about 600 bytes a member.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import msgpack
import torch
from torch import Tensor

from p2p_muloco.config import RunConfig
from p2p_muloco.errors import BadPacket
from p2p_muloco.identity import PEER_ID_BYTES, Identity, verify
from p2p_muloco.model import parameter_shapes
from p2p_muloco.packet import Layout, Span, plan_spans
from p2p_muloco.wire import MAX_ITEMS, Record, integer, many, raw, real

__all__ = [
    "AGAINST", "BROKE_RULE", "COUNTED", "REASONS", "TOO_LATE", "TWO_VERSIONS", "VANISHED", "Checked", "CheckedStart", "Entry",
    "Hello", "Law", "Order", "Signed", "SpanRecord", "Start", "Tip", "advance", "check_entry", "check_start", "confirms_root",
    "heavier", "leader_order", "merged_update", "next_head", "sign_root",
]

MAX_MEMBERS = 64
RECENT_HEADS = 64
RECENT_TOKENS = 9  # entries back for which a packet may hold steps at their learning rate (bounds.py)
LARGEST_ELEMENT = 1e6  # of a packet: weights are of order 1; 64 such values still sum to a finite fp32
LARGEST_AVERAGE = 2e6 * MAX_MEMBERS  # tau / sum(h) is at most 1, and a codec rounds by less than twice
BAN_ENTRIES = 16  # a peer that most reducers accuse takes no part in so many entries
MAX_BANNED = 16
NODE, CLIENT = 1, 0  # a node can be dialled and reduces; a client only sends and receives
COUNTED, VANISHED, TOO_LATE, BROKE_RULE, AGAINST, TWO_VERSIONS = range(6)
# Why a member's parts end where they end or why a peer is left out, in the words that are shown to people.
REASONS = ("counted", "vanished", "too late", "sent bytes that break a rule", "pulled against all others",
           "signed two versions of one span")


@dataclass(frozen=True)
class Law:
    """What every peer of a run knows without asking: the configuration and the part table that follows from it."""

    config: RunConfig
    layout: Layout

    @classmethod
    def of(cls, config: RunConfig) -> Law:
        return cls(config, Layout(parameter_shapes(config.model), config))

    @cached_property
    def config_hash(self) -> bytes:
        return self.config.hash

    @cached_property
    def genesis(self) -> Tip:
        head = hashlib.sha256(self.config_hash).digest()
        return Tip(k=0, head=head, members=(), tokens=0, last_tokens=0, weight=0, period_ms=0, recent=(head,),
                   recent_tokens=(0,), clients=(), banned=(), banned_until=(), banned_why=())

    @property
    def max_h(self) -> int:
        return 4 * self.config.run.inner_steps


@dataclass(frozen=True)
class Hello(Record):
    """A member's signed word for one entry; the packet's header. One for a (peer, head), the same in every attempt."""

    KIND = 1
    MAX_BYTES = 256
    peer: bytes = raw(PEER_ID_BYTES)
    head: bytes = raw(32)
    k: int = integer(1, 2**40)
    h: int = integer(1, 40_000)
    pace_mhz: int = integer(1, 10**9)
    client: int = integer(0, 1)  # nobody can dial it
    digest: bytes = raw(32)
    state: bytes = raw(32)


@dataclass(frozen=True)
class Start(Record):
    """The leader's list: who takes part, in order of peer id, and the deadlines in ms after its arrival.

    A mode of NODE lets a member reduce. The leader may spare those that it blames for lost spans: half of the nodes at most.
    """

    KIND = 2
    MAX_BYTES = 32 * 1024
    leader: bytes = raw(PEER_ID_BYTES)
    head: bytes = raw(32)
    k: int = integer(1, 2**40)
    attempt: int = integer(0, 10**6)
    hellos: tuple[bytes, ...] = many(raw(1, 256), 1, MAX_MEMBERS)
    signatures: tuple[bytes, ...] = many(raw(64), 1, MAX_MEMBERS)
    modes: tuple[int, ...] = many(integer(CLIENT, NODE), 1, MAX_MEMBERS)
    rates: tuple[int, ...] = many(integer(1, 10**7), 1, MAX_MEMBERS)
    scatter_ms: int = integer(1, 2**31)
    gather_ms: int = integer(1, 2**31)
    confirm_ms: int = integer(1, 2**31)


@dataclass(frozen=True)
class SpanRecord(Record):
    """A reducer's signed word: what its averaged bytes are, and how many leading parts of each member are in them."""

    KIND = 3
    MAX_BYTES = 2048
    start: bytes = raw(32)
    span: int = integer(0, MAX_MEMBERS - 1)
    turn: int = integer(0, MAX_MEMBERS - 1)  # 0: the planned reducer; else who took over (CheckedStart.candidates)
    digest: bytes = raw(32)
    counts: tuple[int, ...] = many(integer(0, 2**24), 1, MAX_MEMBERS)
    reasons: tuple[int, ...] = many(integer(0, len(REASONS) - 1), 1, MAX_MEMBERS)
    ratio_sum: float = real(0.0, 1e9)
    ratio_count: int = integer(0, 2**24)


@dataclass(frozen=True)
class Order(Record):
    """A coordinator's signed word that a span's reducer is lost and the candidate of this turn takes over."""

    KIND = 5
    MAX_BYTES = 128
    start: bytes = raw(32)
    span: int = integer(0, MAX_MEMBERS - 1)
    turn: int = integer(1, MAX_MEMBERS - 1)
    by: bytes = raw(PEER_ID_BYTES)


@dataclass(frozen=True)
class Signed:
    """A record's bytes and their signature, which is kept beside and never hashed."""

    body: bytes
    signature: bytes

    @classmethod
    def make(cls, record: Record, identity: Identity) -> Self:
        body = record.pack()
        return cls(body, identity.sign(type(record).__name__.encode(), body))

    def by(self, kind: str, signer: bytes) -> bool:
        return verify(signer, kind.encode(), self.body, self.signature)

    @cached_property
    def hash(self) -> bytes:
        return hashlib.sha256(self.body).digest()


@dataclass(frozen=True)
class CheckedStart:
    """A START whose every signature and rule holds, with what follows from it."""

    signed: Signed
    start: Start
    hellos: tuple[Hello, ...]
    spans: tuple[Span, ...]

    @property
    def group(self) -> bytes:
        """Group id = sha256 of START's body (32 bytes)."""
        return self.signed.hash

    @cached_property
    def members(self) -> tuple[bytes, ...]:
        return tuple(hello.peer for hello in self.hellos)

    @cached_property
    def nodes(self) -> frozenset[bytes]:
        """The members that can be dialled, by their own word; of a group of clients alone, its leader."""
        return frozenset(hello.peer for hello in self.hellos if not hello.client) or frozenset([self.start.leader])

    def within_reach(self, peer: bytes) -> list[bytes]:
        """The other members that one of them can talk to: a client has only the nodes, which it dials."""
        return [other for other in self.members if other != peer and (peer in self.nodes or other in self.nodes)]

    @property
    def h(self) -> list[int]:
        return [hello.h for hello in self.hellos]

    def candidates(self, span: int) -> list[bytes]:
        """Who reduces a span, and who takes over after that: the planned reducer, then the other nodes, shuffled."""
        planned = self.spans[span].reducer
        others = [peer for peer, _ in _reducers(self.start, self.hellos) if peer != planned]
        return [planned, *leader_order(self.group + bytes([span]), others)]

    def is_half(self, members: int) -> bool:
        """Whether so many are enough to confirm an entry."""
        return 2 * members >= len(self.hellos)


@dataclass(frozen=True)
class Entry:
    """What one outer step is made of: START, each span's record, each span's averaged bytes."""

    start: Signed
    records: tuple[Signed, ...]
    data: tuple[bytes, ...]
    confirms: tuple[tuple[int, bytes], ...]  # (index of a member, its signature of the root), not hashed

    def pack(self) -> bytes:
        records = [(r.body, r.signature) for r in self.records]
        packed: bytes = msgpack.packb((self.start.body, self.start.signature, records, self.data, self.confirms))
        return packed

    @classmethod
    def unpack(cls, packed: bytes, max_bytes: int) -> Entry:
        """Raise BadPacket; `check_entry` still has to say whether the entry is true."""
        if len(packed) > max_bytes:
            raise BadPacket(f"an entry has {len(packed)} bytes; at most {max_bytes} are read")
        try:
            fields = msgpack.unpackb(packed, use_list=False, max_array_len=MAX_ITEMS, max_map_len=0)
            body, signature, records, data, confirms = fields
            entry = cls(Signed(body, signature), tuple(Signed(*record) for record in records), data, confirms)
            leaves = [x for signed in (entry.start, *entry.records) for x in (signed.body, signed.signature)]
            leaves += [signature for _, signature in confirms]
            typed = type(data) is type(confirms) is tuple and all(type(index) is int for index, _ in confirms)
            if typed and all(type(x) is bytes for x in (*leaves, *data)) and entry.pack() == packed:
                return entry
        except Exception:  # msgpack raises many kinds on hostile bytes
            pass
        raise BadPacket("an entry is not canonical msgpack of (START, signature, records, data, confirms)")


@dataclass(frozen=True)
class Checked:
    """An entry that was verified against the tip before it."""

    entry: Entry
    start: CheckedStart
    records: tuple[SpanRecord, ...]
    head: bytes

    @property
    def k(self) -> int:
        return self.start.start.k

    def counted_parts(self, peer: bytes) -> list[tuple[Span, int]]:
        """For each span, how many of its leading parts hold `peer`'s packet; [] if the peer was no member."""
        if peer not in self.start.members:
            return []
        at = self.start.members.index(peer)
        return [(s, record.counts[at]) for s, record in zip(self.start.spans, self.records, strict=True)]

    def reducer(self, record: SpanRecord) -> bytes:
        return self.start.candidates(record.span)[record.turn]

    @cached_property
    def counted(self) -> tuple[Hello, ...]:
        """The members counted in at least one part, sorted by peer id."""
        return tuple(h for h in self.start.hellos if any(n for _, n in self.counted_parts(h.peer)))


@dataclass(frozen=True)
class Tip(Record):
    """All that a chain says up to entry k; a few kilobytes, whatever the model's size."""

    KIND = 4
    MAX_BYTES = 8192
    k: int = integer(0, 2**40)
    head: bytes = raw(32)
    members: tuple[bytes, ...] = many(raw(PEER_ID_BYTES), 0, MAX_MEMBERS)  # E: who was counted in the last entry
    tokens: int = integer(0, 2**62)  # C: counted tokens
    last_tokens: int = integer(0, 2**62)  # dC: those of the last entry
    weight: int = integer(0, 2**60)  # counted inner steps: the heavier fork wins
    period_ms: int = integer(0, 2**40)  # time to the next entry at the swarm's median pace; 0 before the first
    recent: tuple[bytes, ...] = many(raw(32), 1, RECENT_HEADS)  # the last heads, oldest first, this one last
    recent_tokens: tuple[int, ...] = many(integer(0, 2**62), 1, RECENT_TOKENS)  # C after the last entries, oldest first
    clients: tuple[bytes, ...] = many(raw(PEER_ID_BYTES), 0, MAX_MEMBERS)  # of the members: who can't be dialled, so never leads
    banned: tuple[bytes, ...] = many(raw(PEER_ID_BYTES), 0, MAX_BANNED)  # who takes no part, sorted
    banned_until: tuple[int, ...] = many(integer(0, 2**41), 0, MAX_BANNED)  # the last entry without each of them
    banned_why: tuple[int, ...] = many(integer(0, len(REASONS) - 1), 0, MAX_BANNED)

    def bans(self) -> dict[bytes, tuple[int, int]]:
        """Peer -> (last entry without it, index of REASONS)."""
        return dict(zip(self.banned, zip(self.banned_until, self.banned_why, strict=True), strict=True))

    @classmethod
    def unpack(cls, packed: bytes, data: bytes | memoryview = b"") -> Self:
        """Of an own file or a donor's snapshot; raise BadPacket where it is damaged."""
        tip = super().unpack(packed, data)
        sorted_sets = all(peers == tuple(sorted(set(peers))) for peers in (tip.members, tip.clients, tip.banned))
        sorted_sets = sorted_sets and set(tip.clients) <= set(tip.members)
        fits = len(tip.banned) == len(tip.banned_until) == len(tip.banned_why) and tip.recent_tokens[-1] == tip.tokens
        if tip.recent[-1] != tip.head or not (sorted_sets and fits):
            raise BadPacket("a chain's tip contradicts itself")
        return tip


def leader_order(head: bytes, peers: Sequence[bytes]) -> list[bytes]:
    """Who leads the next attempt, and who after that: shuffled anew by each head."""
    return sorted(set(peers), key=lambda peer: hashlib.sha256(head + peer).digest())


def heavier(weight: int, head: bytes, than_weight: int, than_head: bytes) -> bool:
    """Fork choice: more counted steps; of equals, the smaller head."""
    return (-weight, head) < (-than_weight, than_head)


def check_start(law: Law, tip: Tip, signed: Signed) -> CheckedStart:
    """Verify a START on top of `tip`; raise BadPacket that names what is wrong."""
    start = Start.unpack(signed.body)
    n = len(start.hellos)
    if (start.head, start.k) != (tip.head, tip.k + 1):
        raise BadPacket(f"START is for entry {start.k} on another head")
    if not n == len(start.signatures) == len(start.modes) == len(start.rates) or n > law.config.run.max_group:
        raise BadPacket(f"START lists {n} members with other numbers of signatures, modes or rates, or too many")
    if not start.scatter_ms <= start.gather_ms <= start.confirm_ms:
        raise BadPacket("START's deadlines are out of order")
    hellos = tuple(map(Hello.unpack, start.hellos))
    peers = [hello.peer for hello in hellos]
    if peers != sorted(set(peers)) or start.leader not in peers:
        raise BadPacket("START's members are not sorted, not distinct or without the leader")
    if not set(peers).isdisjoint(tip.banned):
        raise BadPacket("START lists a peer that takes no part in this entry")
    if not signed.by("Start", start.leader):
        raise BadPacket("START is not signed by its leader")
    for hello, body, signature in zip(hellos, start.hellos, start.signatures, strict=True):
        check_hello(law, tip, hello, Signed(body, signature))
    if tip.k == 0 and n < law.config.run.min_peers:
        raise BadPacket(f"the first entry has {n} members; the run asks for {law.config.run.min_peers}")
    nodes, reducers = sum(not hello.client for hello in hellos), sum(mode == NODE for mode in start.modes)
    if any(hello.client and mode == NODE for hello, mode in zip(hellos, start.modes, strict=True)) or 2 * reducers < nodes:
        raise BadPacket(f"START lets {reducers} of {nodes} members reduce that can be dialled, or one that can't be")
    return CheckedStart(signed, start, hellos, plan_spans(law.layout, _reducers(start, hellos), tip.head))


def check_hello(law: Law, tip: Tip, hello: Hello, signed: Signed) -> None:
    if (hello.head, hello.k) != (tip.head, tip.k + 1):
        raise BadPacket("HELLO is for another head")
    if hello.h > law.max_h:
        raise BadPacket(f"HELLO claims {hello.h} inner steps; the run allows {law.max_h}")
    if not signed.by("Hello", hello.peer):
        raise BadPacket("HELLO is not signed by its peer")


def _reducers(start: Start, hellos: Sequence[Hello]) -> list[tuple[bytes, int]]:
    """(peer, rate) of the nodes; a group of clients alone is reduced by its leader."""
    rows = list(zip(hellos, start.modes, start.rates, strict=True))
    return [(h.peer, rate) for h, mode, rate in rows if mode == NODE] or [(start.leader, 1)]


def check_record(start: CheckedStart, signed: Signed) -> SpanRecord:
    """Verify one span's record against its START; raise BadPacket."""
    record = SpanRecord.unpack(signed.body)
    n = len(start.hellos)
    if record.start != start.group or record.span >= len(start.spans):
        raise BadPacket("a span record is of another group")
    span = start.spans[record.span]
    if len(record.counts) != n or len(record.reasons) != n or max(record.counts) != span.n_parts:
        raise BadPacket("a span record's counts do not fit its span")
    if record.ratio_sum > 1.001 * record.ratio_count:  # flattening shortens a matrix
        raise BadPacket("a span record's norm ratios are over 1")
    candidates = start.candidates(record.span) if record.turn else [span.reducer]
    if record.turn >= len(candidates) or not signed.by("SpanRecord", candidates[record.turn]):
        raise BadPacket("a span record is not signed by its reducer")
    return record


def root_of(records: Sequence[Signed]) -> bytes:
    """32 bytes that name all spans' records, in span order."""
    return hashlib.sha256(b"".join(record.hash for record in records)).digest()


def next_head(tip: Tip, start: CheckedStart, root: bytes) -> bytes:
    """The head after an entry of this START and root on `tip`."""
    return hashlib.sha256(tip.head + start.group + root).digest()


def sign_root(identity: Identity, group: bytes, root: bytes) -> bytes:
    """A member's signature that it holds every span under this root (64 bytes)."""
    return identity.sign(b"Confirm", group + root)


def confirms_root(peer: bytes, group: bytes, root: bytes, signature: bytes) -> bool:
    return verify(peer, b"Confirm", group + root, signature)


def check_entry(law: Law, tip: Tip, entry: Entry) -> Checked:
    """Verify every hash, signature and count of an entry on top of `tip`; raise BadPacket.

    Whoever serves an entry can therefore be anybody. The averaged bytes are decoded as well, so that what is
    accepted here can be applied.
    """
    start = check_start(law, tip, entry.start)
    if not len(start.spans) == len(entry.records) == len(entry.data):
        raise BadPacket(f"an entry has {len(entry.records)} records and {len(entry.data)} spans for {len(start.spans)}")
    records = tuple(check_record(start, signed) for signed in entry.records)
    for span, record, data in zip(start.spans, records, entry.data, strict=True):
        if record.span != span.index or record.digest != hashlib.sha256(data).digest():
            raise BadPacket(f"span {span.index}'s bytes are not those its reducer signed")
        check_averaged(law, span, data)
    root = root_of(entry.records)
    indices = [index for index, _ in entry.confirms]
    if indices != sorted(set(indices)) or not all(0 <= index < len(start.members) for index in indices):
        raise BadPacket("an entry's confirmations are not of distinct members in order")
    if not all(confirms_root(start.members[i], start.group, root, signature) for i, signature in entry.confirms):
        raise BadPacket("an entry holds a confirmation of another root")
    if not start.is_half(len(indices)):
        raise BadPacket(f"an entry is confirmed by {len(indices)} of {len(start.members)} members, fewer than half")
    return Checked(entry, start, records, next_head(tip, start, root))


def check_averaged(law: Law, span: Span, data: bytes | memoryview) -> None:
    """Decode each part of a span once: whoever signed it, it must be finite, of a sane size, and fit; raise BadPacket."""
    for at, piece in enumerate(law.layout.down_parts(span.first, span.stop, data), start=span.first):
        if law.layout.decode_down(at, piece).abs().max() > LARGEST_AVERAGE:
            raise BadPacket(f"span {span.index} holds a value over {LARGEST_AVERAGE:g}")


def merged_update(law: Law, checked: Checked) -> Tensor:
    """d of the entry, (elements,) fp32: the merged pseudo-gradient that every peer steps by, bit for bit."""
    d = torch.empty(law.layout.n_elements)
    ratio = _mean_ratio(checked.records)
    for span, data in zip(checked.start.spans, checked.entry.data, strict=True):
        for at, piece in enumerate(law.layout.down_parts(span.first, span.stop, data), start=span.first):
            part = law.layout.parts[at]
            values = law.layout.decode_down(at, piece)
            d[part.start : part.stop] = values * ratio if part.scaled else values
    return d


def _mean_ratio(records: Sequence[SpanRecord]) -> float:
    """Mean of ||IsoC|| / ||mean|| over the flattened tensors (algorithms: embeddings take it when not flattened)."""
    count = sum(record.ratio_count for record in records)
    return sum(record.ratio_sum for record in records) / count if count else 1.0


def advance(law: Law, tip: Tip, checked: Checked) -> Tip:
    """The tip after an entry that `check_entry` returned for this `tip`. Integers only, so equal everywhere."""
    members = checked.counted
    counted = {h.peer: sum(n for _, n in checked.counted_parts(h.peer)) for h in members}
    parts = len(law.layout.parts)
    tokens = sum(h.h * law.config.tokens_per_step * counted[h.peer] // parts for h in members)
    banned = _bans(tip, checked)
    return replace(
        tip,
        k=tip.k + 1,
        head=checked.head,
        members=tuple(h.peer for h in members),
        tokens=tip.tokens + tokens,
        last_tokens=tokens,
        weight=tip.weight + sum(h.h for h in members),
        period_ms=_period_ms(law, tip, sorted(h.pace_mhz for h in members)),
        recent=(*tip.recent, checked.head)[-RECENT_HEADS:],
        recent_tokens=(*tip.recent_tokens, tip.tokens + tokens)[-RECENT_TOKENS:],
        clients=tuple(h.peer for h in members if h.peer not in checked.start.nodes),
        banned=tuple(banned),
        banned_until=tuple(until for until, _ in banned.values()),
        banned_why=tuple(why for _, why in banned.values()),
    )


def _bans(tip: Tip, checked: Checked) -> dict[bytes, tuple[int, int]]:
    """Who is left out after this entry. Two reducers at least, of most spans that others reduced, must accuse a peer."""
    banned = {peer: ban for peer, ban in tip.bans().items() if ban[0] > tip.k + 1}
    found: dict[bytes, int] = {}
    for at, peer in enumerate(checked.start.members):
        judges = [(checked.reducer(record), record.reasons[at]) for record in checked.records]
        others = [(judge, reason) for judge, reason in judges if judge != peer]
        for why in (BROKE_RULE, AGAINST):
            accusers = [judge for judge, reason in others if reason == why]
            if len(set(accusers)) >= 2 and 2 * len(accusers) > len(others):
                found[peer] = why
    if 2 * len(found) < len(checked.start.members):  # else nobody knows who is right
        banned |= {peer: (tip.k + 1 + BAN_ENTRIES, why) for peer, why in found.items()}
    longest = sorted(banned, key=lambda peer: (-banned[peer][0], peer))[:MAX_BANNED]
    return {peer: banned[peer] for peer in sorted(longest)}


def _period_ms(law: Law, tip: Tip, paces_mhz: list[int]) -> int:
    """H steps at the median member's pace, and never more than twice or less than half the last period."""
    period = max(1, law.config.run.inner_steps * 1_000_000 // paces_mhz[(len(paces_mhz) - 1) // 2])
    return min(max(period, tip.period_ms // 2), 2 * tip.period_ms) if tip.period_ms else period
