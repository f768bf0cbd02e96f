"""Gymnasium's toy-text states in words: how each looks, and what its actions are called.

Invariant: every state of each has its own text (test_envmanager_gymnasium.py::test_states_are_told_apart).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

SEATS = ("Red", "Green", "Yellow", "Blue")


class Text(NamedTuple):
    """`describe(env, observation)` is what the policy sees; `rules` come before the first observation."""

    rules: str
    actions: tuple[str, ...]
    describe: Callable[[Any, Any], str]


def _frozen_lake(env: Any, state: Any) -> str:
    rows = [[cell.decode() for cell in row] for row in env.desc]
    row, column = divmod(int(state), env.ncol)
    rows[row][column] = "P"
    return "\n".join("".join(cells) for cells in rows)


def _cliff_walking(env: Any, state: Any) -> str:
    height, width = env.shape
    cells = [["C" if env._cliff[row, column] else "." for column in range(width)] for row in range(height)]
    cells[-1][-1] = "G"
    row, column = divmod(int(state), width)
    cells[row][column] = "P"
    return "\n".join("".join(row) for row in cells)


def _taxi(env: Any, state: Any) -> str:
    row, column, passenger, destination = env.decode(int(state))
    picture = [[cell.decode() for cell in line] for line in env.desc]
    picture[row + 1][2 * column + 1] = "T"
    where = "in the taxi" if passenger == 4 else f"at {SEATS[passenger]}"
    lines = ["".join(line) for line in picture]
    return "\n".join(
        [*lines, f"Taxi T is in row {row}, column {column}. Passenger {where}, to {SEATS[destination]}."]
    )


def _blackjack(env: Any, state: Any) -> str:
    total, dealer, usable = (int(part) for part in state)
    return f"Your hand counts {total}{', with a usable ace' if usable else ''}. The dealer shows {dealer}."


FROZEN_LAKE = Text(
    "Walk from S to G over frozen cells F and avoid the holes H. You are P.",
    ("left", "down", "right", "up"),
    _frozen_lake,
)
CLIFF_WALKING = Text(
    "Walk to G and avoid the cliff C, which sends you back to the start. You are P.",
    ("up", "right", "down", "left"),
    _cliff_walking,
)
TEXTS = {
    "FrozenLake": FROZEN_LAKE,
    "FrozenLake8x8": FROZEN_LAKE,
    "CliffWalking": CLIFF_WALKING,
    "CliffWalkingSlippery": CLIFF_WALKING,
    "Taxi": Text(
        "Drive the taxi T to the passenger, pick up, drive to the destination, drop off. | is a wall, : is not.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
        _taxi,
    ),
    "Blackjack": Text(
        "Get closer to 21 than the dealer without going over.",
        ("stick", "hit"),
        _blackjack,
    ),
}


def numbered(count: int) -> Text:
    """Any other discrete environment: states and actions by number."""
    return Text("", tuple(str(n) for n in range(count)), lambda env, state: f"State: {state}")
