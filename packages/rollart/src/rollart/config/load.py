"""Loading a configuration: defaults < file < `key=value` overrides, strictly typed.

An unknown key, an ill-typed value and a value out of range each raise a ConfigError that names the key, the
value and the nearest valid key or the valid range. Held by tests/rollart/test_rollart_config.py.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import yaml

from rollart.config.check import check
from rollart.config.schema import Config, Name
from rollart.config.tasks import DEFAULT_KIND, KINDS, AnyTask, keys_of
from rollart.errors import ConfigError


def load_config(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """The configuration of a YAML file with `section.key=value` overrides applied.

    Raises ConfigError naming the key, the value and the remedy.
    """
    tree = _read(Path(path)) if path is not None else {}
    for override in overrides:
        _apply(tree, override)
    tree.pop("simulate", None)  # of `rollart simulate` and `rollart plan`, which read the rest as any other does
    return parse_config(tree)


def parse_config(tree: Mapping[str, Any]) -> Config:
    """The configuration of plain nested dictionaries. Raises ConfigError."""
    tree = _with_kinds(tree)
    _refuse_unknown(tree, Config, "")
    tree = {name: value for name, value in tree.items() if value is not None}
    tasks = tree.pop("tasks", None)
    config: Config = _converted(tree, Config, "")
    if tasks is not None:
        config = msgspec.structs.replace(config, tasks=_tasks(tasks))
    check(config)
    return config


def _tasks(tree: Mapping[str, Any]) -> dict[str, AnyTask]:
    """Each task with the keys of its kind."""
    for name in tree:
        _converted(name, Name, "tasks")
    return {name: _converted(task, keys_of(task["kind"]), f"tasks.{name}") for name, task in tree.items()}


def _converted(tree: Any, kind: Any, prefix: str) -> Any:
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        raise _located(error, tree, prefix, kind) from None


def dump_config(config: Config) -> str:
    """The whole resolved configuration as YAML text."""
    tree = msgspec.to_builtins(config)
    tree["tasks"] = {name: {"kind": task.pop("kind"), **task} for name, task in tree["tasks"].items()}
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _with_kinds(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Every task says its kind, so that its keys can be checked."""
    tasks = tree.get("tasks")
    if tasks is None:
        return tree
    if not isinstance(tasks, Mapping):
        raise ConfigError("tasks", tasks, "is a section of names, such as tasks: {FrozenLake: {size: 4}}")
    return {**tree, "tasks": {name: _with_kind(f"tasks.{name}", task) for name, task in tasks.items()}}


def _with_kind(key: str, task: Any) -> Any:
    if task is None:
        return {"kind": DEFAULT_KIND}
    if not isinstance(task, Mapping):
        raise ConfigError(key, task, f"is a section; its kind is one of {', '.join(KINDS)}")
    kind = task.get("kind", DEFAULT_KIND)
    try:
        keys_of(kind)
    except ValueError as error:
        raise ConfigError(f"{key}.kind", kind, str(error)) from None
    return {"kind": kind, **task}


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        reason = "is a folder; name a YAML file" if path.is_dir() else "there is no such file"
        raise ConfigError("config", str(path), reason)
    try:
        tree = _parse("config", str(path), path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("config", str(path), f"cannot be read as text: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError("config", str(path), "the top level must be sections such as `run:` and `train:`")
    return tree


class _Loader(yaml.SafeLoader):
    """YAML 1.2's floats: `5e-4` is a number, though PyYAML wants `5.0e-4`. A key that is there twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"{key} is there twice, line {node.start_mark.line + 1} and after; keep one")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _parse(key: str, value: str, text: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(key, value, f"not valid YAML: {' '.join(str(error).split())}") from None


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    *sections, leaf = key.strip().split(".")
    if not equals or not all((*sections, leaf)):
        raise ConfigError("override", override, "write it as section.key=value")
    for section in sections:
        if tree.get(section) is None:
            tree[section] = {}
        tree = tree[section]
        if not isinstance(tree, dict):
            raise ConfigError(key, text, f"{section} is not a section")
    tree[leaf] = _parse(key, text, text)


def _sections(struct: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct] | None]:
    """The keys of a section, each with the section type it holds, or None for a plain value."""
    hints = get_type_hints(struct)
    return {
        name: hints[name] if isinstance(hints[name], type) and issubclass(hints[name], msgspec.Struct) else None
        for name in struct.__struct_fields__
    }


def _all_keys(struct: type[msgspec.Struct] = Config, prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, section in _sections(struct).items():
        keys.append(prefix + name)
        if section is not None:
            keys += _all_keys(section, f"{prefix}{name}.")
    if struct is Config:
        keys += [f"tasks.NAME.{name}" for kind in KINDS.values() for name in kind.__struct_fields__]
    return keys


def _refuse_unknown(tree: Mapping[str, Any], struct: type[msgspec.Struct], prefix: str) -> None:
    known = _sections(struct)
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name not in known:
            raise ConfigError(key, value, f"unknown key; {_nearest(str(name), prefix, list(known))}")
        section = known[name]
        if struct is Config and name == "tasks" and isinstance(value, Mapping):
            for task, keys in value.items():
                _refuse_unknown(keys, keys_of(keys["kind"]), f"{key}.{task}.")
        elif section is not None:
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise ConfigError(key, value, f"is a section with keys {', '.join(_sections(section))}")
            _refuse_unknown(value, section, f"{key}.")


def _nearest(name: str, prefix: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    leaves = {key.rpartition(".")[2]: key for key in reversed(_all_keys())}
    elsewhere = difflib.get_close_matches(name, leaves, n=1, cutoff=0.75)
    if elsewhere:
        return f"did you mean {leaves[elsewhere[0]]}?"
    return f"valid here: {', '.join(known)}"


def _located(error: msgspec.ValidationError, tree: Any, prefix: str, kind: Any) -> ConfigError:
    """msgspec says where as ``- at `$.train.lr` ``; ours adds the value that stands there. `kind` is the type of
    `tree`.
    """
    reason, _, where = str(error).partition(" - at `$")
    path = where.rstrip("`").lstrip(".").replace("[", ".").replace("]", "")
    value: Any = tree
    for part in filter(None, path.split(".")):
        if isinstance(value, list):
            value = value[int(part)] if part.isdigit() else None
        elif isinstance(value, Mapping):
            value = value.get(part)
    key = ".".join(filter(None, (prefix, path)))
    reason = reason[:1].lower() + reason[1:].replace("`", "")
    if reason.startswith("expected str, got"):  # YAML takes 2024 for a number, and 2024-11-30 for a day
        reason = f'is text, so put it into quotes: {key}: "{value}", or \'{key}="{value}"\' as an argument'
    return ConfigError(key or "config", value, _remedy(reason, _choices(path.split("."), kind), value))


def _remedy(reason: str, choices: list[str], value: Any) -> str:
    """What to write instead, where msgspec only says what is wrong."""
    if reason.startswith("invalid enum value"):
        close = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"must be one of {', '.join(choices)}{hint}" if choices else reason
    if reason.startswith("expected array") and isinstance(value, str):
        return f"is a list; write [{value}]"
    return reason


def _choices(path: list[str], kind: Any) -> list[str]:
    """The words that the key at `path` of a `kind` may take."""
    for part in path:
        if part.isdigit():  # in a list, whose items are of one type
            kind = next(iter(get_args(kind)), None)
            continue
        kind = get_type_hints(kind).get(part) if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None
    return [word for word in get_args(kind) if isinstance(word, str)]
