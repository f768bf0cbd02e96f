"""Plain values that travel between callers, proxy and workers.

All are msgspec Structs, so msgpack carries them. A `Partial` and a `GenerateResult` always describe the
*whole* generation, what earlier attempts produced included; spans tile `[0, len(token_ids))` without gaps
and neighbours differ in version (tests/llmproxy/test_llmproxy_values.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

FinishReason = Literal["stop", "length"]


class Sampling(Struct, frozen=True, cache_hash=True, forbid_unknown_fields=True):
    """How tokens are drawn. The default draws from the policy itself.

    `logprobs="raw"` are those of the unmodified distribution, `"processed"` those of the distribution that
    was sampled from. Whatever changes the distribution requires `"processed"`; else the log-probabilities
    would not be those of the behaviour policy.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: Literal["raw", "processed"] = "raw"
    seed: int | None = None

    def __post_init__(self) -> None:
        # Lists are welcome; tuples make the value hashable, so that engines can cache by it.
        msgspec.structs.force_setattr(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.allowed_token_ids is not None:
            msgspec.structs.force_setattr(self, "allowed_token_ids", tuple(self.allowed_token_ids))

    @property
    def modifies(self) -> list[str]:
        """The fields that make the sampled distribution differ from the model's."""
        changed = {
            "temperature": self.temperature != 1.0,
            "top_p": self.top_p != 1.0,
            "top_k": self.top_k != 0,
            "allowed_token_ids": self.allowed_token_ids is not None,
        }
        return [name for name, differs in changed.items() if differs]


class Span(Struct, frozen=True):
    """Tokens `[start, end)` of a generation were made by weights of `version`."""

    version: int
    start: int
    end: int


class Partial(Struct, frozen=True):
    """A generation that stopped before its end and can go on; `remaining` tokens of its budget are left."""

    token_ids: list[int]
    logprobs: list[float]
    spans: list[Span]
    remaining: int


class Handoff(Struct, frozen=True):
    """The cache of a context, computed under `version` and held by the prefill worker until a decode worker took it.

    `params` are the engine's own; nobody else reads them.
    """

    worker: str
    version: int
    params: dict[str, Any]
    cached_tokens: int = 0


class GenerateRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """One generation of one trajectory.

    `max_tokens` counts from the start of the generation. With `resume`, what it holds is part of the
    generation, and at most `resume.remaining` further tokens are made. `handoff` is the proxy's: where a decode
    worker takes the context's cache from.
    """

    trajectory_id: str
    prompt_ids: list[int]
    max_tokens: int
    task: str = "default"
    sampling: Sampling = Sampling()
    resume: Partial | None = None
    request_id: str = ""
    handoff: Handoff | None = None

    @property
    def budget(self) -> int:
        """Tokens that may still be generated."""
        if self.resume is None:
            return self.max_tokens
        return min(self.resume.remaining, self.max_tokens - len(self.resume.token_ids))

    @property
    def tokens(self) -> int:
        """The longest context this generation can reach: prompt, partial tokens and remaining budget."""
        return len(self.prompt_ids) + (len(self.resume.token_ids) if self.resume else 0) + self.budget

    @property
    def context(self) -> list[int]:
        """The token ids that the next token is conditioned on."""
        if self.resume is None or not self.resume.token_ids:
            return self.prompt_ids
        return self.prompt_ids + self.resume.token_ids


class Timing(Struct, frozen=True):
    """Seconds waited for a worker, seconds at workers, and how many workers were tried.

    Where prefill and decode are apart, `prefill` seconds of `running` passed at `prefill_worker`, which took
    `cached_tokens` from its own cache; the decode worker computes nothing of the context.
    """

    queued: float = 0.0
    running: float = 0.0
    attempts: int = 1
    cached_tokens: int = 0
    prefill: float = 0.0
    prefill_worker: str = ""


class GenerateResult(Struct, frozen=True):
    """A finished generation: one log-probability a token, spans over all of them."""

    token_ids: list[int]
    logprobs: list[float]
    spans: list[Span]
    finish_reason: FinishReason
    worker: str
    timing: Timing = Timing()


class Ack(Struct, frozen=True):
    """A worker's answer to an update: the digest of the bytes its engine was given, or the error."""

    worker: str
    version: int
    digest: str = ""
    error: str = ""
    lost: bool = False
    """The error is that the worker is gone or silent; an update that is asked for again may find it, or another."""


def extend_spans(spans: Sequence[Span], more: Sequence[Span]) -> list[Span]:
    """Append spans counted from 0 to those of the tokens before them."""
    joined = list(spans)
    offset = joined[-1].end if joined else 0
    for span in more:
        moved = Span(span.version, span.start + offset, span.end + offset)
        if joined and joined[-1].version == moved.version:
            moved = Span(moved.version, joined.pop().start, moved.end)
        joined.append(moved)
    return joined


def extend_partial(
    request: GenerateRequest, token_ids: list[int], logprobs: list[float], spans: Sequence[Span]
) -> Partial:
    """What is known of `request` after an attempt that added these tokens."""
    before = request.resume
    if before is None:
        return Partial(token_ids, logprobs, extend_spans((), spans), request.budget - len(token_ids))
    return Partial(
        before.token_ids + token_ids,
        before.logprobs + logprobs,
        extend_spans(before.spans, spans),
        request.budget - len(token_ids),
    )
