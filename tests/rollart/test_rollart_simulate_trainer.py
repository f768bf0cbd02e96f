"""A train step takes its work over what the devices reach."""

from __future__ import annotations

import pytest

from llmproxy.sim import Shape
from rollart.simulate.trainer import Passes, Rates, SimTrainer, forward_flops, swap_seconds

SHAPE = Shape(8e9, 36, 32, 8, 128)


def test_operations_are_two_a_parameter_and_token_and_attention_by_the_square() -> None:
    assert forward_flops(SHAPE, [1000]) == pytest.approx(2 * 8e9 * 1000 + 2 * 36 * 32 * 128 * 1000**2)
    assert forward_flops(SHAPE, [500, 500]) < forward_flops(SHAPE, [1000])


def test_the_passes_beside_the_update_are_counted() -> None:
    full = SimTrainer(SHAPE, Rates(flops=1e15), Passes(), None).seconds([1000])
    bare = SimTrainer(SHAPE, Rates(flops=1e15), Passes(False, False, False), None).seconds([1000])
    assert full / bare == pytest.approx(6 / 3)


def test_experts_that_are_not_active_cost_nothing() -> None:
    sparse = Shape(30e9, 36, 32, 8, 128, active=3e9)
    assert forward_flops(sparse, [10]) < forward_flops(Shape(30e9, 36, 32, 8, 128), [10]) / 9


def test_sharing_devices_moves_engine_and_trainer_state() -> None:
    assert swap_seconds(SHAPE, 8, 1, 50e9) == pytest.approx((2 * 8e9 + 18 * 8e9 / 8) / 50e9)
