"""Groups of trajectories without a buffer: give keys, get whole groups (test_envmanager_collect.py)."""

import asyncio
import copy
from collections.abc import Callable, Iterable

import msgspec

from envmanager.errors import Starved
from envmanager.groups import Budgets, LocalGroup, LocalGroups
from envmanager.protocols import MakeEnv, Observer, Policy, RewardClient
from envmanager.scheduler import RolloutScheduler
from envmanager.stats import Lengths, Stats
from envmanager.values import Limits, Trajectory


class Group(msgspec.Struct, frozen=True):
    """The winners of one key, in the order in which they started."""

    key: str
    trajectories: list[Trajectory]


class Collection(msgspec.Struct, frozen=True, kw_only=True):
    """`groups` are whole. `given_up` says why each group that failed did. `kept` and `cut` are the lengths
    of the winners and of all others, the cancelled at the length where they were: their difference is the
    bias of redundancy.
    """

    groups: list[Group]
    given_up: dict[str, str]
    kept: Lengths
    cut: Lengths
    stats: Stats
    seconds: float

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    @property
    def mean_reward(self) -> float:
        rewards = [trajectory.reward for trajectory in self.trajectories]
        return sum(rewards) / len(rewards) if rewards else float("nan")


def _collection(groups: list[LocalGroup], every: list[LocalGroup], stats: Stats, seconds: float) -> Collection:
    kept, cut = Lengths(), copy.deepcopy(stats.cut)
    winners = {id(trajectory) for group in groups for trajectory in group.winners}
    for group in every:
        for trajectory in group.finished.values():
            side = kept if id(trajectory) in winners else cut
            side.add(len(trajectory.turns), trajectory.tokens)
    return Collection(
        groups=[Group(group.key, group.winners) for group in groups],
        given_up={group.key: group.given_up for group in every if group.given_up},
        kept=kept,
        cut=cut,
        stats=stats,
        seconds=seconds,
    )


async def collect(
    make_env: MakeEnv,
    policy: Policy,
    keys: Iterable[str],
    *,
    group_size: int = 1,
    spare_groups: int = 0,
    spare_members: int = 0,
    fair: bool = False,
    concurrency: int = 256,
    reward: RewardClient | None = None,
    limits: Limits | Callable[[str], Limits] | None = None,
    budgets: Budgets | None = None,
    observer: Observer | None = None,
) -> Collection:
    """Plays every key `group_size + spare_members` times at once and returns the first `len(keys) -
    spare_groups` whole groups.

    Losers are cancelled, down to the policy and the environment. `fair` admits in start order instead, see
    `groups`. Raises Starved, with what there is in `.results`, when too many groups were given up.
    """
    if isinstance(keys, str) or not isinstance(keys, Iterable):
        raise ValueError(f"keys is {keys!r:.100}; give a list of keys")
    started = asyncio.get_running_loop().time()
    groups = LocalGroups(
        list(keys),
        group_size=group_size,
        spare_groups=spare_groups,
        spare_members=spare_members,
        fair=fair,
        budgets=budgets,
    )
    scheduler = RolloutScheduler(
        make_env, policy, groups, concurrency=concurrency, reward=reward, limits=limits, observer=observer
    )
    await scheduler.run()
    seconds = asyncio.get_running_loop().time() - started
    complete = groups.complete()
    whole = complete if complete is not None else [group for group in groups.groups if group.winners]
    results = _collection(whole, groups.groups, scheduler.stats(), seconds)
    if complete is None:
        reasons = "; ".join(f"{key!r}: {why}" for key, why in list(results.given_up.items())[:3])
        starved = Starved(f"{len(whole)} of {groups.wanted} groups are whole and the rest were given up: {reasons}")
        starved.results = results
        raise starved
    return results
