"""Models that are made locally, so that a first run needs no download."""

from rollart.models.llama import make_tiny_llama
from rollart.models.tiny import make_tiny_qwen3

__all__ = ["make_tiny_llama", "make_tiny_qwen3"]
