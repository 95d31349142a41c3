"""A small internet for tests: hosts in network namespaces, and this process between them, which delays, limits, cuts and hides.

    python tests/netlab.py '[{"rate_mbit": 20, "delay_ms": 25}, {"nat": true}]'

Host i (from 1) is namespace `muloco-i` at 10.99.0.i. One behind NAT is at 192.168.i.2 and is seen by others at 10.99.0.i, at
ports that its router chooses, by those only whom it has called. Lines on standard input change the network: `cut 1 2`,
`isolate 3`, `heal`. Prints "ready"; ends with its standard input. Needs root, the `ip` command and /dev/net/tun.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

BUFFER_S = 0.5  # of a link: what would wait longer is dropped
TCP, UDP = 6, 17
TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
FIRST_PORT = 40_000  # of a router's mappings


def is_possible() -> bool:
    """Whether this machine lets us make namespaces."""
    return os.geteuid() == 0 and shutil.which("ip") is not None and os.access("/dev/net/tun", os.W_OK)


def name(host: int) -> str:
    return f"muloco-{host}"


def within(host: int) -> list[str]:
    """What to put before a command to run it on a host."""
    return ["ip", "netns", "exec", name(host)]


@contextlib.contextmanager
def internet(*hosts: dict[str, object]) -> Iterator[subprocess.Popen[str]]:
    """Hosts with these links while the block runs; write commands to its standard input."""
    process = subprocess.Popen([sys.executable, __file__, json.dumps(hosts)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                               text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline().strip() == "ready"
        yield process
    finally:
        process.stdin.close()
        process.wait(20.0)
        process.stdout.close()


@dataclass
class Host:
    number: int
    rate_mbit: float = 1000.0
    delay_ms: float = 5.0  # one way, to any other
    nat: bool = False
    tun: int = -1
    sent_until: float = 0.0
    received_until: float = 0.0
    outside: dict[tuple[int, bytes], int] = field(default_factory=dict)  # (protocol, inner port) -> outer port
    inside: dict[tuple[int, int], bytes] = field(default_factory=dict)  # (protocol, outer port) -> inner port
    called: set[tuple[int, int, bytes]] = field(default_factory=set)  # (protocol, outer port, other's address and port)

    @property
    def public(self) -> bytes:
        return bytes([10, 99, 0, self.number])

    @property
    def own(self) -> bytes:
        return bytes([192, 168, self.number, 2]) if self.nat else self.public


class Internet:
    def __init__(self, hosts: list[Host]) -> None:
        self.hosts = {host.public: host for host in hosts}
        self.cuts: set[frozenset[int]] = set()
        self.on_the_way: list[tuple[float, int, Host, bytes]] = []
        self._order = 0

    def command(self, line: str) -> None:
        word, *numbers = line.split()
        ours = [int(number) for number in numbers]
        if word == "heal":
            self.cuts.clear()
        elif word == "cut":
            self.cuts.add(frozenset(ours))
        elif word == "isolate":
            self.cuts |= {frozenset((ours[0], host.number)) for host in self.hosts.values() if host.number != ours[0]}

    def send(self, sender: Host, packet: bytes, now: float) -> None:
        if packet[0] >> 4 != 4 or packet[9] not in (TCP, UDP):
            return
        packet = _translated_out(sender, packet) if sender.nat else packet
        to = self.hosts.get(packet[16:20])
        if to is None or frozenset((sender.number, to.number)) in self.cuts:
            return
        received = _translated_in(to, packet) if to.nat else packet
        at = self._through(sender, to, len(packet), now)
        if received and at is not None:
            self._order += 1
            heapq.heappush(self.on_the_way, (at, self._order, to, received))

    def _through(self, sender: Host, to: Host, size: int, now: float) -> float | None:
        sent_at = max(now, sender.sent_until) + size / (125_000 * sender.rate_mbit)
        if sent_at > now + BUFFER_S:
            return None
        sender.sent_until = sent_at
        came_at = max(sent_at + (sender.delay_ms + to.delay_ms) / 2000, to.received_until + size / (125_000 * to.rate_mbit))
        to.received_until = came_at
        return came_at

    def deliver(self, now: float) -> None:
        while self.on_the_way and self.on_the_way[0][0] <= now:
            *_, to, packet = heapq.heappop(self.on_the_way)
            with contextlib.suppress(OSError):
                os.write(to.tun, packet)


def _translated_out(host: Host, packet: bytes) -> bytes:
    """A packet of a host behind NAT as it leaves its router."""
    protocol, at = packet[9], 4 * (packet[0] & 15)
    key = (protocol, packet[at : at + 2])
    port = host.outside.setdefault(key, FIRST_PORT + len(host.outside))
    host.inside[protocol, port] = key[1]
    host.called.add((protocol, port, packet[16:20] + packet[at + 2 : at + 4]))
    return _rewritten(packet, 12, host.public, at, port.to_bytes(2, "big"))


def _translated_in(host: Host, packet: bytes) -> bytes:
    """A packet to a host behind NAT, as it comes out of its router; b'' if that has called nobody there."""
    protocol, at = packet[9], 4 * (packet[0] & 15)
    port = int.from_bytes(packet[at + 2 : at + 4], "big")
    if (protocol, port, packet[12:16] + packet[at : at + 2]) not in host.called:
        return b""
    return _rewritten(packet, 16, host.own, at + 2, host.inside[protocol, port])


def _rewritten(packet: bytes, address_at: int, address: bytes, port_at: int, port: bytes) -> bytes:
    """With another address and port, and checksums that fit again."""
    changed = bytearray(packet)
    old = packet[address_at : address_at + 4], packet[port_at : port_at + 2]
    changed[address_at : address_at + 4], changed[port_at : port_at + 2] = address, port
    _adjust(changed, 10, old[0], address)
    sum_at = 4 * (packet[0] & 15) + (16 if packet[9] == TCP else 6)
    if packet[9] == TCP or packet[sum_at : sum_at + 2] != b"\0\0":
        _adjust(changed, sum_at, old[0] + old[1], address + port)
    return bytes(changed)


def _adjust(packet: bytearray, at: int, old: bytes, new: bytes) -> None:
    """The internet checksum at `at`, after `old` became `new` (RFC 1624)."""
    total = ~int.from_bytes(packet[at : at + 2], "big") & 0xFFFF
    for i in range(0, len(old), 2):
        total += (~int.from_bytes(old[i : i + 2], "big") & 0xFFFF) + int.from_bytes(new[i : i + 2], "big")
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    packet[at : at + 2] = (~total & 0xFFFF).to_bytes(2, "big")


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, stderr=None if check else subprocess.DEVNULL)


def _attach(host: Host) -> None:
    """Make its namespace, with one interface whose other end is this process."""
    _ip("netns", "del", name(host.number), check=False)
    _ip("netns", "add", name(host.number))
    libc = ctypes.CDLL(None, use_errno=True)
    here, there = os.open("/proc/self/ns/net", os.O_RDONLY), os.open(f"/run/netns/{name(host.number)}", os.O_RDONLY)
    assert libc.setns(there, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    host.tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(host.tun, TUNSETIFF, struct.pack("16sH", b"net0", IFF_TUN | IFF_NO_PI))
    assert libc.setns(here, CLONE_NEWNET) == 0
    os.close(here)
    os.close(there)
    _ip("-n", name(host.number), "address", "add", ".".join(map(str, host.own)) + "/24", "dev", "net0")
    _ip("-n", name(host.number), "link", "set", "net0", "up")
    _ip("-n", name(host.number), "link", "set", "lo", "up")
    _ip("-n", name(host.number), "route", "replace", "default", "dev", "net0")


def main() -> None:
    hosts = [Host(number, **more) for number, more in enumerate(json.loads(sys.argv[1]), start=1)]
    net = Internet(hosts)
    try:
        for host in hosts:
            _attach(host)
        by_tun = {host.tun: host for host in hosts}
        print("ready", flush=True)
        os.set_blocking(0, False)
        pending = b""
        while True:
            wait_s = max(0.0, net.on_the_way[0][0] - time.monotonic()) if net.on_the_way else None
            for tun in select.select([0, *by_tun], [], [], wait_s)[0]:
                if tun == 0:
                    if not (read := os.read(0, 4096)):
                        return
                    *lines, pending = (pending + read).split(b"\n")
                    for line in lines:
                        net.command(line.decode())
                    continue
                with contextlib.suppress(BlockingIOError):
                    for _ in range(64):
                        net.send(by_tun[tun], os.read(tun, 65_536), time.monotonic())
            net.deliver(time.monotonic())
    finally:
        for host in hosts:
            _ip("netns", "del", name(host.number), check=False)


if __name__ == "__main__":
    main()
