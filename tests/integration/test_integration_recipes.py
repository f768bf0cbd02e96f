"""Every recipe of examples/ trains: a few small iterations on real parts, started as its first lines say.

The model, the batch and the number of iterations are made small; tasks, limits, losses and mode are the recipe's own.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.recorded import RECORD, read_record

from rollart.config import load_config
from rollart.observe.metrics import read_metrics

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
ITERATIONS = 2
SMALL = [
    f"run.iterations={ITERATIONS}",
    "model.hidden=32",
    "generation.workers=1",
    "buffer.batch_groups=4",
    "buffer.group_size=2",
    "buffer.drop_uniform=false",
    "rollout.concurrency=12",
    "train.minibatches=1",
    "eval.episodes=4",
]
# Short episodes, so that each of its tasks is trained on in so few iterations.
MORE = {"mixture": ["tasks.shop.max_turns=2", "tasks.mastermind.max_turns=2"]}
RECIPES = ("frozenlake", "gem_math", "gem_game", "shop", "textworld", "swe", "mixture")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains(tmp_path: Path, recipe: str) -> None:
    file = ROOT / "examples" / f"{recipe}.yaml"
    small = [*SMALL, *MORE.get(recipe, [])]
    config = load_config(file, small)
    if recipe == "swe" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    # What `make run CONFIG=...` does before it trains.
    subprocess.run(["make", "--silent", "environments", f"CONFIG={file}"], cwd=ROOT, check=True)
    run = trained(file, tmp_path, small)
    check_metrics(run)
    check_trajectories(tmp_path / "record.jsonl", set(config.tasks))
    if recipe == "frozenlake":
        check_export(run / "model-final")


def trained(file: Path, folder: Path, small: list[str]) -> Path:
    command = [sys.executable, "-m", "tests.recorded", "train", str(file), *small]
    done = subprocess.run(
        [*command, f"run.folder={folder}", "run.name=run"],
        cwd=ROOT,
        env={**os.environ, RECORD: str(folder / "record.jsonl")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def check_metrics(run: Path) -> None:
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(1, ITERATIONS + 1))
    for row in rows:
        assert row["ledger/failed"] == 0
        assert row["staleness/over"] == 0
        assert (row["staleness/max"] or 0) <= 1
        assert (row["trained_tokens"] or 0) > 0
        train = {name: value for name, value in row.items() if name.startswith("train/")}
        assert "train/loss" in train
        assert all(value is not None and math.isfinite(value) for value in train.values()), train
    assert rows[-1]["eval/success"] is not None
    assert rows[-1]["parity/max_abs"] is not None
    assert rows[-1]["parity/max_abs"] < 1e-3


def check_trajectories(record: Path, tasks: set[str]) -> None:
    """Each ended by its environment or at its task's last turn, never for want of context; rewards are as paid."""
    groups = [group for step in read_record(record) for group in step["groups"]]
    assert {task for group in groups for task in group["tasks"]} == tasks
    ends = {outcome for group in groups for outcome in group["outcomes"]}
    assert ends <= {"terminated", "truncated", "max_turns"}
    for group in groups:
        assert group["rewards"] == group["paid"]
        assert all(map(math.isfinite, group["rewards"]))


GENERATE = """
import json, sys
from vllm import LLM, SamplingParams
engine = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=1 << 26)
(answer,) = engine.generate({"prompt_token_ids": [2, 3, 4]}, SamplingParams(temperature=0, max_tokens=8, logprobs=1,
                                                                          ignore_eos=True))
(said,) = answer.outputs
print(json.dumps([[token, chances[token].logprob] for token, chances in zip(said.token_ids, said.logprobs)]))
"""


def check_export(folder: Path) -> None:
    """vLLM and transformers load the folder, and agree on what it says."""
    import torch
    from transformers import AutoModelForCausalLM

    from rollart.distributed.generation import engine_environment

    script = [sys.executable, "-c", GENERATE, str(folder)]
    environ = {**os.environ, **engine_environment()}
    done = subprocess.run(script, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.strip().rpartition("\n")[2])
    tokens = [token for token, _ in said]
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    with torch.no_grad():
        chances = model(torch.tensor([[2, 3, 4, *tokens]])).logits[0, 2:-1].log_softmax(-1)
    assert len(tokens) == 8
    assert chances.argmax(-1).tolist() == tokens
    for position, (token, logprob) in enumerate(said):
        assert abs(float(chances[position, token]) - logprob) < 1e-3
