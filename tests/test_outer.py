"""The outer step: against torch.optim.SGD, bit for bit against numpy, and a trajectory in integers by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from p2p_muloco import outer
from p2p_muloco.config import OuterConfig
from p2p_muloco.outer import effective_peers, eta_mu, outer_step


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random(n: int, seed: int) -> Tensor:
    """Values over 40 orders of magnitude, zeros and denormals included."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=g) * 10 ** torch.randint(-40, 4, (n,), generator=g).float()
    return torch.where(torch.rand(n, generator=g) < 0.05, 0.0, x)


def test_golden_trajectory_in_integers() -> None:
    """eta = mu = 1/2. b <- b/2 + d; u = d + b/2; anchor <- anchor - u/2."""
    anchor, momentum = torch.tensor([100.0]), torch.tensor([0.0])
    path = [
        (8.0, 8.0, 94.0),  # b = 8, u = 8 + 4
        (4.0, 8.0, 90.0),  # b = 4 + 4, u = 4 + 4
        (0.0, 4.0, 89.0),  # b = 4, u = 2
        (-16.0, -14.0, 100.5),  # b = 2 - 16, u = -16 - 7
        (1.0, -6.0, 101.5),  # b = -7 + 1, u = 1 - 3
    ]
    for d, b, a in path:
        outer_step(anchor, momentum, torch.tensor([d]), eta=0.5, mu=0.5)
        assert (momentum.item(), anchor.item()) == (b, a)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("eta", "mu"), [(0.7, 0.6), (1.0, 0.9), (2.1, 0.0)])
def test_bit_equal_to_numpy(threads: int, eta: float, mu: float) -> None:
    torch.set_num_threads(threads)
    n = 2 * outer.CHUNK_ELEMENTS + 12_345
    anchor, momentum = random(n, 0), random(n, 1)
    a, b = anchor.numpy().copy(), momentum.numpy().copy()
    for step in range(3):
        d = random(n, 2 + step)
        kept = d.clone()
        outer_step(anchor, momentum, d, eta, mu)
        assert torch.equal(d, kept)
        b = b * np.float32(mu)
        b = b + d.numpy()
        a = a - (d.numpy() + b * np.float32(mu)) * np.float32(eta)
        assert np.array_equal(anchor.numpy().view(np.int32), a.view(np.int32))
        assert np.array_equal(momentum.numpy().view(np.int32), b.view(np.int32))


def test_pieces_give_the_same_bits() -> None:
    """A state that is cut elsewhere (per tensor, per span) stays the same state."""
    whole = [random(100_000, seed) for seed in range(3)]
    parts = [tensor.clone() for tensor in whole]
    outer_step(*whole, eta=0.9, mu=0.8)
    for low, high in ((0, 7), (7, 70_001), (70_001, 100_000)):
        outer_step(*(tensor[low:high] for tensor in parts), eta=0.9, mu=0.8)
    assert all(torch.equal(left, right) for left, right in zip(whole, parts, strict=True))


@pytest.mark.parametrize(("eta", "mu"), [(0.7, 0.6), (1.0, 0.9)])
def test_equals_torch_sgd_with_nesterov(eta: float, mu: float) -> None:
    g = torch.Generator().manual_seed(0)
    anchor = torch.randn(20, 30, generator=g)
    momentum = torch.zeros_like(anchor)
    p = torch.nn.Parameter(anchor.double())
    sgd = torch.optim.SGD([p], lr=eta, momentum=mu, nesterov=True)
    for _ in range(10):
        d = torch.randn(20, 30, generator=g)
        p.grad = d.double()
        sgd.step()
        outer_step(anchor, momentum, d, eta, mu)
    assert torch.allclose(anchor.double(), p.detach(), rtol=0, atol=3e-5)  # of values up to 60; measured 8e-6


def test_without_momentum_it_is_a_plain_step() -> None:
    anchor, d = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -0.25])
    outer_step(anchor, torch.tensor([9.0, 9.0]), d, eta=2.0, mu=0.0)
    assert anchor.tolist() == [0.0, 2.5]


def test_wrong_kinds_are_refused() -> None:
    good = torch.zeros(4)
    for bad in (torch.zeros(4, dtype=torch.float64), torch.zeros(3), torch.zeros(4, 2)[:, 0]):
        with pytest.raises(AssertionError):
            outer_step(good, good.clone(), bad, eta=1.0, mu=0.5)


def test_effective_peers() -> None:
    assert effective_peers([30]) == 1.0
    assert effective_peers([7] * 5) == 5.0
    assert effective_peers([8, 8, 8, 1]) == pytest.approx(625 / 193)
    assert effective_peers([30, 0]) == 1.0


AUTO = OuterConfig()
LATE = 10_000  # earlier entries: the cap of mu is no matter any more


def grid(*values: float) -> tuple[float, ...]:
    return tuple(round(value * 1024) / 1024 for value in values)


@pytest.mark.parametrize(("optimizer", "n", "eta", "mu"), [
    ("muon", 1, 0.7, 0.6), ("muon", 8, 0.9, 0.8), ("muon", 16, 1.0, 0.9), ("muon", 64, 1.0, 0.9),
    ("muon", 2, 0.7 + 0.2 / 3, 0.6 + 0.2 / 3), ("muon", 4, 0.7 + 0.4 / 3, 0.6 + 0.4 / 3),
    ("adamw", 1, 0.7, 0.8), ("adamw", 4, 0.7 + 0.4 / 3, 0.8 + 0.2 / 3), ("adamw", 8, 0.9, 0.9), ("adamw", 16, 1.0, 0.9),
])
def test_auto_rates_by_hand(optimizer: str, n: int, eta: float, mu: float) -> None:
    assert eta_mu(AUTO, optimizer, [30] * n, LATE) == grid(eta, mu)


def test_auto_rates_between_the_points_and_for_unequal_peers() -> None:
    t = math.log2(12) - 3
    assert eta_mu(AUTO, "muon", [5] * 12, LATE) == grid(0.9 + 0.1 * t, 0.8 + 0.1 * t)
    assert eta_mu(AUTO, "muon", [30, 30, 0, 0], LATE) == eta_mu(AUTO, "muon", [7, 7], LATE)


@pytest.mark.parametrize(("earlier", "mu"), [(0, 0), (1, 256), (2, 409), (3, 512), (4, 585), (5, 614), (LATE, 614)])
def test_momentum_is_capped_while_the_run_is_young(earlier: int, mu: int) -> None:
    """r / (r + 3), cut to 1/1024: 0, .25, .4, .5, .571; at r = 5, .625 is above the 0.6 of one peer."""
    assert eta_mu(AUTO, "muon", [30], earlier) == (717 / 1024, mu / 1024)


def test_fixed_rates_are_the_law() -> None:
    assert eta_mu(OuterConfig(method="isoloco", eta=1.8, mu=0.8), "muon", [30] * 3, earlier_entries=0) == (1.8, 0.8)


def test_own_log2_agrees_with_libm_and_is_exact_for_powers() -> None:
    for k in range(11):
        assert outer._log2(2.0**k) == k
    for x in np.random.default_rng(0).uniform(1, 1024, 2000):
        assert abs(outer._log2(float(x)) - math.log2(x)) < 2e-9
