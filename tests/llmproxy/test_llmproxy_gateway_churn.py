"""The gateway under traffic of all kinds while several administrators at once update, suspend, remove, add and abort.

Every whole answer is checked token by token against the versions that it names, and in the end nothing is left.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from tests.llmproxy.faulty import Faulty
from tests.llmproxy.gateways import Connection, Reply, Setting, ask, serving, until
from tests.llmproxy.test_llmproxy_gateway_admin import Loader

from llmproxy.http_worker import HTTPWorker
from llmproxy.standin import next_token

GENERATE = "/inference/v1/generate"
TROUBLES = ["500", "400", "drop", "truncate", "half whole", "garbage"]


def check(context: Sequence[int], tokens: list[int], spans: list[dict[str, Any]]) -> None:
    versions = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    assert len(versions) == len(tokens) and versions == sorted(versions)
    context = list(context)
    for token, version in zip(tokens, versions, strict=True):
        assert token == next_token(context, version), "a wrong, lost or doubled token, or of another version"
        context.append(token)


class Churn:
    def __init__(self, at: Setting, seed: int) -> None:
        self.at = at
        self.random = Random(seed)
        self.counts: Counter[str] = Counter()
        self.done = False

    async def play(self, name: str, turns: int) -> None:
        """One trajectory, each turn tried until a whole answer comes."""
        context = [int(name[1:]), 7]
        for _ in range(turns):
            budget = self.random.randrange(4, 100)
            while not (tokens := await self.turn(name, context, budget)):  # noqa: ASYNC110 - as a client's retries
                await asyncio.sleep(0.02)
            assert len(tokens) == budget
            context = context + tokens

    async def turn(self, name: str, context: list[int], budget: int) -> list[int]:
        """Its tokens, when it came to its end."""
        body = {"token_ids": context, "sampling_params": {"max_tokens": budget, "ignore_eos": True, "logprobs": 0}}
        match self.random.choice(["whole", "whole", "managed", "leave"]):
            case "managed":
                sampling = {"ignore_eos": True}
                request = {"trajectory_id": name, "prompt_ids": context, "max_tokens": budget, "sampling": sampling}
                reply = await self.ask("/generate", request)
                if reply.status != 200:
                    return []
                result = reply.json()
                check(context, result["token_ids"], result["spans"])
                return list(result["token_ids"])
            case "leave":
                async with Connection(self.at.port) as client:
                    client.send("POST", GENERATE, body | {"stream": True}, x_trajectory_id=name)
                    await asyncio.sleep(self.random.random() * 0.05)
                return []
        reply = await self.ask(GENERATE, body, x_trajectory_id=name)
        if reply.status != 200 or not reply.whole:
            return []
        choice = reply.json()["choices"][0]
        check(context, choice["token_ids"], choice["weight_versions"])
        return [] if choice["finish_reason"] == "abort" else list(choice["token_ids"])

    async def ask(self, path: str, body: dict[str, Any], **headers: str) -> Reply:
        reply = await ask(self.at.port, "POST", path, body, **headers)
        self.counts[f"{reply.status}"] += 1
        return reply

    async def administer(self) -> None:
        """One thing after the other, until all is done; others do so at the same time."""
        deeds = [self.update, self.update, self.waver, self.remove, self.trouble, self.take_away, self.lose]
        while not self.done:
            await asyncio.sleep(self.random.random() * 0.1)
            await self.random.choice(deeds)()

    async def update(self) -> None:
        await self.admin("suspend")
        self.counts["updates"] += (await self.admin("update", version=self.at.proxy.version + 1)).status == 200
        await self.admin("resume")

    async def waver(self) -> None:
        await asyncio.gather(*(self.admin(step) for step in ("suspend", "resume", "suspend", "resume")))
        await self.admin("resume")

    async def remove(self) -> None:
        name = f"w{self.random.randrange(1, 3)}"
        for slot in self.at.proxy.workers():
            if slot.id == name:
                url = self.at.gateway.worker(slot).pool.url
                self.counts["removed"] += (await ask(self.at.port, "DELETE", f"/admin/workers/{name}")).status == 200
                await self.admin("workers", url=url, id=name)

    async def trouble(self) -> None:
        server = self.random.choice(self.at.servers[1:])
        assert isinstance(server, Faulty)
        server.kind, server.left = self.random.choice(TROUBLES), self.random.randrange(1, 6)

    async def take_away(self) -> None:
        await self.admin(self.random.choice(["abort", "interrupt"]), id=f"t{self.random.randrange(8)}")

    async def lose(self) -> None:
        self.at.proxy.lose(self.at.proxy.workers()[0], "for a test")

    async def admin(self, deed: str, **body: Any) -> Reply:
        return await ask(self.at.port, "POST", f"/admin/{deed}", body)


async def churn(seed: int, turns: int) -> Counter[str]:
    servers = [Faulty(delay=0.002) for _ in range(3)]
    async with serving(*servers, loader=Loader(), watch=0.1, silence=2.0) as at:
        at.gateway.make_worker = lambda url, id, *_: HTTPWorker(url, id=id, loader=Loader(), watch=0.1, silence=2.0)
        one = Churn(at, seed)
        admins = [asyncio.create_task(one.administer()) for _ in range(3)]
        await asyncio.gather(*(one.play(f"t{n}", turns) for n in range(8)))
        one.done = True
        await asyncio.gather(*admins)
        await until(lambda: at.idle() and len(at.proxy.workers()) == 3)
        await ask(at.port, "POST", "/admin/resume")
        await until(lambda: not any(server.running for server in servers))
        await until(lambda: not any(worker.fenced for worker in at.proxy.stats().workers))
        for slot in at.proxy.workers():
            await at.gateway.worker(slot).close()
        return one.counts


@pytest.mark.seconds
async def test_clients_and_administrators_at_once() -> None:
    counts = await churn(0, turns=4)
    assert counts["updates"] > 3 and counts["200"] >= 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
async def test_clients_and_administrators_at_once_for_longer(seed: int) -> None:
    counts = await churn(seed, turns=10)
    assert counts["updates"] > 10 and counts["removed"] and counts["502"] + counts["409"]
