"""The suspend barrier and the version fence, as plain state.

Invariants (tests/llmproxy/test_llmproxy_gate.py):
- while suspended, nothing is admitted;
- a worker serves only if it has *proved* the allowed version and no failure was reported since.
"""

from __future__ import annotations

from collections.abc import Iterable

from .errors import WrongState


class Gate:
    """Says whether requests may be placed, and on which workers."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.suspended = False
        self.broken = False
        self._proved: dict[str, int | None] = {}
        self._reasons: dict[str, str] = {}

    def suspend(self) -> None:
        self.suspended = True

    def resume(self) -> None:
        if self.broken:
            raise WrongState(
                f"the last update failed and version {self.version} is no longer held by the whole fleet; "
                "update again, or remove the failed workers and update"
            )
        self.suspended = False

    def allow(self, version: int) -> None:
        """From now on only workers that prove `version` serve. Needs the barrier down."""
        if not self.suspended:
            raise WrongState("the version can only change while suspended; call suspend first")
        self.version = version
        self.broken = False

    def refuse(self) -> None:
        """An update began, or failed as a whole: stay suspended until one succeeds."""
        self.broken = True

    def prove(self, worker_id: str, version: int | None) -> bool:
        """A worker showed its version; the answer is whether it serves now."""
        self._proved[worker_id] = version
        if version == self.version:
            self._reasons.pop(worker_id, None)
        else:
            self._reasons[worker_id] = f"holds version {version}, allowed is {self.version}"
        return self.serves(worker_id)

    def fence(self, worker_id: str, reason: str) -> None:
        """No traffic until the worker proves the allowed version again."""
        self._proved[worker_id] = None
        self._reasons[worker_id] = reason

    def forget(self, worker_id: str) -> None:
        self._proved.pop(worker_id, None)
        self._reasons.pop(worker_id, None)

    def serves(self, worker_id: str) -> bool:
        return self._proved.get(worker_id) == self.version

    def fenced(self, worker_ids: Iterable[str]) -> str:
        """Those that are fenced, as an error tells of them; empty when none is."""
        told = "; ".join(f"{id}: {self.reason(id)}" for id in worker_ids if not self.serves(id))
        return f", fenced are {told}" if told else ""

    def reason(self, worker_id: str) -> str:
        """Why a worker is fenced; empty when it serves."""
        return "" if self.serves(worker_id) else self._reasons.get(worker_id, "missed an update")
