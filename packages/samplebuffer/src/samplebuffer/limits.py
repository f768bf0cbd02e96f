"""How much may be alive, how old it may grow, and how often it may fail.

Invariant: `capacity >= batch_groups`, so that a batch always fits (tests/samplebuffer/test_samplebuffer_limits.py).
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor, inf

import msgspec

from samplebuffer.errors import InvalidConfig


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a buffer. `alpha` is kept as it was written, so that 0.57 of 100 groups is 57, not 56. Without
    `evict` staleness is bounded when a group is opened, and never again.
    """

    batch_groups: int
    group_size: int
    alpha: str
    spare_groups: int
    spare_members: int
    max_replacements: int
    evict: bool = True

    def oldest(self, served: int) -> int:
        """The lowest start version that stays when `served` is."""
        return served - self.staleness if self.evict else 0

    @property
    def staleness(self) -> int:
        """The bound on `served version - start version`: ceil(alpha)."""
        return ceil(Fraction(self.alpha))

    @property
    def capacity(self) -> int:
        """Groups alive at most: floor((1 + alpha) * batch_groups) + spare_groups."""
        return floor((1 + Fraction(self.alpha)) * self.batch_groups) + self.spare_groups

    @property
    def launch(self) -> int:
        """Members of a group alive at most."""
        return self.group_size + self.spare_members


def make_limits(
    batch_groups: int,
    group_size: int,
    alpha: float | Fraction,
    spare_groups: int,
    spare_members: int,
    max_replacements: int | None,
    evict: bool = True,
) -> Limits:
    """Check the sizes, each with the error that names it."""
    for field, value, least in (
        ("batch_groups", batch_groups, 1),
        ("group_size", group_size, 1),
        ("spare_groups", spare_groups, 0),
        ("spare_members", spare_members, 0),
        ("max_replacements", 0 if max_replacements is None else max_replacements, 0),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InvalidConfig(field, value, f"give an integer of at least {least}")
    if max_replacements is None:
        max_replacements = 2 * (group_size + spare_members)
    if not isinstance(evict, bool):
        raise InvalidConfig("evict", evict, "give True or False")
    return Limits(
        batch_groups=batch_groups,
        group_size=group_size,
        alpha=_exact(alpha),
        spare_groups=spare_groups,
        spare_members=spare_members,
        max_replacements=max_replacements,
        evict=evict,
    )


def check_version(version: int) -> None:
    """Refuse what no version can be."""
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise InvalidConfig("version", version, "give the served version, an integer of at least 0")


def check_timeout(timeout: float | None) -> None:
    """Refuse what nobody can wait for; a time that is over is one."""
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool) and timeout == timeout
    if timeout is not None and not number:
        raise InvalidConfig("timeout", timeout, "give seconds, or None to wait as long as it takes")


def check_callable(field: str, value: object) -> None:
    """Refuse now what could only fail when a group is complete."""
    if value is not None and not callable(value):
        raise InvalidConfig(field, value, "give a function, or None")


def check_patience(patience: float) -> None:
    """Refuse what no share can be."""
    if isinstance(patience, bool) or not isinstance(patience, int | float) or not 0 <= patience < inf:
        raise InvalidConfig("patience", patience, "give a finite number of at least 0")


def _exact(alpha: float | Fraction) -> str:
    try:
        exact = Fraction(str(alpha))
        text = str(exact)  # Python refuses to write integers of thousands of digits
    except (ValueError, ZeroDivisionError):
        exact = Fraction(-1)
    if isinstance(alpha, bool) or exact < 0:
        raise InvalidConfig("alpha", alpha, "give a finite number of at least 0")
    return text
