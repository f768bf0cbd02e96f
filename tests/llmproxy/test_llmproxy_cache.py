"""What a simulated engine keeps of contexts never takes a sequence's room, and the latest used goes last."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmproxy.sim.cache import Cache


@given(
    kept=st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 100)), max_size=20),
    room=st.integers(-10, 300),
    limit=st.integers(0, 300),
)
def test_no_more_is_kept_than_there_is_room_for(kept: list[tuple[str, int]], room: int, limit: int) -> None:
    cache = Cache(limit)
    for key, tokens in kept:
        cache.keep(key, tokens)
    held = sum(dict(kept).values())
    assert cache.tokens == held == sum(cache[key] for key in "abcde")
    cache.trim(room)
    assert cache.tokens == min(held, limit, max(0, room)) == sum(cache[key] for key in "abcde")
    assert sum(cache.take(key) for key in "abcde") == min(held, limit, max(0, room)) and cache.tokens == 0


def test_the_least_recently_used_loses_its_end_first() -> None:
    cache = Cache(1_000)
    for key in "abca":
        cache.keep(key, 100)
    cache.trim(250)
    assert [cache[key] for key in "abc"] == [100, 50, 100]
    cache.trim(120.5)
    assert [cache[key] for key in "abc"] == [100, 0, 20]
    cache.clear()
    assert cache.tokens == 0 == cache["a"]
