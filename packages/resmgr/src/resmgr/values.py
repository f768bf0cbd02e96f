"""The public values: what there is (Pool), is wanted (Request), was granted (Binding), has happened (Event).

All are frozen: a change is a new value. `validate` refuses what no store could mean (tests: `test_resmgr_values.py`).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from resmgr.amounts import UNIT, is_number, to_milli
from resmgr.errors import Invalid

# Of one list of a request, and of the letters of one node's labels or of a note: each travels in one call.
MOST_NAMES = 1000
LONGEST_LABELS = 100_000
# The store looks for a unit for each of them, and answers nobody else meanwhile.
MOST_FRACTIONS = 10_000

_NAME = re.compile(r"[\w.:@-]{1,200}")
_SURROGATE = re.compile("[\ud800-\udfff]")

EventKind = Literal[
    "bound", "fell_back", "move_offered", "moved_back", "lost", "released", "reconfigured", "registered"
]


def check_name(field: str, value: object) -> None:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise Invalid(f"{field}={value!r} must be 1 to 200 letters, digits or any of . : @ _ -")


def _check_names(field: str, values: object) -> None:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise Invalid(f"{field}={values!r} must be a list of names")
    if len(values) > MOST_NAMES:
        raise Invalid(f"{field} has {len(values)} names; give at most {MOST_NAMES}")
    for value in values:
        check_name(field, value)


def check_labels(field: str, labels: object) -> None:
    if not isinstance(labels, Mapping):
        raise Invalid(f"{field}={labels!r} must map strings to strings")
    for name, value in labels.items():
        if not (_is_text(name) and _is_text(value)):
            raise Invalid(
                f"{field}={{{name!r:.200}: {value!r:.200}}} must map strings to strings, without surrogates"
            )
    if sum(len(name) + len(value) for name, value in labels.items()) > LONGEST_LABELS:
        raise Invalid(f"{field} is longer than {LONGEST_LABELS} letters; keep it elsewhere, and its address here")


def _is_text(value: object) -> bool:
    """A string that can be sent: surrogates cannot."""
    return isinstance(value, str) and _SURROGATE.search(value) is None


def check_timeout(timeout: object) -> None:
    """Seconds from 0 on, `inf` included; None waits for ever."""
    if timeout is not None and not (is_number(timeout) and timeout >= 0):  # NaN is not
        raise Invalid(f"timeout={timeout!r} must be at least 0 s, or None to wait for ever")


def _check_flag(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise Invalid(f"{field}={value!r} must be True or False")


class Node(msgspec.Struct, frozen=True):
    """One machine of a pool. `labels` are added to the pool's and win over them."""

    name: str
    total: float
    labels: Mapping[str, str] = {}


class Pool(msgspec.Struct, frozen=True):
    """An amount of one hardware class. Without `nodes` it counts as a single node for anti-affinity and chunks."""

    name: str
    hardware: str
    total: float = 0
    backend: str = "static"
    nodes: Sequence[Node] = ()
    labels: Mapping[str, str] = {}

    def validate(self) -> None:
        check_name("Pool.name", self.name)
        check_name("Pool.hardware", self.hardware)
        check_name("Pool.backend", self.backend)
        check_labels("Pool.labels", self.labels)
        if isinstance(self.nodes, str) or not isinstance(self.nodes, Sequence):
            raise Invalid(f"Pool.nodes={self.nodes!r} must be a list of Node")
        for node in self.nodes:
            if not isinstance(node, Node):
                raise Invalid(f"Pool.nodes has {node!r}, which must be a Node")
            check_name("Node.name", node.name)
            check_labels("Node.labels", node.labels)
        names = [node.name for node in self.nodes]
        if len(set(names)) < len(names):
            raise Invalid(f"Pool.nodes of {self.name!r} must have different names, not {names}")
        by_node = sum(to_milli("Node.total", node.total) for node in self.nodes)
        if self.total and self.nodes and to_milli("Pool.total", self.total) != by_node:
            raise Invalid(
                f"Pool.total={self.total!r} must be the sum over its nodes, {by_node / UNIT}; or leave it out"
            )
        if not self.nodes and self.total:
            to_milli("Pool.total", self.total)
        if not self.nodes and not self.total and self.backend == "static":
            raise Invalid(f"Pool.total={self.total!r} of {self.name!r} must be positive, or give nodes")

    def places(self) -> list[tuple[str, int, dict[str, str]]]:
        """Each node as (place, thousandths, labels); the pool itself where it has none."""
        if self.nodes:
            return [
                (f"{self.name}/{n.name}", to_milli("Node.total", n.total), {**self.labels, **n.labels})
                for n in self.nodes
            ]
        return [(self.name, to_milli("Pool.total", self.total), dict(self.labels))] if self.total else []


class Request(msgspec.Struct, frozen=True):
    """What is wanted. It lands on one class: the first of `prefer`, then of `fallback`, that has room.

    `chunk` units stay together on one node (default: single units; a fraction stays within one unit). `spread`
    puts each chunk on a node of its own. `apart` names roles with which no node is shared, in both directions.
    `labels` must be those of the node; nodes named in `avoid` are not used. A grant is the whole `amount` unless
    `min_amount` allows less; `gang` forbids less.
    """

    role: str
    prefer: Sequence[str]
    fallback: Sequence[str] = ()
    amount: float = 1
    min_amount: float | None = None
    gang: bool = False
    chunk: float | None = None
    spread: bool = False
    apart: Sequence[str] = ()
    labels: Mapping[str, str] = {}
    priority: int = 0
    avoid: Sequence[str] = ()

    def validate(self) -> None:
        check_name("Request.role", self.role)
        _check_names("Request.prefer", self.prefer)
        _check_names("Request.fallback", self.fallback)
        _check_names("Request.apart", self.apart)
        _check_names("Request.avoid", self.avoid)
        classes = [*self.prefer, *self.fallback]
        if not self.prefer or len(set(classes)) < len(classes):
            raise Invalid(
                f"Request.prefer={list(self.prefer)} must name a class, and none of them twice with fallback"
            )
        amount = to_milli("Request.amount", self.amount)
        if self.min_amount is not None and to_milli("Request.min_amount", self.min_amount) > amount:
            raise Invalid(f"Request.min_amount={self.min_amount} must be at most amount={self.amount}")
        if self.gang and self.min_amount not in (None, self.amount):
            raise Invalid(f"Request.min_amount={self.min_amount} must be left out of a gang: it is granted whole")
        _check_flag("Request.gang", self.gang)
        _check_flag("Request.spread", self.spread)
        check_labels("Request.labels", self.labels)
        if type(self.priority) is not int or not -1000 <= self.priority <= 1000:
            raise Invalid(
                f"Request.priority={self.priority!r} must be a whole number within -1000..1000; higher goes first"
            )
        self._check_chunk(amount)
        if self.fractions > MOST_FRACTIONS:
            raise Invalid(
                f"Request.amount={self.amount} in chunks of {self.chunk} are {self.fractions} fractions; "
                f"ask for whole units, or for at most {MOST_FRACTIONS}"
            )

    @property
    def fractions(self) -> int:
        """How many parts of units are asked for."""
        if self.chunk is None or self.chunk >= 1:
            return 0
        return to_milli("Request.amount", self.amount) // to_milli("Request.chunk", self.chunk)

    def _check_chunk(self, amount: int) -> None:
        if self.chunk is None:
            if self.spread and amount > UNIT and amount % UNIT:
                raise Invalid(f"Request.amount={self.amount} must be a whole number to be spread over nodes")
            return
        chunk = to_milli("Request.chunk", self.chunk)
        if amount % chunk:
            raise Invalid(f"Request.amount={self.amount} must be a multiple of chunk={self.chunk}")
        if chunk > UNIT and chunk % UNIT:
            raise Invalid(f"Request.chunk={self.chunk} must be whole units, or a fraction of one")


class Allocation(msgspec.Struct, frozen=True):
    """A part of a binding: `amount` units on one node; `slot` names the shared unit when it is a fraction."""

    pool: str
    node: str
    amount: float
    slot: str = ""


class Binding(msgspec.Struct, frozen=True):
    """A grant. `token` is the fencing token, higher than that of every earlier grant; after a loss the same `id`
    returns under a higher one.
    """

    id: str
    role: str
    hardware: str
    fell_back: bool
    amount: float
    chunk: float
    token: int
    allocations: tuple[Allocation, ...]
    owner: str
    holder: str

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes it is on, each once; a pool without nodes counts as one."""
        return tuple(dict.fromkeys(a.node or a.pool for a in self.allocations))


class Event(msgspec.Struct, frozen=True):
    """What happened to a binding (or, for `registered`, to the pool named so). Ids count up without gaps."""

    id: int
    kind: EventKind
    binding: str
    role: str
    hardware: str
    amount: float
    token: int
    owner: str
    reason: str
    previous: str
    time: float
