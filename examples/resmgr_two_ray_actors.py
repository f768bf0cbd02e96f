"""Two plain Ray actors that prefer an H800: there is one, so the second falls back, and moves when the first ends."""

import asyncio
import tempfile

import ray

from resmgr import Request, ResourceManager
from resmgr.ray import RayBackend


async def main(directory: str) -> None:
    ray.init(address="local", num_cpus=2, resources={"H800": 1}, include_dashboard=False, logging_level="ERROR")
    async with (
        await ResourceManager.connect(f"embedded:{directory}", ttl=1) as rm,
        RayBackend(rm, units={"H800": "H800", "cpu": "CPU"}) as backend,
    ):
        request = Request("generator", prefer=["H800"], fallback=["cpu"])
        first, second = [await rm.bind(request, timeout=10) for _ in range(2)]
        actors = [ray.remote(list).options(**backend.options(binding)).remote("ab") for binding in (first, second)]
        print(first.hardware, second.hardware, [await actor.pop.remote() for actor in actors])
        await rm.release(first)  # after a while, its better place is offered to the second
        async for event in rm.watch():
            if event.kind == "move_offered" and (moved := await rm.move_back(second)):
                return print("moved to", moved.hardware)


with tempfile.TemporaryDirectory() as store:
    asyncio.run(main(store))
