"""A trajectory buffer with a hard staleness bound, whole groups, backpressure and a ledger that always balances."""

from samplebuffer.buffer import SampleBuffer
from samplebuffer.errors import (
    AlreadyStamped,
    BufferLost,
    Closed,
    Exhausted,
    InvalidConfig,
    InvalidReward,
    InvalidState,
    NotStamped,
    RemoteError,
    SampleBufferError,
    StampOutOfRange,
    Starved,
    TicketError,
    Unsavable,
    Unsendable,
    VersionWentBack,
)
from samplebuffer.prometheus import prometheus_text
from samplebuffer.state import Codec, MsgpackCodec
from samplebuffer.stats import Stats
from samplebuffer.ticket import Ticket
from samplebuffer.values import Batch, GivenUp, Group, Ledger, Sample

__all__ = [
    "AlreadyStamped",
    "Batch",
    "BufferLost",
    "Closed",
    "Codec",
    "Exhausted",
    "GivenUp",
    "Group",
    "InvalidConfig",
    "InvalidReward",
    "InvalidState",
    "Ledger",
    "MsgpackCodec",
    "NotStamped",
    "RemoteError",
    "Sample",
    "SampleBuffer",
    "SampleBufferError",
    "StampOutOfRange",
    "Starved",
    "Stats",
    "Ticket",
    "TicketError",
    "Unsavable",
    "Unsendable",
    "VersionWentBack",
    "prometheus_text",
]
