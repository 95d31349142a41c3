"""What peers tell people: one small signed record each, kept in the DHT, believed by no protocol."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import msgpack

from p2p_muloco.chain import Signed
from p2p_muloco.errors import BadPacket
from p2p_muloco.identity import PEER_ID_BYTES
from p2p_muloco.wire import Record, integer, raw, real, text

__all__ = ["MAX_REPORT_BYTES", "Report", "pack_report", "read_report", "read_reports", "report_period_s", "shard_of", "shards"]

MAX_REPORT_BYTES = 512
MAX_TTL_S = 120.0
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
    device: str = text(48)
    version: str = text(16)
    at_s: int = integer(0, 2**40)  # unix seconds at the sender


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
