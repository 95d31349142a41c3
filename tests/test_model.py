"""The model against a numpy float64 twin, its properties, and the purity of its first weights."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_muloco.config import ModelConfig
from p2p_muloco.model import (
    GPT,
    _rope_tables,
    _rotate,
    generate,
    initial_weights,
    load_weights,
    parameter_count,
    parameter_shapes,
)

TINY = ModelConfig(d_model=32, n_layers=2, n_heads=2, d_mlp=48, seq_len=32)
# Of initial_weights(TINY, 7). If it has to change, so has config.FORMAT: a run's first weights are part of its law.
TINY_SHA256 = "136d1cdcde4a55c989dc0aa7b8ee6f5a61de369ea505ab365a2ddfa59dd67136"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model() -> GPT:
    made = GPT(TINY)
    load_weights(made, initial_weights(TINY, 7))
    return made


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(seed))


def numpy_logits(w: dict[str, np.ndarray], ids: np.ndarray, config: ModelConfig) -> np.ndarray:
    """The same model in plain float64 numpy, one sequence (T,), one head and one position at a time."""
    width = config.d_model // config.n_heads

    def norm(x, gain):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gain

    def turn(x, position):
        angle = position * 10_000.0 ** (-2 * np.arange(width // 2) / width)
        turned = (x[: width // 2] + 1j * x[width // 2 :]) * np.exp(1j * angle)
        return np.concatenate((turned.real, turned.imag))

    x = w["embedding.weight"][ids]
    for i in range(config.n_layers):
        a, m = f"blocks.{i}.attention.", f"blocks.{i}.mlp."
        h, mixed = norm(x, w[a + "norm.weight"]), np.zeros_like(x)
        for head in range(config.n_heads):
            rows = slice(head * width, (head + 1) * width)
            q, k = (norm(h @ w[a + f"{n}.weight"][rows].T, w[a + f"{n}_norm.weight"]) for n in "qk")
            q, k = (np.stack([turn(row, t) for t, row in enumerate(y)]) for y in (q, k))
            for t in range(len(ids)):
                score = np.exp(k[: t + 1] @ q[t] / math.sqrt(width))
                mixed[t, rows] = score / score.sum() @ (h @ w[a + "v.weight"][rows].T)[: t + 1]
        x = x + mixed @ w[a + "o.weight"].T
        h = norm(x, w[m + "norm.weight"])
        gate = h @ w[m + "gate.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[m + "up.weight"].T)) @ w[m + "down.weight"].T
    return norm(x, w["norm.weight"]) @ w["head.weight"].T


def test_logits_and_loss_equal_a_float64_numpy_twin(model):
    with torch.no_grad():  # weights far from the first ones, so that each part matters
        for i, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
            parameter.add_(noise, alpha=0.3 if parameter.ndim == 1 else 0.2)
    ids = tokens(2, 20)
    weights = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
    twin = np.stack([numpy_logits(weights, row, TINY) for row in ids.numpy()])
    assert np.abs(model(ids).detach().numpy() - twin).max() < 1e-4 * np.abs(twin).max()
    log_p = twin[:, :-1] - np.log(np.exp(twin[:, :-1]).sum(-1, keepdims=True))
    chosen = np.take_along_axis(log_p, ids.numpy()[:, 1:, None], axis=-1)
    assert model.loss(ids).item() == pytest.approx(-chosen.mean(), rel=1e-5)


@settings(max_examples=30, deadline=None)
@given(m=st.integers(0, 511), n=st.integers(0, 511), shift=st.integers(0, 512), seed=st.integers(0, 999))
def test_rope_products_depend_on_the_distance_only(m, n, shift, seed):
    cos, sin = _rope_tables(1024, 16)
    q, k = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(seed))

    def product(i: int, j: int) -> float:
        return float((_rotate(q, cos[i : i + 1], sin[i : i + 1]) * _rotate(k, cos[j : j + 1], sin[j : j + 1])).sum())

    assert product(m + shift, n + shift) == pytest.approx(product(m, n), abs=2e-5)
    assert product(m, m) == pytest.approx(float((q * k).sum()), abs=2e-5)


def test_a_later_token_changes_no_earlier_logit(model):
    ids = tokens(1, 32)
    before = model(ids)
    for position in (1, 15, 31):
        changed = ids.clone()
        changed[0, position] = (changed[0, position] + 1) % 256
        after = model(changed)
        torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=1e-6)
        assert not torch.equal(after[:, position], before[:, position])


def test_a_prefix_has_the_logits_of_the_whole_and_too_long_is_refused(model):
    ids = tokens(2, 32)
    torch.testing.assert_close(model(ids[:, :9]), model(ids)[:, :9], rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r"33 tokens.*seq_len = 32"):
        model(tokens(1, 33))


@pytest.mark.parametrize("config", [TINY, ModelConfig(n_layers=1, seq_len=64)])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_first_loss_is_that_of_a_guess_among_256(config, seed):
    model = GPT(config)
    load_weights(model, initial_weights(config, seed))
    for symbols in (256, 4):  # a real text uses few of the bytes, so their first chances hardly average out
        ids = tokens(8, config.seq_len + 1) % symbols
        assert model.loss(ids).item() == pytest.approx(math.log(256), abs=0.02)


def test_every_parameter_gets_a_finite_nonzero_gradient_at_once(model):
    model.loss(tokens(4, 33)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0, name


def test_a_few_steps_learn_a_repeated_text(model):
    ids = torch.arange(33).repeat(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        model.loss(ids).backward()
        optimizer.step()
    assert model.loss(ids).item() < 0.1


def test_shapes_are_those_of_the_module_in_its_order_with_readable_names():
    shapes = parameter_shapes(TINY)
    assert list(shapes.items()) == [(name, tuple(p.shape)) for name, p in GPT(TINY).named_parameters()]
    assert set(GPT(TINY).state_dict()) == set(shapes)  # RoPE tables are not saved
    assert (next(iter(shapes)), list(shapes)[-2:]) == ("embedding.weight", ["norm.weight", "head.weight"])
    assert shapes["blocks.1.mlp.gate.weight"] == (48, 32) and shapes["blocks.0.mlp.down.weight"] == (32, 48)
    assert shapes["blocks.0.attention.q.weight"] == (32, 32) and shapes["blocks.0.attention.k_norm.weight"] == (16,)


def test_parameter_count_by_hand():
    block = 4 * 32 * 32 + 3 * 32 * 48 + 2 * 32 + 2 * 16
    assert parameter_count(TINY) == 2 * 256 * 32 + 2 * block + 32
    assert parameter_count(ModelConfig()) == 4_952_064


def test_shapes_of_a_huge_model_cost_no_memory():
    huge = ModelConfig(d_model=16_384, n_layers=8, n_heads=128, d_mlp=65_536)
    assert parameter_count(huge) > 30e9


def test_first_weights_are_golden():
    weights = initial_weights(TINY, 7)
    joined = b"".join(name.encode() + weights[name].numpy().astype("<f4").tobytes() for name in weights)
    assert hashlib.sha256(joined).hexdigest() == TINY_SHA256


def test_first_weights_are_pure_and_differ_by_seed_and_tensor():
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    a, b, other = initial_weights(TINY, 7), initial_weights(TINY, 7), initial_weights(TINY, 8)
    assert torch.equal(torch.get_rng_state(), state[0]) and (np.random.get_state()[1] == state[1]).all()
    assert all(torch.equal(a[name], b[name]) for name in a)
    drawn = [name for name in a if not name.endswith("norm.weight")]
    assert not any(torch.equal(a[name], other[name]) for name in drawn)
    assert len({tuple(a[name].flatten()[:4].div(a[name].abs().max()).tolist()) for name in drawn}) == len(drawn)


def test_first_weights_have_the_spread_that_is_written():
    config = ModelConfig(n_layers=2)
    for name, weight in initial_weights(config, 3).items():
        assert weight.dtype == torch.float32 and weight.device.type == "cpu" and tuple(weight.shape), name
        if name.endswith("norm.weight"):
            assert (weight == 1).all()
            continue
        std = {"head": 0.02 / 16, "o": 0.01, "down": 0.01}.get(name.split(".")[-2], 0.02)
        assert float(weight.std()) == pytest.approx(std, rel=0.02), name
        assert abs(float(weight.mean())) < 4 * std / math.sqrt(weight.numel()), name
        assert float(weight.abs().max()) <= std * math.sqrt(3) * (1 + 1e-6), name


@pytest.mark.parametrize("fault", ["missing", "extra", "shape"])
def test_weights_of_another_model_change_nothing(model, fault):
    weights = initial_weights(TINY, 8)
    if fault == "missing":
        del weights["norm.weight"]
    elif fault == "extra":
        weights["norm.bias"] = torch.zeros(32)
    else:
        weights["norm.weight"] = torch.ones(33)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"norm\.(weight|bias).*one model config"):
        load_weights(model, weights)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_generate_is_decided_by_its_seed_and_runs_past_the_window(model):
    text = generate(model, b"The ", 50, seed=3)
    assert len(text) == 50 and text == generate(model, b"The ", 50, seed=3)
    assert text != generate(model, b"The ", 50, seed=4)
    assert generate(model, b"", 5, seed=1) == generate(model, b"\0", 5, seed=1)
    assert generate(model, b"x", 0, seed=1) == b""
    assert len({generate(model, b"The ", 9, seed, temperature=0) for seed in range(4)}) == 1


def test_autocast_keeps_the_loss_near(model):
    ids = tokens(2, 33)
    with torch.autocast("cpu", torch.bfloat16):
        low = model.loss(ids)
    assert low.dtype == torch.float32
    assert low.item() == pytest.approx(model.loss(ids).item(), abs=0.01)
