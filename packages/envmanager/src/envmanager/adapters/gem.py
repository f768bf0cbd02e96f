"""GEM's environments: games (`gem:game:Mastermind-v0-easy`) and Reasoning Gym (`gem:rg:letter_counting`). Needs the
extra `gem`.

Invariant: games draw from random sources of their own (test_envmanager_gem.py::test_games).
"""

from typing import Any

import gem as library

from envmanager.adapters.chance import OwnChance
from envmanager.errors import UnknownEnv

# Ideas for play by chance, so many a turn.
SAMPLES = 8
QUICK = ("game:", "rg:")


class GemEnv:
    """One environment. `info["actions"]` are samples of what may be said, where the environment gives any."""

    blocking = False

    def __init__(self, id: str, options: dict[str, Any]) -> None:
        self.task = f"gem:{id}"
        self._chance = OwnChance()
        self._ideas = OwnChance()
        with self._chance:
            self._env = library.make(id, **options)

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        with self._chance:
            observation, info = self._env.reset(seed=seed)
        self._ideas = OwnChance(seed or 0)
        return observation, info | self._actions()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        with self._chance:
            observation, reward, terminated, truncated, info = self._env.step(action)
        return observation, float(reward), bool(terminated), bool(truncated), info | self._actions()

    def _actions(self) -> dict[str, Any]:
        with self._ideas:
            try:
                return {"actions": [str(self._env.sample_random_action()) for _ in range(SAMPLES)]}
            except NotImplementedError:
                return {"actions": [f"\\boxed{{{number}}}" for number in range(SAMPLES)]}


class Gem:
    """Makes the environments of one GEM id. `options` go to `gem.make`. The key only names the instance, which the
    seed decides. Ids that compute for long or run code are better in the subprocess backend.
    """

    blocking = False

    def __init__(self, id: str, **options: Any) -> None:
        self._id = id
        self._options = options
        if not id.startswith(QUICK):
            raise UnknownEnv(f"gem:{id} is not one of {', '.join(f'gem:{kind}*' for kind in QUICK)}")
        try:
            GemEnv(id, options)
        except (ValueError, KeyError, TypeError) as error:
            raise UnknownEnv(f"gem:{id}: {error}") from error

    def __call__(self, key: str) -> GemEnv:
        return GemEnv(self._id, self._options)
