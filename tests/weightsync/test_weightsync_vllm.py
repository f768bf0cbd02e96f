"""Published weights into a real vLLM engine: it computes with exactly what was published, or it refuses."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from weightsync import EngineRefused, MemoryStore, Publisher, Subscriber, Superseded

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    # vLLM's own sockets and contexts, closed when it is collected.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

VOCABULARY = 320


def make_model(tie: bool) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).float().eval()
    perturb(model, 0)
    return model


def perturb(model: Any, seed: int) -> None:
    """Large enough that any other version's log-probabilities are far from these."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))


def reference(model: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0].double()
    logprobs = torch.log_softmax(logits, -1)
    return [logprobs[len(prompt) + i - 1, token].item() for i, token in enumerate(tokens)]


class Generation:
    def __init__(
        self, engine: Any, name: str, prompt: list[int], count: int, grew: asyncio.Condition | None = None
    ) -> None:
        self.prompt = prompt
        self.count = count
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[Any] = []
        self.grew = grew or asyncio.Condition()
        self.task = asyncio.create_task(self._run(engine, name, count))

    async def _run(self, engine: Any, name: str, count: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=1.0,
            max_tokens=count,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        async for output in engine.generate({"prompt_token_ids": self.prompt}, sampling, name):
            step = output.outputs[0]
            self.tokens += step.token_ids
            self.logprobs += [row[token].logprob for row, token in zip(step.logprobs, step.token_ids, strict=True)]
            self.spans = step.weight_versions
            async with self.grew:
                self.grew.notify_all()

    @property
    def in_the_middle(self) -> bool:
        """So far from its end that an update comes first."""
        return 5 <= len(self.tokens) < self.count // 2


@pytest.fixture
async def engine_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[Any, Any, Publisher, Any]]:
    """A model, an engine that serves it, the publisher of its versions and the loader of the engine."""
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }.items():
        monkeypatch.setitem(os.environ, name, value)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from weightsync.vllm import VLLMWeightLoader

    model = make_model(tie=request.param)
    model.save_pretrained(tmp_path)
    store = MemoryStore()
    loader = VLLMWeightLoader(Subscriber(store))
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(tmp_path),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=512,
            block_size=32,
            enforce_eager=True,
            kv_cache_memory_bytes=64 << 20,
            max_num_seqs=8,
            distributed_executor_backend="uni",
            **loader.engine_args(),
        )
    )
    try:
        await loader.start(engine)
        yield model, engine, Publisher(store, bucket_bytes=64 << 10, encoding="delta"), loader
    finally:
        await loader.close()
        engine.shutdown()


async def update(engine: Any, loader: Any, version: int) -> str:
    await loader.prefetch(version)
    await engine.pause_generation(mode="keep", clear_cache=True)
    digest: str = await loader.load(engine, version)
    await engine.resume_generation()
    return digest


class Traffic:
    """Several generations run at any time; one that ends is followed by another."""

    def __init__(self, engine: Any, streams: int) -> None:
        self._engine = engine
        self._open = True
        self._grew = asyncio.Condition()
        self.all: list[Generation] = []
        self._streams = [asyncio.create_task(self._stream(number)) for number in range(streams)]

    async def _stream(self, number: int) -> None:
        while self._open:
            name, prompt = f"stream-{number}-{len(self.all)}", [5 + number, 9 + len(self.all), 17]
            self.all.append(Generation(self._engine, name, prompt, 200 + 40 * number, self._grew))
            await self.all[-1].task

    async def running(self) -> None:
        """Wait until some stream is in the middle of a generation."""
        async with self._grew:
            await self._grew.wait_for(lambda: any(each.in_the_middle for each in self.all[-len(self._streams) :]))

    async def end(self) -> None:
        self._open = False
        await asyncio.gather(*self._streams)


async def check_in_flight(parts: tuple[Any, Any, Publisher, Any], versions: range) -> None:
    """Every token of every generation has the log-probability of the version that its span names."""
    from weightsync.torch import named_tensors

    model, engine, publisher, loader = parts
    weights = {}
    traffic = Traffic(engine, 3)
    for version in versions:
        await traffic.running()
        perturb(model, version)
        weights[str(version)] = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
        manifest = await publisher.publish(version, named_tensors(model))
        assert await update(engine, loader, version) == manifest.digest
        await check_fresh(model, engine, f"fresh-{version}")
    await traffic.end()
    crossed: set[str] = set()
    for served, state in weights.items():
        model.load_state_dict(state)
        for generation in traffic.all:
            for span in generation.spans:
                if span.version == served:
                    expected = reference(model, generation.prompt, generation.tokens)[span.start : span.end]
                    assert generation.logprobs[span.start : span.end] == pytest.approx(expected, abs=1e-4), served
                    crossed.update([served] if span.start else [])
    assert crossed == weights.keys(), "every update landed in the middle of a generation"


async def check_fresh(model: Any, engine: Any, name: str) -> None:
    generation = Generation(engine, name, [8, 3, 4], 32)
    await generation.task
    expected = reference(model, generation.prompt, generation.tokens)
    assert generation.logprobs == pytest.approx(expected, abs=1e-4)


async def check_refused_before_loading(parts: tuple[Any, Any, Publisher, Any], version: int) -> None:
    """Bytes that are not the published ones are refused, the old weights stay, and the loader says so until fixed."""
    from weightsync.torch import named_tensors

    model, engine, publisher, loader = parts
    with pytest.raises(Superseded, match="prefetch it"):
        await loader.load(engine, version)
    old = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
    perturb(model, version)
    new = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
    await publisher.publish(version, new)
    await loader.prefetch(version)
    await engine.pause_generation(mode="keep", clear_cache=True)
    loader.staged[0].staging.array[100] ^= 1
    with pytest.raises(EngineRefused, match="has changed"):
        await loader.load(engine, version)
    with pytest.raises(EngineRefused, match="no whole version"):
        loader.check()
    await engine.resume_generation()
    model.load_state_dict(old)
    await check_fresh(model, engine, "old")
    loader.staged[0].staging.array[100] ^= 1
    await update(engine, loader, version)
    loader.check()
    model.load_state_dict(new)
    await check_fresh(model, engine, "new")


async def check_reloadable_after_half_a_load(parts: tuple[Any, Any, Publisher, Any], version: int) -> None:
    """A version that lacks a tensor fails when the others have been loaded; the next whole one repairs the engine."""
    from weightsync.torch import named_tensors

    model, engine, publisher, loader = parts
    partial = named_tensors(model)
    del partial["model.layers.1.mlp.down_proj.weight"]
    other = MemoryStore()
    await Publisher(other).publish(1, partial)
    bad = type(loader)(Subscriber(other))
    await bad.prefetch(1)
    await engine.pause_generation(mode="keep", clear_cache=True)
    with pytest.raises(EngineRefused, match=r"layers\.1\.mlp\.down_proj"):
        await bad.load(engine, 1)
    await bad.close()
    assert "down_proj" in (await engine.collective_rpc("weightsync_state"))[0][2]
    perturb(model, version)
    await publisher.publish(version, named_tensors(model))
    await update(engine, loader, version)
    assert (await engine.collective_rpc("weightsync_state"))[0][2] == ""
    await check_fresh(model, engine, "repaired")


@pytest.mark.parametrize("engine_parts", [True], indirect=True, ids=["tied"])
async def test_tied_embeddings(engine_parts: tuple[Any, Any, Publisher, Any]) -> None:
    await check_in_flight(engine_parts, range(1, 3))


@pytest.mark.parametrize("engine_parts", [False], indirect=True, ids=["untied"])
async def test_twenty_updates_with_generations_in_flight(engine_parts: tuple[Any, Any, Publisher, Any]) -> None:
    await check_in_flight(engine_parts, range(1, 21))
    await check_refused_before_loading(engine_parts, 21)
    await check_reloadable_after_half_a_load(engine_parts, 22)
