"""Settings that mean nothing, and libraries that are missing, are told at once and by name."""

import math
import subprocess
import sys
from typing import Any

import pytest
from tests.envmanager.fakes import FakeBuffer, FakePolicy, World

from envmanager import Budgets, Limits, MissingExtra, RolloutScheduler, Starved, collect
from envmanager.backends import HTTPBackend, SubprocessBackend
from envmanager.backends.server import EnvServer
from envmanager.chat import ChatPolicy
from envmanager.cli import main
from envmanager.rewards import URLReward

COUNTS = ["x", 1.5, math.nan, None, True, -1]
SECONDS = ["x", math.nan, True, -1, 0, math.inf]


@pytest.mark.parametrize("value", COUNTS)
async def test_counts_are_whole_numbers(value: Any) -> None:
    for name in ("max_turns", "reset_retries"):
        with pytest.raises(ValueError, match=f"Limits.{name} is"):
            Limits(**{name: value})
    with pytest.raises(ValueError, match=r"Budgets.data is"):
        Budgets(data=value)
    for name in ("group_size", "spare_groups", "spare_members", "concurrency"):
        with pytest.raises(ValueError, match=f"{name} is"):
            await collect(World(), FakePolicy(), ["a", "b"], **{name: value})
    for name in ("retries", "concurrency"):
        with pytest.raises(ValueError, match=f"{name} is"):
            URLReward("http://host", **{name: value})
    with pytest.raises(ValueError, match="capacity is"):
        EnvServer(World(), capacity=value)
    if value is not None:
        with pytest.raises(ValueError, match="memory_bytes is"):
            SubprocessBackend("a:b", memory_bytes=value)


@pytest.mark.parametrize("value", SECONDS)
def test_seconds_are_positive_numbers(value: Any) -> None:
    for name in ("reset_timeout", "close_timeout", "reward_timeout"):
        with pytest.raises(ValueError, match=f"Limits.{name} is"):
            Limits(**{name: value})
    with pytest.raises(ValueError, match="timeout is"):
        URLReward("http://host", timeout=value)
    with pytest.raises(ValueError, match="stall_after is"):
        RolloutScheduler(World(), FakePolicy(), FakeBuffer([]), stall_after=value)
    with pytest.raises(ValueError, match="idle_s is"):
        EnvServer(World(), idle_s=value)


def test_the_time_to_close_is_bounded() -> None:
    limit: Any = None
    with pytest.raises(ValueError, match="close_timeout is None"):
        Limits(close_timeout=limit)


@pytest.mark.parametrize(
    "url", [None, 3, "", "host:80", "http://", "ftp://host", "http://host:x", "http://h\0", "http://h:99999"]
)
def test_a_url_leads_somewhere(url: Any) -> None:
    for make in (HTTPBackend, URLReward, lambda url: ChatPolicy(url, "model")):
        with pytest.raises(ValueError, match="url is"):
            make(url)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limits", 3),
        ("limits", lambda key: None),
        ("observer", 3),
        ("reward", 3),
        ("budgets", 3),
        ("make_env", "gymnasium:FrozenLake-v1"),
        ("policy", lambda episode: None),
        ("keys", "ab"),
        ("keys", None),
    ],
)
async def test_what_is_of_another_kind_is_refused_before_anything_runs(name: str, value: Any) -> None:
    given: dict[str, Any] = {"make_env": World(), "policy": FakePolicy(), "keys": ["a", "b"], name: value}
    with pytest.raises(ValueError, match=name):
        await collect(**given)


@pytest.mark.seconds
async def test_a_plain_function_as_a_reward_is_told_what_to_do() -> None:
    reward: Any = lambda trajectory: 1.0  # noqa: E731
    with pytest.raises(Starved, match=r"the reward client is not async; wrap it: rewards.LocalReward"):
        await collect(World(), FakePolicy(), ["a"], reward=reward, budgets=Budgets(reward=0))


def test_a_missing_library_is_told_where_it_would_be_used(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("envmanager.checks.find_spec", lambda name: None)
    for make in (HTTPBackend, URLReward, lambda url: ChatPolicy(url, "model")):
        with pytest.raises(MissingExtra, match=r"rollart-envmanager\[http\]"):
            make("http://host")
    assert main(["serve-env", "shop:shoes"]) == 2
    assert main(["play", "shop:shoes", "--policy", "http://host"]) == 2
    assert capsys.readouterr().err.count("pip install 'rollart-envmanager[http]'") == 2


def test_a_port_that_cannot_be_had_is_told(capsys: Any) -> None:
    assert main(["serve-env", "shop:shoes", "--port", "99999"]) == 2
    assert "--port 99999 cannot be listened on" in capsys.readouterr().err


@pytest.mark.real
def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    shell = 'set -o pipefail; "$@" play shop:shoes | true'
    run = [sys.executable, "-c", "import sys; from envmanager.cli import main; sys.exit(main())"]
    done = subprocess.run(["bash", "-c", shell, "bash", *run], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
