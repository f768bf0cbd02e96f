"""TransferQueue with its in-memory storage; runs in its own environment. Jobs as in `_on_ray.py`.

It has no bound on what is queued, so the producer waits for the consumer's count.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

import ray
import torch
import transfer_queue as tq  # type: ignore[import-not-found]
from _cluster import start  # type: ignore[import-not-found]  # beside this script
from _window import Window, payloads
from omegaconf import OmegaConf  # type: ignore[import-not-found]
from tensordict import TensorDict  # type: ignore[import-not-found]


class Counter:
    """How many items the consumer has taken."""

    def __init__(self) -> None:
        self.taken = 0

    def add(self, n: int) -> None:
        self.taken += n

    def get(self) -> int:
        return self.taken


class Producer:
    def __init__(self) -> None:
        tq.init()
        self.client = tq.get_client()

    def ready(self) -> None:
        return

    def run(self, counter: Any, partition: str, payload: int, send: int, items: int, batch: int) -> None:
        data = torch.frombuffer(bytearray(payloads(payload * send, 1)[0]), dtype=torch.uint8)
        sent = taken = 0
        for _ in range(items // send):
            while sent - taken > 3 * batch:
                taken = ray.get(counter.get.remote())
            rows = TensorDict({"payload": data.reshape(send, payload)}, batch_size=send)
            self.client.put(data=rows, partition_id=partition)
            sent += send


def consume(counter: Any, partition: str, payload: int, items: int, batch: int) -> None:
    client = tq.get_client()
    got = 0
    while got < items:
        meta = client.get_meta(data_fields=["payload"], batch_size=batch, partition_id=partition, task_name="train")
        if not meta.size:
            time.sleep(0.0005)
            continue
        data = client.get_data(meta)
        got += sum(len(row) == payload for row in data["payload"])
        counter.add.remote(batch)
        client.clear_samples(meta)


def main() -> None:
    logging.disable(logging.WARNING)
    start()
    tq.init(OmegaConf.create({"controller": {"polling_mode": True}}))  # else a wait ends in an error after a while
    producer = ray.remote(Producer).options(num_cpus=0).remote()
    ray.get(producer.ready.remote())
    for number, line in enumerate(sys.stdin):
        job = json.loads(line)
        counter = ray.remote(Counter).options(num_cpus=0).remote()
        ray.get(counter.get.remote())
        partition, size = f"run_{number}", min(job["batch"], job["items"])
        window = Window()
        running = producer.run.remote(counter, partition, job["payload"], job["send"], job["items"], size)
        consume(counter, partition, job["payload"], job["items"], size)
        print(window.close(), flush=True)
        ray.get(running)
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
