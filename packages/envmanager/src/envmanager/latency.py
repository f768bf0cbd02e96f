"""Slowness on purpose, for benchmarks and tests: a normal delay before each step, on the loop's clock.

Invariant: with the same seed the delays are the same, on real and on virtual time
(test_envmanager_latency.py).
"""

import asyncio
import inspect
import random
from typing import Any


class LatencyEnv:
    """An environment behind a delay of N(mean_s, std_s), clipped at 0, before every step. The environment
    itself must not block.
    """

    def __init__(self, env: Any, mean_s: float, std_s: float, seed: int = 0) -> None:
        if mean_s < 0 or std_s < 0:
            raise ValueError(f"mean_s is {mean_s} and std_s is {std_s}; a delay has neither below 0")
        self.env = env
        self.mean_s = mean_s
        self.std_s = std_s
        self.task = getattr(env, "task", "default")
        self._random = random.Random(seed)

    async def reset(self, seed: int | None = None) -> Any:
        result = self.env.reset(seed=seed)
        return await result if inspect.isawaitable(result) else result

    async def step(self, action: str) -> Any:
        await asyncio.sleep(max(0.0, self._random.gauss(self.mean_s, self.std_s)))
        result = self.env.step(action)
        if type(result) is tuple:  # asking whether it is awaitable would cost more than many a step
            return result
        return await result if inspect.isawaitable(result) else result

    async def close(self) -> None:
        if close := getattr(self.env, "close", None):
            result = close()
            if inspect.isawaitable(result):
                await result
