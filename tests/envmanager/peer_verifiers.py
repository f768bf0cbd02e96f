"""A taskset written for verifiers, played and scored for real. Run in an environment that has verifiers."""

import asyncio
from typing import Any

import verifiers.v1 as vf

from envmanager import Action, EnvManager, Episode
from envmanager.check import check
from envmanager.naming import named


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: Any) -> float:
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.5)
    async def short(self, trace: Any) -> float:
        return float(len(trace.last_reply) < 5)


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Any:
        for n in range(10):
            yield SumTask(
                SumData(prompt=f"What is {n} + {n}?", system_prompt="Be short.", answer=2 * n), self.config.task
            )


class Says:
    def __init__(self, text: str) -> None:
        self.text = text

    async def act(self, episode: Episode) -> Action:
        return Action(text=self.text)


async def main() -> None:
    make_env = named("verifiers:tests.envmanager.peer_verifiers:Sums")
    right = await EnvManager(make_env, Says("6")).run("3", 0)
    assert right.turns[0].observation == "Be short.\n\nWhat is 3 + 3?" and right.task == "SumTask"
    assert right.reward == 1.5 and right.outcome.kind == "terminated"
    assert (await EnvManager(make_env, Says("no idea")).run("3", 0)).reward == 0.0
    findings = await check(make_env)
    assert all(finding.holds for finding in findings if finding.rule != "loop"), findings
    print("scored as written")


if __name__ == "__main__":
    asyncio.run(main())
