"""An environment of your own, groups with spares, and what the spares cut off.

python examples/envmanager_redundancy.py
"""

import asyncio
import random
from typing import Any

from envmanager import Limits, collect
from envmanager.policies import RandomPolicy


class Guess:
    """Guess a digit. One game in twenty has a slow server."""

    def __init__(self, key: str) -> None:
        self.delay = 1.0 if random.random() < 0.05 else 0.01

    async def reset(self, seed: int | None = None) -> Any:
        self.secret = random.Random(seed).randrange(10)
        return "Guess a digit.", {"actions": list("0123456789")}

    async def step(self, action: str) -> Any:
        await asyncio.sleep(self.delay)
        right = action == str(self.secret)
        return ("Right." if right else "Wrong, again."), float(right), right, False, {}


async def main() -> None:
    for spare in (0, 2):
        keys = [f"game {n}" for n in range(8 + spare)]
        options: dict[str, Any] = {"group_size": 4, "spare_groups": spare, "spare_members": spare}
        done = await collect(Guess, RandomPolicy(), keys, limits=Limits(max_turns=10), **options)
        print(f"{len(done.groups)} groups of 4 with {spare} spares each way: {done.seconds:.2f} s")
        print(f"  turns kept {done.kept.turns.mean:.1f}, cut {done.cut.turns.mean:.1f}; {dict(done.stats.cancelled)}")


if __name__ == "__main__":
    asyncio.run(main())
