"""The store: atomic calls, and streams that are followed, over the Redis protocol.

Every call is one server-side function (functions/*.lua), so it happens whole or not at all, and is safe to
repeat. While the server cannot be reached, calls are repeated until `patience` ends (tests:
`test_resmgr_failover.py`).
"""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable
from importlib import resources
from typing import Any

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from resmgr.connection import Connection, NotRedis, packed
from resmgr.embedded import EmbeddedServer
from resmgr.errors import Closed, Invalid, NotAStore, StoreMismatch, StoreUnavailable
from resmgr.values import check_name

_SCHEMES = ("redis://", "rediss://", "unix://", "valkey://")
_OLDEST = 7
# The server is gone, restarting, still reading its file, or may not write (memory, disk, role): all pass.
_PASSING = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.BusyLoadingError,
    OutOfMemoryError,
    ReadOnlyError,
    TimeoutError,
)


def _passes(error: Exception) -> bool:
    """`BUSY` is a script that runs for long, for which redis-py has no class."""
    return isinstance(error, _PASSING) or str(error).startswith("BUSY")


def _library() -> tuple[str, str]:
    """The name, which changes with the code, and the code of the functions."""
    folder = resources.files("resmgr") / "functions"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".lua")), key=lambda f: f.name)
    code = "\n".join(f.read_text() for f in files)
    name = "resmgr_" + hashlib.sha256(code.encode()).hexdigest()[:12]
    return name, f"#!lua name={name}\n{code}\nredis.register_function('{name}', enter)\n"


class Store:
    """One namespace of one server."""

    def __init__(self, url: str, namespace: str = "resmgr", patience: float = 30.0, io_timeout: float = 5.0) -> None:
        if not isinstance(url, str) or "\0" in url:
            raise Invalid(f"url={url!r} must be a text, such as redis://HOST:PORT/DB or embedded:DIR")
        check_name("namespace", namespace)
        self.url = _without_password(url)
        self.patience = patience
        self._prefix = f"{{{namespace}}}:"
        self._io_timeout = io_timeout
        self._function, self._code = _library()
        self.server = _embedded(url)
        target = f"unix://{self.server.socket_path}" if self.server else url
        if not target.startswith(_SCHEMES):
            raise Invalid(f"url={self.url!r} must start with one of {', '.join(_SCHEMES)} or embedded:")
        plain = target.replace("valkey://", "redis://", 1)
        try:
            self._calls = Connection(plain, io_timeout)
            self._redis = self._client(plain)  # each follower keeps one of its connections to itself
            self._redis.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        except (ValueError, TypeError) as error:  # a port that is none, an option that there is not
            raise Invalid(f"url={self.url!r} cannot be read: {error}") from None
        self._closed = False

    def _client(self, url: str) -> redis.Redis:
        pool = redis.ConnectionPool.from_url(
            url,
            max_connections=10_000,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            # Its limit on sending is asyncio.wait_for, which swallows cancellations in Python 3.11; see _limited.
            socket_timeout=None,
            socket_connect_timeout=self._io_timeout,
        )
        return redis.Redis(connection_pool=pool)

    async def open(self) -> None:
        """Checks that a usable server answers; tries once, so that a wrong URL is told at once.

        The embedded server is started, and waited for while another process's is going down.
        """
        if self.server:
            await self.server.ensure()
            await self.call("position")
            return
        try:
            info = await self._calls.call(packed(("INFO", "server")))
        except (AuthenticationError, NoPermissionError) as error:
            raise StoreUnavailable(f"{self.url} refuses us ({error}); put user and password in the URL") from error
        except redis.TimeoutError as error:
            raise StoreUnavailable(
                f"{self.url} did not answer within {self._io_timeout} s; is it a Redis, and not stalled?"
            ) from error
        except NotRedis as error:
            raise NotAStore(
                f"what answers at {self.url} does not speak Redis ({error}); check host and port"
            ) from error
        except (redis.BusyLoadingError, ResponseError) as error:
            if _passes(error):
                raise StoreUnavailable(f"{self.url} is busy ({error}); try again later") from error
            raise NotAStore(f"{self.url} cannot be used ({error}); check its host, port and database") from error
        except redis.ConnectionError as error:
            raise StoreUnavailable(
                f"nothing answers at {self.url} ({error}); start a server or use embedded:DIR"
            ) from error
        version = _version(info)
        if not version[:1].isdigit() or int(version.split(".")[0]) < _OLDEST:
            raise NotAStore(f"{self.url} runs version {version}; version {_OLDEST} or later is needed")

    async def _limited(self, answer: Awaitable[Any]) -> Any:
        async with asyncio.timeout(self._io_timeout):
            return await answer

    async def call(self, name: str, *args: str | bytes | int, patience: float | None = None) -> list[Any]:
        """The answer of one function; `StoreUnavailable` when none came within the patience (`inf`: never)."""
        answer, _ = await self.call_counted(name, *args, patience=patience)
        return answer

    async def call_counted(
        self, name: str, *args: str | bytes | int, patience: float | None = None
    ) -> tuple[list[Any], bool]:
        """The answer, and whether an earlier try may have been carried out without ours having heard of it."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self.patience if patience is None else patience)
        command = packed(("FCALL", self._function, 1, self._prefix, name, *args))
        pause, repeated = 0.005, False
        while True:
            if repeated and self._closed:
                raise Closed("the manager was closed before the store answered")
            try:
                if repeated and self.server:
                    self.server.start()
                return await self._calls.call(command), repeated
            except (*_PASSING, StoreUnavailable) as error:
                repeated = True
                if loop.time() + pause > deadline:
                    raise StoreUnavailable(f"{self.url} does not answer ({error}); is the server running?") from error
            except ResponseError as error:
                if "Function not found" not in str(error):
                    raise StoreMismatch(
                        f"{self.url} refuses the call {name} ({error}); where its keys {self._prefix}* are not ours, "
                        "use another namespace, else give the URL's user the right to it"
                    ) from error
                await self._load()
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.5)

    async def _load(self) -> None:
        try:
            await self._limited(self._redis.function_load(self._code))
        except _PASSING:
            return  # the call is tried again, and says so
        except ResponseError as error:
            if "already exists" not in str(error) and not _passes(error):
                raise NotAStore(
                    f"{self.url} takes no functions ({error}); give its user the right to FUNCTION LOAD"
                ) from error

    async def follow(self, stream: str, after: str) -> AsyncIterator[list[tuple[str, bytes]]]:
        """Yields what is added to a stream, through outages; an empty part, now and then, when nothing is added.

        Ends when the store is closed.
        """
        block = max(1, int(self._io_timeout * 400))
        while not self._closed:
            try:
                reading = self._redis.xread({self._prefix + stream: after}, count=256, block=block)
                found = await self._limited(reading)
            except (*_PASSING, ResponseError) as error:
                if not _passes(error):
                    raise
                await asyncio.sleep(0.05)  # the heartbeat brings an embedded server back
                continue
            entries = found[0][1] if found else []
            if entries:
                after = entries[-1][0].decode()
            yield [(number.decode(), next(iter(fields.values()))) for number, fields in entries]

    async def shutdown(self) -> bool:
        """Stops the embedded server, whoever started it; False where none runs."""
        assert self.server is not None
        try:
            if not await self._limited(self.server.answers()):
                return False
            await self._redis.shutdown()
        except (*_PASSING, RedisError) as error:
            what = str(error) or f"no answer within {self._io_timeout} s"
            raise StoreUnavailable(f"{self.url} did not stop: {what}") from error
        return True

    async def close(self) -> None:
        self._closed = True
        self._calls.close()
        await self._redis.aclose(close_connection_pool=True)
        if self.server:
            await self.server.stop()


def _version(info: Any) -> str:
    """The version in the answer to INFO."""
    found = re.search(rb"^redis_version:(\S+)", info, re.M) if isinstance(info, bytes) else None
    return found[1].decode(errors="replace") if found else "unknown"


def _without_password(url: str) -> str:
    return re.sub(r"(?<=://)[^/@]*@", "***@", url)


def _embedded(url: str) -> EmbeddedServer | None:
    if not url.startswith("embedded:"):
        return None
    directory, _, query = url.removeprefix("embedded:").partition("?")
    if not directory or query not in ("", "persist=1"):
        raise Invalid(f"url={url!r} must be embedded:DIR or embedded:DIR?persist=1")
    return EmbeddedServer(directory, persist=bool(query))
