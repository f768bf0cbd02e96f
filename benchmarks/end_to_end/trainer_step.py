"""A train step beside a bare loop of transformers and torch, on the same batch: how much CPU the trainer adds.

The bare loop is what one writes without a trainer: the Hugging Face model on the padded rows, a log-softmax over its
logits, PPO's clip with an entropy bonus, AdamW, the same minibatches and micro-batches. Both start from the same
weights, take turns, and their losses must agree.

- `long answers`: no two rows alike, a vocabulary of 4096 tokens; every token is computed by both.
- `short turns`: the example's rows, one move after one observation; the trainer computes equal observations once.

    python benchmarks/end_to_end/trainer_step.py            nine rounds
    python benchmarks/end_to_end/trainer_step.py --quick    three rounds
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from rollart.algorithms import ObjectiveConfig
from rollart.models import make_tiny_qwen3
from rollart.trainers import TorchTrainer, TrainBatch, TrainerConfig
from rollart.trainers.schedule import minibatches

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "trainer_step.json"
GOAL = 1.1
CONFIG = TrainerConfig(
    minibatches=4,
    micro_tokens=16_384,
    objective=ObjectiveConfig(loss="ppo", clip_low=0.2, clip_high=0.28, entropy_coef=0.01),
)


def batch(rows: int, context: int, generated: int, vocabulary: range, contexts: int) -> TrainBatch:
    """Rows of a context, one of `contexts` different ones, and as many generated tokens or up to a third fewer."""
    random = np.random.default_rng(0)
    width = context + generated
    lengths = width - random.integers(0, max(1, generated // 3), rows)
    column = np.arange(width)
    prompts = random.choice(vocabulary, (contexts, context))[random.integers(0, contexts, rows)]
    ids = np.concatenate([prompts, random.choice(vocabulary, (rows, generated))], axis=1)
    mask = (column >= context) & (column < lengths[:, None])
    behaviour = np.log(1 / len(vocabulary)) + random.normal(0, 0.1, ids.shape)
    return TrainBatch(
        input_ids=np.where(column < lengths[:, None], ids, 0),
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, behaviour, 0).astype(np.float32),
        advantages=np.where(mask, random.normal(0, 1, (rows, 1)), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        lengths=lengths,
        trajectory=np.arange(rows),
        group=np.arange(rows) // 8,
        rewards=np.zeros(rows, dtype=np.float32),
        allowed=np.zeros(rows, dtype=np.int64),
        allowed_sets=((),),
    )


class BareLoop:
    """transformers, torch and nothing else."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=(CONFIG.beta1, CONFIG.beta2), weight_decay=0
        )

    def train_step(self, batch: TrainBatch, step: int) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = CONFIG.learning_rate(step)
        losses = [self._update(batch, rows) for rows in minibatches(batch, CONFIG, step)]
        return statistics.mean(losses)

    def _update(self, batch: TrainBatch, rows: Any) -> float:
        self.optimizer.zero_grad()
        tokens = int(batch.loss_mask[rows].sum())
        total = 0.0
        for part in self._parts(batch, rows):
            width = int(batch.lengths[part].max())
            ids = torch.from_numpy(batch.input_ids[part, :width])
            mask = torch.from_numpy(batch.loss_mask[part, 1:width])
            old = torch.from_numpy(batch.behaviour_logprobs[part, 1:width])[mask]
            advantages = torch.from_numpy(batch.advantages[part, 1:width])[mask]
            attention = (torch.arange(width) < torch.from_numpy(batch.lengths[part])[:, None]).long()
            logits = self.model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1][mask]
            logs = torch.log_softmax(logits.float(), -1)
            logprobs = logs.gather(-1, ids[:, 1:][mask][:, None])[:, 0]
            entropy = -(logs.exp() * logs).sum(-1)
            ratio = (logprobs - old).exp()
            bounds, (low, high) = CONFIG.objective, CONFIG.objective.clip
            clipped = ratio.clamp(1 - low, 1 + high) * advantages
            per_token = -torch.minimum(ratio * advantages, clipped) - bounds.entropy_coef * entropy
            loss = per_token.sum() / tokens
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CONFIG.grad_clip)
        self.optimizer.step()
        return total

    @staticmethod
    def _parts(batch: TrainBatch, rows: Any) -> Iterator[Any]:
        """The same token budget at once."""
        width = int(batch.lengths[rows].max())
        size = max(1, CONFIG.micro_tokens // width)
        ordered = rows[np.argsort(batch.lengths[rows], kind="stable")]
        for start in range(0, len(ordered), size):
            yield ordered[start : start + size]


def model_with(folder: Path, vocabulary: int) -> Path:
    """A Qwen3 of 4 layers with random weights; the tokenizer is the tiny model's, which nothing here reads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    make_tiny_qwen3(folder, 0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=False,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def measure(folder: Path, data: TrainBatch, rounds: int) -> tuple[list[float], list[float]]:
    """CPU seconds of each step, ours and the bare loop's, in turns; the first of each is warm-up."""
    ours, bare = TorchTrainer(folder, CONFIG), BareLoop(folder)
    seconds: tuple[list[float], list[float]] = ([], [])
    for step in range(rounds + 1):
        start = time.process_time()
        loss = ours.train_step(data, step)["loss"]
        middle = time.process_time()
        other = bare.train_step(data, step)
        end = time.process_time()
        assert abs(loss - other) < 1e-3, f"step {step}: losses {loss} and {other}"
        seconds[0].append(middle - start)
        seconds[1].append(end - middle)
        print(f"step {step}: {middle - start:.2f} s, bare {end - middle:.2f} s, loss {loss:.5f}", flush=True)
    return seconds[0][1:], seconds[1][1:]


def row(name: str, ours: list[float], bare: list[float]) -> dict[str, Any]:
    ratios = [b / a for a, b in zip(ours, bare, strict=True)]
    return {
        "metric": f"train step, {name} (goal: at most {GOAL} x the bare loop)",
        "unit": "s CPU",
        "ours": statistics.median(ours),
        "peer": "transformers + torch loop",
        "peer_value": statistics.median(bare),
        "published": None,
        "ratio": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three rounds instead of nine")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    rounds = 3 if quick else 9
    with tempfile.TemporaryDirectory() as folder:
        long = model_with(Path(folder) / "long", 4096)
        short = make_tiny_qwen3(Path(folder) / "short", 0)
        cases = {
            "long answers": (long, batch(32, 64, 96, range(4096), contexts=32)),
            "short turns": (short, batch(1536, 31, 1, range(2, 16), contexts=512)),
        }
        rows = [row(name, *measure(*case, rounds)) for name, case in cases.items()]
    result = {
        "name": "trainer_step",
        "command": "python benchmarks/end_to_end/trainer_step.py" + (" --quick" if quick else ""),
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
        "rows": rows,
    }
    RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    for each in rows:
        print(f"{each['metric']}: {each['ours']:.3f} s, bare {each['peer_value']:.3f} s, {each['ratio']:.2f} x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
