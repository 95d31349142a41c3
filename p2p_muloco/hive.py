"""The hivemind edge, upper half: `HivemindExchange` for the trainer, and the network process behind it.

    trainer process                         network process (forked before any tensor work)
    HivemindExchange  <--- socket pair ---> Member (the protocol), Node (p2pd, DHT, streams)

The network never waits for an inner step, and training never waits for the network. If the trainer dies in any way, its
end of the pair closes and the network process stops its daemon and ends; if that process dies, a guard stops the
daemon. It is the leader of a session of its own, so a Ctrl-C in the terminal reaches the trainer alone.

Packets and entries cross the pair as bytes: milliseconds for 5 MB. Shared memory would save that and would need a /dev/shm of
two packets, of which containers by default have 64 MB.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import uvloop

from p2p_muloco.addresses import reachable_addresses
from p2p_muloco.chain import CLIENT, NODE, Law, Tip
from p2p_muloco.config import RunConfig
from p2p_muloco.door import is_within_reach, measure_skew, refuse_twin
from p2p_muloco.errors import BadPacket, MulocoError, NetworkError, StateUnavailable
from p2p_muloco.exchange import Outcome, Traffic
from p2p_muloco.member import Behind, Committed, Failed, Member
from p2p_muloco.messages import FRAME_BYTES
from p2p_muloco.packet import Packet
from p2p_muloco.reports import Named, Report, report_period_s, with_named
from p2p_muloco.requests import WantEntry, serve
from p2p_muloco.snapshot import Store
from p2p_muloco.swarm import Clock, Node
from p2p_muloco.transfer import Uploads
from p2p_muloco.waypoint import Waypoint, read_waypoint
from p2p_muloco.wire import Record

__all__ = ["HivemindExchange", "NetworkOptions"]

log = logging.getLogger(__name__)

START_S = 60.0  # for daemon and DHT to start; an unreachable address is named after 4 s
SEARCH_S = 1.0  # between two looks at the roster while there is nobody to train with
STATUS_S = 1.0  # between two reports to the trainer's process
ADDRESSES_S = 10.0  # between two looks at own and others' addresses
REACH_S = 60.0  # between two looks of a client whether it can be dialled by now
RECENT_ENTRIES = 2  # served from memory until the trainer has written them


_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # Linux has both; elsewhere the second counts sleep too


def steady_s() -> float:
    """Seconds that go on while the machine sleeps, so that a closed lid is seen as a standstill."""
    return time.clock_gettime(_STEADY)


@dataclass(frozen=True)
class NetworkOptions:
    """Where and as whom to enter the network."""

    identity_path: Path
    run_id: str
    listen: tuple[str, ...]
    initial_peers: tuple[str, ...] = ()
    fallback_peers: tuple[str, ...] = ()  # met in an earlier life; tried if none of the others answers
    announce: tuple[str, ...] = ()
    returning: bool = False  # with an identity that may be in use: it was not made just now
    clock: Clock = time.time
    member: Callable[..., Any] = Member


class HivemindExchange:
    """The trainer's side. `start` forks the network process; `open` tells it the run; `close` ends it."""

    def __init__(self, connection: Connection, process: multiprocessing.process.BaseProcess) -> None:
        self._connection, self._process = connection, process
        self._outcomes: collections.deque[Outcome] = collections.deque()
        self._answers: dict[int, bytes | str] = {}
        self._numbers = itertools.count()
        self._waiting_for = ""
        self.traffic = Traffic()
        self.reports: dict[bytes, Report] = {}
        self.peer_id = b""
        self.addresses: list[str] = []
        self.met: list[str] = []  # addresses of peers this one is connected to
        self.named: list[Named] = []  # by this peer's own opinion, the newest last
        self.warning = ""  # of the start
        self.is_client = False  # others can't dial it

    @classmethod
    def start(cls, options: NetworkOptions) -> HivemindExchange:
        """Fork, enter the DHT, and return when this peer can be reached; raise MulocoError with the cause."""
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=_network_process, args=(ours, theirs, options), name="p2p-muloco-network")
        process.start()
        theirs.close()
        exchange = cls(ours, process)
        try:
            if not ours.poll(START_S):
                raise NetworkError(f"the network did not start within {START_S:.0f} s; is this machine overloaded?")
            kind, *values = ours.recv()
            if kind == "failed":
                raise values[0]
        except EOFError:
            exchange.close()
            raise NetworkError("the network process ended while it started") from None
        except BaseException:
            exchange.close()
            raise
        exchange.peer_id, exchange.addresses, exchange.warning, exchange.is_client = values
        return exchange

    def open(self, law: Law, tip: Tip, store_home: Path, rate_kbps: int) -> None:
        """Take part in the run's exchanges from `tip` on."""
        self._send("open", law.config.to_bytes(), tip, store_home, rate_kbps)

    def close(self) -> None:
        """Stop the network process and its daemon, whatever state they are in."""
        with contextlib.suppress(OSError, NetworkError):
            self._connection.send(("stop",))
        self._process.join(5.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()

    # -- Exchange

    def begin(self, packet: Packet) -> None:
        self._send("begin", packet)

    def withdraw(self) -> None:
        self._send("withdraw")

    def poll(self) -> Outcome | None:
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> Outcome | None:
        until = steady_s() + timeout_s
        while not self._outcomes and self._receive(max(0.0, until - steady_s())):
            pass
        return self._outcomes.popleft() if self._outcomes else None

    def adopt(self, tip: Tip) -> None:
        self._send("adopt", tip)

    def distrust(self, peer: bytes) -> None:
        self._send("distrust", peer)

    def show_waypoint(self, waypoint: Waypoint) -> None:
        self._send("waypoint", waypoint)

    def ask(self, donor: bytes, request: Record, max_bytes: int) -> int:
        ticket = next(self._numbers)
        self._send("fetch", ticket, donor, request, max_bytes)
        return ticket

    def answers(self, timeout_s: float) -> list[tuple[int, bytes | str]]:
        until = steady_s() + timeout_s
        while not self._answers and self._receive(max(0.0, until - steady_s())):
            pass
        answers, self._answers = self._answers, {}
        return list(answers.items())

    def fetch(self, donor: bytes, request: Record, max_bytes: int) -> bytes:
        ticket = self.ask(donor, request, max_bytes)
        while ticket not in self._answers:
            if not self._receive(120.0):
                raise StateUnavailable("the network process does not answer")
        answer = self._answers.pop(ticket)
        if isinstance(answer, str):
            raise StateUnavailable(answer)
        return answer

    def waiting_for(self) -> str:
        return self._waiting_for

    def now(self) -> float:
        return steady_s()

    def report(self, report: Report) -> None:
        """Publish what people may know of this peer, now and then again until the next one."""
        self._send("report", report)

    # -- the pair

    def _send(self, *message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError:
            raise NetworkError("the network process ended; start this peer again, its state is on disk") from None

    def _receive(self, timeout_s: float) -> bool:
        """Take one message in; False if none came in time."""
        try:
            if not self._connection.poll(timeout_s):
                return False
            kind, *values = self._connection.recv()
        except (EOFError, OSError):
            raise NetworkError("the network process ended; start this peer again, its state is on disk") from None
        if kind == "outcome":
            outcome, self.traffic.sent, self.traffic.received, self.traffic.cpu_s = values
            self._outcomes.append(outcome)
        elif kind == "fetched":
            self._answers[values[0]] = values[1]
        elif kind == "status":
            self._waiting_for, self.addresses, self.met, self.reports, self.named = values
        return True


def _network_process(ours: Connection, theirs: Connection, options: NetworkOptions) -> None:
    """Entry point of the forked process."""
    ours.close()
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logging.getLogger("hivemind").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_Hive(theirs, options).run())


class _Hive:
    """The loop of the network process: frames, timers and the trainer's commands drive one `Member`."""

    def __init__(self, connection: Connection, options: NetworkOptions) -> None:
        self.connection, self.options = connection, options
        self.node: Node
        self.member: Member | None = None
        self.store: Store | None = None
        self.report: Report | None = None
        self.reports: dict[bytes, Report] = {}
        self.recent: collections.OrderedDict[int, bytes] = collections.OrderedDict()
        self._sender = concurrent.futures.ThreadPoolExecutor(1)  # a busy trainer must not block the loop
        self._timer: asyncio.TimerHandle | None = None
        self.is_client = False
        self._stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stopped.set)
        try:
            await self._enter_network()
        except MulocoError as error:
            self._send_quietly(("failed", error))
            return
        threading.Thread(target=self._listen, args=(loop,), daemon=True).start()
        self._spawn(self._look_around())
        self._spawn(self._tell_status())
        if self.is_client:
            self._spawn(self._look_whether_reached())
        await self._stopped.wait()
        for task in self._tasks:
            task.cancel()
        await self.node.stop()
        self._sender.shutdown(wait=False, cancel_futures=True)

    async def _enter_network(self) -> None:
        o = self.options
        try:
            good = await reachable_addresses(o.initial_peers)
        except NetworkError:
            if not o.fallback_peers:
                raise
            good = await reachable_addresses(o.fallback_peers)
        if o.returning:
            await refuse_twin(o.identity_path, o.run_id, good)
        self.node = await Node.start(o.identity_path, o.run_id, o.listen, good, announce=o.announce, clock=o.clock)
        try:
            skew, reached = await asyncio.gather(measure_skew(self.node, good), is_within_reach(self.node, good))
            warning = skew.warning() if skew else ""
        except MulocoError:
            await self.node.stop()
            raise
        self.is_client = not (o.announce or reached)
        self.node.on_message, self.node.on_gone, self.node.serve = self._on_message, self._on_gone, self._serve
        self._send_quietly(("ready", self.node.identity.peer_id, await self.node.addresses(), warning, self.is_client))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- what drives the member

    def _drive(self, act: Callable[[Member, float], None]) -> None:
        """Let something happen to the member, then send what it says. A fault of ours ends the process, loudly."""
        if self.member is None:
            return
        try:
            act(self.member, steady_s())
            self._flush()
            self.member.awake(steady_s())
        except Exception:
            log.exception("a fault of p2p-muloco itself in its network process; please report the lines above")
            self._stopped.set()

    def _on_message(self, sender: bytes, record: Record) -> None:
        self._drive(lambda member, now: member.deliver(sender, record, now))

    def _on_gone(self, peer: bytes) -> None:
        self._drive(lambda member, now: member.gone(peer, now))

    def _on_timer(self) -> None:
        self._drive(lambda member, now: member.on_time(now))

    def _flush(self) -> None:
        member = self.member
        assert member is not None
        outbox, member.outbox = member.outbox, []
        for peer, record in outbox:
            self.node.send(peer, record)
        outcomes, member.outcomes = member.outcomes, []
        for outcome in outcomes:
            if isinstance(outcome, Committed):
                self.recent[outcome.checked.k] = outcome.checked.entry.pack()
                while len(self.recent) > RECENT_ENTRIES:
                    self.recent.popitem(last=False)
            elif isinstance(outcome, Behind | Failed):
                self.node.clear_bulk()
            self._tell("outcome", outcome, self.node.bytes_sent, self.node.bytes_received, self.node.cpu_s())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if member.wake_at is not None:
            delay_s = max(0.0, member.wake_at - steady_s()) + 0.001
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _serve(self, request: Record) -> bytes:
        if self.store is None:
            return b""
        answer = serve(self.store, request, self.store.config_bytes)
        return answer or (self.recent.get(request.k, b"") if isinstance(request, WantEntry) else b"")

    # -- the trainer's commands

    def _tell(self, *message: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the process is ending
            self._sender.submit(self._send_quietly, message)

    def _send_quietly(self, message: Any) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread of its own: the pair's blocking reads, handed to the loop."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            try:
                while True:
                    loop.call_soon_threadsafe(self._command, *self.connection.recv())
            except (EOFError, OSError):  # the trainer is gone, however it went
                loop.call_soon_threadsafe(self._stopped.set)

    def _command(self, kind: str, *values: Any) -> None:
        match kind:
            case "stop":
                self._stopped.set()
            case "open":
                self._open(*values)
            case "begin":
                self._drive(lambda member, now: member.begin(values[0], now))
            case "withdraw":
                self._drive(lambda member, now: member.withdraw(now))
            case "adopt":
                self._drive(lambda member, now: member.adopt(values[0]))
            case "distrust":
                self._drive(lambda member, now: member.distrust(values[0], now))
            case "waypoint":
                self._drive(lambda member, now: member.show_waypoint(values[0]))
            case "fetch":
                self._spawn(self._fetch(*values))
            case "report":
                self.report = values[0]
                self._spawn(self._publish())

    def _open(self, config_bytes: bytes, tip: Tip, home: Path, rate_kbps: int) -> None:
        law = Law.of(RunConfig.from_bytes(config_bytes))
        self.store = Store(home, law.layout, config_bytes)
        offsets = (law.layout.up_offsets, law.layout.down_offsets)
        largest = max(b - a for table in offsets for a, b in itertools.pairwise(table))
        self.node.max_frame_bytes = max(FRAME_BYTES, largest, self.node.max_frame_bytes) + 4096
        self.node.uploads = Uploads(rate_kbps * 125 / 2)  # the other half is left to exchanges
        mode = CLIENT if self.is_client else NODE
        self.member = self.options.member(law, self.node.identity, tip, mode=mode, rate_kbps=rate_kbps)
        with contextlib.suppress(BadPacket):
            self.member.waypoint = read_waypoint(law, self.store.waypoint())
        self._show_roster()

    def _show_roster(self) -> None:
        clients = [peer for peer, report in self.reports.items() if report.client]
        self._drive(lambda member, now: member.set_roster(self.reports, now, clients))

    async def _fetch(self, number: int, donor: bytes, request: Record, max_bytes: int) -> None:
        try:
            self._tell("fetched", number, await self.node.fetch(donor, request, max_bytes))
        except StateUnavailable as error:
            self._tell("fetched", number, str(error))

    # -- what goes on by itself

    async def _look_around(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # the DHT may be in trouble; the chain does not depend on it
                self.reports = await self.node.reports()
                self._show_roster()
            searching = self.member is None or self.member.tip.k == 0 or len(self.reports) < 2
            await asyncio.sleep(SEARCH_S if searching else report_period_s(len(self.reports)))

    async def _look_whether_reached(self) -> None:
        """A router may open the port by itself (UPnP takes seconds), or its owner may: then this peer averages too."""
        while self.is_client:
            await asyncio.sleep(REACH_S)
            with contextlib.suppress(Exception):
                self.is_client = not await is_within_reach(self.node)
        if self.member is not None:
            self.member.mode = NODE
        log.warning("others can dial this peer now: it averages for others, too")

    async def _publish(self) -> None:
        """This report, and again before it expires, until there is a newer one."""
        report = self.report
        while report is not None and report is self.report:
            with contextlib.suppress(Exception):
                current = dataclasses.replace(report, at_s=int(time.time()), client=int(self.is_client))
                current = with_named(current, self._named())
                await self.node.publish(current, len(self.reports))
            await asyncio.sleep(2 * report_period_s(len(self.reports)))

    def _named(self) -> list[Named]:
        return [] if self.member is None else [Named(peer, *said) for peer, said in self.member.opinion.named.items()]

    async def _tell_status(self) -> None:
        own: list[str] = []
        met: list[str] = []
        looked_at = -math.inf
        while True:
            if steady_s() > looked_at + ADDRESSES_S:
                looked_at = steady_s()
                with contextlib.suppress(Exception):  # p2pd is busy: the last answer stands
                    own, met = await self.node.addresses(), await self.node.known_addresses()
            waiting = "" if self.member is None else self.member.waiting_for(steady_s())
            self._tell("status", waiting, own, met, dict(self.reports), self._named())
            await asyncio.sleep(STATUS_S)
