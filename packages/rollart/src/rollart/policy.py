"""The policy that environments see: text in, tokens through the proxy, text out.

Text exists only here, at the environment's edge. Token ids go to the engine and come back from it, and a
conversation is never tokenized again: an observation is encoded once, when it is new. Held by
tests/rollart/test_rollart_policy.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import msgspec

from envmanager import Action, Episode, Span
from llmproxy import GenerateRequest, GenerateResult, Sampling


class Generator(Protocol):
    """What a policy needs of an LLMProxy."""

    async def generate(self, request: GenerateRequest) -> GenerateResult: ...


Observe = Callable[[GenerateResult, float, float], None]
"""Told of each finished generation, with its start and end on the loop's clock."""


class Codec:
    """Text to token ids and back, by a Hugging Face tokenizer. Frequent texts are encoded once."""

    def __init__(self, tokenizer: object, cache: int = 65_536) -> None:
        encode: Callable[..., list[int]] = tokenizer.encode  # type: ignore[attr-defined]
        decode: Callable[..., str] = tokenizer.decode  # type: ignore[attr-defined]
        self._encode = lru_cache(cache)(lambda text: tuple(encode(text, add_special_tokens=False)))
        self._decode = lru_cache(cache)(lambda ids: decode(list(ids)))

    def encode(self, text: str) -> list[int]:
        return list(self._encode(text))

    def decode(self, token_ids: list[int]) -> str:
        return self._decode(tuple(token_ids))


class GenerationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a task's actions are generated.

    `latest_only`: the task shows the whole state each turn, so every turn starts a new context segment. Else a
    turn's observation is appended to the tokens before it.
    """

    task: str
    max_tokens: int
    sampling: Sampling
    latest_only: bool


class TokenPolicy:
    """Generates each turn's action with an LLM. `prefix` keeps trajectory ids of several sources apart."""

    def __init__(
        self, proxy: Generator, codec: Codec, settings: GenerationSettings, *, prefix: str, observe: Observe
    ) -> None:
        self._proxy = proxy
        self._codec = codec
        self._settings = settings
        self._prefix = prefix
        self._observe = observe

    async def act(self, episode: Episode) -> Action:
        """The next action of an episode. Cancelling the call aborts the generation."""
        settings = self._settings
        clock = asyncio.get_running_loop().time
        observation = self._codec.encode(episode.observation)
        context = [] if settings.latest_only else _context(episode)
        start = clock()
        result = await self._proxy.generate(
            GenerateRequest(
                trajectory_id=f"{self._prefix}{episode.id}",
                prompt_ids=context + observation,
                max_tokens=settings.max_tokens,
                task=settings.task,
                sampling=settings.sampling,
            )
        )
        self._observe(result, start, clock())
        return Action(
            text=self._codec.decode(result.token_ids),
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            spans=[Span(span.version, span.start, span.end) for span in result.spans],
            prompt_ids=observation,
            new_segment=settings.latest_only,
        )


def _context(episode: Episode) -> list[int]:
    """Every token of the episode so far, as generated or first encoded."""
    return [token for turn in episode.turns for token in (*turn.prompt_ids, *turn.token_ids)]
