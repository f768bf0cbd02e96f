"""What can go wrong in a simulation itself."""

from __future__ import annotations

from rollart.errors import RollArtError


class Stalled(RollArtError):
    """Raised when the simulated run makes no progress for longer than `simulate.stall_s`."""


class Broken(RollArtError):
    """Raised when a simulated run breaks an invariant: the ledger, the bound on staleness, or its own ending."""
