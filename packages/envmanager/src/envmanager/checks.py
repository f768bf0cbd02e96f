"""Settings that mean nothing are refused where they are given, by name: a ValueError, before anything runs.

Invariant: what passes is a whole number, or a number of seconds, that can be compared and waited for
(test_envmanager_bad_input.py).
"""

import math
from importlib.util import find_spec
from urllib.parse import urlsplit

from envmanager.errors import MissingExtra


def check_count(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is {value!r}; use a whole number of at least {least}")


def check_seconds(name: str, value: object, use: str = "positive seconds") -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}; use {use}")


def check_callable(name: str, value: object, what: str) -> None:
    if not callable(value):
        raise ValueError(f"{name} is {value!r:.100}; give {what}")


def check_extra(module: str, extra: str, what: str) -> None:
    """Now, rather than in each episode."""
    if find_spec(module) is None:
        raise MissingExtra(f"{what} needs {module}: pip install 'rollart-envmanager[{extra}]'")


def check_url(url: object) -> None:
    try:
        parts = urlsplit(url) if isinstance(url, str) and url.isprintable() else None
        good = parts is not None and parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is none
        good = False
    if not good:
        raise ValueError(f"url is {url!r}; write http://HOST:PORT or https://HOST")
