"""A Reverb queue table; runs in its own environment. Jobs as in `_on_ray.py`."""

from __future__ import annotations

import json
import multiprocessing
import sys
from typing import Any

import numpy as np
import reverb  # type: ignore[import-not-found]
from _window import Window, payloads


def produce(port: int, jobs: Any) -> None:
    client = reverb.Client(f"localhost:{port}")
    while (job := jobs.get()) is not None:
        data = np.frombuffer(payloads(job["payload"], 1)[0], np.uint8)
        with client.writer(max_sequence_length=1) as writer:
            for n in range(job["items"]):
                writer.append([data])
                writer.create_item(str(job["batch"]), 1, 1.0)
                if (n + 1) % job["send"] == 0:
                    writer.flush()


def main() -> None:
    server = reverb.Server([reverb.Table.queue(str(batch), max_size=4 * batch) for batch in (64, 512)])
    client = reverb.Client(f"localhost:{server.port}")
    context = multiprocessing.get_context("spawn")
    jobs = context.Queue()
    producer = context.Process(target=produce, args=(server.port, jobs))
    producer.start()
    jobs.put({"payload": 1, "send": 1, "items": 1, "batch": 64})
    list(client.sample("64", 1))
    for line in sys.stdin:
        job = json.loads(line)
        window = Window()
        jobs.put(job)
        got = 0
        while got < job["items"]:
            n = min(job["batch"], job["items"] - got)
            got += sum(len(steps[0].data[0]) == job["payload"] for steps in client.sample(str(job["batch"]), n))
        print(window.close(), flush=True)
    jobs.put(None)
    producer.join()
    server.stop()


if __name__ == "__main__":
    main()
