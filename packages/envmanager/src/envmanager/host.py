"""One environment from its making to its end, as seen from the loop: blocking ones in a thread, the others
in place.

Invariant: an environment that was made is closed exactly once, and killed if it can be, however its episode
ends (test_envmanager_scheduler.py::test_nothing_is_alive_after_any_interleaving).
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from envmanager.contract import check_key, check_reset, check_step, check_task
from envmanager.deadline import within
from envmanager.errors import DataError, InfrastructureError, RolloutError
from envmanager.faults import foreign, told
from envmanager.protocols import MakeEnv
from envmanager.threads import EnvThread, Returned, Threads

M = TypeVar("M", bound=Callable[..., Any])
T = TypeVar("T")

log = logging.getLogger(__name__)


def nonblocking(make_env: M) -> M:
    """Marks a factory (or an environment class) as quick enough to run on the loop."""
    make_env.blocking = False  # type: ignore[attr-defined]
    return make_env


def blocks(thing: Any) -> bool:
    """Whether a factory or an environment needs a thread: it is not async and does not say `blocking =
    False`.
    """
    return getattr(thing, "blocking", True) and not inspect.iscoroutinefunction(getattr(thing, "reset", None))


def typed(error: BaseException, what: str) -> RolloutError:
    """An environment's exception as a failure with a kind: the operating system's are infrastructure, the
    rest its own fault.
    """
    if isinstance(error, RolloutError):
        return error
    kind = InfrastructureError if isinstance(error, OSError | MemoryError | EOFError) else DataError
    failure = kind(f"{what} raised {told(error)}")
    failure.__cause__ = error
    return failure


def _checked(what: str, check: Callable[[Any], T], value: Any) -> T:
    """The value as the check has it; one that cannot even be looked at is its maker's fault."""
    try:
        return check(value)
    except RolloutError:
        raise
    except Exception as error:
        raise typed(error, what) from error


async def _finished(closing: Awaitable[Any]) -> None:
    await closing


class EnvHost:
    """Makes the environment of a key at reset, and speaks its five-tuple, checked."""

    __slots__ = ("_env", "_key", "_make", "_thread", "_threads", "task")

    def __init__(self, make_env: MakeEnv, key: str, threads: Threads) -> None:
        self._make = make_env
        self._key = key
        self._threads = threads
        self._thread: EnvThread | None = None
        self._env: Any = None
        self.task = "default"

    async def reset(self, seed: int | None) -> tuple[str, dict[str, Any]]:
        check_key(self._key)
        await self._open()
        env = self._env
        result = _checked("reset", check_reset, await self._call("reset", lambda: env.reset(seed=seed)))
        self.task = _checked("task", lambda env: check_task(getattr(env, "task", "default")), env)
        return result

    async def step(self, action: str, seconds: float | None) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Within so many seconds, where it is waited for: on the loop it is over before a deadline can be looked
        at.
        """
        env = self._env
        return _checked("step", check_step, await self._call("step", lambda: env.step(action), seconds))

    async def close(self) -> None:
        """Ends the environment, also one whose making was given up and is made only later."""
        thread, self._thread = self._thread, None
        try:
            if thread is not None:
                _, error = await thread.end(self._close_there)
            else:
                _, error = await self._here("close", self._close)
            if error is not None:
                raise typed(error, "close")
        finally:
            self._kill()

    async def _open(self) -> None:
        if blocks(self._make):
            self._thread = self._threads.start(f"env {self._key[:80]}")
        await self._call("make_env", self._made)
        if blocks(self._env):
            self._thread = self._thread or self._threads.start(f"env {self._key[:80]}")
        elif self._thread is not None:
            self._thread.stop()
            self._thread = None

    def _made(self) -> None:
        self._env = self._make(self._key)

    def _close(self) -> Any:
        close = getattr(self._env, "close", None)
        return close() if close is not None else None

    def _kill(self) -> None:
        try:
            if kill := getattr(self._env, "kill", None):
                kill()
        except Exception as error:
            log.warning("killing the environment of %r: it raised %s", self._key, told(error))

    def _close_there(self) -> None:
        """In the thread; an async environment is here only when its making was given up before it could leave."""
        closing = self._close()
        if inspect.isawaitable(closing):
            asyncio.run(_finished(closing))

    async def _call(self, what: str, function: Callable[[], Any], seconds: float | None = None) -> Any:
        if self._thread is not None:
            value, error = await within(what, seconds, self._thread.call(function))
        else:
            value, error = await self._here(what, function, seconds)
        if error is not None:
            raise typed(error, what)
        return value

    async def _here(self, what: str, function: Callable[[], Any], seconds: float | None = None) -> Returned:
        """Calls on the loop, and awaits what it gives where that can be awaited."""
        try:
            value = function()
            if type(value) is not tuple and inspect.isawaitable(value):
                value = await within(what, seconds, value)
        except BaseException as error:
            if not foreign(error):
                raise
            return Returned(None, error)
        return Returned(value, None)
