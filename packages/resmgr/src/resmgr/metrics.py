"""The status as Prometheus text, and a server that answers scrapes with it."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

from resmgr.errors import Invalid, StoreError
from resmgr.status import Status

Labels = tuple[tuple[str, str], ...]


def prometheus_text(status: Status) -> str:
    by_pool = [((("pool", p.name), ("hardware", p.hardware), ("backend", p.backend)), p) for p in status.pools]
    bound: Counter[Labels] = Counter()
    units: dict[Labels, float] = {}
    for b in status.bindings:
        labels = (("role", b.role), ("hardware", b.hardware), ("fell_back", str(int(b.fell_back))))
        bound[labels] += 1
        units[labels] = units.get(labels, 0.0) + b.amount
    waiting = Counter((("role", w.role),) for w in status.waiting)
    events = {(("kind", kind),): n for kind, n in status.counts.items()}
    return "".join(
        [
            *_family("resmgr_pool_units", "gauge", "Units of a pool.", ((k, p.total) for k, p in by_pool)),
            *_family("resmgr_pool_free_units", "gauge", "Units nobody holds.", ((k, p.free) for k, p in by_pool)),
            *_family("resmgr_bindings", "gauge", "Live bindings.", bound.items()),
            *_family("resmgr_bound_units", "gauge", "Units held by live bindings.", units.items()),
            *_family("resmgr_waiting", "gauge", "Requests in the queue.", waiting.items()),
            *_family("resmgr_sessions", "gauge", "Managers with a lease.", [((), len(status.leases))]),
            *_family("resmgr_events_total", "counter", "Events since the store began.", events.items()),
        ]
    )


def _family(name: str, kind: str, about: str, rows: Iterable[tuple[Labels, float]]) -> Iterable[str]:
    yield f"# HELP {name} {about}\n# TYPE {name} {kind}\n"
    for labels, value in rows:
        inside = ",".join(f'{key}="{text}"' for key, text in labels)
        yield f"{name}{{{inside}}} {value:.15g}\n" if inside else f"{name} {value:.15g}\n"


class MetricsServer:
    """Answers GET /metrics with the status at that moment; 503 while the store is away."""

    def __init__(self, read: Callable[[], Awaitable[Status]]) -> None:
        self._read = read

    async def start(self, host: str, port: int) -> asyncio.Server:
        try:
            return await asyncio.start_server(self._serve, host, port)
        except (OSError, OverflowError) as error:
            raise Invalid(f"host={host!r}, port={port} cannot be listened on: {error}") from error

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(30):
                head = await reader.readuntil(b"\r\n\r\n")
                code, body = await self._answer(head.split(b" ", 2)[:2])
                kind = "text/plain; version=0.0.4; charset=utf-8"
                lines = [
                    f"HTTP/1.1 {code}",
                    f"Content-Type: {kind}",
                    f"Content-Length: {len(body)}",
                    "Connection: close",
                ]
                writer.write("\r\n".join([*lines, "", ""]).encode() + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, TimeoutError):
            pass  # the client went away, or is none
        finally:
            writer.close()

    async def _answer(self, request: list[bytes]) -> tuple[str, bytes]:
        if request != [b"GET", b"/metrics"]:
            return "404 Not Found", b"GET /metrics\n"
        try:
            return "200 OK", prometheus_text(await self._read()).encode()
        except StoreError as error:
            return "503 Service Unavailable", f"{error}\n".encode()
