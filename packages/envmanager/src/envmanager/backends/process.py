"""A worker process as seen from the loop: asked over a socket, killed with all that it started.

Invariants:
- one call at a time; a call that was given up, failed on the wire or got a wrong reply leaves the process unfit,
  and it is killed (test_envmanager_subprocess.py::test_a_hanging_step_is_killed_and_replaced);
- `kill` does not wait and cannot fail; `gone` waits until process and descendants are reaped.
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from envmanager.backends.wire import HEADER_BYTES, LARGEST_FRAME, Ask, Call, Told, frame, opened
from envmanager.errors import InfrastructureError

# The keeper needs only as long as the kernel needs to kill; longer, and it is stuck itself.
REAP_S = 5.0


class Process:
    """A keeper and its worker. `fit` until something went wrong with it."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(Told)
        self._replies: asyncio.StreamReader
        self._requests: asyncio.StreamWriter | None = None
        self._words: asyncio.StreamReader
        self._lifeline: asyncio.StreamWriter | None = None
        self._pid = 0
        self._busy = False
        self.fit = False  # until it runs

    @property
    def ended(self) -> bool:
        """Whether it ended by itself, as far as is known here."""
        return self._replies.at_eof()

    async def start(self, fork: Callable[[list[int]], None]) -> None:
        """`fork` gets the far ends of its two sockets. Returns when the keeper runs; the first call waits for the
        worker.
        """
        (talk, talk_there), (life, life_there) = socket.socketpair(), socket.socketpair()
        try:
            with talk_there, life_there:
                fork([talk_there.fileno(), life_there.fileno()])
            self._words, self._lifeline = await asyncio.open_unix_connection(sock=life)
            self._replies, self._requests = await asyncio.open_unix_connection(sock=talk)
        except BaseException:
            talk.close()
            if self._lifeline is None:
                life.close()
            raise
        pid = await self._words.readline()
        if not pid:
            raise InfrastructureError("the environment's process did not start")
        self._pid = int(pid)
        self.fit = True

    async def ask(self, incarnation: int, call: Call, argument: Any) -> Any:
        """The call's value, or its failure with its kind."""
        if self._busy or not self.fit or self._requests is None:
            raise InfrastructureError(f"the process is {'in a call' if self._busy else 'unfit'}; use another")
        self._busy = True
        self.fit = False  # until the reply is in: whoever cancels this call leaves the process unfit
        try:
            self._requests.write(frame(Ask(incarnation, call, argument)))
            await self._requests.drain()
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
        """Breaks the lifeline; the keeper does the rest."""
        self.fit = False
        if self._lifeline is not None:
            with contextlib.suppress(OSError):
                self._lifeline.write_eof()

    async def gone(self) -> None:
        """Waits until everything has ended. A keeper that does not end is killed hard, with its group; one that has
        not begun yet ends as soon as it does, since its lifeline is broken.
        """
        if self._lifeline is None:
            return
        try:
            async with asyncio.timeout(REAP_S):
                await self._words.read()
        except TimeoutError:
            if self._pid:  # 0 would mean our own group
                os.killpg(self._pid, signal.SIGKILL)
                await self._words.read()
        for writer in (self._lifeline, self._requests):
            if writer is not None:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

    async def _reply(self) -> Told:
        size = int.from_bytes(await self._replies.readexactly(HEADER_BYTES), "little")
        if size > LARGEST_FRAME:
            raise InfrastructureError(f"the process announced a reply of {size} bytes; the stream is broken")
        body = await self._replies.readexactly(size)
        try:
            return self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise InfrastructureError(f"the process sent what is no reply ({error})") from error

    async def _obituary(self) -> str:
        text = (await self._words.read(1 << 14)).decode(errors="replace")
        return text or "ended"
