"""Simulated workers, and what the tests of the proxy ask of them, in virtual time."""

from __future__ import annotations

import asyncio

from llmproxy import GenerateRequest, GenerateResult, LLMProxy, SimWorker


def worker(id: str = "w", **options: object) -> SimWorker:
    """10 tokens a second after a second of prefill for 100 tokens of prompt."""
    return SimWorker(id, **({"prefill_rate": 100.0, "decode_rate": 10.0} | options))  # type: ignore[arg-type]


def request(id: str = "t", tokens: int = 20) -> GenerateRequest:
    return GenerateRequest(id, [1] * 100, tokens)


def start(proxy: LLMProxy, asked: GenerateRequest) -> asyncio.Task[GenerateResult]:
    return asyncio.create_task(proxy.generate(asked))


def serving(proxy: LLMProxy) -> list[str]:
    return [stats.id for stats in proxy.stats().workers if not stats.fenced]


def now() -> float:
    """Seconds of the loop's clock."""
    return asyncio.get_running_loop().time()
