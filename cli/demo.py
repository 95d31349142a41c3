"""`p2p-muloco demo`: the real thing on one machine, real processes over a real DHT, watched from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import rich_click as click
from p2p_muloco.cli.processes import DEMO_MODEL, Processes, last_line, start_bootstrap, start_peer
from p2p_muloco.cli.view import console, in_bytes
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from p2p_muloco.config import InnerConfig, OuterConfig, RunConfig, RunSection
from p2p_muloco.errors import ConfigError, MulocoError
from p2p_muloco.metrics import read_json_lines

START_S = 90.0  # for processes to import torch on a busy machine
STALL_S = 120.0  # without a round at any peer
INNER_STEPS = 25
EVALUATED_WINDOWS = 128
SAMPLE_PROMPT = b"My fellow Americans, "


def demo_config(peers: int, rounds: int) -> RunConfig:
    """Of a model that learns visibly in minutes on a laptop's CPU.

    Overlap is off: peers that share two cores are so uneven that the early ones would be half a round ahead when the
    outer step comes, which costs 0.04 nats here; over a real network an exchange is a few steps long.
    """
    inner = InnerConfig(batch_size=4, lr=0.02)
    budget = peers * rounds * INNER_STEPS * inner.batch_size * DEMO_MODEL.seq_len
    run = RunSection(name="demo", inner_steps=INNER_STEPS, min_peers=peers, token_budget=budget, clock="steps",
                     overlap="off", window_s=30.0, snapshot_every=5)
    return RunConfig(run=run, model=DEMO_MODEL, inner=inner, outer=OuterConfig())


@click.command("demo")
@click.option("--peers", type=click.IntRange(1, 16), default=None, help="[default: 4; 6 with --chaos]")
@click.option("--rounds", type=click.IntRange(1, 1000), default=12, show_default=True, help="Not of --chaos: time ends it.")
@click.option("--chaos", "seed", type=click.IntRange(0), default=None, metavar="SEED",
              help="Disturb a swarm instead, as this number decides: kill -9, SIGSTOP, late and poisoning peers; then judge.")
@click.option("--minutes", type=click.FloatRange(0.1, 24 * 60.0), default=3.0, show_default=True, help="Of --chaos.")
@click.option("--rate", type=click.FloatRange(0.0, 60.0), default=4.0, show_default=True,
              help="Faults a minute of --chaos; with 0 it watches memory, files and threads instead.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("demo-out"), show_default=True,
              help="Folder for the peers' homes, the plot and the model; it must be new or an earlier demo's.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the figures to this file.")
def command(peers: int | None, rounds: int, seed: int | None, minutes: float, rate: float, out: Path,
            json_path: Path | None) -> None:
    """Watch several real peers find each other and train one model, on this machine's CPU, in about two minutes.

    Starts a bootstrap node and PEERS peers as processes of their own. Ends with a summary, a loss plot, a sample of text,
    and nothing left running. Everything is in the --out folder afterwards.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)  # so that the processes it started end with it
    _prepare(out)
    if seed is not None:
        from p2p_muloco.cli.chaos import run

        return run(out, seed, 60 * minutes, rate, peers or 6, json_path)
    peers = peers or 4
    config, screen, began = demo_config(peers, rounds), console(), time.monotonic()
    (out / "run.toml").write_text(config.to_toml())
    with Processes() as processes:
        screen.print(f"starting a bootstrap node and {peers} peers; logs and models go to {out}/")
        join = start_bootstrap(processes, out)
        homes = _start_peers(processes, out, join, peers)
        _watch(screen, processes, homes, rounds)
    result = _summarise(screen, config, out, homes, began)
    if json_path:
        json_path.write_text(json.dumps(result, indent=2) + "\n")
    if not result["digests_equal"]:
        raise MulocoError(f"the peers' heads differ: a fault of p2p-muloco; please report {out}/")


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _prepare(out: Path) -> None:
    marker = out / ".p2p-muloco-demo"
    if out.exists() and any(out.iterdir()) and not marker.exists():
        raise ConfigError(f"--out {out}: has files of something else in it; name a new folder")
    if out.exists():
        import shutil

        shutil.rmtree(out)
    out.mkdir(parents=True)
    marker.touch()


def _start_peers(processes: Processes, out: Path, join: str, peers: int) -> list[Path]:
    threads = max(1, (os.cpu_count() or 1) // peers)
    homes = [out / f"peer-{i + 1}" for i in range(peers)]
    for home in homes:
        start_peer(processes, home, join, threads)
    return homes


def _watch(screen: Any, processes: Processes, homes: list[Path], rounds: int) -> None:
    """Until every peer has ended by itself; a live table on a terminal, a line a round elsewhere."""
    progress = Progress(TextColumn("rounds"), BarColumn(), TextColumn("{task.completed} of {task.total}"), TimeElapsedColumn())
    task, said, moved_at = progress.add_task("rounds", total=rounds), 0, time.monotonic()
    live = Live(console=screen, refresh_per_second=4) if screen.is_terminal else contextlib.nullcontext()
    with live:
        while any(process.poll() is None for process, _ in processes.running[1:]):
            processes.check()
            records = [list(_rounds(home)) for home in homes]
            least = min(len(record) for record in records)
            if isinstance(live, Live):
                progress.update(task, completed=least)
                live.update(Group(_table(homes, records), progress))
            for number in range(said, least):
                moved_at = time.monotonic()
                if not screen.is_terminal:
                    screen.print(_line([record[number] for record in records]), soft_wrap=True)
            said = max(said, least)
            if time.monotonic() > moved_at + STALL_S + (START_S if not said else 0.0):
                raise MulocoError(f"no round for {STALL_S:.0f} s; the peers' last words: "
                                  + "; ".join(last_line(log) for _, log in processes.running[1:]))
            time.sleep(0.25)
        processes.check()
        for number in range(said, min(len(list(_rounds(home))) for home in homes)):
            if not screen.is_terminal:
                screen.print(_line([list(_rounds(home))[number] for home in homes]), soft_wrap=True)
        if isinstance(live, Live):
            progress.update(task, completed=min(len(list(_rounds(home))) for home in homes))
            live.update(Group(_table(homes, [list(_rounds(home)) for home in homes]), progress))


def _rounds(home: Path) -> Iterator[dict[str, Any]]:
    return (record for record in read_json_lines(home / "metrics.jsonl") if record["event"] == "round")


def _line(records: list[dict[str, Any]]) -> str:
    heads = {record["digest"] for record in records}
    states = {record["state"] for record in records}
    agreement = f"{len(records)} of {len(records)} peers identical" if len(heads) == len(states) == 1 else "PEERS DIFFER"
    sent = sum(record["bytes_sent"] for record in records) / len(records)
    return (f"round {records[0]['round']:<3} held-out {records[0]['heldout_loss']:.3f}  "
            f"{sum(r['tokens_per_s'] or 0 for r in records):6.0f} tokens/s  group of {records[0]['members']}  "
            f"{in_bytes(sent)} sent a peer  head {records[0]['digest'][:12]}  {agreement}")


def _table(homes: list[Path], records: list[list[dict[str, Any]]]) -> Table:
    table = Table(title="one model, several peers: equal heads mean bit-equal weights")
    for heading in ("peer", "round", "held-out", "training", "tokens/s", "group", "sent", "received", "head", "weights"):
        table.add_column(heading, justify="left" if heading in ("peer", "head", "weights") else "right")
    for home, rows in zip(homes, records, strict=True):
        if not rows:
            table.add_row(home.name, "-", "starting")
            continue
        last = rows[-1]
        loss = "-" if last["loss"] is None else f"{last['loss']:.3f}"
        table.add_row(home.name, str(last["round"]), f"{last['heldout_loss']:.3f}", loss, f"{last['tokens_per_s'] or 0:.0f}",
                      str(last["members"]), in_bytes(last["bytes_sent"]), in_bytes(last["bytes_received"]),
                      last["digest"][:12], last["state"][:12])
    return table


def _summarise(screen: Any, config: RunConfig, out: Path, homes: list[Path], began: float) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file

    from p2p_muloco.data import decode, heldout_windows, load_corpus
    from p2p_muloco.inner import heldout_loss
    from p2p_muloco.model import GPT, generate, initial_weights, load_weights

    trained_s = time.monotonic() - began
    torch.set_num_threads(1)  # more is slower at this size
    corpus = load_corpus(config.data)
    windows, model = heldout_windows(corpus, config.model.seq_len, EVALUATED_WINDOWS), GPT(config.model)
    load_weights(model, initial_weights(config.model, config.run.seed))
    start = heldout_loss(model, windows, 32)
    steps = next(_ends(homes[0]))["inner_steps"]
    screen.print(f"for comparison: one peer alone, the same {steps} inner steps")
    alone = _train_alone(screen, config, out / "alone", steps, windows)
    models = [load_file(home / "model.safetensors") for home in homes]
    load_weights(model, models[0])
    end, per_peer = heldout_loss(model, windows, 32), [_peer_figures(home, model, windows) for home in homes]
    histories = [list(_rounds(home)) for home in homes]
    equal = all(len({(r["digest"], r["state"]) for r in row}) == 1 for row in zip(*histories, strict=False))
    equal = equal and len({tuple((r["round"], r["digest"]) for r in history) for history in histories}) == 1
    load_weights(model, models[0])
    sample = decode(generate(model, SAMPLE_PROMPT, 240, seed=1))
    result = {
        "rounds": len(histories[0]), "seconds": round(time.monotonic() - began, 1), "training_seconds": round(trained_s, 1),
        "heldout_loss_start": start, "heldout_loss_end": end, "heldout_loss_alone": alone, "digests_equal": equal,
        "packet_bytes": histories[0][0]["packet_bytes"], "fp32_bytes": 4 * sum(p.numel() for p in model.parameters()),
        "bytes_per_round": sum(r["bytes_sent"] for h in histories for r in h) / sum(map(len, histories)), "peers": per_peer,
    }
    plot = _plot(out, histories, alone, start)
    _print_summary(screen, result, sample, out, plot)
    return result


def _ends(home: Path) -> Iterator[dict[str, Any]]:
    return (record for record in read_json_lines(home / "metrics.jsonl") if record["event"] == "end")


def _peer_figures(home: Path, model: Any, windows: Any) -> dict[str, Any]:
    """A peer's own saved model, evaluated by this process, beside what it said of itself."""
    from safetensors.torch import load_file

    from p2p_muloco.identity import Identity, peer_name
    from p2p_muloco.inner import heldout_loss
    from p2p_muloco.model import load_weights

    load_weights(model, load_file(home / "model.safetensors"))
    end, last = next(_ends(home)), list(_rounds(home))[-1]
    return {
        "name": home.name, "peer_id": peer_name(Identity.load_or_create(home / "identity.key").peer_id),
        "round": last["round"], "digest": last["digest"], "state": last["state"],
        "heldout_loss": heldout_loss(model, windows, 32), "bytes_sent": end["bytes_sent"],
        "bytes_received": end["bytes_received"], "inner_steps": end["inner_steps"], "tokens_per_s": last["tokens_per_s"],
    }


def _train_alone(screen: Any, config: RunConfig, home: Path, steps: int, windows: Any) -> float:
    """Held-out loss of the same trainer with nobody else: same steps, same schedule, a group of one."""
    from p2p_muloco.chain import Law
    from p2p_muloco.data import load_corpus
    from p2p_muloco.identity import Identity
    from p2p_muloco.inner import heldout_loss, load_flat
    from p2p_muloco.local import LocalNetwork
    from p2p_muloco.simulate import local_trainer, run_swarm

    budget = steps * config.tokens_per_step
    law = Law.of(replace(config, run=replace(config.run, min_peers=1, token_budget=budget)))
    network = LocalNetwork()
    trainer = local_trainer(law, Identity(b"\1" * 32), network, load_corpus(config.data), home)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task("alone", total=steps)
        run_swarm(network, [trainer], [0.01], on_step=lambda: progress.advance(task))
    load_flat(trainer.inner.model, law.layout, trainer.state.anchor)
    return heldout_loss(trainer.inner.model, windows, 32)


def _plot(out: Path, histories: list[list[dict[str, Any]]], alone: float, start: float) -> Path | None:
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    rounds = [0, *(r["round"] for r in histories[0])]
    axes.plot(rounds, [start, *(r["heldout_loss"] for r in histories[0])], marker="o", color="black", label="swarm, held-out")
    for i, history in enumerate(histories):
        axes.plot([r["round"] for r in history], [r["loss"] for r in history], alpha=0.5, label=f"peer {i + 1}, training")
    axes.axhline(alone, linestyle="--", color="grey", label="one peer alone, held-out, same steps")
    axes.set(xlabel="round", ylabel="cross entropy, nats a byte", title=f"{len(histories)} peers, one model")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out / "loss.png", dpi=120)
    pyplot.close(figure)
    return out / "loss.png"


def _print_summary(screen: Any, r: dict[str, Any], sample: str, out: Path, plot: Path | None) -> None:
    n, ratio = len(r["peers"]), r["packet_bytes"] / r["fp32_bytes"]
    agreement = f"{n} of {n} peers identical in every round" if r["digests_equal"] else "THE PEERS DIFFER"
    expected = 2 * (n - 1) / n * r["packet_bytes"]
    relation = f"{r['bytes_per_round'] / expected:.3f} x 2(n-1)/n packets" if expected else "nothing to send alone"
    screen.print(
        f"\nheld-out loss  {r['heldout_loss_start']:.3f} -> {r['heldout_loss_end']:.3f} nats a byte; "
        f"one peer alone: {r['heldout_loss_alone']:.3f}\n"
        f"agreement      {agreement}; last head {r['peers'][0]['digest'][:12]}\n"
        f"traffic        {in_bytes(r['bytes_per_round'])} sent a peer and round ({relation}); a packet is {ratio:.3f} of fp32\n"
        f"time           {r['training_seconds']:.0f} s of training, {r['seconds']:.0f} s in all\n"
        f"model          {out}/peer-1/model.safetensors\n"
        f"plot           {plot or 'not drawn: install the extra [plot]'}\n",
        soft_wrap=True,
    )
    screen.print(f"sample         {SAMPLE_PROMPT.decode()}{sample}", markup=False, soft_wrap=True)
