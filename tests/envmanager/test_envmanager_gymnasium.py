"""Real Gymnasium environments in words."""

import asyncio

import pytest

from envmanager import UnknownEnv, collect
from envmanager.adapters.gymnasium import Gymnasium
from envmanager.adapters.toytext import TEXTS
from envmanager.policies import RandomPolicy

TAXI = "Taxi-v4"


@pytest.mark.parametrize("id", ["FrozenLake-v1", "FrozenLake8x8-v1", "CliffWalking-v1", TAXI, "Blackjack-v1"])
def test_an_episode_by_chance(id):
    results = asyncio.run(collect(Gymnasium(id), RandomPolicy(3), ["a", "b"], group_size=3))
    assert len(results.trajectories) == 6
    first = [group.trajectories[0].turns[0].observation for group in results.groups]
    assert all("Actions: " in observation for observation in first)
    assert {trajectory.task for trajectory in results.trajectories} == {id.rsplit("-v", 1)[0]}


@pytest.mark.parametrize(("id", "states"), [("FrozenLake-v1", 16), ("CliffWalking-v1", 48), (TAXI, 500)])
def test_states_are_told_apart(id, states):
    env = Gymnasium(id)._new("0").unwrapped
    describe = TEXTS[id.rsplit("-v", 1)[0]].describe
    assert len({describe(env, state) for state in range(states)}) == states


def test_frozen_lake_walks_as_it_is_told():
    env = Gymnasium("FrozenLake-v1", is_slippery=False)("k")
    observation, info = env.reset(seed=1)
    assert observation.endswith("PFFF\nFHFH\nFFFH\nHFFG") and info["actions"] == ["left", "down", "right", "up"]
    for word in ["down", "Down!", "I think we go <right>", "down", "not left but right"]:
        observation, reward, terminated, _, _ = env.step(word)
    assert (observation, reward, terminated) == ("SFFF\nFHFH\nFFFH\nHFPG", 0.0, False)
    assert env.step("right")[1:4] == (1.0, True, False)


def test_unknown_action_changes_nothing():
    env = Gymnasium("FrozenLake-v1", is_slippery=False)("k")
    env.reset(seed=1)
    observation, reward, terminated, truncated, info = env.step("jump")
    assert observation.startswith("No action in the answer. Say one of: left, down, right, up.")
    assert observation.endswith("PFFF\nFHFH\nFFFH\nHFFG")
    assert (reward, terminated, truncated, info) == (0.0, False, False, {"invalid": True})


def test_random_maps_follow_the_key():
    make_env = Gymnasium("FrozenLake-v1", size=5, p=0.7)
    maps = {key: make_env(key).reset(seed=0)[0] for key in "abcdef"}
    assert len(set(maps.values())) == 6 and make_env("a").reset(seed=9)[0] == maps["a"]


def test_environments_are_used_again():
    make_env = Gymnasium(TAXI)
    first, second = make_env("a"), make_env("b")
    assert first._env is not second._env
    first.close()
    assert make_env("c")._env is first._env and not make_env._free


@pytest.mark.parametrize(
    ("id", "options", "said"),
    [
        ("FrozenLak-v1", {}, "Did you mean: `FrozenLake`"),
        ("Pendulum-v1", {}, "only discrete actions"),
        ("FrozenLake-v1", {"slippery": True}, "slippery"),
    ],
)
def test_wrong_ids_and_options(id, options, said):
    with pytest.raises(UnknownEnv, match=said):
        Gymnasium(id, **options)


def test_other_discrete_environments_go_by_number():
    observation, info = Gymnasium("CartPole-v1")("k").reset(seed=0)
    assert info["actions"] == ["0", "1"] and "State: [" in observation
