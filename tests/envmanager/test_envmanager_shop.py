"""The shop: its pages, its grammar, and WebShop's reward."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envmanager import UnknownEnv
from envmanager.adapters.catalogue import KINDS, Catalogue, words
from envmanager.adapters.shop import Shop, score, type_score
from envmanager.check import check
from envmanager.naming import named

CATALOGUE = Catalogue(200)


def bought(key: str, *actions: str) -> float:
    env = Shop("all", products=200)(key)
    env.reset(seed=1)
    for action in actions:
        _, reward, terminated, _, _ = env.step(action)
        if terminated:
            return reward
    raise AssertionError("nothing was bought")


def test_a_visit_that_pays():
    wish = CATALOGUE.wish(1)
    options = [f"click[{value}]" for value in wish.options.values()]
    search, item = f"search[{wish.product.title}]", f"click[{wish.product.id}]"
    assert bought("k", search, item, *options, "click[Buy Now]") == 1.0
    without = bought("k", search, item, "click[buy now]")
    assert without == pytest.approx((2 + 0 + 1) / (2 + len(options) + 1))


def test_pages():
    env = Shop("all", products=200)("k")
    observation, info = env.reset(seed=1)
    assert "Customer: I am looking for" in observation and [a[:7] for a in info["actions"]] == ["search["]
    page, _, _, _, info = env.step("search[black shirt]")
    assert page.startswith("Results 1 to 10 of ") and "click[next >]" in info["actions"]
    second = env.step("Let me look further: click[Next >]")[0]
    assert second.startswith("Results 11 to 20") and env.step("click[< Prev]")[0] == page
    item = info["actions"][-1]
    assert "Chosen: nothing" in env.step(item)[0]
    detail, _, _, _, info = env.step("click[attributes]")
    assert info["actions"] == ["click[back to search]", "click[< prev]"] and "Chosen" not in detail
    assert "Chosen" in env.step("click[< prev]")[0] and env.step("click[< prev]")[0] == page
    assert env.step("click[back to search]")[0] == "Start page. [Search]"


@pytest.mark.parametrize(
    "action", ["", "buy", "click[buy now]", "click[B999999]", "search[]", "search[?!]", "click["]
)
def test_what_is_not_offered_changes_nothing(action):
    env = Shop("all", products=200)("k")
    env.reset(seed=1)
    observation, reward, terminated, truncated, info = env.step(action)
    assert observation.startswith("That is not possible here.") and info["invalid"]
    assert (reward, terminated, truncated) == (0.0, False, False)


def test_it_ends():
    env = Shop("all", products=20, max_steps=3)("k")
    env.reset(seed=1)
    assert [env.step("click[x]")[3] for _ in range(3)] == [False, False, True]


@given(st.integers(0, 10_000), st.integers(0, 199), st.data())
def test_the_reward(seed, index, data):
    wish, product = CATALOGUE.wish(seed), CATALOGUE.products[index]
    chosen = {name: data.draw(st.sampled_from(values)) for name, values in product.options.items()}
    reward = score(wish, product, chosen)
    assert 0.0 <= reward <= 1.0
    meets = (
        type_score(wish.product, product) == 1.0
        and set(wish.attributes) <= set(product.attributes)
        and all(chosen.get(name) == value for name, value in wish.options.items())
        and product.price <= wish.price
    )
    assert (reward == 1.0) == meets


@given(st.integers(0, 10_000))
def test_every_wish_can_be_met(seed):
    wish = CATALOGUE.wish(seed)
    assert score(wish, wish.product, wish.options) == 1.0
    assert wish.product in CATALOGUE.search(wish.product.title)


def test_the_type_of_a_product():
    one = CATALOGUE.products[0]
    assert type_score(one, one) == 1.0
    assert type_score(one, msgspec.structs.replace(one, title="zz zz")) == 0.0
    long = msgspec.structs.replace(one, title=" ".join(f"w{n}" for n in range(20)))
    assert type_score(long, msgspec.structs.replace(one, title="w0")) == 0.1
    some = msgspec.structs.replace(one, title="w0 w1 w2", category="other")
    assert type_score(long, some) == 0.5
    assert type_score(long, msgspec.structs.replace(some, category=one.category)) == 1.0


def test_a_catalogue_follows_from_its_seed():
    assert Catalogue(50, 3).products == Catalogue(50, 3).products != Catalogue(50, 4).products
    assert {product.category for product in Catalogue(50, 0, "shoes").products} == {"shoes"}
    assert all(words(product.title) for product in CATALOGUE.products) and set(KINDS) == {
        product.category for product in CATALOGUE.products
    }


async def test_it_keeps_the_contract():
    assert all(finding.holds for finding in await check(named("shop:all?products=100")) if finding.rule != "loop")


@pytest.mark.parametrize(("name", "said"), [("shop:cars", "shop:shoes"), ("shop:all?products=0", "at least 1")])
def test_wrong_names(name, said):
    with pytest.raises(UnknownEnv, match=said):
        named(name)
