"""Environments by name: `gymnasium:FrozenLake-v1?is_slippery=false`, `gem:game:Mastermind-v0-easy`, `shop:all`, or
`module:factory?option=value`.

Invariant: a wrong name is an UnknownEnv that says what is wrong with it
(test_envmanager_check.py::test_wrong_names).
"""

import functools
import importlib
import inspect
import os
import sys
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from envmanager.errors import UnknownEnv
from envmanager.host import blocks, nonblocking
from envmanager.protocols import MakeEnv

# Scheme -> the factory that is called with what follows the scheme, and the extra that it needs.
SCHEMES = {
    "gymnasium": ("envmanager.adapters.gymnasium:Gymnasium", "gymnasium"),
    "gem": ("envmanager.adapters.gem:Gem", "gem"),
    "textarena": ("envmanager.adapters.textarena:TextArena", "textarena"),
    "reasoning-gym": ("envmanager.adapters.reasoninggym:ReasoningGym", "reasoning-gym"),
    "textworld": ("envmanager.adapters.textworld:TextWorld", "textworld"),
    "openenv": ("envmanager.adapters.openenv:OpenEnv", "openenv"),
    "verifiers": ("envmanager.adapters.verifiers:Verifiers", "verifiers"),
    "shop": ("envmanager.adapters.shop:Shop", ""),
    "swe": ("envmanager.adapters.swe:Swe", ""),
}


def named(name: str) -> MakeEnv:
    """The factory of a name: called with a key it makes that key's environment. Options are JSON values, else
    text.
    """
    where, _, query = name.partition("?")
    scheme, _, rest = where.partition(":")
    if not scheme or not rest:
        schemes = ", ".join(f"{known}:ID" for known in SCHEMES)
        raise UnknownEnv(f"{name!r} names no environment; write {schemes} or module:factory")
    options = {key: _value(value) for key, value in parse_qsl(query, keep_blank_values=True)}
    if scheme in SCHEMES:
        path, extra = SCHEMES[scheme]
        try:
            adapter = imported(path)
        except UnknownEnv as error:
            needed = f"rollart-envmanager[{extra}]" if extra else "what this installation lacks"
            raise UnknownEnv(f"{name!r} needs {needed}: {error}") from error
        try:
            made: MakeEnv = adapter(rest, **options)
        except (TypeError, ValueError) as error:
            raise UnknownEnv(f"{name!r}: {error}") from error
        return made
    factory = imported(where)
    _check_call(name, factory, options)
    if not options:
        return factory
    bound = functools.partial(factory, **options)
    return bound if blocks(factory) else nonblocking(bound)


def imported(path: str) -> Any:
    """The object at `module:attribute`, called nothing yet. Modules are looked for as by Python, then in the current
    directory.
    """
    module, _, attribute = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except (ImportError, ValueError, AttributeError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        hint = f"; is it in {os.getcwd()}, or installed?" if missing else ""
        raise UnknownEnv(f"{path!r} cannot be imported: {error}{hint}") from error
    if not callable(found):
        raise UnknownEnv(f"{path!r} is a {type(found).__name__}; name something that can be called")
    return found


def _check_call(name: str, factory: Any, options: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # what is written in C may tell none
        return
    try:
        signature.bind("key", **options)
    except TypeError as error:
        raise UnknownEnv(
            f"{name!r} is called with the key of an instance and the options: {error}; "
            "name a function of the key that makes the environment"
        ) from error


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
