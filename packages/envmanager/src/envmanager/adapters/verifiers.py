"""Tasks and rewards written for verifiers (`verifiers:module:Taskset`), one turn each. Needs the extra `verifiers`,
which cannot share an environment with `openenv`.

Invariant: the reward is the weighted sum of the task's own reward functions over a trace of the one exchange
(test_envmanager_verifiers.py). Tasks that need tools or a container are refused.
"""

import itertools
import zlib
from typing import Any

import verifiers.v1 as library
from verifiers.v1.types import AssistantMessage, UserMessage

from envmanager.errors import UnknownEnv
from envmanager.naming import imported


class Exchange:
    """One task: its prompt is the observation, the action is the reply."""

    def __init__(self, task: Any) -> None:
        data = task.data
        self.task = type(task).__name__
        self._task = task
        self._prompt = "\n\n".join(filter(None, [data.system_prompt, data.prompt_text]))

    async def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return self._prompt, {"actions": ["0", "1", "2", "yes", "no"]}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        trace = _trace(self._task, self._prompt, action)
        await self._task.score(trace)
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        return "", float(trace.reward), True, False, {"rewards": rewards, "metrics": dict(trace.metrics)}


def _trace(task: Any, prompt: str, reply: str) -> Any:
    """What the reward functions look at: the prompt, and the reply as the model's."""
    said = library.MessageNode(message=UserMessage(content=prompt))
    replied = library.MessageNode(message=AssistantMessage(content=reply), parent=0, sampled=True)
    record = library.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    agent = library.AgentInfo(config=library.AgentConfig())
    return library.Trace(task=record, agent=agent, nodes=[said, replied])


class Verifiers:
    """Makes the exchanges of a `Taskset` class; `config` is the taskset's. Of an endless one the first `limit` tasks
    are used. A key that is a number names the task of that index; any other is dealt one by its digest.
    """

    blocking = False

    def __init__(self, path: str, *, limit: int = 10_000, **config: Any) -> None:
        taskset = imported(path)
        config_type = library.TasksetConfig
        for base in getattr(taskset, "__orig_bases__", ()):
            config_type = next(
                (part for part in base.__args__ if isinstance(part, type) and issubclass(part, config_type)),
                config_type,
            )
        made = taskset(config_type(**config))
        self._tasks = list(itertools.islice(made, limit))
        kind = type(self._tasks[0]) if self._tasks else None
        if kind is None or kind.NEEDS_CONTAINER or kind.toolsets(self._tasks[0].config):
            raise UnknownEnv(f"verifiers:{path} has no tasks, or tasks that need tools or a container")

    def __call__(self, key: str) -> Exchange:
        number = int(key) if key.isdecimal() else zlib.crc32(key.encode())
        return Exchange(self._tasks[number % len(self._tasks)])
