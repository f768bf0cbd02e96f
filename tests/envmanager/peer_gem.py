"""GEM's games and Reasoning Gym through GEM, played for real. Run in an environment that has gem-llm."""

import asyncio

from envmanager import EnvManager, collect
from envmanager.check import check
from envmanager.naming import named
from envmanager.policies import RandomPolicy

GAMES = ["Mastermind-v0-easy", "GuessTheNumber-v0-easy", "Minesweeper-v0-easy", "Sudoku-v0-easy", "Game2048-v0-easy"]
IDS = [*(f"game:{game}" for game in GAMES), "rg:leg_counting", "rg:letter_counting"]


async def main() -> None:
    for id in IDS:
        findings = await check(named(f"gem:{id}"))
        assert all(finding.holds for finding in findings if finding.rule != "loop"), (id, findings)
    mastermind = named("gem:game:Mastermind-v0-easy")
    done = await collect(mastermind, RandomPolicy(1), ["a", "b"], group_size=2)
    assert [len(group.trajectories) for group in done.groups] == [2, 2]
    played = await EnvManager(mastermind, RandomPolicy(2)).run("k", 5)
    assert played.task == "gem:game:Mastermind-v0-easy" and "Mastermind" in played.turns[0].observation
    assert played.turns[0].action.startswith("\\boxed{")
    print(f"{len(IDS)} environments keep the contract")


asyncio.run(main())
