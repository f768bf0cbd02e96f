"""Tasks: where keys, environments and rewards of a training run come from."""

from rollart.config.tasks import TaskConfig
from rollart.tasks.environment import EnvironmentTask
from rollart.tasks.make import check_tasks, make_tasks
from rollart.tasks.mixture import Mixture, split
from rollart.tasks.task import Task

__all__ = ["EnvironmentTask", "Mixture", "Task", "TaskConfig", "check_tasks", "make_tasks", "split"]
