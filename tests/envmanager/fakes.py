"""Environments, policies and a buffer for the tests, on virtual time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import async_solipsism
from aiohttp import web

from envmanager import Action, Episode, Span, Trajectory

T = TypeVar("T")
FOREVER = 1e9
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def virtual(work: Coroutine[Any, Any, T]) -> T:
    """Runs on a virtual-time loop, and fails if the work leaves a task alive."""

    async def checked() -> T:
        try:
            return await work
        finally:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"tasks left alive: {left}"

    with asyncio.Runner(loop_factory=async_solipsism.EventLoop) as runner:
        return runner.run(checked())


@asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[str]:
    """The URL of a real server on loopback that gives every POST to the handler."""
    app = web.Application()
    app.router.add_post("/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


class World:
    """Makes environments and knows which are alive. `plans` gives each key's: keyword arguments of FakeEnv."""

    def __init__(self, plans: dict[str, dict[str, Any]] | None = None, **default: Any) -> None:
        self.plans = plans or {}
        self.default = default
        self.alive: set[FakeEnv] = set()
        self.made: list[FakeEnv] = []
        self.most = 0

    blocking = False

    def __call__(self, key: str) -> "FakeEnv":
        env = FakeEnv(self, **(self.default | self.plans.get(key, {})))
        self.made.append(env)
        self.alive.add(env)
        self.most = max(self.most, len(self.alive))
        return env


class FakeEnv:
    """Ends after `turns` steps of `step_s` seconds each; a fault is an exception, a value or a delay."""

    task = "fake"

    def __init__(
        self,
        world: World,
        turns: int = 3,
        step_s: float = 1.0,
        reset_s: float = 0.0,
        reset: Any = None,
        step: Any = None,
        fault_turn: int = 1,
        close_s: float = 0.0,
    ) -> None:
        self.world = world
        self.turns = turns
        self.step_s = step_s
        self.reset_s = reset_s
        self.faults = {"reset": reset, "step": step}
        self.fault_turn = fault_turn
        self.close_s = close_s
        self.steps = 0
        self.closes = 0
        self.seed: int | None = None

    async def reset(self, seed: int | None = None) -> Any:
        self.seed = seed
        await asyncio.sleep(self.reset_s)
        return await self._fault("reset", (f"seed {seed}", {"start": seed}))

    async def step(self, action: str) -> Any:
        self.steps += 1
        await asyncio.sleep(self.step_s)
        last = self.steps >= self.turns
        fine = (f"after {action}", 1.0 if last else 0.0, last, False, {"steps": self.steps})
        return await self._fault("step", fine) if self.steps == self.fault_turn else fine

    async def close(self) -> None:
        self.closes += 1
        await asyncio.sleep(self.close_s)

    def kill(self) -> None:
        self.world.alive.discard(self)

    async def _fault(self, what: str, fine: Any) -> Any:
        fault = self.faults[what]
        if isinstance(fault, BaseException):
            raise fault
        if isinstance(fault, float):
            await asyncio.sleep(fault)
            return fine
        return fine if fault is None else fault


class FakePolicy:
    """Answers after `generate_s` with three tokens made by `version`."""

    def __init__(self, generate_s: float = 1.0, version: int = 0, fault: Any = None) -> None:
        self.generate_s = generate_s
        self.version = version
        self.fault = fault
        self.cancelled = 0
        self.seen: list[tuple[str, int, str]] = []
        self.hook: Callable[[], None] = lambda: None

    async def act(self, episode: Episode) -> Action | None:
        self.hook()
        self.seen.append((episode.id, len(episode.turns), episode.observation))
        try:
            await asyncio.sleep(self.generate_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(self.fault, Exception):
            raise self.fault
        return Action(
            text=f"a{len(episode.turns)}",
            token_ids=[1, 2, 3],
            logprobs=[-0.1, -0.2, -0.3],
            spans=[Span(self.version, 0, 2), Span(self.version + 1, 2, 3)],
            prompt_ids=[7, 8],
            new_segment=True,
        )


class FakeTicket:
    """As strict as a sample buffer's: one stamp, one end, stamped before it is finished, late calls answered."""

    def __init__(self, buffer: "FakeBuffer", id: int, key: str) -> None:
        self.buffer = buffer
        self.id = id
        self.key = key
        self.group_id = id
        self.member = 0
        self.fate = ""
        self.version: int | None = None
        self.payload: Any = None
        self.reward: float | None = None
        self.error: Exception | None = None
        self.late: list[str] = []
        self._callback: Callable[[str], None] | None = None

    def on_cancel(self, callback: Callable[[str], None]) -> None:
        if self.fate in ("surplus", "stale", "closed"):
            callback(self.fate)
        else:
            self._callback = callback

    def stamp(self, version: int) -> None:
        if not self.fate:
            assert self.version is None, "stamped twice"
            self.version = version

    def finish(self, payload: Trajectory, reward: float) -> str:
        assert self.fate or self.version is not None, "finished before it was stamped"
        self.payload, self.reward = payload, reward
        return "accepted" if self._end("finished") else "ended"

    def fail(self, error: Exception) -> bool:
        self.error = error
        return self._end("failed")

    def cancel(self) -> bool:
        return self._end("cancelled")

    def end(self, reason: str) -> None:
        """The buffer's own doing."""
        if not self.fate:
            callback = self._callback
            self._end(reason)
            if callback is not None:
                callback(reason)

    def _end(self, fate: str) -> bool:
        if self.fate:
            self.late.append(fate)
            return False
        self.fate = fate
        self._callback = None
        return True


class BufferClosed(Exception):
    """A foreign Closed, unknown to envmanager."""


class FakeBuffer:
    """Issues the keys once each, then waits for `close`, or ends of itself with `ends`."""

    def __init__(self, keys: list[str], ends: bool = True) -> None:
        self.keys = keys
        self.ends = ends
        self.tickets: list[FakeTicket] = []
        self.closed = asyncio.Event()

    async def next_ticket(self) -> FakeTicket:
        if not self.closed.is_set() and len(self.tickets) == len(self.keys) and not self.ends:
            await self.closed.wait()
        if self.closed.is_set() or len(self.tickets) == len(self.keys):
            raise BufferClosed
        ticket = FakeTicket(self, len(self.tickets), self.keys[len(self.tickets)])
        self.tickets.append(ticket)
        return ticket

    def close(self) -> None:
        self.closed.set()
        for ticket in self.tickets:
            ticket.end("closed")
