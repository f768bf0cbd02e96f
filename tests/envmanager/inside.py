"""An environment that tries to get out: each action is a Python expression, and its value the observation."""

import glob
import os
import socket
import subprocess
from typing import Any

ALLOWED = {"glob": glob, "os": os, "socket": socket, "subprocess": subprocess, "open": open}


class Inside:
    def __init__(self, key: str) -> None:
        self.key = key

    def reset(self, seed: int | None = None) -> Any:
        return "inside", {"pid": os.getpid()}

    def step(self, action: str) -> Any:
        try:
            value = eval(action, ALLOWED)
        except OSError as error:
            value = type(error).__name__
        return str(value), 0.0, False, False, {}
