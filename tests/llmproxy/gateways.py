"""A gateway over stand-in servers, in this process or in its own, and a client that shows raw bytes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from llmproxy import AffinityRouter, LLMProxy, ProxyConfig
from llmproxy.gateway import Gateway, GatewayConfig
from llmproxy.http_worker import HTTPWorker
from llmproxy.standin import StandIn, next_token

QUICK = ProxyConfig(patience=2.0, answer=5.0, probe_first=0.02, probe_every=0.2)


class Reply(msgspec.Struct):
    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool
    """False when the connection ended before the answer did."""

    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json()["error"]


class Connection:
    """A client's connection, kept open between requests."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def __aenter__(self) -> Connection:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    def send(self, method: str, path: str, body: bytes | dict[str, Any] = b"", **headers: str) -> None:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        lines = [f"{method} {path} HTTP/1.1", "host: x", f"content-length: {len(data)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)

    async def reply(self, on_chunk: Callable[[bytes], None] | None = None) -> Reply:
        try:
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except (asyncio.IncompleteReadError, ConnectionError):
            return Reply(0, {}, b"", False)
        first, *lines = head.rstrip("\r\n").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        reply = Reply(int(first.split(" ")[1]), headers, b"", False)
        try:
            if "content-length" in headers:
                reply.body = await self.reader.readexactly(int(headers["content-length"]))
            else:
                while size := int(await self.reader.readuntil(b"\r\n"), 16):
                    chunk = await self.reader.readexactly(size)
                    await self.reader.readexactly(2)
                    reply.body += chunk
                    if on_chunk is not None:
                        on_chunk(chunk)
                await self.reader.readexactly(2)
            reply.whole = True
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        return reply


async def ask(port: int, method: str, path: str, body: bytes | dict[str, Any] = b"", **headers: str) -> Reply:
    """One request on a connection of its own."""
    async with Connection(port) as connection:
        connection.send(method, path, body, **headers)
        return await connection.reply()


async def raw(port: int, data: bytes) -> Reply:
    """Whatever bytes."""
    async with Connection(port) as connection:
        connection.writer.write(data)
        return await connection.reply()


def expected(prompt: Sequence[int], budget: int, version: int = 0) -> list[int]:
    """What a stand-in generates when it ignores its end token."""
    context = list(prompt)
    for _ in range(budget):
        context.append(next_token(context, version))
    return context[len(prompt) :]


class Setting:
    """A gateway, its port, and what stands behind it."""

    def __init__(self, gateway: Gateway, port: int, servers: list[StandIn]) -> None:
        self.gateway = gateway
        self.port = port
        self.servers = servers

    @property
    def proxy(self) -> LLMProxy:
        return self.gateway.proxy

    def idle(self) -> bool:
        """Nothing is held or counted for any request."""
        stats = self.proxy.stats()
        return (
            not self.gateway.exchanges
            and not self.gateway.by_request
            and not len(self.proxy.passages)
            and self.gateway.buffered == 0
            and all(worker.load == worker.running == 0 for worker in stats.workers)
        )


@asynccontextmanager
async def serving(
    *servers: StandIn,
    config: GatewayConfig = GatewayConfig(),  # noqa: B008 - immutable
    proxy_config: ProxyConfig = QUICK,
    affinity: dict[str, str] | None = None,
    hardware: Sequence[str] = (),
    **worker: Any,
) -> AsyncIterator[Setting]:
    """A gateway in this process. Workers are named w0, w1, ... Nothing may be left at the end."""
    workers = []
    for number, server in enumerate(servers):
        port = await server.start()
        kind = hardware[number] if hardware else "any"
        workers.append(HTTPWorker(f"http://127.0.0.1:{port}", id=f"w{number}", hardware=kind, **worker))
        await workers[-1].start()
    proxy = LLMProxy(workers, router=AffinityRouter(affinity), config=proxy_config)
    gateway = Gateway(proxy, config)
    port = await gateway.start()
    try:
        yield Setting(gateway, port, list(servers))
    finally:
        await gateway.close()
        await proxy.close()
        for one in workers:
            await one.close()
            one.pool.abort()
        for server in servers:
            await server.close()


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait for a state of another task or process, which tells nobody when it is reached."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - it is not ours to signal
            await asyncio.sleep(0.005)


async def told(port: int, method: str, path: str, ready: Callable[[Reply], object], **request: Any) -> Reply:
    """Ask a process until its answer is `ready`."""
    async with asyncio.timeout(20.0):
        while not ready(reply := await ask(port, method, path, **request)):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
        return reply


class Process:
    """A program of ours that prints one line when it is ready."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self._arguments = arguments
        self._environment = environment
        self.process: asyncio.subprocess.Process
        self.line = ""

    async def __aenter__(self) -> Process:
        await self.start()
        return self

    async def start(self) -> None:
        import os

        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *self._arguments,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | self._environment,
        )
        assert self.process.stdout is not None
        self.line = (await self.process.stdout.readline()).decode().strip()

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    @property
    def port(self) -> int:
        return int(self.line.rpartition(":")[2].split()[0])
