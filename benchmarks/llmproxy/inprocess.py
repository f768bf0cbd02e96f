"""CPU time a request costs in an embedded proxy, with 10,000 in flight over 256 workers.

python benchmarks/llmproxy/inprocess.py [--quick]

10,000 trajectories of several turns run at once. Workers are doubles that hold a request until it is its turn and
then answer at once, so that what is measured is the proxy: checks, routing by class, trajectory and load, ledger,
gate. The same is done without a proxy, each trajectory calling a worker itself; the difference is what the proxy
costs. Garbage collection stays on. Every answer is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _results import Row, write

from llmproxy import Ack, AffinityRouter, GenerateRequest, GenerateResult, LLMProxy, Role, Span

WORKERS = 256
IN_FLIGHT = 10_000
PROMPT = 256
TOKENS = 16
GOAL_US = 50.0
Generate = Callable[[GenerateRequest], Awaitable[GenerateResult]]


class Held:
    """A worker that answers when the line before it has been answered. All share one line."""

    role: Role = "both"
    version: int | None = 0
    context_limit = 32_768

    def __init__(self, id: str, hardware: str, line: deque[asyncio.Future[None]]) -> None:
        self.id = id
        self.hardware = hardware
        self._line = line

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        turn = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        await turn
        first = request.prompt_ids[0]
        return GenerateResult([first] * TOKENS, [-1.0] * TOKENS, [Span(0, 0, TOKENS)], "length", self.id)

    async def probe(self) -> int | None:
        return self.version

    async def _nothing(self) -> None:
        raise NotImplementedError

    async def abort(self, request_id: str) -> None:
        await self._nothing()

    interrupt = abort

    async def pause(self) -> None:
        await self._nothing()

    resume = pause

    async def prefetch(self, version: int) -> None:
        await self._nothing()

    async def update(self, version: int) -> Ack:
        raise NotImplementedError


async def serve(line: deque[asyncio.Future[None]]) -> None:
    """Answer the oldest, a few at a time, so that nearly all stay in flight."""
    while True:
        for _ in range(min(64, len(line))):
            turn = line.popleft()
            if not turn.done():
                turn.set_result(None)
        await asyncio.sleep(0)


async def play(generate: Generate, number: int, turns: int, gauge: list[int]) -> None:
    context = [number] * PROMPT
    for turn in range(turns):
        gauge[0] += 1
        gauge[1] = max(gauge)
        request = GenerateRequest(
            f"t{number}", context, TOKENS, task=f"task{number % 3}", request_id=f"{number}/{turn}"
        )
        result = await generate(request)
        gauge[0] -= 1
        assert result.token_ids == [number] * TOKENS
        context = context + result.token_ids


async def measure(turns: int, through_proxy: bool) -> float:
    """Microseconds of CPU a request."""
    line: deque[asyncio.Future[None]] = deque()
    workers = [Held(f"w{i}", f"class{i % 3}", line) for i in range(WORKERS)]
    router = AffinityRouter({f"task{i}": f"class{i}" for i in range(3)}, random=Random(0))
    proxy = LLMProxy(workers, router=router)
    random = Random(0)

    async def direct(request: GenerateRequest) -> GenerateResult:
        return await workers[int(random.random() * WORKERS)].generate(request)

    generate: Generate = proxy.generate if through_proxy else direct
    gauge = [0, 0]
    serving = asyncio.create_task(serve(line))
    start = time.process_time()
    await asyncio.gather(*(play(generate, number, turns, gauge) for number in range(IN_FLIGHT)))
    spent = time.process_time() - start
    serving.cancel()
    assert gauge == [0, IN_FLIGHT]
    if through_proxy:
        stats = proxy.stats()
        assert stats.requests["finished"] == IN_FLIGHT * turns
        assert stats.router["stayed"] == IN_FLIGHT * (turns - 1)
        assert all(one.charged == one.running == 0 for one in stats.workers)
        await proxy.close()
    return 1e6 * spent / (IN_FLIGHT * turns)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    turns, rounds = (4, 2) if options.quick else (8, 5)
    through, direct = [], []
    for _ in range(rounds):
        direct.append(asyncio.run(measure(turns, False)))
        through.append(asyncio.run(measure(turns, True)))
    added = [one - median(direct) for one in through]
    rows = [
        Row.against("cpu_us_per_request_10k_in_flight", "us", through, "goal", GOAL_US, less=True),
        Row(
            metric="cpu_us_added_by_the_proxy",
            unit="us",
            ours=median(added),
            peer="calling workers without a proxy",
            peer_value=median(direct),
            spread=[min(added), max(added)],
        ),
    ]
    write(Path(__file__), rows, options.quick)


if __name__ == "__main__":
    main()
