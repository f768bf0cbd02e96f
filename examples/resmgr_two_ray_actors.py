"""Two plain Ray actors that prefer an H800: there is one, so the second falls back, and moves when the first ends."""

import asyncio
import tempfile

import ray

from resmgr import Request, ResourceManager
from resmgr.ray import RayBackend


class Generator:
    def where(self) -> str:
        return str(ray.get_runtime_context().get_assigned_resources())


async def play(rm: ResourceManager, backend: RayBackend) -> None:
    request = Request("generator", prefer=["H800"], fallback=["cpu"])
    first, second = [await rm.bind(request, timeout=10) for _ in range(2)]
    for binding in (first, second):
        actor = ray.remote(Generator).options(**backend.options(binding)).remote()
        print(binding.hardware, binding.fell_back, await actor.where.remote())
    await rm.release(first)  # after a while, its better place is offered to the second
    async for event in rm.watch():
        if event.kind == "move_offered" and (moved := await rm.move_back(second)):
            await rm.release(second)
            print(moved.hardware, moved.fell_back)
            return


async def main() -> None:
    ray.init(address="local", num_cpus=2, resources={"H800": 1}, include_dashboard=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as directory:
        async with (
            await ResourceManager.connect(f"embedded:{directory}", ttl=1) as rm,
            RayBackend(rm, units={"H800": "H800", "cpu": "CPU"}) as backend,
        ):
            await play(rm, backend)


asyncio.run(main())
