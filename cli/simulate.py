"""`p2p-muloco simulate`: a whole swarm in one process, on a virtual clock, the same every time."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click
from p2p_muloco.cli.view import console, in_bytes
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from p2p_muloco.config import RunConfig
from p2p_muloco.errors import ConfigError, MulocoError
from p2p_muloco.world import World

if TYPE_CHECKING:
    from p2p_muloco.simulate import Simulation

EVALUATED_WINDOWS = 128
SHOWN = 16  # workers in the table at the end
LINE_S = 10.0  # between two plain lines


@click.command("simulate")
@click.argument("run", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--workers", type=click.IntRange(1, 4096), required=True, metavar="K")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True,
              help="Decides the workers' keys, and so who reads which text and who leads. The run's own seed stands in RUN.")
@click.option("--faults", "faults_path", type=click.Path(path_type=Path, dir_okay=False), default=None, metavar="FILE",
              help="TOML: speeds and links of workers, who comes late, dies, freezes or leaves, who is cut off from whom.")
@click.option("--data", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="The run's text, if it is a file.")
@click.option("--hours", type=click.FloatRange(0.0, min_open=True), default=24.0 * 365, show_default=True,
              help="Of virtual time, after which it is over in any case.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=None,
              help="Folder for the workers' states and logs. [default: a temporary one]")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures to this file.")
def command(run: Path, workers: int, seed: int, faults_path: Path | None, data: Path | None, hours: float, out: Path | None,
            json_path: Path | None) -> None:
    """Run RUN.toml with K workers in this process: the real trainer and protocol, simulated clock and links.

    The same arguments give the same bits every time. An example of FILE:

    \b
    step_s = 0.5            # virtual seconds of an inner step; upload_mbit, download_mbit, latency_ms as well
    [[worker]]              # what one of them has instead
    number = 4
    step_s = 4.0
    [[fault]]               # kill, freeze or leave
    kind = "freeze"
    worker = 2
    at_s = 30.0
    for_s = 10.0
    [[partition]]
    workers = [1, 2]
    from_s = 100.0
    to_s = 220.0
    """
    config = RunConfig.from_toml(_text(run, f"`p2p-muloco init {run}` writes one"))
    world = World.from_toml(_text(faults_path, "see `p2p-muloco simulate --help`") if faults_path else "", workers)
    if config.run.min_peers > workers:
        raise ConfigError(f"--workers {workers}: run.min_peers = {config.run.min_peers}; the first outer step could never happen")

    import torch

    from p2p_muloco.chain import Law
    from p2p_muloco.data import load_corpus
    from p2p_muloco.simulate import Simulation

    torch.set_num_threads(1)  # as many as are to give the same bits on every machine
    screen, began = console(), time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"--out {folder}: has files in it; name a new folder")
        view = stack.enter_context(_View(screen, config))
        simulation = Simulation(Law.of(config), load_corpus(config.data, data), world, folder, seed, view.on_record)
        over = simulation.run(3600 * hours)
        result = _figures(simulation, seed, time.monotonic() - began)
    _print_summary(screen, result)
    if json_path:
        json_path.write_text(json.dumps(result) + "\n")
    if not over:
        raise MulocoError(f"the run was not over after {simulation.network.now / 3600:.2f} hours of virtual time")


def _text(path: Path, remedy: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; {remedy}") from None


class _View(contextlib.AbstractContextManager["_View"]):
    """A bar of counted tokens on a terminal, a line now and then elsewhere."""

    def __init__(self, screen: Any, config: RunConfig) -> None:
        self._screen, self._best, self._said_at = screen, -1, time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} % of the token budget"),
                   TimeElapsedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)
        self._task = self._progress.add_task("round 0", total=config.run.token_budget)

    def __enter__(self) -> _View:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def on_record(self, number: int, record: dict[str, Any]) -> None:
        if record["event"] != "round" or record["round"] <= self._best:
            return
        self._best = record["round"]
        self._progress.update(self._task, completed=record["tokens"], description=f"round {record['round']}")
        if not self._screen.is_terminal and time.monotonic() > self._said_at + LINE_S:
            self._said_at = time.monotonic()
            self._screen.print(f"{record['at_s']:10.1f} s virtual  round {record['round']:<5} group of {record['members']:<3} "
                               f"head {record['digest'][:12]}", soft_wrap=True)


def _figures(simulation: Simulation, seed: int, seconds: float) -> dict[str, Any]:
    from p2p_muloco.data import heldout_windows
    from p2p_muloco.inner import heldout_loss, load_flat

    law, living = simulation.law, simulation.living()
    config = law.config
    best = max(living, key=lambda trainer: trainer.state.tip.k)
    load_flat(best.inner.model, law.layout, best.state.anchor)
    windows = heldout_windows(simulation.corpus, config.model.seq_len, EVALUATED_WINDOWS)
    workers = []
    for one in simulation.workers:
        if one.trainer is not None:
            traffic = simulation.network.traffic[one.identity.peer_id]
            workers.append({
                "number": one.number, "alive": one.trainer in living, "round": one.trainer.state.tip.k,
                "digest": one.trainer.state.tip.head.hex(), "state": one.trainer.digest.hex(),
                "inner_steps": one.trainer.total_steps, "rounds_counted": one.trainer.rounds,
                "bytes_sent": traffic.sent, "bytes_received": traffic.received,
            })
    rounds: dict[tuple[int, str], dict[str, Any]] = {}
    for one in simulation.workers:
        for record in one.records:
            if record["event"] == "round":
                known = rounds.setdefault((record["round"], record["digest"]), {
                    **{key: record[key] for key in ("round", "digest", "state", "members", "tokens", "at_s")}, "states": set()})
                known["states"].add(record["state"])
    differences = sum(len(row.pop("states")) > 1 for row in rounds.values())
    return {
        "run_id": config.run_id, "seed": seed, "virtual_s": round(simulation.network.now, 3), "seconds": round(seconds, 1),
        "tokens": best.state.tip.tokens, "heldout_loss": heldout_loss(best.inner.model, windows, 32),
        "heads": len({trainer.state.tip.head for trainer in living}), "silent_differences": differences, "workers": workers,
        "rounds": [rounds[key] for key in sorted(rounds)],
    }


def _print_summary(screen: Any, r: dict[str, Any]) -> None:
    table = Table(title=f"{len(r['workers'])} workers after {r['virtual_s']:.0f} s of virtual time")
    for heading in ("worker", "round", "inner steps", "rounds counted", "sent", "received", "head", "weights"):
        table.add_column(heading, justify="left" if heading in ("head", "weights") else "right", no_wrap=True)
    for row in r["workers"][:SHOWN]:
        table.add_row(f"{row['number']}{'' if row['alive'] else ' (dead)'}", str(row["round"]), str(row["inner_steps"]),
                      str(row["rounds_counted"]), in_bytes(row["bytes_sent"]), in_bytes(row["bytes_received"]),
                      row["digest"][:12], row["state"][:12])
    screen.print(table)
    if len(r["workers"]) > SHOWN:
        screen.print(f"... and {len(r['workers']) - SHOWN} more")
    screen.print(
        f"held-out loss  {r['heldout_loss']:.3f} nats a byte after {len(r['rounds'])} entries and {r['tokens']} tokens\n"
        f"agreement      {r['heads']} head{'s' * (r['heads'] != 1)} at the end, "
        f"{r['silent_differences']} heads with more than one state\n"
        f"time           {r['seconds']:.0f} s for {r['virtual_s']:.0f} s of virtual time",
        soft_wrap=True,
    )
