"""Iso-C against fp64 SVD, and the weight of a sum against arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from p2p_muloco.merge import counted_weight, is_flattened, is_scaled, iso_c, iso_c_iterative, norm_ratio


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def conditioned(m: int, n: int, condition: float) -> Tensor:
    """Singular values spread evenly in their logarithm from 1 to 1 / condition."""
    r = min(m, n)
    u = torch.linalg.qr(random(m, r).double())[0]
    v = torch.linalg.qr(random(n, r, seed=1).double())[0]
    return ((u * condition ** -torch.linspace(0, 1, r, dtype=torch.float64)) @ v.T).float()


def exact(d: Tensor) -> Tensor:
    u, s, vt = torch.linalg.svd(d.double(), full_matrices=False)
    return s.mean() * (u * (s > 1e-7 * s[0])) @ vt


def error(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


SIDES = [(48, 48), (32, 200), (200, 32), (160, 130)]


@pytest.mark.parametrize(("m", "n"), SIDES)
@pytest.mark.parametrize(("condition", "tolerance"), [(1.0, 1e-6), (1e4, 1e-6), (1e6, 1e-5)])
def test_iso_c_against_fp64_svd(m: int, n: int, condition: float, tolerance: float) -> None:
    d = conditioned(m, n, condition)
    result = iso_c(d)
    assert result.dtype == torch.float32 and result.is_contiguous()
    assert error(result, exact(d)) < tolerance  # measured 2e-8, 3e-8, 6e-6


@pytest.mark.parametrize(("m", "n"), SIDES)
@pytest.mark.parametrize(("condition", "tolerance"), [(1.0, 1e-5), (100.0, 2e-5), (1e4, 5e-4)])
def test_iterative_iso_c_against_fp64_svd(m: int, n: int, condition: float, tolerance: float) -> None:
    d = conditioned(m, n, condition)
    assert error(iso_c_iterative(d), exact(d)) < tolerance  # measured 4e-6, 3e-6, 5e-5


@pytest.mark.parametrize(("flatten", "tolerance"), [(iso_c, 1e-6), (iso_c_iterative, 1e-5)])
def test_iso_c_with_zero_rows_and_columns(flatten, tolerance: float) -> None:
    d = random(40, 60)
    d[::3] = 0
    d[:, 5:9] = 0
    result = flatten(d)
    assert error(result, exact(d)) < tolerance
    assert result[::3].abs().max() < 1e-6 and result[:, 5:9].abs().max() < 1e-6


def iterative_fp64(d: Tensor) -> Tensor:
    return iso_c_iterative(d.double())


# Measured 4e-8, 0.12, 6e-10: the twelve steps in fp32 raise the noise of their own rounding.
@pytest.mark.parametrize(("flatten", "tolerance"), [(iso_c, 1e-6), (iso_c_iterative, 0.3), (iterative_fp64, 1e-7)])
def test_iso_c_of_exactly_rank_deficient_integers(flatten, tolerance: float) -> None:
    """Small integers, so that d itself has no noise in its null space."""
    d = random(64, 5).mul(4).round() @ random(5, 96, seed=1).mul(4).round()
    u, s, vt = torch.linalg.svd(d.double(), full_matrices=False)
    expected = s[:5].sum() / 64 * u[:, :5] @ vt[:5]  # the mean is over all 64 values, 59 of them zero
    assert error(flatten(d), expected) < tolerance


@pytest.mark.parametrize("flatten", [iso_c, iso_c_iterative])
def test_iso_c_of_edge_cases(flatten) -> None:
    assert torch.equal(flatten(torch.zeros(5, 7)), torch.zeros(5, 7))
    row = random(1, 9)
    assert torch.allclose(flatten(row), row, atol=1e-6) and torch.allclose(flatten(row.T), row.T, atol=1e-6)
    assert torch.allclose(flatten(torch.tensor([[3.0, 0.0], [0.0, 1.0]])), 2 * torch.eye(2), atol=1e-6)
    assert torch.allclose(flatten(torch.tensor([[4.0, 0.0], [0.0, 0.0]])), torch.tensor([[2.0, 0.0], [0.0, 0.0]]))


@pytest.mark.parametrize("flatten", [iso_c, iso_c_iterative])
@pytest.mark.parametrize("size", [1e-10, 1e10])
def test_iso_c_is_homogeneous_and_odd(flatten, size: float) -> None:
    d = random(12, 20)
    assert torch.allclose(flatten(d * size) / size, flatten(d), atol=1e-5)
    assert torch.allclose(flatten(-d), -flatten(d), atol=1e-5)


@pytest.mark.parametrize("flatten", [iso_c, iso_c_iterative])
def test_iso_c_in_batches(flatten) -> None:
    d = random(3, 30, 20)
    assert torch.allclose(flatten(d), torch.stack([flatten(x) for x in d]), atol=1e-5)


def test_iterative_iso_c_refuses_tf32() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(RuntimeError, match="'high'"):
            iso_c_iterative(random(4, 4))
    finally:
        torch.set_float32_matmul_precision(before)


def test_weight_of_equal_peers_is_the_plain_mean() -> None:
    for n in (1, 2, 3, 7, 32):
        for h in (1, 29, 60):
            assert counted_weight([h] * n, inner_steps=30) == 1 / n


def test_weight_by_hand() -> None:
    assert counted_weight([8, 8, 8, 1], inner_steps=8) == pytest.approx(193 / 625)  # 0.3088
    assert counted_weight([10, 30], inner_steps=30) == pytest.approx(1000 / 1600)
    assert counted_weight([30, 0], inner_steps=30) == 1.0
    assert counted_weight([120, 120], inner_steps=30) == pytest.approx(60 / 240)  # tau is capped at 2H
    assert counted_weight([120], inner_steps=30) == 0.5


def test_weight_gives_a_slow_peer_its_share_of_steps() -> None:
    """All peers moving at the same rate: the mean moves by tau steps of it, whoever did them."""
    h, rate = [16, 16, 2], 0.25
    moved = counted_weight(h, inner_steps=16) * sum(steps * rate for steps in h)
    assert moved == pytest.approx(rate * (16**2 + 16**2 + 2**2) / 34)


def test_norm_ratio() -> None:
    assert norm_ratio(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 1.0])) == 0.2
    assert norm_ratio(torch.zeros(3), torch.zeros(3)) == 1.0
    huge = torch.full((1000,), 1e30)  # fp32 can't hold its square
    assert norm_ratio(huge, huge / 2) == pytest.approx(0.5)


def test_which_tensors_are_flattened_and_scaled() -> None:
    matrix, gain = ("blocks.0.mlp.up.weight", (8, 4)), ("norm.weight", (4,))
    for whole in (True, False):
        assert is_flattened(*matrix, whole) and not is_scaled(*matrix, whole)
        assert not is_flattened(*gain, whole) and not is_scaled(*gain, whole)
        for name in ("embedding.weight", "head.weight"):
            assert is_flattened(name, (16, 4), whole) is whole
            assert is_scaled(name, (16, 4), whole) is not whole
