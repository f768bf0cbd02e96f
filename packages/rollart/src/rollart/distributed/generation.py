"""llmproxy workers in Ray actors, with calls in batches: a Ray call costs as much as a hundred short generations.

`GenerationHost` runs one llmproxy worker in an actor; `RayWorker` is that worker in the driver. Commands wait in the
driver while the last batch of them is on its way; results wait in the actor while the last batch of them is. So the
more there is to do, the larger are the batches, and a lone request waits for nothing.

Invariants (tests/rollart/test_rollart_distributed_generation.py):
- commands are carried out in the order of the calls, so that an abort never overtakes its request
  (test_an_abort_never_overtakes_its_request);
- a cancelled caller's request is cancelled at the engine (test_cancelling_frees_the_engine);
- when the process dies, all that was asked of it fails with WorkerLost (test_death_loses_all_requests).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec
from llmproxy.errors import WorkerLost
from llmproxy.values import Ack, GenerateRequest, GenerateResult, Partial
from llmproxy.worker import Role
from llmproxy.worker import Worker as Engine

from rollart.distributed.carry import carried, restored
from rollart.distributed.cluster import Cluster
from rollart.distributed.decorators import register
from rollart.distributed.errors import RemoteError, WorkerDied
from rollart.distributed.member import Member
from rollart.distributed.worker import Worker, WorkerInfo


class Generate(msgspec.Struct, frozen=True, array_like=True, tag=0):
    slot: int
    request: GenerateRequest


class Tell(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Abort or interrupt a request; answered when the engine has been told."""

    slot: int
    what: Literal["abort", "interrupt"]
    request_id: str


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The caller of this slot has gone. Not answered."""

    slot: int


class Done(msgspec.Struct, frozen=True, array_like=True, tag=0):
    slot: int
    result: GenerateResult


class Stopped(msgspec.Struct, frozen=True, array_like=True, tag=1):
    slot: int
    partial: Partial


class Told(msgspec.Struct, frozen=True, array_like=True, tag=2):
    slot: int


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=3):
    slot: int
    line: str
    trace: str
    error: bytes


Command = Generate | Tell | Cancel
Answer = Done | Stopped | Told | Failed

import os

LINGER = float(os.environ.get("LG", "0.002"))
_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(list[Command])
_answers = msgspec.msgpack.Decoder(list[Answer])


class HostedEngine(Engine, Protocol):
    """An llmproxy worker that is closed at the end."""

    async def close(self) -> None: ...


class Description(msgspec.Struct, frozen=True):
    """What a worker says of itself once it has started."""

    role: Role
    version: int | None
    context_limit: int


class GenerationHost(Worker):
    """Hosts the engine that `make` gives, which is called in the worker's process."""

    def __init__(self, make: Callable[[WorkerInfo], Awaitable[HostedEngine]]) -> None:
        self._make = make
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._answered: list[Answer] = []
        self._some = asyncio.Event()

    async def setup(self) -> None:
        self._engine = await self._make(self.info)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await self._engine.close()

    @register("execute_all")
    async def describe(self) -> Description:
        return Description(self._engine.role, self._engine.version, self._engine.context_limit)

    async def submit(self, batch: bytes) -> None:
        """Begin what a list of commands says, in its order."""
        for command in _commands.decode(batch):
            if isinstance(command, Cancel):
                if command.slot in self._tasks:
                    self._tasks[command.slot].cancel()
            else:
                self._tasks[command.slot] = asyncio.create_task(self._serve(command))

    async def collect(self) -> bytes:
        """The answers that there are, as soon as there is one."""
        await self._some.wait()
        if self._tasks:
            await asyncio.sleep(LINGER)
        self._some.clear()
        answers, self._answered = self._answered, []
        return _encoder.encode(answers)

    async def control(self, method: str, *args: Any) -> Any:
        return await getattr(self._engine, method)(*args)

    async def _serve(self, command: Generate | Tell) -> None:
        try:
            answer = await self._answer(command)
        except Exception as error:
            failure = carried(error)
            answer = Failed(command.slot, failure.line, failure.trace, failure.pickled)
        finally:
            del self._tasks[command.slot]
        self._answered.append(answer)
        self._some.set()

    async def _answer(self, command: Generate | Tell) -> Answer:
        if isinstance(command, Tell):
            await getattr(self._engine, command.what)(command.request_id)
            return Told(command.slot)
        ended = await self._engine.generate(command.request)
        return Stopped(command.slot, ended) if isinstance(ended, Partial) else Done(command.slot, ended)


class RayWorker:
    """The llmproxy worker that a cluster's member hosts. `start` it after the cluster, `close` it before."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._described = Description("both", None, 0)
        self._version: int | None = None
        self._slots = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._posted: list[Command] = []
        self._some = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self._member.info.name

    @property
    def hardware(self) -> str:
        return self._member.info.hardware

    @property
    def role(self) -> Role:
        return self._described.role

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def context_limit(self) -> int:
        return self._described.context_limit

    async def start(self) -> None:
        self._described = await self._call("describe")
        self._version = self._described.version
        self._runner = asyncio.create_task(self._run(), name=f"exchange with {self.id}")

    async def close(self) -> None:
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait([self._runner])
        self._lose("it was closed")

    async def generate(self, request: GenerateRequest) -> GenerateResult | Partial:
        slot = next(self._slots)
        return await self._ask(Generate(slot, request))

    async def abort(self, request_id: str) -> None:
        await self._ask(Tell(next(self._slots), "abort", request_id))

    async def interrupt(self, request_id: str) -> None:
        await self._ask(Tell(next(self._slots), "interrupt", request_id))

    async def pause(self) -> None:
        await self._call("control", "pause")

    async def resume(self) -> None:
        await self._call("control", "resume")

    async def prefetch(self, version: int) -> None:
        await self._call("control", "prefetch", version)

    async def update(self, version: int) -> Ack:
        self._version = None
        ack: Ack = await self._call("control", "update", version)
        self._version = None if ack.error else ack.version
        return ack

    async def probe(self) -> int | None:
        self._version = await self._call("control", "probe")
        return self._version

    async def _ask(self, command: Generate | Tell) -> Any:
        if self._member.death is not None:
            raise WorkerLost(self.id, self._member.death.reason)
        answer = self._waiting[command.slot] = asyncio.get_running_loop().create_future()
        self._post(command)
        try:
            return await answer
        except asyncio.CancelledError:
            self._post(Cancel(command.slot))
            raise
        finally:
            self._waiting.pop(command.slot, None)

    def _post(self, command: Command) -> None:
        self._posted.append(command)
        self._some.set()

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            return await self._member.call(method, *args)
        except WorkerDied as died:
            self._version = None
            raise WorkerLost(self.id, died.reason) from died
        except RemoteError as error:
            raise error.original or error from error

    async def _run(self) -> None:
        """Exchanges batches with the process, and with the one that replaces it; ends when that is dead for good."""
        while self._member.death is None:
            try:
                async with asyncio.TaskGroup() as exchange:
                    exchange.create_task(self._send())
                    exchange.create_task(self._receive())
            except* WorkerDied as died:
                self._lose(str(died.exceptions[0]))
            await self._member.settled.wait()

    async def _send(self) -> None:
        """Takes what was posted; waits for a first command, and for the last batch to arrive."""
        while True:
            await self._some.wait()
            if len(self._waiting) > len(self._posted):
                await asyncio.sleep(LINGER)
            self._some.clear()
            batch, self._posted = self._posted, []
            await self._member.call("submit", _encoder.encode(batch))

    async def _receive(self) -> None:
        """Takes the answers; waits for a first one."""
        while True:
            for answer in _answers.decode(await self._member.call("collect")):
                waiting = self._waiting.get(answer.slot)
                if waiting is not None and not waiting.done():
                    self._resolve(waiting, answer)

    def _resolve(self, waiting: asyncio.Future[Any], answer: Answer) -> None:
        match answer:
            case Done():
                waiting.set_result(answer.result)
            case Stopped():
                waiting.set_result(answer.partial)
            case Told():
                waiting.set_result(None)
            case Failed():
                original = restored(answer.error) if answer.error else None
                remote = RemoteError(self._member.info, "generate", answer.line, answer.trace, original)
                waiting.set_exception(original or remote)

    def _lose(self, reason: str) -> None:
        """Everything under way has been lost with the process."""
        self._version = None
        self._posted.clear()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(WorkerLost(self.id, reason))


def ray_workers(cluster: Cluster) -> Sequence[RayWorker]:
    """The workers of a running cluster of GenerationHost, for an LLMProxy; each has yet to be started."""
    return [RayWorker(member) for member in cluster.members]


def engine_environment() -> dict[str, str]:
    """The environment of a vLLM engine's process, for `ActorOptions.env`: offline, quiet, one thread."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
