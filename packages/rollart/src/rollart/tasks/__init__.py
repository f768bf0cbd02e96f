"""Tasks: where keys, environments and rewards of a training run come from."""

from rollart.tasks.frozenlake import FrozenLakeGame, FrozenLakeTask

__all__ = ["FrozenLakeGame", "FrozenLakeTask"]
