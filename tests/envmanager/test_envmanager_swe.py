"""The engineer's episode: tools, tests that decide, and commands that stay in their box."""

import os
import socket
import subprocess
import sys

import pytest
from tests.envmanager.test_envmanager_sandbox import becomes, no_sandbox

from envmanager import EnvManager, Limits, UnknownEnv
from envmanager.adapters.repositories import PROJECTS, repository
from envmanager.adapters.swe import Swe
from envmanager.backends import SubprocessBackend
from envmanager.check import check
from envmanager.naming import named
from envmanager.policies import RandomPolicy

pytestmark = pytest.mark.real


@pytest.fixture
def env():
    if reason := no_sandbox():
        pytest.skip(reason)
    made = Swe("bank", seconds=10.0)("k")
    yield made
    made.close()
    assert not made._folder.exists()


def repair(seed: int = 0) -> str:
    made = repository("bank", seed)
    return f"edit {made.module}\n<<<<\n{made.wrong}\n====\n{made.right}\n>>>>"


def test_a_repair_is_rewarded(env):
    observation, info = env.reset(seed=0)
    assert "Find the bug in bank.py" in observation and "test_bank.py" in observation and "submit" in info["actions"]
    assert "FAILED" in env.step("test")[0]
    assert "class Account:" in env.step("read bank.py")[0] and env.step("ls")[0].split() == [
        "README.md",
        "bank.py",
        "test_bank.py",
    ]
    assert env.step(repair())[0] == "Edited."
    assert "OK" in env.step("test")[0]
    assert env.step("submit") == ("The tests pass.", 1.0, True, False, {"passed": True})


def test_no_repair_no_reward(env):
    env.reset(seed=0)
    assert env.step("submit")[1:3] == (0.0, True)


def test_the_last_step_is_judged_too():
    made = Swe("bank", max_steps=1, sandbox=not no_sandbox())("k")
    made.reset(seed=0)
    assert made.step(repair())[1:4] == (1.0, False, True)
    made.close()


@pytest.mark.parametrize(
    "action",
    [
        "run printf 'import unittest\\n' > test_bank.py",
        "run rm test_bank.py",
        "edit test_bank.py\n<<<<\nimport unittest\n====\nimport sys; sys.exit(0)\n>>>>",
        "run printf 'import os\\nprint(\"OK\")\\nos._exit(0)\\n' > bank.py",
        "run printf 'import sys\\nsys.exit(0)\\n' > bank.py",
        "run rm bank.py && ln -s test_bank.py bank.py",
    ],
)
def test_tests_cannot_be_talked_over(env, action):
    env.reset(seed=0)
    env.step(action)
    assert env.step("submit")[1] == 0.0


def test_commands_are_boxed(env, tmp_path):
    env.reset(seed=0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        connect = f'import socket; socket.create_connection(("127.0.0.1", {port}), 1)'
        assert "Refused" in env.step(f"run python3 -c '{connect}'")[0]
    assert "Read-only" in env.step("run touch /usr/x")[0]
    assert not (tmp_path / "x").exists() and "[exit 0]" not in env.step(f"run touch {tmp_path}/x")[0]
    mark = f"1001.{os.getpid()}"
    env.step(f"run setsid sleep {mark} > /dev/null 2>&1 & sleep 0.1")
    assert becomes(mark, False)
    assert len(env.step("run yes")[0]) < 5000  # 64 MiB at most, of which the end is told
    assert "[exit 0]" in env.step("run echo kept > note.txt")[0] and "kept" in env.step("read note.txt")[0]


def test_what_hangs_is_ended():
    if reason := no_sandbox():
        pytest.skip(reason)
    made = Swe("bank", seconds=0.5)("k")
    made.reset(seed=0)
    assert "[ended after 0.5 s]" in made.step("run sleep 100")[0]
    made.close()


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("read nothing.py", "There is no file"),
        ("read ../../etc/passwd", "There is no file"),
        ("edit bank.py", "Write: edit PATH"),
        ("edit bank.py\n<<<<\namount\n====\nx\n>>>>", "is there"),
        ("dance", "No such tool"),
        ("", "No such tool"),
        ("run", "No such tool"),
    ],
)
def test_wrong_actions_are_answered(env, action, said):
    env.reset(seed=0)
    observation, reward, terminated, truncated, _ = env.step(action)
    assert said in observation and (reward, terminated, truncated) == (0.0, False, False)


def test_links_lead_nowhere(env):
    env.reset(seed=0)
    env.step("run ln -s /etc/passwd away.txt")
    assert "There is no file" in env.step("read away.txt")[0]


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_every_repository_can_be_repaired(project, tmp_path):
    def passes(source: str) -> bool:
        (tmp_path / f"{project.name}.py").write_text(source)
        command = [sys.executable, "-B", "-m", "unittest", "-q"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0

    (tmp_path / f"test_{project.name}.py").write_text(project.tests)
    assert passes(project.source)
    for right, wrong in project.bugs:
        assert project.source.count(right) >= 1 and not passes(project.source.replace(right, wrong, 1))
        made = next(made for n in range(200) if (made := repository(project.name, n)).wrong == wrong)
        assert made.files[made.module].count(made.wrong) == 1  # so that the edit tool can repair it


async def test_it_keeps_the_contract_and_runs_inside_a_sandbox():
    if reason := no_sandbox():
        pytest.skip(reason)
    findings = await check(named("swe:any"), limits=Limits(max_turns=6))
    assert all(finding.holds for finding in findings if finding.rule not in ("loop", "termination"))
    async with SubprocessBackend("swe:any?sandbox=false&max_steps=4", sandbox=True) as backend:
        played = await EnvManager(backend, RandomPolicy(2)).run("k", 0)
        assert played.task == "swe" and played.turns


@pytest.mark.parametrize("name", ["swe:linux", "swe:any?speed=9"])
def test_wrong_names(name):
    with pytest.raises(UnknownEnv):
        named(name)
