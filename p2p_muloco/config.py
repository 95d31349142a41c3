"""The run's law (`RunConfig`), what is local to a peer (`PeerConfig`), and the join string.

A `RunConfig` is frozen and content-addressed: its canonical bytes hash to the name that stands in the join string,
so whoever serves the bytes can be believed. Nothing in it can be overridden by a volunteer. `PeerConfig` is never sent.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import math
import re
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from p2p_muloco.addresses import check_address
from p2p_muloco.errors import ConfigError

__all__ = [
    "CodecConfig",
    "DataConfig",
    "InnerConfig",
    "JoinString",
    "ModelConfig",
    "OuterConfig",
    "PeerConfig",
    "RunConfig",
    "RunSection",
]

MAX_CONFIG_BYTES = 16 * 1024
MAX_ADDRESSES = 32  # in a join string
FORMAT = 1  # of the canonical bytes: changed whenever the same fields would mean something else


def _f(default: Any, text: str, *, low: float | None = None, high: float | None = None,
       choices: tuple[str, ...] = (), pattern: str = "") -> Any:
    rule = {"text": text, "low": low, "high": high, "choices": choices, "pattern": pattern}
    return field(default=default, metadata=rule)


@dataclass(frozen=True, kw_only=True)
class RunSection:
    name: str = _f("my-run", "a name for people: a-z, 0-9 and -", pattern=r"[a-z0-9][a-z0-9-]{0,31}")
    seed: int = _f(0, "decides the first weights and who reads which text", low=0, high=2**31 - 1)
    inner_steps: int = _f(30, "H: inner steps of a typical peer between two outer steps", low=1, high=10_000)
    token_budget: int = _f(20_000_000, "the run ends when the chain has counted this many tokens", low=1, high=10**15)
    min_peers: int = _f(2, "peers that must be there before the first outer step", low=1, high=1024)
    max_group: int = _f(32, "peers in one all-reduce", low=1, high=64)
    clock: str = _f("time", "'time': rounds are due by the swarm's median speed, a slow peer makes fewer steps; "
                    "'steps': each member makes exactly H, a newcomer may bring fewer once", choices=("time", "steps"))
    window_s: float = _f(10.0, "seconds a leader waits for members that are alive but not ready", low=0.1, high=3600)
    overlap: str = _f("keep", "'keep': train on while the exchange runs and keep that progress; 'eager': the same, from a guess "
                      "of the outer step by the own packet; 'mix': go on from a mix of own weights and all's; 'off': wait",
                      choices=("keep", "eager", "mix", "off"))
    mix: float = _f(0.5, "share of the own weights in overlap = 'mix'", low=0.0, high=1.0)
    snapshot_every: int = _f(50, "entries between two states kept on disk for newcomers", low=1, high=100_000)
    owner: str = _f("", "the owner's public key in hex; filled in by `p2p-muloco bootstrap`", pattern=r"([0-9a-f]{64})?")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    d_model: int = _f(256, "width", low=16, high=16_384)
    n_layers: int = _f(6, "blocks", low=1, high=256)
    n_heads: int = _f(4, "attention heads; d_model / n_heads must be even", low=1, high=256)
    d_mlp: int = _f(704, "width of the SwiGLU layer, about 8/3 d_model", low=16, high=65_536)
    seq_len: int = _f(256, "tokens in a training window", low=8, high=131_072)

    @property
    def vocab_size(self) -> int:
        return 256  # bytes; byte 0 parts documents


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    corpus: str = _f("sotu", "'sotu' (built in: 249 State of the Union addresses) or the name of a local .txt file",
                     pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
    sha256: str = _f("", "of the text; filled in from the file", pattern=r"([0-9a-f]{64})?")
    heldout: float = _f(0.05, "share of the text, at its end, that nobody trains on", low=0.001, high=0.5)


@dataclass(frozen=True, kw_only=True)
class InnerConfig:
    optimizer: str = _f("muon", "of the matrices: 'muon' (MuLoCo) or 'adamw' (DiLoCo)", choices=("muon", "adamw"))
    lr: float = _f(0.02, "peak learning rate; its unit is set by `scale`", low=0.0, high=10.0)
    scale: str = _f("spectral", "'spectral': update = lr sqrt(fan_out/fan_in) U V^T (MuLoCo); "
                    "'rms': update RMS = 0.2 lr (Moonlight)", choices=("spectral", "rms"))
    coefficients: str = _f("muloco", "of the orthogonalisation", choices=("muloco", "polar"))
    momentum: float = _f(0.9, "of Muon", low=0.0, high=0.999)
    adamw_lr_scale: float = _f(1.0, "lr of embeddings, head and gains = lr times this", low=0.0, high=100.0)
    beta1: float = _f(0.9, "of AdamW", low=0.0, high=0.9999)
    beta2: float = _f(0.99, "of AdamW", low=0.0, high=0.99999)
    weight_decay: float = _f(0.0, "decoupled, on lr; the papers divide it by the number of peers", low=0.0, high=10.0)
    clip_norm: float = _f(1.0, "of the gradient; 0 = none", low=0.0, high=1e6)
    batch_size: int = _f(8, "sequences in one inner step, the same at every peer", low=1, high=65_536)
    warmup: float = _f(0.1, "share of the token budget", low=0.0, high=0.9)
    final_lr: float = _f(0.1, "share of the peak at the end of the cosine", low=0.0, high=1.0)


@dataclass(frozen=True, kw_only=True)
class OuterConfig:
    method: str = _f("nesterov", "'nesterov' (MuLoCo, DiLoCo), 'iso_c' or 'isoloco' (model merging)",
                     choices=("nesterov", "iso_c", "isoloco"))
    eta: float | str = _f("auto", "outer learning rate, or 'auto': from the effective number of peers", low=0.0, high=10.0)
    mu: float | str = _f("auto", "outer momentum, or 'auto' (with eta)", low=0.0, high=0.999)
    aggregate: str = _f("mean", "'mean': weighted by inner steps, who is far longer than most is shortened; 'trimmed': of 3 "
                        "peers or more, each element without its extremes, unweighted", choices=("mean", "trimmed"))
    iso_embeddings: str = _f("auto", "flatten the spectra of embedding and head too; 'auto': only if vocabulary >= 4 d_model",
                             choices=("auto", "always", "never"))


CODECS = ("fp32", "fp16", "absmax8", "absmax4", "absmax2", "statistical4", "statistical2", "topk")


@dataclass(frozen=True, kw_only=True)
class CodecConfig:
    up: str = _f("statistical4", "what peers send: " + ", ".join(CODECS), choices=CODECS)
    down: str = _f("absmax4", "what reducers send back; at least 4 bits", choices=CODECS)
    beta: float = _f(0.9, "error feedback: share of the residual that is sent next time; 0 = none", low=0.0, high=1.0)
    topk_fraction: float = _f(0.02, "entries kept by 'topk'", low=0.001, high=0.25)
    part_elements: int = _f(65_536, "largest part: the unit of checking, counting and pipelining", low=1024, high=2**24)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The law of one run. Build it with `from_toml`, `from_bytes` or keywords; all three check every rule."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    inner: InnerConfig = field(default_factory=InnerConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    codec: CodecConfig = field(default_factory=CodecConfig)

    def __post_init__(self) -> None:
        for section in dataclasses.fields(self):
            _check_section(section.name, getattr(self, section.name))
        _check_pairs(self)

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> RunConfig:
        sections = _hints(cls)
        for name in tree:
            if name not in sections:
                raise ConfigError(f"[{name}] is not a section of a run; known: {_nearest(name, sections)}")
        return cls(**{name: _section(name, kind, tree.get(name, {})) for name, kind in sections.items()})

    @classmethod
    def from_toml(cls, text: str) -> RunConfig:
        try:
            tree = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # also of numbers of 5,000 digits, and of 1,000 brackets
            raise ConfigError(f"the run file is not TOML: {error}; `p2p-muloco init` writes a valid one") from None
        return cls.from_dict(tree)

    @classmethod
    def from_bytes(cls, raw: bytes) -> RunConfig:
        if len(raw) > MAX_CONFIG_BYTES:
            raise ConfigError(f"a run config has {len(raw)} bytes; at most {MAX_CONFIG_BYTES} are read")
        try:
            version, tree = msgpack.unpackb(raw, strict_map_key=True, max_array_len=2)  # claimed lengths are allocated
        except Exception:
            raise ConfigError("the run config is not msgpack of (format, sections)") from None
        if version != FORMAT or not isinstance(tree, dict):
            raise ConfigError(f"the run config has format {version!r}; this version reads {FORMAT}: update p2p-muloco")
        config = cls.from_dict(tree)
        if config.to_bytes() != raw:
            raise ConfigError("the run config's bytes are not canonical; ask the owner to publish the run again")
        return config

    def to_bytes(self) -> bytes:
        """Canonical: sections and fields in the order of their names, no field left out."""
        tree = {name: dict(sorted(values.items())) for name, values in sorted(dataclasses.asdict(self).items())}
        return msgpack.packb((FORMAT, tree))

    @property
    def hash(self) -> bytes:
        return hashlib.sha256(self.to_bytes()).digest()

    @property
    def run_id(self) -> str:
        return f"{self.run.name}-{self.hash.hex()[:12]}"

    @property
    def tokens_per_step(self) -> int:
        return self.inner.batch_size * self.model.seq_len

    @property
    def flattens_embeddings(self) -> bool:
        mode = self.outer.iso_embeddings
        return mode == "always" or (mode == "auto" and self.model.vocab_size >= 4 * self.model.d_model)

    def warnings(self) -> list[str]:
        """Choices that are allowed but that the papers advise against."""
        found = []
        if self.codec.up == "topk" and self.outer.mu != 0:
            found.append("codec.up = 'topk' with outer.mu > 0: feedback takes the place of outer momentum in SparseLoCo; "
                         "set outer.mu = 0.0, outer.eta = 1.0, codec.beta = 0.95")
        if self.codec.up in ("absmax2", "statistical2") and self.codec.beta == 0:
            found.append(f"codec.up = {self.codec.up!r} without error feedback loses visibly; set codec.beta = 0.9")
        return found

    def to_toml(self) -> str:
        """A run file with each field's meaning and range beside it; reading it gives this config back."""
        lines = []
        for section in dataclasses.fields(self):
            lines.append(f"\n[{section.name}]")
            value = getattr(self, section.name)
            for item in dataclasses.fields(value):
                shown = getattr(value, item.name)
                literal = f'"{shown}"' if isinstance(shown, str) else repr(shown)
                lines.append(f"{item.name} = {literal}".ljust(28) + f"  # {_rule_text(item)}")
        return "\n".join(lines).lstrip() + "\n"


def _hints(kind: type) -> dict[str, Any]:
    return {f.name: h for f, h in zip(dataclasses.fields(kind), typing.get_type_hints(kind).values(), strict=True)}


def _nearest(name: str, known: typing.Iterable[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    return f"{', '.join(known)}" + (f" (did you mean {close[0]}?)" if close else "")


def _section(name: str, kind: type, values: Any) -> Any:
    if not isinstance(values, dict):
        raise ConfigError(f"{name} = {values!r}: must be a section, [{name}]")
    hints = _hints(kind)
    for key in values:
        if key not in hints:
            raise ConfigError(f"{name}.{key}: unknown field; known: {_nearest(key, hints)}")
    return kind(**{key: _typed(f"{name}.{key}", hints[key], value) for key, value in values.items()})


def _typed(name: str, hint: Any, value: Any) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(value) is int and value.bit_length() > 64:  # Python can't compare it with a float, or print it
        raise ConfigError(f"{name}: an integer of {value.bit_length()} bits; must have at most 64")
    if float in kinds and type(value) is int and abs(value) < 2**53:
        return float(value)
    if type(value) not in kinds:
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigError(f"{name} = {value!r}: must be {wanted}, not {type(value).__name__}; write it without quotes"
                          if isinstance(value, str) else f"{name} = {value!r}: must be {wanted}")
    return value


def _rule_text(item: dataclasses.Field[Any]) -> str:
    rule = item.metadata
    if rule["low"] is not None:
        return f"{rule['text']} [{rule['low']:g} .. {rule['high']:g}]"
    return str(rule["text"])


def _check_section(name: str, section: Any) -> None:
    for item in dataclasses.fields(section):
        value, rule, label = getattr(section, item.name), item.metadata, f"{name}.{item.name}"
        _typed(label, _hints(type(section))[item.name], value)
        if isinstance(value, str):
            if rule["low"] is not None and value != "auto":
                raise ConfigError(f"{label} = {value!r}: must be a number or 'auto'")
            if rule["choices"] and value not in rule["choices"]:
                raise ConfigError(f"{label} = {value!r}: must be one of {', '.join(rule['choices'])}")
            if rule["pattern"] and not re.fullmatch(rule["pattern"], value):
                raise ConfigError(f"{label} = {value!r}: must match {rule['pattern']} ({rule['text']})")
        elif not (math.isfinite(value) and rule["low"] <= value <= rule["high"]):
            raise ConfigError(f"{label} = {value!r}: must be between {rule['low']:g} and {rule['high']:g} ({rule['text']})")


def _check_pairs(c: RunConfig) -> None:
    model, outer, codec, run = c.model, c.outer, c.codec, c.run
    if model.d_model % (2 * model.n_heads):
        raise ConfigError(f"model.n_heads = {model.n_heads}: model.d_model = {model.d_model} must be a multiple of "
                          f"2 x n_heads; take n_heads = {max(1, model.d_model // 64)} or another width")
    if (outer.eta == "auto") != (outer.mu == "auto"):
        raise ConfigError(f"outer.eta = {outer.eta!r}, outer.mu = {outer.mu!r}: 'auto' sets both; "
                          "give both numbers or neither")
    if outer.eta == "auto" and outer.method != "nesterov":
        raise ConfigError(f"outer.eta = 'auto' with outer.method = {outer.method!r}: no study has tabled it yet; "
                          "give numbers (published at 8 peers: iso_c eta 2.1, mu 0; isoloco eta 1.8, mu 0.8)")
    if outer.method == "iso_c" and outer.mu != 0:
        raise ConfigError(f"outer.mu = {outer.mu!r} with outer.method = 'iso_c': Iso-C has no momentum; "
                          "set outer.mu = 0.0 or outer.method = 'isoloco'")
    if codec.down in ("absmax2", "statistical2", "topk"):
        raise ConfigError(f"codec.down = {codec.down!r}: the reducer's encoding has no error feedback and needs at "
                          "least 4 bits; take absmax4, statistical4, absmax8, fp16 or fp32")
    if outer.aggregate == "trimmed" and codec.up == "topk":
        raise ConfigError("outer.aggregate = 'trimmed' with codec.up = 'topk': trimming would drop nearly all that is sent; "
                          "take a dense codec or aggregate = 'mean'")
    if run.overlap == "mix" and run.mix > 0.5 and codec.beta:
        raise ConfigError(f"run.mix = {run.mix!r} with codec.beta = {codec.beta!r}: a mix says again what was said, and error "
                          "feedback adds to that; set mix to at most 0.5, or codec.beta = 0.0")
    if run.overlap == "eager" and outer.method != "nesterov":
        raise ConfigError(f"run.overlap = 'eager' with outer.method = {outer.method!r}: one packet's spectrum is no guess of the "
                          "mean's; take overlap = 'keep', or outer.method = 'nesterov'")
    if run.min_peers > run.max_group:
        raise ConfigError(f"run.min_peers = {run.min_peers} is more than run.max_group = {run.max_group}: "
                          "the first outer step could never happen; lower min_peers or raise max_group")


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """What one volunteer decides. Never sent, never hashed."""

    home: Path
    name: str = "peer"
    device: str = "auto"  # auto, cpu, cuda or mps
    micro_batch: int | None = None  # sequences at once; None = the whole inner step, halved until it fits
    threads: int | None = None  # of torch on the CPU; None = torch's choice
    data_path: Path | None = None  # the local .txt of a run that names one
    compile: bool = False
    max_rounds: int | None = None
    owner_key: Path | None = None  # of the run's owner: this peer signs waypoints with it


@dataclass(frozen=True, kw_only=True)
class JoinString:
    """What a volunteer is given: where to meet, which run, whose run. `str()` and `parse` are inverse."""

    addresses: tuple[str, ...]
    run_id: str
    config_hash: bytes
    owner: str = ""  # hex of the owner's Ed25519 key, or empty

    PREFIX: typing.ClassVar[str] = "muloco1"

    def __str__(self) -> str:
        body: bytes = msgpack.packb((self.run_id, self.config_hash, bytes.fromhex(self.owner), list(self.addresses)))
        return self.PREFIX + base64.urlsafe_b64encode(_checksum(body) + body).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> JoinString:
        """Raise ConfigError that says which part is wrong."""
        text = text.strip()
        again = "copy it again from where the bootstrap node printed it"
        if not text.startswith(cls.PREFIX):
            raise ConfigError(f"join string {text[:16]!r}...: must begin with {cls.PREFIX!r}; {again}")
        coded = text[len(cls.PREFIX) :]
        wrong = re.search(r"[^A-Za-z0-9_-]", coded)
        if wrong:
            raise ConfigError(f"join string: character {wrong.group()!r} at position {wrong.start() + len(cls.PREFIX) + 1} "
                              f"can't stand in one; {again}")
        try:
            raw = base64.urlsafe_b64decode(coded + "=" * (-len(coded) % 4))
        except binascii.Error:
            raise ConfigError(f"join string: its {len(text)} characters are not a whole one (cut off?); {again}") from None
        spelled = base64.urlsafe_b64encode(raw).decode().rstrip("=") == coded  # the last character has spare bits
        if len(raw) < 5 or _checksum(raw[4:]) != raw[:4] or not spelled:
            raise ConfigError(f"join string: its checksum is wrong, so a character was changed or lost; {again}")
        return cls._from_body(raw[4:])

    @classmethod
    def _from_body(cls, body: bytes) -> JoinString:
        try:
            run_id, config_hash, owner, addresses = msgpack.unpackb(body, max_array_len=2 * MAX_ADDRESSES)
        except Exception:
            raise ConfigError("join string: it holds other fields than this version reads; update p2p-muloco") from None
        if not (isinstance(run_id, str) and re.fullmatch(r"[a-z0-9][a-z0-9-]{0,31}-[0-9a-f]{12}", run_id)):
            raise ConfigError(f"join string: run id {run_id!r} must be NAME-HASH12")
        if not (isinstance(config_hash, bytes) and len(config_hash) == 32):
            raise ConfigError("join string: the config hash must have 32 bytes")
        if config_hash.hex()[:12] != run_id[-12:]:
            raise ConfigError(f"join string: run id {run_id!r} does not belong to config hash {config_hash.hex()[:12]}")
        if not (isinstance(owner, bytes) and len(owner) in (0, 32)):
            raise ConfigError("join string: the owner's key must have 32 bytes or none")
        if not (isinstance(addresses, list) and 1 <= len(addresses) <= MAX_ADDRESSES):
            raise ConfigError(f"join string: it must hold 1 to {MAX_ADDRESSES} addresses")
        for address in addresses:
            check_address(address)
        return cls(addresses=tuple(addresses), run_id=run_id, config_hash=config_hash, owner=owner.hex())


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:4]
