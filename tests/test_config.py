"""The law's round trips and rules, one clear line each; the join string and each way to damage it."""

from __future__ import annotations

import dataclasses
import re

import msgpack
import pytest
from kit import identity

from p2p_muloco.config import (
    CODECS,
    CodecConfig,
    DataConfig,
    InnerConfig,
    JoinString,
    ModelConfig,
    OuterConfig,
    RunConfig,
    RunSection,
    check_address,
)
from p2p_muloco.errors import ConfigError
from p2p_muloco.identity import peer_name

OTHER = RunConfig(
    run=RunSection(name="run-2", seed=7, inner_steps=5, clock="steps", window_s=0.5, overlap="off", owner="ab" * 32),
    model=ModelConfig(d_model=64, n_heads=2, d_mlp=128, seq_len=32),
    data=DataConfig(corpus="my.text-1.txt", sha256="0f" * 32),
    inner=InnerConfig(optimizer="adamw", lr=1e-3, scale="rms"),
    outer=OuterConfig(method="isoloco", eta=1.8, mu=0.8, iso_embeddings="always"),
    codec=CodecConfig(up="topk", down="fp16", beta=0.0, topk_fraction=0.05),
)


@pytest.mark.parametrize("config", [RunConfig(), OTHER], ids=["defaults", "other"])
def test_round_trips(config: RunConfig) -> None:
    assert RunConfig.from_toml(config.to_toml()) == config
    assert RunConfig.from_bytes(config.to_bytes()) == config
    assert RunConfig.from_dict(dataclasses.asdict(config)) == config
    assert RunConfig.from_toml(config.to_toml()).hash == config.hash


def test_an_empty_file_is_the_defaults() -> None:
    assert RunConfig.from_toml("") == RunConfig()


def test_the_hash_does_not_depend_on_the_order_or_on_how_numbers_are_written() -> None:
    one = RunConfig.from_toml('[run]\nseed = 3\nname = "a"\nwindow_s = 7\n[inner]\nlr = 1\nbeta1 = 0.5\n')
    two = RunConfig.from_toml('[inner]\nbeta1 = 5e-1\nlr = 1.0\n[run]\nname = "a"\nwindow_s = 7.0\nseed = 3\n')
    assert one == two and one.hash == two.hash and one.to_bytes() == two.to_bytes()


def test_every_field_changes_the_hash() -> None:
    hashes = {RunConfig().hash, OTHER.hash}
    for section in dataclasses.fields(RunConfig):
        for item in dataclasses.fields(getattr(OTHER, section.name)):
            changed = {item.name: getattr(getattr(OTHER, section.name), item.name)}
            if changed[item.name] == getattr(getattr(RunConfig(), section.name), item.name):
                continue
            try:
                part = dataclasses.replace(getattr(RunConfig(), section.name), **changed)
                hashes.add(RunConfig(**{section.name: part}).hash)
            except ConfigError:  # contradicts another default
                continue
    assert len(hashes) > 20


def test_every_field_and_rule_stands_in_the_run_file() -> None:
    shown = RunConfig().to_toml()
    for section in dataclasses.fields(RunConfig):
        assert f"[{section.name}]" in shown
        for item in dataclasses.fields(getattr(RunConfig(), section.name)):
            (line,) = [line for line in shown.splitlines() if re.match(rf"{item.name} = ", line)
                       and item.metadata["text"] in line]
            assert "#" in line


def refusal(toml: str) -> str:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_toml(toml)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "toml,words",
    [
        ("[run]\ninner_step = 3", ["run.inner_step", "unknown field", "did you mean inner_steps?"]),
        ("[codec]\ntopk_fractions = 0.1", ["codec.topk_fractions", "did you mean topk_fraction?"]),
        ("[iner]\nlr = 1", ["[iner]", "did you mean inner?"]),
        ("run = 3", ["run = 3", "[run]"]),
        ('[inner]\nlr = "0.1"', ["inner.lr = '0.1'", "must be float", "without quotes"]),
        ("[run]\nseed = 1.5", ["run.seed = 1.5", "must be int"]),
        ("[run]\nseed = true", ["run.seed = True", "must be int"]),
        ("[run]\nname = 3", ["run.name = 3", "must be str"]),
        ("[run]\ninner_steps = 0", ["run.inner_steps = 0", "between 1 and 10000"]),
        ("[inner]\nlr = nan", ["inner.lr = nan", "between 0 and 10"]),
        ("[inner]\nlr = inf", ["inner.lr = inf"]),
        ("[inner]\nclip_norm = -1", ["inner.clip_norm = -1.0"]),
        ('[run]\nclock = "dawn"', ["run.clock = 'dawn'", "one of time, steps"]),
        ('[run]\nname = "My Run"', ["run.name = 'My Run'", "must match"]),
        ('[run]\nname = "a\\n"', ["run.name"]),
        ('[data]\ncorpus = "../secret.txt"', ["data.corpus = '../secret.txt'"]),
        ('[data]\nsha256 = "AB"', ["data.sha256 = 'AB'"]),
        ('[outer]\neta = "often"\nmu = "auto"', ["outer.eta = 'often'", "a number or 'auto'"]),
        ("[run", ["not TOML", "p2p-muloco init"]),
        # pairs that contradict each other
        ("[model]\nd_model = 100\nn_heads = 3", ["model.n_heads = 3", "model.d_model = 100", "multiple"]),
        ("[outer]\neta = 0.7", ["outer.eta = 0.7", "outer.mu = 'auto'", "both"]),
        ('[run]\noverlap = "mix"\nmix = 0.6', ["run.mix = 0.6", "codec.beta = 0.9", "at most 0.5"]),
        ('[run]\noverlap = "eager"\n[outer]\nmethod = "isoloco"\neta = 1.0\nmu = 0.5', ["run.overlap = 'eager'", "'keep'"]),
        ('[outer]\nmethod = "iso_c"', ["outer.eta = 'auto'", "iso_c", "give numbers"]),
        ('[outer]\nmethod = "iso_c"\neta = 2.1\nmu = 0.5', ["outer.mu = 0.5", "iso_c", "isoloco"]),
        ('[codec]\ndown = "topk"', ["codec.down = 'topk'", "4 bits"]),
        ('[codec]\ndown = "absmax2"', ["codec.down = 'absmax2'", "4 bits"]),
        ('[codec]\ndown = "statistical2"', ["codec.down = 'statistical2'", "4 bits"]),
        ("[run]\nmin_peers = 40", ["run.min_peers = 40", "run.max_group = 32", "never"]),
    ],
)
def test_what_breaks_a_rule_is_named_in_one_line(toml: str, words: list[str]) -> None:
    message = refusal(toml)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_is_allowed_upwards(name: str) -> None:
    RunConfig(codec=CodecConfig(up=name))


def test_rules_hold_for_keywords_too_and_on_their_bounds() -> None:
    with pytest.raises(ConfigError, match=r"run\.seed"):
        RunConfig(run=RunSection(seed=2**31))
    with pytest.raises(ConfigError, match=r"run\.seed"):
        RunConfig(run=RunSection(seed="1"))  # type: ignore[arg-type]
    assert RunConfig(run=RunSection(seed=2**31 - 1, inner_steps=10_000, min_peers=1, max_group=1)).run.max_group == 1


def test_bytes_that_are_not_a_config() -> None:
    good = msgpack.unpackb(RunConfig().to_bytes())
    for raw, words in (
        (b"", "not msgpack"),
        (bytes(20_000), "at most 16384"),
        (msgpack.packb([2, good[1]]), "update p2p-muloco"),
        (msgpack.packb([1, 5]), "format"),
        (msgpack.packb([1, {**good[1], "more": {}}]), "not a section"),
        (msgpack.packb([1, {"run": {}}]), "not canonical"),
        (msgpack.packb([1, dict(reversed(good[1].items()))]), "not canonical"),
    ):
        with pytest.raises(ConfigError, match=words):
            RunConfig.from_bytes(raw)


def test_run_id_and_warnings() -> None:
    assert RunConfig().run_id == f"my-run-{RunConfig().hash.hex()[:12]}"
    assert not RunConfig().warnings()
    (topk,) = RunConfig(codec=CodecConfig(up="topk")).warnings()
    (bits,) = RunConfig(codec=CodecConfig(up="absmax2", beta=0.0)).warnings()
    assert "outer.mu = 0.0" in topk and "codec.beta = 0.9" in bits


# -- the join string

PEER = peer_name(identity(3).peer_id)
ADDRESSES = (f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}", f"/ip6/2001:db8::1/tcp/1/p2p/{PEER}",
             f"/dns4/boot.example.org/tcp/65535/p2p/{PEER}")
JOIN = JoinString(addresses=ADDRESSES, run_id=RunConfig().run_id, config_hash=RunConfig().hash, owner="cd" * 32)


def test_join_string_round_trip() -> None:
    assert JoinString.parse(str(JOIN)) == JOIN
    assert JoinString.parse(f"  {JOIN}\n") == JOIN
    plain = dataclasses.replace(JOIN, owner="", addresses=ADDRESSES[:1])
    assert JoinString.parse(str(plain)) == plain
    assert re.fullmatch(r"[A-Za-z0-9_-]+", str(JOIN))  # nothing a shell or a chat program would change


def rejection(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        JoinString.parse(text)
    return str(caught.value)


def test_each_way_of_damage_says_what_is_wrong() -> None:
    text = str(JOIN)
    assert "must begin with 'muloco1'" in rejection("") and "must begin" in rejection(text[1:])
    assert "'!' at position 21" in rejection(text[:20] + "!" + text[21:])
    assert "position 21" in rejection(text[:20] + " " + text[20:])
    assert "é" in rejection(text[:20] + "é" + text[21:])
    assert "checksum" in rejection("muloco1")
    for cut in range(8, len(text)):
        assert re.search("cut off|checksum", rejection(text[:cut]))


@pytest.mark.parametrize("at", range(7, 200, 13))
def test_one_changed_character_is_seen(at: int) -> None:
    text = str(JOIN)
    other = "A" if text[at] != "A" else "B"
    assert "checksum" in rejection(text[:at] + other + text[at + 1 :])


def test_the_last_characters_spare_bits_count_too() -> None:
    """base64's last character has bits that stand for nothing: one join string has one spelling."""
    text, alphabet = str(JOIN), "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    for last in set(alphabet) - {text[-1]}:
        rejection(text[:-1] + last)


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"run_id": "My Run"}, "NAME-HASH12"),
        ({"run_id": "my-run-" + "0" * 12}, "does not belong to config hash"),
        ({"config_hash": b"short"}, "32 bytes"),
        ({"owner": "abcd"}, "owner's key"),
        ({"addresses": ()}, "1 to 32 addresses"),
        ({"addresses": ADDRESSES * 11}, "1 to 32 addresses"),
        ({"addresses": ("/ip4/1.2.3.4/tcp/99",)}, "must look like"),
        ({"addresses": ("http://example.org",)}, "must look like"),
    ],
)
def test_a_false_field_in_a_sound_string_is_named(changes: dict[str, object], words: str) -> None:
    assert words in rejection(str(dataclasses.replace(JOIN, **changes)))


def test_addresses() -> None:
    assert [check_address(address) for address in ADDRESSES] == list(ADDRESSES)
    for wrong in ("", 3, None, f"/ip4//tcp/1/p2p/{PEER}", f"/ip4/a b/tcp/1/p2p/{PEER}", ADDRESSES[0] + "\n",
                  f"/ip4/1.2.3.4/tcp/123456/p2p/{PEER}", ADDRESSES[0].replace("p2p", "ipfs"),
                  f"/ip4/1.2.3.4/udp/1/quic-v1/p2p/{PEER}"):
        with pytest.raises(ConfigError, match="must look like /ip4"):
            check_address(wrong)
