"""Where peers listen and where they can be met: checked before anything heavy starts, so that a mistake costs a second."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import Any

from p2p_muloco.errors import ConfigError, NetworkError

__all__ = ["check_address", "check_announce", "check_listen", "reachable_addresses"]


def check_address(address: Any) -> str:
    """Return a peer's multiaddr, or raise ConfigError with an example."""
    shape = r"/(ip4|ip6|dns4|dns6|dns)/[0-9A-Za-z.:_-]{1,253}/tcp/([0-9]{1,5})/p2p/[1-9A-HJ-NP-Za-km-z]{20,64}"
    found = re.fullmatch(shape, address) if isinstance(address, str) else None
    if found is None or int(found.group(2)) > 65535:
        raise ConfigError(f"address {address!r}: must look like /ip4/203.0.113.7/tcp/31337/p2p/12D3Koo...")
    return address


def check_announce(text: str, peer: str = "12D3KooW" + "1" * 44) -> str:
    """The whole multiaddr of an announced address, given with or without its /p2p/ part; raise ConfigError."""
    return check_address(text if "/p2p/" in text else f"{text}/p2p/{peer}")


def check_listen(text: str) -> str:
    """The multiaddr of HOST:PORT; raise NetworkError if the port is taken or the host is not this machine's."""
    host, colon, port_text = text.rpartition(":")
    try:
        port = int(port_text)
        version = ipaddress.ip_address(host).version
        if not colon or not 0 <= port <= 65535:
            raise ValueError
    except ValueError:
        raise NetworkError(f"--listen {text!r}: must be HOST:PORT with an IP address, such as 0.0.0.0:31337") from None
    with socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise NetworkError(f"--listen {text}: {error.strerror}; stop what uses it, or take another, such as "
                               f"{host}:{port + 1 if port < 65535 else 31337}") from None
    return f"/ip{version}/{host}/tcp/{port}"


async def reachable_addresses(addresses: Iterable[str], timeout_s: float = 4.0) -> list[str]:
    """Those multiaddrs whose TCP port answers; raise NetworkError that says of each why it doesn't."""

    async def probe(address: str) -> tuple[str, str]:
        _, _, host, _, port, *_ = address.split("/")
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), timeout_s)
            writer.close()
            return address, ""
        except TimeoutError:
            return address, f"{host}:{port} did not answer in {timeout_s:.0f} s"
        except (OSError, ValueError) as error:  # ValueError: a name that can't be one
            return address, f"{host}:{port}: {getattr(error, 'strerror', None) or error}"

    results = await asyncio.gather(*map(probe, dict.fromkeys(addresses)))
    good = [address for address, trouble in results if not trouble]
    if results and not good:
        tried = "; ".join(trouble for _, trouble in results)
        raise NetworkError(f"no peer of the run can be reached ({tried}); check your connection, or ask for a newer join "
                           "string, or give a running peer's address with --initial-peer")
    return good


