"""A generated shop: products with a title, a category, attributes, options and a price; search over them; and the
wishes that customers have.

Invariant: a catalogue follows from its seed and size, and each wish can be met by the product that it was made from
(test_envmanager_shop.py::test_every_wish_can_be_met).
"""

import random
import re
from collections import Counter

import msgspec

WORD = re.compile(r"[a-z0-9]+")
COLORS = ("black", "white", "navy blue", "red", "forest green", "beige", "grey", "pink")
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "shirts": (
        ("polo shirt", "dress shirt", "t-shirt", "hoodie"),
        ("machine washable", "long sleeve", "slim fit", "cotton blend", "moisture wicking", "wrinkle free"),
        {"color": COLORS, "size": ("small", "medium", "large", "x-large")},
    ),
    "shoes": (
        ("running shoes", "hiking boots", "sandals", "loafers"),
        ("rubber sole", "memory foam", "water resistant", "arch support", "non slip", "vegan leather"),
        {"color": COLORS, "size": ("7", "8", "9", "10", "11", "12")},
    ),
    "furniture": (
        ("coffee table", "bookshelf", "office chair", "nightstand"),
        ("solid wood", "easy assembly", "space saving", "steel frame", "scratch resistant", "storage drawer"),
        {"color": ("oak", "walnut", "white", "black"), "size": ("narrow", "standard", "wide")},
    ),
    "snacks": (
        ("trail mix", "protein bars", "dried mango", "popcorn"),
        ("gluten free", "low sugar", "non gmo", "high protein", "dairy free", "keto friendly"),
        {"flavor": ("original", "sea salt", "chocolate", "honey", "spicy"), "pack": ("1", "6", "12", "24")},
    ),
    "electronics": (
        ("bluetooth speaker", "wireless mouse", "desk lamp", "power bank"),
        ("fast charging", "long lasting battery", "noise cancelling", "usb c", "compact design", "dimmable"),
        {"color": ("black", "white", "silver", "blue"), "warranty": ("1 year", "2 years", "3 years")},
    ),
}
MAKERS = ("Aldo", "Brightway", "Cascade", "Dunmore", "Everly", "Fenwick", "Graham", "Hartley", "Iverson", "Juniper")


class Product(msgspec.Struct, frozen=True):
    """`options` are the values to choose from, by name."""

    id: str
    title: str
    category: str
    kind: str
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]
    price: float


class Wish(msgspec.Struct, frozen=True):
    """What a customer wants; `product` is one that meets it."""

    product: Product
    attributes: tuple[str, ...]
    options: dict[str, str]
    price: float

    @property
    def text(self) -> str:
        chosen = ", ".join(f"{name}: {value}" for name, value in self.options.items())
        return (
            f"I am looking for {self.product.kind} that are {', '.join(self.attributes)}, "
            f"with {chosen}, and price lower than {self.price:.2f} dollars."
        )


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


class Catalogue:
    """`size` products, of one category or of all."""

    def __init__(self, size: int, seed: int = 0, category: str = "all") -> None:
        rng = random.Random(seed)
        categories = list(KINDS) if category == "all" else [category]
        self.products = [_product(rng, f"B{number:06d}", rng.choice(categories)) for number in range(size)]
        self.by_id = {product.id.lower(): product for product in self.products}
        self._bags = [Counter(words(" ".join([p.title, p.category, *p.attributes]))) for p in self.products]

    def search(self, query: str, limit: int = 50) -> list[Product]:
        """Those that share words with the query, those that share the most first."""
        asked = set(words(query))
        scores = [sum(bag[word] > 0 for word in asked) for bag in self._bags]
        ranked = sorted((-score, index) for index, score in enumerate(scores) if score)
        return [self.products[index] for _, index in ranked[:limit]]

    def wish(self, seed: int) -> Wish:
        rng = random.Random(seed)
        product = rng.choice(self.products)
        attributes = tuple(sorted(rng.sample(product.attributes, k=2)))
        options = {name: rng.choice(values) for name, values in product.options.items()}
        return Wish(product, attributes, options, round(product.price + rng.choice((5, 10, 20, 40)), 2))


def _product(rng: random.Random, id: str, category: str) -> Product:
    kinds, attributes, options = KINDS[category]
    kind = rng.choice(kinds)
    has = tuple(sorted(rng.sample(attributes, k=3)))
    offered = {name: tuple(rng.sample(values, k=rng.randint(2, len(values)))) for name, values in options.items()}
    price = round(rng.uniform(8, 180), 2)
    return Product(id, f"{rng.choice(MAKERS)} {kind} {has[0]}", category, kind, has, offered, price)
