"""Chat models over real HTTP: what they are told, and what they may not answer."""

import asyncio
from typing import Any

import pytest
from aiohttp import web
from tests.envmanager.fakes import World, served
from tests.envmanager.test_envmanager_values import trajectory

from envmanager import EnvManager, PolicyError, RewardError, collect
from envmanager.adapters.gymnasium import Gymnasium
from envmanager.chat import ChatPolicy
from envmanager.cli import main
from envmanager.rewards import JudgeReward


def completion(text: str) -> web.Response:
    return web.json_response(
        {"id": "x", "choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}
    )


@pytest.mark.parametrize("history", [True, False])
async def test_a_model_is_told_the_episode(history):
    asked: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        assert request.path == "/v1/chat/completions" and request.headers["Authorization"] == "Bearer secret"
        asked.append(await request.json())
        return completion(f"move {len(asked)}")

    options: dict[str, Any] = {"system": "Play.", "history": history, "sampling": {"temperature": 0.5}}
    async with served(handler) as url, ChatPolicy(f"{url}v1", "m", api_key="secret", **options) as policy:
        played = await EnvManager(World(turns=2, step_s=0.0), policy).run("k", 3)
    system, user = {"role": "system", "content": "Play."}, {"role": "user", "content": "seed 3"}
    assert asked[0] == {"model": "m", "temperature": 0.5, "messages": [system, user]}
    turn = [user, {"role": "assistant", "content": "move 1"}] if history else []
    assert asked[1]["messages"] == [system, *turn, {"role": "user", "content": "after move 1"}]
    assert [turn.new_segment for turn in played.turns] == [not history] * 2


@pytest.mark.parametrize(
    "answer", [{}, {"choices": []}, {"choices": [{"message": {"content": None}}]}, {"choices": [{"text": "left"}]}]
)
async def test_wrong_answers(answer):
    async def handler(request: web.Request) -> web.Response:
        return web.json_response(answer)

    async with served(handler) as url, ChatPolicy(url, "m") as policy:
        with pytest.raises(PolicyError, match="no message in it"):
            await EnvManager(World(step_s=0.0), policy).run("k", 0)
        assert policy.stats().answered == 1


async def test_many_episodes_of_a_real_environment():
    async def handler(request: web.Request) -> web.Response:
        return completion("I go right." if "P" in (await request.text()) else "?")

    make_env = Gymnasium("FrozenLake-v1", is_slippery=False, size=4, max_episode_steps=4)
    async with served(handler) as url, ChatPolicy(url, "m", history=False, concurrency=8) as policy:
        results = await collect(make_env, policy, [str(n) for n in range(32)])
        assert policy.stats().answered == sum(len(played.turns) for played in results.trajectories)
    assert len(results.groups) == 32 and results.mean_reward == 0.0


async def test_a_judge_scores():
    async def handler(request: web.Request) -> web.Response:
        question = (await request.json())["messages"][0]["content"]
        return completion("Of 10 points I give 7.5" if question == "left left" else "None at all.")

    def prompt(trajectory: Any) -> str:
        return " ".join(turn.action for turn in trajectory.turns)

    async with served(handler) as url:
        async with JudgeReward(url, "m", prompt) as judge:
            assert await judge(trajectory()) == 7.5
        async with JudgeReward(url, "m", lambda _: "?") as judge:
            with pytest.raises(RewardError, match="wrote no number"):
                await judge(trajectory())


async def test_play_with_a_model(capsys):
    async def handler(request: web.Request) -> web.Response:
        return completion("right")

    async with served(handler) as url:
        code = await asyncio.to_thread(main, ["play", "gymnasium:FrozenLake-v1", "--policy", url, "--max-turns", "1"])
    assert code == 0 and "> right" in capsys.readouterr().out
    assert await asyncio.to_thread(main, ["play", "gymnasium:FrozenLake-v1", "--policy", "gpt"]) == 2
