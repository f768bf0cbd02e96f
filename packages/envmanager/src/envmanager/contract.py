"""The five-tuple at the environment's edge: what comes in is checked and made plain, once.

Invariant: whatever passes is encodable text, finite rewards and real booleans; whatever does not is a
DataError that names the field, the value and the remedy
(test_envmanager_contract.py::test_anything_is_plain_or_a_data_error).
"""

import math
import reprlib
import sys
from collections.abc import Mapping
from typing import Any

from envmanager.errors import DataError, RewardError

# Deeper containers in an info are dropped: metadata is for a handful of facts, not for a world's state.
MAX_DEPTH = 4
LARGEST = sys.float_info.max


def shown(value: Any) -> str:
    """A value for a message: its type, and its start."""
    if isinstance(value, int) and abs(value) > LARGEST:  # Python refuses to print integers of many digits
        return f"{type(value).__name__} of {value.bit_length()} bits"
    return f"{type(value).__name__} {reprlib.repr(value)}"


def _unboxed(value: Any) -> Any:
    """A numpy scalar as the Python number it holds."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def encodable(text: str) -> bool:
    """Lone surrogates are legal in a str but in no file."""
    return text.isascii() or text.encode(errors="replace").decode() == text


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise DataError(f"observation is {shown(value)}; return it as str (decode bytes, describe arrays in words)")
    if not encodable(value):
        raise DataError(f"observation {shown(value)} has lone surrogates; decode with errors='replace'")
    return str(value)


def _flag(name: str, value: Any) -> bool:
    value = _unboxed(value)
    if not isinstance(value, bool):
        raise DataError(f"{name} is {shown(value)}; return True or False")
    return value


def _finite(value: Any) -> float | None:
    """The number, or None where it is none or not finite."""
    value = _unboxed(value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and -LARGEST <= value <= LARGEST else None


def _reward(value: Any) -> float:
    if (number := _finite(value)) is None:
        raise DataError(f"reward is {shown(value)}; return a finite float")
    return number


def check_score(value: Any) -> float:
    """What a reward client returned, checked."""
    if (number := _finite(value)) is None:
        raise RewardError(f"the reward is {shown(value)}; return a finite float")
    return number


def _info(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise DataError(f"info is {shown(value)}; return a dict, {{}} if there is nothing to say")
    return dict(value)  # now: reading it later must not fail


def _tuple(what: str, value: Any, names: str) -> tuple[Any, ...]:
    count = names.count(",") + 1
    if not isinstance(value, tuple | list) or len(value) != count:
        size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
        raise DataError(f"{what} returned {shown(value)}{size}; return the {count}-tuple ({names})")
    return tuple(value)


def check_key(value: Any) -> None:
    """Refuse what cannot name a task instance everywhere: in logs, in messages to processes and servers."""
    if not isinstance(value, str) or not encodable(value):
        raise DataError(f"the key is {shown(value)}; name task instances by str, without lone surrogates")


def check_task(value: Any) -> str:
    """The name by which an environment's generation is routed, checked."""
    if not isinstance(value, str) or not encodable(value):
        raise DataError(f"task is {shown(value)}; name it by str, without lone surrogates")
    return str(value)


def check_reset(value: Any) -> tuple[str, dict[str, Any]]:
    """What `reset` returned, checked."""
    observation, info = _tuple("reset", value, "observation, info")
    return _text(observation), _info(info)


def check_step(value: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """What `step` returned, checked."""
    names = "observation, reward, terminated, truncated, info"
    observation, reward, terminated, truncated, info = _tuple("step", value, names)
    return (
        _text(observation),
        _reward(reward),
        _flag("terminated", terminated),
        _flag("truncated", truncated),
        _info(info),
    )


_DROP = object()


def _plain(value: Any, depth: int) -> Any:
    value = _unboxed(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value) if encodable(value) else _DROP
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else _DROP
    if isinstance(value, float):
        return value if math.isfinite(value) else _DROP
    if depth == 0:
        return _DROP
    if isinstance(value, Mapping):
        return plain(value, depth - 1)
    if isinstance(value, list | tuple):
        items = [_plain(item, depth - 1) for item in value]
        return _DROP if any(item is _DROP for item in items) else items
    return _DROP


def _written(value: Any, depth: int) -> Any:
    """What cannot even be read is dropped too."""
    try:
        return _plain(value, depth)
    except Exception:
        return _DROP


def plain(info: Mapping[str, Any], depth: int = MAX_DEPTH) -> dict[str, Any]:
    """The entries of an info that can be written down: numbers, text, and short containers of them."""
    kept = ((key, _written(value, depth)) for key, value in info.items() if isinstance(key, str) and encodable(key))
    return {key: value for key, value in kept if value is not _DROP}
