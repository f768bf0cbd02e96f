"""HTTPWorker and the gateway over a real vLLM server, its answers checked against Hugging Face forward passes."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from msgspec.structs import replace
from tests.llmproxy.gateways import QUICK, Connection, ask, until

from llmproxy import (
    Aborted,
    GenerateRequest,
    GenerateResult,
    InvalidRequest,
    LLMProxy,
    Partial,
    Sampling,
    Span,
    WorkerLost,
)
from llmproxy.gateway import Gateway, GatewayConfig
from llmproxy.http_worker import HTTPWorker
from llmproxy.path_loader import PathLoader
from llmproxy.upstream import Pool, call

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

FREE = Sampling(ignore_eos=True)
TOLERANCE = 1e-4
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Models:
    """Two checkpoints of one architecture, with a byte-level tokenizer; versions are 0 and 1."""

    def __init__(self, folder: Path) -> None:
        import torch
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

        specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
        names = specials + sorted(pre_tokenizers.ByteLevel.alphabet())
        bytewise = Tokenizer(models.BPE(vocab={name: id for id, name in enumerate(names)}, merges=[]))
        bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        bytewise.decoder = decoders.ByteLevel()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<|im_end|>", pad_token="<|pad|>")
        tokenizer.chat_template = TEMPLATE
        config = Qwen3Config(
            vocab_size=320,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=2,
            pad_token_id=3,
        )
        self.models = []
        for version in (0, 1):
            torch.manual_seed(version)
            model = Qwen3ForCausalLM(config).float().eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() == 2:
                        parameter.normal_(0.0, 0.15)
            model.save_pretrained(folder / str(version))
            tokenizer.save_pretrained(folder / str(version))
            self.models.append(model)

    def reference(self, prompt: Sequence[int], tokens: Sequence[int], spans: Sequence[Span]) -> list[float]:
        """Log-probabilities of the tokens, each under the version that its span names."""
        import torch

        told = []
        for span in spans:
            with torch.no_grad():
                logits = self.models[span.version](torch.tensor([[*prompt, *tokens]])).logits[0]
            whole = torch.log_softmax(logits.double(), -1)
            told += [whole[len(prompt) + i - 1, tokens[i]].item() for i in range(span.start, span.end)]
        return told


class Engine:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models = Models(folder)
        self.url = ""

    def worker(self, **options: Any) -> HTTPWorker:
        template = str(self.folder / "{version}")
        return HTTPWorker(self.url, id="w", loader=PathLoader(template), **options)

    async def running(self) -> int:
        """Requests in the engine, by its own metrics."""
        pool = Pool(self.url)
        text = (await call(pool, "GET", "/metrics")).body.decode()
        pool.abort()
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting{")
        return int(sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(names)))

    async def until_running(self, count: int) -> None:
        """Wait until the engine holds so many requests."""
        async with asyncio.timeout(30):
            while await self.running() != count:  # noqa: ASYNC110 - only its metrics tell
                await asyncio.sleep(0.02)

    def check(self, prompt: Sequence[int], result: GenerateResult) -> None:
        told = self.models.reference(prompt, result.token_ids, result.spans)
        assert result.spans[-1].end == len(result.token_ids) == len(result.logprobs)
        assert max(abs(a - b) for a, b in zip(told, result.logprobs, strict=True)) < TOLERANCE


def made(worker: HTTPWorker) -> int:
    """Tokens that have arrived of request "r"."""
    stream = worker._streams.get("r")
    return len(stream.told.token_ids) if stream else 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    one = Engine(tmp_path_factory.mktemp("models"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = "--enable-scale-out --enforce-eager --dtype float32 --max-model-len 1024 --block-size 32 --seed 3"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(one.folder / "0")),
        *("--host", "127.0.0.1", "--port", str(port), "--kv-cache-memory-bytes", str(64 << 20)),
        *("--served-model-name", "tiny", "--distributed-executor-backend", "uni", *options.split()),
        env=os.environ | ENVIRONMENT,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    one.url = f"http://127.0.0.1:{port}"
    worker = one.worker(watch=0)
    try:
        while True:
            assert process.returncode is None, "the server ended"
            try:
                await worker.start()
                break
            except WorkerLost:
                await asyncio.sleep(0.5)
        await worker.close()
        yield one
    finally:
        process.terminate()
        await process.wait()


async def test_the_worker(engine: Engine) -> None:
    worker = engine.worker()
    await worker.start()
    assert (worker.context_limit, worker.version) == (1024, 0)
    prompt = list(range(10, 74))
    request = GenerateRequest("t", prompt, 24, sampling=FREE, request_id="r")

    result = await worker.generate(request)
    assert (
        isinstance(result, GenerateResult) and result.spans == [Span(0, 0, 24)] and result.finish_reason == "length"
    )
    engine.check(prompt, result)

    # Interrupted, it keeps what was made; resumed, it goes on, and all of it is the model's.
    long = replace(request, max_tokens=600)
    running = asyncio.create_task(worker.generate(long))
    await until(lambda: made(worker) > 20)
    await worker.interrupt("r")
    partial = await running
    assert isinstance(partial, Partial) and len(partial.token_ids) >= 20
    assert len(partial.token_ids) + partial.remaining == 600
    await engine.until_running(0)
    whole = await worker.generate(replace(long, resume=replace(partial, remaining=40)))
    assert isinstance(whole, GenerateResult) and whole.token_ids[: len(partial.token_ids)] == partial.token_ids
    engine.check(prompt, whole)

    running = asyncio.create_task(worker.generate(long))
    await until(lambda: made(worker))
    await worker.abort("r")
    with pytest.raises(Aborted):
        await running
    running = asyncio.create_task(worker.generate(long))
    await until(lambda: made(worker))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await engine.until_running(0)

    with pytest.raises(InvalidRequest):  # the engine's own 4xx: such an id is not in its vocabulary
        await worker.generate(replace(request, prompt_ids=[5000]))
    assert await worker.probe() == 0
    await worker.close()


async def test_an_update_in_the_middle_of_generations(engine: Engine) -> None:
    worker = engine.worker()
    await worker.start()
    proxy = LLMProxy([worker], config=replace(QUICK, answer=30.0))
    prompts = [list(range(20 + n, 60 + n)) for n in range(4)]
    requests = [GenerateRequest(f"t{n}", prompt, 200, sampling=FREE) for n, prompt in enumerate(prompts)]
    running = [asyncio.create_task(proxy.generate(request)) for request in requests]
    await until(
        lambda: len(worker._streams) == 4 and all(len(s.told.token_ids) > 10 for s in worker._streams.values())
    )
    await proxy.suspend()
    (ack,) = await proxy.update(1)
    assert not ack.error
    await proxy.resume()
    for prompt, result in zip(prompts, await asyncio.gather(*running), strict=True):
        assert [span.version for span in result.spans] == [0, 1]
        engine.check(prompt, result)
    assert await worker.probe() == 1
    await proxy.suspend()
    await proxy.update(0)
    await proxy.resume()
    await proxy.close()
    await worker.close()


async def test_a_gateway_and_the_openai_client(engine: Engine) -> None:
    worker = engine.worker()
    await worker.start()
    proxy = LLMProxy([worker], config=replace(QUICK, answer=30.0))
    gateway = Gateway(proxy, GatewayConfig(record=True))
    port = await gateway.start()
    headers = {"x-trajectory-id": "talk"}
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", default_headers=headers
    ) as client:
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        for turn in range(3):
            asked: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 16, "temperature": 1.0}
            if turn == 1:
                text = ""
                async for chunk in await client.chat.completions.create(**asked, stream=True):
                    text += chunk.choices[0].delta.content or ""
            else:
                text = (await client.chat.completions.create(**asked)).choices[0].message.content or ""
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
        await client.completions.create(model="tiny", prompt=list(range(10, 40)), max_tokens=8, temperature=1.0)
    turns = (await ask(port, "GET", "/trajectories/talk")).json()["requests"]
    assert len(turns) == 4
    for turn_record in turns:
        (choice,) = turn_record["choices"]
        prompt, tokens = turn_record["prompt_token_ids"], choice["token_ids"]
        assert tokens and choice["finish_reason"] in ("stop", "length")
        assert choice["spans"] == [{"version": 0, "start": 0, "end": len(tokens)}]
        told = engine.models.reference(prompt, tokens, [Span(0, 0, len(tokens))])
        assert max(abs(a - b) for a, b in zip(told, choice["logprobs"], strict=True)) < TOLERANCE

    # The engine's ids: an interrupted request of each endpoint comes back with what it has.
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 900, "ignore_eos": True}
    text_body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 900, "ignore_eos": True}
    tokens_body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 900, "ignore_eos": True, "logprobs": 0}}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", text_body),
        ("/inference/v1/generate", tokens_body),
    ):
        async with Connection(port) as raw:
            raw.send("POST", path, body, x_trajectory_id="i", content_type="application/json")
            await engine.until_running(1)
            assert (await ask(port, "POST", "/admin/interrupt", {"id": "i"})).status == 200
            reply = await raw.reply()
            assert reply.status == 200 and reply.json()["choices"][0]["finish_reason"] == "abort", (path, reply)

    # A client that leaves ends its request in the engine.
    for stream in (False, True):
        async with Connection(port) as raw:
            raw.send("POST", "/v1/completions", text_body | {"stream": stream}, content_type="application/json")
            await engine.until_running(1)
        await engine.until_running(0)
    # What only the engine can refuse passes as it is.
    reply = await ask(
        port,
        "POST",
        "/v1/completions",
        text_body | {"max_tokens": 5000},
        x_trajectory_id="t",
        content_type="application/json",
    )
    assert reply.status == 400 and "max" in reply.body.decode()
    assert not proxy.stats().workers[0].fenced
    await gateway.close()
    await proxy.close()
    await worker.close()
