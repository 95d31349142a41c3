"""What peers tell people: one small signed record each, kept in the DHT, believed by no protocol."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgpack

from p2p_muloco.chain import Signed
from p2p_muloco.errors import BadPacket
from p2p_muloco.identity import PEER_ID_BYTES
from p2p_muloco.opinion import WHY
from p2p_muloco.wire import Record, integer, many, raw, real, text

__all__ = ["MAX_REPORT_BYTES", "Named", "Report", "Said", "pack_report", "read_report", "read_reports", "report_period_s",
           "said_of", "shard_of", "shards", "with_named"]

MAX_REPORT_BYTES = 512
MAX_TTL_S = 120.0
MAX_NAMED = 2
SHARDS = 4  # one DHT key with 1,000 records loses half of them; 250 records of 400 bytes stay whole


@dataclass(frozen=True)
class Report(Record):
    KIND = 50
    MAX_BYTES = 400
    run_id: str = text(48)
    peer: bytes = raw(PEER_ID_BYTES)
    name: str = text(32)
    k: int = integer(0, 2**40)
    head: bytes = raw(32)
    inner_steps: int = integer(0, 2**50)
    tokens_total: int = integer(0, 2**60)
    tokens_per_s: float = real(0.0, 1e12)
    loss: float = real(0.0, 1e6)  # 0 = none yet
    client: int = integer(0, 1)  # it can't be dialled
    device: str = text(48)
    version: str = text(16)
    at_s: int = integer(0, 2**40)  # unix seconds at the sender
    named: tuple[bytes, ...] = many(raw(PEER_ID_BYTES), 0, MAX_NAMED)  # peers that did wrong, by this one's opinion
    named_why: tuple[int, ...] = many(integer(0, len(WHY) - 1), 0, MAX_NAMED)
    named_round: tuple[int, ...] = many(integer(0, 2**40), 0, MAX_NAMED)

    def names(self) -> list[Named]:
        return list(map(Named, self.named, self.named_why, self.named_round))


class Named(NamedTuple):
    """Peer `peer` did WHY[why] in round `k`."""

    peer: bytes
    why: int
    k: int


class Said(NamedTuple):
    """`peers` peers report `named`; they may differ in why and round."""

    named: Named
    peers: int


def with_named(report: Report, named: Iterable[Named]) -> Report:
    """The report with the last of `named`: at most two, and no more than its size allows."""
    others = [one for one in named if one.peer != report.peer]
    for n in range(min(MAX_NAMED, len(others)), 0, -1):
        peers, whys, rounds = zip(*others[-n:], strict=True)
        fuller = replace(report, named=peers, named_why=whys, named_round=rounds)
        if len(fuller.pack()) <= Report.MAX_BYTES:
            return fuller
    return report


def said_of(reports: Iterable[Report]) -> list[Said]:
    """What is said of each named peer: most often, then last; the most named peer first."""
    words: dict[bytes, list[Named]] = {}
    for report in reports:
        for named in {one.peer: one for one in report.names()}.values():
            words.setdefault(named.peer, []).append(named)
    found = [Said(max(Counter(said).items(), key=lambda item: (item[1], item[0].k))[0], len(said)) for said in words.values()]
    return sorted(found, key=lambda said: (-said.peers, said.named))


def pack_report(signed: Signed) -> bytes:
    packed: bytes = msgpack.packb((signed.body, signed.signature))
    assert len(packed) <= MAX_REPORT_BYTES
    return packed


def read_report(packed: object) -> Report:
    """Raise BadPacket unless it is a report signed by the peer it names."""
    if not isinstance(packed, bytes) or len(packed) > MAX_REPORT_BYTES:
        raise BadPacket("a report has another type or is too large")
    try:
        body, signature = msgpack.unpackb(packed, use_list=False)
    except Exception:
        raise BadPacket("a report is not msgpack of (body, signature)") from None
    if type(body) is not bytes or type(signature) is not bytes:
        raise BadPacket("a report is not two byte strings")
    report = Report.unpack(body)
    if not Signed(body, signature).by("Report", report.peer):
        raise BadPacket("a report is not signed by its peer")
    if not len(report.named) == len(report.named_why) == len(report.named_round):
        raise BadPacket("a report does not say of each named peer why and when")
    return report


def read_reports(records: Mapping[object, object], run_id: str) -> dict[bytes, Report]:
    """One bad record costs one record."""
    found = {}
    for subkey, packed in records.items():
        try:
            report = read_report(packed)
        except BadPacket:
            continue
        if report.run_id == run_id and subkey == report.peer:
            found[report.peer] = report
    return found


def shards(run_id: str) -> list[str]:
    return [f"{run_id}.peers.{shard}" for shard in range(SHARDS)]


def shard_of(run_id: str, peer: bytes) -> str:
    return shards(run_id)[hashlib.sha256(peer).digest()[0] % SHARDS]


def report_period_s(n_peers: int) -> float:
    """Seconds between two reports of a peer: 3 for a few peers, 30 for 1,000."""
    return min(30.0, max(3.0, 0.03 * n_peers))
