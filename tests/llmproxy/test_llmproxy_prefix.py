"""The prefix index against a plain search, and continued trajectories found by their token ids alone."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from llmproxy import AffinityRouter, Fleet, GenerateRequest, GenerateResult, PrefixIndex, SimWorker, Span
from llmproxy.routing.prefix import BLOCK, EMPTY

IDS = st.integers(0, 2)
LENGTHS = st.one_of(st.integers(0, 5), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3]))


@st.composite
def sequences(draw: st.DrawFn) -> list[list[int]]:
    """Some of them continue others."""
    made: list[list[int]] = []
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.sampled_from([[], *made]))
        token = draw(IDS)
        made.append([*start, *[token] * draw(LENGTHS), draw(IDS)])
    return made


@given(stored=sequences(), asked=sequences(), cut=st.integers(0, 200))
def test_the_longest_stored_sequence_that_it_continues_is_found(
    stored: list[list[int]], asked: list[list[int]], cut: int
) -> None:
    index = PrefixIndex(100)
    places: dict[tuple[int, ...], str] = {}
    for number, ids in enumerate(stored):
        index.add(ids[:cut], ids[cut:], f"w{number}")
        places[tuple(ids)] = f"w{number}"
    for ids in [*asked, *stored, *[[*one, 1, 2] for one in stored]]:
        held = [one for one in places if tuple(ids[: len(one)]) == one]
        expected = places[max(held, key=len)] if held else None
        assert index.find(ids) == expected
    assert len(index) == len(places)


def test_only_what_is_new_is_hashed_and_the_answer_is_the_same() -> None:
    random = Random(0)
    index, whole = PrefixIndex(100), PrefixIndex(100)
    context: list[int] = []
    chain = EMPTY
    for turn in range(20):
        prompt = context + [random.randrange(1_000) for _ in range(random.randrange(150))]
        made = [random.randrange(1_000) for _ in range(random.randrange(1, 90))]
        chain = index.add(prompt, made, f"w{turn}", chain)
        context = prompt + made
        assert chain == whole.add(context, [], f"w{turn}")
        assert index.find([*context, 1, 2, 3]) == whole.find([*context, 1, 2, 3]) == f"w{turn}"
    rewritten = [7] * 500
    assert index.add(rewritten, [8], "new", chain) == whole.add([*rewritten, 8], [], "new")
    assert index.find([*rewritten, 8, 9]) == "new"


def test_memory_is_bounded_and_the_least_recently_used_goes_first() -> None:
    index = PrefixIndex(10)
    for number in range(10):
        index.add([number] * 100, [1], f"w{number}")
    assert index.find([0] * 100 + [1]) == "w0"
    for number in range(10, 19):
        index.add([number] * 100, [1], f"w{number}")
    assert len(index) == 10 and index.find([0] * 100 + [1]) == "w0" and index.find([1] * 100 + [1]) is None
    index.clear()
    assert len(index) == 0 and index.find([0] * 100 + [1]) is None and not index._tails


def turn(name: str, prompt: list[int], made: list[int]) -> tuple[GenerateRequest, GenerateResult]:
    result = GenerateResult(made, [0.0] * len(made), [Span(0, 0, len(made))], "stop", "a")
    return GenerateRequest(name, prompt, len(made)), result


def test_a_trajectory_under_a_new_name_goes_where_it_was() -> None:
    fleet = Fleet()
    workers = [SimWorker(f"w{i}") for i in range(8)]
    slots = [fleet.add(worker) for worker in workers]
    fleet.refresh(lambda _: True)
    router = AffinityRouter(random=Random(0))
    prompt = [5] * 200
    request, result = turn("first", prompt, [6, 7, 8])
    router.served(request, slots[3], result)
    later = [GenerateRequest(f"n{i}", [*prompt, 6, 7, 8, 9], 5) for i in range(20)]
    assert {slot.id for one in later if (slot := router.choose(one, fleet))} == {"w3"}
    # Others of its group have the prompt in common, and nothing that was generated: they spread.
    members = [GenerateRequest(f"m{i}", prompt, 5) for i in range(40)]
    assert len({slot.id for one in members if (slot := router.choose(one, fleet))}) > 4
    assert router.stats()["recognized"] == 20
    router.flushed()
    assert len({slot.id for one in later if (slot := router.choose(one, fleet))}) > 4
