"""A worker over vLLM's AsyncLLM in this process; its engine runs in child processes.

Token ids in, token ids out. Held by tests/llmproxy/test_llmproxy_vllm.py with a real engine:
- pausing keeps running generations and drops their caches, so that tokens after an update come from the new weights
  alone, log-probabilities and version spans included;
- log-probabilities are those of the distribution that was sampled from;
- a cancelled, aborted or interrupted generation leaves nothing in the engine;
- no process of the engine outlives `close`, nor this process.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import uuid4
from zlib import crc32

from . import reaper, vllm_transfer
from .checks import check_request
from .errors import (
    Aborted,
    DuplicateRequest,
    InvalidRequest,
    UpdateFailed,
    WorkerLost,
    WrongState,
)
from .values import (
    Ack,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Handoff,
    Partial,
    Sampling,
    Span,
    Timing,
    extend_partial,
)
from .worker import Role, WeightLoader

_ENVIRONMENT = {  # what the engine's process inherits unless it is set otherwise
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked engine could not be told from its owner
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # on CPU: the engine in one child process instead of two
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # on CPU: OMP_NUM_THREADS counts, and engines may share cores
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "SPT_NOENV": "1",  # process titles must not overwrite the environment, where the reaper's mark is
}
_EAGER_ENVIRONMENT = {
    "TORCH_COMPILE_DISABLE": "1",  # else the first request waits seconds for the sampler to compile a few additions
}
_DEFAULTS = {
    "skip_tokenizer_init": True,
    "logprobs_mode": "processed_logprobs",
    "enable_log_requests": False,
    "disable_log_stats": True,
}
_ENDS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
_KEPT_PARAMS = 256
"""Distinct (sampling, budget) pairs whose engine parameters are kept; runs have a handful."""
_TEARDOWN_S = 1.0
"""What the engine's process gets to free what it holds. It ends its teardown in less, and then waits to be killed."""
_LOOK_S = 0.5
"""Between looks at whether the engine lives."""
_starting = threading.Lock()
"""Engines inherit their mark through this process's environment, so they start one after the other."""


class VLLMWorker:
    """One vLLM engine. `start` it before use; `engine_args` are those of AsyncEngineArgs.

    The engine's random seed is made from `engine_args["seed"]` and the worker's id: engines with equal seeds draw
    equal random numbers, and group members spread over them would come out alike. For the same reason a
    `sampling.seed` is mixed with the trajectory's id and the length of its context.
    """

    def __init__(
        self,
        engine_args: dict[str, Any],
        loader: WeightLoader,
        id: str,
        hardware: str,
        role: Role = "both",
        *,
        version: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`version` is that of the weights in `engine_args["model"]`; `environment` is for the engine's process."""
        self.id = id
        self.hardware = hardware
        self.role: Role = role
        self.version: int | None = version
        self._initial = version
        self._loader = loader
        self._engine_args = _merge(vllm_transfer.engine_args(role) | engine_args, loader.engine_args(), id)
        self._environment = dict(environment or {})
        self._staged: int | None = None
        self._paused = False
        self._pausing = False  # from the call of pause on
        self._vllm: Any = None  # the module vllm_engine
        self._engine: Any = None
        self._reaper: subprocess.Popen[bytes] | None = None
        self._collectors: dict[str, Any] = {}
        self._asked: dict[str, int] = {}  # the longest context of each request
        self._interrupting: set[str] = set()
        self._taking: set[str] = set()  # requests that came with a handoff
        self._params: dict[tuple[Sampling, int], Any] = {}
        self._vocabulary = 0
        self._context_limit = 0

    @property
    def context_limit(self) -> int:
        if not self._context_limit:
            raise WrongState(f"worker {self.id} has not been started; await start() first")
        return self._context_limit

    async def start(self) -> None:
        """Import vLLM and start the engine: tens of seconds."""
        if self._vllm is not None:
            raise WrongState(f"worker {self.id} was started before")
        await asyncio.to_thread(self._make_engine)
        self._context_limit = self._engine.model_config.max_model_len
        self._vocabulary = self._engine.model_config.get_vocab_size()
        try:
            # The answer is kept by the engine's client: from here on add_request registers before it first waits.
            await self._engine.get_supported_tasks()
            await self._loader.start(self._engine)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the engine. Running generations raise WorkerLost with what they have."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        for collector in self._collectors.values():
            if collector is not None:
                collector.put(self._vllm.EngineDeadError())
        try:
            await self._loader.close()
        finally:
            await asyncio.to_thread(self._end_engine, engine)

    async def ended(self) -> None:
        """Returns when the engine has died: calls that were under way may never be answered. Raises WorkerLost once
        it is closed.
        """
        while not self._alive().errored:  # noqa: ASYNC110 - vLLM tells nobody
            await asyncio.sleep(_LOOK_S)

    async def generate(self, request: GenerateRequest) -> GenerateResult | Partial:
        handoff = request.handoff
        if handoff is not None and (self._pausing or handoff.version != self.version):
            await self.release(handoff)
            return extend_partial(request, [], [], ())
        output, interrupted = await self._run(request)
        return self._answer(request, output, interrupted)

    async def prefill(self, request: GenerateRequest) -> Handoff | None:
        output, _ = await self._run(request, vllm_transfer.ASK)
        version, cached, transfer = self._vllm.read_handoff(output)
        if transfer is None:
            return None
        return Handoff(self.id, self._version(version), transfer, cached)

    async def release(self, handoff: Handoff) -> None:
        with self._calling() as engine:
            await engine.notify_kv_transfer_request_rejected(uuid4().hex, handoff.params)

    def backlog(self) -> int:
        """Counted from the call of generate on, though the engine may not have taken the request yet."""
        return sum(
            self._asked[id] if collector is None else self._vllm.tokens_left(self._engine, collector)
            for id, collector in self._collectors.items()
            if self._engine is not None
        )

    async def _run(self, request: GenerateRequest, ask: dict[str, Any] | None = None) -> tuple[Any, bool]:
        """The engine's last output for the request, and whether an interrupt ended it."""
        engine, id = self._alive(), request.request_id
        if id in self._collectors:
            raise DuplicateRequest("request_id", f"{id!r} is running on worker {self.id}", "unique")
        self._check(request)
        params = self._sampling_params(request, ask)
        prompt = self._vllm.tokens_input(request.context)
        if request.handoff is not None:
            self._taking.add(id)
        self._asked[id] = request.tokens
        self._collectors[id] = collector = None
        try:
            self._collectors[id] = collector = await engine.add_request(id, prompt, params)
            output = await collector.get()
        except asyncio.CancelledError:
            await engine.abort(id)
            raise
        except self._vllm.EngineDeadError as error:
            output = self._vllm.salvage(engine, collector) if collector is not None else None
            partial = self._whole(request, output)[0] if output is not None else None
            reason = "was closed" if self._engine is None else "its engine died"
            raise WorkerLost(self.id, reason, partial) from error
        except self._vllm.VLLMValidationError as error:
            raise InvalidRequest(error.parameter or "request", str(error), "what the engine takes") from error
        finally:
            del self._collectors[id], self._asked[id]
            self._taking.discard(id)
            interrupted = id in self._interrupting
            self._interrupting.discard(id)
        return output, interrupted

    async def abort(self, request_id: str) -> None:
        if request_id in self._collectors:
            with self._calling() as engine:
                await engine.abort(request_id)

    async def interrupt(self, request_id: str) -> None:
        if request_id in self._collectors:
            self._interrupting.add(request_id)
            with self._calling() as engine:
                await engine.abort(request_id)

    async def pause(self) -> None:
        self._pausing = True
        if not self._paused:
            with self._calling() as engine:
                for id in list(self._taking):
                    collector = self._collectors.get(id)
                    if collector is None or not self._vllm.has_tokens(engine, collector):
                        await self.interrupt(id)  # the cache it waits for is of the old weights
                await engine.pause_generation(mode="keep", clear_cache=True)
            self._paused = True

    async def prefetch(self, version: int) -> None:
        await self._loader.prefetch(version)
        self._staged = version

    async def update(self, version: int) -> Ack:
        if self._staged != version:
            await self.prefetch(version)
        await self.pause()
        self.version = self._staged = None
        with self._calling() as engine:
            try:
                digest = await self._loader.load(engine, version)
                await engine.update_weight_version(str(version))
            except Exception as error:  # whatever failed, nothing is known of the weights
                if engine.errored:
                    raise self._vllm.EngineDeadError from error
                failure = Ack(self.id, version, error=f"{type(error).__name__}: {error}")
                raise UpdateFailed(version, [failure]) from error
        self.version = version
        return Ack(self.id, version, digest)

    async def resume(self) -> None:
        if self.version is None:
            raise WrongState(f"worker {self.id} holds no known version; update it first")
        with self._calling() as engine:
            await engine.resume_generation()
        self._paused = self._pausing = False

    async def probe(self) -> int | None:
        with self._calling() as engine:
            await engine.check_health()
            version = self._version(await engine.get_weight_version())
        return version if version == self.version else None

    # The engine's process.

    def _make_engine(self) -> None:
        """Sets the engine instead of returning it: a pool thread would hold its last result, and so the engine."""
        self._vllm = importlib.import_module("llmproxy.vllm_engine")
        wanted = _ENVIRONMENT | (_EAGER_ENVIRONMENT if self._engine_args.get("enforce_eager") else {})
        mark = uuid4().hex
        given = vllm_transfer.environment(self.role) | self._environment | {reaper.MARK: mark}
        with _starting, _environment({name: os.environ.get(name, wanted[name]) for name in wanted} | given):
            self._reaper = reaper.start(mark)
            try:
                with reaper.marked_semaphores(mark):
                    self._engine = self._vllm.make(self._engine_args)
            except BaseException:
                self._reaper.communicate()
                raise

    def _end_engine(self, engine: Any) -> None:
        engine.shutdown(timeout=_TEARDOWN_S)
        assert self._reaper is not None
        self._reaper.communicate()  # closes its input, then waits for it

    def _alive(self) -> Any:
        if self._engine is not None:
            return self._engine
        if self._vllm is None:
            raise WrongState(f"worker {self.id} has not been started; await start() first")
        raise WorkerLost(self.id, "was closed")

    @contextmanager
    def _calling(self) -> Iterator[Any]:
        engine = self._alive()
        try:
            yield engine
        except self._vllm.EngineDeadError as error:
            raise WorkerLost(self.id, "its engine died") from error

    # Requests and answers.

    def _check(self, request: GenerateRequest) -> None:
        check_request(request, self._context_limit)
        highest = max(request.context)
        if highest >= self._vocabulary:  # such an id would end the engine, not only the request
            raise InvalidRequest("prompt_ids", f"contains {highest}", f"ids below {self._vocabulary}")

    def _sampling_params(self, request: GenerateRequest, ask: dict[str, Any] | None) -> Any:
        """With `ask`, those of a prefill, whose one token nobody uses."""
        sampling, budget = request.sampling, request.budget if ask is None else 1
        transfer = ask if request.handoff is None else request.handoff.params
        params = self._params.get((sampling, budget))
        if params is not None and transfer is None:
            return params
        mode = self._engine_args["logprobs_mode"]
        if sampling.modifies and mode != "processed_logprobs":
            raise InvalidRequest(
                "sampling.logprobs", f"are {mode} in this engine", "unmodified sampling, or another logprobs_mode"
            )
        if sampling.seed is not None or transfer is not None:
            return self._vllm.sampling_params(sampling, budget, _seed(request), transfer)
        if len(self._params) >= _KEPT_PARAMS:
            self._params.clear()
        params = self._params[sampling, budget] = self._vllm.sampling_params(sampling, budget, None)
        return params

    def _whole(self, request: GenerateRequest, output: Any) -> tuple[Partial, str, int]:
        """The generation with what came before, why the engine ended it, and how much of the prompt was cached."""
        token_ids, logprobs, runs, reason, cached = self._vllm.read(output)
        spans = [Span(self._version(version), start, end) for version, start, end in runs]
        return extend_partial(request, token_ids, logprobs, spans), reason, cached

    def _answer(self, request: GenerateRequest, output: Any, interrupted: bool) -> GenerateResult | Partial:
        whole, reason, cached = self._whole(request, output)
        end = _ENDS.get(reason)
        if end is not None:
            timing = Timing(cached_tokens=cached)
            return GenerateResult(whole.token_ids, whole.logprobs, whole.spans, end, self.id, timing)
        if reason != "abort":
            raise WorkerLost(self.id, f"its engine ended a request with {reason!r}", whole)
        if interrupted:
            return whole
        raise Aborted(f"request {request.request_id} was aborted on worker {self.id}")

    def _version(self, text: str) -> int:
        return self._initial if text == "default" else int(text)


@contextmanager
def _environment(inherited: dict[str, str]) -> Iterator[None]:
    """For processes started meanwhile. Afterwards all is as before: what starts later is not the engine's."""
    before = {name: os.environ.get(name) for name in inherited}
    os.environ.update(inherited)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _seed(request: GenerateRequest) -> int | None:
    if request.sampling.seed is None:
        return None
    return crc32(f"{request.sampling.seed}/{request.trajectory_id}/{len(request.context)}".encode())


def _merge(given: dict[str, Any], loader: dict[str, Any], worker_id: str) -> dict[str, Any]:
    clash = sorted(given.keys() & loader.keys())
    if clash:
        raise ValueError(f"engine_args {clash} are set by the weight loader; leave them out")
    seed = crc32(f"{given.get('seed', 0)}/{worker_id}".encode())
    return _DEFAULTS | given | loader | {"seed": seed}
