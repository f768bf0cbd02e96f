"""Worker processes that come with demand, from none, and go without it.

Invariants (tests/rollart/test_rollart_serverless_workers.py):
- at most `workers` processes, each in one call at a time; at most `queue` calls wait, in order, and one more is
  refused (test_the_queue_is_bounded_and_in_order);
- a process that had nothing to do for `idle` seconds ends, down to `least` (test_from_zero_and_back);
- a call that takes too long, is cancelled, or loses its process costs that process, with all that it started, and no
  other call (test_what_hangs_is_ended);
- after `close` no process is left (same tests).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
from collections import deque

import msgspec

from rollart.serverless import worker
from rollart.serverless.errors import BadCall, Busy, CallTimeout, FunctionFailed, WorkerLost
from rollart.serverless.settings import Settings
from rollart.serverless.worker import LENGTH_BYTES, READY, Answer, frame

_decode = msgspec.msgpack.Decoder(Answer).decode
# Of the seconds that calls take, for the advice when to come again: the newest weighs so much.
_NEWEST = 0.2


class WorkerStats(msgspec.Struct):
    """Processes by what they do, seconds of work and of life of all, and the starts that calls had to wait for."""

    starting: int = 0
    busy: int = 0
    idle: int = 0
    waiting: int = 0
    started: int = 0
    ended: int = 0
    busy_s: float = 0.0
    alive_s: float = 0.0
    cold_starts: int = 0
    cold_start_s: float = 0.0


class _Process:
    """One worker, spoken to by its pipes."""

    def __init__(self, process: asyncio.subprocess.Process, born: float) -> None:
        self.born = born
        self.expiry: asyncio.TimerHandle | None = None
        self._process = process

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    async def receive(self) -> bytes:
        out = self._process.stdout
        assert out is not None
        try:
            return await out.readexactly(int.from_bytes(await out.readexactly(LENGTH_BYTES), "little"))
        except asyncio.IncompleteReadError:
            code = await self._process.wait()
            raise WorkerLost(f"the worker's process ended with {code}; see the server's log for why") from None

    async def ask(self, body: bytes) -> Answer:
        into = self._process.stdin
        assert into is not None
        into.write(frame(body))
        with contextlib.suppress(ConnectionError):  # what it died of is told by `receive`
            await into.drain()
        return _decode(await self.receive())

    async def end(self) -> None:
        """Ends the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # `wait` is for the pipes, too: one with an answer that nobody reads, or held by a daemon, would never end.
        self._process._transport.close()  # type: ignore[attr-defined]
        await self._process.wait()


class Workers:
    """Call `call`. `close` when done."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._waiting: deque[asyncio.Future[_Process | None]] = deque()
        self._claimed = 0  # processes that are there or being started
        self._stats = WorkerStats()
        self._mean_s = 1.0
        self._ending: set[asyncio.Task[None]] = set()

    def stats(self) -> WorkerStats:
        now = asyncio.get_running_loop().time()
        return msgspec.structs.replace(
            self._stats,
            idle=len(self._idle),
            waiting=len(self._waiting),
            alive_s=self._stats.alive_s + sum(now - process.born for process in self._all),
        )

    async def warm(self) -> None:
        """Starts the processes that are always there. Raises WorkerLost when the function cannot be loaded."""
        for process in await asyncio.gather(*(self._started() for _ in range(self._settings.least))):
            self._give(process)

    async def call(self, body: bytes) -> bytes:
        """The function's answer, as JSON. Raises Busy, BadCall, FunctionFailed, WorkerLost or CallTimeout."""
        loop = asyncio.get_running_loop()
        process = await self._take()
        began = loop.time()
        self._stats.busy += 1
        try:
            async with asyncio.timeout(self._settings.timeout):
                answer = await process.ask(body)
        except BaseException as error:
            self._end(process)
            if isinstance(error, TimeoutError):
                raise CallTimeout(f"the call took longer than {self._settings.timeout} s") from None
            raise
        finally:
            self._stats.busy -= 1
            took = loop.time() - began
            self._stats.busy_s += took
            self._mean_s += _NEWEST * (took - self._mean_s)
        self._give(process)
        if answer.code == 200:
            return answer.body
        raise (BadCall if answer.code == 400 else FunctionFailed)(answer.text)

    async def close(self) -> None:
        """Ends every process; calls that wait raise WorkerLost, calls under way lose theirs."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(WorkerLost("the server ended"))
        self._idle.clear()
        for process in list(self._all):
            self._end(process)
        while self._ending:
            await asyncio.wait(self._ending)

    async def _take(self) -> _Process:
        while self._idle:
            process = self._idle.pop()  # the one used last, so that the others can go
            if process.ended:  # killed from elsewhere, or by what an earlier call left running
                self._end(process)
                continue
            if process.expiry is not None:
                process.expiry.cancel()
            return process
        if self._claimed < self._settings.workers:
            return await self._cold()
        if len(self._waiting) >= self._settings.queue:
            after = math.ceil(self._mean_s * (1 + len(self._waiting) / self._settings.workers))
            raise Busy(f"{self._settings.workers} workers are busy and {len(self._waiting)} calls wait", after)
        turn: asyncio.Future[_Process | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            given = await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._hand_on(turn.result())
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(turn)
        return given if given is not None else await self._cold(claimed=True)

    def _hand_on(self, process: _Process | None) -> None:
        """A caller that is gone leaves what it was given to the next."""
        if process is not None:
            self._give(process)
        else:
            self._room()

    def _next(self) -> asyncio.Future[_Process | None] | None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                return turn
        return None

    def _give(self, process: _Process) -> None:
        turn = self._next()
        if turn is not None:
            turn.set_result(process)
            return
        self._idle.append(process)
        loop = asyncio.get_running_loop()
        process.expiry = loop.call_later(self._settings.idle, self._expire, process)

    def _expire(self, process: _Process) -> None:
        if process in self._idle and len(self._all) > self._settings.least:
            self._idle.remove(process)
            self._end(process)

    def _end(self, process: _Process) -> None:
        if process not in self._all:
            return
        loop = asyncio.get_running_loop()
        self._all.remove(process)
        self._stats.alive_s += loop.time() - process.born
        self._stats.ended += 1
        if process.expiry is not None:
            process.expiry.cancel()
        task = loop.create_task(process.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        self._room()

    def _room(self) -> None:
        """One process fewer: who waits first may start another."""
        turn = self._next()
        if turn is not None:
            turn.set_result(None)
        else:
            self._claimed -= 1

    async def _cold(self, claimed: bool = False) -> _Process:
        began = asyncio.get_running_loop().time()
        process = await self._started(claimed)
        self._stats.cold_starts += 1
        self._stats.cold_start_s += asyncio.get_running_loop().time() - began
        return process

    async def _started(self, claimed: bool = False) -> _Process:
        self._claimed += not claimed
        self._stats.starting += 1
        loop = asyncio.get_running_loop()
        process: _Process | None = None
        try:
            process = _Process(await self._spawn(), loop.time())
            self._all.add(process)
            self._stats.started += 1
            async with asyncio.timeout(self._settings.start_timeout):
                if (said := await process.receive()) != READY:
                    raise WorkerLost(f"{self._settings.function} cannot be loaded: {said.decode(errors='replace')}")
        except BaseException as error:
            if process is not None:
                self._end(process)
            else:
                self._room()
            if isinstance(error, TimeoutError):
                raise WorkerLost(f"the worker did not start within {self._settings.start_timeout} s") from None
            raise
        finally:
            self._stats.starting -= 1
        return process

    async def _spawn(self) -> asyncio.subprocess.Process:
        environ = {"OMP_NUM_THREADS": "1", **os.environ}
        environ["PYTHONPATH"] = os.pathsep.join([*(path or os.getcwd() for path in sys.path), os.getcwd()])
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", worker.__file__, self._settings.function, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environ,
            start_new_session=True,
        )
