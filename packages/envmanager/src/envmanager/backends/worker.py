"""The worker's side: makes environments one after another and answers for them; or scores trajectories.

Invariant: whatever user code returns or raises becomes one plain reply
(test_envmanager_subprocess.py::test_bad_environments).
"""

import asyncio
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from envmanager.backends.keeper import adopt_orphans, children
from envmanager.backends.wire import HEADER_BYTES, Ask, Told, frame, read_exactly, write_all
from envmanager.contract import check_reset, check_score, check_step, check_task, plain
from envmanager.errors import RewardError, RolloutError
from envmanager.faults import told
from envmanager.host import typed
from envmanager.naming import named
from envmanager.values import Trajectory


class Worker:
    """One process's environment, or none between two incarnations."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._target: Callable[[Any], Any]
        self._env: Any = None

    def answer(self, ask: Ask) -> Told:
        try:
            value = getattr(self, ask.call)(ask.argument)
        except BaseException as error:
            failure = typed(error, ask.call) if ask.call != "score" else _unscored(error)
            return Told(ask.incarnation, None, failure.kind, str(failure))
        return Told(ask.incarnation, value)

    def load(self, target: str) -> None:
        """Imports the factory or the function, once."""
        self._target = named(target)

    def make(self, key: str) -> str:
        """-> the environment's task."""
        self._env = self._target(key)
        return check_task(getattr(self._env, "task", "default"))

    def reset(self, seed: int) -> tuple[Any, ...]:
        observation, info = check_reset(self._awaited(self._env.reset(seed=seed)))
        return observation, plain(info)

    def step(self, action: str) -> tuple[Any, ...]:
        *rest, info = check_step(self._awaited(self._env.step(action)))
        return *rest, plain(info)

    def close(self, _: None) -> bool:
        """-> whether the process can serve another: nothing that the environment started is left."""
        env, self._env = self._env, None
        if close := getattr(env, "close", None):
            self._awaited(close())
        return not children(os.getpid())

    def score(self, trajectory: bytes) -> float:
        decoded = msgspec.msgpack.decode(trajectory, type=Trajectory)
        return check_score(self._awaited(self._target(decoded)))

    def _awaited(self, value: Any) -> Any:
        return self._loop.run_until_complete(value) if inspect.isawaitable(value) else value


def _unscored(error: BaseException) -> RolloutError:
    if isinstance(error, RolloutError):
        return error
    return RewardError(f"the reward raised {told(error)}")


def serve(talk: int) -> None:
    """Answers until nobody asks any more."""
    adopt_orphans()  # so that what an environment left behind is seen at its close
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # it came with the fork, and all forks would draw the same
    worker = Worker()
    decoder = msgspec.msgpack.Decoder(Ask)
    while len(header := read_exactly(talk, HEADER_BYTES)) == HEADER_BYTES:
        ask = decoder.decode(read_exactly(talk, int.from_bytes(header, "little")))
        write_all(talk, frame(worker.answer(ask)))


if __name__ == "__main__":
    serve(int(sys.argv[1]))
