"""TextWorld's games: made here, one for each key (`textworld:tw-simple?rewards=dense&goal=brief`), or game files
(`textworld:FILE`) as `tw-make` writes them (.z8, .json), or ALFWorld's (.tw-pddl, with the extra `alfworld`). Needs
the extra `textworld`.

Invariants (test_envmanager_adapters.py):
- an episode's rewards sum to the share of the game's score that was won (test_textworld_is_won_by_its_walkthrough);
- equal keys are one game (test_textworld_makes_a_game_of_each_key);
- no action does more than speak to the game (test_what_is_typed_into_textworld_writes_no_files).
"""

import re
import warnings
from pathlib import Path
from typing import Any

import textworld as library
from textworld.challenges import CHALLENGES

from envmanager.adapters.textgames import ONE_AT_A_TIME, Games
from envmanager.errors import UnknownEnv

# Jericho knows no scores of games that TextWorld made; TextWorld adds them itself.
warnings.filterwarnings("ignore", message=".*is not fully supported")
# A thousand characters of lettering before a game's first words, and the status line after its prompt.
BANNER = re.compile(r"\A(?:[ _$>/\\|]*\n)+")
STATUS = re.compile(r"\n>\s+-=.*\Z")
KINDS = (".z8", ".json", ".tw-pddl")
# The interpreter takes control characters and backslashes for its own hot keys: one records the input in a file whose
# name is what is typed next. The game itself can save and write transcripts, also as the second of two commands.
UNTYPEABLE = re.compile(r"[^ -\[\]-~]+")
FILES = re.compile(r"\b(save|restore|script|transcript|unscript|noscript|recording|replay)\b", re.IGNORECASE)
LINE_CHARACTERS = 150


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
        return _said(state), self._told(state)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        with ONE_AT_A_TIME:
            state, score, done = self._env.step(typed(action))
        self._steps += 1
        share = float(score) / (state.get("max_score") or 1)
        gained, self._score = share - self._score, share
        over = bool(done) or bool(state.get("won")) or bool(state.get("lost"))
        out = not over and self._steps >= self._max_steps
        return _said(state), gained, over, out, self._told(state)

    def close(self) -> None:
        self._env.close()

    def _told(self, state: Any) -> dict[str, Any]:
        return {
            "actions": list(state.get("admissible_commands") or []),
            "won": bool(state.get("won")),
            "score": float(state.get("score") or 0),
        }


def typed(action: str) -> str:
    """The action as a line that speaks to the game and to nothing else."""
    line = UNTYPEABLE.sub(" ", action).strip()[:LINE_CHARACTERS]
    return "look" if FILES.search(line) else line


def _said(state: Any) -> str:
    return STATUS.sub("", BANNER.sub("", str(state["feedback"]))).strip()


class TextWorld:
    """Plays one file, or with a folder the file of it that each key names, or a game made for each key."""

    def __init__(self, path: str, *, max_steps: int = 50, **settings: Any) -> None:
        self._path = Path(path)
        self._max_steps = max_steps
        self._games = Games(path, settings) if path in CHALLENGES else None
        if self._games is not None:
            return
        if settings:
            made = ", ".join(CHALLENGES)
            raise UnknownEnv(f"textworld:{path}: {', '.join(settings)} are settings of games made here: {made}")
        if not self._path.exists():
            raise UnknownEnv(f"textworld:{path}: there is no such file; make one with tw-make")
        if self._path.is_file() and self._path.suffix not in KINDS:
            raise UnknownEnv(f"textworld:{path}: the file is none of {', '.join(KINDS)}")

    def __call__(self, key: str) -> TextWorldEnv:
        if self._games is not None:
            return TextWorldEnv(str(self._games.file(key)), self._max_steps)
        file = self._path / key if self._path.is_dir() else self._path
        return TextWorldEnv(str(file), self._max_steps)
