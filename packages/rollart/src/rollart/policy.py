"""The policy that environments see: text in, tokens through the proxy, text out.

Text exists only here, at the environment's edge. Token ids go to the engine and come back from it, and a
conversation is never tokenized again: an observation is encoded once, when it is new. Held by
tests/rollart/test_rollart_policy.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from envmanager import Action, DataError, Episode, Span
from llmproxy import GenerateRequest, GenerateResult, Sampling
from rollart.chat import Format


class Generator(Protocol):
    """What a policy needs of an LLMProxy."""

    async def generate(self, request: GenerateRequest) -> GenerateResult: ...


Observe = Callable[[GenerateResult, float, float], None]
"""Told of each finished generation, with its start and end on the loop's clock."""


class TurnSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a task's turns are generated.

    `latest_only`: the task shows the whole state each turn, so every turn starts a new context segment. Else a
    turn's observation is appended to the tokens before it. `context` is how many tokens a segment may hold.
    """

    task: str
    format: Format
    max_tokens: int
    sampling: Sampling
    latest_only: bool
    context: int


class TokenPolicy:
    """Generates each turn's action with an LLM. `prefix` keeps trajectory ids of several sources apart."""

    def __init__(
        self, proxy: Generator, settings: Callable[[str], TurnSettings], *, prefix: str, observe: Observe
    ) -> None:
        """`settings` are those of a key's task."""
        self._proxy = proxy
        self._settings = settings
        self._prefix = prefix
        self._observe = observe

    async def act(self, episode: Episode) -> Action | None:
        """The next action of an episode; None when its context is full. Cancelling the call aborts the generation.

        Raises DataError when the first observation fills it.
        """
        settings = self._settings(episode.key)
        clock = asyncio.get_running_loop().time
        fresh = settings.latest_only or not episode.turns
        observation = settings.format.observation(episode.observation, None if fresh else episode.turns[-1].token_ids)
        prompt = ([] if fresh else _context(episode)) + observation
        room = settings.context - len(prompt)
        if room < 1 and not episode.turns:
            raise DataError(
                f"the first observation takes {len(prompt)} tokens and leaves no room to answer: a context holds "
                f"{settings.context} (generation.max_model_len)"
            )
        if room < 1:
            return None
        start = clock()
        result = await self._proxy.generate(
            GenerateRequest(
                trajectory_id=f"{self._prefix}{episode.id}",
                prompt_ids=prompt,
                max_tokens=min(settings.max_tokens, room),
                task=settings.task,
                sampling=settings.sampling,
            )
        )
        self._observe(result, start, clock())
        episode.state = None if settings.latest_only else prompt + result.token_ids
        return Action(
            text=settings.format.action(result.token_ids),
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            spans=[Span(span.version, span.start, span.end) for span in result.spans],
            prompt_ids=observation,
            new_segment=settings.latest_only,
        )


def _context(episode: Episode) -> list[int]:
    """Every token of the episode so far, as generated or first encoded; remembered from turn to turn."""
    if episode.state is not None:
        remembered: list[int] = episode.state
        return remembered
    return [token for turn in episode.turns for token in (*turn.prompt_ids, *turn.token_ids)]
