"""The gateway process: `llmproxy serve`, or `Gateway` in a program of your own."""

from .config import GatewayConfig
from .server import Gateway

__all__ = ["Gateway", "GatewayConfig"]
