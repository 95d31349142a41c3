"""What bounds an honest packet: real trainers' packets stay within it, and no part that a sender has clipped leaves it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kit
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2p_muloco.bounds import (
    LR_HISTORY,
    Cosines,
    clip_factors,
    clip_to_limits,
    far_longer,
    largest_lr,
    over_limit,
    part_norms,
    step_limits,
    trimmed_mean,
)
from p2p_muloco.chain import Law
from p2p_muloco.config import CODECS, CodecConfig, InnerConfig, ModelConfig, OuterConfig, RunConfig, RunSection
from p2p_muloco.data import load_corpus
from p2p_muloco.identity import Identity
from p2p_muloco.local import LocalNetwork
from p2p_muloco.muon import MuonAdamW, learning_rate
from p2p_muloco.packet import Layout
from p2p_muloco.simulate import local_trainer, run_swarm
from p2p_muloco.trainer import Trainer

corpus = functools.cache(lambda: load_corpus(RunConfig().data))
MATRIX = {"blocks.0.mlp.up.weight": (64, 48)}


def law_of(shapes: dict[str, tuple[int, ...]], up: str = "fp32", beta: float = 0.9, run: RunSection | None = None,
           part_elements: int = 1024, **inner: Any) -> Law:
    config = RunConfig(run=run or RunSection(), inner=InnerConfig(**inner),
                       codec=CodecConfig(up=up, beta=beta, part_elements=part_elements))
    return Law(config, Layout(shapes, config))


# -- limits


def test_limits_by_hand() -> None:
    """Four pieces of a Muon matrix cut at row borders, a table and a gain under AdamW."""
    shapes = {**MATRIX, "embedding.weight": (64, 32), "norm.weight": (16,)}
    law = law_of(shapes, "absmax4", lr=0.02, weight_decay=0.1, adamw_lr_scale=0.5)
    assert [part.size for part in law.layout.parts] == [21 * 48, 21 * 48, 21 * 48, 48, 1024, 1024, 16]
    anchor = torch.full((law.layout.n_elements,), 0.25)
    limits = step_limits(law, anchor, 0.01)
    up, again = math.sqrt(64 / 48), (1 + 0.8502) / (1 - 0.8502 * 0.9)
    adam = 0.1 / math.sqrt(0.01) / math.sqrt(1 - 0.81 / 0.99)
    assert adam == pytest.approx(2.345, abs=1e-3)
    wanted = [
        *[again * 0.01 * (1.2 * up * math.sqrt(21) + 0.1 * 0.25 * math.sqrt(21 * 48))] * 3,
        again * 0.01 * (1.2 * up + 0.1 * 0.25 * math.sqrt(48)),
        *[again * 0.005 * 32 * (adam + 0.1 * 0.25)] * 2,
        0.005 * 4 * (adam + 0.1 * 0.25),  # a gain travels as fp32: nothing is said again
    ]
    assert limits.dtype == torch.float64
    torch.testing.assert_close(limits, torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("betas,k", [((0.9, 0.99), 2.345), ((0.9, 0.95), 1.165), ((0.0, 0.75), 2.0), ((0.9, 0.81), math.inf)])
def test_what_adamw_can_do_to_one_element(betas: tuple[float, float], k: float) -> None:
    law = law_of({"a": (1,)}, beta1=betas[0], beta2=betas[1])
    assert float(step_limits(law, torch.zeros(1), 1.0)) == pytest.approx(k, rel=1e-3)
    assert not over_limit(torch.tensor([1e30]), math.inf)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["spectral", "rms"]), st.sampled_from([0.0, 0.1, 1.0]),
       st.sampled_from([(8, 8), (8, 40), (40, 8), (33, 31)]), st.sampled_from(["muon", "adamw"]),
       st.sampled_from([(0.9, 0.99), (0.9, 0.95), (0.0, 0.9)]), st.integers(1, 12))
def test_no_gradients_move_a_part_further(seed: int, scale: str, decay: float, shape: tuple[int, int], optimizer: str,
                                          betas: tuple[float, float], h: int) -> None:
    """Gradients of few directions, spikes after silence, heavy tails: the weights that the optimizer makes of them."""
    law = law_of({"blocks.0.w.weight": shape, "a": (7,)}, optimizer=optimizer, scale=scale, weight_decay=decay,
                 beta1=betas[0], beta2=betas[1], lr=0.02)
    rng = torch.Generator().manual_seed(seed)
    weights = [torch.nn.Parameter(torch.randn(s, generator=rng) * 0.1) for s in law.layout.shapes]
    optimizer_ = MuonAdamW(zip(law.layout.names, weights, strict=True), law.config.inner)

    def flat() -> Tensor:
        return torch.cat([w.detach().reshape(-1) for w in weights]).clone()

    for step in range(40 + h):
        if step == 40:
            anchor = flat()
        for w in weights:
            w.grad = torch.randn(w.shape, generator=rng) ** 3 * 10.0 ** int(torch.randint(-6, 3, (), generator=rng))
            if w.dim() == 2 and step % 3 == 0:
                w.grad = torch.outer(w.grad[:, 0], w.grad[0])
        optimizer_.step()
    limits = step_limits(law, anchor, 0.02)
    assert (part_norms(law.layout, anchor - flat()) <= limits * h * (1 + 1e-5)).all()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 3_000), min_size=1, max_size=LR_HISTORY + 1), st.booleans(), st.integers(1, 20_000),
       st.sampled_from([0.0, 0.1, 0.9]), st.sampled_from([0.0, 0.1, 1.0]))
def test_largest_lr_is_that_of_every_place_in_the_interval(counted: list[int], from_genesis: bool, budget: int,
                                                           warmup: float, final: float) -> None:
    run = RunSection(token_budget=budget, inner_steps=3)
    law = law_of(MATRIX, run=run, lr=0.02, warmup=warmup, final_lr=final)
    history = list(itertools.accumulate([0, *counted[1:]] if from_genesis else counted))
    last = max((b - a for a, b in itertools.pairwise(history)), default=0)
    places = [history[0] + (history[-1] + 2 * last - history[0]) * i / 200 for i in range(201)]
    rates = [learning_rate(law.config.inner, min(1.0, place / budget)) for place in places]
    found = largest_lr(law, history)
    assert max(rates) <= found * (1 + 1e-12) <= 0.02 * (1 + 1e-12)
    if history[0] and all(counted[1:]) and len(counted) > 1:  # nothing had to be assumed
        width = (places[1] - places[0]) / budget
        steepest = 0.02 * max(1 / warmup if warmup else 0.0, math.pi / 2 / (1 - warmup))
        assert found <= max(rates) + steepest * width


def test_largest_lr_by_hand() -> None:
    run = RunSection(token_budget=1000, inner_steps=2, min_peers=3)
    law = law_of(MATRIX, run=run, lr=0.1, warmup=0.5, final_lr=0.1, batch_size=1)
    law = Law(dataclasses.replace(law.config, model=ModelConfig(seq_len=10)), law.layout)
    assert largest_lr(law, [0]) == pytest.approx(0.1 * 0.12 / 0.5)  # two assumed entries of 2 x 10 x 3 tokens
    assert largest_lr(law, [0, 100, 200]) == pytest.approx(0.1 * 0.4 / 0.5)
    assert largest_lr(law, [400, 500, 600]) == 0.1
    assert largest_lr(law, [600, 700]) == learning_rate(law.config.inner, 0.6)
    assert largest_lr(law, [1200, 1300]) == pytest.approx(0.01)


# -- a sender clips what it says


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(CODECS), st.integers(0, 2**32), st.sampled_from(["normal", "heavy", "sparse", "constant", "half"]),
       st.floats(1e-3, 1e3), st.sampled_from([0.0, 0.9, 1.0]), st.integers(1, 40))
def test_no_clipped_part_is_over_its_limit(up: str, seed: int, form: str, size: float, beta: float, h: int) -> None:
    law = law_of(kit.SHAPES, up, beta)
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(law.layout.n_elements, generator=rng)
    match form:
        case "heavy":
            x = x**5
        case "sparse":
            x = x * (torch.rand(x.shape, generator=rng) < 0.01)
        case "constant":
            x = torch.ones_like(x)
        case "half":  # absmax at its worst: one large element and all others half a step from zero
            x = torch.full_like(x, 0.5 / 7 * 1.001)
            x[:: 512] = 1.0
    x, anchor = x * size, torch.zeros_like(x)
    limits = step_limits(law, anchor, 0.02)
    clipped = clip_to_limits(law.layout, x, limits, h)
    payload, before = law.layout.encode(clipped), x.clone()
    for at, part in enumerate(law.layout.parts):
        decoded = law.layout.decode_up(at, law.layout.up_slice(payload, at, at + 1))
        assert not over_limit(decoded, h * float(limits[at]))
        said, meant = clipped[part.start : part.stop], x[part.start : part.stop]
        torch.testing.assert_close(said * meant.norm(), meant * said.norm(), rtol=1e-4, atol=1e-5 * float(meant.norm()) ** 2)
    assert torch.equal(x, before)


def test_what_is_within_its_limits_is_not_touched() -> None:
    law = law_of(kit.SHAPES, "statistical4")
    x = torch.randn(law.layout.n_elements) * 1e-4
    limits = step_limits(law, torch.zeros_like(x), 0.02)
    assert clip_to_limits(law.layout, x, limits, 8) is x
    zero = clip_to_limits(law.layout, x, limits * 0, 8)
    assert not zero.any() and not over_limit(zero, 0.0) and over_limit(x, 0.0)


def test_the_slack_covers_other_machines_sums_and_little_else() -> None:
    part = torch.full((10_000,), 0.01)
    assert not over_limit(part, 1.0) and not over_limit(part, 1 / 1.0009) and over_limit(part, 1 / 1.0011)
    assert over_limit(torch.full((100,), 3e38), 1e38)  # fp32 could not square it


# -- honest runs


@dataclasses.dataclass
class Said:
    """One packet of a trainer, as its reducers see it."""

    round: int
    peer: int
    h: int
    decoded: list[Tensor]  # by part
    limits: list[float]  # h x step_limits, by part

    @property
    def largest_share(self) -> float:
        """Of its limit, of the part nearest to it."""
        return max(float(part.double().norm()) / limit for part, limit in zip(self.decoded, self.limits, strict=True))


def honest_run(law: Law, folder: Path, step_s: Sequence[float]) -> list[Said]:
    """All packets of a swarm of trainers that don't clip, one trainer for each of `step_s`."""
    said: list[Said] = []
    network, trainers = LocalNetwork(), list[Trainer]()
    history: dict[int, int] = {}

    def watch(peer: int, event: dict[str, Any]) -> None:
        if event["event"] != "begin":
            return
        tip, anchor, round_ = trainers[peer].state.tip, trainers[peer].state.anchor, trainers[peer]._round
        assert round_ is not None
        history[tip.k] = tip.tokens
        known = [history[k] for k in sorted(history) if tip.k - LR_HISTORY <= k <= tip.k]
        limits = step_limits(law, anchor, largest_lr(law, known)) * round_.packet.inner_steps
        pieces = law.layout.up_parts(0, len(law.layout.parts), round_.packet.payload)
        decoded = [law.layout.decode_up(at, piece) for at, piece in enumerate(pieces)]
        said.append(Said(tip.k + 1, peer, round_.packet.inner_steps, decoded, limits.tolist()))

    for i in range(len(step_s)):
        trainers.append(local_trainer(law, Identity(bytes([i + 1]) * 32), network, corpus(), folder / str(i),
                                      record=lambda event, i=i: watch(i, event)))
    run_swarm(network, trainers, step_s)
    assert all(trainer.ended for trainer in trainers)
    return said


def honest_law(up: str, peers: int, rounds: int, *, optimizer: str = "muon", scale: str = "spectral", decay: float = 0.0,
               inner_steps: int = 4, part_elements: int = 4096) -> Law:
    lr = 0.1 if scale == "rms" else 0.02  # 0.2 lr is the RMS of an update
    config = RunConfig(
        run=RunSection(inner_steps=inner_steps, min_peers=peers, clock="time", overlap="keep", window_s=5.0,
                       token_budget=rounds * peers * inner_steps * 2 * 16),
        model=ModelConfig(d_model=32, n_layers=1, n_heads=2, d_mlp=64, seq_len=16),
        outer=OuterConfig(eta=0.7, mu=0.6), codec=CodecConfig(up=up, part_elements=part_elements),
        inner=InnerConfig(batch_size=2, optimizer=optimizer, scale=scale, weight_decay=decay, lr=lr),
    )
    return Law.of(config)


KINDS_OF_RUN = [("muon", "spectral", 0.0), ("muon", "rms", 0.1), ("adamw", "spectral", 0.1), ("muon", "spectral", 0.1)]


@pytest.mark.parametrize("up,kind", [(up, KINDS_OF_RUN[i % len(KINDS_OF_RUN)]) for i, up in enumerate(CODECS)])
def test_no_honest_packet_is_over_its_limit(tmp_path: Path, up: str, kind: tuple[str, str, float]) -> None:
    """Over 20 rounds of two peers, one of them slower; 200 rounds of every combination were run by hand once."""
    optimizer, scale, decay = kind
    law = honest_law(up, 2, 36, optimizer=optimizer, scale=scale, decay=decay, inner_steps=2)
    said = honest_run(law, tmp_path, [0.05, 0.09])
    assert max(packet.round for packet in said) >= 20 and len({packet.h for packet in said}) > 1
    assert max(packet.largest_share for packet in said) <= 1.0


# -- a reducer's statistics


def test_clip_factors_by_hand() -> None:
    assert clip_factors([1.0, 100.0], [8, 8]) == [1.0, 1.0]  # two can't outvote each other
    assert clip_factors([8.0, 8.0, 24.0], [8, 8, 8]) == [1.0, 1.0, 0.5]
    assert clip_factors([1.0, 1.0, 2.0, 4.0], [1, 1, 1, 1]) == [1.0, 1.0, 0.75, 0.375]  # the lower median of four
    assert clip_factors([8.0, 8.0, 8.0, 4.0], [8, 8, 8, 1]) == [1.0, 1.0, 1.0, 1.0]  # short of steps, longer a step
    assert clip_factors([8.0, 8.0, 8.0, 24.0], [8, 8, 8, 1])[3] == 0.5
    assert clip_factors([0.0, 0.0, 0.0], [1, 2, 3]) == [1.0, 1.0, 1.0]
    assert clip_factors([0.0, 0.0, 5.0, 9.0], [1, 1, 1, 1]) == [1.0] * 4  # rows that two of four had a use for
    assert clip_factors([0.0, 1.0, 1.0, 3.0], [9, 1, 1, 1]) == [1.0, 1.0, 1.0, 0.5]


def test_who_is_far_longer_is_not_counted() -> None:
    for up, judged in (("statistical4", True), ("statistical2", True), ("absmax2", False), ("topk", False)):
        law = kit.law(up=up)
        layout, adamw = law.layout, InnerConfig(optimizer="adamw")
        matrix = next(i for i, part in enumerate(layout.parts) if part.up.name == up)
        assert far_longer(layout, matrix, law.config.inner, [1.0, 0.34, 0.33]) == [False, False, judged]
        assert not any(far_longer(layout, matrix, adamw, [1.0, 0.01])), "its honest senders differ as much"
        gain = next(i for i, part in enumerate(layout.parts) if len(layout.shapes[part.tensor]) == 1)
        assert far_longer(layout, gain, law.config.inner, [1.0, 0.17, 0.16]) == [False, False, True], "it travels as fp32"


@given(st.lists(st.tuples(st.just(0.0) | st.floats(1e-6, 1e6), st.integers(1, 40)), max_size=12))
def test_clipping_holds_what_it_says_and_spares_most(rows: list[tuple[float, int]]) -> None:
    factors = clip_factors([norm for norm, _ in rows], [h for _, h in rows])
    speaking = [row for row in rows if row[0] > 0]
    if len(speaking) < 3:
        assert factors == [1.0] * len(rows)
        return
    a_step = sorted(norm / h for norm, h in speaking)[(len(speaking) - 1) // 2]
    typical = sorted(h for _, h in speaking)[(len(speaking) - 1) // 2]
    for (norm, h), factor in zip(rows, factors, strict=True):
        assert 0 < factor <= 1 and norm * factor <= 1.5 * a_step * max(h, typical) * (1 + 1e-12)
        assert factor == 1 or norm > 1.5 * a_step * h
    assert sum(factor < 1 for factor in factors) <= len(speaking) // 2


@settings(max_examples=100, deadline=None)
@given(st.integers(3, 13), st.integers(0, 2**32))
def test_trimmed_mean_is_sorted_and_cut_by_columns(n: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    values = torch.randn(n, 50, generator=rng)
    values[:, :10] = values[:, :10].round()  # ties
    cut = max(1, n // 4)
    oracle = torch.tensor([sum(sorted(column)[cut : n - cut]) / (n - 2 * cut) for column in values.double().T.tolist()])
    found = trimmed_mean(values)
    torch.testing.assert_close(found.double(), oracle.double(), rtol=1e-6, atol=1e-6)
    assert torch.equal(found, trimmed_mean(values[torch.randperm(n, generator=rng)]))
    liars = values.clone()
    liars[:cut] = 1e30
    assert (trimmed_mean(liars) <= values[cut:].max(0).values).all()


def test_trimmed_mean_by_hand() -> None:
    values = torch.tensor([[1.0, 0.0], [2.0, 5.0], [9.0, -7.0]])
    assert trimmed_mean(values).tolist() == [2.0, 0.0]
    assert trimmed_mean(torch.cat([values, torch.tensor([[4.0, 1.0]])])).tolist() == [3.0, 0.5]


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 8), st.integers(0, 2**32), st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_cosines_are_those_of_the_whole_vectors(n: int, seed: int, sizes: list[int]) -> None:
    rng = torch.Generator().manual_seed(seed)
    parts = [torch.randn(n, size, generator=rng) for size in sizes]
    cosines = Cosines(n)
    for part in parts:
        cosines.add(part)
    whole = torch.cat(parts, 1).double()
    others = whole.sum(0) - whole
    oracle = torch.nn.functional.cosine_similarity(whole, others, dim=1)
    torch.testing.assert_close(torch.tensor(cosines.with_others(), dtype=torch.float64), oracle, rtol=1e-6, atol=1e-6)
    assert cosines.elements == sum(sizes)


def test_who_says_nothing_has_no_direction() -> None:
    cosines = Cosines(4)
    assert cosines.with_others() == [0.0] * 4
    cosines.add(torch.tensor([[1.0, 0.0], [2.0, 0.0], [-3.0, 0.0], [0.0, 0.0]]))
    assert cosines.with_others() == [-1.0, -1.0, -1.0, 0.0]
    turned = Cosines(4)
    turned.add(torch.tensor([[1.0, 0.2], [1.0, -0.2], [1.0, 0.0], [-1.8, 0.0]]))
    found = turned.with_others()
    assert found[3] < -0.99 and min(found[:3]) > 0
