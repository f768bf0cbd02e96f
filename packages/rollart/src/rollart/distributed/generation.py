"""llmproxy workers in Ray actors, the actor's side: commands come over a line, and so go answers.

Invariants (tests/rollart/test_rollart_distributed_generation.py):
- commands are begun in their order, so that an abort never overtakes its request
  (test_an_abort_never_overtakes_its_request);
- every command but Cancel has one answer, which goes to the client that gave it
  (test_a_new_client_gets_no_answers_of_the_last);
- a process never outlives its engine (test_a_process_ends_with_its_engine_and_is_started_anew).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from llmproxy.errors import WorkerLost
from llmproxy.values import Partial
from llmproxy.worker import Worker as Engine
from rollart.distributed.carry import carried
from rollart.distributed.line import Door, Line
from rollart.distributed.wire import (
    Answer,
    Cancel,
    Client,
    Description,
    Done,
    Failed,
    Generate,
    Stopped,
    Tell,
    Told,
    decode_commands,
)
from rollart.distributed.worker import Worker, WorkerInfo

# In which the answers of a dead engine leave: they bring what it made.
_LAST_WORDS_S = 0.5


class HostedEngine(Engine, Protocol):
    """An llmproxy worker that is closed at the end."""

    async def ended(self) -> None:
        """Returns when it has died, as by the death of a process of its own."""
        ...

    async def close(self) -> None: ...


class GenerationHost(Worker):
    """Hosts the engine that `make` gives, which is called in the worker's process."""

    def __init__(self, make: Callable[[WorkerInfo], Awaitable[HostedEngine]]) -> None:
        self._make = make
        self._client = 0

    async def setup(self) -> None:
        import ray

        self._engine = await self._make(self.info)
        self._exchange = Exchange(self._engine)
        self._door = Door(ray.util.get_node_ip_address())
        await self._door.open()
        self._watch = asyncio.create_task(self._end_with_engine())

    async def close(self) -> None:
        self._watch.cancel()
        self._door.close()
        self._exchange.close()
        await self._engine.close()

    async def describe(self) -> Description:
        return Description(self._engine.role, self._engine.version, self._engine.context_limit)

    async def connect(self) -> Client:
        """Begin with a new client, who is to dial. What the last one still waits for is cancelled."""
        self._exchange.close()
        self._exchange = Exchange(self._engine)
        self._client += 1
        return Client(self._client, self._door.expect(self._exchange.line))

    async def serve(self, client: int) -> bool:
        """Returns when the client's line has ended: whether it is still the client, and may connect again."""
        if client == self._client:
            await self._exchange.line.ended
        return client == self._client

    async def control(self, method: str, *args: Any) -> Any:
        """Any other method of the engine."""
        return await getattr(self._engine, method)(*args)

    async def _end_with_engine(self) -> None:
        """A dead engine serves nobody, and calls that it had may hang: who started this process starts another."""
        await self._engine.ended()
        await asyncio.sleep(_LAST_WORDS_S)
        print(f"{self.info.name}: its engine has died, and so this process ends", file=sys.stderr, flush=True)
        os._exit(1)


class Exchange:
    """One client's commands and answers, as long as its line."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.line = Line(self._submit)
        self.line.ended.add_done_callback(self._end)

    def close(self) -> None:
        self.line.close()

    def _submit(self, frame: bytes) -> None:
        """Begin what the commands say, in their order."""
        for command in decode_commands(frame):
            if not isinstance(command, Cancel):
                self._tasks[command.slot] = asyncio.create_task(self._serve(command))
            elif command.slot in self._tasks:
                self._tasks[command.slot].cancel()

    def _end(self, _: object) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _serve(self, command: Generate | Tell) -> None:
        try:
            answer = await self._answer(command)
        except asyncio.CancelledError:
            if self._tasks[command.slot].cancelling():
                raise
            answer = _failed(command.slot, WorkerLost(self._engine.id, "its engine cancelled the request"))
        except Exception as error:
            answer = _failed(command.slot, error)
        finally:
            del self._tasks[command.slot]
        self.line.post(answer, linger=bool(self._tasks))

    async def _answer(self, command: Generate | Tell) -> Answer:
        if isinstance(command, Tell):
            await getattr(self._engine, command.what)(command.request_id)
            return Told(command.slot)
        ended = await self._engine.generate(command.request)
        return Stopped(command.slot, ended) if isinstance(ended, Partial) else Done(command.slot, ended)


def _failed(slot: int, error: Exception) -> Failed:
    failure = carried(error)
    return Failed(slot, failure.line, failure.trace, failure.pickled)


def engine_environment(*, gpus: bool = False) -> dict[str, str]:
    """The environment of a vLLM engine's process, for `ActorOptions.env`: offline, quiet, on the CPU one thread."""
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if gpus:
        return quiet | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    return quiet | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Else the first request compiles a kernel of its sampler: a C++ compiler, and seconds, for a few additions.
        "TORCH_COMPILE_DISABLE": "1",
    }
