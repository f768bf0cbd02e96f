"""The parity probe reaches every engine, and takes nothing for agreement that is not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from llmproxy import GenerateRequest, GenerateResult, Sampling, Span
from llmproxy.errors import WorkerLost
from rollart.errors import Diverged, WeightsDiffer
from rollart.pipeline.probe import ParityProbe


class Engine:
    def __init__(self, id: str, version: int | None, off_by: float = 0.0, *, uses: int | None = None) -> None:
        self.id = id
        self.version = version
        self.uses = uses if uses is not None else version or 0
        self.off_by = off_by
        self.lost = False
        self.asked: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.asked.append(request)
        if self.lost:
            raise WorkerLost(self.id, "killed")
        tokens = [request.prompt_ids[-1] + i for i in range(request.max_tokens)]
        logprobs = [-0.1 * token + self.off_by for token in tokens]
        return GenerateResult(tokens, logprobs, [Span(self.uses, 0, len(tokens))], "length", self.id)


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
        await probe(Engine("gen-0", 5), Engine("gen-1", 5, uses=4)).measure(5)


async def test_engines_that_are_lost_or_fenced_are_left_out_and_without_any_there_is_no_parity() -> None:
    well, lost, fenced = Engine("gen-0", 5, 0.125), Engine("gen-1", 5, 9.0), Engine("gen-2", None, 9.0)
    lost.lost = True
    assert await probe(well, lost, fenced).measure(5) == pytest.approx(0.125)
    assert not fenced.asked
    assert await probe(lost, fenced).measure(5) is None


async def test_what_is_no_number_is_no_agreement() -> None:
    assert await probe(Engine("gen-0", 5, math.nan), Engine("gen-1", 5)).measure(5) == math.inf

    class Lost(Trainer):
        async def logprobs(
            self, prompts: list[list[int]], tokens: list[list[int]], allowed: Sequence[int] | None
        ) -> list[list[float]]:
            return [[math.nan for _ in row] for row in tokens]

    subject = ParityProbe([Engine("gen-0", 5)], Lost(), [[1, 2]], max_tokens=2, sampling=Sampling())
    with pytest.raises(Diverged, match=r"version 5: the trainer's log-probabilities are not finite"):
        await subject.measure(5)
