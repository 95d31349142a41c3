"""One volunteer from the join string to the saved model: builds the parts and wires them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from p2p_muloco import __version__
from p2p_muloco.chain import Law
from p2p_muloco.checkpoint import Checkpoints
from p2p_muloco.config import JoinString, PeerConfig, RunConfig
from p2p_muloco.data import Stream, heldout_windows, load_corpus
from p2p_muloco.errors import ConfigError, NetworkError, StateUnavailable
from p2p_muloco.exchange import Behind
from p2p_muloco.hive import HivemindExchange, NetworkOptions
from p2p_muloco.home import StepCount
from p2p_muloco.identity import Identity, parse_peer_id, peer_name
from p2p_muloco.inner import InnerLoop, genesis_state
from p2p_muloco.member import Member
from p2p_muloco.metrics import JsonLines
from p2p_muloco.model import GPT
from p2p_muloco.opinion import WHY
from p2p_muloco.reports import Report
from p2p_muloco.requests import WantRun
from p2p_muloco.snapshot import Store, write_atomically
from p2p_muloco.trainer import Trainer
from p2p_muloco.waypoint import due_waypoint

__all__ = ["Contribution", "Peer", "PeerNetwork", "choose_device"]

HELDOUT_WINDOWS = 16  # evaluated after each entry
SEARCH_S = 3.0  # for reports of others when this peer is new; whom it misses it meets at the next exchange
MET_KEPT = 16
TRAINING_NICE = 10  # the machine's owner, the network process and peers that are starting come first
LINGER_S = 15.0  # at the end, for members that still need the last entry

Say = Callable[[str], None]


@dataclass(frozen=True)
class PeerNetwork:
    """How a volunteer enters the network."""

    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    initial_peers: tuple[str, ...] = ()
    upload_mbit: float = 20.0
    clock: Callable[[], float] = time.time  # unix seconds, compared with other peers'
    member: Callable[..., Any] = Member  # builds this peer's side of the protocol


def choose_device(name: str) -> torch.device:
    """The device called 'cpu', 'cuda' or 'mps', or the best there is for 'auto'; ConfigError if it isn't there."""
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device(next(kind for kind in ("cuda", "mps", "cpu") if there[kind]))
    if not there.get(name):
        present = ", ".join(kind for kind, is_there in there.items() if is_there)
        raise ConfigError(f"--device {name}: PyTorch finds none here; present: {present}; 'auto' takes the best")
    return torch.device(name)


def _owner(key: Path | None, config: RunConfig) -> Identity | None:
    if key is None:
        return None
    if not key.exists():
        raise ConfigError(f"--owner-key {key}: there is no such file; `p2p-muloco bootstrap` wrote it as owner.key in its --home")
    owner = Identity.load_or_create(key)
    if owner.public_key.hex() != config.run.owner:
        raise ConfigError(f"--owner-key {key}: it is not the key of run {config.run_id}; leave the option out")
    return owner


@dataclass(frozen=True)
class Contribution:
    """What a peer gave to the run since it was started."""

    inner_steps: int
    tokens: int
    rounds_counted: int
    bytes_sent: int
    bytes_received: int


class Peer:
    """Everything one volunteer consists of. Build it with `join`, then `run`, `close`; `leave` from any thread."""

    def __init__(self, join: JoinString, peer: PeerConfig, network: PeerNetwork, say: Say) -> None:
        self.config, self._network, self._say = peer, network, say
        self.leaving = False
        self.device = choose_device(peer.device)  # before anything is started that would have to be stopped
        self.exchange = self._enter(join)
        try:
            self.law = Law.of(self._run_config(join))
            self._build()
        except BaseException:
            self.exchange.close()
            raise

    def _enter(self, join: JoinString) -> HivemindExchange:
        met = self.config.home / "known_peers.json"
        known = tuple(json.loads(met.read_text())) if met.exists() else ()
        addresses = tuple(dict.fromkeys((*self._network.initial_peers, *join.addresses)))
        self._say(f"entering the network of run {join.run_id} through {len(addresses)} known address(es)")
        identity_path = self.config.home / "identity.key"
        options = NetworkOptions(
            identity_path=identity_path, run_id=join.run_id, listen=self._network.listen,
            initial_peers=addresses, fallback_peers=known, announce=self._network.announce, returning=identity_path.exists(),
            clock=self._network.clock, member=self._network.member,
        )
        Identity.load_or_create(identity_path)
        self._donors = [parse_peer_id(address.rpartition("/")[2]) for address in (*addresses, *known)]
        exchange = HivemindExchange.start(options)
        if exchange.warning:
            self._say(f"WARNING: {exchange.warning}")
        if exchange.is_client:
            self._say("others can't dial this machine, so it takes part as a client: it trains, sends and receives as all do, "
                      "and averages nothing for others. To help with that, forward a TCP port here and give it to --listen")
        return exchange

    def _run_config(self, join: JoinString) -> RunConfig:
        """The run's law, from this folder or from whoever serves the bytes that hash to what the join string says."""
        cached = self.config.home / "run.msgpack"
        if cached.exists():
            config = RunConfig.from_bytes(cached.read_bytes())
            if config.hash != join.config_hash:
                raise ConfigError(f"--home {self.config.home} holds run {config.run_id}, the join string names {join.run_id}; "
                                  "give each run its own --home")
            return config
        for donor in self._donors:
            with contextlib.suppress(StateUnavailable):
                packed = self.exchange.fetch(donor, WantRun(join.config_hash), 64 * 1024)
                if hashlib.sha256(packed).digest() == join.config_hash:
                    write_atomically(cached, lambda path, packed=packed: path.write_bytes(packed))  # type: ignore[misc]
                    return RunConfig.from_bytes(packed)
        raise NetworkError(f"no peer at the known addresses serves run {join.run_id}; is the join string of another run, or "
                           "has this one ended? ask its owner for a new one")

    def _build(self) -> None:
        law, peer, config = self.law, self.config, self.law.config
        self._owner = _owner(peer.owner_key, config)
        if peer.threads:
            torch.set_num_threads(peer.threads)
        corpus = load_corpus(config.data, peer.data_path)
        store = Store(peer.home, law.layout, config.to_bytes())
        model = GPT(config.model).to(self.device)
        stream_id = Identity.load_or_create(peer.home / "identity.key").stream
        stream = Stream(corpus.train, config.run.seed, stream_id, config.model.seq_len, config.inner.batch_size)
        inner = InnerLoop(law, model, stream, micro_batch=peer.micro_batch, compiled=peer.compile)
        self.metrics = JsonLines(peer.home / "metrics.jsonl")
        self.on_record: Callable[[dict[str, Any]], None] = lambda record: None
        trainer = Trainer(law, genesis_state(law), inner, self.exchange, store,
                          heldout=heldout_windows(corpus, config.model.seq_len, HELDOUT_WINDOWS))
        resumed = trainer.resume(Checkpoints(peer.home / "checkpoints", law.config_hash, self.exchange.peer_id, self._say))
        self.executed = StepCount(peer.home / "executed", at_least=trainer.total_steps)
        if not resumed:  # no text is read twice
            inner.cursor = trainer.total_steps = self.executed.n
        trainer.max_rounds = None if peer.max_rounds is None else trainer.rounds + peer.max_rounds
        trainer.on_step, trainer.record = self.executed.add, self._record
        self._named: set[tuple[bytes, int]] = set()  # who was named to the user, and for what
        self.trainer, self._began_with = trainer, (trainer.total_steps, trainer.rounds)

    def _record(self, record: dict[str, Any]) -> None:
        if record["event"] == "round":
            self._remember_met()
            self.publish()
            if self._owner is not None and (waypoint := due_waypoint(self._owner, self.trainer.state.tip)) is not None:
                self.exchange.show_waypoint(waypoint)
        self._tell(record)
        reports, known = self.exchange.reports, self._named
        self._named = {(peer, why) for peer, why, _ in self.exchange.named}
        for peer, why, k in self.exchange.named:
            if (peer, why) not in known:
                name = reports[peer].name if peer in reports else ""
                self._tell({"event": "named", "peer_id": peer_name(peer), "name": name, "why": WHY[why], "round": k})

    def _tell(self, record: dict[str, Any]) -> None:
        self.metrics(record)
        self.on_record(record)

    def publish(self) -> None:
        """Tell the DHT, for people and for who looks for the run."""
        trainer, tip = self.trainer, self.trainer.state.tip
        rate = self.law.config.tokens_per_step / trainer.pace_s if trainer.pace_s else 0.0
        loss = trainer.last_heldout if trainer.last_heldout == trainer.last_heldout else 0.0
        self.exchange.report(Report(
            run_id=self.law.config.run_id, peer=self.exchange.peer_id, name=self.config.name[:32], k=tip.k, head=tip.head,
            inner_steps=trainer.total_steps, tokens_total=trainer.total_steps * self.law.config.tokens_per_step,
            tokens_per_s=float(rate), loss=min(float(loss), 1e6), client=0, device=str(self.device), version=__version__,
            at_s=int(time.time()), named=(), named_why=(), named_round=(),  # the network fills those in
        ))

    def catch_up(self) -> None:
        """Take part in the protocol, and stand where the swarm stands before the first step."""
        trainer = self.trainer
        self.exchange.open(self.law, trainer.state.tip, self.config.home, round(self._network.upload_mbit * 1000))
        self.publish()
        until = time.monotonic() + SEARCH_S
        while time.monotonic() < until and not self.leaving:
            outcome = self.exchange.wait(0.25)
            if outcome is not None:
                trainer.on_outcome(outcome)
            ahead = [r for r in self.exchange.reports.values() if r.k > trainer.state.tip.k and r.peer != self.exchange.peer_id]
            if ahead:
                best = max(ahead, key=lambda report: report.k)
                donors = tuple(report.peer for report in ahead if report.head == best.head)
                self._say(f"the run is at round {best.k}: taking its state from {best.name}")
                trainer.catch_up(Behind(best.k, best.head, donors))
            elif self.exchange.reports.keys() - {self.exchange.peer_id}:
                break
        self.publish()

    def run(self, on_turn: Callable[[], None]) -> Path | None:
        """Train until the run or this peer ends, then save the model, whose path is returned (None without room for it)."""
        try:
            self.catch_up()
            with contextlib.suppress(OSError):
                os.nice(TRAINING_NICE)
            self.trainer.run(on_turn)
            return self.finish()
        except NetworkError:
            self.trainer.stop()
            self.trainer.save()
            if not self.leaving:  # a service manager stops all processes of a peer at once, its network too
                raise
            return self._save_model()

    def leave(self) -> None:
        """Let `run` end as soon as the exchange that is running has met its fate."""
        self.leaving = True
        self.trainer.stop()

    def contribution(self) -> Contribution:
        trainer, (steps, rounds) = self.trainer, self._began_with
        taken = trainer.total_steps - steps
        return Contribution(taken, taken * self.law.config.tokens_per_step, trainer.rounds - rounds,
                            self.exchange.traffic.sent, self.exchange.traffic.received)

    def finish(self) -> Path | None:
        """Save the model; at the end of the run, stay a moment for members that still need the last entry."""
        trainer, path = self.trainer, self._save_model()
        self.publish()
        until = time.monotonic() + LINGER_S
        while trainer.ended and not self.leaving and time.monotonic() < until and self._somebody_needs_me():
            self.exchange.wait(0.25)
        return path

    def _save_model(self) -> Path | None:
        trainer, path = self.trainer, self.config.home / "model.safetensors"
        try:
            write_atomically(path, lambda temporary: save_file(trainer.weights(), temporary))
        except OSError as error:
            self._say(f"the model could not be saved: {error}; make room and start this peer again")
            return None
        return path

    def _remember_met(self) -> None:
        """Addresses for a next start at which the join string's no longer answer."""
        if self.exchange.met:
            text = json.dumps(self.exchange.met[:MET_KEPT])
            with contextlib.suppress(OSError):  # the last ones stay
                write_atomically(self.config.home / "known_peers.json", lambda path: path.write_text(text))

    def _somebody_needs_me(self) -> bool:
        tip, reports = self.trainer.state.tip, self.exchange.reports
        others = [reports[peer] for peer in tip.members if peer in reports and peer != self.exchange.peer_id]
        return any(report.k < tip.k for report in others)

    def close(self) -> None:
        self.exchange.close()
        self.metrics.close()
        self.executed.close()
