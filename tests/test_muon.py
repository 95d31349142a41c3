"""The inner optimizer against torch.optim.AdamW, torch.optim.Muon and fp64 SVD, and its schedule against arithmetic."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from p2p_muloco import muon
from p2p_muloco.config import InnerConfig
from p2p_muloco.muon import (
    COEFFICIENTS,
    MuonAdamW,
    clip_gradients,
    fresh_factor,
    learning_rate,
    orthogonalize,
    parameter_groups,
    schedule_progress,
    update_scale,
)

SHAPES = {
    "embedding.weight": (40, 16),
    "blocks.0.attention_norm.weight": (16,),
    "blocks.0.attention.q.weight": (16, 16),
    "blocks.0.attention.k.weight": (16, 16),
    "blocks.0.mlp.up.weight": (44, 16),
    "blocks.0.mlp.down.weight": (16, 44),
    "blocks.1.attention.q.weight": (16, 16),
    "norm.weight": (16,),
    "head.weight": (40, 16),
}
MATRICES = [name for name in SHAPES if "attention." in name or "mlp." in name]
KELLER_JORDAN = ((3.4445, -4.7750, 2.0315),) * 5  # torch.optim.Muon's


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def parameters(seed: int = 0, names=tuple(SHAPES)) -> dict[str, torch.nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.nn.Parameter(torch.randn(SHAPES[name], generator=g)) for name in names}


def set_gradients(params: dict[str, torch.nn.Parameter], step: int) -> None:
    g = torch.Generator().manual_seed(1000 + step)
    for name, p in params.items():
        p.grad = torch.randn(SHAPES[name], generator=g)


def run(optimizer: torch.optim.Optimizer, params: dict[str, torch.nn.Parameter], steps: range) -> dict[str, Tensor]:
    for step in steps:
        set_gradients(params, step)
        optimizer.step()
    return {name: p.detach().clone() for name, p in params.items()}


def with_spectrum(m: int, n: int, s: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A matrix with singular values s and its exact polar factor, both fp64."""
    g = torch.Generator().manual_seed(seed)
    u = torch.linalg.qr(torch.randn(m, len(s), generator=g, dtype=torch.float64))[0]
    v = torch.linalg.qr(torch.randn(n, len(s), generator=g, dtype=torch.float64))[0]
    return (u * s) @ v.T, u @ v.T


# Orthogonalisation


@pytest.mark.parametrize(("name", "largest"), [("muloco", 1.145), ("polar", 1.141)])
def test_composed_quintics_stay_in_their_band(name: str, largest: float) -> None:
    x = torch.linspace(1e-4, 1 / muon.CUSHION[name], 200_001, dtype=torch.float64)
    for a, b, c in COEFFICIENTS[name]:
        x = a * x + b * x**3 + c * x**5
    assert largest - 1e-3 < x.max() <= largest + 5e-4
    assert x.min() > 0


@pytest.mark.parametrize(("name", "smallest", "largest"), [("muloco", 0.95, 1.146), ("polar", 0.85, 1.142)])
@pytest.mark.parametrize(("m", "n"), [(64, 64), (96, 32), (32, 96)])
def test_orthogonalize_against_fp64_svd(name: str, smallest: float, largest: float, m: int, n: int) -> None:
    g, polar = with_spectrum(m, n, torch.logspace(0, -1.3, min(m, n), dtype=torch.float64))
    result = orthogonalize(g.float(), name).double()
    values = torch.linalg.svdvals(result)
    assert smallest < values.min() and values.max() < largest
    # Same singular vectors: U^T X V is diagonal and positive, so X is polar times a symmetric matrix near 1.
    inner = polar.T @ result if m >= n else result @ polar.T
    assert torch.allclose(inner, inner.T, atol=5e-6)  # measured 9e-7
    assert float((result * polar).sum() / result.norm() / polar.norm()) > 0.99


@pytest.mark.parametrize("name", ["muloco", "polar"])
def test_orthogonalize_is_exactly_the_polynomial_of_the_singular_values(name: str) -> None:
    s = torch.logspace(0, -2, 24, dtype=torch.float64)
    g, _ = with_spectrum(24, 40, s)
    x = s / s.norm() / muon.CUSHION[name]
    for a, b, c in COEFFICIENTS[name]:
        x = a * x + b * x**3 + c * x**5
    expected, _ = with_spectrum(24, 40, x)
    error = (orthogonalize(g.float(), name).double() - expected).norm() / expected.norm()
    assert error < 5e-6  # measured 1e-6


def test_batches_and_sides_agree_with_one_by_one() -> None:
    g = torch.randn(2, 3, 20, 12, generator=torch.Generator().manual_seed(3))
    batched = orthogonalize(g, "muloco")
    singles = torch.stack([orthogonalize(x, "muloco") for x in g.reshape(-1, 20, 12)]).reshape(g.shape)
    assert torch.allclose(batched, singles, atol=2e-6)
    assert torch.allclose(orthogonalize(g.mT, "muloco"), batched.mT, atol=2e-6)
    assert batched.shape == g.shape and batched.dtype == torch.float32


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-12, 1e12])
def test_size_of_the_input_does_not_matter(size: float) -> None:
    g = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    result = orthogonalize(g * size, "polar")
    if size < 1e-20:  # squares underflow: zero rather than noise
        assert result.abs().max() < 1e-9
    else:
        assert torch.allclose(result, orthogonalize(g, "polar"), atol=1e-5)


# Groups


def test_groups_are_a_partition() -> None:
    groups = parameter_groups(parameters().items(), "muon")
    matrices, others = ([name for name, _ in group["params"]] for group in groups)
    assert matrices == MATRICES
    assert sorted(matrices + others) == sorted(SHAPES)
    assert [group["method"] for group in groups] == ["muon", "adamw"]
    assert [group["method"] for group in parameter_groups(parameters().items(), "adamw")] == ["adamw", "adamw"]


def test_two_parameters_of_one_name_are_refused() -> None:
    with pytest.raises(AssertionError, match="share a name"):
        parameter_groups([("a", torch.zeros(2)), ("a", torch.zeros(2))], "muon")


def test_lr_scale_is_for_what_is_no_matrix() -> None:
    for optimizer in ("muon", "adamw"):
        built = MuonAdamW(parameters().items(), InnerConfig(optimizer=optimizer, lr=0.1, adamw_lr_scale=0.5))
        assert [group["lr"] for group in built.param_groups] == [0.1, 0.05]
        built.set_lr(0.2)
        assert [group["lr"] for group in built.param_groups] == [0.2, 0.1]


# Against torch


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_is_bit_equal_to_torch(weight_decay: float) -> None:
    ours, theirs = parameters(), parameters()
    inner = InnerConfig(optimizer="adamw", lr=0.01, weight_decay=weight_decay, beta1=0.9, beta2=0.99)
    reference = torch.optim.AdamW(
        theirs.values(), lr=0.01, betas=(0.9, 0.99), weight_decay=weight_decay, eps=1e-8, foreach=False
    )
    steps = range(20)
    left, right = run(MuonAdamW(ours.items(), inner), ours, steps), run(reference, theirs, steps)
    assert all(torch.equal(left[name], right[name]) for name in SHAPES)


def test_adamw_half_of_muon_is_bit_equal_to_torch() -> None:
    ours, theirs = parameters(), parameters()
    others = [theirs[name] for name in SHAPES if name not in MATRICES]
    reference = torch.optim.AdamW(others, lr=0.005, betas=(0.9, 0.99), weight_decay=0.1, foreach=False)
    inner = InnerConfig(lr=0.01, adamw_lr_scale=0.5, weight_decay=0.1)
    left, right = run(MuonAdamW(ours.items(), inner), ours, range(20)), run(reference, theirs, range(20))
    assert all(torch.equal(left[name], right[name]) for name in SHAPES if name not in MATRICES)


def torch_muon(params, adjust: str) -> torch.optim.Muon:
    # Its momentum is (1 - m) times ours, which orthogonalisation does not see.
    return torch.optim.Muon(
        params.values(), lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=False, adjust_lr_fn=adjust
    )


# torch's "original" factor is sqrt(max(1, out/in)): MuLoCo's for every matrix that is not wide.
@pytest.mark.parametrize(("scale", "adjust"), [("rms", "match_rms_adamw"), ("spectral", "original")])
def test_muon_equals_torch_muon_without_its_bf16(monkeypatch, scale: str, adjust: str) -> None:
    names = [name for name in MATRICES if scale == "rms" or "down" not in name]
    monkeypatch.setitem(COEFFICIENTS, "muloco", KELLER_JORDAN)
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)  # torch.optim.Muon's only cast: it computes in fp32 now
    ours, theirs = parameters(names=names), parameters(names=names)
    inner = InnerConfig(lr=0.02, momentum=0.9, weight_decay=0.1, scale=scale)
    left = run(MuonAdamW(ours.items(), inner), ours, range(20))
    right = run(torch_muon(theirs, adjust), theirs, range(20))
    for name in names:
        assert torch.allclose(left[name], right[name], atol=5e-6), name  # measured 4e-7 after 20 steps


def test_muon_equals_torch_muon_up_to_its_bf16(monkeypatch) -> None:
    monkeypatch.setitem(COEFFICIENTS, "muloco", KELLER_JORDAN)
    start, ours, theirs = (parameters(names=MATRICES) for _ in range(3))
    inner = InnerConfig(lr=0.02, momentum=0.9, weight_decay=0.1, scale="rms")
    left = run(MuonAdamW(ours.items(), inner), ours, range(1))
    right = run(torch_muon(theirs, "match_rms_adamw"), theirs, range(1))
    for name in MATRICES:
        a, b = left[name] - start[name].detach(), right[name] - start[name].detach()
        assert float((a * b).sum() / a.norm() / b.norm()) > 0.9995  # measured 0.9999
        assert abs(float(a.norm() / b.norm()) - 1) < 0.01  # measured 0.004


def test_muon_step_by_hand() -> None:
    """One 1 x 4 matrix: its polar factor is g / ||g||, its singular value the scalar polynomial of 1."""
    w = torch.nn.Parameter(torch.ones(1, 4))
    w.grad = torch.tensor([[3.0, 0.0, 4.0, 0.0]])
    value = 1.0
    for a, b, c in COEFFICIENTS["muloco"]:
        value = a * value + b * value**3 + c * value**5
    MuonAdamW([("w", w)], InnerConfig(lr=0.1, weight_decay=0.5)).step()
    update = 0.1 * math.sqrt(1 / 4) * value
    expected = torch.tensor([[0.95 - 0.6 * update, 0.95, 0.95 - 0.8 * update, 0.95]])
    assert torch.allclose(w.detach(), expected, atol=1e-6)


def test_scale_factors() -> None:
    assert update_scale((4, 1), "spectral") == 2.0 and update_scale((1, 4), "spectral") == 0.5
    assert update_scale((4, 25), "rms") == update_scale((25, 4), "rms") == 1.0


def test_parameter_without_gradient_is_left() -> None:
    params = parameters()
    before = {name: p.detach().clone() for name, p in params.items()}
    optimizer = MuonAdamW(params.items(), InnerConfig(weight_decay=0.1))
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in params.items())


# State


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("flat", [True, False])
def test_resume_is_bit_equal(optimizer: str, flat: bool) -> None:
    inner = InnerConfig(optimizer=optimizer, weight_decay=0.1)
    params = parameters()
    straight = MuonAdamW(params.items(), inner)
    middle = run(straight, params, range(5))
    again = {name: torch.nn.Parameter(value.clone()) for name, value in middle.items()}
    resumed = MuonAdamW(again.items(), inner)
    if flat:
        resumed.load_state_tensors({key: value.clone() for key, value in straight.state_tensors().items()})
    else:
        resumed.load_state_dict(copy.deepcopy(straight.state_dict()))  # torch hands over the tensors themselves
    left, right = run(straight, params, range(5, 9)), run(resumed, again, range(5, 9))
    assert all(torch.equal(left[name], right[name]) for name in SHAPES)


def test_state_names_are_those_of_the_parameters(tmp_path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    params = parameters()
    optimizer = MuonAdamW(params.items(), InnerConfig())
    run(optimizer, params, range(3))
    wanted = {f"{name}/momentum" for name in MATRICES} | {"step"}
    wanted |= {f"{name}/{key}" for name in SHAPES if name not in MATRICES for key in ("exp_avg", "exp_avg_sq")}
    assert set(optimizer.state_tensors()) == wanted
    assert int(optimizer.state_tensors()["step"]) == 3
    loaded = safetensors.load(safetensors.save(optimizer.state_tensors()))
    assert all(torch.equal(loaded[key], value) for key, value in optimizer.state_tensors().items())


def test_foreign_state_is_refused_whole() -> None:
    optimizer = MuonAdamW(parameters().items(), InnerConfig())
    saved = {key: torch.ones_like(value) for key, value in optimizer.state_tensors().items()}
    saved["norm.weight/exp_avg"] = torch.ones(17)
    with pytest.raises(ValueError, match=r"norm.weight/exp_avg has shape \(17,\), must be \(16,\)"):
        optimizer.load_state_tensors(saved)
    assert not any(value.any() for value in optimizer.state_tensors().values())
    del saved["norm.weight/exp_avg"]
    with pytest.raises(ValueError, match="has shape None"):
        optimizer.load_state_tensors(saved)


# Clipping


def test_clip_gradients() -> None:
    a, b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1, 1))
    for max_norm, scale in ((0.0, 1.0), (26.0, 1.0), (6.5, 0.5)):
        a.grad, b.grad = torch.tensor([3.0, 4.0]), torch.tensor([[12.0]])
        assert clip_gradients([a, b], max_norm) == 13.0
        assert a.grad.tolist() == pytest.approx([3 * scale, 4 * scale]) and b.grad.item() == pytest.approx(12 * scale)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_clip_leaves_what_is_not_finite(bad: float) -> None:
    a = torch.nn.Parameter(torch.zeros(2))
    a.grad = torch.tensor([bad, 4.0])
    assert not math.isfinite(clip_gradients([a], 1.0))
    assert a.grad[1] == 4.0


# Schedule


def test_learning_rate_by_hand() -> None:
    inner = InnerConfig(lr=0.02, warmup=0.1, final_lr=0.1)
    points = {0.0: 0.0, 0.05: 0.01, 0.1: 0.02, 0.55: 0.02 * (0.1 + 0.9 * 0.5), 1.0: 0.002,
              0.4: 0.02 * (0.1 + 0.9 * 0.75)}
    for progress, lr in points.items():
        assert learning_rate(inner, progress) == pytest.approx(lr, rel=1e-12, abs=1e-15)
    assert learning_rate(InnerConfig(lr=0.02, warmup=0.0), 0.0) == 0.02


def test_progress_by_hand() -> None:
    assert schedule_progress(0, 600, 0, 30, 10_000) == 0.0
    assert schedule_progress(4000, 600, 15, 30, 10_000) == pytest.approx(0.43)
    assert schedule_progress(4000, 600, 90, 30, 10_000) == pytest.approx(0.46)  # past H the schedule waits
    assert schedule_progress(9900, 600, 30, 30, 10_000) == 1.0


def test_fresh_factor_by_hand() -> None:
    assert [fresh_factor(step) for step in (0, 4, 9, 10, 1000)] == [0.1, 0.5, 1.0, 1.0, 1.0]
