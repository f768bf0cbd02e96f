"""Models that are made locally, so that a first run needs no download."""

from rollart.models.tiny import make_tiny_qwen3

__all__ = ["make_tiny_qwen3"]
