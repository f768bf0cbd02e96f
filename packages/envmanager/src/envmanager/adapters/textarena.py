"""TextArena's games for one player (`textarena:GuessTheNumber-v0`). Needs the extra `textarena`.

Invariants (test_envmanager_adapters.py):
- each observation is what is new since the last, so that a conversation grows by it, and nothing is told twice;
- games draw from random sources of their own.
"""

import re
from typing import Any

import textarena as library
from textarena.core import ObservationType, Wrapper

from envmanager.adapters.chance import OwnChance
from envmanager.errors import UnknownEnv

BRACKETED = re.compile(r"\[[^\[\]\n]{1,40}\]")


class TextArenaEnv:
    """One game. The reward is the game's at its end, and nothing before. `info["actions"]` are the examples in
    brackets that the game has shown.
    """

    blocking = False

    def __init__(self, id: str, options: dict[str, Any]) -> None:
        self.task = f"textarena:{id}"
        self._chance = OwnChance()
        self._seen: dict[str, None] = {}
        with self._chance:
            self._env = _bare(library.make(id, **options))

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        with self._chance:
            self._env.reset(num_players=1, seed=seed)
            return self._news()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        with self._chance:
            done, info = self._env.step(action if "[" in action else f"[{action.strip()}]")
            if not done:
                observation, offered = self._news()
                return observation, 0.0, False, False, info | offered
            rewards, ends = self._env.close()
        end = dict(ends.get(0, {})) if ends else {}
        return str(end.get("reason") or "The game is over."), float((rewards or {}).get(0, 0.0)), True, False, end

    def _news(self) -> tuple[str, dict[str, Any]]:
        """What the game has said since the last time."""
        _, messages = self._env.get_observation()
        said = [text for _, text, kind in messages if kind is not ObservationType.PLAYER_ACTION]
        text = "\n".join(said)
        self._seen |= dict.fromkeys(BRACKETED.findall(text))
        return text, {"actions": list(self._seen)[:64] or ["[0]"]}


def _bare(env: Any) -> Any:
    """Without the wrappers, which tell the whole game again each turn."""
    while isinstance(env, Wrapper):
        env = env.env
    return env


class TextArena:
    """Makes the games of one id. `options` go to `textarena.make`. The seed decides the instance."""

    blocking = False

    def __init__(self, id: str, **options: Any) -> None:
        self._id = id
        self._options = options
        try:
            TextArenaEnv(id, options).reset(seed=0)
        except AssertionError as error:
            raise UnknownEnv(f"textarena:{id} is not for one player ({error})") from error
        except (ValueError, TypeError, LookupError, ImportError, SyntaxError) as error:  # games are imported here
            raise UnknownEnv(f"textarena:{id}: {str(error).strip()[:300]}") from error

    def __call__(self, key: str) -> TextArenaEnv:
        return TextArenaEnv(self._id, self._options)
