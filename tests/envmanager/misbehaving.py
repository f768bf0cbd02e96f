"""Environments and rewards that misbehave in every way, to be run in processes of their own."""

import asyncio
import math
import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np

from envmanager import Trajectory

DAEMON = "setsid sh -c 'echo $$; exec sleep 1000' &"


class Fine:
    """Ends after two steps; tells in which process."""

    task = "fine"

    def __init__(self, key: str) -> None:
        self.key = key
        self.steps = 0

    def reset(self, seed: int | None = None) -> Any:
        return f"{self.key} {seed}", {"pid": os.getpid(), "unplain": object()}

    def step(self, action: str) -> Any:
        self.steps += 1
        return f"{action} {os.getpid()}", 0.5, self.steps == 2, False, {}


class Draws(Fine):
    def reset(self, seed: int | None = None) -> Any:
        observation, info = super().reset(seed)
        return observation, info | {"numpy": float(np.random.random()), "python": random.random()}


class Slow(Fine):
    async def step(self, action: str) -> Any:
        return super().step(action)


class Bad(Fine):
    """The key says in what way."""

    def reset(self, seed: int | None = None) -> Any:
        match self.key:
            case "raises in reset":
                raise ValueError("no such level")
            case "raises what cannot be sent":
                raise ValueError("\ud800")
            case "cancels itself":
                raise asyncio.CancelledError
            case "hangs in reset":
                time.sleep(1000)
        return super().reset(seed)

    def step(self, action: str) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        match self.key:
            case "four-tuple":
                return observation, reward, terminated, truncated
            case "nan":
                return observation, math.nan, terminated, truncated, info
            case "bytes":
                return b"\xff", reward, terminated, truncated, info
            case "surrogates":
                return "\udc80", reward, terminated, truncated, info
            case "hangs":
                time.sleep(1000)
            case "deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(1000)
            case "exits":
                sys.exit(3)
            case "dies":
                print("the disk is full", flush=True)
                os._exit(7)
            case "crashes":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "memory":
                self.hoard = [bytearray(1 << 24) for _ in range(10**6)]
            case "prints":
                for _ in range(1024):
                    print("x" * (1 << 20))
            case "writes on every descriptor":
                for descriptor in range(3, 20):
                    try:
                        os.write(descriptor, b"\xff" * 64)
                    except OSError:
                        continue
        return observation, reward, terminated, truncated, info


class Forks(Fine):
    """Leaves children: one, and a daemon with a session of its own; writes their ids to the key's file."""

    def step(self, action: str) -> Any:
        child = subprocess.Popen(["sleep", "1000"])
        made = subprocess.Popen(["sh", "-c", DAEMON], stdout=subprocess.PIPE)
        assert made.stdout is not None
        pids = f"{child.pid} {made.stdout.readline().decode()}"
        with open(self.key, "w") as file:
            file.write(pids)
        if action == "hang":
            time.sleep(1000)
        return super().step(action)


def score(trajectory: Trajectory) -> float:
    match trajectory.key:
        case "raises":
            raise KeyError("no answer")
        case "hangs":
            time.sleep(1000)
        case "dies":
            os._exit(9)
        case "nan":
            return math.nan
    return trajectory.reward + os.getpid() / 1e9
