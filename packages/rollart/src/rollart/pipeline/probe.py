"""The parity probe: do the engines use the weights that the trainer holds?

Checksums prove that bytes arrived; only log-probabilities prove that the engine computes with them. Each worker
samples a few tokens after fixed prompts, and the trainer scores the same tokens. Invariant: a token that another
version made never counts as agreement (tests/rollart/test_rollart_probe.py).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Sequence
from typing import Protocol

from llmproxy import GenerateRequest, GenerateResult, Partial, Sampling
from llmproxy.errors import WorkerLost
from rollart.errors import Diverged, WeightsDiffer

log = logging.getLogger(__name__)


class Engine(Protocol):
    """A worker, asked directly: the probe must reach every one, so it does not go through routing."""

    @property
    def id(self) -> str: ...
    @property
    def version(self) -> int | None: ...
    async def generate(self, request: GenerateRequest) -> GenerateResult | Partial: ...


class Scorer(Protocol):
    """The trainer's log-probabilities of `tokens` after `prompts`, limited to `allowed` token ids."""

    async def logprobs(
        self, prompts: list[list[int]], tokens: list[list[int]], allowed: Sequence[int] | None
    ) -> list[list[float]]: ...


class ParityProbe:
    """Measures the largest difference of log-probabilities between any engine and the trainer, in nats."""

    def __init__(
        self,
        engines: Sequence[Engine],
        scorer: Scorer,
        prompts: Sequence[list[int]],
        *,
        max_tokens: int,
        sampling: Sampling,
    ) -> None:
        self._engines = engines
        self._scorer = scorer
        self._prompts = list(prompts)
        self._max_tokens = max_tokens
        self._sampling = sampling
        self._numbers = itertools.count()

    async def measure(self, version: int) -> float | None:
        """The difference at `version`, which the trainer holds; None when every engine has been lost meanwhile.

        Raises WeightsDiffer when an engine generates with another version, Diverged when the trainer's own
        log-probabilities are no numbers.
        """
        holding = [engine for engine in self._engines if engine.version == version]
        asked = [(engine, prompt) for engine in holding for prompt in self._prompts]
        answers = await asyncio.gather(*(self._ask(engine, prompt) for engine, prompt in asked))
        heard = [(prompt, answer) for (_, prompt), answer in zip(asked, answers, strict=True) if answer is not None]
        if not heard:
            log.warning("no parity of version %d: all engines were lost", version)
            return None
        results = [result for _, result in heard]
        for result in results:
            served = {span.version for span in result.spans}
            if served != {version}:
                raise WeightsDiffer(
                    f"{result.worker} acknowledged version {version} and generates with {sorted(served)}"
                )
        tokens = [result.token_ids for result in results]
        expected = await self._scorer.logprobs(
            [prompt for prompt, _ in heard], tokens, self._sampling.allowed_token_ids
        )
        if not all(math.isfinite(value) for scored in expected for value in scored):
            raise Diverged(f"version {version}: the trainer's log-probabilities are not finite; lower train.lr")
        gaps = [
            abs(ours - theirs)
            for result, scored in zip(results, expected, strict=True)
            for ours, theirs in zip(result.logprobs, scored, strict=True)
        ]
        return max(gap if math.isfinite(gap) else math.inf for gap in gaps)

    async def _ask(self, engine: Engine, prompt: list[int]) -> GenerateResult | None:
        """The engine's answer; None when it was lost meanwhile."""
        name = f"probe-{next(self._numbers)}"
        try:
            result = await engine.generate(
                GenerateRequest(name, prompt, self._max_tokens, sampling=self._sampling, request_id=name)
            )
        except WorkerLost as lost:
            log.warning("the parity probe goes on without %s: %s", engine.id, lost)
            return None
        assert isinstance(result, GenerateResult), "the probe runs while nothing is suspended"
        return result
