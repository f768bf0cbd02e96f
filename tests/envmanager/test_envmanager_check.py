"""The check, the names and the command line, on good environments and on broken ones."""

import io
import itertools
import random
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from envmanager import UnknownEnv, nonblocking
from envmanager.check import check
from envmanager.cli import main
from envmanager.host import blocks
from envmanager.naming import named

HERE = __name__


@pytest.fixture(autouse=True)
def _busy_machine(monkeypatch):
    """What else runs here may hold the loop for longer than the check allows."""
    monkeypatch.setattr("envmanager.check.LONGEST_HOLD_S", 1.0)


class Good:
    """A counter that ends after `turns` steps."""

    blocking = False

    def __init__(self, key: str = "", turns: int = 5) -> None:
        self.turns = turns
        self.steps = 0

    def reset(self, seed: int | None = None) -> Any:
        self.random = random.Random(seed)
        return f"start {self.random.random()}", {"actions": ["a", "b"]}

    def step(self, action: str) -> Any:
        self.steps += 1
        return f"{action} {self.random.random()}", 1.0, self.steps >= self.turns, False, {}


class Silent(Good):
    def reset(self, seed: int | None = None) -> Any:
        return super().reset(seed)[0], {}


class FourTuple(Good):
    def step(self, action: str) -> Any:
        return super().step(action)[:4]


class Endless(Good):
    def __init__(self, key: str = "") -> None:
        super().__init__(key, 10**9)


class Unseeded(Good):
    def reset(self, seed: int | None = None) -> Any:
        return super().reset()


class Shared(Good):
    count = itertools.count()

    def step(self, action: str) -> Any:
        at = next(Shared.count)
        fine = super().step(action)
        return (f"step {at - self.first}", *fine[1:])

    def reset(self, seed: int | None = None) -> Any:
        self.first = next(Shared.count) + 1
        return super().reset(seed)


class Holds(Good):
    def __init__(self, key: str = "") -> None:
        super().__init__(key, 1)

    def step(self, action: str) -> Any:
        time.sleep(1.2)
        return super().step(action)


@pytest.mark.parametrize(
    ("env", "rule", "said"),
    [
        (FourTuple, "contract (data)", "5-tuple"),
        (Silent, "contract (data)", 'no info["actions"]'),
        (Endless, "termination", "max_episode_steps=100"),
        (Unseeded, "determinism", "reset(seed)"),
        (Shared, "isolation", "keep it in self"),
        pytest.param(Holds, "loop", "remove `blocking = False`", marks=pytest.mark.seconds),
    ],
)
async def test_each_broken_rule_is_found(env, rule, said):
    broken = {finding.rule: finding.detail for finding in await check(env) if not finding.holds}
    assert list(broken) == [rule] and said in broken[rule]


async def test_a_good_environment_passes():
    findings = await check(Good)
    assert [finding.rule for finding in findings] == ["contract", "termination", "determinism", "isolation", "loop"]
    assert all(finding.holds for finding in findings)


async def test_actions_may_be_named_by_the_caller():
    assert all(finding.holds for finding in await check(Silent, actions=["x", "y"]))


def test_names():
    assert named(f"{HERE}:Good") is Good
    short = named(f"{HERE}:Good?turns=2")
    assert short("k").turns == 2 and not blocks(short)
    assert named("gymnasium:FrozenLake-v1?is_slippery=false&size=6")("k").reset(seed=0)[0].count("\n") == 8


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("FrozenLake-v1", "names no environment; write gymnasium:ID, gem:ID, "),
        ("gymnasium:", "names no environment"),
        (":x", "names no environment"),
        ("no_such_module:x", "'no_such_module:x' cannot be imported: .*; is it in /.*, or installed?"),
        ("gymnasium:FrozenLake-v1?size=abc", "'gymnasium:FrozenLake-v1.size=abc': invalid literal for int"),
        ("envmanager.values:nothing", "has no attribute 'nothing'"),
        ("envmanager.errors:KINDS", "is a tuple"),
        ("gymnasium:Nope-v1", "gymnasium:Nope-v1: "),
        ("envmanager.barrier:Barrier", "too many positional arguments; name a function of the key"),
        (f"{HERE}:Good?nothing=1", "got an unexpected keyword argument 'nothing'; name a function of the key"),
        ("shop:all?products=many", "has 'many' products; give it an integer"),
        ("shop:all?products=0", "has 0 products"),
    ],
)
def test_wrong_names(name, said):
    with pytest.raises(UnknownEnv, match=said):
        named(name)


def test_modules_of_the_current_directory_are_found(tmp_path, monkeypatch):
    (tmp_path / "maze_of_this_test.py").write_text("class Maze:\n    def __init__(self, key): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    assert named("maze_of_this_test:Maze").__name__ == "Maze"


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "envmanager.adapters.gymnasium", raising=False)
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(UnknownEnv, match=r"needs rollart-envmanager\[gymnasium\]"):
        named("gymnasium:FrozenLake-v1")


def test_partial_of_a_blocking_factory_blocks():
    assert not blocks(nonblocking(lambda key: Good(key)))
    assert blocks(named("builtins:dict?a=1"))


@pytest.mark.real
def test_an_interrupt_ends_play_by_hand():
    run = "import sys; from envmanager.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", run, "play", "shop:shoes", "--policy", "human"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as playing:
        assert playing.stdout is not None and playing.stderr is not None
        try:
            while "Customer:" not in playing.stdout.readline():
                pass
            playing.send_signal(signal.SIGINT)
            assert playing.wait(20) == 130  # while its input is still open
            assert playing.stderr.read() == ""
        finally:
            playing.kill()


def test_command_line(capsys, monkeypatch):
    assert main(["check", f"{HERE}:Good"]) == 0
    assert "ok   determinism: replayed the same" in capsys.readouterr().out
    assert main(["check", f"{HERE}:Unseeded"]) == 1
    assert "FAIL determinism" in capsys.readouterr().out
    assert main(["play", f"{HERE}:Good?turns=2", "--seed", "1"]) == 0
    assert "terminated after 2 turns, reward 2" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
    assert main(["play", f"{HERE}:Good", "--policy", "human"]) == 0
    assert "stopped after 1 turns, reward 1" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["play", f"{HERE}:Good", "--policy", "human"]) == 2
    assert "the input ended before the first action" in capsys.readouterr().err
    assert main(["play", f"{HERE}:FourTuple"]) == 2
    assert "5-tuple" in capsys.readouterr().err
    assert main(["check", "nope"]) == 2
