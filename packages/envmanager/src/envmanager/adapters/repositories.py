"""Small repositories with a bug and tests that show it: what a software engineer's episode starts from.

Invariant: as made, the tests fail; with the one right line back, they pass
(test_envmanager_swe.py::test_every_repository_can_be_repaired).
"""

import random
from typing import NamedTuple

SHAPES = '''"""Areas and boxes."""


def area(width, height):
    if width < 0 or height < 0:
        raise ValueError("sizes are not negative")
    return width * height


def inside(point, box):
    x, y = point
    left, top, right, bottom = box
    return left <= x <= right and top <= y <= bottom


def bounding(points):
    xs = [x for x, _ in points]
    ys = [y for _, y in points]
    return min(xs), min(ys), max(xs), max(ys)
'''
SHAPES_TESTS = """import unittest

from shapes import area, bounding, inside


class Shapes(unittest.TestCase):
    def test_area(self):
        self.assertEqual(area(3, 4), 12)
        self.assertEqual(area(0, 4), 0)
        self.assertRaises(ValueError, area, -1, 2)

    def test_inside(self):
        self.assertTrue(inside((2, 2), (0, 0, 2, 2)))
        self.assertTrue(inside((0, 1), (0, 0, 2, 2)))
        self.assertFalse(inside((3, 1), (0, 0, 2, 2)))

    def test_bounding(self):
        self.assertEqual(bounding([(1, 5), (3, 2), (2, 9)]), (1, 2, 3, 9))
"""
TEXTS = '''"""Words and lines."""


def wrap(text, width):
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return lines + [line] if line else lines


def counts(text):
    found = {}
    for word in text.lower().split():
        found[word] = found.get(word, 0) + 1
    return found


def palindrome(text):
    letters = [c for c in text.lower() if c.isalnum()]
    return letters == letters[::-1]
'''
TEXTS_TESTS = """import unittest

from texts import counts, palindrome, wrap


class Texts(unittest.TestCase):
    def test_wrap(self):
        self.assertEqual(wrap("aa bb cc", 5), ["aa bb", "cc"])
        self.assertEqual(wrap("", 5), [])
        self.assertEqual(wrap("aa bbb", 5), ["aa", "bbb"])

    def test_counts(self):
        self.assertEqual(counts("a B b"), {"a": 1, "b": 2})

    def test_palindrome(self):
        self.assertTrue(palindrome("Never odd, or even"))
        self.assertFalse(palindrome("ab"))
"""
BANK = '''"""Accounts, in cents."""


class Account:
    def __init__(self, balance=0):
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("deposit something")
        self.balance += amount
        self.history.append(amount)

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough")
        self.balance -= amount
        self.history.append(-amount)


def transfer(source, target, amount):
    source.withdraw(amount)
    target.deposit(amount)
'''
BANK_TESTS = """import unittest

from bank import Account, transfer


class Bank(unittest.TestCase):
    def test_deposit(self):
        account = Account()
        account.deposit(5)
        self.assertEqual((account.balance, account.history), (5, [5]))
        self.assertRaises(ValueError, account.deposit, 0)

    def test_withdraw(self):
        account = Account(5)
        account.withdraw(5)
        self.assertEqual((account.balance, account.history), (0, [-5]))
        self.assertRaises(ValueError, account.withdraw, 1)

    def test_transfer(self):
        one, other = Account(9), Account()
        transfer(one, other, 4)
        self.assertEqual((one.balance, other.balance), (5, 4))
"""


class Project(NamedTuple):
    """A module, its tests, and the bugs that it can get: what stands there, and what wrongly replaces it."""

    name: str
    source: str
    tests: str
    bugs: tuple[tuple[str, str], ...]


PROJECTS = (
    Project(
        "shapes",
        SHAPES,
        SHAPES_TESTS,
        (
            ("width * height", "width + height"),
            ("left <= x <= right", "left <= x < right"),
            ("width < 0 or", "width <= 0 or"),
            ("min(xs), min(ys), max(xs), max(ys)", "min(xs), max(xs), min(ys), max(ys)"),
        ),
    ),
    Project(
        "texts",
        TEXTS,
        TEXTS_TESTS,
        (
            ("len(line) + 1 + len(word) > width", "len(line) + len(word) > width"),
            ("found.get(word, 0) + 1", "found.get(word, 1) + 1"),
            ("text.lower().split()", "text.upper().split()"),
            ("if c.isalnum()", "if c.isalpha() or c == ','"),
        ),
    ),
    Project(
        "bank",
        BANK,
        BANK_TESTS,
        (
            ("amount <= 0", "amount < 0"),
            ("self.balance -= amount", "self.balance -= amount + 1"),
            ("amount > self.balance", "amount >= self.balance"),
            ("target.deposit(amount)", "source.deposit(amount)"),
        ),
    ),
)


class Repository(NamedTuple):
    """Files by path; `tests` is the path of those that must pass; `right` replaces `wrong` in `module`."""

    files: dict[str, str]
    module: str
    tests: str
    wrong: str
    right: str


def repository(name: str, seed: int) -> Repository:
    """Of the named project, or of any with `any`; the seed chooses the bug."""
    rng = random.Random(seed)
    project = rng.choice([project for project in PROJECTS if name in ("any", project.name)])
    right, wrong = rng.choice(project.bugs)
    module, tests = f"{project.name}.py", f"test_{project.name}.py"
    readme = f"# {project.name}\n\nRun the tests with `python -m unittest`.\n"
    files = {module: project.source.replace(right, wrong, 1), tests: project.tests, "README.md": readme}
    return Repository(files, module, tests, wrong, right)


NAMES = ("any", *(project.name for project in PROJECTS))
