"""Where a task's episodes are played: in the driver, in processes that can be killed, or behind a server's URL.

Invariant: an environment that cannot be made is known before anything starts, also one that another interpreter
imports (tests/rollart/test_rollart_environment.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from envmanager import MakeEnv, UnknownEnv
from envmanager.backends import SubprocessBackend
from envmanager.naming import named
from rollart.config.tasks import EnvConfig
from rollart.errors import ConfigError

_LOAD = "import sys; from envmanager.naming import named; named(sys.argv[1])"
# Libraries of environments import for seconds; on a busy machine for many.
_LOAD_S = 180.0


def place(name: str, config: EnvConfig) -> MakeEnv:
    """The factory of a task's environments; where it has a `close`, that ends what it runs. Raises ConfigError."""
    if is_url(config.env):
        from envmanager.backends.http import HTTPBackend

        return HTTPBackend(config.env, token=os.environ.get("ENVMANAGER_TOKEN", ""))
    if config.isolate or config.python:
        _check_loads(name, config)
        return SubprocessBackend(config.env, python=config.python)
    try:
        return named(config.env)
    except UnknownEnv as error:
        raise ConfigError(f"tasks.{name}.env", config.env, str(error)) from None


def is_url(where: str) -> bool:
    return where.startswith(("http://", "https://"))


def _check_loads(name: str, config: EnvConfig) -> None:
    """Loads the environment once in the interpreter that will play it, and in a process that ends."""
    environ = dict(os.environ)
    if not config.python:
        environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    elif not Path(config.python).exists():
        reason = (
            "there is no such interpreter; where it is .venvs/NAME/bin/python, `make environment NAME=NAME` makes it"
        )
        raise ConfigError(f"tasks.{name}.python", config.python, reason)
    command = [config.python or sys.executable, "-P", "-c", _LOAD, config.env]
    try:
        loaded = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_LOAD_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"tasks.{name}.python", config.python, f"{config.env} cannot be loaded: {error}") from None
    if loaded.returncode:
        said = loaded.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"tasks.{name}.env", config.env, said.removeprefix("envmanager.errors.UnknownEnv: "))
