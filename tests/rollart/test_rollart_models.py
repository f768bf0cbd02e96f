"""The tiny model: deterministic, idempotent, one token per symbol."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollart.models import make_tiny_qwen3
from rollart.models.vocabulary import SYMBOLS, VOCABULARIES, write_tokenizer
from rollart.tasks.frozenlake import FrozenLakeTask


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_qwen3(tmp_path_factory.mktemp("models") / "tiny", 3, hidden=32)


def test_model_is_a_function_of_its_seed(model, tmp_path):
    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    again = make_tiny_qwen3(tmp_path / "again", 3, hidden=32)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert digests(again) == digests(model)
    other = make_tiny_qwen3(tmp_path / "other", 4, hidden=32)
    assert digests(other)["model.safetensors"] != digests(model)["model.safetensors"]


def test_making_twice_changes_nothing(model):
    before = {path: path.stat().st_mtime_ns for path in model.iterdir()}
    make_tiny_qwen3(model, 3, hidden=32)
    assert {path: path.stat().st_mtime_ns for path in model.iterdir()} == before
    with pytest.raises(ValueError, match="holds a model made from"):
        make_tiny_qwen3(model, 4, hidden=32)


def test_text_and_tokens_map_one_to_one(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert len(tokenizer) == len(SYMBOLS) == 16
    task = FrozenLakeTask()
    for key in task.eval_keys(20):
        picture, _ = task.make_env(key).reset()
        ids = tokenizer.encode(picture)
        assert len(ids) == len(picture)
        assert tokenizer.decode(ids) == picture
    assert [tokenizer.encode(action) for action in task.actions] == [
        [SYMBOLS.index(action)] for action in task.actions
    ]
    assert tokenizer.pad_token_id == 0 and tokenizer.eos_token_id == 1


def test_transformers_loads_it_in_float32(model):
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert loaded.dtype == torch.float32
    assert loaded.config.architectures == ["Qwen3ForCausalLM"]
    assert loaded(input_ids=torch.tensor([[2, 3, 4]])).logits.shape == (1, 3, 16)


def test_unknown_shape_is_refused(tmp_path):
    with pytest.raises(TypeError, match="hiden"):
        make_tiny_qwen3(tmp_path / "m", 0, hiden=3)


@pytest.fixture(scope="module")
def speaks_bytes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    write_tokenizer(folder, "bytes")
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=50))
def test_bytes_carry_any_text(speaks_bytes, text: str) -> None:
    tokenizer = speaks_bytes
    assert len(tokenizer) == len(VOCABULARIES["bytes"]) == 264
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)) == text
