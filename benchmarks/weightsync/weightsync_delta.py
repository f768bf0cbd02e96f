"""What deltas cost and save: random changes at 1 %, and a real fine-tuning run in bf16.

python benchmarks/weightsync/weightsync_delta.py [--quick]

- Encode and apply rates on one core over 256 MiB (--quick: 64 MiB) with 1 % of the elements changed at random,
  and the size on the wire against its bound, for elements of 1, 2 and 4 bytes.
- The share of elements that a step of AdamW changes, bitwise, when a small transformer with float32 main weights is
  fine-tuned in bf16 at learning rates 1e-6 to 1e-3, and how much smaller the delta is. In place of a pretrained model
  that would have to be downloaded, it is trained here first: 400 steps at 1e-3 (--quick: 60).
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import numpy as np
from _results import Row, row, write

from weightsync import MemoryStore, Publisher, delta
from weightsync.tensors import Bytes

QUICK = "--quick" in sys.argv
SIZE = (64 if QUICK else 256) << 20
ROUNDS = 5
# Bytes on the wire at 1 % density, as a share of the full set, that must not be passed.
BOUNDS = {1: 0.023, 2: 0.017, 4: 0.014}
ENCODE_BOUND, APPLY_BOUND = 1.0, 3.0  # GB/s
STEPS = 3 if QUICK else 10


def changed(old: Bytes, width: int, rng: np.random.Generator) -> Bytes:
    new = old.copy()
    words = new.view(f"u{width}")
    where = np.flatnonzero(rng.random(words.size, dtype=np.float32) < 0.01)
    words[where] ^= rng.integers(1, 256, where.size, dtype=np.uint8)
    return new


def codec_rows(width: int) -> list[Row]:
    rng = np.random.default_rng(width)
    old, runs = rng.integers(0, 256, SIZE, dtype=np.uint8), [(width, SIZE)]
    rates: dict[str, list[float]] = {"encode": [], "apply": []}
    wire = 0
    for _ in range(ROUNDS):
        new, base = changed(old, width, rng), old.copy()
        start = time.process_time()
        parts, _ = delta.encode(runs, old, lambda start, stop, new=new: new[start:stop])  # type: ignore[misc]
        rates["encode"].append(SIZE / (time.process_time() - start) / 1e9)
        assert parts, "worth it"
        data = np.concatenate(parts)
        wire = data.size
        start = time.process_time()
        delta.apply(runs, base, data)
        rates["apply"].append(SIZE / (time.process_time() - start) / 1e9)
        assert np.array_equal(base, new) and np.array_equal(old, new), "content"
    bits = 8 * width
    size = row(f"wire at 1 % density, {bits} bit", "of full", wire / SIZE, "bound", BOUNDS[width])
    encode = row(f"encode at 1 %, {bits} bit", "GB/s a core", rates["encode"], "bound", ENCODE_BOUND)
    apply = row(f"apply at 1 %, {bits} bit", "GB/s a core", rates["apply"], "bound", APPLY_BOUND)
    ratio = BOUNDS[width] * SIZE / wire
    return [{**size, "ratio": ratio}, better(encode, ENCODE_BOUND), better(apply, APPLY_BOUND)]


def better(found: Row, bound: float | None) -> Row:
    """With the ratio to a bound that more is better than."""
    return {**found, "ratio": found["ours"] / bound if bound else None}


class Run:
    """A small transformer that has learned for a while, with float32 main weights, and goes on at some rate."""

    def __init__(self) -> None:
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.set_num_threads(1)
        torch.manual_seed(0)
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        self.model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=False))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.0)
        self.generator = torch.Generator().manual_seed(1)
        for _ in range(60 if QUICK else 400):
            self.step()

    def step(self) -> None:
        import torch

        tokens = torch.randint(0, 64, (4, 8), generator=self.generator).repeat(1, 8)
        self.model(tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Any]:
        import torch

        return {name: tensor.detach().to(torch.bfloat16) for name, tensor in self.model.named_parameters()}


async def training_rows() -> list[Row]:
    run = Run()
    found = []
    for rate in (1e-6, 1e-5, 1e-4, 1e-3):
        for group in run.optimizer.param_groups:
            group["lr"] = rate
        publisher = Publisher(MemoryStore(), encoding="delta", anchor_every=STEPS + 1)
        await publisher.publish(0, run.weights())
        for version in range(1, STEPS + 1):
            run.step()
            await publisher.publish(version, run.weights())
        pushes = list(publisher.pushes)[1:]
        densities = [push.density for push in pushes]
        smaller = [push.content_bytes / max(1, push.wire_bytes) for push in pushes]
        found.append(row(f"changed by a step, bf16, rate {rate:.0e}", "of elements", densities))
        # A pretrained model's delta was published as 110 to 170 times smaller at 1e-6.
        bound, published = (100.0, "110-170") if rate == 1e-6 else (None, None)
        size = row(f"delta smaller by, rate {rate:.0e}", "x", smaller, "bound" if bound else None, bound)
        found.append({**better(size, bound), "published": published})
    return found


if __name__ == "__main__":
    write(__file__, [each for width in BOUNDS for each in codec_rows(width)] + asyncio.run(training_rows()))
