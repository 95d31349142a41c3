"""`p2p-muloco status`: look, touch nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import TYPE_CHECKING, Any

import rich_click as click
from p2p_muloco.cli.view import console, describe_named
from rich.markup import escape
from rich.table import Table

from p2p_muloco.addresses import check_address, reachable_addresses
from p2p_muloco.config import JoinString
from p2p_muloco.identity import peer_name

if TYPE_CHECKING:
    from p2p_muloco.reports import Report

LOOK_S = 4.0  # the DHT may need a second look before all shards answer


@click.command("status")
@click.argument("join", metavar="JOIN_STRING")
@click.option("--initial-peer", "initial_peers", multiple=True, metavar="ADDR", help="Address of any running peer.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts.")
def command(join: str, initial_peers: tuple[str, ...], as_json: bool) -> None:
    """Show who trains, how far they are and how fast. Read-only: needs no account and joins nothing."""
    import uvloop

    logging.getLogger("hivemind").setLevel(logging.CRITICAL)
    parsed = JoinString.parse(join)
    addresses = [*map(check_address, initial_peers), *parsed.addresses]
    reports = sorted(uvloop.run(_look(parsed, addresses)).values(), key=lambda report: (report.name, report.peer))
    if as_json:
        click.echo(json.dumps({"run_id": parsed.run_id, "round": max((r.k for r in reports), default=0),
                               "peers": [_row(report) for report in reports], "named": _named(reports)}, indent=2))
    else:
        _show(parsed.run_id, reports)


async def _look(join: JoinString, addresses: list[str]) -> dict[bytes, Report]:
    from p2p_muloco.door import visitor

    good = await reachable_addresses(addresses)
    async with visitor(join.run_id, good) as node:
        until, found = time.monotonic() + LOOK_S, await node.reports()
        while not found and time.monotonic() < until:
            await asyncio.sleep(0.5)
            found = await node.reports()
        return found


def _row(report: Report) -> dict[str, Any]:
    return {
        "name": report.name, "peer_id": peer_name(report.peer), "round": report.k, "inner_steps": report.inner_steps,
        "tokens_total": report.tokens_total, "tokens_per_s": round(report.tokens_per_s, 1),
        "loss": report.loss or None, "digest": report.head.hex(), "device": report.device, "version": report.version,
        "client": bool(report.client),
        "age_s": max(0, int(time.time()) - report.at_s),
    }


def _named(reports: list[Report]) -> list[dict[str, Any]]:
    from p2p_muloco.opinion import WHY
    from p2p_muloco.reports import said_of

    return [{"peer_id": peer_name(named.peer), "why": WHY[named.why], "round": named.k, "said_by": peers}
            for named, peers in said_of(reports)]


def _show(run_id: str, reports: list[Report]) -> None:
    table = Table(title=f"{run_id}: {len(reports)} peers, round {max((r.k for r in reports), default=0)}")
    for heading in ("name", "peer", "round", "steps", "tokens/s", "held-out", "head", "device", "seen"):
        table.add_column(heading)
    for r in reports:
        table.add_row(escape(r.name), "..." + peer_name(r.peer)[-6:], str(r.k), str(r.inner_steps), f"{r.tokens_per_s:.0f}",
                      f"{r.loss:.3f}" if r.loss else "-", r.head.hex()[:12], escape(r.device) + ", client" * r.client,
                      f"{max(0, int(time.time()) - r.at_s)} s ago")
    console().print(table)
    if any(r.client for r in reports):
        console().print("client: nobody can dial it, so it averages nothing for others; it is counted as all are")
    names = {peer_name(report.peer): report.name for report in reports}
    for row in _named(reports):
        said_by = f"{row['said_by']} peer{'s' * (row['said_by'] != 1)}"
        text = describe_named(row["peer_id"], names.get(row["peer_id"], ""), row["why"], row["round"])
        console().print(f"{text}, said by {said_by}", markup=False, soft_wrap=True)
    if not reports:
        console().print("nobody has reported in the last two minutes; the run may be waiting for its first peers")
