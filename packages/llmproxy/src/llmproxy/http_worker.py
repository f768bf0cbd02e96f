"""A worker behind HTTP: any server that generates from token ids and speaks one of the `dialects`.

Invariants (tests/llmproxy/test_llmproxy_http_worker.py):
- a generation is finished only when its stream said why it ended and then ended whole; anything else is `WorkerLost`
  with the tokens that arrived, or a Partial where it was interrupted;
- a 4xx answer is the caller's error, `InvalidRequest`; it says nothing about the worker;
- a server that takes requests and never answers is noticed by the watch, which asks for a sign of life over a
  connection of its own: what runs there is lost when none comes in time;
- when that connection ends, another server may be at its place: the version is read again before it counts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any
from uuid import uuid4
from zlib import crc32

import msgspec
from msgspec import Struct

from .checks import check_request
from .dialects import VLLM, Asked, Control, Dialect
from .errors import Aborted, DuplicateRequest, InvalidRequest, UpdateFailed, WorkerLost, WrongState
from .http_calls import ask, callers_error, in_time
from .http_stream import Stream
from .life import Life
from .upstream import Pool, head
from .values import (
    Ack,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Partial,
    Span,
    Timing,
    extend_partial,
)
from .worker import Role, WeightLoader

_ENDS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
_ABORT_WAIT = 1.0
"""How long the last tokens of an aborted generation may take to arrive."""
_COOL_FIRST, _COOL_LONGEST = 0.5, 30.0
"""How long a worker is left alone after server errors: 0.5 s, and twice as long each time they come back."""
_DEFAULT = "default"
"""What vLLM and SGLang call the weights they were started with."""


_ANY_CONTEXT = 2**31
"""Of a server that does not tell its own: it refuses what is too long itself."""


class _Model(Struct, frozen=True):
    id: str = ""
    max_model_len: int | None = None


class _Models(Struct):
    data: list[_Model] = []


class HTTPWorker:
    """A server at `url`. `start` it before use, or give its `context_limit`.

    `version` is that of the weights it was started with. Without a `loader`, `update` does not load: whoever does
    must have done so between suspend and update, and the server must say that it holds the version.
    """

    def __init__(
        self,
        url: str,
        *,
        id: str = "",
        hardware: str = "any",
        dialect: Dialect | None = None,
        loader: WeightLoader | None = None,
        model: str = "",
        api_key: str = "",
        version: int = 0,
        context_limit: int = 0,
        processed_logprobs: bool = False,
        watch: float = 2.0,
        silence: float = 10.0,
    ) -> None:
        """`watch` seconds pass between two signs of life; the server may take `silence` seconds to give one.

        `processed_logprobs`: the server returns log-probabilities of the distribution it sampled from.
        """
        self.pool = Pool(url)
        self.id = id or f"{self.pool.host}:{self.pool.port}"
        if not (self.id.isascii() and self.id.isprintable()):
            raise ValueError(f"worker id {self.id!r} must be printable ASCII: answers name it in a header")
        self.hardware = hardware
        self.role: Role = "both"
        self.dialect: Dialect = dialect or VLLM()
        self.version: int | None = version
        self.authorization = f"authorization: Bearer {api_key}\r\n".encode() if api_key else b""
        self.on_lost: Callable[[str], None] | None = None
        """Told, in addition to running generations, when the watch loses the server."""
        self._initial = version
        self._loader = loader
        self._silence = silence
        self._model = model
        self._context_limit = context_limit
        self._processed = processed_logprobs
        self._life = Life(url, self.authorization, watch, silence, same=self._is_same, lost=self._fell_silent)
        self._cooling = _COOL_FIRST
        self._cool_until = 0.0
        self._streams: dict[str, Stream] = {}
        self._paused = False
        self._resumed = asyncio.Event()
        self._staged: int | None = None
        self._starts: dict[bytes, bytes] = {}

    @property
    def context_limit(self) -> int:
        if not self._context_limit:
            raise WrongState(f"worker {self.id} has not been started; await start() or give its context_limit")
        return self._context_limit

    async def start(self) -> None:
        """Ask the server for its context and its version. Raises WorkerLost when it does not answer in time."""
        async with in_time(self.id, self._silence):
            models = msgspec.convert(await self._ask(Control("/v1/models", None)), _Models)
            self.version = await self._held()
        first = models.data[0] if models.data else _Model()
        self._context_limit = self._context_limit or first.max_model_len or _ANY_CONTEXT
        self._model = self._model or first.id
        if self._loader is not None:
            await self._loader.start(self)
        self.watch()

    def watch(self) -> None:
        """Look for signs of life from now on."""
        self._life.watch()

    def look(self) -> None:
        """Something was odd: look for a sign of life now."""
        self._life.look()

    async def close(self) -> None:
        """Stop using the server. Idle connections close now, others after their answers; the server goes on."""
        await self._life.close()
        self._lose("was closed")
        self.pool.close()
        if self._loader is not None:
            await self._loader.close()

    async def generate(self, request: GenerateRequest) -> GenerateResult | Partial:
        id = request.request_id
        if id in self._streams:
            raise DuplicateRequest("request_id", f"{id!r} is running on worker {self.id}", "unique")
        check_request(request, self.context_limit)
        if request.sampling.modifies and not self._processed:
            limit = "unmodified sampling, or a server started with --logprobs-mode processed_logprobs"
            raise InvalidRequest("sampling.logprobs", f"of worker {self.id} are raw", limit)
        # An id that the server has not seen, however often the request comes back here.
        version = self._initial if self.version is None else self.version
        stream = self._streams[id] = Stream(self.dialect, f"{id}-{uuid4().hex[:8]}", version)
        try:
            if self._paused and not self.dialect.keeps:
                await self._until_resumed(stream)
            if not stream.done.done():
                self._send(stream, request)
            await stream.done
        except asyncio.CancelledError:
            self.pool.cancel(stream)
            raise
        finally:
            del self._streams[id]
        return self._answer(request, stream)

    async def abort(self, request_id: str) -> None:
        await self._end(request_id, interrupted=False)

    async def interrupt(self, request_id: str) -> None:
        await self._end(request_id, interrupted=True)

    async def pause(self) -> None:
        await self._tell(*self.dialect.pause)  # also when paused: the server may be another one by now
        self._paused = True
        self._resumed.clear()
        if not self.dialect.keeps:
            await asyncio.gather(*(self.interrupt(id) for id in list(self._streams)))

    async def prefetch(self, version: int) -> None:
        if self._loader is not None:
            await self._loader.prefetch(version)
        self._staged = version

    async def update(self, version: int) -> Ack:
        if self._staged != version:
            await self.prefetch(version)
        await self.pause()
        self.version = self._staged = None
        self._life.hushed = True
        try:
            digest = await self._load(version)
        except (WorkerLost, asyncio.CancelledError):
            raise
        except Exception as error:  # any other failure leaves weights of which nothing is known
            raise UpdateFailed(version, [Ack(self.id, version, error=f"{type(error).__name__}: {error}")]) from error
        finally:
            self._life.hushed = False
        self.version = version
        for stream in self._streams.values():
            stream.change(version)
        return Ack(self.id, version, digest)

    async def resume(self) -> None:
        if self.version is None:
            raise WrongState(f"worker {self.id} holds no known version; update it first")
        await self._tell(*self.dialect.resume)
        self._paused = False
        self._resumed.set()

    async def probe(self) -> int | None:
        wait = self._cool_until - asyncio.get_running_loop().time()
        if wait > 0:
            raise WorkerLost(self.id, f"cools down for another {wait:.1f} s after server errors")
        await self._ask(Control("/health", None), self._life.pool)
        self.version = await self._held()
        self.watch()
        return self.version

    def start_line(self, url: bytes) -> bytes:
        """The first lines of a POST to `url` by whoever sends its own bytes through `pool`."""
        line = self._starts.get(url)
        if line is None:
            if len(self._starts) > 64:
                self._starts.clear()
            line = b"POST %b%b HTTP/1.1\r\nhost: %b\r\n%b" % (
                self.pool.prefix,
                url,
                self.pool.authority,
                self.authorization,
            )
            self._starts[url] = line
        return line

    async def end_foreign(self, path: str, id: str) -> None:
        """End, with what it has, a request that was sent through `pool` to `path` with this x-request-id."""
        asked = self.dialect.abort_ids(self.dialect.engine_ids(path, id))
        if asked is None:
            raise InvalidRequest(
                "worker", f"{self.id} cannot interrupt requests to {path}", "one that can; or abort it"
            )
        async with in_time(self.id, self._silence):
            await self._tell(asked)

    # What a loader may use.

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Any other endpoint of the server; the decoded answer. Raises WorkerLost, or InvalidRequest for a 4xx."""
        return await self._ask(Control(path, body))

    async def collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a method of every process of a vLLM engine."""
        answer = await self.post("/collective_rpc", {"method": method, "args": args, "kwargs": kwargs or {}})
        return answer["results"]

    async def update_weight_version(self, version: str) -> None:
        await self.post("/update_weight_version", {"new_version": version})

    def cool_down(self) -> None:
        """Whoever uses `pool` met too many server errors: prove nothing for a while, longer each time in a row."""
        now = asyncio.get_running_loop().time()
        if now > self._cool_until + 10 * self._cooling:
            self._cooling = _COOL_FIRST
        self._cool_until = now + self._cooling
        self._cooling = min(2 * self._cooling, _COOL_LONGEST)

    # Generations.

    def _send(self, stream: Stream, request: GenerateRequest) -> None:
        sampling, seed = request.sampling, request.sampling.seed
        if seed is not None:  # equal seeds draw equal numbers: mix in what tells this turn from others
            seed = crc32(f"{seed}/{request.trajectory_id}/{len(request.context)}".encode())
        control = self.dialect.generation(
            Asked(stream.wire_id, request.context, sampling, request.budget, seed, self._model)
        )
        body = msgspec.json.encode(control.body)
        self.pool.send(stream, head(self.pool, "POST", control.path, len(body), self.authorization), body)

    def _answer(self, request: GenerateRequest, stream: Stream) -> GenerateResult | Partial:
        told = stream.told
        code, said = stream.refused
        if code:
            raise callers_error(code, said)
        if len(told.logprobs) != len(told.token_ids):
            raise WorkerLost(self.id, f"told {len(told.logprobs)} log-probabilities of {len(told.token_ids)} tokens")
        whole = extend_partial(request, told.token_ids, told.logprobs, self._spans(stream))
        if stream.interrupted and told.finish not in _ENDS:
            return whole
        if reason := stream.failure:
            raise WorkerLost(self.id, reason, whole)
        if (end := _ENDS.get(told.finish)) is None:
            if told.finish == "abort":
                raise Aborted(f"request {request.request_id} was aborted on worker {self.id}")
            raise WorkerLost(self.id, f"ended a request with {told.finish!r}", whole)
        timing = Timing(cached_tokens=told.cached)
        return GenerateResult(whole.token_ids, whole.logprobs, whole.spans, end, self.id, timing)

    def _spans(self, stream: Stream) -> list[Span]:
        """As the server told them, where it told those of all tokens."""
        runs = stream.told.runs
        if not runs or runs[-1][2] != len(stream.told.token_ids):
            return stream.spans
        return [Span(self._number(name), start, end) for name, start, end in runs if end > start]

    async def _until_resumed(self, stream: Stream) -> None:
        """Wait here, as a server that can hold requests does, unless the request is taken away meanwhile."""
        resumed = asyncio.ensure_future(self._resumed.wait())
        try:
            await asyncio.wait((resumed, stream.done), return_when=asyncio.FIRST_COMPLETED)
        finally:
            resumed.cancel()

    async def _end(self, request_id: str, *, interrupted: bool) -> None:
        """Ask the engine to end it, whose last tokens then arrive; where that does not work, close the connection."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        stream.interrupted = stream.interrupted or interrupted
        if (asked := self.dialect.abort(stream.wire_id)) is not None:
            with contextlib.suppress(WorkerLost, InvalidRequest, TimeoutError):
                async with asyncio.timeout(_ABORT_WAIT):
                    await self._tell(asked)
                    await asyncio.shield(stream.done)
        if not stream.done.done():
            self.pool.cancel(stream)
            if not interrupted:
                stream.told.finish = "abort"
            stream.done.set_result(None)

    # Controls.

    async def _load(self, version: int) -> str:
        if self._loader is None:
            held = await self._held()
            if held != version:
                raise WrongState(f"the server holds {held}; load {version} before the update, or give a loader")
            return ""
        digest = await self._loader.load(self, version)
        if (said := self.dialect.announce(version)) is not None:
            await self._tell(said)
        return digest

    async def _held(self) -> int | None:
        """The version that the server says it holds; where it cannot say, the one we know of."""
        if self.dialect.version is None:
            return self._initial
        try:
            return self._number(self.dialect.held(await self._ask(self.dialect.version)))
        except InvalidRequest:  # it has no such endpoint, and so no way to be updated either
            return self._initial if self._loader is None else self.version

    def _number(self, name: str) -> int:
        if name == _DEFAULT:
            return self._initial
        if not name.isdecimal():
            raise WorkerLost(self.id, f"it holds version {name!r}, which is no number")
        return int(name)

    async def _tell(self, *controls: Control) -> None:
        for control in controls:
            await self._ask(control)

    async def _ask(self, control: Control, pool: Pool | None = None) -> Any:
        return await ask(self.id, pool or self.pool, control, self.authorization)

    # Signs of life.

    async def _is_same(self) -> str:
        held = await self._held()
        return "" if held == self.version else f"another server is there, which holds version {held}"

    def _fell_silent(self, reason: str) -> None:
        self._lose(reason)
        self.version = None
        if self.on_lost is not None:
            self.on_lost(reason)

    def _lose(self, reason: str) -> None:
        """End what runs here with what is known of it."""
        for stream in list(self._streams.values()):
            self.pool.cancel(stream)
            stream.on_lost(reason)
