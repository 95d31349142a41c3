"""How a peer gets to where others are: along its own chain, across a fork, or from a state of theirs. Pure, and disk.

The chain with the owner's newest waypoint wins (waypoint.py), else the heavier one. Who leaves the other takes its own state
at the fork, replays the others' entries, and carries what it had said on the branch that it leaves: the decoded parts of its
packets that were counted there and not on the new one, with what no entry holds yet, as its next pseudo-gradient (at most 4H
steps of it). So with beta = 1 no work is lost by a fork, and none is counted twice though both branches may hold one packet.

Cost of a fork of j entries: j entries to fetch, and a replay from the pinned state before it; nobody else waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from p2p_muloco.chain import Checked, Law, Tip, advance, merged_update
from p2p_muloco.errors import StateUnavailable
from p2p_muloco.outer import eta_mu, outer_step
from p2p_muloco.replay import Asking, fetch_entries
from p2p_muloco.requests import fetch_manifest, fetch_tip, fetch_waypoint
from p2p_muloco.snapshot import State, Store
from p2p_muloco.waypoint import Waypoint, read_waypoint, require_better

__all__ = ["Way", "apply_entry", "carried_work", "decoded_parts", "find_way"]

LoadState = Callable[[Tip, Sequence[bytes]], State]
"""(the first donor's tip, donors) -> a verified state that the first one pinned.

Raises StateUnavailable, BadPacket or DiskFull.
"""


@dataclass
class Way:
    """To stand where a donor stands: take `base` (None: the own state), then `entries`; `mine` is the branch left behind."""

    base: State | None
    entries: list[Checked]
    mine: list[Checked]
    is_own: bool = False  # `base` is an own earlier state: where the branches part
    waypoint: Waypoint | None = None  # the newest of the other chain, whose donor has shown its head


def apply_entry(law: Law, state: State, checked: Checked) -> None:
    """The outer step of the entry after this state, in place: live, replayed or across a fork, it is this one."""
    assert checked.start.start.head == state.tip.head, "an entry is applied to the state it was made for"
    d, h = merged_update(law, checked), [hello.h for hello in checked.counted]
    eta, mu = eta_mu(law.config.outer, law.config.inner.optimizer, h, state.tip.k)
    outer_step(state.anchor, state.momentum, d, eta, mu)
    state.tip = advance(law, state.tip, checked)


def find_way(law: Law, own: Tip, store: Store, net: Asking, donors: Sequence[bytes], k: int, head: bytes,
             load_state: LoadState) -> Way:
    """The way from `own` to the first donor's chain that holds `head`, said to be of entry `k`, all of it verified.

    Raise StateUnavailable if the donors can't show one, BadPacket if what they show is false or of a chain that loses.
    """
    if not _state_is_cheaper(law, own, net, donors[0], k):
        entries = fetch_entries(law, net, donors, own)
        if _reaches(own, entries, head):
            return Way(None, entries, [])
    theirs = fetch_tip(net.fetch, donors[0])
    donors = tuple(dict.fromkeys((*donors, *theirs.members)))
    parted_at = max(_shared(own, theirs), default=own.k)
    if parted_at < own.k and (fork := _state_at(law, store, parted_at)) is not None:
        entries = fetch_entries(law, net, donors, fork.tip)
        if _reaches(fork.tip, entries, head):
            waypoint = _require_better(law, store, net, donors, own, fork.tip, entries, parted_at=fork.tip.k)
            return Way(fork, entries, list(store.replayable(law, fork.tip, own.k)), is_own=True, waypoint=waypoint)
    base = load_state(theirs, donors)
    entries = fetch_entries(law, net, donors, base.tip)
    if not _reaches(base.tip, entries, head):
        raise StateUnavailable("that peer could not show the entry it is said to hold")
    parted_at = max(_shared(own, base.tip), default=0)
    waypoint = _require_better(law, store, net, donors, own, base.tip, entries, parted_at)
    return Way(base, entries, _own_branch(law, store, base.tip, own), waypoint=waypoint)


def _state_is_cheaper(law: Law, own: Tip, net: Asking, donor: bytes, k: int) -> bool:
    """Whether the entries up to the donor's pinned state are more bytes than that state."""
    if (k - own.k) * law.layout.down_bytes < 8 * law.layout.n_elements:
        return False
    with contextlib.suppress(StateUnavailable):
        manifest = fetch_manifest(law, net.fetch, donor)
        return (manifest.k - own.k) * law.layout.down_bytes > manifest.size
    return False


def _reaches(tip: Tip, entries: Sequence[Checked], head: bytes) -> bool:
    return head in tip.recent or any(checked.head == head for checked in entries)


def _require_better(law: Law, store: Store, net: Asking, donors: Sequence[bytes], own: Tip, base: Tip,
                    entries: Sequence[Checked], parted_at: int) -> Waypoint | None:
    """Raise BadPacket unless the other chain wins; return the newest waypoint that a donor knows of."""
    theirs = base
    for checked in entries:
        theirs = advance(law, theirs, checked)
    heads = {*base.recent, *(checked.head for checked in entries)}
    held = read_waypoint(law, store.waypoint())
    newest = _waypoint_of_any(law, net, donors)
    require_better(own, held, theirs, heads, newest, parted_at)
    return newest


def _waypoint_of_any(law: Law, net: Asking, donors: Sequence[bytes]) -> Waypoint | None:
    """The first donor's that answers: any of them may have died since it served the rest."""
    for donor in donors:
        if donor != net.peer_id:
            with contextlib.suppress(StateUnavailable):
                return fetch_waypoint(law, net.fetch, donor)
    return None


def _shared(own: Tip, theirs: Tip) -> list[int]:
    """The entries whose heads both tips name alike."""
    heads = {own.k - i: head for i, head in enumerate(reversed(own.recent))}
    return [k for i, head in enumerate(reversed(theirs.recent)) if heads.get(k := theirs.k - i) == head]


def _state_at(law: Law, store: Store, k: int) -> State | None:
    """The own state after entry k: the pinned one before it and a replay; None if it is older than those."""
    for pinned in reversed([p for p in store.pinned() if p <= k]):
        state = store.state(law, pinned)
        if state is not None:
            for checked in store.replayable(law, state.tip, k):
                apply_entry(law, state, checked)
            if state.tip.k == k:
                return state
    return None


def _own_branch(law: Law, store: Store, theirs: Tip, own: Tip) -> list[Checked]:
    """The own entries since the oldest pinned state that are known not to be theirs.

    Of entries before the heads that their tip names nobody can say it: what those hold is not said again.
    """
    oldest = next((tip for k in store.pinned() if (tip := store.pinned_tip(k)) is not None), None)
    first_named = theirs.k - len(theirs.recent) + 1
    entries = store.replayable(law, oldest, own.k) if oldest is not None else ()
    return [checked for checked in entries if checked.k >= first_named and checked.head not in theirs.recent]


def decoded_parts(law: Law, payload: bytes, checked: Checked, peer: bytes) -> Tensor:
    """What an entry holds of a peer's packet: (elements,) fp32, zero in parts that were not counted."""
    said = torch.zeros(law.layout.n_elements)
    for span, n in checked.counted_parts(peer):
        for index in range(span.first, span.first + n):
            part = law.layout.parts[index]
            said[part.start : part.stop] = law.layout.decode_up(index, law.layout.up_slice(payload, index, index + 1))
    return said


def carried_work(law: Law, me: bytes, way: Way, payloads: Mapping[bytes, bytes]) -> tuple[Tensor, int]:
    """What the branch left behind holds of this peer's packets and the new one doesn't, and in how many inner steps.

    `payloads`: own packets by digest, the one that is out included. Returns ((elements,) fp32, steps); steps may be
    negative where the new branch counted a packet that was still out.
    """
    work, steps = torch.zeros(law.layout.n_elements), 0
    for branch, sign in ((way.mine, 1), (way.entries, -1)):
        for checked in branch:
            for hello in checked.counted:
                if hello.peer == me and (payload := payloads.get(hello.digest)) is not None:
                    work += sign * decoded_parts(law, payload, checked, me)
                    steps += sign * hello.h
    return work, steps
