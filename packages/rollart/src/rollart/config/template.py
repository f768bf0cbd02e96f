"""The commented configuration that `rollart init` writes: every section and key, its default, and what it means.

The text comes from the schema itself, so that it cannot say anything else than what loads: `init` writes a file that
loads as the defaults (tests/rollart/test_rollart_init.py).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_type_hints

import msgspec
import yaml

from rollart.config.schema import Config
from rollart.config.tasks import keys_of

_WIDTH = 100
_INDENT = "  "


def template(config: Config) -> str:
    """YAML text of `config` with every key commented."""
    lines = [
        "# Every key, explained. What is left out takes its default, so delete what you do not change.",
        "",
    ]
    builtins: dict[str, Any] = msgspec.to_builtins(config)
    for name, section in get_type_hints(Config).items():
        if name == "tasks":
            lines += ["tasks:", *_tasks(builtins[name]), ""]
        elif isinstance(section, type) and issubclass(section, msgspec.Struct):
            lines += [*_comment(section.__doc__, ""), f"{name}:"]
            lines += [*_section(section, builtins[name], _INDENT), ""]
        else:
            lines += [*_comment(_meanings(Config).get(name), ""), *_entry(name, builtins[name], ""), ""]
    return "\n".join(lines)


def _tasks(tasks: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, given in tasks.items():
        values = dict(given)
        kind = keys_of(values["kind"])
        yield from _comment(kind.__doc__, _INDENT)
        yield f"{_INDENT}{name}:"
        yield from _entry("kind", values.pop("kind"), 2 * _INDENT)
        yield from _section(kind, values, 2 * _INDENT)


def _section(struct: type[msgspec.Struct], values: Mapping[str, Any], indent: str) -> Iterator[str]:
    meanings = _meanings(struct)
    for name, kind in get_type_hints(struct).items():
        if name.startswith("_") or name not in values:
            continue
        yield from _comment(meanings.get(name), indent)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield f"{indent}{name}:"
            yield from _section(kind, values[name], indent + _INDENT)
        else:
            yield from _entry(name, values[name], indent)


def _entry(name: str, value: Any, indent: str) -> list[str]:
    plain = not isinstance(value, dict | list)
    text = yaml.safe_dump(
        {name: value}, default_flow_style=False if plain else None, sort_keys=False, allow_unicode=True
    )
    return textwrap.indent(text.rstrip("\n"), indent).split("\n")


def _comment(text: str | None, indent: str) -> list[str]:
    if not text:
        return []
    words = " ".join(text.split())
    return textwrap.wrap(words, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


@cache
def _meanings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """What the string after a field says of it, in the class and its bases."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if base in (object, msgspec.Struct) or not issubclass(base, msgspec.Struct):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, after in zip(definition.body, definition.body[1:], strict=False):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
                found[field.target.id] = inspect.cleandoc(str(after.value.value))  # type: ignore[attr-defined]
    return found
