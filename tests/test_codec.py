"""Codecs: sizes, conservation, contraction, hostile bytes, and one case by hand for each family."""

from __future__ import annotations

import math
import struct
import warnings

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2p_muloco.codec import Codec, make_codec, residual
from p2p_muloco.config import CODECS
from p2p_muloco.errors import BadPacket, ConfigError

LENGTHS = (1, 2, 3, 7, 511, 512, 513, 1023, 1024, 1025, 4095, 4096, 4097, 5000, 8193)
BLOCK_CODECS = tuple(name for name in CODECS if name not in ("fp32", "fp16"))
codecs = pytest.mark.parametrize("name", CODECS)
quick = settings(max_examples=20, deadline=None, database=None)


def sent(codec: Codec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x), len(x))


def error(codec: Codec, x: Tensor) -> float:
    x64 = x.double()
    return float((x64 - sent(codec, x).double()).norm() / x64.norm().clamp(min=1e-300))


def gaussian(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def families(n: int) -> dict[str, Tensor]:
    rng = np.random.default_rng(n)
    rank, side = 4, math.isqrt(n) + 1
    low_rank = rng.normal(size=(side, rank)) @ rng.normal(size=(rank, side)) + 0.05 * rng.normal(size=(side, side))
    arrays = {
        "gaussian": rng.normal(size=n),
        "student_t3": rng.standard_t(3, size=n),
        "sparse": rng.normal(size=n) * (rng.random(n) < 0.01),
        "constant": np.full(n, -0.37),
        "one_hot": np.eye(1, n, n // 2)[0] * 5,
        "zero": np.zeros(n),
        "alternating": np.where(np.arange(n) % 2, 0.3, -0.3),
        "shifted": rng.normal(size=n) + 20,
        "low_rank": low_rank.ravel()[:n],
    }
    return {key: torch.from_numpy(value.astype(np.float32)) for key, value in arrays.items()}


def finite_parts(most: int = 700) -> st.SearchStrategy[Tensor]:
    """Any finite fp32: subnormal, 3e38 and everything between, with long constant stretches."""
    elements = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return hnp.arrays(np.float32, st.integers(1, most), elements=elements).map(torch.from_numpy)


def test_every_name_of_the_config_and_no_other():
    assert [make_codec(name).name for name in CODECS] == list(CODECS)
    assert make_codec("topk", 0.1) == make_codec("topk", 0.1) != make_codec("topk", 0.2)
    with pytest.raises(ConfigError, match="'zip': must be one of fp32"):
        make_codec("zip")


@codecs
@given(n=st.integers(1, 5000), seed=st.integers(0, 99))
@quick
def test_sizes_are_exact(name, n, seed):
    codec = make_codec(name)
    data = codec.encode(gaussian(n, seed))
    assert type(data) is bytes and len(data) == codec.size(n)
    decoded = codec.decode(memoryview(data), n)
    assert decoded.shape == (n,) and decoded.dtype == torch.float32 and decoded.is_contiguous()


@codecs
@pytest.mark.parametrize("n", LENGTHS)
def test_sizes_at_the_borders(name, n):
    codec = make_codec(name)
    assert len(codec.encode(gaussian(n))) == codec.size(n)
    assert error(codec, gaussian(n)) <= codec.contraction


def test_bytes_of_a_default_part():
    n = 65_536
    sizes = {name: make_codec(name).size(n) for name in CODECS}
    assert sizes == {
        "fp32": 4 * n,
        "fp16": 2 * n,
        "absmax8": n + n // 1024 * 4,
        "absmax4": n // 2 + n // 512 * 4,
        "absmax2": n // 4 + n // 512 * 4,
        "statistical4": n // 2 + n // 1024 * (4 + 32),
        "statistical2": n // 4 + n // 512 * (4 + 8),
        "topk": 16 * (4 + 82 * 2 + 82 * 3 // 2),
    }
    assert sizes["statistical4"] <= 0.16 * sizes["fp32"]


@codecs
@given(x=finite_parts())
@quick
def test_any_finite_part_stays_finite_and_never_grows_the_residual(name, x):
    codec = make_codec(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoded = sent(codec, x)
    assert decoded.isfinite().all()
    lost, whole = (x.double() - decoded.double()).norm(), x.double().norm()
    assert lost <= whole * (1 + 1e-7)


@codecs
@given(x=finite_parts(), scale=st.sampled_from([1e-38, 1e-6, 1.0, 1e30]))
@quick
def test_decoded_and_residual_make_x(name, x, scale):
    x = torch.from_numpy(np.tanh(x.numpy())) * scale
    decoded = sent(make_codec(name), x)
    again = decoded + residual(x, decoded)
    ulp = np.spacing(torch.maximum(x.abs(), decoded.abs()).numpy())
    assert (np.abs((again - x).numpy()) <= ulp).all()


@codecs
@pytest.mark.parametrize("n", (1, 700, 4096, 9000))
def test_contraction(name, n):
    codec = make_codec(name)
    for family, x in families(n).items():
        assert error(codec, x) <= codec.contraction, family
        for magnitude in (1e-38, 1e30):
            assert error(codec, x * magnitude) <= 1 + 1e-6, (family, magnitude)


def worst_block(name: str) -> Tensor:
    """The block that a search or arithmetic found to lose the largest share."""
    if name.startswith("absmax"):
        bits = int(name[-1])
        x = torch.full((make_codec(name).block,), 0.4999999 / (2 ** (bits - 1) - 1))
        x[0] = 1
        return x
    if name == "topk":
        return torch.ones(4096)
    length, outlier, shared, border, inner = {
        "statistical4": (1024, 31.22, 12, 2.4375, 0.1125),
        "statistical2": (512, 17.42, 19, 0.75, 0.675),
    }[name]
    x = torch.where(torch.arange(length) % 2 == 0, inner, -inner) * 0.98
    x[0], x[1 : shared + 1] = outlier, border * 1.02
    x[shared + 1 :] -= x.sum() / (length - shared - 1)
    return x


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_contraction_is_neither_broken_nor_far_from_the_worst_block(name):
    codec = make_codec(name)
    assert 0.97 * codec.contraction <= error(codec, worst_block(name)) <= codec.contraction < 1


@pytest.mark.parametrize("name", ("statistical2", "statistical4"))
def test_no_random_walk_breaks_the_contraction_of_bin_means(name):
    codec, rng, worst = make_codec(name), np.random.default_rng(0), 0.0
    x = worst_block(name)
    for _ in range(600):
        y = x.clone()
        y[rng.integers(len(y), size=2)] += torch.from_numpy(rng.normal(size=2) * 10 ** rng.uniform(-3, 0.5)).float()
        if error(codec, y) > worst:
            x, worst = y, error(codec, y)
    assert worst <= codec.contraction


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("fp32", 0.0, 0.0),
        ("fp16", 1e-4, 3e-4),
        ("absmax8", 0.006, 0.009),
        ("absmax4", 0.12, 0.145),
        ("absmax2", 0.80, 0.86),
        ("statistical4", 0.10, 0.12),
        ("statistical2", 0.40, 0.44),
        ("topk", 0.91, 0.94),
    ],
)
def test_error_on_gaussian_parts(name, low, high):
    assert low <= error(make_codec(name), gaussian(65_536)) <= high


@codecs
@pytest.mark.parametrize("n", (700, 9000))
def test_the_same_bytes_and_bits_every_time(name, n):
    codec = make_codec(name)
    x, threads = families(n)["student_t3"], torch.get_num_threads()
    data, decoded = codec.encode(x), sent(codec, x)
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        assert codec.encode(x.clone()) == data
        assert torch.equal(codec.decode(bytearray(data), n), decoded)
    finally:
        torch.set_num_threads(threads)
    if not name.startswith("statistical"):  # the means of bins around new means are new means
        assert torch.equal(sent(codec, decoded), decoded)


@pytest.mark.parametrize("name", BLOCK_CODECS)
def test_flushing_subnormals_changes_no_bit(name):
    codec = make_codec(name, 0.2)
    x = gaussian(9000) ** 5 * 2.0 ** torch.linspace(-140, 100, 9000)
    data, plain = codec.encode(x), sent(codec, x)
    try:
        torch.set_flush_denormal(True)
        flushed = codec.decode(data, len(x))
    finally:
        torch.set_flush_denormal(False)
    assert flushed.numpy().tobytes() == plain.numpy().tobytes()


def test_input_is_left_as_it_was():
    for name in CODECS:
        x = gaussian(5000)
        make_codec(name).encode(x)
        assert torch.equal(x, gaussian(5000)), name


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
def test_encoding_what_is_not_finite_is_our_own_fault(bad):
    with pytest.raises(AssertionError):
        make_codec("absmax4").encode(torch.tensor([1.0, bad]))


# One case by hand for each family.


def test_fp16_by_hand():
    data = make_codec("fp16").encode(torch.tensor([1.0, 1e9, -65_519.0]))
    assert data == struct.pack("<3e", 1.0, 65_504.0, -65_504.0)


def test_absmax4_by_hand():
    codec = make_codec("absmax4")
    data = codec.encode(torch.tensor([-14.0, 0.9, 1.1, 14.0, 5.0]))  # steps of 2: levels -7, 0, 1, 7, 2
    assert data == struct.pack("<f", 14.0) + bytes([0x70, 0xE8, 0x09])  # codes are levels + 7, low nibble first
    assert torch.allclose(codec.decode(data, 5), torch.tensor([-14.0, 0, 2, 14, 4]), rtol=1e-6)
    unused = codec.decode(struct.pack("<f", 14.0) + b"\xff", 2)
    assert unused.tolist() == [14.0, 14.0]


def test_statistical2_by_hand():
    codec = make_codec("statistical2")
    x = torch.tensor([-4.0, -1.0, 0.0, 1.0, 4.0])  # std 2.608, so borders at -5.87, -1.96, 1.96
    data = codec.encode(x)
    assert data == struct.pack("<f4e", 4.0, 0.0, -1.0, 0.0, 1.0) + bytes([0b10_10_10_01, 0b11])
    assert codec.decode(data, 5).tolist() == [-4.0, 0.0, 0.0, 0.0, 4.0]
    constant = codec.encode(torch.full((4,), -3.0))
    assert constant == struct.pack("<f4e", 3.0, 0.0, 0.0, -1.0, 0.0) + bytes([0b10_10_10_10])


def test_topk_by_hand():
    codec = make_codec("topk", 0.001)
    x = torch.zeros(4096 + 500)  # five of the first chunk, one of the rest
    x[[0, 7, 255, 256, 4095]] = torch.tensor([1.0, -2.0, 8.0, 0.5, -4.0])
    x[4096 + 300] = 3.0
    data = codec.encode(x)
    places = bytes([0, 7, 255, 0, 255, 300 - 256]) + bytes([0x00, 0x10, 0x1F])
    assert data == struct.pack("<2f6e", 8.0, 3.0, 0.125, -0.25, 1.0, 0.0625, -0.5, 1.0) + places
    assert torch.equal(codec.decode(data, len(x)), x)


# Bytes from strangers.


def decodes_soundly(codec: Codec, data: bytes, n: int) -> bool:
    try:
        decoded = codec.decode(data, n)
    except BadPacket:
        return False
    assert decoded.shape == (n,) and decoded.isfinite().all()
    return True


@codecs
@given(n=st.integers(1, 3000), off=st.integers(-20, 20).filter(bool))
@quick
def test_a_wrong_length_is_refused(name, n, off):
    codec = make_codec(name)
    with pytest.raises(BadPacket, match="must be"):
        codec.decode(bytes(max(0, codec.size(n) + off)), n)


@codecs
@given(n=st.integers(1, 1200), seed=st.integers(0, 2**32 - 1), flips=st.integers(0, 4))
@quick
def test_random_and_damaged_bytes_give_a_finite_part_or_badpacket(name, n, seed, flips):
    codec, rng = make_codec(name), np.random.default_rng(seed)
    decodes_soundly(codec, rng.bytes(codec.size(n)), n)
    damaged = bytearray(codec.encode(gaussian(n, seed % 1000) * 3e37))
    for place in rng.integers(len(damaged), size=flips):
        damaged[place] = rng.integers(256)
    assert decodes_soundly(codec, bytes(damaged), n) or flips


@pytest.mark.parametrize("name", BLOCK_CODECS)
@pytest.mark.parametrize("scale", (math.nan, math.inf, -math.inf, -1.0, 1e-38, 2.0**-101))
def test_an_unsound_scale_is_refused(name, scale):
    codec = make_codec(name)
    data = codec.encode(gaussian(5000))
    with pytest.raises(BadPacket, match=f"{name} part: a scale"):
        codec.decode(data[:4] + struct.pack("<f", scale) + data[8:], 5000)


@pytest.mark.parametrize("name", ("statistical4", "statistical2", "topk"))
@pytest.mark.parametrize("level", (math.nan, math.inf, 1.001, -2.0))
def test_an_unsound_level_is_refused(name, level):
    codec = make_codec(name)
    data = codec.encode(gaussian(100) * 5e37)
    with pytest.raises(BadPacket, match="a level"):
        codec.decode(data[:4] + struct.pack("<e", level) + data[6:], 100)


@pytest.mark.parametrize("name", ("fp32", "fp16"))
@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_an_unsound_value_is_refused(name, value):
    with pytest.raises(BadPacket, match="not finite"):
        make_codec(name).decode(struct.pack("<f" if name == "fp32" else "<e", value), 1)


@pytest.mark.parametrize("places", ([5, 5], [6, 5], [0, 200], [4095, 0]))
def test_places_that_repeat_descend_or_leave_the_chunk_are_refused(places):
    low, high = bytes(place & 255 for place in places), bytes([places[0] >> 8 | places[1] >> 8 << 4])
    with pytest.raises(BadPacket, match="ascend"):
        make_codec("topk").decode(struct.pack("<f2e", 1.0, 1.0, 0.5) + low + high, 100)


# Error feedback.


@codecs
def test_feedback_sends_everything_in_time(name):
    codec = make_codec(name, 0.1)
    x = gaussian(1500) * torch.linspace(0.1, 1, 1500)
    left, total, misses = torch.zeros_like(x), torch.zeros_like(x), []
    for count in range(1, 201):
        decoded = sent(codec, x + left)
        left, total = residual(x + left, decoded), total + decoded
        if count in (50, 200):
            misses.append(float((total / count - x).norm() / x.norm()))
    assert misses[1] < 0.05
    assert misses[1] < misses[0] / 2 or misses[1] < 1e-5
