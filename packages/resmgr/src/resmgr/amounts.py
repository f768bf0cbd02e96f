"""Amounts: units outside, whole thousandths of a unit inside, so that sums are exact."""

import math
from typing import TypeGuard

from resmgr.errors import Invalid

UNIT = 1000


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def to_milli(field: str, amount: float) -> int:
    """The amount in thousandths; a positive multiple of 0.001 or `Invalid`."""
    if not is_number(amount) or not math.isfinite(amount) or amount <= 0:
        raise Invalid(f"{field}={amount!r} must be a positive, finite number of units")
    milli = round(amount * UNIT)
    if not math.isclose(milli, amount * UNIT, rel_tol=1e-9) or milli == 0:
        raise Invalid(f"{field}={amount!r} must be a multiple of 0.001 units")
    if milli > 10**12:
        raise Invalid(f"{field}={amount!r} must be at most one billion units")
    return milli


def to_units(milli: int) -> float:
    return milli / UNIT
