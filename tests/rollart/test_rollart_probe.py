"""The parity probe reaches every engine, and takes nothing for agreement that is not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llmproxy import GenerateRequest, GenerateResult, Sampling, Span
from rollart.errors import WeightsDiffer
from rollart.pipeline.probe import ParityProbe


class Engine:
    def __init__(self, id: str, version: int, off_by: float = 0.0) -> None:
        self.id = id
        self.version = version
        self.off_by = off_by
        self.asked: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.asked.append(request)
        tokens = [request.prompt_ids[-1] + i for i in range(request.max_tokens)]
        logprobs = [-0.1 * token + self.off_by for token in tokens]
        return GenerateResult(tokens, logprobs, [Span(self.version, 0, len(tokens))], "length", self.id)


class Trainer:
    async def logprobs(
        self, prompts: list[list[int]], tokens: list[list[int]], allowed: Sequence[int] | None
    ) -> list[list[float]]:
        return [[-0.1 * token for token in row] for row in tokens]


def probe(*engines: Engine) -> ParityProbe:
    return ParityProbe(engines, Trainer(), [[1, 2], [3]], max_tokens=2, sampling=Sampling())


async def test_every_engine_answers_every_prompt() -> None:
    engines = [Engine("gen-0", 5), Engine("gen-1", 5)]
    subject = probe(*engines)
    assert await subject.measure(5) == pytest.approx(0.0, abs=1e-12)
    assert await subject.measure(5) == pytest.approx(0.0, abs=1e-12)
    names = [request.request_id for engine in engines for request in engine.asked]
    assert [[r.prompt_ids for r in engine.asked] for engine in engines] == [[[1, 2], [3]] * 2] * 2
    assert len(set(names)) == len(names)


async def test_the_largest_difference_of_any_engine_counts() -> None:
    assert await probe(Engine("gen-0", 5, 1e-6), Engine("gen-1", 5, -0.25)).measure(5) == pytest.approx(0.25)


async def test_another_versions_tokens_are_not_agreement() -> None:
    with pytest.raises(WeightsDiffer, match=r"gen-1 acknowledged version 5 and generates with \[4\]"):
        await probe(Engine("gen-0", 5), Engine("gen-1", 4)).measure(5)
