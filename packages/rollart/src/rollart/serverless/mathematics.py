"""Answers of mathematics tasks, compared by rule: exactly as rational numbers, else as normalized text.

Test: tests/rollart/test_rollart_serverless_rewards.py.
"""

from __future__ import annotations

import re
from fractions import Fraction

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_SAID = re.compile(r"(?:final answer|the answer|answer)(?:\s++is)?\s*+[:=]?\s*+([^\n]+)", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:\s*/\s*\d+)?%?")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]+)\}\s*\{([^{}]+)\}")
# Longer numbers are no answers, and costly to compare; longer texts are no numbers, and costly to look through.
_MOST_DIGITS, _LONGEST = 200, 2000


def answer_in(text: str) -> str:
    """The answer that a solution gives: its last \\boxed{...}, else what follows "answer", else its last number."""
    boxes = list(_BOXED.finditer(text))
    if boxes:
        return _braced(text, boxes[-1].end())
    said = _SAID.findall(text)
    if not said:
        return _last_number(text)
    words = str(said[-1]).strip().rstrip(".")
    # "42 apples" says 42; "x+1" is no number, and is taken as it is.
    return _last_number(words) if re.match(_NUMBER, words) else words


def _last_number(text: str) -> str:
    numbers = _NUMBER.findall(text)
    return str(numbers[-1]).rstrip(".") if numbers else ""


def _braced(text: str, start: int) -> str:
    """What is inside the brace that opened before `start`; nothing when it never closes."""
    depth = 1
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at]
    return ""


def number_of(text: str) -> Fraction | None:
    """The rational number that a text says, in digits, as a fraction or a percentage; None when it says none."""
    if len(text) > _LONGEST:
        return None
    plain = _FRACTION.sub(r"(\1)/(\2)", text)
    plain = re.sub(r"[\s$,()]|\\[!,;:]|\\left|\\right|\\text\{[^}]*\}", "", plain).rstrip(".")
    percent = plain.endswith(("%", "\\%"))
    plain = plain.removesuffix("%").removesuffix("\\")
    if len(plain) > _MOST_DIGITS or not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(/[-+]?\d+\.?\d*)?", plain):
        return None
    above, _, below = plain.partition("/")
    if below and not Fraction(below):
        return None
    value = Fraction(above) / Fraction(below or 1)
    return value / 100 if percent else value


def same(given: str, wanted: str) -> bool:
    """Whether two answers say the same; an empty one never does."""
    mine, theirs = number_of(given), number_of(wanted)
    if mine is not None and theirs is not None:
        return mine == theirs
    return bool(_normal(given)) and _normal(given) == _normal(wanted)


def _normal(text: str) -> str:
    text = re.sub(r"\\(?:left|right|text|mathrm|[!,;: ])|[\s${}]", "", text)
    return text.rstrip(".").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").lower()
