"""Episodes that were recorded somewhere, to be played again: how many tokens each turn had, and how long it took.

A file of them has one JSON object a line, `{"turns": [[30, 5, 1.5], [31, 6, 2.5]], "reset_s": 1.0, "reward": 0.75}`.
A turn is the tokens of its observation, those of its reply, and the seconds of the environment's step after it
(tests/rollart/test_rollart_simulate_recorded.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean, pstdev
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from rollart.errors import ConfigError
from rollart.simulate.catalog import Profile
from rollart.simulate.spread import Amount, Spread

Tokens = Annotated[int, Meta(ge=0, le=10**9)]


class Recorded(Struct, frozen=True, forbid_unknown_fields=True):
    """An episode."""

    turns: Annotated[tuple[tuple[Tokens, Tokens, Amount], ...], Meta(min_length=1)]
    reset_s: Amount = 0.0
    reward: float = 0.0


def read_episodes(path: str) -> Sequence[Recorded]:
    """The episodes of a file. Raises ConfigError, which names the line."""
    try:
        changed = Path(path).stat().st_mtime_ns
        return _read(path, changed)
    except OSError as error:
        raise ConfigError("simulate.tasks.trace", path, f"cannot be read: {error.strerror}") from None


@lru_cache(maxsize=8)
def _read(path: str, changed: int) -> Sequence[Recorded]:
    """Once, however often a planner asks."""
    episodes: list[Recorded] = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            if line.strip():
                episodes.append(msgspec.json.decode(line, type=Recorded))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError("simulate.tasks.trace", path, f"line {number}: {error}") from None
    if not episodes:
        raise ConfigError("simulate.tasks.trace", path, "holds no episodes")
    return tuple(episodes)


def described(profile: Profile, episodes: Sequence[Recorded]) -> Profile:
    """The profile with what the episodes say in place of its own lengths, times and success."""
    turns = [turn for episode in episodes for turn in episode.turns]
    later = [turn[0] for episode in episodes for turn in episode.turns[1:]]
    return msgspec.structs.replace(
        profile,
        turns=_spread(len(episode.turns) for episode in episodes),
        prompt=_spread(episode.turns[0][0] for episode in episodes),
        observation=_spread(later or [1]),
        response=_spread(turn[1] for turn in turns),
        reset_s=_spread(episode.reset_s for episode in episodes),
        step_s=_spread(turn[2] for turn in turns),
        instance=0.0,
    )


def _spread(numbers: Iterable[float]) -> Spread:
    values = [float(number) for number in numbers]
    return Spread(mean=fmean(values), std=pstdev(values), high=max(values))
