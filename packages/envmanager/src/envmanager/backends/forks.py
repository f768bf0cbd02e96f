"""The nursery of one pool, from the pool's side: one process that forks workers on order.

Invariant: a nursery that died is replaced by one that imports nothing of the user's (its death may be that
import's doing); what it forked lives on (test_envmanager_subprocess.py::test_a_nursery_that_dies_is_replaced).
"""

import asyncio
import os
import socket
import sys
from collections.abc import Mapping

import msgspec

from envmanager.backends.wire import Order


class Forks:
    """Started at the first need. `memory` bounds the data of each worker, 0 is no bound. A worker in a `sandbox`
    imports the target itself, in there. Another `python` has packages of its own, envmanager among them.
    """

    def __init__(
        self, target: str, memory: int, environ: Mapping[str, str], sandbox: bool = False, python: str = ""
    ) -> None:
        self._target = "" if sandbox else target
        self._order = msgspec.msgpack.encode(Order(memory, dict(environ) if sandbox else None))
        self._environ = environ
        self._python = python
        self._starting = asyncio.Lock()
        self._nursery: asyncio.subprocess.Process | None = None
        self._orders: socket.socket | None = None

    async def ready(self) -> None:
        """Sees to it that there is a nursery, though perhaps a busy one."""
        async with self._starting:
            if self._nursery is not None and self._nursery.returncode is None:
                return
            if self._nursery is not None:
                self._target = ""
                await self.close()
            await self._start()

    def fork(self, fds: list[int]) -> None:
        """Orders one keeper with these descriptors; whether it came to be is seen by whoever holds their other
        ends.
        """
        assert self._orders is not None
        socket.send_fds(self._orders, [self._order], fds)

    async def close(self) -> None:
        """Ends the nursery; what it forked ends by its own lifelines."""
        if self._orders is not None:
            self._orders.close()
            self._orders = None
        if self._nursery is not None:
            if self._nursery.returncode is None:
                self._nursery.terminate()
            await self._nursery.wait()
            self._nursery = None

    async def _start(self) -> None:
        environ = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | dict(os.environ) | dict(self._environ)
        if not self._python:
            environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        command = [self._python or sys.executable, "-P", "-m", "envmanager.backends.nursery"]
        self._orders, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.setblocking(False)
        with there:
            self._nursery = await asyncio.create_subprocess_exec(
                *(*command, str(there.fileno()), self._target, str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                env=environ,
                start_new_session=True,
            )
