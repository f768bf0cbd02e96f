"""Reward clients: score one finished trajectory elsewhere than on the loop. Any async function is one too."""

from envmanager.chat import JudgeReward
from envmanager.rewards.local import LocalReward
from envmanager.rewards.pool import PoolReward
from envmanager.rewards.url import URLReward

__all__ = ["JudgeReward", "LocalReward", "PoolReward", "URLReward"]
