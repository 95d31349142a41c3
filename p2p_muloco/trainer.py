"""The loop of one peer: inner steps, and every so often an outer step that the whole swarm takes alike.

    theta   live weights (the model's parameters, on its device)
    anchor  the weights all peers agree on, and momentum of the outer step: flat fp32 CPU vectors, `State`
    e       error-feedback residual: what earlier packets could not say
    x       (anchor - theta_begin) + beta e, what this peer has to say for the next entry

Commit or nothing: a failed exchange leaves everything as it was and training goes on. Counted exactly once: progress
made after `theta_begin` is kept on top of the new anchor (as the law's `overlap` says); a packet that was counted nowhere
stays in theta as progress.
Memory beyond a bare loop, fp32 on the CPU: anchor, momentum, e, and theta_begin while an exchange runs.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from p2p_muloco.bounds import clip_to_limits, largest_lr, step_limits
from p2p_muloco.chain import Checked, Hello, Law, Tip
from p2p_muloco.checkpoint import Checkpoint, Checkpoints, Numbers, Pending
from p2p_muloco.errors import BadPacket, StateUnavailable
from p2p_muloco.exchange import Behind, Committed, Exchange, Failed, Outcome
from p2p_muloco.healing import Way, apply_entry, carried_work, decoded_parts, find_way
from p2p_muloco.inner import InnerLoop, flat_weights, heldout_loss, load_flat
from p2p_muloco.metrics import RecordSink
from p2p_muloco.muon import learning_rate, schedule_progress
from p2p_muloco.outer import eta_mu, outer_step
from p2p_muloco.packet import Packet
from p2p_muloco.replay import AskingUntil
from p2p_muloco.snapshot import State, Store
from p2p_muloco.transfer import Progress, fetch_state
from p2p_muloco.waypoint import Waypoint

__all__ = ["Trainer"]

log = logging.getLogger(__name__)

SKIPS_BEFORE_ROLLBACK = 10  # inner steps in a row without a finite gradient
SLOWED = 0.1  # lr factor of a peer that has 4H uncommitted steps: it must not run away from the swarm
PACE_MEMORY = 0.9
CATCH_UP_PAUSE_S = 1.0  # before a peer that could not catch up asks again
MISSED_BEFORE_FORGOTTEN = 10  # entries, after which what packets could not say is stale
EARLY = 0.75  # of a period: when a peer that no leader waits for brings its packet


@dataclass
class _Round:
    """A packet whose fate is not known yet."""

    packet: Packet
    theta_begin: Tensor
    base: Tensor  # from where training went on: theta_begin, or what it was taken to under overlap = "eager"
    begun_at: float
    retry_at: float | None = None  # None while an attempt runs


class Trainer:
    """One peer. The constructor takes finished objects; `run` loops over `advance` until the run or the peer ends."""

    def __init__(self, law: Law, state: State, inner: InnerLoop, exchange: Exchange, store: Store, *,
                 heldout: Tensor | None = None, record: RecordSink = lambda record: None,
                 max_rounds: int | None = None) -> None:
        self.law, self.state, self.inner, self.exchange, self.store = law, state, inner, exchange, store
        self.heldout, self.record, self.max_rounds = heldout, record, max_rounds
        self.residual = torch.zeros_like(state.anchor)
        self.digest = state.digest
        self.steps = 0  # inner steps since theta_begin, or since the anchor where no packet is out
        self.total_steps = self.rounds = 0
        self.pace_s = 0.0  # running mean of an inner step's seconds
        self.losses: list[float] = []
        self.last_heldout = math.nan
        self._round: _Round | None = None
        self._anchored_at = exchange.now()
        self._traffic, self._recorded_at, self._inner_s = (0, 0, 0.0), exchange.now(), 0.0
        self._stopping = self._withdrawn = False
        self.on_step: Callable[[], None] = lambda: None  # after each inner step
        self._checkpoints: Checkpoints | None = None
        self._crashed = False  # a packet of an earlier life may be out that this one does not know
        self._disk_trouble = ""
        load_flat(inner.model, law.layout, state.anchor)

    # -- the loop

    def run(self, on_turn: Callable[[], None] = lambda: None) -> None:
        """Train until the token budget, `max_rounds` or `stop`; `on_turn` is called between any two things done."""
        while not self.finished:
            on_turn()
            if self._stopping and not self._withdrawn:
                self._withdrawn = True
                self.exchange.withdraw()
                self.save()  # before the wait for the attempt, which may be cut short
            if not self.advance():
                outcome = self.exchange.wait(0.2)
                if outcome is not None:
                    self.on_outcome(outcome)
        self._stopping = True
        self.save()

    def stop(self) -> None:
        """Leave as soon as the attempt that is running, if any, has met its fate. Safe in another thread."""
        self._stopping = True

    @property
    def finished(self) -> bool:
        if self.ended:
            return True
        rounds_done = self.max_rounds is not None and self.rounds >= self.max_rounds
        return (rounds_done or self._stopping) and (self._round is None or self._round.retry_at is not None)

    @property
    def ended(self) -> bool:
        """The run's token budget is spent."""
        return self.state.tip.tokens >= self.law.config.run.token_budget

    def advance(self) -> bool:
        """Do one thing: hear an outcome, begin a round, or take an inner step. False if there is nothing to do."""
        outcome = self.exchange.poll()
        if outcome is not None:
            self.on_outcome(outcome)
        elif self._should_begin():
            self._begin()
        elif self._may_step():
            self._inner_step()
        else:
            return False
        return True

    # -- inner steps

    def _may_step(self) -> bool:
        run = self.law.config.run
        waits_for_exchange = self._round is not None and run.overlap == "off"
        exact = run.clock == "steps" and self.steps >= run.inner_steps
        return not (waits_for_exchange or exact or self._stopping)

    def _inner_step(self) -> None:
        started_at = self.exchange.now()
        loss = self.inner.step(self._lr())
        self.total_steps += 1
        self.on_step()
        self._measure(self.exchange.now() - started_at)
        self._inner_s += self.exchange.now() - started_at
        if math.isfinite(loss):
            self.steps += 1
            self.losses.append(loss)
        elif self.inner.skipped_in_row >= SKIPS_BEFORE_ROLLBACK:
            self._roll_back("no finite gradient in 10 steps")

    def _measure(self, seconds: float) -> None:
        seconds = min(seconds, 2 * self.pace_s) if self.pace_s else seconds  # this machine may have slept in between
        self.pace_s = seconds if not self.pace_s else PACE_MEMORY * self.pace_s + (1 - PACE_MEMORY) * seconds

    def _lr(self) -> float:
        run, tip = self.law.config.run, self.state.tip
        last = tip.last_tokens or run.inner_steps * self.law.config.tokens_per_step * run.min_peers
        uncommitted = self.steps + (self._round.packet.inner_steps if self._round else 0)
        # the step being taken counts too, or the first one of a run would have a rate of 0
        progress = schedule_progress(tip.tokens, last, uncommitted + 1, run.inner_steps, run.token_budget)
        return learning_rate(self.law.config.inner, progress) * (SLOWED if uncommitted >= self.law.max_h else 1.0)

    def _roll_back(self, why: str) -> None:
        """Back to the last weights known to be good: those of the packet that is out, else those all agree on."""
        log.warning("%s: back to the last good weights, after entry %d, with a fresh optimizer", why, self.state.tip.k)
        good = self.state.anchor if self._round is None else self._round.base
        load_flat(self.inner.model, self.law.layout, good)
        self.inner.restart()
        self.steps = 0
        self.record({"event": "rolled_back", "why": why, "round": self.state.tip.k})

    # -- the round

    def _should_begin(self) -> bool:
        now, run = self.exchange.now(), self.law.config.run
        if self._round is not None:
            return self._round.retry_at is not None and now >= self._round.retry_at and not self._stopping
        if self.steps == 0 or self._stopping:
            return False
        tip = self.state.tip
        newcomer = tip.k > 0 and self.exchange.peer_id not in tip.members
        if newcomer and run.clock == "time" and run.overlap != "off":
            return True  # how old the entry is that it caught up to, nobody has said: waiting could miss every round
        share = EARLY if newcomer else 1.0
        if run.clock == "steps" or not tip.period_ms:
            return self.steps >= share * run.inner_steps
        return now >= self._anchored_at + share * tip.period_ms / 1e3 or self.steps >= self.law.max_h

    def _begin(self) -> None:
        if self._round is None:
            theta = flat_weights(self.inner.model)
            x = self._pseudo_gradient(theta)
            if not torch.isfinite(x).all():
                return self._roll_back("the weights are not finite")
            pace_mhz = min(10**9, max(1, round(1000 / max(self.pace_s, 1e-6))))
            h = min(self.steps, self.law.max_h)
            limits = self._limits()
            payload = self.law.layout.encode(clip_to_limits(self.law.layout, x, limits, h))
            packet = Packet(payload, h, pace_mhz, self.digest, tuple(limits.tolist()))
            self._round = _Round(packet, theta, self._base(packet, theta), self.exchange.now())
            self.steps = 0
            self.record({"event": "begin", "round": self.state.tip.k + 1, "inner_steps": h})
            self._save_if_due()  # before others see it: one packet for a (peer, entry)
            if self._round.base is not theta:
                load_flat(self.inner.model, self.law.layout, self._round.base)
        self._round.retry_at = None
        self.exchange.begin(self._round.packet)

    def _base(self, packet: Packet, theta: Tensor) -> Tensor:
        """Where training goes on while the exchange runs: here, or where the outer step would lead if all said the same.

        "eager": the own part of an outer step is known at once (arXiv 2502.12996); what the others say corrects it later.
        """
        if self.law.config.run.overlap != "eager":
            return theta
        config, tip = self.law.config, self.state.tip
        eta, mu = eta_mu(config.outer, config.inner.optimizer, [packet.inner_steps] * max(1, len(tip.members)), tip.k)
        anchor, momentum = self.state.anchor.clone(), self.state.momentum.clone()
        outer_step(anchor, momentum, self.law.layout.decode(packet.payload), eta, mu)
        return anchor

    def _unsaid(self, theta: Tensor) -> Tensor:
        """What live weights hold beyond the anchor, what the packet that is out says included; in place of `theta`."""
        round_ = self._round
        if round_ is None or round_.base is round_.theta_begin:
            return theta.sub_(self.state.anchor)
        return theta.sub_(round_.base).add_(round_.theta_begin).sub_(self.state.anchor)

    def _limits(self) -> Tensor:
        return step_limits(self.law, self.state.anchor, largest_lr(self.law, self.state.tip.recent_tokens))

    def _pseudo_gradient(self, theta: Tensor) -> Tensor:
        """x = (anchor - theta) + beta e."""
        return (self.state.anchor - theta).add_(self.residual * self.law.config.codec.beta)

    def on_outcome(self, outcome: Outcome) -> None:
        match outcome:
            case Committed():
                # one that arrives after this peer has followed another chain is not for this tip
                if outcome.checked.start.start.head == self.state.tip.head:
                    self.commit(outcome.checked)
                    self._crashed = False
            case Failed():
                if self._round is not None:
                    self._round.retry_at = outcome.retry_at
                if not self._withdrawn:
                    self.record({"event": "failed", "round": self.state.tip.k + 1, "reason": outcome.reason})
            case Behind():
                if self._round is not None:
                    self._round.retry_at = self.exchange.now()
                self.catch_up(outcome)
            case Waypoint():
                self._on_disk(lambda: self.store.put_waypoint(outcome.pack()))

    def commit(self, checked: Checked, evaluate: bool = True) -> None:
        """Take the outer step of the entry after this tip, live or replayed: the same for both."""
        assert checked.start.start.head == self.state.tip.head, "an entry is applied to the state it was made for"
        self._check_agreement(checked)
        theta, run = flat_weights(self.inner.model), self.law.config.run
        mine, round_ = self._counted(checked), self._round
        is_mixed = False
        if mine is not None and round_ is not None and mine.digest == round_.packet.digest:
            self._update_residual(checked, round_)
            is_mixed = run.overlap == "mix"
            progress, steps = theta if is_mixed else theta.sub_(round_.base), self.steps
        elif mine is not None and self._crashed:  # a packet that it sent and no longer knows said all that it holds now
            self.residual.zero_()
            progress, steps = theta.sub_(theta if round_ is None else round_.base), self.steps if round_ else 0
        else:
            progress, steps = self._unsaid(theta), self.steps + (round_.packet.inner_steps if round_ else 0)
        apply_entry(self.law, self.state, checked)
        if is_mixed:
            progress = progress.sub_(self.state.anchor).mul_(run.mix)
        self._round, self.steps, self._anchored_at = None, min(steps, self.law.max_h), self.exchange.now()
        self._after_commit(checked, mine, progress, round_, evaluate)

    def _counted(self, checked: Checked) -> Hello | None:
        """This peer's word in the entry, if it is counted in any part."""
        return next((hello for hello in checked.counted if hello.peer == self.exchange.peer_id), None)

    def _update_residual(self, checked: Checked, round_: _Round) -> None:
        """e' = x - D(q) on counted parts and x on the others (design, 2: exactly once, by part)."""
        said = decoded_parts(self.law, round_.packet.payload, checked, self.exchange.peer_id)
        self.residual = self._pseudo_gradient(round_.theta_begin).sub_(said)

    def _after_commit(self, checked: Checked, mine: Hello | None, progress: Tensor, round_: _Round | None,
                      evaluate: bool) -> None:
        tip, anchor = self.state.tip, self.state.anchor
        self.digest = self.state.digest
        own_packet = round_.packet.payload if round_ is not None and mine and mine.digest == round_.packet.digest else b""
        self._on_disk(lambda: self.store.put_entry(tip.k, checked.entry, tip, own_packet))
        if tip.k % self.law.config.run.snapshot_every == 0 or self.ended:
            self._on_disk(lambda: self.store.pin(self.state))
        self.rounds += mine is not None
        if self.heldout is not None and evaluate:
            load_flat(self.inner.model, self.law.layout, anchor)
            self.last_heldout = heldout_loss(self.inner.model, self.heldout, self.inner.micro_batch)
        load_flat(self.inner.model, self.law.layout, progress.add_(anchor))
        self.record(self._round_record(checked, mine, round_))
        self.losses = []
        if evaluate:  # not in the middle of a replay
            self._save_if_due()

    def _on_disk(self, write: Callable[[], object]) -> None:
        """What is kept for others and for a next start: a full disk costs that, never training."""
        trouble = ""
        try:
            write()
        except OSError as error:
            trouble = str(error)
        if trouble and trouble != self._disk_trouble:
            self.record({"event": "not_written", "round": self.state.tip.k, "reason": trouble})
        self._disk_trouble = trouble

    def _round_record(self, checked: Checked, mine: Hello | None, round_: _Round | None) -> dict[str, Any]:
        tip, traffic = self.state.tip, self.exchange.traffic
        totals, now = (traffic.sent, traffic.received, traffic.cpu_s), self.exchange.now()
        sent, received, cpu_s = (total - before for total, before in zip(totals, self._traffic, strict=True))
        inner_share = self._inner_s / max(1e-9, now - self._recorded_at)
        self._traffic, self._recorded_at, self._inner_s = totals, now, 0.0
        packed = self.law.layout
        own = [s for s in checked.start.spans if s.reducer == self.exchange.peer_id]
        return {
            "event": "round", "round": tip.k, "digest": tip.head.hex(), "state": self.digest.hex(), "counted": mine is not None,
            "members": len(checked.counted), "inner_steps": mine.h if mine else 0,
            "total_steps": self.total_steps, "tokens": tip.tokens, "loss": _mean(self.losses),
            "heldout_loss": self.last_heldout if math.isfinite(self.last_heldout) else None,
            "tokens_per_s": self.law.config.tokens_per_step / self.pace_s if self.pace_s else None,
            "exchange_s": round(self.exchange.now() - round_.begun_at, 3) if round_ else None,
            "inner_share": round(inner_share, 4), "network_cpu_s": round(cpu_s, 3),
            "bytes_sent": sent, "bytes_received": received, "packet_bytes": packed.up_bytes,
            "span_bytes": sum(packed.up_offsets[s.stop] - packed.up_offsets[s.first] for s in own),
        }

    def _check_agreement(self, checked: Checked) -> None:
        """Members state what they stepped from; if most hold another anchor under this head, say so loudly."""
        states = [hello.state for hello in checked.start.hellos if hello.peer != self.exchange.peer_id]
        differing = sum(state != self.digest for state in states)
        if differing > len(states) / 2:
            log.error("entry %d: %d of %d peers hold other weights under the same head", checked.k, differing, len(states))
            self.record({"event": "silent_difference", "round": checked.k, "peers": differing})

    # -- catching up

    def catch_up(self, behind: Behind) -> None:
        """Replay entries from whoever is ahead, or load a state and replay from there; training then goes on."""
        came_from = self.state.tip.k
        for donor in behind.donors:
            if self._stopping:
                break
            try:
                self._follow(donor, behind)
            except (StateUnavailable, BadPacket) as error:
                if isinstance(error, BadPacket):  # what it showed was false, not only absent
                    self.exchange.distrust(donor)
                self.record({"event": "catch_up_failed", "round": behind.k, "reason": str(error)})
                continue
            self.record({"event": "caught_up", "from": came_from, "round": self.state.tip.k})
            if self.state.tip.k > came_from + MISSED_BEFORE_FORGOTTEN:
                self.residual.zero_()
            break
        else:
            if self._round is not None:
                self._round.retry_at = self.exchange.now() + CATCH_UP_PAUSE_S
        self.exchange.adopt(self.state.tip)

    def _follow(self, donor: bytes, behind: Behind) -> None:
        known = dict.fromkeys((donor, *behind.donors, *self.state.tip.members))
        donors = tuple(peer for peer in known if peer != self.exchange.peer_id)
        net = AskingUntil(self.exchange, lambda: self._stopping)
        way = find_way(self.law, self.state.tip, self.store, net, donors, behind.k, behind.head,
                       lambda theirs, donors: self._better_state(net, theirs, donors))
        if way.base is not None:
            self._rebase(way.base, way)
        for checked in way.entries:
            self.commit(checked, evaluate=checked is way.entries[-1])
        if way.waypoint is not None:
            self.exchange.adopt(self.state.tip)
            self.exchange.show_waypoint(way.waypoint)

    def _better_state(self, net: AskingUntil, theirs: Tip, donors: Sequence[bytes]) -> State:
        """The first donor's pinned state, if its chain may win over this one; raise BadPacket if it can't."""

        def progress(now: Progress) -> None:
            self.record({"event": "downloading", **dataclasses.asdict(now)})

        state = fetch_state(self.law, net, theirs, donors, self.store.partial, progress)
        own, run = self.state.tip, self.law.config.run
        tip = state.tip
        if tip.weight > tip.k * run.max_group * self.law.max_h or tip.tokens > tip.weight * self.law.config.tokens_per_step:
            raise BadPacket("a state claims more steps than its entries can hold")
        if 0 < tip.k <= own.k + len(tip.recent) and own.k and not set(tip.recent) & set(own.recent):
            raise BadPacket("a state of a chain that shares no entry with this one")
        return state

    def _rebase(self, base: State, way: Way) -> None:
        """Leave the own branch for `base`: what it held of this peer, and what nobody has yet, is the next to be said.

        Work and steps beyond 4H are scaled down. The entries that follow are then replayed as those of strangers.
        """
        round_, k, max_h = self._round, self.state.tip.k, self.law.max_h
        packets, out = self.store.own_packets(), 0
        if round_ is not None and way.is_own:
            packets[round_.packet.digest], out = round_.packet.payload, round_.packet.inner_steps
        progress = self._unsaid(flat_weights(self.inner.model)) if way.is_own else self._unsaid_progress()
        work, counted = carried_work(self.law, self.exchange.peer_id, way, packets)
        work -= progress
        steps = max(0, counted + self.steps + out)
        work *= min(1.0, max_h / steps) if steps else 1.0
        self.state, self._round, self.steps = base, None, min(steps, max_h)
        self.digest, self._anchored_at = base.digest, self.exchange.now()
        load_flat(self.inner.model, self.law.layout, base.anchor - work)
        if way.is_own:
            self._on_disk(lambda: self.store.cut(base.tip, base.tip.k))
        else:
            self._on_disk(lambda: self.store.restart_from(base))
        self.record({"event": "rebased", "from": k, "fork": base.tip.k, "carried_steps": self.steps})

    def _unsaid_progress(self) -> Tensor:
        """theta less what a packet said whose fate is unknown: an entry before another state may hold it.

        After a crash that may be all of it, by a packet that this life does not know.
        """
        came_from = self.state.anchor if self._round is None else self._round.base
        progress = flat_weights(self.inner.model).sub_(came_from)
        if self._crashed:
            self.steps = 0
            progress.zero_()
            self.residual.zero_()
        return progress

    def _stand_at(self, state: State) -> None:
        progress = self._unsaid_progress()
        self.state, self._round = state, None
        self.digest, self._anchored_at = state.digest, self.exchange.now()
        load_flat(self.inner.model, self.law.layout, progress.add_(state.anchor))

    # -- one life after another

    def resume(self, checkpoints: Checkpoints) -> bool:
        """Stand where this home stood when it was last saved, replay what its log holds since, and save there from now on.

        False if nothing was saved: then from the pinned state, if there is one. ConfigError if it is another peer's.
        """
        saved = checkpoints.load()
        if saved is not None:
            self.restore(saved)
        for checked in self.store.replayable(self.law, self.state.tip):
            self.commit(checked, evaluate=False)
        if max(self.store.pinned(), default=0) > self.state.tip.k and (pinned := self.store.resume(self.law)) is not None:
            self._stand_at(pinned[0])
            for checked in pinned[1]:
                self.commit(checked, evaluate=False)
        if not self.store.pinned():
            self._on_disk(lambda: self.store.pin(self.state))
        self.exchange.adopt(self.state.tip)
        self._checkpoints = checkpoints
        return saved is not None

    def checkpoint(self) -> Checkpoint:
        """All that the next step depends on. Its tensors are the live ones: save it before that step."""
        inner, round_ = self.inner, self._round
        return Checkpoint(
            tip=self.state.tip, anchor=self.state.anchor, momentum=self.state.momentum, residual=self.residual,
            theta=flat_weights(inner.model), optimizer=inner.optimizer.state_tensors(),
            pending=None if round_ is None else Pending(round_.packet, round_.theta_begin),
            numbers=Numbers(
                cursor=inner.cursor, steps=self.steps, total_steps=self.total_steps, rounds=self.rounds,
                fresh_steps=inner.fresh_steps, skipped_in_row=inner.skipped_in_row, pace_s=self.pace_s,
                last_heldout=self.last_heldout,
            ),
            last_word=self._stopping,
        )

    def restore(self, saved: Checkpoint) -> None:
        """Take over what `checkpoint` gave. The packet that was out goes out again, the same bytes, unless the log counts it."""
        inner, numbers, now = self.inner, saved.numbers, self.exchange.now()
        self.state, self.residual = State(saved.tip, saved.anchor, saved.momentum), saved.residual
        self.digest, self._anchored_at = self.state.digest, now
        load_flat(inner.model, self.law.layout, saved.theta)
        inner.optimizer.load_state_tensors(saved.optimizer)
        inner.cursor, inner.fresh_steps, inner.skipped_in_row = numbers.cursor, numbers.fresh_steps, numbers.skipped_in_row
        self.steps, self.total_steps, self.rounds = numbers.steps, numbers.total_steps, numbers.rounds
        self.pace_s, self.last_heldout = numbers.pace_s, numbers.last_heldout
        self._crashed = not saved.last_word
        self._round = None
        if saved.pending is not None:
            packet = dataclasses.replace(saved.pending.packet, limits=tuple(self._limits().tolist()))
            theta_begin = saved.pending.theta_begin
            self._round = _Round(packet, theta_begin, self._base(packet, theta_begin), now, retry_at=now)

    def save(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.save(self.checkpoint())

    def _save_if_due(self) -> None:
        if self._checkpoints is not None and not self._stopping and self._checkpoints.is_due():
            self.save()

    def weights(self) -> dict[str, Tensor]:
        """What all peers agree on, by name: the model to take out of the run."""
        return {name: self.state.anchor[place].view(shape) for name, shape, place in self.law.layout.tensor_slices()}


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
