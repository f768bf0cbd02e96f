"""The reward of the chaos runs, served by `rollart serve-reward`: a function of what was played and nothing else."""

import zlib

from envmanager import Trajectory


def score(trajectory: Trajectory) -> float:
    return float(zlib.crc32("".join(turn.action for turn in trajectory.turns).encode()) % 2)
