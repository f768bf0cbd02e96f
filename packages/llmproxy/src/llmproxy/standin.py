"""A server that answers like vLLM and has no model: to try a gateway, and to test one.

It takes token ids and OpenAI's requests, streams, pauses, aborts and tells its version. The next token is a function
of the context and the version alone (`next_token`), so that anyone can check that an answer is whole, of one
conversation, and of which version. Text is one byte a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any
from zlib import crc32

import msgspec

_LETTERS = b"abcdefghijklmnopqrstuvwxyz      "
END = 10
"""The token that ends a generation: a line break, one in 256."""


def next_token(context: Sequence[int], version: int) -> int:
    """A letter, or `END` now and then."""
    drawn = crc32(b"%d" % version + b",".join(b"%d" % token for token in context[-64:]), len(context))
    return END if drawn % 256 == 0 else _LETTERS[drawn % len(_LETTERS)]


def logprob(token: int, version: int) -> float:
    return -(token % 16 + version + 1) / 16


class Generation:
    """One under way."""

    def __init__(self, context: list[int], budget: int, ignore_eos: bool) -> None:
        self.context = list(context)
        self.prompt = len(context)
        self.budget = budget
        self.ignore_eos = ignore_eos
        self.versions: list[int] = []
        self.finish = ""

    @property
    def tokens(self) -> list[int]:
        return self.context[self.prompt :]

    def step(self, version: int) -> None:
        token = next_token(self.context, version)
        self.context.append(token)
        self.versions.append(version)
        if token == END and not self.ignore_eos:
            self.finish = "stop"
        elif len(self.versions) >= self.budget:
            self.finish = "length"

    def spans(self) -> list[dict[str, Any]]:
        edges = [0, *(i for i in range(1, len(self.versions)) if self.versions[i] != self.versions[i - 1])]
        ends = [*edges[1:], len(self.versions)]
        return [
            {"version": str(self.versions[start]), "start": start, "end": end}
            for start, end in zip(edges, ends, strict=True)
            if end > start
        ]


class StandIn:
    """The server. `delay` seconds pass before each token."""

    def __init__(self, *, version: int = 0, delay: float = 0.0, context_limit: int = 32_768) -> None:
        self.version = version
        self.delay = delay
        self.context_limit = context_limit
        self.running: dict[str, Generation] = {}
        """By the engine's id."""
        self.served = 0
        self._open = asyncio.Event()
        self._open.set()
        self._aborted: dict[str, asyncio.Event] = {}
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen; the port."""
        self._server = await asyncio.start_server(self._accept, host, port, limit=1 << 27, backlog=1024)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._connected(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            early: bytes | None = b""
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                while early is not None:
                    early = await self._one(early, reader, writer)
        finally:
            writer.close()

    async def _one(self, early: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes | None:
        """Read a request and answer it: what was read of the next one, or None when the connection is to end."""
        head = (early + await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")
        method, url, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = url.partition("?")[0]
        answering = asyncio.ensure_future(self.answer(method, path, headers, body, writer))
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return None  # the client went away; so does what it asked for
            if not answering.result():
                return None
            return gone.result() if gone.done() else b""
        finally:
            for task in (answering, gone):
                task.cancel()
            await asyncio.gather(answering, gone, return_exceptions=True)

    async def answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter
    ) -> bool:
        """Write an answer; False when the connection is to end after it."""
        try:
            asked = msgspec.json.decode(body, type=dict[str, Any]) if body else {}
        except (msgspec.DecodeError, RecursionError) as error:
            send(writer, {"error": {"message": str(error), "type": "BadRequestError", "code": 400}}, 400)
            return True
        match method, path:
            case "GET", "/health":
                send(writer, {})
            case "GET", "/v1/models":
                send(writer, {"data": [{"id": "stand-in", "object": "model", "max_model_len": self.context_limit}]})
            case "GET", "/weight_info":
                send(writer, {"weight_version": str(self.version)})
            case "POST", "/update_weight_version":
                self.version = int(asked["new_version"])
                send(writer, {"success": True})
            case "POST", "/pause":
                self._open.clear()
                send(writer, {"status": "paused"})
            case "POST", "/resume":
                self._open.set()
                send(writer, {"status": "resumed"})
            case "POST", "/inference/v1/abort_requests":
                for id in asked["request_ids"]:
                    if id in self._aborted:
                        self._aborted[id].set()
                send(writer, {})
            case "POST", "/inference/v1/generate" | "/v1/completions" | "/v1/chat/completions":
                await self._generate(path, headers, asked, writer)
            case _:
                send(writer, {"error": {"message": f"nothing is at {path}", "type": "NotFound"}}, 404)
        await writer.drain()
        return True

    async def _generate(
        self, path: str, headers: dict[str, str], asked: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        shape = _read(path, asked)
        if isinstance(shape, str) or len(shape.prompt) + shape.budget > self.context_limit:
            message = shape if isinstance(shape, str) else f"context is {self.context_limit} tokens long"
            send(
                writer,
                {"error": {"message": message, "type": "BadRequestError", "param": "prompt", "code": 400}},
                400,
            )
            return
        self.served += 1
        default = asked.get("request_id") or f"{self.served}"
        id = shape.prefix + headers.get("x-request-id", default) + shape.suffix
        generation = self.running[id] = Generation(shape.prompt, shape.budget, shape.ignore_eos)
        try:
            if asked.get("stream"):
                send_head(writer)
                async for tokens in self._tokens(id, generation):
                    send_event(writer, shape.event(id, generation, tokens))
                    await writer.drain()
                send_event(writer, b"[DONE]")
                writer.write(b"0\r\n\r\n")
            else:
                async for _ in self._tokens(id, generation):
                    pass
                send(writer, shape.whole(id, generation))
        finally:
            del self.running[id]

    async def _tokens(self, id: str, generation: Generation) -> AsyncIterator[int]:
        """Counts of new tokens: 1 a step, 0 when aborted. A pause holds it between two."""
        aborted = self._aborted[id] = asyncio.Event()
        try:
            while not generation.finish:
                await self._wait(aborted)
                if aborted.is_set():
                    generation.finish = "abort"
                    yield 0
                else:
                    generation.step(self.version)
                    yield 1
        finally:
            del self._aborted[id]

    async def _wait(self, aborted: asyncio.Event) -> None:
        """Until the next token is due, or there will be none."""
        if self.delay:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.delay):
                    await aborted.wait()
        else:
            await asyncio.sleep(0)
        while not self._open.is_set() and not aborted.is_set():
            waits = [asyncio.ensure_future(self._open.wait()), asyncio.ensure_future(aborted.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()


class _Tokens:
    """`/inference/v1/generate`."""

    prefix, suffix = "generate-tokens-", ""

    def __init__(self, asked: dict[str, Any]) -> None:
        parameters = asked.get("sampling_params", {})
        self.prompt = asked.get("token_ids") or []
        self.budget = parameters.get("max_tokens", 16)
        self.ignore_eos = bool(parameters.get("ignore_eos"))
        self.logprobs = parameters.get("logprobs") is not None
        self.ids = True
        self.problem = "" if self.prompt else "token_ids is empty"

    def choice(self, generation: Generation, tokens: list[int], versions: list[int]) -> dict[str, Any]:
        """Versions are told of all tokens with the last ones alone, as vLLM does."""
        content = [{"token_id": t, "logprob": logprob(t, v)} for t, v in zip(tokens, versions, strict=True)]
        logprobs = {"content": content} if self.logprobs else None
        runs = generation.spans() if generation.finish else None
        return {"index": 0, "token_ids": tokens, "logprobs": logprobs, "weight_versions": runs}

    def event(self, id: str, generation: Generation, new: int) -> dict[str, Any]:
        at = len(generation.versions) - new
        choice = self.choice(generation, generation.tokens[at:], generation.versions[at:])
        told = {"choices": [choice | {"finish_reason": generation.finish or None}], "request_id": id}
        return told | ({"prompt_token_ids": self.prompt} if at == 0 and self.ids else {})

    def whole(self, id: str, generation: Generation) -> dict[str, Any]:
        choice = self.choice(generation, generation.tokens, generation.versions)
        return {"choices": [choice | {"finish_reason": generation.finish}], "request_id": id}


class _Completion(_Tokens):
    """`/v1/completions`."""

    prefix, suffix = "cmpl-", "-0"

    def __init__(self, asked: dict[str, Any]) -> None:
        prompt = asked.get("prompt", "")
        self.prompt = list(prompt.encode()) if isinstance(prompt, str) else prompt
        self.budget = asked.get("max_tokens") or 16
        self.ignore_eos = bool(asked.get("ignore_eos"))
        self.logprobs = asked.get("logprobs") is not None
        self.ids = bool(asked.get("return_token_ids"))
        self.problem = "" if self.prompt else "prompt is empty"

    def choice(self, generation: Generation, tokens: list[int], versions: list[int]) -> dict[str, Any]:
        names = [chr(token) for token in tokens]
        values = [logprob(t, v) for t, v in zip(tokens, versions, strict=True)]
        logprobs = {"tokens": names, "token_logprobs": values} if self.logprobs else None
        told = {"index": 0, "text": "".join(names), "logprobs": logprobs}
        return told | ({"token_ids": tokens, "prompt_token_ids": self.prompt} if self.ids else {})

    def event(self, id: str, generation: Generation, new: int) -> dict[str, Any]:
        return super().event(id, generation, new) | {"id": id, "object": "text_completion", "model": "stand-in"}

    def whole(self, id: str, generation: Generation) -> dict[str, Any]:
        told = super().whole(id, generation) | {
            "id": id,
            "object": "text_completion",
            "model": "stand-in",
            "created": 0,
        }
        return told | {"usage": usage(generation)}


class _Chat(_Completion):
    """`/v1/chat/completions`."""

    prefix, suffix = "chatcmpl-", ""

    def __init__(self, asked: dict[str, Any]) -> None:
        text = "".join(f"<{message['role']}>{message['content']}\n" for message in asked.get("messages", []))
        budget = asked.get("max_completion_tokens") or asked.get("max_tokens")
        wishes = {"prompt": text and text + "<assistant>", "max_tokens": budget}
        super().__init__(asked | wishes)
        self.logprobs = bool(asked.get("logprobs"))

    def choice(self, generation: Generation, tokens: list[int], versions: list[int]) -> dict[str, Any]:
        pairs = zip(tokens, versions, strict=True)
        content = [{"token": chr(t), "logprob": logprob(t, v), "bytes": [t], "top_logprobs": []} for t, v in pairs]
        told = {"index": 0, "logprobs": {"content": content} if self.logprobs else None}
        return told | ({"token_ids": tokens} if self.ids else {})

    def event(self, id: str, generation: Generation, new: int) -> dict[str, Any]:
        told = super().event(id, generation, new) | {"object": "chat.completion.chunk", "created": 0}
        text = "".join(map(chr, generation.tokens[len(generation.versions) - new :]))
        told["choices"][0]["delta"] = {"role": "assistant", "content": text}
        return told

    def whole(self, id: str, generation: Generation) -> dict[str, Any]:
        told = super().whole(id, generation) | {"object": "chat.completion"}
        told["choices"][0]["message"] = {"role": "assistant", "content": "".join(map(chr, generation.tokens))}
        return told | ({"prompt_token_ids": self.prompt} if self.ids else {})


_SHAPES: dict[str, type[_Tokens]] = {
    "/inference/v1/generate": _Tokens,
    "/v1/completions": _Completion,
    "/v1/chat/completions": _Chat,
}


def _read(path: str, asked: dict[str, Any]) -> _Tokens | str:
    """What is asked for, or what is wrong with it."""
    try:
        shape = _SHAPES[path](asked)
        if not all(type(number) is int for number in (*shape.prompt, shape.budget)):
            return "the prompt is no text nor token ids, or max_tokens no number"
    except (AttributeError, KeyError, TypeError) as error:
        return f"the request cannot be read: {error!r}"
    return shape.problem or shape


def usage(generation: Generation) -> dict[str, int]:
    made = len(generation.versions)
    return {"prompt_tokens": generation.prompt, "completion_tokens": made, "total_tokens": generation.prompt + made}


def send(writer: asyncio.StreamWriter, value: Any, status: int = 200) -> None:
    """A whole answer."""
    body = msgspec.json.encode(value)
    head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % (status, len(body)) + body)


def send_head(writer: asyncio.StreamWriter) -> None:
    """The head of a stream."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")


def send_event(writer: asyncio.StreamWriter, value: Any) -> None:
    data = b"data: %b\n\n" % (value if isinstance(value, bytes) else msgspec.json.encode(value))
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
