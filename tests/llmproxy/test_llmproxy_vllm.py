"""VLLMWorker over a real engine with a tiny model, checked against Hugging Face forward passes."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import AsyncIterator
from math import exp
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from msgspec.structs import replace
from tests.llmproxy.engines import (
    ACTIONS,
    EOS,
    FREE,
    MASKED,
    TOLERANCE,
    VOCABULARY,
    Fleet,
    close_to,
    in_flight,
    nothing_runs,
    prompts,
)

from llmproxy import (
    Aborted,
    GenerateRequest,
    GenerateResult,
    InvalidRequest,
    LLMProxy,
    Sampling,
    Span,
    UpdateFailed,
    WorkerLost,
    WrongState,
)
from llmproxy.vllm import VLLMWorker

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    # vLLM's own sockets and contexts, closed when they are collected.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    fleet = Fleet(tmp_path_factory.mktemp("models"))
    await fleet.start("first")
    yield fleet
    for worker in fleet.workers:
        await worker.close()
    fleet.workers.clear()
    with warnings.catch_warnings(action="ignore"):  # what vLLM leaves open is closed here, not while pytest ends
        gc.collect()


@pytest.fixture
def worker(fleet: Fleet) -> VLLMWorker:
    return fleet.workers[0]


@pytest_asyncio.fixture(loop_scope="module")
async def proxy(worker: VLLMWorker) -> AsyncIterator[LLMProxy]:
    proxy = LLMProxy([worker])
    yield proxy
    await proxy.close()


async def update(proxy: LLMProxy, version: int) -> None:
    await proxy.suspend()
    (ack,) = await proxy.update(version)
    assert (ack.version, ack.digest, ack.error) == (version, f"digest-{version}", "")
    await proxy.resume()


async def test_tokens_have_the_policys_logprobs(fleet: Fleet, proxy: LLMProxy) -> None:
    version = proxy.stats().version
    prompt = prompts(1)[0]
    result = await proxy.generate(GenerateRequest("t", prompt, 50, sampling=FREE))
    assert len(result.token_ids) == 50 and result.finish_reason == "length" and result.worker == "first"
    assert result.spans == [Span(version, 0, 50)]
    assert close_to(result.logprobs, fleet.reference(prompt, result.token_ids, result.spans))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=GenerateResult) == result


async def test_masked_tokens_have_processed_logprobs(fleet: Fleet, proxy: LLMProxy) -> None:
    prompt = prompts(1, seed=1)[0]
    result = await proxy.generate(GenerateRequest("t", prompt, 30, sampling=MASKED))
    assert set(result.token_ids) <= set(ACTIONS)
    assert close_to(result.logprobs, fleet.reference(prompt, result.token_ids, result.spans, ACTIONS))


async def test_stops_at_the_end_token_unless_told_not_to(proxy: LLMProxy) -> None:
    requests = [GenerateRequest(f"t{i}", prompt, 300) for i, prompt in enumerate(prompts(8, seed=2))]
    results = await asyncio.gather(*map(proxy.generate, requests))
    stopped = [result for result in results if result.finish_reason == "stop"]
    assert stopped
    for result in stopped:
        assert result.token_ids[-1] == EOS and EOS not in result.token_ids[:-1]
    five = Sampling(stop_token_ids=(5,), allowed_token_ids=(5,), logprobs="processed")
    told = await proxy.generate(GenerateRequest("told", [3, 9], 10, sampling=five))
    assert (told.token_ids, told.finish_reason) == ([5], "stop")


async def test_generations_go_on_across_an_update(fleet: Fleet, proxy: LLMProxy) -> None:
    """Under way at an update: kept, rebuilt under the new weights, exact to the token about which made what."""
    old = proxy.stats().version
    asked = [GenerateRequest(f"t{i}", prompt, 200, sampling=FREE) for i, prompt in enumerate(prompts(6, seed=3))]
    tasks = await in_flight(proxy, asked)
    await update(proxy, old + 1)
    for request, result in zip(asked, await asyncio.gather(*tasks), strict=True):
        assert [span.version for span in result.spans] == [old, old + 1]
        assert 10 <= result.spans[0].end < 200 and len(result.token_ids) == 200
        assert result.timing.attempts == 1
        assert close_to(result.logprobs, fleet.reference(request.prompt_ids, result.token_ids, result.spans))


async def test_a_prefix_cached_before_an_update_is_not_used_after_it(fleet: Fleet, proxy: LLMProxy) -> None:
    prompt = prompts(1, length=200, seed=4)[0]
    await proxy.generate(GenerateRequest("t", prompt, 1, sampling=FREE))
    again = await proxy.generate(GenerateRequest("t", prompt, 1, sampling=FREE))
    assert again.timing.cached_tokens >= 160
    await update(proxy, proxy.stats().version + 1)
    result = await proxy.generate(GenerateRequest("t", prompt, 20, sampling=FREE))
    assert result.timing.cached_tokens == 0
    assert close_to(result.logprobs, fleet.reference(prompt, result.token_ids, result.spans))


async def test_an_interrupted_generation_resumes_under_other_weights(
    fleet: Fleet, proxy: LLMProxy, worker: VLLMWorker
) -> None:
    prompt = prompts(1, seed=5)[0]
    request = GenerateRequest("t", prompt, 150, sampling=FREE)
    (task,) = await in_flight(proxy, [request])
    partial = await proxy.interrupt("t")
    assert partial is not None and 10 <= len(partial.token_ids) < 150
    assert partial.remaining == 150 - len(partial.token_ids)
    with pytest.raises(Exception, match="interrupted"):
        await task
    assert await nothing_runs(worker)

    await update(proxy, proxy.stats().version + 1)
    result = await proxy.generate(replace(request, resume=partial))
    assert len(result.token_ids) == 150 and result.token_ids[: len(partial.token_ids)] == partial.token_ids
    assert len(result.spans) == 2 and result.spans[0].end == len(partial.token_ids)
    assert close_to(result.logprobs, fleet.reference(prompt, result.token_ids, result.spans))


@pytest.mark.parametrize("how", ["abort", "cancel", "worker"])
async def test_nothing_stays_in_the_engine(proxy: LLMProxy, worker: VLLMWorker, how: str) -> None:
    tasks = await in_flight(proxy, [GenerateRequest("t", [3, 9, 4], 400, sampling=FREE, request_id="r")], 10)
    assert not await nothing_runs(worker)
    expected: type[BaseException] = Aborted
    if how == "abort":
        assert await proxy.abort("t")
    elif how == "worker":
        await worker.abort("r")
    else:
        expected = asyncio.CancelledError
        tasks[0].cancel()
    with pytest.raises(expected):
        await tasks[0]
    assert await nothing_runs(worker)
    assert proxy.stats().workers[0].charged == 0


async def test_the_backlog_is_known_at_once_and_falls_with_every_token(proxy: LLMProxy, worker: VLLMWorker) -> None:
    task = asyncio.create_task(proxy.generate(GenerateRequest("t", [3] * 100, 200, sampling=FREE)))
    await asyncio.sleep(0)
    assert worker.backlog() == 300
    await proxy.generate(GenerateRequest("pace", [9, 9], 20, sampling=FREE))
    assert 100 < worker.backlog() < 200
    await task
    assert worker.backlog() == 0


async def test_a_request_that_reaches_a_paused_engine_waits_for_the_update(
    fleet: Fleet, proxy: LLMProxy, worker: VLLMWorker
) -> None:
    """The gate lets it pass, the pause overtakes it: it still runs wholly under the new weights."""
    version = proxy.stats().version
    await worker.pause()
    task = asyncio.create_task(proxy.generate(GenerateRequest("t", [3, 9, 4], 5, sampling=FREE)))
    await update(proxy, version + 1)
    assert (await task).spans == [Span(version + 1, 0, 5)]


async def test_a_failed_update_is_not_served(fleet: Fleet, proxy: LLMProxy, worker: VLLMWorker) -> None:
    version = proxy.stats().version
    fleet.folders[version + 1], good = Path("/nowhere"), fleet.folders[version + 1]
    await proxy.suspend()
    with pytest.raises(UpdateFailed, match="first"):
        await proxy.update(version + 1)
    assert worker.version is None and await worker.probe() is None
    with pytest.raises(WrongState, match="no known version"):
        await worker.resume()
    with pytest.raises(WrongState, match="update again"):
        await proxy.resume()
    fleet.folders[version + 1] = good
    await proxy.update(version + 1)
    await proxy.resume()
    result = await proxy.generate(GenerateRequest("t", [3, 9, 4], 20, sampling=FREE))
    assert result.spans == [Span(version + 1, 0, 20)] and await worker.probe() == version + 1
    assert close_to(result.logprobs, fleet.reference([3, 9, 4], result.token_ids, result.spans))


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("prompt_ids", GenerateRequest("t", [3, VOCABULARY], 5)),
        ("max_tokens", GenerateRequest("t", [3] * 500, 13)),
        (
            "allowed_token_ids",
            GenerateRequest("t", [3], 5, sampling=Sampling(allowed_token_ids=(99,), logprobs="processed")),
        ),
        ("sampling.logprobs", GenerateRequest("t", [3], 5, sampling=Sampling(allowed_token_ids=ACTIONS))),
        ("sampling.logprobs", GenerateRequest("t", [3], 5, sampling=Sampling(temperature=0.5))),
    ],
)
async def test_what_the_engine_cannot_take_is_refused(
    worker: VLLMWorker, proxy: LLMProxy, field: str, request_: GenerateRequest
) -> None:
    for generate in (worker.generate, proxy.generate):
        with pytest.raises(InvalidRequest) as caught:
            await generate(request_)
        assert caught.value.field == field
    assert await nothing_runs(worker)


async def draws(proxy: LLMProxy, prompt: list[int], count: int, name: str) -> list[int]:
    """The first tokens of as many identical requests, all at once."""
    requests = [GenerateRequest(f"{name}{i}", prompt, 1, sampling=MASKED) for i in range(count)]
    return [result.token_ids[0] for result in await asyncio.gather(*map(proxy.generate, requests))]


def chi_square(drawn: list[int], probabilities: dict[int, float]) -> float:
    counts = Counter(drawn)
    assert counts.keys() <= probabilities.keys()
    expected = {token: p * len(drawn) for token, p in probabilities.items()}
    return sum((counts[token] - want) ** 2 / want for token, want in expected.items())


async def test_frequencies_are_the_probabilities_before_and_after_updates(fleet: Fleet, proxy: LLMProxy) -> None:
    """No defect of the sampler: right frequencies, independent rows, and no replay after an update."""
    prompt, count = prompts(1, length=24, seed=6)[0], 2000
    start = proxy.stats().version
    rounds = []
    for version in (start, start + 1, start + 3, start + 5):  # the last three hold the same weights
        if version != start:
            await update(proxy, version)
        rounds.append(await draws(proxy, prompt, count, f"v{version}-"))
        probability = fleet.next_token(version, prompt, ACTIONS)
        exact = {token: probability[token] for token in ACTIONS}
        assert chi_square(rounds[-1], exact) < 30.7  # 3 degrees of freedom, p = 1e-6
        pairs = [4 * (a - 4) + (b - 4) for a, b in zip(rounds[-1][::2], rounds[-1][1::2], strict=True)]
        joint = {4 * (a - 4) + (b - 4): exact[a] * exact[b] for a in ACTIONS for b in ACTIONS}
        assert chi_square(pairs, joint) < 56.5  # 15 degrees of freedom, p = 1e-6
    chance = sum(p * p for p in exact.values())
    for one, other in ((1, 2), (2, 3), (1, 3)):
        same = sum(a == b for a, b in zip(rounds[one], rounds[other], strict=True)) / count
        assert abs(same - chance) < 5 * (chance * (1 - chance) / count) ** 0.5


async def test_rows_of_a_mixed_batch_keep_their_own_distributions(fleet: Fleet, proxy: LLMProxy) -> None:
    """Masked and free requests of several lengths mixed: each row is drawn from its own probabilities."""
    version = proxy.stats().version
    asked = [prompt for i in range(40) for prompt in [prompts(1, length=10 + i, seed=i)[0]] * 25]
    masks = [ACTIONS if i % 3 else None for i in range(len(asked))]
    requests = [
        GenerateRequest(f"t{i}", prompt, 1, sampling=MASKED if mask else FREE)
        for i, (prompt, mask) in enumerate(zip(asked, masks, strict=True))
    ]
    results = await asyncio.gather(*map(proxy.generate, requests))
    score = variance = 0.0
    for prompt, mask, result in zip(asked, masks, results, strict=True):
        probability = fleet.next_token(version, prompt, mask)
        # The drawn token's probability has a known mean and variance under the right distribution.
        mean = sum(p * p for p in probability)
        score += probability[result.token_ids[0]] - mean
        variance += sum(p**3 for p in probability) - mean**2
        assert abs(exp(result.logprobs[0]) - probability[result.token_ids[0]]) < TOLERANCE
    assert abs(score) < 5 * variance**0.5


async def test_a_seed_is_reproducible_yet_differs_by_trajectory_and_turn(proxy: LLMProxy) -> None:
    """vLLM draws the same for equal seeds, whatever the request: members of a group must not share one."""
    seeded = Sampling(ignore_eos=True, seed=5)

    async def run(id: str, prompt: list[int]) -> list[int]:
        return (await proxy.generate(GenerateRequest(id, prompt, 12, sampling=seeded))).token_ids

    group = [await run(f"t{i}", [3, 9, 4]) for i in range(6)]
    assert len({tuple(tokens) for tokens in group}) == 6
    assert await run("t0", [3, 9, 4]) == group[0]
    turns = [(await run("t0", [3, 9, 4] * n))[0] for n in range(1, 30)]
    assert len(set(turns)) > 5


async def test_killed_engine_goes_on_elsewhere(fleet: Fleet, worker: VLLMWorker) -> None:
    """kill -9 of the engine's process: what had arrived is kept and a second engine continues from it."""
    second = await fleet.start("second")
    seeds = [one._engine.model_config.seed for one in fleet.workers]
    assert seeds[0] != seeds[1]
    proxy = LLMProxy([second], version=0)
    if worker.version != 0:
        await worker.update(0)
        await worker.resume()
    asked = [GenerateRequest(f"t{i}", prompt, 150, sampling=FREE) for i, prompt in enumerate(prompts(4, seed=8))]
    tasks = await in_flight(proxy, asked)
    proxy.add_worker(worker)
    (process,) = second._engine.engine_core.resources.engine_manager.processes
    os.kill(process.pid, signal.SIGKILL)
    for request, result in zip(asked, await asyncio.gather(*tasks), strict=True):
        assert len(result.token_ids) == 150 and result.worker == "first" and result.timing.attempts == 2
        assert result.spans == [Span(0, 0, 150)]
        assert close_to(result.logprobs, fleet.reference(request.prompt_ids, result.token_ids, result.spans))
    fenced = {one.id: one.fenced for one in proxy.stats().workers}
    assert fenced["second"] == "its engine died" and not fenced["first"]
    async with asyncio.timeout(10):
        await second.ended()
    with pytest.raises(WorkerLost):
        await second.probe()
    await proxy.close()


async def test_close_ends_the_engine_and_what_runs(proxy: LLMProxy, worker: VLLMWorker) -> None:
    (process,) = worker._engine.engine_core.resources.engine_manager.processes
    running = asyncio.create_task(worker.generate(GenerateRequest("t", [3, 9], 400, sampling=FREE, request_id="r")))
    await proxy.generate(GenerateRequest("pace", [9, 9], 10, sampling=FREE))
    await worker.close()
    with pytest.raises(WorkerLost, match="closed") as caught:
        await running
    assert caught.value.partial is not None and caught.value.partial.token_ids
    process.join(10)
    assert process.exitcode is not None
    with pytest.raises(WorkerLost, match="closed"):
        await worker.generate(GenerateRequest("t", [3, 9], 4, request_id="r"))


OWNER = """
import asyncio, os, signal, sys
from llmproxy.vllm import VLLMWorker

class NoWeights:
    def engine_args(self): return {}
    async def start(self, engine): pass
    async def close(self): pass

async def main():
    arguments = dict(model=sys.argv[1], dtype="float32", max_model_len=64, enforce_eager=True, block_size=32,
                     kv_cache_memory_bytes=16 << 20, distributed_executor_backend="uni")
    worker = VLLMWorker(arguments, NoWeights(), "w", "cpu")
    await worker.start()
    (process,) = worker._engine.engine_core.resources.engine_manager.processes
    print("PID", process.pid, flush=True)
    sys.stdin.read()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_killed_owner_leaves_no_engine(fleet: Fleet, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    owner = await asyncio.create_subprocess_exec(
        sys.executable, str(script), str(fleet.folders[0]), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    line = b""
    while not line.startswith(b"PID"):
        line = await owner.stdout.readline()
        assert line, "the owner ended before its engine was up"
    engine = os.pidfd_open(int(line.split()[1]))
    owner.kill()
    await owner.wait()
    assert select.select([engine], [], [], 20)[0], "the engine outlived its owner"
    os.close(engine)
