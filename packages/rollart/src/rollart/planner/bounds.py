"""Closed forms for how long generation and a step take, and the split that is best under them.

K workers that each make one sample at a time generate N samples a step; a sample takes `mean` seconds, the longest
`longest`; training takes `train` seconds of one worker for each sample and pass. Whatever order the samples come in,
as long as no worker stands idle while one waits, the last one starts before `N mean / K` and so ends before
`N mean / K + longest`. With alpha, `alpha + 1` batches share one such end.

The simulator obeys them where their premises hold, fixed capacity and nothing aborted
(tests/rollart/test_rollart_planner_bounds.py).
"""

from __future__ import annotations

from msgspec import Struct


class Load(Struct, frozen=True, kw_only=True):
    """What a step asks for. Seconds of one worker; `passes` is how often each sample is trained on."""

    workers: float
    samples: float
    mean: float
    longest: float
    train: float
    passes: float = 1.0

    @property
    def generating(self) -> float:
        """Seconds of all workers together that generation takes when nothing waits."""
        return self.samples * self.mean / self.workers

    @property
    def training(self) -> float:
        """The same of training."""
        return self.samples * self.passes * self.train / self.workers


def sync_generation(load: Load) -> float:
    """Seconds a sample, at most, when each batch is waited for: `mean / K + longest / N`."""
    return load.mean / load.workers + load.longest / load.samples


def async_generation(load: Load, alpha: float) -> float:
    """The same when `alpha + 1` batches are under way: `mean / K + longest / ((alpha + 1) N)`."""
    return load.mean / load.workers + load.longest / ((alpha + 1) * load.samples)


def sync_step(load: Load) -> float:
    """Seconds a step, at most, when all workers generate and then train."""
    return load.generating + load.training + load.longest


def async_step(load: Load, alpha: float, share: float) -> float:
    """Seconds a step, at most, when a `share` of the workers trains while the others generate."""
    assert 0 < share < 1, f"share is {share}; both sides need workers"
    generate = load.generating / (1 - share) + load.longest / ((alpha + 1) * (1 - share))
    return max(generate, load.training / share)


def best_share(load: Load, alpha: float) -> float:
    """The share of the workers that should train: there both sides take equally long."""
    return load.training / best_step(load, alpha)


def best_step(load: Load, alpha: float) -> float:
    """Seconds a step at that share."""
    return load.generating + load.training + load.longest / (alpha + 1)


def most_at_full_width(load: Load) -> float:
    """The largest speed-up of generation when there are as many workers as samples."""
    return (load.longest + load.mean) / load.mean


def most_at_large_alpha(load: Load) -> float:
    """The largest speed-up of a step as alpha grows."""
    return 1 + load.longest / (load.generating + load.training)
