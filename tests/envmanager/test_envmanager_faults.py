"""Whatever an environment, a policy or a reward raises, and however it misbehaves at its edge: one typed failure of
one episode, and the others go on."""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from tests.envmanager.fakes import FakePolicy, virtual

from envmanager import Action, DataError, EnvManager, PolicyError, RewardError, RolloutError, collect
from envmanager.contract import plain
from envmanager.faults import foreign, told


class Mute(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Panic(BaseException):
    """As extensions in Rust raise."""


class Unreadable(Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise RuntimeError("unreadable")

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("unreadable")

    def __len__(self) -> int:
        return 1


RAISED = {
    "mute": Mute(),
    "panic": Panic("at line 3"),
    "cancelled": asyncio.CancelledError(),
    "text": ValueError("\ud800"),
}


class Plain:
    """The key says where it misbehaves, and how."""

    blocking = False

    def __init__(self, key: str) -> None:
        self.where, _, self.how = key.partition(" ")

    def _misbehave(self, where: str) -> None:
        if where == self.where and self.how in RAISED:
            raise RAISED[self.how]

    def reset(self, seed: int | None = None) -> Any:
        self._misbehave("reset")
        return "o", Unreadable() if (self.where, self.how) == ("reset", "info") else {}

    def step(self, action: str) -> Any:
        self._misbehave("step")
        return "o", 1.0, True, False, Unreadable() if (self.where, self.how) == ("step", "info") else {}

    def close(self) -> None:
        self._misbehave("close")

    def kill(self) -> None:
        if self.where == "kill":
            raise Mute

    @property
    def task(self) -> str:
        self._misbehave("task")
        return "\ud800" if (self.where, self.how) == ("task", "name") else "t"


class Threaded(Plain):
    blocking = True


class Async(Plain):
    async def reset(self, seed: int | None = None) -> Any:
        await asyncio.sleep(0)
        return super().reset(seed)

    async def step(self, action: str) -> Any:
        await asyncio.sleep(0)
        return super().step(action)


class Acts:
    async def act(self, episode: Any) -> Action:
        return Action(text="a")


FATAL = [f"{where} {how}" for where in ("reset", "step") for how in (*RAISED, "info")]
FATAL += ["task mute", "task name"]


@pytest.mark.parametrize("env", [Plain, Threaded, Async])
@pytest.mark.parametrize("key", FATAL)
async def test_an_environments_fault_is_typed_and_disturbs_no_other(env, key):
    with pytest.raises(DataError) as caught:
        await EnvManager(env, Acts()).run(key, 0)
    str(caught.value).encode()  # it can be logged and sent
    results = await collect(env, Acts(), [key, "fine", "fine too"], group_size=2, spare_groups=1)
    assert [group.key for group in results.groups] == ["fine", "fine too"]


@pytest.mark.parametrize("env", [Plain, Threaded, Async])
@pytest.mark.parametrize("key", [*(f"close {how}" for how in RAISED), "kill"])
async def test_an_end_that_raises_is_logged(env, key, caplog):
    trajectory = await EnvManager(env, Acts()).run(key, 0)
    assert trajectory.reward == 1.0
    assert f"environment of '{key}'" in caplog.text


@pytest.mark.parametrize("how", RAISED)
def test_a_policys_and_a_rewards_fault_is_theirs(how):
    class Faulty:
        async def act(self, episode: Any) -> Action:
            raise RAISED[how]

    async def reward(trajectory: Any) -> float:
        if trajectory.key == "bad":
            raise RAISED[how]
        return 2.0

    async def scenario() -> None:
        with pytest.raises(PolicyError, match=type(RAISED[how]).__name__):
            await EnvManager(Plain, Faulty()).run("k", 0)
        results = await collect(Plain, FakePolicy(), ["bad", "k"], group_size=1, spare_groups=1, reward=reward)
        assert [group.key for group in results.groups] == ["k"]
        assert results.stats.failed[RewardError.kind] >= 1

    virtual(scenario())


@pytest.mark.parametrize("key", [1, None, "\ud800"])
async def test_a_key_that_is_no_text_fails_by_itself(key):
    with pytest.raises(RolloutError, match="name task instances by str"):
        await EnvManager(Threaded, Acts()).run(key, 0)
    results = await collect(Plain, Acts(), [key, "k"], group_size=1, spare_groups=1)
    assert [group.key for group in results.groups] == ["k"]


async def test_a_cancellation_of_the_caller_stays_one():
    async def asks() -> bool:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError as error:
            return foreign(error)
        return True

    task = asyncio.create_task(asks())
    await asyncio.sleep(0)
    task.cancel()
    assert not await task
    assert foreign(asyncio.CancelledError()) and not foreign(KeyboardInterrupt())


def test_what_is_told_can_be_written():
    assert told(Mute()) == "Mute: (its text raised RuntimeError)"
    assert told(ValueError("\ud800" + "x" * 1000)) == "ValueError: ?" + "x" * 499
    assert plain({"a": 1, "b": Unreadable()}) == {"a": 1}
