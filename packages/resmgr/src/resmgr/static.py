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
        document = msgspec.yaml.decode(Path(path).read_bytes())
    except ImportError:
        raise Invalid(f"{path}: reading YAML needs PyYAML: pip install 'rollart-resmgr[yaml]'") from None
    except (OSError, msgspec.DecodeError) as error:
        raise Invalid(f"{path}: {error}") from error
    if not isinstance(document, dict) or not document:
        raise Invalid(f"{path}: must map pool names to pools, as in `h800: {{hardware: H800, total: 8}}`")
    pools = [_pool(f"{path}: {name}", str(name), body) for name, body in document.items()]
    for pool in pools:
        pool.validate()
    return pools


def _pool(where: str, name: str, body: Any) -> Pool:
    fields = [field for field in Pool.__struct_fields__ if field != "name"]
    _check_keys(where, body, fields)
    for node in body.get("nodes") or ():
        _check_keys(f"{where}.nodes", node, Node.__struct_fields__)
    try:
        return msgspec.convert({"name": name, **body}, Pool)
    except msgspec.ValidationError as error:
        raise Invalid(f"{where}: {error}") from error


def _check_keys(where: str, body: Any, known: Sequence[str]) -> None:
    if not isinstance(body, dict):
        raise Invalid(f"{where}: {body!r} must be a mapping with {', '.join(known)}")
    for key in body:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise Invalid(f"{where}: unknown key {key!r}; {hint}")
