"""Taking the state from many donors at once. Pure but for the two loops at the end, which ask through an exchange.

Chunks are named by a manifest and entries by the chain, so whoever has them may serve them: the donor whose chain is
followed, and all it names. `Download` decides which chunk to ask of whom, and is told what came of it; `Uploads` is the other
side: what a donor serves beside its training. Joiners spread over the donors by hashing, so that no donor gets them all.
"""

from __future__ import annotations

import collections
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from p2p_muloco.chain import Law, Tip
from p2p_muloco.errors import StateUnavailable
from p2p_muloco.partial import Partial
from p2p_muloco.replay import (
    FIRST_LATE_S,
    JUDGED_AFTER_S,
    LATE,
    SOONEST_LATE_S,
    TURN_S,
    Asking,
    needed_bytes_per_s,
    require_pace,
)
from p2p_muloco.requests import BUSY, Manifest, WantChunk, WantEntry, fetch_manifest
from p2p_muloco.snapshot import State, max_entry_bytes

__all__ = ["SLOWEST_BYTES_PER_S", "Download", "Progress", "Uploads", "fetch_state"]

SLOWEST_BYTES_PER_S = 62_500  # of an answer: 0.5 Mbit/s, or another donor is asked

WIDTH = 2  # chunks in flight at one donor: the second fills the pause between two
AT_ONCE = 8  # in flight in all, those that are late not counted
FAILURES = 3  # in a row, after which a donor is gone
REST_S, LONGEST_REST_S = 0.25, 1.0  # of a donor that was busy or failed; doubled each time
PACE_S = 10.0  # over which the rate is measured
TELL_S = 0.5  # between two words about progress

STREAMS = 4  # of chunks that a donor serves at once
BURST_S = 0.1

@dataclass(frozen=True)
class Progress:
    """Of a download: bytes that are here and verified, of how many, how many donors serve, and seconds left if known."""

    bytes: int
    of: int
    donors: int
    seconds_left: float | None


@dataclass
class _Donor:
    width: int = WIDTH  # chunks in flight; less once it was busy with ours
    failures: int = 0  # in a row
    busy: int = 0  # answers in a row
    rests_until: float = -math.inf
    gone: str = ""  # why it is never asked again


class Download:
    """A manifest's chunks from several donors: `asks` says what to ask of whom, `answered` and `failed` what came of it."""

    def __init__(self, me: bytes, manifest: Manifest, donors: Iterable[bytes], held: Iterable[int] = ()) -> None:
        self.me, self.manifest = me, manifest
        self.held = set(held)
        self._donors = {donor: _Donor() for donor in donors if donor != me}
        self._wanted = collections.deque(i for i in range(len(manifest.digests)) if i not in self.held)
        self._flying: dict[tuple[bytes, int], float] = {}  # (donor, chunk) -> when it was asked
        self._took_s: collections.deque[float] = collections.deque(maxlen=15)
        self._came: collections.deque[tuple[float, int]] = collections.deque()
        self._bytes = sum(map(manifest.length, self.held))
        self._began_at: float | None = None

    @property
    def done(self) -> bool:
        return len(self.held) == len(self.manifest.digests)

    @property
    def trouble(self) -> str:
        """Why this can't go on: all donors are gone; '' while it can."""
        if self.done or not all(donor.gone for donor in self._donors.values()):
            return ""
        reasons = sorted({donor.gone for donor in self._donors.values()})
        return f"none of {len(self._donors)} donors has the rest of the state: {'; '.join(reasons)}"

    def asks(self, now: float) -> list[tuple[bytes, int]]:
        """(donor, chunk) to ask now; they count as asked."""
        self._began_at = now if self._began_at is None else self._began_at
        asks = []
        while not self.done and (ask := self._next(now)) is not None:
            self._flying[ask] = now
            asks.append(ask)
        return asks

    def _next(self, now: float) -> tuple[bytes, int] | None:
        load = collections.Counter(donor for donor, _ in self._flying)
        free = [peer for peer, d in self._donors.items() if not d.gone and load[peer] < d.width and d.rests_until <= now]
        asked_at = {index: at for (_, index), at in self._flying.items() if index not in self.held}  # the last time, of each
        late = [index for index, at in asked_at.items() if now > at + self._patience_s()]
        if self._wanted:
            if not free or len(asked_at) - len(late) >= AT_ONCE:
                return None
            index = self._wanted.popleft()
            return min(free, key=lambda peer: self._rank(peer, index)), index
        for index in late:
            others = [peer for peer in free if (peer, index) not in self._flying]
            if others:
                return min(others, key=lambda peer: self._rank(peer, index)), index
        return None

    def _rank(self, donor: bytes, index: int) -> bytes:
        """Rendezvous hashing: each joiner has its own order of donors for each chunk."""
        return hashlib.sha256(self.me + donor + index.to_bytes(4, "big")).digest()

    def _patience_s(self) -> float:
        if not self._took_s:
            return FIRST_LATE_S
        return max(SOONEST_LATE_S, LATE * sorted(self._took_s)[len(self._took_s) // 2])

    def answered(self, donor: bytes, index: int, data: bytes, now: float) -> bool:
        """True if these bytes are a chunk that was not here yet: keep them. Whoever lies is never asked again."""
        state, asked_at = self._donors[donor], self._land(donor, index)
        if self.manifest.holds(index, data):
            state.failures = state.busy = 0
            state.rests_until = now
            self._took_s.append(now - asked_at)
            return self._take(index, len(data), now)
        if data == BUSY:
            ours = sum(serving == donor for serving, _ in self._flying)
            state.busy += 1
            state.width = max(1, min(state.width, ours))
            state.rests_until = now if ours else now + _rest_s(state.busy)
        else:
            state.gone = "a chunk is not what the manifest says" if data else "they hold another one"
        self._want_again(index)
        return False

    def failed(self, donor: bytes, index: int, reason: str, now: float) -> None:
        """There is no answer: the connection broke, or time was up."""
        state = self._donors[donor]
        self._land(donor, index)
        state.failures += 1
        state.rests_until = now + _rest_s(state.failures)
        if state.failures >= FAILURES:
            state.gone = reason
        self._want_again(index)

    def _land(self, donor: bytes, index: int) -> float:
        return self._flying.pop((donor, index))

    def _want_again(self, index: int) -> None:
        if index not in self.held and all(flying != index for _, flying in self._flying):
            self._wanted.appendleft(index)

    def _take(self, index: int, size: int, now: float) -> bool:
        if index in self.held:
            return False
        self.held.add(index)
        self._bytes += size
        self._came.append((now, size))
        return True

    def rate(self, now: float) -> float:
        """Bytes a second of the last `PACE_S`, or since the beginning."""
        while self._came and self._came[0][0] < now - PACE_S:
            self._came.popleft()
        seconds = min(PACE_S, now - self._began_at) if self._began_at is not None else 0.0
        return sum(size for _, size in self._came) / seconds if seconds > 0 else 0.0

    def progress(self, now: float) -> Progress:
        rate, serving = self.rate(now), len({donor for donor, _ in self._flying})
        return Progress(self._bytes, self.manifest.size, serving, (self.manifest.size - self._bytes) / rate if rate else None)


def _rest_s(times: int) -> float:
    return float(min(LONGEST_REST_S, REST_S * 2 ** (times - 1)))


class Uploads:
    """The donor's side: at most `STREAMS` chunks at once, and a token bucket over them, so that exchanges keep their share."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._most = int(min(STREAMS, max(1.0, bytes_per_s / SLOWEST_BYTES_PER_S)))
        self._streams = 0
        self._spent_until = -math.inf

    def begin(self) -> bool:
        """Whether one more chunk may be served now; `end` it then."""
        admitted = self._streams < self._most
        self._streams += admitted
        return admitted

    def end(self) -> None:
        self._streams -= 1
        assert self._streams >= 0

    def wait_s(self, n_bytes: int, now: float) -> float:
        """How long to wait before these bytes are sent."""
        self._spent_until = max(self._spent_until, now - BURST_S) + n_bytes / self._bytes_per_s
        return max(0.0, self._spent_until - now)


# -- the loops


def fetch_state(law: Law, net: Asking, theirs: Tip, donors: Sequence[bytes], folder: Path,
                progress: Callable[[Progress], None]) -> State:
    """The state that the first donor, who stands at `theirs`, has pinned, from all of them; `folder` keeps what has come.

    Raise StateUnavailable if nobody has it or this link can't keep up with the run, BadPacket if it breaks a rule, DiskFull.
    """
    partial = Partial(folder, fetch_manifest(law, net.fetch, donors[0]))
    try:
        _fill(law, net, donors, theirs, partial, progress)
    finally:
        partial.close()
    return partial.read(law)


def _fill(law: Law, net: Asking, donors: Sequence[bytes], theirs: Tip, partial: Partial,
          progress: Callable[[Progress], None]) -> None:
    manifest = partial.manifest
    download = Download(net.peer_id, manifest, donors, partial.held())
    tickets: dict[int, tuple[bytes, int]] = {}
    began_at, told_at, judged = net.now(), -math.inf, not theirs.period_ms
    while not download.done:
        is_slow = net.now() > began_at + JUDGED_AFTER_S and download.rate(net.now()) < needed_bytes_per_s(law, theirs)
        suspect = is_slow and not judged
        if suspect and not tickets:  # chunks may be slow because their donors are busy; entries are not
            judged = True
            _judge_link(law, net, donors[0], theirs)
        for donor, index in [] if suspect and not judged else download.asks(net.now()):
            request = WantChunk(manifest.k, index, manifest.digests[index])
            tickets[net.ask(donor, request, max(len(BUSY), manifest.length(index)))] = donor, index
        for ticket, answer in net.answers(TURN_S):
            if ticket not in tickets:
                continue  # of an earlier download
            donor, index = tickets.pop(ticket)
            if isinstance(answer, str):
                download.failed(donor, index, answer, net.now())
            elif download.answered(donor, index, answer, net.now()):
                partial.write(index, answer)
        if download.done or net.now() >= told_at + TELL_S:
            told_at = net.now()
            progress(download.progress(told_at))
        if download.trouble:
            raise StateUnavailable(download.trouble)


def _judge_link(law: Law, net: Asking, donor: bytes, theirs: Tip) -> None:
    """Take one entry, with nothing else on the way: it must not take longer than the swarm takes to make the next."""
    began_at = net.now()
    packed = net.fetch(donor, WantEntry(theirs.k), max_entry_bytes(law))
    if packed:
        require_pace(law, theirs, len(packed) / max(1e-3, net.now() - began_at))


