"""What makes a request servable: checked before anything is queued, each problem naming its field and limit.

tests/llmproxy/test_llmproxy_checks.py goes through them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from .errors import InvalidRequest
from .values import GenerateRequest, Partial, Sampling

HIGHEST_ID = 2**31 - 1
"""No vocabulary is larger. Which ids there are, the engine knows."""


class _Ids(msgspec.Struct, array_like=True):
    """A struct, as msgspec looks its type up in half the time that a generic one's takes."""

    ids: list[Annotated[int, msgspec.Meta(ge=0, le=HIGHEST_ID)]]


def check_request(request: GenerateRequest, context_limit: int) -> None:
    """Raise InvalidRequest unless the request can run on a worker with this context limit."""
    if not request.trajectory_id:
        raise InvalidRequest("trajectory_id", "is empty", "a name unique among trajectories in flight")
    if request.max_tokens <= 0:
        raise InvalidRequest("max_tokens", f"is {request.max_tokens}", "at least 1")
    if not request.prompt_ids:
        raise InvalidRequest("prompt_ids", "is empty", "at least one token id")
    check_ids("prompt_ids", request.prompt_ids)
    if request.resume is not None:
        _check_resume(request)
    if request.tokens > context_limit:
        raise InvalidRequest(
            "max_tokens",
            f"prompt of {len(request.prompt_ids)} tokens plus max_tokens {request.max_tokens} exceeds the context",
            f"such that both fit in {context_limit}",
        )
    check_sampling(request.sampling)


def check_ids(field: str, ids: list[int]) -> None:
    """Token ids are non-negative plain ints of 31 bits: no floats, bools or numpy scalars."""
    try:
        msgspec.convert((ids,), _Ids)  # in one pass; what follows names what is wrong
        return
    except msgspec.ValidationError:
        kinds = set(map(type, ids)) - {int}
    if kinds:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise InvalidRequest(field, f"contains {names}", "a list of int")
    if min(ids) < 0:
        raise InvalidRequest(field, f"contains {min(ids)}", "non-negative token ids")
    if max(ids) > HIGHEST_ID:
        raise InvalidRequest(field, f"contains {max(ids)}", f"token ids up to {HIGHEST_ID}")


def check_sampling(sampling: Sampling) -> None:
    if not 0.0 <= sampling.temperature < float("inf"):
        raise InvalidRequest("sampling.temperature", f"is {sampling.temperature}", "finite and at least 0")
    if not 0.0 < sampling.top_p <= 1.0:
        raise InvalidRequest("sampling.top_p", f"is {sampling.top_p}", "in (0, 1]")
    if sampling.top_k < 0:
        raise InvalidRequest("sampling.top_k", f"is {sampling.top_k}", "at least 0, where 0 means all")
    if sampling.allowed_token_ids is not None and not sampling.allowed_token_ids:
        raise InvalidRequest("sampling.allowed_token_ids", "is empty", "None or at least one token id")
    if sampling.logprobs == "raw" and sampling.modifies:
        raise InvalidRequest(
            "sampling.logprobs",
            f"is 'raw', but {', '.join(sampling.modifies)} changes what is sampled from",
            "'processed', so that log-probabilities are those of the behaviour policy",
        )


def _check_resume(request: GenerateRequest) -> None:
    partial = request.resume
    assert partial is not None
    if len(partial.logprobs) != len(partial.token_ids):
        raise InvalidRequest(
            "resume.logprobs",
            f"has {len(partial.logprobs)} entries for {len(partial.token_ids)} tokens",
            "one for each token",
        )
    if request.budget <= 0:
        raise InvalidRequest(
            "resume",
            f"has {len(partial.token_ids)} of {request.max_tokens} tokens and {partial.remaining} remaining",
            "a generation with budget left",
        )
    check_ids("resume.token_ids", partial.token_ids)
    _check_spans(partial)


def _check_spans(partial: Partial) -> None:
    """Else what is made next would be counted from elsewhere, and said to be of other versions than it is."""
    end = 0
    for span in partial.spans:
        if not end == span.start < span.end:
            raise InvalidRequest("resume.spans", f"go from {end} to {span.start}-{span.end}", "without gaps")
        end = span.end
    if end != len(partial.token_ids):
        raise InvalidRequest("resume.spans", f"end at {end}", f"over all {len(partial.token_ids)} tokens")
