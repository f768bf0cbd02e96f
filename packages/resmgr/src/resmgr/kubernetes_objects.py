"""What of the API server's objects is read, and nothing else of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

import msgspec

T = TypeVar("T")
OWNER, BINDING, TOKEN = "resmgr.io/owner", "resmgr.io/binding", "resmgr.io/token"

_SUFFIXES = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def quantity(text: str) -> float:
    """Kubernetes' numbers: "8", "3500m", "16Gi"; in whole thousandths, as amounts are."""
    for suffix in sorted(_SUFFIXES, key=len, reverse=True):
        if text.endswith(suffix):
            return round(float(text.removesuffix(suffix)) * _SUFFIXES[suffix] * 1000) / 1000
    return round(float(text) * 1000) / 1000


class Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    labels: dict[str, str] = {}
    resource_version: str = ""
    deletion_timestamp: str | None = None


class _Object(msgspec.Struct):
    metadata: Metadata

    @property
    def name(self) -> str:
        return self.metadata.name

    @classmethod
    def listed(cls, call: Callable[..., Any]) -> tuple[list[Self], str]:
        """The objects that there are, and the version of this list. Blocks."""
        answer = call(_preload_content=False)
        found = msgspec.json.decode(answer.data, type=_List[cls])  # type: ignore[valid-type]
        return found.items, found.metadata.resource_version


class _Condition(msgspec.Struct):
    type: str
    status: str


class _NodeSpec(msgspec.Struct):
    unschedulable: bool = False


class _NodeStatus(msgspec.Struct):
    allocatable: dict[str, str] = {}
    conditions: list[_Condition] = []


class NodeObject(_Object):
    spec: _NodeSpec = msgspec.field(default_factory=_NodeSpec)
    status: _NodeStatus = msgspec.field(default_factory=_NodeStatus)

    @property
    def usable(self) -> bool:
        """Ready, not cordoned, and not on its way out."""
        ready = any(c.type == "Ready" and c.status == "True" for c in self.status.conditions)
        return ready and not self.spec.unschedulable and self.metadata.deletion_timestamp is None


class _PodStatus(msgspec.Struct):
    phase: str = ""
    reason: str = ""
    message: str = ""


class PodObject(_Object):
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)


class _List(msgspec.Struct, Generic[T]):
    metadata: Metadata
    items: list[T]
