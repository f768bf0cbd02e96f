"""The rewards that ship: answers compared by rule, and a judge behind an OpenAI-compatible endpoint."""

from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from envmanager.values import Outcome, Timings, Trajectory, Turn
from rollart.serverless import rewards
from rollart.serverless.mathematics import answer_in, number_of, same


def episode(action: str, **metadata: Any) -> Trajectory:
    kept = dict(prompt_ids=[], token_ids=[], logprobs=[], spans=[], new_segment=False, reward=0.0)  # noqa: C408
    times = dict(generate_at=0.0, generate_s=0.0, env_at=0.0, env_s=0.0)  # noqa: C408
    turn = Turn(observation="What is it?", action=action, **kept, **times)  # type: ignore[arg-type]
    timings = Timings(started=0.0, reset_s=0.0, ended=1.0)
    outcome = Outcome("terminated", 1)
    return Trajectory(
        id="t",
        key="k",
        seed=0,
        task="m",
        turns=[turn],
        reward=0.0,
        outcome=outcome,
        timings=timings,
        metadata=metadata,
    )


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1} no, \boxed{\frac{3}{4}}", r"\frac{3}{4}"),
        (r"\boxed{x^{2}}", "x^{2}"),
        (r"\boxed{never closed", ""),
        ("The answer is 42.", "42"),
        ("Answer: 1,024 apples", "1,024"),
        ("the final answer is x+1.", "x+1"),
        ("3 and then 7", "7"),
        ("-0.5", "-0.5"),
        ("nothing", ""),
    ],
)
def test_answers_are_found(text: str, answer: str) -> None:
    assert answer_in(text) == answer


@pytest.mark.timeout(20)
def test_a_degenerate_solution_takes_no_time() -> None:
    """What a policy writes that has collapsed must not hold its reward up."""
    for text in (
        "answer" + "\n" * 100_000,
        "answer " * 20_000,
        "\\text{" * 20_000,
        "1 " * 100_000,
        "\\boxed{" * 20_000,
    ):
        same(answer_in(text), "1")
        same(text, text)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("0.5", "1/2", True),
        (r"\frac{1}{2}", "0.50", True),
        (r"\dfrac{1}{2}", r"\tfrac{1}{2}", True),
        ("50%", "0.5", True),
        ("1,000", "1000", True),
        ("$12", "12.0", True),
        ("-3", "3", False),
        ("1/0", "1/0", True),
        ("x + 1", "x+1", True),
        (r"\text{Yes}.", "yes", True),
        ("", "", False),
        ("9" * 10_000, "9" * 10_000, True),
        ("1e999999999", "2", False),
    ],
)
def test_answers_are_compared(one: str, other: str, equal: bool) -> None:
    assert same(one, other) is equal


@given(st.integers(-(10**9), 10**9), st.integers(1, 10**6))
def test_equal_numbers_are_equal_however_they_are_written(above: int, below: int) -> None:
    number = number_of(f"{above}/{below}")
    assert number is not None and number * below == above
    assert same(rf"\frac{{{above}}}{{{below}}}", f"{above}/{below}")


@given(st.text(max_size=60))
def test_no_text_breaks_it(text: str) -> None:
    assert isinstance(same(answer_in(text), text), bool)


def test_the_math_reward() -> None:
    assert rewards.math_reward(episode(r"It is \boxed{0.75}", answer="3/4")) == 1.0
    assert rewards.math_reward(episode("It is 3", answer=4)) == 0.0
    assert rewards.math_reward(episode("", answer=4)) == 0.0
    with pytest.raises(ValueError, match="no 'answer'"):
        rewards.math_reward(episode("3"))


@pytest.fixture
def fresh() -> Iterator[None]:
    rewards._judge.cache_clear()
    yield
    rewards._judge.cache_clear()


@pytest.mark.real
async def test_the_judge_asks_a_chat_model(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    async def complete(request: web.Request) -> web.Response:
        asked.append((request.headers["Authorization"], await request.json()))
        return web.json_response({"choices": [{"message": {"content": "I would say 1.7"}}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setenv("ROLLART_JUDGE_URL", f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
    monkeypatch.setenv("ROLLART_JUDGE_MODEL", "judge")
    monkeypatch.setenv("ROLLART_JUDGE_KEY", "key")
    assert await rewards.judge_reward(episode("It is 3", answer=4)) == 1.0
    ((header, body),) = asked
    assert header == "Bearer key" and body["model"] == "judge"
    text = body["messages"][0]["content"]
    assert "Action: It is 3" in text and "Reference answer: 4" in text
    await rewards._judge().close()
    await runner.cleanup()


async def test_a_judge_that_is_not_set_says_what_to_set(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLART_JUDGE_URL", raising=False)
    monkeypatch.setenv("ROLLART_JUDGE_MODEL", "judge")
    with pytest.raises(ValueError, match="set ROLLART_JUDGE_URL to an OpenAI-compatible endpoint"):
        await rewards.judge_reward(episode("3"))
