"""Whole runs whose trainer has several ranks, on FSDP2 and on Megatron-Core: each publishes its own shards, engines
put them together, two proxies serve. The weights end as a model folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rollart.observe.metrics import Row, read_metrics

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

CONFIG = """
run: {name: ranks, iterations: 3}
generation: {workers: 1, proxies: 2}
buffer: {batch_groups: 4, group_size: 4, drop_uniform: false}
rollout: {concurrency: 16}
eval: {every: 100, episodes: 8}
checkpoint: {every: 1}
"""


def trained(folder: Path, *words: str) -> Path:
    config = folder / "config.yaml"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "rollart.cli.main", "train", str(config), f"run.folder={folder}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "ranks"


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["train.data_parallel=2"], id="fsdp2", marks=pytest.mark.slow),
        pytest.param(["train.backend=megatron", "train.tensor_parallel=2"], id="megatron-tp2"),
        pytest.param(
            ["train.backend=megatron", "train.pipeline_parallel=2"], id="megatron-pp2", marks=pytest.mark.slow
        ),
    ],
)
def test_engines_hold_what_all_ranks_trained(tmp_path: Path, layout: list[str]) -> None:
    run = trained(tmp_path, *layout)
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all((row["parity/max_abs"] or 0) < 1e-3 for row in rows)
    assert rows[-1]["parity/max_abs"] is not None
    check_shares(rows[-1])
    resumed = trained(tmp_path, *layout, "--resume", "run.iterations=4")
    assert [row["step"] for row in read_metrics(resumed)] == [1, 2, 3, 4]
    check_export(run)


def check_shares(row: Row) -> None:
    """Each of the two ranks published about its share: of a pipeline the first holds the embeddings too."""
    total = row["push_bytes"] or 0
    shares = [(row[f"push_bytes/train-{rank}"] or 0) / total for rank in range(2)]
    assert sum(shares) == 1.0
    assert max(shares) < 0.6, shares


def check_export(run: Path) -> None:
    """The folder loads in transformers and differs from where training began."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    final = AutoModelForCausalLM.from_pretrained(run / "model-final", local_files_only=True).state_dict()
    first = AutoModelForCausalLM.from_pretrained(run / "model", local_files_only=True).state_dict()
    assert final.keys() == first.keys()
    assert any((final[name] != first[name]).any() for name in final)
    assert len(AutoTokenizer.from_pretrained(run / "model-final", local_files_only=True)) == 16
