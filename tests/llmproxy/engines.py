"""Real engines with tiny models, for the tests that need them, and what they are checked against."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

from llmproxy import GenerateRequest, GenerateResult, LLMProxy, Sampling, Span
from llmproxy.vllm import VLLMWorker
from llmproxy.worker import Role

VOCABULARY = 32
EOS = 1
ACTIONS = (4, 5, 6, 7)
MASKED = Sampling(allowed_token_ids=ACTIONS, logprobs="processed", ignore_eos=True)
FREE = Sampling(ignore_eos=True)
TOLERANCE = 1e-4
LOOPBACK = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}


def make_model(seed: int) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:  # far from uniform, so that versions differ by whole nats
                parameter.normal_(0.0, 0.15)
    return model


class FolderLoader:
    """A weight loader double: versions are model folders, read by the engine itself."""

    def __init__(self, folders: dict[int, Path]) -> None:
        self.folders = folders
        self.prefetched: list[int] = []

    def engine_args(self) -> dict[str, Any]:
        return {"enforce_eager": True}

    async def start(self, engine: Any) -> None:
        pass

    async def prefetch(self, version: int) -> None:
        self.prefetched.append(version)

    async def load(self, engine: Any, version: int) -> str:
        assert await engine.is_paused()
        await engine.collective_rpc("reload_weights", kwargs={"weights_path": str(self.folders[version])})
        return f"digest-{version}"

    async def close(self) -> None:
        pass


class Fleet:
    """Models by version (odd versions share one model, even ones the other) and workers over them."""

    def __init__(self, folder: Path) -> None:
        self.models = [make_model(0), make_model(1)]
        for index, model in enumerate(self.models):
            model.save_pretrained(folder / str(index))
        self.folders = {version: folder / str(version % 2) for version in range(100)}
        self.workers: list[VLLMWorker] = []

    async def start(self, id: str, role: Role = "both", **options: Any) -> VLLMWorker:
        loader = FolderLoader(self.folders)
        arguments = {
            "model": str(self.folders[0]),
            "dtype": "float32",
            "max_model_len": 512,
            "block_size": 32,
            "kv_cache_memory_bytes": 64 << 20,
            "max_num_seqs": 64,
            "distributed_executor_backend": "uni",
        }
        worker = VLLMWorker(arguments | options, loader, id=id, hardware="cpu", role=role, environment=LOOPBACK)
        self.workers.append(worker)
        await worker.start()
        return worker

    def reference(
        self, prompt: list[int], tokens: list[int], spans: list[Span], allowed: tuple[int, ...] | None = None
    ) -> list[float]:
        """Log-probabilities of the tokens, each under the version that its span names."""
        whole = {span.version: self._logprobs(span.version, prompt + tokens, allowed) for span in spans}
        return [
            whole[span.version][len(prompt) + i - 1][tokens[i]].item()
            for span in spans
            for i in range(span.start, span.end)
        ]

    def next_token(self, version: int, prompt: list[int], allowed: tuple[int, ...] | None = None) -> list[float]:
        return self._logprobs(version, prompt, allowed)[-1].exp().tolist()

    def _logprobs(self, version: int, ids: list[int], allowed: tuple[int, ...] | None) -> Any:
        import torch

        with torch.no_grad():
            logits = self.models[version % 2](torch.tensor([ids])).logits[0].double()
        if allowed is not None:
            masked = torch.full_like(logits, float("-inf"))
            masked[:, list(allowed)] = logits[:, list(allowed)]
            logits = masked
        return torch.log_softmax(logits, -1)


def prompts(count: int, length: int = 40, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(2, VOCABULARY) for _ in range(length)] for _ in range(count)]


def close_to(left: list[float], right: list[float]) -> bool:
    return len(left) == len(right) and all(abs(a - b) < TOLERANCE for a, b in zip(left, right, strict=True))


async def in_flight(
    proxy: LLMProxy, requests: list[GenerateRequest], tokens: int = 20
) -> list[asyncio.Task[GenerateResult]]:
    """Start requests; when this returns, each has made about so many tokens."""
    tasks = [asyncio.create_task(proxy.generate(request)) for request in requests]
    await proxy.generate(GenerateRequest("pace", [9, 9], tokens, sampling=FREE))
    return tasks


async def nothing_runs(worker: VLLMWorker) -> bool:
    """The engine refuses to drop its caches while any request holds one."""
    return bool(await worker._engine.reset_prefix_cache())
