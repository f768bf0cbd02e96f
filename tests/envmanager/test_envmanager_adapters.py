"""TextArena, Reasoning Gym and TextWorld, played for real and offline."""

import asyncio
import importlib.util
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from envmanager import Action, EnvManager, Episode, Limits, UnknownEnv, collect
from envmanager.adapters.chance import OwnChance
from envmanager.check import check
from envmanager.naming import named
from envmanager.policies import RandomPolicy

for library in ("reasoning_gym", "textarena", "textworld"):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed", allow_module_level=True)

pytestmark = [
    pytest.mark.real,  # their imports take seconds
    # What these libraries warn of when they are compiled, and of games that they were not made for.
    pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore:.*is not fully supported"),
]

GAMES = ["GuessTheNumber-v0", "Mastermind-v0", "TowerOfHanoi-v0", "FrozenLake-v0", "Minesweeper-v0", "2048-v0"]


class Says:
    def __init__(self, *texts: str) -> None:
        self.texts = texts

    async def act(self, episode: Episode) -> Action | None:
        turn = len(episode.turns)
        return Action(text=self.texts[turn]) if turn < len(self.texts) else None


async def keeps_the_contract(name: str, **options: object) -> None:
    findings = await check(named(name), **options)  # type: ignore[arg-type]
    broken = [
        finding for finding in findings if not finding.holds and finding.rule != "loop"
    ]  # others use this machine
    assert not broken


@pytest.mark.parametrize("game", GAMES)
async def test_textarena(game):
    await keeps_the_contract(f"textarena:{game}", limits=Limits(max_turns=100))


async def test_textarena_tells_only_what_is_new():
    played = await EnvManager(named("textarena:GuessTheNumber-v0"), Says("[1]", "20", "3")).run("k", 3)
    assert "between 1 and 20" in played.turns[0].observation and "between 1 and 20" not in played.turns[1].observation
    assert "higher" in played.turns[1].observation and "lower" in played.turns[2].observation


async def test_side_by_side_as_alone():
    """TextArena draws from Python's global source: two games in turn must not disturb each other."""
    make_env = named("textarena:GuessTheNumber-v0")
    alone = await EnvManager(make_env, RandomPolicy(1)).run("k", 7)
    other = [EnvManager(make_env, RandomPolicy(n)).run("k", n) for n in range(4)]
    beside, *_ = await asyncio.gather(EnvManager(make_env, RandomPolicy(1)).run("k", 7), *other)
    assert [turn.observation for turn in alone.turns] == [turn.observation for turn in beside.turns]


def test_own_chance_leaves_the_global_source_as_it_was():
    random.seed(5)
    expected = [random.Random(5).random()]
    chance, twin = OwnChance(3), OwnChance(3)
    with chance:
        first = random.random()
    with twin:
        assert random.random() == first
    assert [random.random()] == expected
    with pytest.raises(ZeroDivisionError), chance:
        raise ZeroDivisionError
    with chance:
        assert random.random() != first


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("textarena:Nope-v0", "Nope-v0"),
        ("textarena:TicTacToe-v0", "not for one player"),
        ("reasoning-gym:nope", "nope"),
        ("reasoning-gym:leg_counting?legs=3", "legs"),
        ("textworld:/no/such/file.z8", "make one with tw-make"),
        ("textworld:pyproject.toml", "none of .z8, .json, .tw-pddl"),
        ("textworld:tw-simple?rewards=many", "rewards"),
        ("textworld:tw-simple?rooms=3", "required"),
        ("textworld:pyproject.toml?rewards=dense", "tw-simple"),
    ],
)
def test_wrong_names(name, said):
    with pytest.raises(UnknownEnv, match=said):
        named(name)


def test_a_game_that_this_python_cannot_read_is_a_wrong_name(monkeypatch):
    """Some of TextArena's games are written for newer Pythons, and are read when they are made."""

    def make(id: str, **options: Any) -> Any:
        raise SyntaxError("f-string: unmatched '['")

    monkeypatch.setattr("textarena.make", make)
    with pytest.raises(UnknownEnv, match="textarena:Chess-v0: f-string"):
        named("textarena:Chess-v0")


@pytest.mark.parametrize("name", ["leg_counting", "basic_arithmetic", "letter_counting"])
async def test_reasoning_gym_knows_its_answers(name):
    make_env = named(f"reasoning-gym:{name}")
    asked = await EnvManager(make_env, Says("<answer>no idea</answer>")).run("k", 3)
    answer = asked.metadata["answer"]
    assert asked.reward < 1.0 and "<answer>" in asked.turns[0].observation
    assert (await EnvManager(make_env, Says(f"I think <answer>{answer}</answer>")).run("k", 3)).reward == 1.0
    assert (await EnvManager(make_env, Says(answer)).run("k", 3)).reward == 1.0
    await keeps_the_contract(f"reasoning-gym:{name}")


async def test_reasoning_gym_in_groups():
    done = await collect(named("reasoning-gym:leg_counting"), RandomPolicy(), ["a", "b"], group_size=2)
    questions = [{trajectory.turns[0].observation for trajectory in group.trajectories} for group in done.groups]
    assert [len(texts) for texts in questions] == [1, 1] and questions[0] != questions[1]


@pytest.fixture(scope="module")
def game(tmp_path_factory):
    """Made by TextWorld's own command: a compiled game, and beside it the same as JSON."""
    file = tmp_path_factory.mktemp("games") / "game.z8"
    script = Path(sys.executable).with_name("tw-make")
    options = ["--world-size", "2", "--nb-objects", "4", "--quest-length", "2", "--seed", "7"]
    subprocess.run([sys.executable, str(script), "custom", *options, "--output", str(file)], check=True)
    return file


async def test_textworld_is_won_by_its_walkthrough(game):
    import textworld

    env = textworld.start(str(game), textworld.EnvInfos(extras=["walkthrough"]))
    walkthrough = env.reset()["extra.walkthrough"]
    played = await EnvManager(named(f"textworld:{game}"), Says(*walkthrough)).run("k", 0)
    assert (played.reward, played.outcome.kind, played.metadata["won"]) == (1.0, "terminated", True)


@pytest.mark.parametrize("kind", [".z8", ".json"])
async def test_textworld_keeps_the_contract(game, kind):
    file = game.with_suffix(kind)
    await keeps_the_contract(f"textworld:{file}?max_steps=8")
    out = await EnvManager(named(f"textworld:{file}?max_steps=3"), Says(*["look"] * 9)).run("k", 0)
    assert (out.reward, out.outcome.kind, len(out.turns)) == (0.0, "truncated", 3)


ROOMS = {
    "pddl_domain": """(define (domain rooms)
      (:requirements :strips :typing)
      (:types room item)
      (:predicates (at ?r - room) (in ?i - item ?r - room) (held ?i - item) (door ?a - room ?b - room))
      (:action goto :parameters (?a - room ?b - room)
       :precondition (and (at ?a) (door ?a ?b)) :effect (and (at ?b) (not (at ?a))))
      (:action take :parameters (?i - item ?r - room)
       :precondition (and (at ?r) (in ?i ?r)) :effect (and (held ?i) (not (in ?i ?r)))))""",
    "pddl_problem": """(define (problem fetch) (:domain rooms)
      (:objects hall - room kitchen - room apple - item)
      (:init (at hall) (in apple kitchen) (door hall kitchen) (door kitchen hall))
      (:goal (and (held apple))))""",
    "grammar": """grammar :: \"\"\"
{"intro": [{"rhs": "Fetch the apple."}], "goto.feedback": [{"rhs": "You are in the {b.name}."}],
 "take.feedback": [{"rhs": "You take the {i.name}."}]}
\"\"\";

action goto { template :: "go to {b}"; feedback :: "#goto.feedback#"; }
action take { template :: "take {i}"; feedback :: "#take.feedback#"; }
""",
}


# TextWorld leaves the file that it has read to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
async def test_textworld_in_alfworlds_format(tmp_path):
    pytest.importorskip("fast_downward", reason="textworld's extra `pddl` is not installed")
    file = tmp_path / "house.tw-pddl"
    file.write_bytes(msgspec.json.encode(ROOMS))
    played = await EnvManager(named(f"textworld:{file}"), Says("dance", "go to kitchen", "take apple")).run("k", 0)
    told = [turn.observation for turn in played.turns]
    assert told == ["Fetch the apple.", "Nothing happens.", "You are in the kitchen."]
    assert (played.reward, played.outcome.kind) == (1.0, "terminated")
    await keeps_the_contract(f"textworld:{file}?max_steps=8")


async def test_textworld_plays_the_file_that_a_key_names(game):
    folder = named(f"textworld:{game.parent}")
    assert (await EnvManager(folder, Says("look")).run("game.json", 0)).outcome.kind == "stopped"


def test_what_is_typed_into_textworld_writes_no_files(game, tmp_path, monkeypatch):
    env = named(f"textworld:{game}?max_steps=1000")("k")
    monkeypatch.chdir(tmp_path)
    env.reset(seed=0)
    typed = [chr(code) for code in (*range(1, 32), 127, 0x1B, 0xE9)] + ["\\n", "\\r"]
    for word in [
        *typed,
        "save",
        " Script",
        "transcript on",
        "recording",
        "restore",
        "look. save",
        "look then script",
    ]:
        for line in (word, f"loo{word}k", "left-behind"):
            assert env.step(line)[0], repr(line)
    env.step("look " * 200)
    env.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tw-simple?rewards=dense&goal=brief", "tw-coin_collector?level=5"])
async def test_textworld_makes_a_game_of_each_key(name):
    make_env = named(f"textworld:{name}")
    first, again, other = (make_env(key).reset(seed=0) for key in ("a", "a", "b"))
    assert first == again and first != other
    await keeps_the_contract(f"textworld:{name}", limits=Limits(max_turns=100))
