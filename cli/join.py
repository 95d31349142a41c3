"""`p2p-muloco join`: the one command a volunteer needs."""

from __future__ import annotations

import dataclasses
import json
import logging
import shlex
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click
from p2p_muloco.cli.leaving import Leaving
from p2p_muloco.cli.view import PeerView, in_bytes

from p2p_muloco.addresses import check_address, check_announce, check_listen
from p2p_muloco.chaos import MISBEHAVIOURS
from p2p_muloco.config import JoinString, PeerConfig
from p2p_muloco.errors import ConfigError

if TYPE_CHECKING:
    from p2p_muloco.peer import Peer


@click.command("join")
@click.argument("join", metavar="JOIN_STRING")
@click.option("--initial-peer", "initial_peers", multiple=True, metavar="ADDR",
              help="Address of any running peer, if the join string's are gone. May be given several times.")
@click.option("--home", type=click.Path(path_type=Path), default=None,
              help="Folder for identity, state and metrics; the same folder resumes. [default: ./p2p-muloco-RUN_ID]")
@click.option("--name", default=socket.gethostname()[:32], help="How others see you. [default: this machine's name]")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda", "mps"]), default="auto", show_default=True)
@click.option("--batch-size", default="auto", show_default=True, metavar="N|auto",
              help="Sequences computed at once. The run decides how many make a step; a smaller N only needs less memory.")
@click.option("--threads", type=click.IntRange(1), default=None, help="CPU threads for training. [default: all cores]")
@click.option("--data", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="The run's text, if it is a file.")
@click.option("--listen", default="0.0.0.0:0", show_default=True, metavar="HOST:PORT", help="Port 0 = any free one.")
@click.option("--announce", multiple=True, metavar="ADDR", help="Address others reach you at, if it is not this machine's own.")
@click.option("--upload-mbit", type=click.FloatRange(0.1, 10_000), default=20.0, show_default=True,
              help="Your upload rate; it decides your share of the averaging.")
@click.option("--compile", "compiled", is_flag=True, help="Use torch.compile: slow to start, faster after.")
@click.option("--max-rounds", type=click.IntRange(1), default=None, help="Leave after this many rounds.")
@click.option("--owner-key", type=click.Path(path_type=Path, dir_okay=False), default=None, metavar="FILE",
              help="For the run's owner: sign one entry in 16, so that this peer's chain wins over any fork made without it.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write a summary to this file.")
@click.option("--misbehave", type=click.Choice(MISBEHAVIOURS), default=None, hidden=True)
def command(join: str, initial_peers: tuple[str, ...], home: Path | None, name: str, device: str, batch_size: str,
            threads: int | None, data: Path | None, listen: str, announce: tuple[str, ...], upload_mbit: float,
            compiled: bool, max_rounds: int | None, owner_key: Path | None,
            json_path: Path | None, misbehave: str | None) -> None:
    """Train with others. Everything about the run follows from JOIN_STRING.

    Model, text and settings are taken from the run and checked against its hash; what the others have learned so far is
    taken from a peer. Alone you train on, and others can join you at the address that is shown. Ctrl-C (or SIGTERM)
    finishes the running exchange, saves everything and leaves; again: leaves at once. The same command goes on from there.
    """
    parsed = JoinString.parse(join)
    config = PeerConfig(
        home=home or Path(f"p2p-muloco-{parsed.run_id}"), name=name, device=device, micro_batch=_batch_size(batch_size),
        threads=threads, data_path=data, compile=compiled, max_rounds=max_rounds,
        owner_key=owner_key,
    )
    listen_address = check_listen(listen)
    for address in initial_peers:
        check_address(address)
    for address in announce:
        check_announce(address)

    from p2p_muloco.home import locked_home
    from p2p_muloco.misbehave import member_factory
    from p2p_muloco.peer import Peer, PeerNetwork

    logging.basicConfig(format="%(asctime)s  %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
    network = PeerNetwork(listen=(listen_address,), announce=announce, initial_peers=initial_peers,
                          upload_mbit=upload_mbit, member=member_factory(misbehave))
    with locked_home(config.home), PeerView() as view, Leaving(view.say, view.close) as leaving:
        peer = Peer(parsed, config, network, view.say)
        leaving.in_order = peer.leave
        try:
            summary = _train(peer, view)
            if json_path:
                json_path.write_text(json.dumps(summary, indent=2) + "\n")
            leaving.saved = True
        finally:
            peer.close()


def _batch_size(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--batch-size {text!r}: must be a whole number from 1, or 'auto'")
    return int(text)


def _train(peer: Peer, view: PeerView) -> dict[str, Any]:
    run, trainer = peer.law.config.run, peer.trainer
    view.inner_steps = run.inner_steps
    peer.on_record = view.on_record
    view.say(f"joined {peer.law.config.run_id} as {peer.config.name} on {peer.device}: "
             f"{peer.law.layout.n_elements / 1e6:.2f}M parameters, a packet is {in_bytes(peer.law.layout.up_bytes)}")
    for address in peer.exchange.addresses:
        if "/127." not in address or len(peer.exchange.addresses) == 1:
            view.say(f"others can join through --initial-peer {address}")
    if trainer.total_steps:
        view.say(f"going on after {trainer.total_steps} inner steps, {trainer.rounds} rounds counted, at round "
                 f"{trainer.state.tip.k}")
    began = time.monotonic()

    def on_turn() -> None:
        view.turn(trainer.steps, trainer.losses[-1] if trainer.losses else None, peer.exchange.waiting_for())

    path = peer.run(on_turn)
    gave = peer.contribution()
    ending = "the run's token budget is spent" if trainer.ended else "left the run"
    view.say(f"{ending} after round {trainer.state.tip.k}. Contributed: {gave.inner_steps} inner steps, {gave.tokens} tokens, "
             f"{gave.rounds_counted} rounds counted, {in_bytes(gave.bytes_sent)} sent, {in_bytes(gave.bytes_received)} received; "
             f"model: {path}")
    if not trainer.ended:
        view.say(f"to go on from here:  {shlex.join(['p2p-muloco', *sys.argv[1:]])}")
    summary = {
        "run_id": peer.law.config.run_id, "name": peer.config.name, "round": trainer.state.tip.k,
        "seconds": round(time.monotonic() - began, 1), "digest": trainer.state.tip.head.hex(), "state": trainer.digest.hex(),
        "heldout_loss": trainer.last_heldout, "model": str(path), "ended": trainer.ended,
        **dataclasses.asdict(gave), "total_inner_steps": trainer.total_steps, "total_rounds_counted": trainer.rounds,
    }
    peer.metrics({"event": "end", **summary})
    return summary
