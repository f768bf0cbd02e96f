"""Our Ray face, Ray's own Queue and bare Ray, on one local cluster: from a producer process to this one.

Bare Ray is what any buffer in a Ray actor pays that passes references: for each batch one put (packs of 32 MiB when
it is larger), one call that brings the references to an actor, one that takes them from there, one get. It keeps no
groups, bound, ledger or tickets, and notices no loss.

Reads one JSON job a line: {"system", "payload" (bytes), "producers" (coroutines of ours), "send" (items in a call of
a peer), "items", "batch"}; answers as `_window` says.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import numpy as np
import ray
from _cluster import start  # type: ignore[import-not-found]  # beside this script
from _window import Window, payloads
from ray.util.queue import Empty, Queue

from samplebuffer import Closed
from samplebuffer.ray import RayBuffer
from samplebuffer.ray.client import PACK_BYTES

GROUP, ALPHA = 8, 3


def arrays(size: int, n: int) -> list[Any]:
    return [np.frombuffer(data, np.uint8) for data in payloads(size, n)]


class Producer:
    """The other process: as many coroutines as there are producers, or one that sends as much in one call."""

    async def ours(self, handle: Any, producers: int, payload: int) -> None:
        async with RayBuffer(handle) as buf:
            await asyncio.gather(*(self._roll_out(buf, data) for data in arrays(payload, producers)))

    async def _roll_out(self, buf: RayBuffer, payload: Any) -> None:
        answers = []
        try:
            while True:
                ticket = await buf.next_ticket()
                ticket.stamp(ticket.issued_version)
                answers.append(
                    ticket.finish(payload, 1.0)
                )  # awaited at the end: the next ticket need not wait for it
        except Closed:
            assert set(await asyncio.gather(*answers)) <= {"accepted"}

    async def bare(self, shelf: Any, payload: int, items: int, batch: int) -> None:
        data = arrays(payload, batch)
        size = min(batch, PACK_BYTES // payload)
        for _ in range(items // batch):
            refs = [await asyncio.to_thread(ray.put, data[i : i + size]) for i in range(0, batch, size)]
            await shelf.put.remote(b"", refs)

    def queue(self, queue: Queue, payload: int, send: int, items: int, batch: int) -> None:
        data = arrays(payload, send)
        for _ in range(items // send):
            while queue.qsize() > 3 * batch:
                time.sleep(0.0005)
            queue.put_nowait_batch(data) if send > 1 else queue.put(data[0])


class Shelf:
    """An actor with room for two batches of references."""

    def __init__(self) -> None:
        self.line: asyncio.Queue[list[Any]] = asyncio.Queue(2)

    async def put(self, message: bytes, refs: list[Any]) -> None:
        await self.line.put(refs)

    async def take(self) -> tuple[bytes, list[Any]]:
        return b"", await self.line.get()


async def ours(producer: Any, payload: int, producers: int, send: int, items: int, batch: int) -> str:
    keys = items // GROUP
    buf = RayBuffer.create(range(keys), batch_groups=batch // GROUP, group_size=GROUP, alpha=ALPHA)
    await buf.stats()  # the actor is there
    window = Window()
    running = producer.ours.remote(buf.handle, producers, payload)
    got = 0
    while got < items:
        got += sum(len(sample.payload) == payload for sample in (await buf.get_batch()).samples)
    answer = window.close()
    await buf.close()
    await running
    await buf.leave()
    ray.kill(buf.handle)
    return answer


async def bare(producer: Any, payload: int, producers: int, send: int, items: int, batch: int) -> str:
    shelf = ray.remote(Shelf).options(num_cpus=0).remote()
    await shelf.__ray_ready__.remote()
    window = Window()
    running = producer.bare.remote(shelf, payload, items, batch)
    got = 0
    while got < items:
        _, refs = await shelf.take.remote()
        for pack in await asyncio.to_thread(ray.get, refs):
            got += sum(len(item) == payload for item in pack)
    answer = window.close()
    await running
    ray.kill(shelf)
    return answer


def queue(producer: Any, payload: int, producers: int, send: int, items: int, batch: int) -> str:
    line = Queue(actor_options={"num_cpus": 0})
    line.qsize()
    window = Window()
    running = producer.queue.remote(line, payload, send, items, batch)
    got = 0
    while got < items:
        try:
            some = line.get_nowait_batch(min(send, items - got)) if send > 1 else [line.get()]
        except Empty:
            time.sleep(0.0005)
            continue
        got += sum(len(item) == payload for item in some)
    answer = window.close()
    ray.get(running)
    line.shutdown()
    return answer


def main() -> None:
    start()
    producer = ray.remote(Producer).options(num_cpus=0).remote()
    for line in sys.stdin:
        job = json.loads(line)
        system = job.pop("system")
        if system == "Ray Queue":
            print(queue(producer, **job), flush=True)
        else:
            print(asyncio.run((ours if system == "ours" else bare)(producer, **job)), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
