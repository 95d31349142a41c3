"""How commands talk: a live line on a terminal, plain lines elsewhere; standard error, so that output can be piped."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

__all__ = ["PeerView", "console", "describe_named", "describe_round", "in_bytes"]

QUIET_S = 10.0  # between two plain lines about the same wait


def console() -> Console:
    return Console(stderr=True, highlight=False)


def in_bytes(n: float) -> str:
    """1234567 -> '1.2 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


def describe_round(record: dict[str, Any]) -> str:
    def number(key: str, form: str) -> str:
        return "-" if record.get(key) is None else format(record[key], form)

    share = f"{record['members']} peers" if record["members"] != 1 else "alone"
    mine = f"{record['inner_steps']} steps of mine" if record["counted"] else "not counted, carried over"
    return (f"round {record['round']:<4} held-out {number('heldout_loss', '.3f')}  training {number('loss', '.3f')}  {share}, "
            f"{mine}  exchange {number('exchange_s', '.1f')} s  sent {in_bytes(record['bytes_sent'])}  "
            f"head {record['digest'][:12]}")


def describe_download(record: dict[str, Any]) -> str:
    left = record["seconds_left"]
    share = record["bytes"] / record["of"]
    bar = "\u2588" * round(20 * share) + "\u2591" * (20 - round(20 * share))
    donors = f"{record['donors']} donor" + "s" * (record["donors"] != 1)
    return (f"taking the run's state, {bar} {in_bytes(record['bytes'])} of {in_bytes(record['of'])} from {donors}"
            + ("" if left is None else f", {left:.0f} s left"))


def describe_named(peer_id: str, name: str, why: str, round_: int) -> str:
    return f"...{peer_id[-6:]}{f' ({name})' if name else ''}: {why} (round {round_})"


class PeerView:
    """What a volunteer sees. `turn` is called between any two things the trainer does."""

    def __init__(self) -> None:
        self.console = console()
        self.inner_steps = 0  # of the run, once it is known
        self._live = Live(console=self.console, refresh_per_second=4, transient=True) if self.console.is_terminal else None
        self._said = ""
        self._said_at = 0.0

    def __enter__(self) -> PeerView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the terminal back as it was."""
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        stamp = time.strftime("%H:%M:%S")
        self.console.print(Text(f"{stamp}  {text}"), soft_wrap=True)

    def on_record(self, record: dict[str, Any]) -> None:
        match record["event"]:
            case "round":
                self.say(describe_round(record))
            case "failed":
                self.say(f"round {record['round']}: attempt lost, nothing else: {record['reason']}; trying again")
            case "caught_up":
                self.say(f"caught up from round {record['from']} to {record['round']}")
            case "catch_up_failed":
                self.say(f"could not take round {record['round']} from that peer: {record['reason']}")
            case "rolled_back":
                self.say(f"went back to the weights of round {record['round']}: {record['why']}")
            case "not_written":
                self.say(f"{record['reason']}: training goes on, but others and a next start do without; make room")
            case "silent_difference":
                self.say(f"WARNING: {record['peers']} peers hold other weights under the same head at round {record['round']}")
            case "named":
                self.say(describe_named(record["peer_id"], record["name"], record["why"], record["round"]))
            case "downloading":
                self.wait(describe_download(record))

    def turn(self, steps: int, loss: float | None, waiting_for: str) -> None:
        shown = f"step {steps}/{self.inner_steps}" + (f"  loss {loss:.3f}" if loss is not None else "")
        if self._live:
            self._live.update(Text(f"  {shown}  {waiting_for}", style="dim"))
        elif waiting_for and steps >= self.inner_steps:
            self.wait(waiting_for)

    def wait(self, text: str) -> None:
        """A wait, said once and then every 10 s."""
        if self._live:
            self._live.update(Text(f"  {text}", style="dim"))
        elif text.split(",")[0] != self._said or time.monotonic() > self._said_at + QUIET_S:
            self._said, self._said_at = text.split(",")[0], time.monotonic()
            self.say(text)
