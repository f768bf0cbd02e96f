"""`rollart init`: a configuration to begin from."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from envmanager import UnknownEnv
from envmanager.naming import named
from rollart.config import load_config
from rollart.config.template import template
from rollart.errors import ConfigError


def init(path: Path, env: str | None) -> int:
    """Write `path`, which must not exist. Returns the exit status."""
    if path.exists():
        print(f"rollart: {path} exists; name another file, or remove it", file=sys.stderr)
        return 2
    tasks = None
    if env is not None:
        try:
            named(env)
        except UnknownEnv as error:
            raise ConfigError("--env", env, str(error)) from None
        tasks = {_task_name(env): {"kind": "env", "env": env}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(template(tasks), encoding="utf-8")
    load_config(path)
    print(f"wrote {path}; see what it would do: rollart train {path} --dry-run")
    return 0


def _task_name(env: str) -> str:
    """The environment's own name: gymnasium:Taxi-v4?x=1 is Taxi-v4."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", env.partition("?")[0].rpartition(":")[2]).strip("-._") or "task"
