"""How long a step of an engine takes. A step makes one token for every decoding sequence and may prefill a chunk.

`Rates` says it in tokens a second; `Roofline` derives it from what a device can do and what a model asks for: matrix
products are bound by reading the weights or by arithmetic, whichever takes longer, attention in decoding by reading
the resident keys and values (tests/llmproxy/test_llmproxy_speed.py checks both against the plain formulas).
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple, Protocol

from msgspec import Struct


class Pace(NamedTuple):
    """A step takes `base + slope * (tokens resident in decoding sequences)` seconds and prefills `chunk` tokens."""

    base: float
    slope: float
    chunk: float


class Speed(Protocol):
    @property
    def capacity(self) -> float:
        """Tokens whose keys and values fit."""
        ...

    @property
    def batch(self) -> float:
        """The most sequences that run at once."""
        ...

    @property
    def together(self) -> float:
        """Prompts are prefilled together up to so many tokens; one alone may be longer."""
        ...

    def pace(self, decoding: int, prefilling: float, depth: float) -> Pace:
        """With so many sequences decoding and tokens to prefill, those at a mean `depth` in their contexts."""
        ...

    def transfer(self, tokens: float) -> float:
        """Seconds to take so many tokens' keys and values from another worker."""
        ...


class Rates(Struct, frozen=True):
    """Tokens a second: prompts one after the other at `prefill`, beside them each sequence at
    `min(decode, decode_total / batch)`; caches from other workers arrive at `handoff`.
    """

    prefill: float = 20_000.0
    decode: float = 50.0
    decode_total: float = 2_000.0
    handoff: float = inf
    capacity: float = inf
    batch: float = inf
    together: float = 0.0

    def pace(self, decoding: int, prefilling: float, depth: float) -> Pace:
        base = max(1.0 / self.decode, decoding / self.decode_total)
        return Pace(base, 0.0, self.prefill * base)

    def transfer(self, tokens: float) -> float:
        return tokens / self.handoff


class Device(Struct, frozen=True):
    """One accelerator: 16-bit operations and bytes of memory a second, bytes of memory, bytes a second to the other
    devices of its worker (`link`) and to other workers (`network`).
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    link: float
    network: float = 50e9


H800 = Device("H800", flops=989.5e12, bandwidth=3.35e12, memory=80e9, link=400e9)
H20 = Device("H20", flops=148e12, bandwidth=4.0e12, memory=96e9, link=900e9)


class Shape(Struct, frozen=True):
    """What a transformer asks for. `active` parameters work on a token, all of `parameters` are in memory."""

    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    active: float = 0.0
    bytes_each: float = 2.0

    @property
    def kv_bytes(self) -> float:
        """Keys and values of a token."""
        return 2.0 * self.layers * self.kv_heads * self.head_dim * self.bytes_each

    def touched(self, tokens: float) -> float:
        """Bytes of weights that a step over so many tokens reads; experts that no token chose are not read."""
        if not self.active:
            return self.parameters * self.bytes_each
        idle = (1.0 - self.active / self.parameters) ** max(tokens, 1.0)
        return self.parameters * self.bytes_each * (1.0 - idle)


class Roofline(Struct, frozen=True):
    """`tensor_parallel` devices with one model.

    `compute` and `memory` are the reachable parts of the peaks, `usable` that of the memory. A step has at most
    `chunk` tokens of `batch` sequences; `overhead` seconds of it go to launching it, `hop` to each sum over devices.
    """

    device: Device
    shape: Shape
    tensor_parallel: int = 1
    compute: float = 0.6
    memory: float = 0.8
    usable: float = 0.9
    chunk: int = 8_192
    overhead: float = 2e-3
    hop: float = 1e-5
    batch: float = 256

    @property
    def capacity(self) -> float:
        room = self.device.memory * self.usable * self.tensor_parallel - self.shape.parameters * self.shape.bytes_each
        if room <= 0:
            raise ValueError(
                f"{self.tensor_parallel} x {self.device.name} cannot hold {self.shape.parameters:.3g} parameters; "
                "raise tensor_parallel"
            )
        return room / self.shape.kv_bytes

    @property
    def together(self) -> float:
        return self.chunk

    def pace(self, decoding: int, prefilling: float, depth: float) -> Pace:
        shape, devices = self.shape, self.tensor_parallel
        chunk = min(prefilling, max(1.0, self.chunk - decoding)) if prefilling else 0.0
        tokens = decoding + chunk
        flops = self.device.flops * self.compute * devices
        bandwidth = self.device.bandwidth * self.memory * devices
        products = max(shape.touched(tokens) / bandwidth, 2.0 * (shape.active or shape.parameters) * tokens / flops)
        attention = 4.0 * shape.layers * shape.heads * shape.head_dim * chunk * depth / flops
        return Pace(self.overhead + products + attention + self._reduce(tokens), shape.kv_bytes / bandwidth, chunk)

    def transfer(self, tokens: float) -> float:
        return tokens * self.shape.kv_bytes / (self.device.network * self.tensor_parallel)

    def _reduce(self, tokens: float) -> float:
        """Two sums over devices in every layer."""
        if self.tensor_parallel == 1:
            return 0.0
        hidden = self.shape.heads * self.shape.head_dim * self.shape.bytes_each
        moved = 2.0 * hidden * tokens * (self.tensor_parallel - 1) / self.tensor_parallel
        return 2.0 * self.shape.layers * (self.hop + moved / self.device.link)
