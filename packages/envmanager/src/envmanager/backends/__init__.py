"""Where environments live: each backend is a factory whose environments run elsewhere than on the loop.

Pods are in `envmanager.backends.kubernetes`, which needs its extra.
"""

from envmanager.backends.http import HTTPBackend
from envmanager.backends.routed import Routed
from envmanager.backends.subprocess import SubprocessBackend

__all__ = ["HTTPBackend", "Routed", "SubprocessBackend"]
