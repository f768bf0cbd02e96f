"""`rollart init`: a configuration to begin from, named after its file (tests/rollart/test_rollart_init.py)."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import msgspec

from envmanager import UnknownEnv
from envmanager.naming import named
from rollart.config import Config, load_config
from rollart.config.schema import BufferConfig, GenerationConfig, RunConfig
from rollart.config.tasks import EnvConfig
from rollart.config.template import template
from rollart.errors import ConfigError
from rollart.tasks.places import is_url

# Turns in free text take more of a context than symbols do.
_TEXT_CONTEXT = 4096


def init(path: Path, env: str | None) -> int:
    """Write `path`, which must not exist. Returns the exit status."""
    if path.exists():
        print(f"rollart: {path} exists; name another file, or remove it", file=sys.stderr)
        return 2
    config = Config(run=RunConfig(name=_name(path.stem, "run")))
    if env is not None:
        if not is_url(env):
            try:
                named(env)
            except UnknownEnv as error:
                raise ConfigError("--env", env, str(error)) from None
        config = msgspec.structs.replace(
            config,
            tasks={_task(env): EnvConfig(env=env)},
            generation=GenerationConfig(max_model_len=_TEXT_CONTEXT),
            # The tiny model of the defaults rarely succeeds in free text, so that all of a group end alike.
            buffer=BufferConfig(drop_uniform=False),
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(template(config), encoding="utf-8")
    except (FileExistsError, FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError("config", str(path), f"cannot be written ({error.strerror}); name another file") from None
    load_config(path)
    print(f"wrote {path}; see what it would do: rollart train {shlex.quote(str(path))} --dry-run")
    return 0


def _task(env: str) -> str:
    """What a task is called that plays `env`."""
    return "task" if is_url(env) else _name(env.partition("?")[0].rpartition(":")[2], "task")


def _name(text: str, otherwise: str) -> str:
    """`text` as runs and tasks may be called."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._") or otherwise
