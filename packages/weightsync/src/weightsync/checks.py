"""What is refused before anything is read or written: numbers that mean nothing."""

from __future__ import annotations

from weightsync.errors import BadConfig

__all__ = ["check_count", "check_seconds", "check_version"]

# What a manifest can say (signed 64 bits, so that readers in any language can hold it).
_HIGHEST = (1 << 63) - 1


def check_version(version: object) -> None:
    if type(version) is not int or not 0 <= version <= _HIGHEST:
        raise BadConfig(f"version is {version!r}; use a whole number from 0 to {_HIGHEST}")


def check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise BadConfig(f"{name} is {value!r}; use a whole number of at least 1")


def check_seconds(name: str, value: object, *, positive: bool = False) -> None:
    """`inf` is for ever; NaN is nothing."""
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (value > 0 or (value == 0 and not positive))
    ):
        return
    raise BadConfig(f"{name} is {value!r}; give seconds, {'more than 0' if positive else 'from 0 on'}")
