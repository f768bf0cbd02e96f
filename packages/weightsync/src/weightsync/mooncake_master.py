"""A Mooncake master and a process that lends memory to it, as children of this process, for one host.

Both die with their parent, however it ends, and `stop` ends them; content lives as long as they do
(`test_weightsync_mooncake.py::test_the_master_dies_with_its_parent`).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import signal
import socket
import sys
from types import TracebackType
from typing import Self

from weightsync.errors import StoreUnavailable

__all__ = ["MooncakeMaster"]

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
# Long enough for the slowest bucket that one lease has to cover.
_LEASE_MS = 60_000
_GRACE_SECONDS = 5.0


class MooncakeMaster:
    """`async with MooncakeMaster(segment_bytes=1 << 30) as master: open_store(master.url())`."""

    def __init__(self, *, segment_bytes: int = 1 << 30, timeout: float = 30.0) -> None:
        self._segment_bytes = segment_bytes
        self._timeout = timeout
        self._children: list[asyncio.subprocess.Process] = []
        self.address = ""

    def url(self, namespace: str = "weights") -> str:
        return f"mooncake://{self.address}/{namespace}"

    async def start(self) -> Self:
        binary = shutil.which("mooncake_master", path=os.pathsep.join([os.path.dirname(sys.executable), os.defpath]))
        if binary is None:
            raise StoreUnavailable("mooncake_master is not installed: pip install rollart-weightsync[mooncake]")
        rpc, metrics = _free_ports(2)
        self.address = f"127.0.0.1:{rpc}"
        try:
            async with asyncio.timeout(self._timeout):
                await self._spawn(
                    binary,
                    "--rpc_address=127.0.0.1",
                    f"--rpc_port={rpc}",
                    "--metrics_host=127.0.0.1",
                    f"--metrics_port={metrics}",
                    f"--default_kv_lease_ttl={_LEASE_MS}",
                )
                await _listening(rpc)
                lender = await self._spawn(
                    sys.executable, "-m", "weightsync.mooncake_lender", self.address, str(self._segment_bytes)
                )
                assert lender.stdout is not None
                if await lender.stdout.readline() != b"ready\n":
                    raise StoreUnavailable("the process that lends memory to the Mooncake store did not start")
        except BaseException as error:
            await self.stop()
            if isinstance(error, TimeoutError):
                raise StoreUnavailable(f"the Mooncake master was not up in {self._timeout} s") from error
            raise
        return self

    @property
    def pids(self) -> list[int]:
        """The master, then the lender."""
        return [child.pid for child in self._children]

    async def stop(self) -> None:
        for child in reversed(self._children):
            if child.returncode is None:
                child.terminate()
            try:
                async with asyncio.timeout(_GRACE_SECONDS):
                    await child.wait()
            except TimeoutError:
                child.kill()
                await child.wait()
        self._children.clear()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _spawn(self, *command: str) -> asyncio.subprocess.Process:
        child = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self._children.append(child)
        return child


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


async def _listening(port: int) -> None:
    """A server that is starting offers nothing to wait on but its port."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.02)
        else:
            writer.close()
            await writer.wait_closed()
            return
