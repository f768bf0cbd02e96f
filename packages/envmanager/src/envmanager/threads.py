"""Threads for environments that block: one each, so that none waits for another.

Invariants:
- calls of one environment run in one thread, in order, from its making to its close;
- a call that was given up poisons its thread: nothing but the close is asked of that environment any more,
  so a late step lands in no other episode (test_envmanager_host.py::test_late_step_lands_nowhere);
- threads stuck in a given-up call are counted, and `limit` of them stop new ones
  (test_envmanager_host.py::test_stuck_limit).
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

from envmanager.errors import InfrastructureError


class Returned(NamedTuple):
    """What a call came to. An error travels as a value: a future takes no StopIteration, and complains of
    one never read.
    """

    value: Any
    error: BaseException | None


_Call = tuple[asyncio.AbstractEventLoop, asyncio.Future[Returned], Callable[[], Any]]


def _settle(future: asyncio.Future[Returned], returned: Returned) -> None:
    if not future.done():
        future.set_result(returned)


class EnvThread:
    """Runs one environment's calls. A daemon: a call that never returns must not keep the interpreter from
    exiting.
    """

    __slots__ = ("_abandoned", "_calls", "_given_up", "_thread")

    def __init__(self, name: str, abandoned: "set[EnvThread]") -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._abandoned = abandoned
        self._given_up = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    async def call(self, function: Callable[[], Any]) -> Returned:
        """Runs the function in the thread. A caller that is cancelled leaves it running there and gives the
        thread up.
        """
        if self._given_up:
            raise InfrastructureError("the environment is still in a call that was given up; make a new one")
        future = self._ask(function)
        try:
            return await future
        except asyncio.CancelledError:
            self._given_up = True
            self._abandoned.add(self)
            raise

    async def end(self, close: Callable[[], Any]) -> Returned:
        """Closes and ends the thread. After a call that was given up this happens whenever that returns:
        nobody waits for it.
        """
        try:
            if not self._given_up:
                return await self.call(close)
            self._ask(close)
            return Returned(None, None)
        finally:
            self._calls.put(None)

    def stop(self) -> None:
        """Ends the thread after what it was given."""
        self._calls.put(None)

    def _ask(self, function: Callable[[], Any]) -> asyncio.Future[Returned]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Returned] = loop.create_future()
        self._calls.put((loop, future, function))
        return future

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            loop, future, function = call
            try:
                returned = Returned(function(), None)
            except BaseException as error:  # an environment that calls sys.exit() ends its episode, nothing else
                returned = Returned(None, error)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(_settle, future, returned)
            del call, future, function, returned  # an idle thread keeps nothing alive


class Threads:
    """Starts environment threads; refuses once `limit` of them are stuck, since a thread cannot be killed."""

    def __init__(self, limit: int = 64) -> None:
        self.limit = limit
        self._abandoned: set[EnvThread] = set()

    @property
    def stuck(self) -> int:
        """Threads in a call that its caller has given up."""
        self._abandoned.difference_update([thread for thread in self._abandoned if not thread.alive])
        return len(self._abandoned)

    def start(self, name: str) -> EnvThread:
        if self._abandoned and self.stuck >= self.limit:
            raise InfrastructureError(
                f"{self.limit} environment threads hang and cannot be killed; use the subprocess backend"
            )
        try:
            return EnvThread(name, self._abandoned)
        except RuntimeError as error:
            raise InfrastructureError(f"no thread for the environment ({error}); lower the concurrency") from error
