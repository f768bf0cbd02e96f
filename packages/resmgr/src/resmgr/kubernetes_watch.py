"""A watch of the API server: the changes after a version, one by one, without a thread that nobody owns.

Invariant: leaving the context ends the read that is under way, so that its thread ends too
(tests: `test_resmgr_kubernetes.py`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import msgspec
from kubernetes import client
from urllib3.exceptions import HTTPError

from resmgr.kubernetes_objects import NodeObject, PodObject

# The server ends a watch after so long, and the next one begins where it was; a server that died in silence is
# noticed by no bytes for somewhat longer.
LASTS_S = 240
T = TypeVar("T", NodeObject, PodObject)


class Gone(Exception):
    """Raised when the version is older than what the server keeps: list again."""


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


class Watch(Generic[T]):
    """Iterate to get (ADDED, MODIFIED or DELETED, object). `version` is where the next watch goes on."""

    def __init__(self, call: Callable[..., Any], version: str, kind: type[T]) -> None:
        self.version = version
        self._call = call
        self._kind: Any = kind
        self._response: Any = None
        # Of its own: a watch waits for minutes, and would keep the loop's few threads from all other calls.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="resmgr-watch")
        self._reading: asyncio.Future[bytes | None] | None = None

    async def __aenter__(self) -> Self:
        opening = partial(
            self._call,
            watch=True,
            resource_version=self.version,
            allow_watch_bookmarks=True,
            timeout_seconds=LASTS_S,
            _request_timeout=(10, LASTS_S + 30),
            _preload_content=False,
        )
        try:
            self._response = await asyncio.get_running_loop().run_in_executor(self._thread, opening)
        except client.ApiException as error:
            raise Gone if error.status == 410 else error from None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reading is not None and not self._reading.done():
            self._response.shutdown()  # wakes the thread
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)
        self._response.close()
        self._thread.shutdown(wait=False)

    async def __aiter__(self) -> AsyncIterator[tuple[str, T]]:
        loop, lines = asyncio.get_running_loop(), self._lines()
        while True:
            self._reading = loop.run_in_executor(self._thread, next, lines, None)
            line = await asyncio.shield(self._reading)
            if line is None:
                return
            event = msgspec.json.decode(line, type=_Event)
            if event.type == "ERROR":
                status = msgspec.json.decode(event.object, type=_Status)
                raise Gone if status.code == 410 else HTTPError(f"{status.code} {status.message}")
            found = msgspec.json.decode(event.object, type=self._kind)
            self.version = found.metadata.resource_version
            if event.type != "BOOKMARK":
                yield event.type, found

    def _lines(self) -> Iterator[bytes]:
        rest = b""
        for part in self._response.stream(1 << 16, decode_content=False):
            *lines, rest = (rest + part).split(b"\n")
            yield from (line for line in lines if line)
