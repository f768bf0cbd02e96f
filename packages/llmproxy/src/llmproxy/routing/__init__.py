"""Which worker takes a request. A policy is one small object in one file, behind the protocol `Router`."""

from .affinity import AffinityRouter
from .auto import AutoAffinityRouter
from .cache_aware import CacheAwareRouter
from .prefix import PrefixIndex
from .router import Router, least_loaded, less_loaded
from .spread import PowerOfTwoRouter, RoundRobinRouter, StickyRouter

__all__ = [
    "AffinityRouter",
    "AutoAffinityRouter",
    "CacheAwareRouter",
    "PowerOfTwoRouter",
    "PrefixIndex",
    "RoundRobinRouter",
    "Router",
    "StickyRouter",
    "least_loaded",
    "less_loaded",
]
