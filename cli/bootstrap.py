"""`p2p-muloco bootstrap`: the address to meet at. It holds no model, and the run survives its end."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
from pathlib import Path

import rich_click as click

from p2p_muloco.addresses import check_announce, check_listen
from p2p_muloco.config import JoinString, RunConfig
from p2p_muloco.errors import ConfigError
from p2p_muloco.identity import Identity, peer_name
from p2p_muloco.wire import Record


@click.command("bootstrap")
@click.argument("run", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--listen", default="0.0.0.0:31337", show_default=True, metavar="HOST:PORT", help="Where to listen (TCP).")
@click.option("--announce", multiple=True, metavar="ADDR",
              help="Address that others reach this node at, if it is another than this machine's own: "
                   "/ip4/203.0.113.7/tcp/31337 or /dns4/example.org/tcp/31337. May be given several times.")
@click.option("--home", type=click.Path(path_type=Path), default=None, help="Folder for keys. [default: beside RUN]")
@click.option("--data", type=click.Path(path_type=Path, exists=True, dir_okay=False), default=None,
              help="The text of a run whose data.corpus is a local file.")
def command(run: Path, listen: str, announce: tuple[str, ...], home: Path | None, data: Path | None) -> None:
    """Start the first peer of a run: an address to meet at, which serves the run's law. It trains nothing.

    Prints the join string on a line of its own on standard output. Leave it running; started again with the same --home
    it has the same identity and join string. The run goes on without it once peers have met.
    """
    home = home or run.parent / f"{run.stem}-bootstrap"
    try:
        text = run.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{run}: {error.strerror}; `p2p-muloco init {run}` writes one") from None
    law = RunConfig.from_toml(text)
    for warning in law.warnings():
        click.echo(f"warning: {warning}", err=True)
    for other in announce:
        check_announce(other)
    address = check_listen(listen)

    import uvloop

    from p2p_muloco.home import locked_home

    logging.getLogger("hivemind").setLevel(logging.CRITICAL)
    with locked_home(home):
        law = _complete(law, Identity.load_or_create(home / "owner.key"), data)
        uvloop.run(_serve(law, home, address, announce))


def _complete(law: RunConfig, owner: Identity, data: Path | None) -> RunConfig:
    """Fill in what follows from this machine's files: the owner's key and the text's hash."""
    from p2p_muloco.data import SOTU_SHA256, load_corpus, text_sha256

    sha256 = law.data.sha256 or (SOTU_SHA256 if law.data.corpus == "sotu" and data is None else "")
    if data is not None and not sha256:
        sha256 = text_sha256(data)
    law = dataclasses.replace(
        law,
        run=dataclasses.replace(law.run, owner=law.run.owner or owner.public_key.hex()),
        data=dataclasses.replace(law.data, sha256=sha256),
    )
    load_corpus(law.data, data)
    return law


async def _serve(law: RunConfig, home: Path, address: str, announce: tuple[str, ...]) -> None:
    from p2p_muloco.requests import WantRun
    from p2p_muloco.swarm import Node

    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    node = await Node.start(home / "identity.key", law.run_id, (address,), announce=announce)
    packed = law.to_bytes()

    def serve(request: Record) -> bytes:
        return packed if isinstance(request, WantRun) and request.config_hash == law.hash else b""

    node.serve = serve
    try:
        addresses = _useful(await node.addresses(), announce, peer_name(node.identity.peer_id))
        join = JoinString(addresses=tuple(addresses), run_id=law.run_id, config_hash=law.hash, owner=law.run.owner)
        click.echo(f"run {law.run_id} is open at {', '.join(addresses)}", err=True)
        if all("/127." in address for address in addresses):
            click.echo("only programs on this machine can use that address; listen on 0.0.0.0 for others", err=True)
        click.echo(f"give volunteers this line:  p2p-muloco join {str(join)[:16]}...   (Ctrl-C stops this node)", err=True)
        click.echo(str(join))
        await stopped.wait()
    finally:
        await node.stop()


def _useful(addresses: list[str], announce: tuple[str, ...], peer: str) -> list[str]:
    """Announced addresses; else those of this machine that are more than loopback, public ones first."""
    if announce:
        return [check_announce(a, peer) for a in announce]
    tcp = [a for a in addresses if "/tcp/" in a and "/ws" not in a]
    outside = [a for a in tcp if "/127." not in a and "/ip6/::1/" not in a]
    private = ("/ip4/10.", "/ip4/192.168.", "/ip4/172.")
    return sorted(outside or tcp, key=lambda a: a.startswith(private))
