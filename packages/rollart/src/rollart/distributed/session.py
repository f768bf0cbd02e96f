"""A Ray of this process's own: started quietly on loopback, ended with everything that it started.

Invariants (tests/rollart/test_rollart_distributed_session.py):
- a terminal's Ctrl-C reaches the driver alone, as Ray lives below the keeper, in another session
  (test_interrupt_reaches_only_the_driver);
- after `stop`, and after the driver's death by any signal, the keeper leaves no process behind, grandchildren of
  killed actors included (test_stop_leaves_nothing, test_nothing_outlives_a_killed_driver);
- only loopback is listened on, and only holders of this process's token are served (test_only_loopback_listens).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rollart.distributed.errors import SessionFailed

_HERE = Path(__file__).parent
# Ray appends up to 66 characters for its sockets, whose paths may have 107.
_LONGEST_FOLDER = 40

# Ray's settings are read from the environment of the process that they concern.
_SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Despite its name, 0 makes Ray use the loopback address on Linux as well.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Actors have an environment of their own, which no worker started ahead has.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    # A busy machine needs more than Ray's 10 to 60 seconds.
    "RAY_raylet_start_wait_time_s": "150",
    "RAY_gcs_server_port_wait_time_s": "150",
    "RAY_agent_register_timeout_ms": "150000",
    "RAY_worker_register_timeout_seconds": "150",
}


class RaySession:
    """A local Ray. One at a time in a process; `start` and `stop` it, or use it as an async context manager."""

    def __init__(
        self,
        *,
        cpus: int | None = None,
        object_store_bytes: int = 256 << 20,
        start_timeout: float = 180.0,
        owns: Sequence[Path] = (),
    ) -> None:
        """`owns` are folders that are removed when the session ends, whatever ends it."""
        self._cpus = cpus or os.cpu_count() or 1
        self._object_store_bytes = object_store_bytes
        self._start_timeout = start_timeout
        self._owns = tuple(owns)
        self._keeper: asyncio.subprocess.Process | None = None
        self.address = ""

    async def start(self) -> None:
        """Start Ray and connect this process to it."""
        if self._keeper is not None:
            raise SessionFailed("this session has been started; stop it first")
        folder = _short_folder()
        self._keeper = await self._spawn(folder)
        try:
            async with asyncio.timeout(self._start_timeout):
                self.address = await self._started(self._keeper, folder)
                await asyncio.to_thread(_connect, self.address)
            _keep_signals()
        except BaseException as error:
            await self.stop()
            if isinstance(error, TimeoutError):
                raise SessionFailed(f"Ray did not start within {self._start_timeout} s") from error
            raise

    async def stop(self) -> None:
        """Disconnect, and end everything that runs under this session."""
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        assert keeper.stdin is not None
        try:
            await asyncio.to_thread(_disconnect)
        finally:
            keeper.stdin.close()
        await keeper.wait()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _spawn(self, folder: Path) -> asyncio.subprocess.Process:
        head = [sys.executable, "-P", str(_HERE / "head.py")]
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_HERE / "keeper.py")),
            *(str(os.getpid()), os.pathsep.join(map(str, (folder, *self._owns)))),
            *(*head, str(folder), str(self._cpus), str(self._object_store_bytes)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **_SETTINGS, "RAY_AUTH_TOKEN": _token()},
            start_new_session=True,
        )

    @staticmethod
    async def _started(keeper: asyncio.subprocess.Process, folder: Path) -> str:
        assert keeper.stdout is not None
        if (await keeper.stdout.readline()).strip() != b"ready":
            raise SessionFailed(f"Ray did not start:\n{tail(folder / 'start.log')}")
        return (folder / "address").read_text()


def tail(path: Path, lines: int = 20) -> str:
    """The last lines of a log file; nothing when there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 400 * lines))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def _short_folder() -> Path:
    """A new folder whose sockets' paths are short enough."""
    for parent in (tempfile.gettempdir(), "/tmp", "/dev/shm"):
        folder = Path(parent, f"ray-{secrets.token_hex(4)}")
        if len(str(folder)) <= _LONGEST_FOLDER and os.access(parent, os.W_OK):
            folder.mkdir(mode=0o700)
            return folder
    raise SessionFailed("no writable temporary folder has a short path; set TMPDIR to one of at most 27 characters")


@functools.cache
def _token() -> str:
    """The secret of this process's sessions. Ray reads it once a process, so all have the same."""
    return secrets.token_hex(32)


def _connect(address: str) -> None:
    """Join the cluster; the token stays out of the environment of what this process starts."""
    settings = {"RAY_AUTH_MODE": _SETTINGS["RAY_AUTH_MODE"], "RAY_AUTH_TOKEN": _token()}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        _init(address)
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _init(address: str) -> None:
    """Initialize Ray, which may have been imported before with other settings."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    import ray
    from ray._private import ray_constants, worker
    from ray._raylet import Config  # type: ignore[attr-defined]

    ray_constants.ENABLE_RAY_CLUSTER = False
    # Else Ray prints of every death; ours are errors, for those whom they concern.
    worker._worker_logs_enabled = False
    Config.initialize("")
    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)


def _keep_signals() -> None:
    """Put Python's handlers back in the place of Ray's, which prints a crash report on SIGTERM and aborts."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.getsignal(number))
            signal.siginterrupt(number, False)


def _disconnect() -> None:
    import ray

    ray.shutdown()
