"""Tasks: where keys, environments and rewards of a training run come from."""

from rollart.tasks.make import check_tasks, make_tasks
from rollart.tasks.mixture import Mixture, split
from rollart.tasks.task import Task

__all__ = ["Mixture", "Task", "check_tasks", "make_tasks", "split"]
