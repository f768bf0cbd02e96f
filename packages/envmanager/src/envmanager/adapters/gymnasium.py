"""Gymnasium environments with discrete actions as text environments. Needs the extra `gymnasium`.

Invariants:
- the environment never blocks for long, so it steps on the loop; closed ones are reset and used again, never two
  at once (test_envmanager_gymnasium.py::test_environments_are_used_again);
- text that names no action changes nothing (test_envmanager_gymnasium.py::test_unknown_action_changes_nothing).
"""

import re
import zlib
from typing import Any

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from envmanager.adapters.toytext import TEXTS, Text, numbered
from envmanager.errors import UnknownEnv

WORDS = re.compile(r"\w+")


class GymnasiumEnv:
    """One environment in words. `info["actions"]` are the words that act; the last of them in an answer counts."""

    blocking = False

    def __init__(self, env: Any, text: Text, task: str, free: list[Any]) -> None:
        self.task = task
        self._env = env
        self._text = text
        self._free = free
        self._index = {word: index for index, word in enumerate(text.actions)}
        self._last = ""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        state, info = self._env.reset(seed=seed)
        self._last = self._described(state)
        rules = f"{self._text.rules}\nActions: {', '.join(self._text.actions)}.\n\n"
        return rules.lstrip() + self._last, info | {"actions": list(self._text.actions)}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        words = [word for word in WORDS.findall(action.lower()) if word in self._index]
        if not words:
            said = f"No action in the answer. Say one of: {', '.join(self._text.actions)}.\n\n{self._last}"
            return said, 0.0, False, False, {"invalid": True}
        state, reward, terminated, truncated, info = self._env.step(self._index[words[-1]])
        self._last = self._described(state)
        return self._last, float(reward), bool(terminated), bool(truncated), info

    def close(self) -> None:
        """Hands the environment to the next episode."""
        self._free.append(self._env)

    def _described(self, state: Any) -> str:
        return self._text.describe(self._env.unwrapped, state)


class Gymnasium:
    """Makes the environments of one Gymnasium id. `options` go to `gymnasium.make`; the key only names the
    instance, which its seed decides. FrozenLake takes `size` and `p` too: then each key is a random map of its
    own.
    """

    blocking = False

    def __init__(self, id: str, *, size: int | None = None, p: float = 0.8, **options: Any) -> None:
        self._id = id
        self._size = size
        self._p = p
        self._options = options
        self._free: list[Any] = []
        first = self._new("0")
        actions = first.action_space
        if not isinstance(actions, gymnasium.spaces.Discrete):
            raise UnknownEnv(f"gymnasium:{id} has actions {actions}; only discrete actions can be said in words")
        base = id.rsplit("-v", 1)[0]
        self._text = TEXTS.get(base) or numbered(int(actions.n))
        self._task = base
        if size is None:
            self._free.append(first)

    def __call__(self, key: str) -> GymnasiumEnv:
        if self._size is not None:
            return GymnasiumEnv(self._new(key), self._text, self._task, [])
        env = self._free.pop() if self._free else self._new(key)
        return GymnasiumEnv(env, self._text, self._task, self._free)

    def _new(self, key: str) -> Any:
        options = self._options
        if self._size is not None:
            options = options | {"desc": generate_random_map(self._size, self._p, seed=zlib.crc32(key.encode()))}
        try:
            return gymnasium.make(self._id, disable_env_checker=True, **options)
        except (gymnasium.error.Error, TypeError) as error:
            raise UnknownEnv(f"gymnasium:{self._id}: {error}") from error
