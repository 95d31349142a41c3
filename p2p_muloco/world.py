"""What surrounds simulated workers: how fast they are, how they are linked, and what goes wrong. Pure data, read from TOML.

    step_s = 0.5                 # an inner step of a worker, in virtual seconds; this and the next four hold for all
    upload_mbit = 20.0
    download_mbit = 100.0
    latency_ms = 25.0            # from a worker to any other, one way
    nat = false                  # nobody can dial it

    [[worker]]                   # what one worker has instead; the first is number 1
    number = 4
    step_s = 4.0
    joins_at_s = 60.0

    [[fault]]                    # kill: for good; freeze: for `for_s`, then it goes on; leave: in order, as after Ctrl-C
    kind = "freeze"
    worker = 2
    at_s = 30.0
    for_s = 10.0

    [[partition]]                # nothing crosses between these workers and all others
    workers = [1, 2]
    from_s = 100.0
    to_s = 220.0
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from p2p_muloco.errors import ConfigError

__all__ = ["Cut", "TimedFault", "Worker", "World"]

KINDS = ("kill", "freeze", "leave")


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One simulated machine and its link. Rates are of packets, averages and states; all else is small."""

    step_s: float = 0.5
    upload_mbit: float = 20.0
    download_mbit: float = 100.0
    latency_ms: float = 25.0
    joins_at_s: float = 0.0
    nat: bool = False  # nobody can dial it, so it is a client


@dataclass(frozen=True, kw_only=True)
class TimedFault:
    kind: str
    worker: int
    at_s: float
    for_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Cut:
    workers: tuple[int, ...]
    from_s: float
    to_s: float


@dataclass(frozen=True)
class World:
    workers: tuple[Worker, ...]
    faults: tuple[TimedFault, ...] = ()
    partitions: tuple[Cut, ...] = ()

    @classmethod
    def from_toml(cls, text: str, workers: int) -> World:
        """The world of so many workers; raise ConfigError that names the table, the field and the rule."""
        try:
            tree = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the faults file is not TOML: {error}") from None
        tables = {name: tree.pop(name, []) for name in ("worker", "fault", "partition")}
        lists = [name for name, rows in tables.items() if isinstance(rows, list) and all(isinstance(row, dict) for row in rows)]
        if wrong := next((name for name in tables if name not in lists), None):
            raise ConfigError(f"[{wrong}]: there may be several, so write [[{wrong}]]")
        everybody = _record(Worker, "the faults file", tree)
        each = [everybody] * workers
        for at, row in enumerate(tables["worker"], start=1):
            number = _number(f"worker {at}", row.pop("number", None), workers)
            each[number - 1] = _record(Worker, f"worker {at}", {**dataclasses.asdict(everybody), **row})
        faults = tuple(_record(TimedFault, f"fault {at}", row) for at, row in enumerate(tables["fault"], start=1))
        for at, fault in enumerate(faults, start=1):
            _number(f"fault {at}", fault.worker, workers)
            if fault.kind not in KINDS:
                raise ConfigError(f"fault {at}: kind = {fault.kind!r}: must be one of {', '.join(KINDS)}")
        cuts = tuple(_record(Cut, f"partition {at}", row) for at, row in enumerate(tables["partition"], start=1))
        for at, cut in enumerate(cuts, start=1):
            for number in cut.workers:
                _number(f"partition {at}", number, workers)
        return cls(tuple(each), faults, cuts)


def _number(place: str, value: Any, workers: int) -> int:
    if type(value) is not int or not 1 <= value <= workers:
        raise ConfigError(f"{place}: worker {value!r}: must be a number from 1 to {workers} (--workers)")
    return value


def _record(kind: type[Any], place: str, row: Mapping[str, Any]) -> Any:
    """A frozen record from a TOML table: known names, no name missing, numbers finite and not negative."""
    types, values = typing.get_type_hints(kind), {}
    for name, value in row.items():
        if name not in types:
            raise ConfigError(f"{place}: {name!r} is no field of it; known: {', '.join(types)}")
        values[name] = _value(f"{place}: {name}", types[name], value)
        if name in ("step_s", "upload_mbit", "download_mbit") and not value:
            raise ConfigError(f"{place}: {name} = {value!r}: must be more than 0")
    required = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING]
    if missing := [name for name in required if name not in values]:
        raise ConfigError(f"{place}: {missing[0]} is missing")
    return kind(**values)


def _value(place: str, kind: Any, value: Any) -> Any:
    if kind is float and type(value) in (int, float) and math.isfinite(value) and value >= 0:
        return float(value)
    if kind is bool and type(value) is bool:
        return value
    if kind is int and type(value) is int and value >= 0:
        return value
    if kind is str and type(value) is str:
        return value
    if kind == tuple[int, ...] and type(value) is list and all(type(item) is int for item in value):
        return tuple(value)
    raise ConfigError(f"{place} = {value!r}: must be {'a list of whole numbers' if kind == tuple[int, ...] else kind.__name__}"
                      f"{', finite and not negative' if kind in (int, float) else ''}")
