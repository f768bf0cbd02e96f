"""llmproxy workers in Ray actors, the driver's side.

A Ray call costs as much CPU time as twenty short generations. So requests and answers go over a line of their own,
many in a frame, and Ray is asked for the rest: to begin, to load weights, and whether the process is alive.

Invariants (tests/rollart/test_rollart_distributed_generation.py):
- a cancelled caller's request is cancelled at the engine (test_cancelling_frees_the_engine);
- when the process dies, all that was asked of it fails with WorkerLost (test_death_loses_all_requests);
- one whose engine says nothing for `patience_s` is ended, so that nothing is waited for without end
  (tests/rollart/test_rollart_distributed_engine.py::test_a_silent_process_is_ended);
- one version at a time is staged or loaded, for an engine stages only one: the proxy may bring a new process to the
  version that is served while the next is staged (..._engine.py::test_one_version_at_a_time_is_staged_or_loaded);
- the version is None whenever it is not certain.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from llmproxy.errors import WorkerLost
from llmproxy.values import Ack, GenerateRequest, GenerateResult, Partial
from llmproxy.worker import Role
from rollart.distributed.carry import restored
from rollart.distributed.cluster import Cluster
from rollart.distributed.errors import RemoteError, WorkerDied
from rollart.distributed.line import Line, dial
from rollart.distributed.member import Member
from rollart.distributed.wire import (
    Answer,
    Cancel,
    Client,
    Command,
    Description,
    Done,
    Failed,
    Generate,
    Stopped,
    Tell,
    decode_answers,
)

# Between tries to reach a process that lives, as Ray says.
_DIAL_AGAIN_S = 1.0
# Between questions whether the engine lives.
_LISTEN_S = 20.0
# A process that lives sees at once that the line has ended, and Ray soon that one has died; a cut network neither.
_TOLD_S = 5.0


class ExchangeStats(msgspec.Struct):
    """Commands and answers so far, the frames that carried them, and requests under way."""

    commands: int = 0
    sent: int = 0
    answers: int = 0
    received: int = 0
    in_flight: int = 0


class _TakenOver(Exception):
    """Raised when another client exchanges with the process."""


class RayWorker:
    """The llmproxy worker that a cluster's member hosts. `start` it after the cluster, `close` it before."""

    def __init__(self, member: Member, *, patience_s: float = 300.0) -> None:
        """`patience_s`: how long the engine may be silent."""
        self._patience_s = patience_s
        self._member = member
        self._described = Description("both", None, 0)
        self._version: int | None = None
        self._slots = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._line = Line(self._heard)
        self._runner: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._staging = asyncio.Lock()
        self._loading: dict[int, asyncio.Task[Ack]] = {}
        self._stats = ExchangeStats()

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

    def stats(self) -> ExchangeStats:
        sent = self._stats.sent + self._line.sent
        return msgspec.structs.replace(self._stats, sent=sent, in_flight=len(self._waiting))

    async def start(self) -> None:
        """Waits for a process that is being started anew."""
        self._described = await self._describe()
        self._version = self._described.version
        self._runner = asyncio.create_task(self._run(), name=f"exchange with {self.id}")
        self._listener = asyncio.create_task(self._listen(), name=f"listening to {self.id}")

    async def close(self) -> None:
        """End the exchange; what is under way raises WorkerLost. The process goes on."""
        for load in list(self._loading.values()):
            load.cancel()
        tasks = [task for task in (self._runner, self._listener) if task is not None]
        self._runner = self._listener = None
        for task in tasks:
            task.cancel()
        for end in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(end, Exception):
                raise end

    async def generate(self, request: GenerateRequest) -> GenerateResult | Partial:
        return await self._ask(Generate(next(self._slots), request))

    async def abort(self, request_id: str) -> None:
        await self._ask(Tell(next(self._slots), "abort", request_id))

    async def interrupt(self, request_id: str) -> None:
        await self._ask(Tell(next(self._slots), "interrupt", request_id))

    async def pause(self) -> None:
        await self._call("control", "pause")

    async def resume(self) -> None:
        await self._call("control", "resume")

    async def prefetch(self, version: int) -> None:
        async with self._staging:
            await self._call("control", "prefetch", version)

    async def update(self, version: int) -> Ack:
        """Who asks for the version that is being loaded (several proxies mend one worker) waits for the same load.
        That of another version is given up: that one is served no more.
        """
        for other, under_way in self._loading.items():
            if other != version:
                under_way.cancel()
        load = self._loading.get(version)
        if load is None:
            load = self._loading[version] = asyncio.create_task(self._update(version))
            load.add_done_callback(lambda load: self._loaded(version, load))
        await asyncio.wait([load])
        if load.cancelled():
            raise WorkerLost(self.id, f"the load of version {version} was given up")
        return load.result()

    def _loaded(self, version: int, load: asyncio.Task[Ack]) -> None:
        del self._loading[version]
        if not load.cancelled():
            load.exception()  # whoever asked may have given up

    async def _update(self, version: int) -> Ack:
        async with self._staging:
            self._version = None
            ack: Ack = await self._call("control", "update", version)
            self._version = None if ack.error else ack.version
            return ack

    async def probe(self) -> int | None:
        self._version = await self._call("control", "probe")
        return self._version

    async def _ask(self, command: Generate | Tell) -> Any:
        if self._runner is None or self._runner.done() or self._member.death is not None:
            raise WorkerLost(self.id, self._member.death.reason if self._member.death else "its exchange has ended")
        answer = self._waiting[command.slot] = asyncio.get_running_loop().create_future()
        self._post(command)
        try:
            return await answer
        except asyncio.CancelledError:
            self._post(Cancel(command.slot))
            raise
        finally:
            del self._waiting[command.slot]

    def _post(self, command: Command) -> None:
        self._stats.commands += 1
        self._line.post(command, linger=len(self._waiting) > 1)

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            return await self._member.call(method, *args)
        except WorkerDied as died:
            self._version = None
            raise WorkerLost(self.id, died.reason) from died
        except RemoteError as error:
            raise error.original or error from error

    async def _describe(self) -> Description:
        while True:
            await self._member.settled.wait()
            try:
                described: Description = await self._call("describe")
                return described
            except WorkerLost:
                if self._member.ended:
                    raise

    async def _listen(self) -> None:
        """Ends a process whose engine is silent, so that it is started anew. A refusal is an answer too."""
        while True:
            await asyncio.sleep(_LISTEN_S)
            if self._member.death is not None:
                continue
            silence = asyncio.timeout(self._patience_s)
            with suppress(Exception):
                async with silence:
                    await self._call("control", "probe")
            if silence.expired():
                self._member.kill(f"its engine has said nothing for {self._patience_s:g} s")

    async def _run(self) -> None:
        """Exchanges with the process, and with the one that replaces it; ends when that is dead for good."""
        try:
            while not self._member.ended:
                try:
                    await self._exchange(await self._member.call("connect"))
                except WorkerDied as died:
                    self._lose(str(died))
                await self._member.settled.wait()
        except _TakenOver:
            pass
        finally:
            self._lose("its exchange has ended")

    async def _exchange(self, client: Client) -> None:
        """Waits for the end of the line, of the process, or of this being its client."""
        if self._line.ended.done():
            self._lose("its line broke")
        line, address = self._line, client.address
        served = asyncio.create_task(self._member.call("serve", client.number))
        try:
            await dial(line, address)
            await asyncio.wait((served, line.ended), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait((served,), timeout=_TOLD_S)  # why the line has ended
            if served.done() and not served.result():
                raise _TakenOver
        except OSError as error:
            self._lose(f"cannot be reached at {address.host}:{address.port} ({error})")
            await asyncio.sleep(_DIAL_AGAIN_S)
        finally:
            line.close()
            served.cancel()
            await asyncio.gather(served, return_exceptions=True)

    def _heard(self, frame: bytes) -> None:
        """Answers came."""
        batch = decode_answers(frame)
        self._stats.answers += len(batch)
        self._stats.received += 1
        for answer in batch:
            waiting = self._waiting.get(answer.slot)
            if waiting is not None and not waiting.done():
                self._resolve(waiting, answer)

    def _resolve(self, waiting: asyncio.Future[Any], answer: Answer) -> None:
        match answer:
            case Done():
                waiting.set_result(answer.result)
            case Stopped():
                waiting.set_result(answer.partial)
            case Failed():
                original = restored(answer.error) if answer.error else None
                remote = RemoteError(self._member.info, "generate", answer.line, answer.trace, original)
                waiting.set_exception(original or remote)
            case _:
                waiting.set_result(None)

    def _lose(self, reason: str) -> None:
        """Everything under way has been lost with the process, or with the line to it."""
        self._version = None
        self._line.close()
        self._stats.sent += self._line.sent
        self._line = Line(self._heard)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(WorkerLost(self.id, reason))


def ray_workers(cluster: Cluster, *, patience_s: float = 300.0) -> Sequence[RayWorker]:
    """The workers of a running cluster of GenerationHost, for an LLMProxy; each has yet to be started."""
    return [RayWorker(member, patience_s=patience_s) for member in cluster.members]
