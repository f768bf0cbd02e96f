"""Text is encoded once; tokens are never made again from text."""

from __future__ import annotations

import asyncio

import pytest

from envmanager import DataError, Episode, Span, Turn
from llmproxy import GenerateRequest, GenerateResult, Sampling
from llmproxy import Span as ProxySpan
from rollart.chat import Codec, Plain
from rollart.policy import TokenPolicy, TurnSettings


class Letters:
    """A tokenizer: one token a character. It counts what it is asked."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool, split_special_tokens: bool) -> list[int]:
        assert not add_special_tokens and split_special_tokens
        self.encoded.append(text)
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


class Engine:
    """Answers "xy", the second letter by a later version; keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        spans = [ProxySpan(3, 0, 1), ProxySpan(4, 1, 2)]
        return GenerateResult([ord("x"), ord("y")], [-0.5, -0.25], spans, "length", "gen-0")


def policy(engine: Engine, tokenizer: Letters, *, latest_only: bool, context: int = 100) -> TokenPolicy:
    settings = TurnSettings(
        task="T",
        format=Plain(Codec(tokenizer)),
        max_tokens=2,
        sampling=Sampling(),
        latest_only=latest_only,
        context=context,
    )
    return TokenPolicy(engine, lambda key: settings, prefix="train-", observe=lambda result, start, end: None)


def episode(observation: str, *turns: Turn) -> Episode:
    return Episode(id="7", key="k", seed=0, observation=observation, turns=list(turns))


def turn(prompt: str, tokens: list[int]) -> Turn:
    return Turn(
        observation=prompt,
        action="not what the tokens say",
        prompt_ids=[ord(letter) for letter in prompt],
        token_ids=tokens,
        logprobs=[0.0] * len(tokens),
        spans=[],
        new_segment=False,
        reward=0.0,
        generate_at=0.0,
        generate_s=0.0,
        env_at=0.0,
        env_s=0.0,
    )


async def test_a_turn_appends_to_the_tokens_that_were_generated() -> None:
    engine, tokenizer = Engine(), Letters()
    action = await policy(engine, tokenizer, latest_only=False).act(episode("c", turn("a", [999, 998])))
    assert engine.requests[0].prompt_ids == [ord("a"), 999, 998, ord("c")]
    assert action is not None
    assert action.prompt_ids == [ord("c")]
    assert not action.new_segment
    assert tokenizer.encoded == ["c"]


async def test_a_latest_only_task_starts_a_segment_each_turn() -> None:
    engine, tokenizer = Engine(), Letters()
    action = await policy(engine, tokenizer, latest_only=True).act(episode("c", turn("a", [1])))
    assert engine.requests[0].prompt_ids == [ord("c")]
    assert action is not None
    assert action.new_segment


async def test_a_full_context_ends_the_episode_and_a_nearly_full_one_cuts_the_budget() -> None:
    engine = Engine()
    long = [turn("a", [1] * 7)]
    assert await policy(engine, Letters(), latest_only=False, context=9).act(episode("c", *long)) is None
    assert engine.requests == []
    await policy(engine, Letters(), latest_only=False, context=10).act(episode("c", *long))
    assert engine.requests[0].max_tokens == 1


async def test_a_first_observation_that_fills_the_context_is_refused_with_its_length() -> None:
    with pytest.raises(DataError, match=r"takes 4 tokens .* holds 4 \(generation.max_model_len\)"):
        await policy(Engine(), Letters(), latest_only=False, context=4).act(episode("long"))


async def test_the_action_carries_the_engines_words() -> None:
    engine = Engine()
    action = await policy(engine, Letters(), latest_only=True).act(episode("o"))
    assert action is not None
    assert (action.text, action.token_ids, action.logprobs) == ("xy", [120, 121], [-0.5, -0.25])
    assert action.spans == [Span(3, 0, 1), Span(4, 1, 2)]
    assert engine.requests[0].trajectory_id == "train-7"
    assert engine.requests[0].task == "T"


async def test_frequent_texts_are_encoded_once() -> None:
    engine, tokenizer = Engine(), Letters()
    subject = policy(engine, tokenizer, latest_only=True)
    for _ in range(3):
        action = await subject.act(episode("same"))
        assert action is not None
        action.prompt_ids.append(0)  # a caller's change must not reach the cache
    assert tokenizer.encoded == ["same"]
    assert engine.requests[2].prompt_ids == [ord(letter) for letter in "same"]


async def test_cancelling_reaches_the_proxy() -> None:
    class Stuck(Engine):
        cancelled = False

        async def generate(self, request: GenerateRequest) -> GenerateResult:
            try:
                return await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                self.cancelled = True
                raise

    engine = Stuck()
    acting = asyncio.create_task(policy(engine, Letters(), latest_only=True).act(episode("o")))
    await asyncio.sleep(0)
    acting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await acting
    assert engine.cancelled
