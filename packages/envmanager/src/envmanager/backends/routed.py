"""Several backends behind one factory, each with a circuit of its own in the scheduler.

Invariant: a backend that is down holds up only its own keys
(test_envmanager_circuit.py::test_a_backend_that_is_down_holds_up_only_its_own).
"""

from collections.abc import Callable, Mapping
from typing import Any

from envmanager.errors import UnknownEnv
from envmanager.host import blocks
from envmanager.protocols import MakeEnv


class Routed:
    """`route(key)` names the backend that makes the environment of a key."""

    def __init__(self, backends: Mapping[str, MakeEnv], route: Callable[[str], str]) -> None:
        self._backends = dict(backends)
        self._route = route
        self.blocking = any(map(blocks, self._backends.values()))

    def backend_of(self, key: str) -> str:
        return self._route(key)

    def __call__(self, key: str) -> Any:
        """Raises UnknownEnv where the route leads nowhere."""
        name = self._route(key)
        if name not in self._backends:
            raise UnknownEnv(f"{key!r} is routed to {name!r}, which is none of {', '.join(self._backends)}")
        return self._backends[name](key)
