"""Serverless endpoints as a backend: an endpoint is a node whose units are calls at the same time.

A binding is the right to so many concurrent calls; the endpoints of a class form one pool, so a request for more than
one endpoint serves is spread over several. An endpoint that does not answer `DOWN_AFTER` times in a row leaves its
pool: the bindings on it are lost and granted again elsewhere; it returns with its first answer
(tests: `test_resmgr_serverless.py`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import msgspec

from resmgr.errors import Invalid
from resmgr.follower import Follower
from resmgr.manager import ResourceManager
from resmgr.values import Binding, Node, Pool, check_name

log = logging.getLogger("resmgr")
# One lost answer is a hiccup; three in a row, an interval apart, are an outage.
DOWN_AFTER = 3
_LONGEST_ANSWER_S = 2.0


class Endpoint(msgspec.Struct, frozen=True):
    """A function behind `url` that serves `concurrency` calls at once."""

    name: str
    url: str
    concurrency: int
    hardware: str = "serverless"


def _check(endpoint: Endpoint) -> None:
    check_name("Endpoint.name", endpoint.name)
    if not isinstance(endpoint.url, str) or not endpoint.url.startswith(("http://", "https://")):
        raise Invalid(f"Endpoint.url={endpoint.url!r} must begin with http:// or https://")
    if type(endpoint.concurrency) is not int or endpoint.concurrency < 1:
        raise Invalid(f"Endpoint.concurrency={endpoint.concurrency!r} must be a whole number of at least 1")


Probe = Callable[[Endpoint], Awaitable[bool]]


async def answers(endpoint: Endpoint) -> bool:
    """Whether the endpoint's host says anything to GET /healthz but a failure of its own."""
    try:
        parts = urlsplit(endpoint.url)
        secure = parts.scheme == "https"
        async with asyncio.timeout(_LONGEST_ANSWER_S):
            port = parts.port or (443 if secure else 80)
            reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure or None)
            try:
                writer.write(f"GET /healthz HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
                status = (await reader.readline()).split(b" ")
            finally:
                writer.close()
    except (OSError, ValueError):  # a timeout is the one; a name that is none, or an endless first line, the other
        return False
    return len(status) > 1 and status[1][:1] in (b"2", b"4")


def _is_there(name: str, answer: bool | BaseException) -> bool:
    """A probe that raises has had no answer."""
    if isinstance(answer, BaseException):
        log.warning("endpoint %s: its probe raised %r", name, answer)
        return False
    return answer


class ServerlessBackend:
    """The endpoints as pools `serverless-CLASS`, followed while the context lasts."""

    def __init__(
        self,
        manager: ResourceManager,
        endpoints: Sequence[Endpoint],
        *,
        probe: Probe = answers,
        interval: float = 5.0,
    ) -> None:
        if isinstance(endpoints, str) or not all(isinstance(endpoint, Endpoint) for endpoint in endpoints):
            raise Invalid(f"endpoints={endpoints!r:.200} must be a list of Endpoint")
        names = [endpoint.name for endpoint in endpoints]
        if len(set(names)) < len(names) or not names:
            raise Invalid(f"endpoints={names} must be at least one, with different names")
        for endpoint in endpoints:
            _check(endpoint)
        self._endpoints = {endpoint.name: endpoint for endpoint in endpoints}
        self._probe = probe
        self._interval = interval
        self._missed = dict.fromkeys(names, 0)
        self._follower = Follower(manager)

    async def __aenter__(self) -> Self:
        await self._register()
        self._follower.start(self._follow(), "resmgr-serverless")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._follower.stop()

    def urls(self, binding: Binding) -> dict[str, int]:
        """Where the binding may call, and how often at the same time."""
        for part in binding.allocations:
            if part.node not in self._endpoints:
                raise Invalid(
                    f"binding {binding.id} is on {part.node or part.pool!r}, which is none of our endpoints"
                )
        return {self._endpoints[part.node].url: round(part.amount) for part in binding.allocations}

    async def refresh(self) -> None:
        """Asks every endpoint whether it is there, and registers those that are."""
        names = list(self._endpoints)
        probes = (self._probe(self._endpoints[name]) for name in names)
        for name, answer in zip(names, await asyncio.gather(*probes, return_exceptions=True), strict=True):
            self._missed[name] = 0 if _is_there(name, answer) else self._missed[name] + 1
        await self._register()

    async def _register(self) -> None:
        for hardware in {endpoint.hardware for endpoint in self._endpoints.values()}:
            nodes = [
                Node(name, endpoint.concurrency)
                for name, endpoint in sorted(self._endpoints.items())
                if endpoint.hardware == hardware and self._missed[name] < DOWN_AFTER
            ]
            pool = Pool(f"serverless-{hardware}", hardware=hardware, backend="serverless", nodes=nodes)
            await self._follower.register(pool)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            await self.refresh()
