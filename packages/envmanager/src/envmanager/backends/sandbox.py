"""A worker inside bubblewrap: no network, no other processes, nothing to write but a small /tmp, none of the user's
files or variables but what Python needs to import.

Invariants (test_envmanager_sandbox.py):
- nothing inside reaches the network, sees or signals processes outside, or leaves a file behind;
- what is inside ends with bubblewrap, which ends with the keeper.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from envmanager.errors import InfrastructureError

TMP_BYTES = 1 << 30
# Where users and services keep what is not for environments.
HIDDEN = ("/var/tmp", "/run", "/home", "/root", "/mnt", "/media", "/srv")
PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONPATH")


def bubblewrap() -> str:
    """The program. Raises InfrastructureError where there is none."""
    found = shutil.which("bwrap")
    if found is None:
        raise InfrastructureError("sandbox=True needs bubblewrap (Debian: apt-get install bubblewrap)")
    return found


def imports() -> list[str]:
    """The folders that Python imports from, outermost first, none inside another."""
    wanted = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, *sys.path, os.getcwd()) if path}
    there = sorted(path for path in wanted if os.path.exists(path) and path != "/")
    return [path for path in there if not any(path.startswith(f"{other}/") for other in there)]


def command(inner: list[str], *more: str) -> list[str]:
    """The inner command within bubblewrap. Later options lie over earlier ones: the imports over what is hidden."""
    hidden = [part for path in HIDDEN if os.path.isdir(path) for part in ("--tmpfs", path)]
    bound = [part for path in imports() for part in ("--ro-bind", path, path)]
    return [
        *(bubblewrap(), "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
        *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"),
        *("--size", str(TMP_BYTES), "--tmpfs", "/tmp", *hidden, *bound, *(more or ("--chdir", "/tmp"))),
        *inner,
    ]


def boxed(inner: list[str], folder: Path) -> list[str]:
    """A command that may write in one folder, and starts there."""
    return command(inner, "--bind", str(folder), str(folder), "--chdir", str(folder))


def serve_inside(talk: int, also: dict[str, str]) -> NoReturn:
    """In the worker's fork: becomes bubblewrap with a worker in it, on the same socket."""
    os.set_inheritable(talk, True)
    environ = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    environ |= {"HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"} | also
    inner = [sys.executable, "-P", "-m", "envmanager.backends.worker", str(talk)]
    line = command(inner)
    os.execve(line[0], line, environ)
