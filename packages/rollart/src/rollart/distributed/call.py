"""A call of a cluster's method, under way on one or more workers.

Invariants (tests/rollart/test_rollart_distributed_cluster.py):
- results keep the order of ranks (test_modes_choose_workers_and_keep_order);
- when the caller is cancelled or one part fails, the parts under way are cancelled on their workers
  (test_cancelling_reaches_the_worker, test_the_first_failure_cancels_the_other_parts).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any

import msgspec

from rollart.distributed.errors import WorkerDied
from rollart.distributed.member import Member


class Part(msgspec.Struct):
    """One worker's share of a call: the reference to its result, and how to repeat it where that is allowed. Without
    a reference it is to be made once the worker is up again.
    """

    member: Member
    method: str
    reference: Any
    again: Callable[[], Any] | None

    async def wait(self) -> Any:
        try:
            if self.reference is not None:
                return await self.member.wait(self.reference, self.method)
        except WorkerDied:
            if self.again is None:
                raise
        await self.member.settled.wait()
        assert self.again is not None
        self.reference = self.again()
        return await self.wait()


class Call:
    """Await it, or ask for its `result` where nothing awaits. The workers have been called already."""

    def __init__(self, parts: Sequence[Part], join: Callable[[list[Any]], Any]) -> None:
        self._parts = parts
        self._join = join

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        if len(self._parts) == 1:
            return self._join([await self._parts[0].wait()])
        return self._join(await together([part.wait() for part in self._parts]))

    def result(self, timeout: float | None = None) -> Any:
        """Block until the result is there; not on a running event loop. Nothing is repeated. Raises TimeoutError."""
        import ray

        for part in self._parts:
            if part.reference is None:
                part.member.check()
        parts = {part.reference: part for part in self._parts}
        pending = list(parts)
        deadline = None if timeout is None else time.monotonic() + timeout
        results: dict[Any, Any] = {}
        while pending:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            done, pending = ray.wait(pending, timeout=left)
            if not done:
                raise TimeoutError(f"{len(pending)} of {len(parts)} workers have not answered within {timeout} s")
            results[done[0]] = _get(parts[done[0]])
        return self._join([results[part.reference] for part in self._parts])


def _get(part: Part) -> Any:
    import ray

    try:
        return ray.get(part.reference)
    except ray.exceptions.RayError as error:
        raise part.member.translated(error, part.method, part.reference) from None


async def together(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """All results in order. The first failure is raised as it is, after the others have been cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
