"""Episodes are a function of seed, key and number; recorded ones are played as they were."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from envmanager import InfrastructureError
from rollart.simulate.blank import Blank
from rollart.simulate.catalog import Profile, builtin
from rollart.simulate.clock import VirtualLoop
from rollart.simulate.recorded import Recorded
from rollart.simulate.rewards import Inline
from rollart.simulate.spread import Spread
from rollart.simulate.tasks import Counted, ProfileTask, Weather


def task(profile: Profile, *, seed: int = 0, episodes: tuple[Recorded, ...] = (), weather: Weather | None = None):
    return ProfileTask(
        "T",
        profile,
        episodes,
        seed=seed,
        max_tokens=100,
        context=32_768,
        weather=weather or Weather(),
        rewards=Inline(),
    )


def played(subject: ProfileTask, key: str) -> tuple[list[Any], float]:
    async def play() -> tuple[list[Any], float]:
        env = subject.make_env(key)
        seen: list[Any] = [(await env.reset())[0]]
        while True:
            text, reward, ended, *_ = await env.step("")
            seen.append((text, reward))
            if ended:
                return seen, asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(play())


def test_members_differ_and_repeat_with_their_seed() -> None:
    profile = builtin().profile("webshop")
    one, two = task(profile), task(profile)
    first, second = played(one, "k"), played(one, "k")
    assert first != second
    assert (played(two, "k"), played(two, "k")) == (first, second)
    assert played(task(profile, seed=1), "k") != first


def test_members_of_a_group_share_how_long_their_replies_are() -> None:
    profile = msgspec.structs.replace(builtin().profile("gem-math"), response=Spread(mean=1000), instance=0.8)
    subject = task(profile)
    counted: Any = Counted()
    replies = [{counted.observation(played(subject, key)[0][0], None).reply for _ in range(3)} for key in "abc"]
    assert all(len(each) == 1 for each in replies)
    assert len(set.union(*replies)) == 3


def test_an_observation_is_as_long_as_it_says() -> None:
    tokens = Counted().observation("120 45 7", None)
    assert isinstance(tokens, Blank)
    assert (len(tokens), tokens.reply, tokens.instance) == (120, 45, 7)


def test_recorded_episodes_are_played_as_they_were() -> None:
    episode = Recorded(turns=((30, 5, 1.5), (31, 6, 2.5)), reset_s=1.0, reward=0.75)
    subject = task(builtin().profile("webshop"), episodes=(episode,))
    seen, seconds = played(subject, "k")
    tokens: list[Any] = [Counted().observation(text, None) for text in (seen[0], seen[1][0])]
    assert [(len(each), each.reply) for each in tokens] == [(30, 5), (31, 6)]
    assert [reward for _, reward in seen[1:]] == [0.0, 0.75]
    assert seconds == pytest.approx(5.0)
    instances = {played(subject, key)[0][0].split()[2] for key in ("k", "k", "other")}
    assert len(instances) == 2  # members of a group ask the same


def test_recorded_episodes_fail_as_others_do() -> None:
    episode, weather = Recorded(turns=((30, 5, 1.5),)), Weather()
    profile = msgspec.structs.replace(builtin().profile("webshop"), step_fails=1.0)
    with pytest.raises(InfrastructureError, match="was lost"):
        played(task(profile, episodes=(episode,)), "k")
    weather.reset_fails = 1.0
    with pytest.raises(InfrastructureError, match="did not start"):
        played(task(profile, episodes=(episode,), weather=weather), "k")


def test_a_storm_fails_resets_and_slows_everything() -> None:
    weather = Weather()
    profile = Profile(
        turns=Spread(mean=1), prompt=Spread(mean=1), observation=Spread(mean=1), response=Spread(mean=1),
        step_s=Spread(mean=2.0),
    )  # fmt: skip
    weather.slow = 3.0
    assert played(task(profile, weather=weather), "k")[1] == pytest.approx(6.0)
    weather.reset_fails = 1.0
    with pytest.raises(InfrastructureError, match="did not start"):
        played(task(profile, weather=weather), "k")
