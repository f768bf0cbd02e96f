"""Losses and the objective against independent float64 references in numpy, and against finite differences."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.algorithms import (
    ObjectiveConfig,
    Tokens,
    aggregation_weights,
    cispo,
    decoupled_ppo,
    grpo,
    k1,
    k2,
    k3,
    keep_mask,
    objective,
    ppo,
    tis,
    topr,
    weighted_topr,
)

SHAPE = (4, 6)


def sample(seed: int, spread: float = 0.6) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    base = rng.uniform(-3.0, -0.05, SHAPE)
    near = lambda: torch.from_numpy(np.minimum(base + rng.normal(0, spread, SHAPE), -1e-3))  # noqa: E731
    advantages = rng.normal(0, 1, (SHAPE[0], 1)) * np.ones(SHAPE)
    return {
        "logprobs": near(),
        "behaviour": near(),
        "proximal": near(),
        "reference": near(),
        "advantages": torch.from_numpy(advantages),
        "mask": torch.from_numpy(rng.random(SHAPE) < 0.7),
    }


# Independent references: scalar arithmetic in float64, written from the formulas, token by token.


def ref_ppo(pi: float, mu: float, adv: float, low: float, high: float) -> float:
    r = np.exp(pi) / np.exp(mu)
    if adv >= 0:
        return -adv * min(r, 1 + high)
    return -adv * max(r, 1 - low)


def ref_tis(pi: float, mu: float, adv: float, cap: float) -> float:
    return -min(np.exp(pi) / np.exp(mu), cap) * adv * pi


def ref_cispo(pi: float, mu: float, adv: float, low: float, high: float) -> float:
    return -min(max(np.exp(pi) / np.exp(mu), 1 - low), 1 + high) * adv * pi


def ref_topr(pi: float, mu: float, adv: float, cap: float, good: float, bad: float) -> float:
    if adv >= 0:
        return -good * adv * pi
    return -bad * min(np.exp(pi) / np.exp(mu), cap) * adv * pi


def ref_decoupled(pi: float, prox: float, mu: float, adv: float, low: float, high: float, cap: float) -> float:
    return min(np.exp(prox) / np.exp(mu), cap) * ref_ppo(pi, prox, adv, low, high)


def ref_k3(pi: float, ref: float) -> float:
    x = np.exp(ref) / np.exp(pi)
    return x - 1 - np.log(x)


def each(function: Any, *tensors: torch.Tensor) -> np.ndarray[Any, Any]:
    return np.vectorize(function, otypes=[np.float64])(*(t.numpy() for t in tensors))


CASES: dict[str, tuple[Any, Any]] = {
    "ppo": (
        lambda d: ppo(d["logprobs"], d["behaviour"], d["advantages"], clip_low=0.2, clip_high=0.28),
        lambda pi, mu, prox, ref, adv: ref_ppo(pi, mu, adv, 0.2, 0.28),
    ),
    "grpo": (
        lambda d: grpo(d["logprobs"], d["behaviour"], d["advantages"], d["reference"], beta=0.04),
        lambda pi, mu, prox, ref, adv: ref_ppo(pi, mu, adv, 0.2, 0.2) + 0.04 * ref_k3(pi, ref),
    ),
    "grpo_k1": (
        lambda d: grpo(d["logprobs"], d["behaviour"], d["advantages"], d["reference"], beta=0.1, kl="k1"),
        lambda pi, mu, prox, ref, adv: ref_ppo(pi, mu, adv, 0.2, 0.2) + 0.1 * (pi - ref),
    ),
    "grpo_k2": (
        lambda d: grpo(d["logprobs"], d["behaviour"], d["advantages"], d["reference"], beta=0.1, kl="k2"),
        lambda pi, mu, prox, ref, adv: ref_ppo(pi, mu, adv, 0.2, 0.2) + 0.1 * (pi - ref) ** 2 / 2,
    ),
    "decoupled_ppo": (
        lambda d: decoupled_ppo(d["logprobs"], d["proximal"], d["behaviour"], d["advantages"], cap=1.5),
        lambda pi, mu, prox, ref, adv: ref_decoupled(pi, prox, mu, adv, 0.2, 0.2, 1.5),
    ),
    "tis": (
        lambda d: tis(d["logprobs"], d["behaviour"], d["advantages"], cap=1.3),
        lambda pi, mu, prox, ref, adv: ref_tis(pi, mu, adv, 1.3),
    ),
    "cispo": (
        lambda d: cispo(d["logprobs"], d["behaviour"], d["advantages"], clip_low=0.4, clip_high=0.5),
        lambda pi, mu, prox, ref, adv: ref_cispo(pi, mu, adv, 0.4, 0.5),
    ),
    "topr": (
        lambda d: topr(d["logprobs"], d["behaviour"], d["advantages"]),
        lambda pi, mu, prox, ref, adv: ref_topr(pi, mu, adv, 1.0, 1.0, 1.0),
    ),
    "weighted_topr": (
        lambda d: weighted_topr(
            d["logprobs"], d["behaviour"], d["advantages"], cap=1.2, positive_weight=0.7, negative_weight=1.6
        ),
        lambda pi, mu, prox, ref, adv: ref_topr(pi, mu, adv, 1.2, 0.7, 1.6),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_values_equal_the_reference(name: str, seed: int) -> None:
    data = sample(seed)
    ours, reference = CASES[name]
    expected = each(reference, *(data[k] for k in ("logprobs", "behaviour", "proximal", "reference", "advantages")))
    np.testing.assert_allclose(ours(data).loss.numpy(), expected, atol=1e-6)


def frozen_weight_loss(name: str, data: dict[str, torch.Tensor], moved: torch.Tensor) -> torch.Tensor:
    """The loss at `moved` with every stop-gradient weight held at its value at the data's own log-probabilities."""
    if name.startswith(("ppo", "grpo", "decoupled_ppo")):
        return CASES[name][0]({**data, "logprobs": moved}).loss.sum()
    at_data = CASES[name][0](data).loss / data["logprobs"]
    return (at_data * moved).sum()


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_finite_differences(name: str) -> None:
    data = sample(7)
    variable = data["logprobs"].clone().requires_grad_(True)
    CASES[name][0]({**data, "logprobs": variable}).loss.sum().backward()
    step = 1e-6
    for index in np.ndindex(*SHAPE):
        up, down = data["logprobs"].clone(), data["logprobs"].clone()
        up[index] += step
        down[index] -= step
        slope = (frozen_weight_loss(name, data, up) - frozen_weight_loss(name, data, down)) / (2 * step)
        assert variable.grad is not None
        assert float(variable.grad[index]) == pytest.approx(float(slope), abs=1e-5)


@pytest.mark.parametrize("name", [name for name in CASES if name != "topr"])
def test_bounds_see_the_behaviour_policy(name: str) -> None:
    """A policy far from the behaviour policy is bounded; one equal to it is not."""
    data = sample(1)
    far = {**data, "logprobs": data["behaviour"] + torch.where(data["advantages"] > 0, 2.0, -2.0)}
    if name in ("tis", "weighted_topr"):
        far = {**data, "logprobs": data["behaviour"] + 2.0}
    far["proximal"] = data["behaviour"]
    same = {**data, "logprobs": data["behaviour"], "proximal": data["behaviour"]}
    bounded = CASES[name][0](far).bounded
    assert bool(bounded[data["advantages"] < 0].all() if name == "weighted_topr" else bounded.all())
    assert not bool(CASES[name][0](same).bounded.any())


@pytest.mark.parametrize("name", CASES)
def test_far_ratios_stay_finite(name: str) -> None:
    data = {**sample(2), "logprobs": torch.full(SHAPE, -1e-4, dtype=torch.float64)}
    data["behaviour"] = data["proximal"] = data["reference"] = torch.full(SHAPE, -500.0, dtype=torch.float64)
    assert bool(CASES[name][0](data).loss.isfinite().all())


def test_divergences() -> None:
    data = sample(4)
    pi, ref = data["logprobs"], data["reference"]
    np.testing.assert_allclose(k1(pi, ref), each(lambda p, q: np.log(np.exp(p) / np.exp(q)), pi, ref), atol=1e-9)
    np.testing.assert_allclose(k2(pi, ref), each(lambda p, q: 0.5 * (p - q) ** 2, pi, ref), atol=1e-9)
    np.testing.assert_allclose(k3(pi, ref), each(ref_k3, pi, ref), atol=1e-9)
    assert bool((k3(pi, ref) >= 0).all())


def test_k1_and_k3_estimate_the_true_divergence() -> None:
    pi = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    ref = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    true = (pi * (pi / ref).log()).sum()
    for estimator in (k1, k3):
        assert float((pi * estimator(pi.log(), ref.log())).sum()) == pytest.approx(float(true), abs=1e-12)


def test_token_and_sequence_means() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
    sequence = torch.tensor([5, 5, 9, 11])
    token = aggregation_weights("token_mean", mask, sequence)
    np.testing.assert_allclose(token, mask.numpy() / 6)
    by_sequence = aggregation_weights("sequence_mean", mask, sequence)
    np.testing.assert_allclose(by_sequence[:2], mask[:2].numpy() / 4 / 2)
    np.testing.assert_allclose(by_sequence[2:], mask[2:].numpy() / 2 / 2)


def make_tokens(data: dict[str, torch.Tensor], **given: torch.Tensor) -> Tokens:
    return Tokens(mask=data["mask"], behaviour=data["behaviour"], advantages=data["advantages"], **given)


CONFIGS = [
    ObjectiveConfig(loss="tis", entropy_coef=0.03),
    ObjectiveConfig(loss="ppo", aggregation="sequence_mean"),
    ObjectiveConfig(loss="grpo", kl_coef=0.04),
    ObjectiveConfig(loss="decoupled_ppo"),
    ObjectiveConfig(loss="cispo", mismatch_cap=5.0, outlier=3.0),
]


def run(config: ObjectiveConfig, data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    logprobs = data["logprobs"].clone().requires_grad_(True)
    entropy = -logprobs * 0.5
    tokens = make_tokens(data, proximal=data["proximal"], reference=data["reference"])
    weights = aggregation_weights(config.aggregation, keep_mask(config, tokens), torch.arange(len(logprobs)) // 2)
    total, metrics = objective(config, logprobs, entropy, tokens, weights)
    total.backward()
    assert logprobs.grad is not None
    return total.detach(), logprobs.grad, metrics


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.loss)
@given(seed=st.integers(0, 1000), garbage=st.sampled_from([-np.inf, np.nan, 0.0, -1e30, 700.0]))
@settings(max_examples=15, deadline=None)
def test_masked_tokens_change_nothing(config: ObjectiveConfig, seed: int, garbage: float) -> None:
    data = sample(seed)
    total, gradient, metrics = run(config, data)
    spoiled = dict(data)
    for name in ("logprobs", "behaviour", "proximal", "reference"):
        spoiled[name] = torch.where(data["mask"], data[name], garbage)
    other_total, other_gradient, other_metrics = run(config, spoiled)
    assert float(total) == pytest.approx(float(other_total), abs=1e-9)
    torch.testing.assert_close(gradient, other_gradient)
    assert not bool(gradient[~data["mask"]].any())
    assert {k: float(v) for k, v in metrics.items()} == pytest.approx(
        {k: float(v) for k, v in other_metrics.items()}, abs=1e-6
    )


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.loss)
def test_micro_batches_add_up(config: ObjectiveConfig) -> None:
    data = sample(3)
    tokens = make_tokens(data, proximal=data["proximal"], reference=data["reference"])
    weights = aggregation_weights(config.aggregation, keep_mask(config, tokens), torch.arange(SHAPE[0]))
    whole, metrics = objective(config, data["logprobs"], -data["logprobs"], tokens, weights)
    parts = []
    for rows in (slice(0, 1), slice(1, 4)):
        cut = {name: value[rows] for name, value in data.items()}
        part = make_tokens(cut, proximal=cut["proximal"], reference=cut["reference"])
        parts.append(objective(config, cut["logprobs"], -cut["logprobs"], part, weights[rows]))
    assert float(sum(total for total, _ in parts)) == pytest.approx(float(whole), abs=1e-6)
    for name, value in metrics.items():
        joined = max if name.endswith("_max") else sum
        assert float(joined(m[name] for _, m in parts)) == pytest.approx(float(value), abs=1e-6)


def test_objective_equals_the_reference() -> None:
    config = ObjectiveConfig(
        loss="ppo", kl="k2", kl_coef=0.1, entropy_coef=0.05, mismatch_cap=1.4, outlier=2.0, aggregation="token_mean"
    )
    data = sample(11)
    tokens = make_tokens(data, proximal=data["proximal"], reference=data["reference"])
    entropy = -data["logprobs"]
    weights = aggregation_weights("token_mean", keep_mask(config, tokens), torch.arange(SHAPE[0]))
    total, metrics = objective(config, data["logprobs"], entropy, tokens, weights)
    expected, count, gaps = 0.0, 0, []
    for index in np.ndindex(*SHAPE):
        value = {name: float(tensor[index]) for name, tensor in data.items()}
        engine = np.exp(value["proximal"] - value["behaviour"])
        if not value["mask"] or not 0.5 <= engine <= 2.0:
            continue
        count += 1
        gaps.append(abs(value["logprobs"] - value["behaviour"]))
        expected += (
            min(engine, 1.4) * ref_ppo(value["logprobs"], value["proximal"], value["advantages"], 0.2, 0.28)
            + 0.1 * 0.5 * (value["logprobs"] - value["reference"]) ** 2
            - 0.05 * float(entropy[index])
        )
    assert 0 < count < int(data["mask"].sum())
    assert float(total) == pytest.approx(expected / count, abs=1e-6)
    assert float(metrics["behaviour_gap"]) == pytest.approx(np.mean(gaps), abs=1e-6)
    assert float(metrics["behaviour_gap_max"]) == pytest.approx(max(gaps), abs=1e-6)


# The algorithms once more, from pi, mu and the proximal policy, with the bounds that the objective gives them.
OWN_CAP = {"tis": 2.0, "topr": 1.0, "weighted_topr": 1.0, "decoupled_ppo": 5.0}
OWN_CLIP = {"cispo": (1.0, 4.0)}


def ref_token(config: ObjectiveConfig, pi: float, prox: float, mu: float, adv: float) -> float:
    """What one token costs, the mismatch correction included."""
    engine = 1.0 if config.mismatch_cap is None else min(np.exp(prox - mu), config.mismatch_cap)
    against = mu if config.mismatch_cap is None else prox
    cap = OWN_CAP.get(config.loss, 0.0) if config.cap is None else config.cap
    low, high = OWN_CLIP.get(config.loss, (0.2, 0.28))
    match config.loss:
        case "ppo" | "grpo":
            return engine * ref_ppo(pi, against, adv, low, high)
        case "decoupled_ppo":
            weight = min(np.exp(prox - mu), cap) if config.mismatch_cap is None else engine
            return weight * ref_ppo(pi, prox, adv, low, high)
        case "tis":
            return engine * ref_tis(pi, against, adv, cap)
        case "cispo":
            return engine * ref_cispo(pi, against, adv, low, high)
        case "topr":
            return engine * ref_topr(pi, against, adv, cap, 1.0, 1.0)
        case "weighted_topr":
            return engine * ref_topr(pi, against, adv, cap, config.positive_weight, config.negative_weight)
        case other:
            raise AssertionError(other)


@pytest.mark.parametrize("loss", ["ppo", "grpo", "decoupled_ppo", "tis", "cispo", "topr", "weighted_topr"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize(("mismatch_cap", "outlier"), [(None, None), (5.0, None), (1.2, 2.0), (None, 1.5)])
def test_every_loss_takes_every_knob(
    loss: Any, aggregation: Any, mismatch_cap: float | None, outlier: float | None
) -> None:
    config = ObjectiveConfig(
        loss=loss,
        aggregation=aggregation,
        mismatch_cap=mismatch_cap,
        outlier=outlier,
        kl_coef=0.1 if loss == "grpo" else 0.0,
        positive_weight=0.7,
    )
    data = sample(23)
    reference = data["reference"] if config.needs_reference else None
    tokens = make_tokens(data, proximal=data["proximal"], **({} if reference is None else {"reference": reference}))
    weights = aggregation_weights(config.aggregation, keep_mask(config, tokens), torch.arange(SHAPE[0]))
    total, metrics = objective(config, data["logprobs"], -data["logprobs"], tokens, weights)
    rows: list[list[float]] = [[] for _ in range(SHAPE[0])]
    for row, column in np.ndindex(*SHAPE):
        value = {name: float(tensor[row, column]) for name, tensor in data.items()}
        engine = np.exp(value["proximal"] - value["behaviour"])
        if not value["mask"] or (outlier is not None and not 1 / outlier <= engine <= outlier):
            continue
        cost = ref_token(config, value["logprobs"], value["proximal"], value["behaviour"], value["advantages"])
        rows[row].append(cost + config.kl_coef * ref_k3(value["logprobs"], value["reference"]))
    if aggregation == "token_mean":
        expected = np.mean([cost for row in rows for cost in row])
    else:
        expected = np.mean([np.mean(row) for row in rows if row])
    assert float(total) == pytest.approx(float(expected), abs=1e-6)
    assert ("mismatch" in metrics) == (mismatch_cap is not None)


def test_metrics_say_how_far_apart_trainer_and_engine_are() -> None:
    data = sample(5, spread=0.1)
    tokens = make_tokens(data)
    weights = aggregation_weights("token_mean", data["mask"], torch.arange(SHAPE[0]))
    _, metrics = objective(ObjectiveConfig(loss="ppo"), data["logprobs"], -data["logprobs"], tokens, weights)
    live = data["mask"].numpy()
    pi, mu = data["logprobs"].numpy()[live], data["behaviour"].numpy()[live]
    r = np.exp(pi - mu)
    clipped = np.where(data["advantages"].numpy()[live] >= 0, r > 1.28, r < 0.8)
    expected = {
        "behaviour_gap": np.abs(pi - mu).mean(),
        "behaviour_gap_max": np.abs(pi - mu).max(),
        "behaviour_kl": (r - 1 - np.log(r)).mean(),
        "ratio": r.mean(),
        "bounded": clipped.mean(),
        "entropy": -pi.mean(),
    }
    assert {name: float(metrics[name]) for name in expected} == pytest.approx(expected, abs=1e-6)


def test_shapes_that_would_be_broadcast_are_refused() -> None:
    pi, other = torch.zeros(3, 3), torch.zeros(3)
    for loss in (ppo, tis, cispo, topr, weighted_topr):
        with pytest.raises(ValueError, match=r"behaviour has shape \(3,\), logprobs \(3, 3\)"):
            loss(pi, other, pi)
        with pytest.raises(ValueError, match="advantages has shape"):
            loss(pi, pi, other)
    with pytest.raises(ValueError, match="reference has shape"):
        grpo(pi, pi, pi, other)
    with pytest.raises(ValueError, match="one for each of the 3 rows"):
        aggregation_weights("sequence_mean", pi.bool(), torch.zeros(2))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_nothing_to_train_is_zero_and_finite(aggregation: Literal["token_mean", "sequence_mean"]) -> None:
    empty = torch.zeros(0, 4)
    assert aggregation_weights(aggregation, empty.bool(), torch.zeros(0)).shape == (0, 4)
    data = sample(0)
    data["mask"] = torch.zeros_like(data["mask"])
    weights = aggregation_weights(aggregation, data["mask"].bool(), torch.arange(len(data["mask"])))
    logprobs = torch.full_like(weights, -math.inf).requires_grad_()
    inputs = Tokens(mask=data["mask"].bool(), behaviour=torch.full_like(weights, math.nan), advantages=weights)
    total, metrics = objective(ObjectiveConfig(), logprobs, torch.full_like(weights, math.nan), inputs, weights)
    total.backward()
    assert float(total.detach()) == 0 and logprobs.grad is not None and bool((logprobs.grad == 0).all())
    assert all(math.isfinite(float(value)) for value in metrics.values())
