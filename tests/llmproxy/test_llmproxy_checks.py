"""What cannot be served is refused before anything is queued, the field and the limit named."""

from __future__ import annotations

from typing import Any

import pytest

from llmproxy import GenerateRequest, InvalidRequest, LLMProxy, Partial, Sampling, SimWorker, Span

LIMIT = 100
FINE: dict[str, Any] = {"trajectory_id": "t", "prompt_ids": [1, 2, 3], "max_tokens": 10}


@pytest.mark.parametrize(
    ("field", "limit", "wrong"),
    [
        ("trajectory_id", "unique", {"trajectory_id": ""}),
        ("prompt_ids", "at least one", {"prompt_ids": []}),
        ("prompt_ids", "int", {"prompt_ids": [1, 2.0]}),
        ("prompt_ids", "int", {"prompt_ids": [1, True]}),
        ("prompt_ids", "int", {"prompt_ids": ["1"]}),
        ("prompt_ids", "non-negative", {"prompt_ids": [1, -2]}),
        ("prompt_ids", "up to", {"prompt_ids": [1, 2**31]}),
        ("prompt_ids", "up to", {"prompt_ids": [1, 2**70]}),
        ("max_tokens", "at least 1", {"max_tokens": 0}),
        ("max_tokens", "at least 1", {"max_tokens": -5}),
        ("max_tokens", str(LIMIT), {"max_tokens": LIMIT - 2}),
        ("max_tokens", str(LIMIT), {"prompt_ids": [1] * LIMIT}),
        ("resume", "budget left", {"resume": Partial([5] * 4, [0.0] * 4, [], 0)}),
        ("resume", "budget left", {"resume": Partial([5] * 10, [0.0] * 10, [], 5)}),
        ("resume.logprobs", "one for each", {"resume": Partial([5] * 4, [0.0] * 3, [], 6)}),
        ("resume.token_ids", "non-negative", {"resume": Partial([5, -1], [0.0] * 2, [Span(0, 0, 2)], 6)}),
        ("resume.spans", "all 4 tokens", {"resume": Partial([5] * 4, [0.0] * 4, [], 6)}),
        ("resume.spans", "all 4 tokens", {"resume": Partial([5] * 4, [0.0] * 4, [Span(0, 0, 9)], 6)}),
        ("resume.spans", "without gaps", {"resume": Partial([5] * 4, [0.0] * 4, [Span(0, 0, 1), Span(1, 2, 4)], 6)}),
        ("sampling.temperature", "at least 0", {"sampling": Sampling(temperature=-1, logprobs="processed")}),
        ("sampling.temperature", "finite", {"sampling": Sampling(temperature=float("nan"), logprobs="processed")}),
        ("sampling.top_p", "(0, 1]", {"sampling": Sampling(top_p=0.0, logprobs="processed")}),
        ("sampling.top_k", "0 means all", {"sampling": Sampling(top_k=-1, logprobs="processed")}),
        (
            "sampling.allowed_token_ids",
            "at least one",
            {"sampling": Sampling(allowed_token_ids=(), logprobs="processed")},
        ),
        ("sampling.logprobs", "processed", {"sampling": Sampling(allowed_token_ids=(4,))}),
        ("sampling.logprobs", "processed", {"sampling": Sampling(temperature=0.7)}),
        ("sampling.logprobs", "processed", {"sampling": Sampling(top_p=0.9)}),
        ("sampling.logprobs", "processed", {"sampling": Sampling(top_k=5)}),
    ],
)
async def test_refused_with_field_and_limit(field: str, limit: str, wrong: dict[str, Any]) -> None:
    proxy = LLMProxy([SimWorker("w", context_limit=LIMIT)])
    with pytest.raises(InvalidRequest) as caught:
        await proxy.generate(GenerateRequest(**(FINE | wrong)))
    assert caught.value.field == field
    assert limit in caught.value.limit and field in str(caught.value)
    assert proxy.stats().requests["admitted"] == 0


async def test_the_longest_context_that_fits_is_served() -> None:
    proxy = LLMProxy([SimWorker("w", context_limit=LIMIT, decode_rate=1e6)])
    result = await proxy.generate(GenerateRequest("t", [1] * 60, LIMIT - 60))
    assert len(result.token_ids) == LIMIT - 60
