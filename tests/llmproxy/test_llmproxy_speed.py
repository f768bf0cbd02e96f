"""The roofline against formulas written out by hand, and against what is known of the devices."""

from __future__ import annotations

import pytest

from llmproxy.sim import H20, H800, Rates, Roofline, Shape

DENSE = Shape(parameters=8e9, layers=36, heads=32, kv_heads=8, head_dim=128)
SPARSE = Shape(parameters=30e9, layers=48, heads=32, kv_heads=4, head_dim=128, active=3e9)


def plain(device: object = H800, shape: Shape = DENSE, **options: float) -> Roofline:
    """Peaks reached in full and no overheads."""
    return Roofline(device, shape, **({"compute": 1.0, "memory": 1.0, "overhead": 0.0} | options))  # type: ignore[arg-type]


def test_decoding_is_bound_by_reading_weights_then_caches() -> None:
    pace = plain().pace(1, 0.0, 0.0)
    assert pace.base == pytest.approx(16e9 / 3.35e12) and pace.chunk == 0.0
    assert pace.slope == pytest.approx(2 * 36 * 8 * 128 * 2 / 3.35e12)
    # H20 reads faster: better for decoding in spite of a seventh of the arithmetic.
    assert plain(H20).pace(16, 0.0, 0.0).base < plain(H800).pace(16, 0.0, 0.0).base


def test_a_large_batch_is_bound_by_arithmetic() -> None:
    pace = plain(batch=10_000).pace(2_000, 0.0, 0.0)
    assert pace.base == pytest.approx(2 * 8e9 * 2_000 / 989.5e12)


def test_prefill_is_bound_by_arithmetic_and_grows_with_the_context() -> None:
    pace = plain().pace(0, 4_096.0, 2_048.0)
    products, attention = 2 * 8e9 * 4_096, 4 * 36 * 32 * 128 * 4_096 * 2_048
    assert pace.chunk == 4_096 and pace.base == pytest.approx((products + attention) / 989.5e12)
    assert plain(H20).pace(0, 4_096.0, 2_048.0).base == pytest.approx(pace.base * 989.5 / 148)


def test_a_step_has_a_limited_number_of_tokens() -> None:
    assert plain(chunk=2_048).pace(48, 100_000.0, 0.0).chunk == 2_000
    assert plain(chunk=16).pace(48, 100_000.0, 0.0).chunk == 1


def test_experts_that_no_token_chose_are_not_read() -> None:
    one, many = plain(shape=SPARSE).pace(1, 0.0, 0.0), plain(shape=SPARSE).pace(200, 0.0, 0.0)
    assert one.base == pytest.approx(2 * 3e9 / 3.35e12)
    assert 2 * 29e9 / 3.35e12 < many.base < 2 * 30e9 / 3.35e12


def test_tensor_parallel_divides_the_work_and_pays_for_the_sums() -> None:
    free, paid = plain(tensor_parallel=4, hop=0.0), plain(tensor_parallel=4)
    alone = plain().pace(8, 0.0, 0.0)
    assert alone.base / 4 < free.pace(8, 0.0, 0.0).base < alone.base / 3.9
    assert paid.pace(8, 0.0, 0.0).base - free.pace(8, 0.0, 0.0).base == pytest.approx(2 * 36 * 1e-5)
    assert free.pace(8, 0.0, 0.0).slope == pytest.approx(alone.slope / 4)
    assert plain(tensor_parallel=2).transfer(1_000) == pytest.approx(plain().transfer(1_000) / 2)


def test_caches_fill_what_the_weights_leave() -> None:
    assert plain().capacity == pytest.approx((0.9 * 80e9 - 16e9) / (2 * 36 * 8 * 128 * 2))
    with pytest.raises(ValueError, match="raise tensor_parallel"):
        _ = plain(shape=Shape(parameters=70e9, layers=80, heads=64, kv_heads=8, head_dim=128)).capacity


def test_a_handed_over_cache_crosses_the_network() -> None:
    assert plain().transfer(10_000) == pytest.approx(10_000 * DENSE.kv_bytes / 50e9)


def test_rates_are_what_they_say() -> None:
    rates = Rates(prefill=100.0, decode=10.0, decode_total=40.0, handoff=50.0)
    for batch, step in ((0, 0.1), (1, 0.1), (4, 0.1), (8, 0.2)):
        pace = rates.pace(batch, 1_000.0, 0.0)
        assert pace.base == pytest.approx(step) and pace.slope == 0.0
        assert pace.chunk / pace.base == pytest.approx(100.0)
    assert rates.transfer(100.0) == pytest.approx(2.0)
