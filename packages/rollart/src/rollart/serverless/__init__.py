"""Functions behind HTTP whose worker processes come with demand and go without it; rewards that ship with them."""

from rollart.serverless.errors import (
    BadCall,
    BadFunction,
    Busy,
    CallTimeout,
    Draining,
    FunctionFailed,
    KeyReused,
    ServerlessError,
    WorkerLost,
)
from rollart.serverless.server import FunctionServer
from rollart.serverless.settings import Settings

__all__ = [
    "BadCall",
    "BadFunction",
    "Busy",
    "CallTimeout",
    "Draining",
    "FunctionFailed",
    "FunctionServer",
    "KeyReused",
    "ServerlessError",
    "Settings",
    "WorkerLost",
]
