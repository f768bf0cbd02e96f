"""The training side: the time that a train step, a publication and a checkpoint take.

A train step passes every token of the batch through the model: the update is a forward and a backward pass of twice
the work, and a forward pass each is spent on the reference model, on the proximal log-probabilities and on computing
activations again, where the configuration has them. Attention is counted by the square of each sequence's length.
Invariant: the time is the work over `gpus x peak x reachable part`
(tests/rollart/test_rollart_simulate_trainer.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from envmanager import Trajectory
from llmproxy.sim import Shape
from rollart.pipeline.ports import Push, Trained
from rollart.simulate.engines import Busy
from rollart.simulate.links import Link
from samplebuffer import Batch

# bf16 weights, and in float32 their copy, two moments and the gradient.
_STATE_BYTES = 2 + 4 + 8 + 4


class Passes(Struct, frozen=True):
    """How often the work of a forward pass is done."""

    reference: bool = True
    proximal: bool = True
    recompute: bool = True

    @property
    def count(self) -> int:
        return 3 + self.reference + self.proximal + self.recompute


def forward_flops(shape: Shape, lengths: Iterable[int]) -> float:
    """Operations of a forward pass over sequences of these lengths, causal attention."""
    tokens = squares = 0.0
    for length in lengths:
        tokens += length
        squares += float(length) * length
    attention = 2.0 * shape.layers * shape.heads * shape.head_dim * squares
    return 2.0 * (shape.active or shape.parameters) * tokens + attention


def sequence_lengths(trajectory: Trajectory) -> list[int]:
    """The tokens of each context segment."""
    lengths: list[int] = []
    for turn in trajectory.turns:
        tokens = len(turn.prompt_ids) + len(turn.token_ids)
        if turn.new_segment or not lengths:
            lengths.append(tokens)
        else:
            lengths[-1] += tokens
    return lengths


class Rates(Struct, frozen=True):
    """What the devices reach: operations a second of all together, and seconds of each other thing."""

    flops: float
    swap_s: float = 0.0
    """To load the trainer's state and put the engines' weights away, or back, where both share devices."""
    step_s: float = 0.0
    """Of a train step, whatever its batch."""
    save_s: float = 0.0


def swap_seconds(shape: Shape, gpus: int, tensor_parallel: int, host_bytes_s: float) -> float:
    """One change between engines and trainer on the same devices: weights of one out, state of the other in."""
    return shape.parameters * (2.0 / tensor_parallel + _STATE_BYTES / gpus) / host_bytes_s


class SimTrainer:
    """Stands where the trainer stands. Its log-probabilities are what simulated engines say: minus the position."""

    def __init__(
        self,
        shape: Shape,
        rates: Rates,
        passes: Passes,
        push: Link | None,
        work: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`push` is None where weights are broadcast; `work` takes the seconds of a train step."""
        self.version = 0
        self.busy = Busy()
        self.trained_tokens = 0
        self._shape = shape
        self._rates = rates
        self._passes = passes
        self._push = push
        self._work = work

    @property
    def nbytes(self) -> float:
        """Of the weights that are published."""
        return self._shape.parameters * self._shape.bytes_each

    def seconds(self, lengths: Sequence[int]) -> float:
        """Of a train step over sequences of these lengths, without the change of devices."""
        return self._passes.count * forward_flops(self._shape, lengths) / self._rates.flops + self._rates.step_s

    async def train_step(self, batch: Batch, step: int) -> Trained:
        lengths = [length for sample in batch.samples for length in sequence_lengths(sample.payload)]
        self.busy.enter()
        try:
            await self._work(self.seconds(lengths) + 2 * self._rates.swap_s)
        finally:
            self.busy.leave()
        self.version += 1
        self.trained_tokens += sum(lengths)
        return Trained(self.version, {"batch_tokens": float(sum(lengths))})

    async def publish(self, version: int) -> Push:
        clock = asyncio.get_running_loop().time
        start = clock()
        if self._push is not None:
            await self._push.carry(self.nbytes)
        return Push(version, clock() - start, int(self.nbytes), f"{version:08x}")

    async def logprobs(
        self, prompts: list[list[int]], tokens: list[list[int]], allowed: Sequence[int] | None
    ) -> list[list[float]]:
        return [[-float(position) for position in range(len(row))] for row in tokens]

    async def save(self, folder: Path) -> None:
        await asyncio.sleep(self._rates.save_s)
