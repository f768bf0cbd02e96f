"""Evaluate a model behind an OpenAI-compatible endpoint on 256 FrozenLake maps, 64 at a time.

python examples/envmanager_evaluate.py http://localhost:8000/v1 MODEL [EPISODES]
"""

import argparse
import asyncio

from envmanager import collect
from envmanager.adapters.gymnasium import Gymnasium
from envmanager.chat import ChatPolicy


async def main(url: str, model: str, episodes: int = 256) -> None:
    lake = Gymnasium("FrozenLake-v1", size=4, is_slippery=False, max_episode_steps=20)
    async with ChatPolicy(url, model, history=False, concurrency=64) as policy:
        results = await collect(lake, policy, map(str, range(episodes)))
    print(f"{len(results.trajectories)} episodes in {results.seconds:.1f} s: mean reward {results.mean_reward:.3f}")
    print(f"mean turns {results.kept.turns.mean:.1f}; failures {dict(results.stats.failed)}")


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("url", help="up to /v1")
    words.add_argument("model", help="its name at that endpoint")
    words.add_argument("episodes", nargs="?", type=int, default=256)
    asyncio.run(main(**vars(words.parse_args())))
