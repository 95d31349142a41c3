"""The hivemind edge, lower half: a libp2p daemon, a DHT node and streams of frames. One asyncio loop, no training.

Of hivemind come P2P (the p2pd daemon) and DHTNode; both run in this process's loop, so a peer is two processes and one
daemon. Every stream has a deadline to open and to move; whoever breaks framing is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgpack
import psutil
from hivemind.dht import DHTNode
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon import P2PDaemonError

from p2p_muloco.chain import Signed
from p2p_muloco.errors import BadPacket, NetworkError, StateUnavailable
from p2p_muloco.identity import Identity, peer_name
from p2p_muloco.messages import KINDS, Averaged, Parts
from p2p_muloco.reports import (
    MAX_REPORT_BYTES,
    MAX_TTL_S,
    Report,
    pack_report,
    read_report,
    read_reports,
    report_period_s,
    shard_of,
    shards,
)
from p2p_muloco.requests import BUSY, WantChunk, WantDial, WantTime, pack_request, read_request
from p2p_muloco.transfer import SLOWEST_BYTES_PER_S, Uploads
from p2p_muloco.wire import Record, read_frame, write_frame

__all__ = ["Clock", "Node"]

log = logging.getLogger(__name__)

TALK, BULK, FETCH = "/p2p-muloco/1/talk", "/p2p-muloco/1/bulk", "/p2p-muloco/1/fetch"
OPEN_S = 5.0  # to open a stream, dialling included
STALL_S = 20.0  # without any progress on a stream that should move
PIECE_BYTES = 2**16  # of an answer, between two looks at the upload's limit
IDLE_S = 90.0  # after which an unused stream is closed
MAX_TALK_BYTES = 64 * 1024
GOODBYE = (0).to_bytes(4, "big")
DIAL_S, DIALLED_HOSTS = 3.0, 2  # to see whether a peer can be reached
SKEW_S = 3.0  # that hivemind tolerates

Deliver = Callable[[bytes, Record], None]
Gone = Callable[[bytes], None]
Serve = Callable[[Record], bytes]
Clock = Callable[[], float]
"""Unix seconds."""


class ReportsOnly(RecordValidatorBase):
    """This DHT keeps small signed reports of short life, and nothing else."""

    def validate(self, record: DHTRecord) -> bool:
        if len(record.value) > MAX_REPORT_BYTES + 8 or record.expiration_time > time.time() + MAX_TTL_S + SKEW_S:
            return False
        try:
            report = read_report(msgpack.unpackb(record.value))
            return bool(msgpack.unpackb(record.subkey) == report.peer)
        except (BadPacket, ValueError, msgpack.UnpackException):
            return False

    def merge_with(self, other: RecordValidatorBase) -> bool:
        return isinstance(other, ReportsOnly)


def _guard_daemon() -> subprocess.Popen[bytes]:
    """A shell that waits for this process to end in any way, kill -9 included, and takes the daemon with it."""
    daemons = [str(child.pid) for child in psutil.Process().children() if child.name() == "p2pd"]
    assert daemons, "p2pd runs as a child of this process"
    return subprocess.Popen(["/bin/sh", "-c", 'read _; kill -9 "$@"', "p2p-muloco-guard", *daemons],
                            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                            start_new_session=True)


class _Link:
    """Frames to one peer over one stream, opened when there is something to say."""

    def __init__(self, node: Node, peer: bytes, protocol: str) -> None:
        self._node, self._peer, self._protocol = node, peer, protocol
        self._queue: asyncio.Queue[Record] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    def send(self, record: Record) -> None:
        self._queue.put_nowait(record)

    def clear(self) -> None:
        """Forget what was not sent yet: its attempt is lost."""
        while not self._queue.empty():
            self._queue.get_nowait()

    def close(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        writer: asyncio.StreamWriter | None = None
        try:
            record = await self._queue.get()
            opening = self._node.p2p.call_binary_stream_handler(PeerID(self._peer), self._protocol)
            _, reader, writer = await asyncio.wait_for(opening, OPEN_S)
            broken = asyncio.ensure_future(reader.read(1))
            while True:
                await asyncio.wait_for(self._write(writer, record), STALL_S)
                following = asyncio.ensure_future(self._queue.get())
                done, _ = await asyncio.wait({following, broken}, timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED)
                if following not in done:
                    following.cancel()
                    if broken not in done:
                        writer.write(GOODBYE)
                        broken.cancel()
                        return self._node.unlink(self._peer, self._protocol)
                    raise ConnectionResetError("the other side closed it")
                record = following.result()
        except asyncio.CancelledError:
            raise
        except Exception as error:  # p2pd reports every trouble with its own kind of exception
            log.debug("stream to %s broke: %r", peer_name(self._peer), error)
            self._node.unlink(self._peer, self._protocol)
            self._node.on_gone(self._peer)
        finally:
            if writer is not None:
                writer.close()

    async def _write(self, writer: asyncio.StreamWriter, record: Record) -> None:
        head, data = write_frame(record)
        size = len(head) + len(data)
        writer.write((size).to_bytes(4, "big") + head)
        if data:
            writer.write(data)
        self._node.bytes_sent += size
        await writer.drain()


class Node:
    """A peer's place in the network. `on_message` and `on_gone` are called from the loop; `serve` answers fetches."""

    def __init__(self, p2p: P2P, dht: DHTNode, identity: Identity, run_id: str, guard: subprocess.Popen[bytes],
                 clock: Clock) -> None:
        self.p2p, self.dht, self.identity, self.run_id, self._guard = p2p, dht, identity, run_id, guard
        self.clock = clock
        self.on_message: Deliver = lambda sender, record: None
        self.on_gone: Gone = lambda peer: None
        self.serve: Serve = lambda request: b""
        self.uploads = Uploads(math.inf)
        self.max_frame_bytes = MAX_TALK_BYTES
        self.bytes_sent = self.bytes_received = 0  # of exchanges
        self._links: dict[tuple[bytes, str], _Link] = {}

    @classmethod
    async def start(cls, identity_path: Path, run_id: str, listen: Sequence[str], initial_peers: Sequence[str] = (), *,
                    announce: Sequence[str] = (), dht_client: bool = False, clock: Clock = time.time) -> Node:
        """Start the daemon and enter the DHT; raise NetworkError that names the address or port that failed."""
        identity = Identity.load_or_create(identity_path)
        public = not all("127.0.0.1" in address for address in listen)
        try:
            p2p = await P2P.create(
                initial_peers=list(initial_peers) or None, host_maddrs=list(listen), announce_maddrs=list(announce) or None,
                identity_path=str(identity_path), check_if_identity_free=False, dht_mode="client" if dht_client else "server",
                nat_port_map=public, auto_nat=public, startup_timeout=30,
            )
        except P2PDaemonError as error:
            raise NetworkError(f"the network daemon did not start: {error}") from None
        assert p2p.peer_id.to_bytes() == identity.peer_id
        guard = _guard_daemon()
        try:
            dht = await DHTNode.create(
                p2p=p2p, initial_peers=list(initial_peers) or None, client_mode=dht_client, strict=False,
                record_validator=ReportsOnly(), wait_timeout=5.0,
            )
        except Exception as error:
            await p2p.shutdown()
            guard.kill()
            raise NetworkError(f"no DHT answered at {', '.join(initial_peers)}: {error}") from None
        node = cls(p2p, dht, identity, run_id, guard, clock)
        for protocol, handler in ((TALK, node._hear), (BULK, node._hear), (FETCH, node._answer)):
            await p2p.add_binary_stream_handler(protocol, handler)
        return node

    async def stop(self) -> None:
        for link in list(self._links.values()):
            link.close()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.dht.shutdown(), 3.0)
        await self.p2p.shutdown()
        self._guard.kill()
        self._guard.wait()

    def cpu_s(self) -> float:
        """CPU seconds of this process and its daemon so far."""
        processes = [psutil.Process(), *psutil.Process().children()]
        with contextlib.suppress(psutil.Error):  # the daemon is gone: the caller is about to hear of it
            return sum(times.user + times.system for times in (process.cpu_times() for process in processes))
        return 0.0

    async def addresses(self) -> list[str]:
        """Own multiaddrs, those that others can use first."""
        return [str(address) for address in await self.p2p.get_visible_maddrs(latest=True)]

    # -- frames

    def send(self, peer: bytes, record: Record) -> None:
        protocol = BULK if isinstance(record, Parts | Averaged) else TALK
        link = self._links.get((peer, protocol))
        if link is None:
            link = self._links[peer, protocol] = _Link(self, peer, protocol)
        link.send(record)

    def clear_bulk(self) -> None:
        """A lost attempt's packets must not stand in the way of the next one's on a slow link."""
        for (_, protocol), link in self._links.items():
            if protocol == BULK:
                link.clear()

    def unlink(self, peer: bytes, protocol: str) -> None:
        self._links.pop((peer, protocol), None)

    async def _hear(self, info: object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = info.peer_id.to_bytes()  # type: ignore[attr-defined]
        try:
            while (size := int.from_bytes(await reader.readexactly(4), "big")) > 0:
                if size > self.max_frame_bytes:
                    raise BadPacket(f"a frame of {size} bytes")
                frame = await asyncio.wait_for(reader.readexactly(size), STALL_S)
                self.bytes_received += size
                self.on_message(peer, read_frame(frame, KINDS))
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, BadPacket) as error:
            log.debug("stream from %s broke: %r", peer_name(peer), error)
            self.on_gone(peer)
        finally:
            writer.close()

    # -- stored bytes

    async def _answer(self, info: object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            size = int.from_bytes(await asyncio.wait_for(reader.readexactly(4), OPEN_S), "big")
            if size > 1024:
                return
            request = read_request(await asyncio.wait_for(reader.readexactly(size), OPEN_S))
            match request:
                case WantChunk():
                    await self._answer_chunk(writer, request)
                case WantDial():
                    answer = bytes([await self._dials(info.peer_id, request.port)])  # type: ignore[attr-defined]
                    writer.write(len(answer).to_bytes(8, "big") + answer)
                    await asyncio.wait_for(writer.drain(), STALL_S)
                case _:
                    await self._answer_one(writer, request)
        except (asyncio.IncompleteReadError, OSError, TimeoutError, BadPacket) as error:
            log.debug("a fetch was not answered: %r", error)
        finally:
            writer.close()

    async def _answer_chunk(self, writer: asyncio.StreamWriter, request: WantChunk) -> None:
        if not self.uploads.begin():
            writer.write(len(BUSY).to_bytes(8, "big") + BUSY)
            return await asyncio.wait_for(writer.drain(), STALL_S)
        try:
            await self._answer_one(writer, request, lambda size: self.uploads.wait_s(size, time.monotonic()))
        finally:
            self.uploads.end()

    async def _answer_one(self, writer: asyncio.StreamWriter, request: Record,
                          wait_s: Callable[[int], float] = lambda size: 0.0) -> None:
        answer = await asyncio.get_running_loop().run_in_executor(None, self._bytes_for, request)
        writer.write(len(answer).to_bytes(8, "big"))
        for at in range(0, len(answer), PIECE_BYTES):
            piece = memoryview(answer)[at : at + PIECE_BYTES]
            await asyncio.sleep(wait_s(len(piece)))
            writer.write(piece)
            await asyncio.wait_for(writer.drain(), STALL_S)

    async def _dials(self, peer: PeerID, port: int) -> bool:
        """Whether a new connection to where this peer is connected from can be made at `port`: to nobody else."""
        known = [other for other in await self.p2p.list_peers() if other.peer_id == peer]
        hosts = {str(address).split("/")[2] for other in known for address in other.addrs}
        for host in sorted(hosts)[:DIALLED_HOSTS]:
            with contextlib.suppress(OSError, TimeoutError):
                _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), DIAL_S)
                writer.close()
                return True
        return False

    def _bytes_for(self, request: Record) -> bytes:
        if isinstance(request, WantTime):
            return round(self.clock() * 1000).to_bytes(8, "big")
        return self.serve(request)

    async def fetch(self, donor: bytes, request: Record, max_bytes: int) -> bytes:
        """Ask a peer for stored bytes; raise StateUnavailable with the reason."""
        try:
            opening = self.p2p.call_binary_stream_handler(PeerID(donor), FETCH)
            _, reader, writer = await asyncio.wait_for(opening, OPEN_S)
        except Exception as error:
            raise StateUnavailable(f"{peer_name(donor)} can't be reached: {error!r}") from None
        try:
            packed = pack_request(request)
            writer.write(len(packed).to_bytes(4, "big") + packed)
            size = int.from_bytes(await asyncio.wait_for(reader.readexactly(8), STALL_S), "big")
            if size > max_bytes:
                raise StateUnavailable(f"{peer_name(donor)} answers with {size} bytes; at most {max_bytes} are read")
            return await asyncio.wait_for(reader.readexactly(size), STALL_S + size / SLOWEST_BYTES_PER_S)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError) as error:
            raise StateUnavailable(f"{peer_name(donor)} stopped answering: {error!r}") from None
        finally:
            writer.close()

    # -- reports

    async def publish(self, report: Report, n_peers: int) -> None:
        packed = pack_report(Signed.make(report, self.identity))
        expires_at = time.time() + min(MAX_TTL_S, max(20.0, 4 * report_period_s(n_peers)))
        await self.dht.store(shard_of(self.run_id, report.peer), packed, expires_at, subkey=report.peer)

    async def reports(self) -> dict[bytes, Report]:
        """The reports that the DHT holds now, by peer."""
        found: dict[bytes, Report] = {}
        shard_values = await self.dht.get_many(shards(self.run_id), sufficient_expiration_time=float("inf"))
        for value in shard_values.values():
            if value is not None and isinstance(value.value, dict):
                records = {subkey: item.value for subkey, item in value.value.items()}
                found |= read_reports(records, self.run_id)
        return found

    async def known_addresses(self) -> list[str]:
        """Multiaddrs of peers this one is connected to, to meet them again after a restart."""
        peers = await self.p2p.list_peers()
        return sorted(f"{addr}/p2p/{peer.peer_id.to_base58()}" for peer in peers for addr in peer.addrs)
