"""Workers that take the time a device would take, on the loop's own clock: for tests and simulation at scale."""

from .speed import H20, H800, Device, Pace, Rates, Roofline, Shape, Speed
from .worker import SimWorker

__all__ = ["H20", "H800", "Device", "Pace", "Rates", "Roofline", "Shape", "SimWorker", "Speed"]
