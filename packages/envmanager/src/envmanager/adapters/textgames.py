"""TextWorld's challenges as games made on demand, one for each key, in a folder that processes share.

Invariants (test_envmanager_adapters.py::test_textworld_makes_a_game_of_each_key):
- equal keys are one game, made once however many ask for it at the same time;
- the folder holds the KEPT latest games, half a megabyte each.
"""

import argparse
import fcntl
import hashlib
import os
import tempfile
import threading
import zlib
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import textworld as library
from textworld.challenges import CHALLENGES
from textworld.generator import compile_game

from envmanager.errors import UnknownEnv

KEPT = 256
# TextWorld's parsers and grammars keep state outside their games; games themselves take milliseconds.
ONE_AT_A_TIME = threading.Lock()


class _Settings(argparse.ArgumentParser):
    """A challenge's own settings, as its command line checks them."""

    def error(self, message: str) -> NoReturn:
        raise UnknownEnv(f"textworld:{self.prog}: {message}")


class Games:
    """The games of one challenge with its settings. Raises UnknownEnv for settings that it does not take."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        _, self._make, add_settings = CHALLENGES[name]
        parser = _Settings(name, add_help=False)
        add_settings(parser)
        self._settings = vars(parser.parse_args([word for item in settings.items() for word in _words(*item)]))
        digest = hashlib.sha256(msgspec.json.encode([name, self._settings], order="sorted")).hexdigest()[:16]
        self._folder = Path(tempfile.gettempdir(), f"textworld-{os.getuid()}-{digest}")
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if self._folder.stat().st_uid != os.getuid():
            raise UnknownEnv(f"textworld:{name}: {self._folder} is another user's; set TMPDIR")

    def file(self, key: str) -> Path:
        """The game of a key; making it takes seconds, whoever asks meanwhile waits."""
        seed = zlib.crc32(key.encode(errors="replace"))
        file = self._folder / f"{seed:08x}.z8"
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                self._compile(seed, file)
            file.touch()
        return file

    def _compile(self, seed: int, file: Path) -> None:
        with ONE_AT_A_TIME, tempfile.TemporaryDirectory() as folder:
            options = library.GameOptions()
            options.seeds = seed
            options.path = str(Path(folder, "game.z8"))
            made = Path(compile_game(self._make(self._settings, options), options))
            for suffix in (".json", ".z8"):  # the game is there when its last file is
                part = file.with_suffix(f"{suffix}.part")
                part.write_bytes(made.with_suffix(suffix).read_bytes())
                part.rename(file.with_suffix(suffix))
        games = sorted(self._folder.glob("*.z8"), key=lambda game: game.stat().st_mtime)
        for old in games[:-KEPT]:
            for suffix in (".z8", ".json", ".lock"):
                old.with_suffix(suffix).unlink(missing_ok=True)


def _words(key: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{key}"] if value else []
    return [f"--{key}", str(value)]
