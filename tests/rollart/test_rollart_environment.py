"""Named environments as tasks: made from configuration, refused with the key that is wrong."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import pytest
from aiohttp import web
from transformers import AutoTokenizer

from envmanager import EnvManager, Episode
from envmanager.backends.server import EnvServer
from envmanager.naming import named
from envmanager.values import Action
from rollart.chat import Codec
from rollart.config import load_config
from rollart.errors import ConfigError
from rollart.models.vocabulary import write_tokenizer
from rollart.tasks import Mixture, make_tasks

TAXI = "tasks={taxi: {kind: env, env: 'gymnasium:Taxi-v4', max_tokens: 8, max_turns: 3}}"


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    folder = Path(tmp_path_factory.mktemp("tokenizer"))
    write_tokenizer(folder, "bytes")
    return Codec(AutoTokenizer.from_pretrained(folder))


def tasks(codec: Codec, *words: str) -> Mixture:
    return make_tasks(load_config(overrides=[TAXI, *words]).tasks, codec, 512)


def test_training_and_evaluation_never_share_a_key(codec: Codec) -> None:
    mixture = tasks(codec)
    train = list(islice(mixture.train_keys(0), 100))
    assert len(set(train)) == 100
    assert not set(train) & set(mixture.eval_keys(100))
    assert not set(train) & set(islice(mixture.train_keys(1), 100))


async def test_an_episode_is_played_and_scored(codec: Codec) -> None:
    mixture = tasks(codec)
    trajectory = await EnvManager(mixture.make_env, South()).run("taxi/train-0-0", 3)
    assert trajectory.task == "taxi"
    assert await mixture.reward(trajectory) == sum(turn.reward for turn in trajectory.turns)


async def test_a_function_can_score(codec: Codec) -> None:
    mixture = tasks(codec, "tasks.taxi.reward=builtins:len")
    assert await mixture.reward(Sized()) == 3.0  # type: ignore[arg-type]


class Sized:
    """A trajectory as far as `len` is concerned."""

    key = "taxi/x"

    def __len__(self) -> int:
        return 3


class South:
    async def act(self, episode: Episode) -> Action:
        return Action(text="south")


@pytest.mark.real
@pytest.mark.parametrize("words", [["isolate=true"], [f"python={sys.executable}"]])
async def test_episodes_are_played_in_processes_of_this_or_another_python(codec: Codec, words: list[str]) -> None:
    mixture = tasks(codec, *(f"tasks.taxi.{word}" for word in words))
    assert not mixture.blocking
    here = await EnvManager(tasks(codec).make_env, South()).run("taxi/train-0-0", 3)
    there = await EnvManager(mixture.make_env, South()).run("taxi/train-0-0", 3)
    assert [turn.observation for turn in there.turns] == [turn.observation for turn in here.turns]
    assert there.task == "taxi"
    await mixture.close()


@pytest.mark.real
async def test_episodes_are_played_behind_a_url(codec: Codec) -> None:
    server = EnvServer(named("gymnasium:Taxi-v4"))
    runner = web.AppRunner(server.app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    mixture = tasks(codec, f"tasks.taxi.env=http://127.0.0.1:{runner.addresses[0][1]}")
    trajectory = await EnvManager(mixture.make_env, South()).run("taxi/train-0-0", 3)
    assert len(trajectory.turns) > 1
    assert trajectory.task == "taxi"
    await mixture.close()
    await runner.cleanup()


async def test_an_async_function_can_score(codec: Codec) -> None:
    mixture = tasks(codec, f"tasks.taxi.reward={__name__}:seven")
    assert await mixture.reward(Sized()) == 7.0  # type: ignore[arg-type]


async def seven(trajectory: object) -> float:
    return 7.0


@pytest.mark.parametrize(
    ("word", "key", "reason"),
    [
        ("tasks.taxi.env=gymnasium:Nope-v0", "tasks.taxi.env", "Nope"),
        ("tasks.taxi.env=nonsense", "tasks.taxi.env", "names no environment"),
        ("tasks.taxi.chat=llama3", "tasks.taxi.chat", "no token"),
        ("tasks.taxi.reward=nowhere:f", "tasks.taxi.reward", "cannot be imported"),
        ("tasks.taxi={isolate: true, kind: env, env: 'gymnasium:Nope-v0'}", "tasks.taxi.env", "Nope"),
        ("tasks.taxi.python=.venvs/nope/bin/python", "tasks.taxi.python", "make environment NAME=NAME"),
        ("tasks.taxi.python=/dev/null", "tasks.taxi.python", "cannot be loaded"),
    ],
)
def test_what_cannot_be_made_is_named(codec: Codec, word: str, key: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        tasks(codec, word)
    assert error.value.key == key
