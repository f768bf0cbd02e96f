"""Two plain Ray actors that prefer an H800: there is one, so the second falls back, and moves when the first ends."""

import asyncio
import tempfile

import ray

from resmgr import Request, ResourceManager
from resmgr.ray import RayBackend


class Generator:
    def has(self) -> str:
        return str(ray.get_runtime_context().get_assigned_resources())


async def main(directory: str) -> None:
    ray.init("local", num_cpus=2, resources={"H800": 1}, include_dashboard=False, logging_level="ERROR")
    async with await ResourceManager.connect(f"embedded:{directory}", ttl=1) as rm, RayBackend(rm, UNITS) as backend:
        request = Request("generator", prefer=["H800"], fallback=["cpu"])
        bindings = [await rm.bind(request, timeout=10) for _ in range(2)]
        actors = [ray.remote(Generator).options(**backend.options(binding)).remote() for binding in bindings]
        print([await actor.has.remote() for actor in actors])  # an H800, a CPU
        await rm.release(bindings[0])  # after a while, its better place is offered to the second
        await anext(event async for event in rm.watch() if event.kind == "move_offered")
        print(await rm.move_back(bindings[1]))


UNITS = {"H800": "H800", "cpu": "CPU"}
asyncio.run(main(tempfile.mkdtemp()))
