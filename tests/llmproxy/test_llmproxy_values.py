"""Values keep their meaning over msgpack and over any number of attempts."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmproxy import GenerateRequest, Partial, Sampling, Span, extend_partial


@st.composite
def attempts(draw: st.DrawFn) -> list[list[Span]]:
    """Runs of tokens that successive attempts made, spans of each counted from 0."""
    made = []
    for _ in range(draw(st.integers(0, 5))):
        spans, end = [], 0
        for version in draw(st.lists(st.integers(0, 3), max_size=4)):
            count = draw(st.integers(1, 5))
            spans.append(Span(version, end, end + count))
            end += count
        made.append(spans)
    return made


@settings(deadline=None)
@given(attempts())
def test_spans_tile_the_generation_and_neighbours_differ(made: list[list[Span]]) -> None:
    request = GenerateRequest("t", [1], 200)
    versions: list[int] = []
    for spans in made:
        new = [span.version for span in spans for _ in range(span.start, span.end)]
        versions += new
        partial = extend_partial(request, list(new), [0.0] * len(new), spans)
        assert partial.remaining == 200 - len(versions)
        request = msgspec.structs.replace(request, resume=partial)
    if request.resume is None:
        return
    joined = request.resume.spans
    assert request.resume.token_ids == versions
    assert [span.version for span in joined for _ in range(span.start, span.end)] == versions
    assert all(a.end == b.start and a.version != b.version for a, b in pairwise(joined))


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(0, 50), st.integers(0, 50))
def test_a_resumed_generation_never_gets_a_new_budget(max_tokens: int, made: int, remaining: int) -> None:
    partial = Partial([7] * made, [0.0] * made, [], remaining)
    request = GenerateRequest("t", [1, 2], max_tokens, resume=partial)
    assert request.budget <= remaining and request.budget + made <= max(made, max_tokens)
    assert request.context == [1, 2] + [7] * made
    assert request.tokens == len(request.context) + request.budget


def test_requests_survive_msgpack() -> None:
    request = GenerateRequest(
        "t",
        [1, 2, 3],
        5,
        sampling=Sampling(allowed_token_ids=(4, 5), logprobs="processed"),
        resume=Partial([4], [-0.5], [Span(2, 0, 1)], 4),
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=GenerateRequest) == request


def test_lists_make_a_hashable_sampling() -> None:
    listed = msgspec.json.decode(b'{"allowed_token_ids": [4, 5], "stop_token_ids": [1]}', type=Sampling)
    assert listed == Sampling(allowed_token_ids=(4, 5), stop_token_ids=(1,))
    assert hash(listed) == hash(Sampling(allowed_token_ids=(4, 5), stop_token_ids=(1,)))


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="temprature"):
        msgspec.json.decode(b'{"temprature": 1}', type=Sampling)
