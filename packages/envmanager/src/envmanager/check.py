"""Does an environment keep the contract? A few episodes by chance, replayed, side by side, under a watch on the
loop.

Invariant: each broken rule is found, with what to do about it
(test_envmanager_check.py::test_each_broken_rule_is_found).
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from envmanager.errors import RolloutError
from envmanager.host import blocks
from envmanager.manager import EnvManager
from envmanager.policies import RandomPolicy
from envmanager.protocols import MakeEnv, Policy
from envmanager.values import Action, Episode, Limits, Trajectory

# A loop that serves hundreds of episodes cannot wait longer for one of them; ordinary steps are far below.
LONGEST_HOLD_S = 0.1
BEAT_S = 0.01


class Finding(NamedTuple):
    """One rule, whether it holds, and what was seen or what to do."""

    rule: str
    holds: bool
    detail: str


class _Yielding:
    """Lets the loop go between steps, so that the watch sees them one by one."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    async def act(self, episode: Episode) -> Action | None:
        await asyncio.sleep(0)
        return await self._policy.act(episode)


class _Replay:
    """Repeats the actions of a trajectory."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._actions = [turn.action for turn in trajectory.turns]

    async def act(self, episode: Episode) -> Action | None:
        turn = len(episode.turns)
        return Action(text=self._actions[turn]) if turn < len(self._actions) else None


async def check(
    make_env: MakeEnv,
    *,
    key: str = "0",
    seed: int = 0,
    actions: Sequence[str] | None = None,
    limits: Limits | None = None,
) -> list[Finding]:
    """Plays and replays; the first failure ends the check, since the rest would only repeat it."""
    limits = limits or Limits(max_turns=200, reset_timeout=60.0, step_timeout=30.0)
    random = RandomPolicy(seed, list(actions) if actions else None)

    async def play(policy: Policy, seed: int = seed) -> Trajectory:
        return await EnvManager(make_env, _Yielding(policy), limits=limits).run(key, seed)

    holds = [0.0]
    watch = asyncio.create_task(_watch(holds))
    await asyncio.sleep(0)
    try:
        first = await play(random)
        again = await play(_Replay(first))
        beside, _ = await asyncio.gather(play(_Replay(first)), play(random, seed + 1))
        await asyncio.sleep(2 * BEAT_S)
    except RolloutError as error:
        return [Finding(f"contract ({error.kind})", False, str(error))]
    finally:
        watch.cancel()
        await asyncio.wait([watch])
    same = _same("determinism", first, again, "reset(seed) must fix everything that is random")
    alone = _same("isolation", first, beside, "environments side by side share state: keep it in self")
    return [
        Finding("contract", True, f"{len(first.turns)} turns, reward {first.reward:g}"),
        _termination(first),
        *([same, alone] if same.holds else [same]),  # what is random anyway says nothing about isolation
        _loop(max(holds), blocks(make_env)),
    ]


def _termination(first: Trajectory) -> Finding:
    if first.outcome.kind in ("terminated", "truncated"):
        return Finding("termination", True, f"{first.outcome.kind} by itself")
    remedy = (
        f"still running after {len(first.turns)} random turns. Chance may never reach its end: "
        "truncate it (gymnasium:ID?max_episode_steps=100 does), or rely on Limits(max_turns=...)"
    )
    return Finding("termination", False, remedy)


def _loop(hold: float, threaded: bool) -> Finding:
    seen = f"held the loop for {hold * 1000:.0f} ms at most"
    if hold < LONGEST_HOLD_S:
        return Finding("loop", True, seen)
    remedy = "remove `blocking = False`, or await what takes so long"
    if threaded:
        remedy = "its thread keeps Python's lock so long: run it with SubprocessBackend (unless the machine is busy)"
    return Finding("loop", False, f"{seen}: {remedy}")


def _same(rule: str, one: Trajectory, other: Trajectory, remedy: str) -> Finding:
    for index, (a, b) in enumerate(zip(one.turns, other.turns, strict=False)):
        if (a.observation, a.reward) != (b.observation, b.reward):
            return Finding(rule, False, f"turn {index} differs from its replay with the same seed: {remedy}")
    if one.outcome.kind != other.outcome.kind and other.outcome.kind != "stopped":
        return Finding(rule, False, f"the replay ended by {other.outcome.kind}, not {one.outcome.kind}: {remedy}")
    if len(one.turns) != len(other.turns):
        return Finding(
            rule, False, f"the replay ended after {len(other.turns)} turns, not {len(one.turns)}: {remedy}"
        )
    return Finding(rule, True, "replayed the same")


async def _watch(holds: list[float]) -> None:
    """Notes how late each beat comes: so long something held the loop."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + BEAT_S
        await asyncio.sleep(BEAT_S)
        holds.append(loop.time() - due)
