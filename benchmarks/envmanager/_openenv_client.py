"""OpenEnv's own client, measured: opens sessions one by one, then steps all of them together. Runs in OpenEnv's
environment and prints JSON.

python _openenv_client.py URL COUNT TURNS
"""

import asyncio
import json
import sys
import time

from openenv.core.generic_client import GenericEnvClient


async def main(url: str, count: int, turns: int) -> None:
    warm = GenericEnvClient(base_url=url)  # the server's and our first request import
    await warm.connect()
    await warm.reset(seed=0)
    await warm.close()
    starts, sessions = [], []
    for n in range(count):
        began = time.perf_counter()
        sessions.append(GenericEnvClient(base_url=url))
        await sessions[-1].connect()
        await sessions[-1].reset(seed=n)
        starts.append((time.perf_counter() - began) * 1000)

    async def walk(session: GenericEnvClient) -> None:
        for _ in range(turns - 1):
            result = await session.step({"message": "left"})
            assert "text" in result.observation

    cpu, began = time.process_time(), time.perf_counter()
    await asyncio.gather(*map(walk, sessions))
    took = time.perf_counter() - began
    print(json.dumps({"starts": starts, "rate": count * (turns - 1) / took, "cpu": time.process_time() - cpu}))
    for session in sessions:
        await session.close()


asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
