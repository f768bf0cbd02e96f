"""A worker process as seen from the loop: started, asked, killed with all that it started.

Invariants:
- one call at a time; a call that was given up, failed on the wire or got a wrong reply leaves the process unfit,
  and it is killed (test_envmanager_subprocess.py::test_a_hanging_step_is_killed_and_replaced);
- `kill` does not wait and cannot fail; `gone` waits until process and descendants are reaped.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from envmanager.backends.wire import HEADER_BYTES, LARGEST_FRAME, Ask, Call, Told, frame, opened
from envmanager.errors import InfrastructureError

KEEPER = str(Path(__file__).with_name("keeper.py"))
# The keeper needs only as long as the kernel needs to kill; longer, and it is stuck itself.
REAP_S = 5.0


class Process:
    """A keeper and its worker. `fit` until something went wrong with it."""

    def __init__(self, memory: int | None = None, environ: Mapping[str, str] | None = None) -> None:
        self._memory = memory or 0
        self._environ = environ or {}
        self._decoder = msgspec.msgpack.Decoder(Told)
        self._keeper: asyncio.subprocess.Process | None = None
        self._busy = False
        self.fit = False  # until it runs

    async def start(self) -> None:
        """Returns when the process exists; its first call waits for what it must import."""
        environ = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | dict(os.environ) | dict(self._environ)
        environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._keeper = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            KEEPER,
            str(os.getpid()),
            str(self._memory),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environ,
            start_new_session=True,
        )
        self.fit = True

    async def ask(self, incarnation: int, call: Call, argument: Any) -> Any:
        """The call's value, or its failure with its kind."""
        assert self._keeper is not None and self._keeper.stdin is not None
        if self._busy or not self.fit:
            raise InfrastructureError(f"the process is {'in a call' if self._busy else 'unfit'}; use another")
        self._busy = True
        self.fit = False  # until the reply is in: whoever cancels this call leaves the process unfit
        try:
            self._keeper.stdin.write(frame(Ask(incarnation, call, argument)))
            await self._keeper.stdin.drain()
            told = await self._reply()
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise InfrastructureError(f"the environment's process {await self._obituary()}") from error
        finally:
            self._busy = False
        if told.incarnation != incarnation:
            raise InfrastructureError(f"the process answered for {told.incarnation}, not for {incarnation}")
        self.fit = True
        return opened(told)

    def kill(self) -> None:
        self.fit = False
        if self._keeper is not None and self._keeper.returncode is None:
            self._keeper.terminate()

    async def gone(self) -> None:
        """Waits until everything has ended; what cannot be ended so is killed hard, keeper and all."""
        if self._keeper is None:
            return
        try:
            async with asyncio.timeout(REAP_S):
                await self._keeper.wait()
        except TimeoutError:
            os.killpg(self._keeper.pid, signal.SIGKILL)
            await self._keeper.wait()

    async def _reply(self) -> Told:
        assert self._keeper is not None and self._keeper.stdout is not None
        size = int.from_bytes(await self._keeper.stdout.readexactly(HEADER_BYTES), "little")
        if size > LARGEST_FRAME:
            raise InfrastructureError(f"the process announced a reply of {size} bytes; the stream is broken")
        body = await self._keeper.stdout.readexactly(size)
        try:
            return self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise InfrastructureError(f"the process sent what is no reply ({error})") from error

    async def _obituary(self) -> str:
        assert self._keeper is not None and self._keeper.stderr is not None
        text = (await self._keeper.stderr.read(1 << 14)).decode(errors="replace")
        return text or "ended"
