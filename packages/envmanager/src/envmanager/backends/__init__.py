"""Where environments live: each backend is a factory whose environments run elsewhere than on the loop."""

from envmanager.backends.http import HTTPBackend
from envmanager.backends.subprocess import SubprocessBackend

__all__ = ["HTTPBackend", "SubprocessBackend"]
