"""The buffer in a Ray actor, for rollouts and trainers in many processes. Needs `rollart-samplebuffer[ray]`."""

from samplebuffer.ray.client import RayBuffer
from samplebuffer.ray.ticket import RayTicket
from samplebuffer.ray.wire import TicketInfo

__all__ = ["RayBuffer", "RayTicket", "TicketInfo"]
