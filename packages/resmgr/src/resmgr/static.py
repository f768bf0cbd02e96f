"""Pools from a YAML file: a mapping of pool names to what they hold.

    h800: {hardware: H800, nodes: [{name: a, total: 8}, {name: b, total: 8, labels: {zone: x}}]}
    judge: {hardware: judge, total: 32, backend: serverless}

Invariant: a file is taken whole or refused with the key at fault (tests: `test_resmgr_static.py`).
"""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from resmgr.errors import Invalid
from resmgr.values import Node, Pool


def load_pools(path: str | Path) -> list[Pool]:
    """The pools of a file, validated. Needs the extra `yaml`; raises `Invalid`."""
    try:
        text = Path(path).read_bytes()
        document = msgspec.yaml.decode(text)
    except ImportError:
        raise Invalid(f"{path}: reading YAML needs PyYAML: pip install 'rollart-resmgr[yaml]'") from None
    except (OSError, msgspec.DecodeError) as error:
        raise Invalid(f"{path}: {error}") from error
    if not isinstance(document, dict) or not document:
        raise Invalid(f"{path}: must map pool names to pools, as in `h800: {{hardware: H800, total: 8}}`")
    _check_twice(path, text)
    return [_pool(f"{path}: {name}", name, body) for name, body in document.items()]


def _check_twice(path: str | Path, text: bytes) -> None:
    """YAML takes the last of two pools with one name, and says nothing."""
    import yaml

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    names = [key.value for key, _ in root.value]
    for name in names:
        if names.count(name) > 1:
            raise Invalid(f"{path}: {name} is there {names.count(name)} times; give each pool a name of its own")


def _pool(where: str, name: object, body: Any) -> Pool:
    if not isinstance(name, str):
        raise Invalid(f"{where}: the name of a pool must be a text; put it in quotes")
    fields = [field for field in Pool.__struct_fields__ if field != "name"]
    _check_keys(where, body, fields)
    nodes = body.get("nodes") or ()
    for node in nodes if isinstance(nodes, list) else ():
        _check_keys(f"{where}.nodes", node, Node.__struct_fields__)
    try:
        pool = msgspec.convert({"name": name, **body}, Pool)
        pool.validate()
    except (msgspec.ValidationError, Invalid) as error:
        raise Invalid(f"{where}: {error}") from error
    return pool


def _check_keys(where: str, body: Any, known: Sequence[str]) -> None:
    if not isinstance(body, dict):
        raise Invalid(f"{where}: {body!r} must be a mapping with {', '.join(known)}")
    for key in body:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise Invalid(f"{where}: unknown key {key!r}; {hint}")
