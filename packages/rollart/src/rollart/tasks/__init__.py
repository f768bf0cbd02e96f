"""Tasks: where keys, environments and rewards of a training run come from."""

from rollart.tasks.make import make_tasks
from rollart.tasks.mixture import Mixture, split
from rollart.tasks.task import Task

__all__ = ["Mixture", "Task", "make_tasks", "split"]
