"""Our Ray face and Ray's own Queue, on one local cluster: trajectories from a producer process to this one.

Reads one JSON job a line: {"system", "payload", "producers", "items", "batch"}; answers as `_window` says.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import numpy as np
import ray
from _cluster import start  # type: ignore[import-not-found]  # beside this script
from _window import Window
from ray.util.queue import Empty, Queue

from samplebuffer import Closed
from samplebuffer.ray import RayBuffer

GROUP = 8


def _payload(size: int) -> Any:
    return np.frombuffer(os.urandom(size), np.uint8)


class Producer:
    """The other process: as many coroutines as there are producers, or one that sends as much in one call."""

    async def ours(self, handle: Any, producers: int, payload: int, chunk: int) -> None:
        async with RayBuffer(handle, chunk=chunk) as buf:
            await asyncio.gather(*(self._roll_out(buf, _payload(payload)) for _ in range(producers)))

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

    def queue(self, queue: Queue, producers: int, payload: int, items: int) -> None:
        data = [_payload(payload) for _ in range(producers)]
        for _ in range(items // producers):
            while queue.qsize() > 4 * producers:
                time.sleep(0.0005)
            queue.put_nowait_batch(data) if producers > 1 else queue.put(data[0])


async def ours(producer: Any, payload: int, producers: int, items: int, batch: int) -> str:
    chunk = max(1, min(64, 2**20 // payload))
    keys = items // GROUP
    buf = RayBuffer.create(range(keys), batch_groups=batch // GROUP, group_size=GROUP, alpha=3)
    await buf.stats()  # the actor is there
    window = Window()
    running = producer.ours.remote(buf.handle, producers, payload, chunk)
    got = 0
    while got < items:
        got += sum(len(sample.payload) == payload for sample in (await buf.get_batch()).samples)
    answer = window.close()
    await buf.close()
    await running
    await buf.leave()
    ray.kill(buf.handle)
    return answer


def queue(producer: Any, payload: int, producers: int, items: int, batch: int) -> str:
    line = Queue(actor_options={"num_cpus": 0})
    line.qsize()
    window = Window()
    running = producer.queue.remote(line, producers, payload, items)
    got = 0
    while got < items:
        try:
            some = line.get_nowait_batch(min(producers, items - got)) if producers > 1 else [line.get()]
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
        print(asyncio.run(ours(producer, **job)) if system == "ours" else queue(producer, **job), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
