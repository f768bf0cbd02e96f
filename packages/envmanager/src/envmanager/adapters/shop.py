"""A shop with WebShop's grammar of actions and WebShop's reward, over a generated catalogue (`shop:all`,
`shop:shoes?products=200`). Needs no extra.

The actions are `search[words]` on the start page and `click[what]` for what a page offers. The reward comes with
`click[buy now]` and is that of Yao et al., "WebShop: Towards Scalable Real-World Web Interaction with Grounded
Language Agents" (2022), section 3: for the wanted product y* with attributes U_att, options U_opt and price u_price,
and the bought y with Y_att, chosen options Y_opt and y_price,

    r = r_type (|U_att ∩ Y_att| + |U_opt ∩ Y_opt| + [y_price <= u_price]) / (|U_att| + |U_opt| + 1)

where r_type is 0 if the titles share no word, 0.1 if they share less than a tenth, 0.5 if they share at most a fifth
and the category differs, else 1.

Invariant: the reward is in [0, 1], and 1 exactly for a product that meets the wish
(test_envmanager_shop.py::test_the_reward).
"""

import re
import zlib
from typing import Any

from envmanager.adapters.catalogue import KINDS, Catalogue, Product, Wish, words
from envmanager.errors import UnknownEnv

ACTION = re.compile(r"(search|click)\[([^\]\n]*)\]", re.IGNORECASE)
PAGE = 10
DETAILS = ("description", "attributes")


def type_score(wanted: Product, bought: Product) -> float:
    """r_type."""
    title, other = set(words(wanted.title)), set(words(bought.title))
    match = len(title & other) / len(title)
    if match == 0:
        return 0.0
    if match < 0.1:
        return 0.1
    return 0.5 if match <= 0.2 and wanted.category != bought.category else 1.0


def score(wish: Wish, bought: Product, chosen: dict[str, str]) -> float:
    """r, in [0, 1]."""
    attributes = sum(attribute in bought.attributes for attribute in wish.attributes)
    options = sum(chosen.get(name) == value for name, value in wish.options.items())
    price = bought.price <= wish.price
    whole = len(wish.attributes) + len(wish.options) + 1
    return type_score(wish.product, bought) * (attributes + options + price) / whole


class ShopEnv:
    """One customer's visit."""

    blocking = False

    def __init__(self, catalogue: Catalogue, key: str, max_steps: int) -> None:
        self.task = "shop"
        self._catalogue = catalogue
        self._key = key
        self._max_steps = max_steps
        self._steps = 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._wish = self._catalogue.wish(zlib.crc32(self._key.encode()) if seed is None else seed)
        self._steps = 0
        self._home()
        rules = "Buy what the customer wants. Actions: search[words] on the start page, click[what a page offers]."
        return f"{rules}\n\nCustomer: {self._wish.text}\n\n{self._page()}", self._offer()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        out = self._steps >= self._max_steps
        found = ACTION.findall(action)
        verb, what = (found[-1][0].lower(), found[-1][1].strip().lower()) if found else ("", "")
        if verb == "click" and what == "buy now" and self._item is not None:
            reward = score(self._wish, self._item, self._chosen)
            return f"You bought {self._item.title}.", reward, True, False, {"bought": self._item.id}
        known = self._search(what) if verb == "search" else verb == "click" and self._click(what)
        said = "" if known else "That is not possible here.\n\n"
        return said + self._page(), 0.0, False, out, self._offer() | ({} if known else {"invalid": True})

    def _home(self) -> None:
        self._results: list[Product] | None = None
        self._item: Product | None = None
        self._chosen: dict[str, str] = {}
        self._first = 0
        self._detail = ""

    def _search(self, query: str) -> bool:
        if self._results is not None or not words(query):
            return False
        self._results = self._catalogue.search(query)
        return True

    def _click(self, what: str) -> bool:
        """Whether the page offers it."""
        if what not in self._buttons():
            return False
        match what:
            case "back to search":
                self._home()
            case "next >" | "< prev" if self._item is None:
                self._first += PAGE if what == "next >" else -PAGE
            case "< prev":
                self._item = None if not self._detail else self._item
                self._detail = ""
            case _ if what in DETAILS:
                self._detail = what
            case _ if self._item is None:
                self._item, self._chosen = self._catalogue.by_id[what], {}
            case _:
                self._chosen |= {name: what for name, values in self._item.options.items() if what in values}
        return True

    def _buttons(self) -> list[str]:
        if self._results is None:
            return []
        if self._item is None:
            shown = self._results[self._first : self._first + PAGE]
            more = ["next >"] if self._first + PAGE < len(self._results) else []
            return ["back to search", *(["< prev"] if self._first else []), *more, *(p.id.lower() for p in shown)]
        if self._detail:
            return ["back to search", "< prev"]
        values = [value for options in self._item.options.values() for value in options]
        return ["back to search", "< prev", *DETAILS, *dict.fromkeys(values), "buy now"]

    def _offer(self) -> dict[str, Any]:
        searches = [f"search[{self._wish.product.kind}]"] if self._results is None else []
        return {"actions": [*searches, *(f"click[{button}]" for button in self._buttons())]}

    def _page(self) -> str:
        if self._results is None:
            return "Start page. [Search]"
        buttons = " ".join(f"[{button}]" for button in self._buttons())
        if self._item is None:
            shown = self._results[self._first : self._first + PAGE]
            lines = [f"[{p.id.lower()}] {p.title}, {p.price:.2f} dollars" for p in shown]
            head = f"Results {self._first + 1} to {self._first + len(shown)} of {len(self._results)}"
            return "\n".join([head if shown else "Nothing found", *lines, buttons])
        item = self._item
        if self._detail == "attributes":
            return f"{item.title}: {', '.join(item.attributes)}\n{buttons}"
        if self._detail:
            return f"{item.title}, from our {item.category}.\n{buttons}"
        options = [f"{name}: {' '.join(f'[{v}]' for v in values)}" for name, values in item.options.items()]
        chosen = ", ".join(f"{name} {value}" for name, value in self._chosen.items()) or "nothing"
        return "\n".join([f"{item.title}, {item.price:.2f} dollars", *options, f"Chosen: {chosen}", buttons])


class Shop:
    """Opens shops over one catalogue of `products`, made from `catalogue_seed`. The seed decides the wish; without
    one the key does.
    """

    blocking = False

    def __init__(self, category: str, *, products: int = 1000, catalogue_seed: int = 0, max_steps: int = 30) -> None:
        if category != "all" and category not in KINDS:
            raise UnknownEnv(f"shop:{category} is none of {', '.join(['shop:all', *(f'shop:{k}' for k in KINDS)])}")
        if not isinstance(products, int) or products < 1:
            raise UnknownEnv(f"shop:{category} has {products!r} products; give it an integer of at least 1")
        self._catalogue = Catalogue(products, catalogue_seed, category)
        self._max_steps = max_steps

    def __call__(self, key: str) -> ShopEnv:
        return ShopEnv(self._catalogue, key, self._max_steps)
