"""The example, as printed, against a real vLLM server: afterwards the server computes with the trained weights."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from weightsync import EngineRefused, MemoryStore, Subscriber
from weightsync.blocking import in_thread
from weightsync.vllm import VLLMWeightLoader
from weightsync.vllm_http import SERVER_ARGUMENTS, HTTPEngine

ROOT = Path(__file__).parents[2]


def make_model(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": 320}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    tokens = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    torch.manual_seed(0)
    config = Qwen3Config(max_position_embeddings=512, **sizes, **heads, **tokens)
    Qwen3ForCausalLM(config).save_pretrained(folder)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[str]:
    make_model(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    options = "--enable-scale-out --skip-tokenizer-init --enforce-eager --dtype float32 --max-model-len 256"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path)),
        *("--host", "127.0.0.1", "--port", str(port), "--kv-cache-memory-bytes", str(32 << 20)),
        *("--distributed-executor-backend", "uni", *options.split(), *SERVER_ARGUMENTS),
        env=environment,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while not await in_thread(is_up, url):
            assert process.returncode is None, "the server ended"
            await asyncio.sleep(0.2)
        yield url
    finally:
        process.terminate()
        await process.wait()


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def generate(url: str, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Tokens that the server samples, and its log-probabilities of them."""
    sampling = {"max_tokens": 16, "logprobs": 0, "temperature": 1.0, "ignore_eos": True}
    body = json.dumps({"token_ids": prompt, "sampling_params": sampling}).encode()
    request = urllib.request.Request(f"{url}/inference/v1/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        rows = json.load(response)["choices"][0]["logprobs"]["content"]
    return [row["token_id"] for row in rows], [row["logprob"] for row in rows]


@pytest.mark.engine
@pytest.mark.timeout(600)
async def test_a_training_loop_updates_a_server(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import transformers

    models: list[Any] = []
    load = transformers.AutoModelForCausalLM.from_pretrained

    def remember(*args: Any, **kwargs: Any) -> Any:
        models.append(load(*args, **kwargs))
        return models[-1]

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", remember)
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples/weightsync_transformers_to_vllm.py")
    assert spec and spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    await example.main(str(tmp_path), server)
    assert capsys.readouterr().out.count("the server holds") == 3

    prompt = [10, 11, 12, 200, 7, 13]
    tokens, logprobs = await in_thread(generate, server, prompt)
    with torch.no_grad():
        logits = models[0](torch.tensor([prompt + tokens])).logits[0].double()
    expected = torch.log_softmax(logits, -1)[range(5, 5 + len(tokens)), tokens].tolist()
    assert logprobs == pytest.approx(expected, abs=1e-4)


async def test_a_server_that_does_not_answer_is_named() -> None:
    loader = VLLMWeightLoader(Subscriber(MemoryStore()))
    with pytest.raises(EngineRefused, match="lacks the weightsync extension"):
        await loader.start(HTTPEngine("http://127.0.0.1:9"))
    await loader.close()
