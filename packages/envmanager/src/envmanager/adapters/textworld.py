"""TextWorld's game files (`textworld:FILE`): made by `tw-make` (.z8, or .json without a compiler), or ALFWorld's
(.tw-pddl, with the extra `alfworld`). Needs the extra `textworld`.

Invariant: an episode's rewards sum to the share of the game's score that was won
(test_envmanager_adapters.py::test_textworld_is_won_by_its_walkthrough).
"""

import threading
import warnings
from pathlib import Path
from typing import Any

import textworld as library

from envmanager.errors import UnknownEnv

# Jericho knows no scores of games that TextWorld made; TextWorld adds them itself.
warnings.filterwarnings("ignore", message=".*is not fully supported")
# TextWorld's parsers and grammars keep state outside their games; games themselves take milliseconds.
ONE_AT_A_TIME = threading.Lock()
KINDS = (".z8", ".json", ".tw-pddl")


class TextWorldEnv:
    """One game. Each reward is the gain in score as a share of the greatest. `info["actions"]` are the admissible
    commands.
    """

    def __init__(self, file: str, max_steps: int) -> None:
        self.task = "textworld"
        infos = library.EnvInfos(
            feedback=True, admissible_commands=True, won=True, lost=True, score=True, max_score=True
        )
        with ONE_AT_A_TIME:
            self._env = library.start(file, infos)
        self._max_steps = max_steps
        self._steps = 0
        self._score = 0.0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        with ONE_AT_A_TIME:
            self._env.seed(seed)
            state = self._env.reset()
        self._steps, self._score = 0, 0.0
        return str(state["feedback"]).strip(), self._told(state)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        with ONE_AT_A_TIME:
            state, score, done = self._env.step(action.strip())
        self._steps += 1
        share = float(score) / (state.get("max_score") or 1)
        gained, self._score = share - self._score, share
        over = bool(done) or bool(state.get("won")) or bool(state.get("lost"))
        out = not over and self._steps >= self._max_steps
        return str(state["feedback"]).strip(), gained, over, out, self._told(state)

    def close(self) -> None:
        self._env.close()

    def _told(self, state: Any) -> dict[str, Any]:
        return {
            "actions": list(state.get("admissible_commands") or []),
            "won": bool(state.get("won")),
            "score": float(state.get("score") or 0),
        }


class TextWorld:
    """Plays one file, or with a folder the file of it that each key names."""

    def __init__(self, path: str, *, max_steps: int = 50) -> None:
        self._path = Path(path)
        self._max_steps = max_steps
        if not self._path.exists():
            raise UnknownEnv(f"textworld:{path}: there is no such file; make one with tw-make")
        if self._path.is_file() and self._path.suffix not in KINDS:
            raise UnknownEnv(f"textworld:{path}: the file is none of {', '.join(KINDS)}")

    def __call__(self, key: str) -> TextWorldEnv:
        file = self._path / key if self._path.is_dir() else self._path
        return TextWorldEnv(str(file), self._max_steps)
