"""A plain function as a reward client.

Invariant: the loop is never blocked, and at most `threads` calls run at once (test_envmanager_rewards.py).
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from envmanager.errors import RewardError
from envmanager.faults import told
from envmanager.values import Trajectory


class LocalReward:
    """Calls `function(trajectory)` in one of its threads. A call that never returns keeps its thread: see
    `PoolReward`.
    """

    def __init__(self, function: Callable[[Trajectory], float], threads: int = 4) -> None:
        self._function = function
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="reward")

    async def __call__(self, trajectory: Trajectory) -> float:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._called, trajectory)

    def _called(self, trajectory: Trajectory) -> float:
        try:
            return self._function(trajectory)
        except StopIteration as error:  # the one exception that a future cannot carry: who waits would wait for ever
            raise RewardError(f"the reward raised {told(error)}") from error

    async def close(self) -> None:
        """Ends the threads that are idle; waits for none."""
        self._threads.shutdown(wait=False, cancel_futures=True)
