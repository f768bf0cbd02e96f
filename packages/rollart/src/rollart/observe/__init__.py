"""Recording and showing what a run does: metrics, step time, trace, live dashboard."""

from rollart.observe.dashboard import Dashboard, Snapshot, snapshot
from rollart.observe.errors import ClockMisuse, CorruptFile, InvalidMetric, MissingMetric
from rollart.observe.metrics import LEDGER_COLUMNS, REQUIRED, MetricsWriter, Row, histogram, read_metrics
from rollart.observe.runinfo import RunInfo, read_run, write_run
from rollart.observe.steptime import StepClock, StepTime
from rollart.observe.trace import Trace, read_trace

__all__ = [
    "LEDGER_COLUMNS",
    "REQUIRED",
    "ClockMisuse",
    "CorruptFile",
    "Dashboard",
    "InvalidMetric",
    "MetricsWriter",
    "MissingMetric",
    "Row",
    "RunInfo",
    "Snapshot",
    "StepClock",
    "StepTime",
    "Trace",
    "histogram",
    "read_metrics",
    "read_run",
    "read_trace",
    "snapshot",
    "write_run",
]
