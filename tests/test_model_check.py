"""A small model check: which interleavings of messages, with which fault, keep one chain.

`LocalNetwork(choose=...)` with no latency makes all messages in flight due at once, so a schedule is a list of choices;
a run is repeated from its choices alone. What is covered, for one entry of two parts:

    two members     every order of delivery in which each stream (talk, bulk; each direction) keeps its own order, without
                    a fault and with one crash at each message; with one duplicate or delay at each message every order
                    in which each direction keeps its own: complete searches; states met before are not entered again.
                    Nothing kept in order: the search without a fault, cut off at a number of states
    three members   the same search without a fault, cut off at a number of states; then every schedule that deviates once
                    from the plain order (any message overtakes all others, streams not kept in order), without a fault
                    and, sampled, with a crash, delay or duplicate at each message
    up to three     random schedules with every kind of fault at random messages

Timers come only when nothing is in flight, except where a delay of some seconds lets them; so a timer that fires before a
message that is already there is not covered here (tests/test_protocol.py delays each message past each deadline).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from kit import Driver, Swarm, assert_agree, established, law
from torch import Tensor

from p2p_muloco.deadlines import longest_exchange_s
from p2p_muloco.identity import Identity
from p2p_muloco.local import Fault, LocalNetwork
from p2p_muloco.messages import KINDS, Averaged, Parts
from p2p_muloco.packet import Packet
from p2p_muloco.wire import read_frame

LAW = law({"a": (3,), "b": (3,)})
TIPS = {n: established(LAW, n) for n in (2, 3)}


class World(LocalNetwork):
    """A network whose due messages are picked by `pick(events)`: an index into those that may come next."""

    def __init__(self, pick: Callable[[World, list[Any]], int], *faults: Fault, fifo: str = "") -> None:
        super().__init__(latency_s=0.0, faults=faults, choose=lambda n: 0)
        self.pick_next, self.fifo = pick, fifo
        self.driver: Driver | None = None

    def _pick(self, due: list[Any]) -> Any:
        allowed = due
        if self.fifo:  # the first of each stream, or of each link
            streams = self.fifo == "streams"
            firsts = {(e.sender, e.to, streams and is_bulk(e.frame)): e for e in reversed(due)}
            allowed = sorted(firsts.values())
        event = allowed[self.pick_next(self, allowed)]
        due.remove(event)
        self._events.remove(event)
        self._events.sort()
        return event


def is_bulk(frame: bytes | None) -> bool:
    """Parts and averages go on a stream of their own, so only within a stream are messages kept in order."""
    return frame is not None and isinstance(read_frame(frame, KINDS), Parts | Averaged)


def play(n: int, pick: Callable[[World, list[Any]], int], *faults: Fault, fifo: str = "") -> Driver:
    """One schedule to its end; all invariants hold."""
    world = World(pick, *faults, fifo=fifo)
    driver = world.driver = Driver(Swarm(LAW, n, tip=TIPS[n], network=world))
    assert driver.run(2, 60.0 + 2 * longest_exchange_s(LAW)), "a hang"
    assert_agree(driver)
    return driver


class Seen(Exception):
    """This state was entered before."""


def frozen(value: Any) -> Any:
    """A hashable picture of a state: all that decides what happens next."""
    if isinstance(value, dict):
        return tuple((frozen(k), frozen(v)) for k, v in value.items())
    if isinstance(value, set | frozenset):
        return frozenset(map(frozen, value))
    if isinstance(value, list | tuple):
        return tuple(map(frozen, value))
    if isinstance(value, Identity | memoryview):
        return bytes(value) if isinstance(value, memoryview) else value.peer_id
    if isinstance(value, Tensor):
        return tuple(value.flatten().tolist())
    if value is LAW or isinstance(value, Packet):
        return type(value).__name__  # the same in all states, or named by the peer that holds it
    if is_dataclass(value):
        return (type(value).__name__, *(frozen(getattr(value, f.name)) for f in fields(value)))
    if type(value).__module__.startswith("p2p_muloco"):
        return (type(value).__name__, frozen(vars(value)))
    return value


def picture(world: World) -> int:
    """Members, trainers, and what is in flight on each link in its order."""
    assert world.driver is not None
    trainers = [(peer.tip.head, peer.retry_at, len(peer.outcomes)) for peer in world.driver.peers]
    flights: dict[tuple[bytes, bytes], list[Any]] = {}
    for event in sorted(world._events):
        flights.setdefault((event.sender, event.to), []).append((event.at, event.frame or b""))
    members = tuple(frozen(vars(member)) for member in world.members.values())
    # `nth` of a fault counts messages, so how many were sent is part of the state while a fault is to come
    flying = tuple(sorted(frozen(flights)))
    return hash((world.now, members, tuple(trainers), flying, frozen(world._dead), frozen(world._sent) if world.faults else ()))


def search(n: int, *faults: Fault, max_states: int, fifo: str = "") -> tuple[int, int, bool]:
    """Depth first over all schedules: (states, ends, whether none was left out)."""
    seen: set[int] = set()
    stack: list[list[int]] = [[]]
    ends = 0
    while stack and len(seen) < max_states:
        path = stack.pop()
        taken: list[int] = []

        def pick(world: World, allowed: list[Any], path: list[int] = path, taken: list[int] = taken) -> int:
            if len(taken) < len(path):
                choice = path[len(taken)]
            else:
                state = picture(world)
                if state in seen:
                    raise Seen
                seen.add(state)
                stack.extend([*taken, other] for other in range(1, len(allowed)))
                choice = 0
            taken.append(choice)
            return choice

        try:
            play(n, pick, *faults, fifo=fifo)
            ends += 1
        except Seen:
            pass
    return len(seen), ends, not stack


def count_messages(n: int) -> list[int]:
    return list(play(n, lambda world, allowed: 0).network._sent.values())


def faults_at_every_message(n: int, *kinds: tuple[str, float]) -> Iterator[Fault]:
    for kind, seconds in kinds:
        for peer, sent in enumerate(count_messages(n)):
            yield from (Fault(kind, peer, nth, seconds) for nth in range(sent))


def test_two_members_all_schedules_without_a_fault() -> None:
    states, ends, complete = search(2, max_states=20_000, fifo="streams")
    assert complete and states > 100 and ends >= 2, (states, ends)


def test_two_members_nothing_in_order_up_to_a_bound() -> None:
    states, ends, _ = search(2, max_states=200)
    assert states >= 200 and ends >= 2, (states, ends)


@pytest.mark.parametrize("kind", ["kill", "duplicate"])
def test_two_members_all_schedules_with_a_fault_at_each_message(kind: str) -> None:
    for fault in faults_at_every_message(2, (kind, 0.0)):
        states, ends, complete = search(2, fault, max_states=20_000, fifo="streams" if kind == "kill" else "links")
        assert complete and ends >= 1, (fault, states, ends)


def test_two_members_all_schedules_with_a_delay_at_each_message() -> None:
    """The delayed message comes after timers: silence, and each deadline."""
    for fault in faults_at_every_message(2, ("delay", 4.0), ("delay", 12.0)):
        states, ends, complete = search(2, fault, max_states=20_000, fifo="links")
        assert complete and ends >= 1, (fault, states, ends)


def test_three_members_schedules_up_to_a_bound() -> None:
    states, ends, _ = search(3, max_states=250, fifo="streams")
    assert states >= 250 and ends >= 1, (states, ends)


def one_deviation(at: int, choice: int) -> Callable[[World, list[Any]], int]:
    """The plain order, but at step `at` the `choice`th of the messages in flight overtakes those before it."""
    steps = 0

    def pick(world: World, allowed: list[Any]) -> int:
        nonlocal steps
        steps += 1
        return choice if steps == at + 1 and choice < len(allowed) else 0

    return pick


def widths(n: int, *faults: Fault) -> list[int]:
    """How many messages were in flight at each step of the plain order."""
    found: list[int] = []

    def pick(world: World, allowed: list[Any]) -> int:
        found.append(len(allowed))
        return 0

    play(n, pick, *faults)
    return found


def test_three_members_every_single_overtaking() -> None:
    for at, width in enumerate(widths(3)):
        for choice in range(1, width):
            play(3, one_deviation(at, choice))


@pytest.mark.parametrize("kind,seconds", [("kill", 0.0), ("delay", 12.0), ("duplicate", 0.0)])
def test_three_members_a_fault_and_an_overtaking(kind: str, seconds: float) -> None:
    rng = random.Random(kind)
    for fault in faults_at_every_message(3, (kind, seconds)):
        found = widths(3, fault)
        at = rng.choice([at for at, width in enumerate(found) if width > 1])
        play(3, one_deviation(at, rng.randrange(1, found[at])), fault)


@pytest.mark.parametrize("seed", range(3))
def test_random_schedules_with_any_fault(seed: int) -> None:
    rng = random.Random(seed)
    kinds = [("kill", 0.0), ("delay", 4.0), ("delay", 12.0), ("duplicate", 0.0), ("duplicate", 12.0), ("drop", 0.0),
             ("freeze", 4.0), ("freeze", 12.0)]
    for _ in range(100):
        n, (kind, seconds) = rng.choice([2, 3]), rng.choice(kinds)
        play(n, lambda world, allowed: rng.randrange(len(allowed)), Fault(kind, rng.randrange(n), rng.randrange(25), seconds))
