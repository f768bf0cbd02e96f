"""How generations are handed to engines, on two real ones: each mechanism beside its absence, same seeds, in turn.

- Prompt replication: the members of a group are requests of their own, which spread over the engines; in its absence
  a group is one request for all its samples, which one engine answers.
- Queue scheduling with dynamic filtering: as soon as a group is there it is judged, and a new one takes its slots if
  it teaches nothing; in its absence rounds of a whole batch are generated and judged until enough groups are there.

Lengths are heavy-tailed, by prompt and by sample; half of all groups teach nothing; a reward takes 0.2 s. What is
measured is the time until a batch is complete. Both engines share this machine's cores with everything else, so what
spreading can win is less than on devices of their own.

    python benchmarks/end_to_end/scheduling.py            seven seeds
    python benchmarks/end_to_end/scheduling.py --quick    three
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
from _runs import write

from envmanager import Action, Episode, RolloutScheduler, Span, Trajectory, collect
from llmproxy import AffinityRouter, GenerateRequest, GenerateResult, LLMProxy, Sampling
from llmproxy.fleet import Fleet, Slot
from llmproxy.path_loader import PathLoader
from llmproxy.vllm import VLLMWorker
from rollart.distributed.generation import engine_environment
from rollart.models import make_tiny_qwen3
from rollart.runtime.beside import beside
from samplebuffer import Closed, Group, SampleBuffer

ENGINES = 2
SLOTS = 8
"""Sequences that an engine runs at once."""
MEAN, LONGEST = 64, 320
TEACHES = 0.5
REWARD_S = 0.2
PUBLISHED = {"prompt replication": 1.95, "queue scheduling": 3.4}
Step = Callable[[LLMProxy], Awaitable[None]]


class Prompt(msgspec.Struct, frozen=True):
    """A prompt, how long each of its samples becomes, and whether their rewards differ."""

    ids: list[int]
    lengths: list[int]
    teaches: bool


def prompts(seed: int, members: int) -> list[Prompt]:
    """As many as any step needs; long ones are long for all members."""
    draw = random.Random(seed)

    def prompt() -> Prompt:
        hard = draw.lognormvariate(-0.5, 1.0)
        lengths = [max(4, min(LONGEST, round(MEAN * hard * draw.lognormvariate(-0.08, 0.4)))) for _ in range(members)]
        return Prompt([draw.randrange(4, 16) for _ in range(12)], lengths, draw.random() < TEACHES)

    return [prompt() for _ in range(256)]


class OneEngine(AffinityRouter):
    """A group's samples go to one engine; groups take turns."""

    def __init__(self) -> None:
        super().__init__()
        self._homes_of_groups: dict[tuple[int, ...], int] = {}

    def choose(self, request: GenerateRequest, fleet: Fleet) -> Slot | None:
        slots = list(fleet)
        home = self._homes_of_groups.setdefault(tuple(request.prompt_ids), len(self._homes_of_groups))
        return slots[home % len(slots)]


async def generate(proxy: LLMProxy, name: str, prompt: Prompt, member: int) -> GenerateResult:
    length = prompt.lengths[member]
    asked = GenerateRequest(name, prompt.ids, length, sampling=Sampling(ignore_eos=True))
    result = await proxy.generate(asked)
    assert len(result.token_ids) == length
    return result


def batch_of(seed: int, groups: int, members: int) -> Step:
    """All samples of a batch, asked for at once."""

    async def step(proxy: LLMProxy) -> None:
        chosen = prompts(seed, members)[:groups]
        asked = [
            generate(proxy, f"{number}-{member}", prompt, member)
            for number, prompt in enumerate(chosen)
            for member in range(members)
        ]
        await asyncio.gather(*asked)

    return step


class Played:
    """Prompts as episodes of one turn."""

    def __init__(self, proxy: LLMProxy, seed: int, members: int) -> None:
        self._proxy = proxy
        self._prompts = prompts(seed, members)

    async def act(self, episode: Episode) -> Action:
        prompt = self._prompts[int(episode.key)]
        member = int(episode.ticket.member) % len(prompt.lengths)
        result = await generate(self._proxy, episode.id, prompt, member)
        return Action(
            text="",
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            spans=[Span(span.version, span.start, span.end) for span in result.spans],
            prompt_ids=prompt.ids,
            new_segment=False,
        )

    async def reward(self, trajectory: Trajectory) -> float:
        await asyncio.sleep(REWARD_S)
        return self.value(trajectory.key, len(trajectory.turns[0].token_ids))

    def value(self, key: str, length: int) -> float:
        """Rewards differ within a group that teaches."""
        prompt = self._prompts[int(key)]
        return float(prompt.teaches and length == max(prompt.lengths))

    def teaches(self, key: str) -> bool:
        return self._prompts[int(key)].teaches


class OneTurn:
    """An environment that ends with the first action."""

    blocking = False

    async def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return "", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 0.0, True, False, {}


def by_rounds(seed: int, groups: int, members: int) -> Step:
    """Whole batches, one after the other, until enough groups teach."""

    async def step(proxy: LLMProxy) -> None:
        played, keys, kept = Played(proxy, seed, members), itertools.count(), 0
        while kept < groups:
            one = [str(next(keys)) for _ in range(groups)]
            await collect(lambda key: OneTurn(), played, one, group_size=members, concurrency=groups * members)
            await asyncio.sleep(REWARD_S)
            kept += sum(map(played.teaches, one))

    return step


def by_queue(seed: int, groups: int, members: int) -> Step:
    """Groups are judged as they come, and replaced at once; half as many more are under way."""

    async def step(proxy: LLMProxy) -> None:
        played = Played(proxy, seed, members)
        buffer = SampleBuffer(
            map(str, itertools.count()),
            batch_groups=groups,
            group_size=members,
            alpha=0,
            spare_groups=groups // 2,
            keep=_varied,
        )
        scheduler = RolloutScheduler(
            lambda key: OneTurn(),
            played,
            buffer,
            concurrency=(groups + groups // 2) * members,
            reward=played.reward,
            closed=(Closed,),
        )
        batch = await beside(buffer.get_batch(), scheduler.run())
        assert all(played.teaches(group.key) for group in batch.groups)
        buffer.close()

    return step


def _varied(group: Group) -> bool:
    return len({sample.reward for sample in group.samples}) > 1


class Case(msgspec.Struct, frozen=True):
    """A mechanism and its absence; both are given a seed, a number of groups and of their members."""

    mechanism: str
    absence: str
    ours: Callable[[int, int, int], Step]
    theirs: Callable[[int, int, int], Step]
    one_engine: bool
    """Whether in the absence a group stays on one engine."""

    async def seconds(self, workers: list[VLLMWorker], ours: bool, seed: int, groups: int, members: int) -> float:
        step = (self.ours if ours else self.theirs)(seed, groups, members)
        router = OneEngine() if self.one_engine and not ours else AffinityRouter(random=random.Random(seed))
        proxy = LLMProxy(workers, router=router)
        clock = asyncio.get_running_loop().time
        start = clock()
        await step(proxy)
        took = clock() - start
        await proxy.close()
        return took


CASES = (
    Case("prompt replication", "one engine a group", batch_of, batch_of, True),
    Case("queue scheduling", "fixed rounds", by_queue, by_rounds, False),
)
SIZES = ((4, 16), (16, 8))


async def measured(workers: list[VLLMWorker], seeds: int) -> list[dict[str, Any]]:
    """Every case of every seed; which of the two goes first alternates."""
    await CASES[0].seconds(workers, True, 0, 4, 8)  # the engines' first steps are slow
    rows = []
    for case, (groups, members) in itertools.product(CASES, SIZES):
        took: dict[bool, list[float]] = {True: [], False: []}
        for seed in range(seeds):
            for ours in (True, False) if seed % 2 else (False, True):
                took[ours].append(await case.seconds(workers, ours, seed, groups, members))
        ratios = [without / having for having, without in zip(took[True], took[False], strict=True)]
        row = {
            "metric": f"{case.mechanism}, {groups} groups of {members}: seconds until a batch is complete",
            "unit": "s",
            "ours": statistics.median(took[True]),
            "peer": case.absence,
            "peer_value": statistics.median(took[False]),
            "published": PUBLISHED[case.mechanism],
            "ratio": statistics.median(ratios),
            "spread": [min(ratios), max(ratios)],
        }
        print(f"{row['metric']}: {row['ours']:.2f} s beside {row['peer_value']:.2f} s", flush=True)
        rows.append(row)
    return rows


async def run(folder: Path, seeds: int) -> list[dict[str, Any]]:
    arguments = {
        "model": str(make_tiny_qwen3(folder / "model", 0)),
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": SLOTS,
        "kv_cache_memory_bytes": 64 << 20,
        "block_size": 32,
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
    }
    async with AsyncExitStack() as stack:
        workers = []
        for number in range(ENGINES):
            worker = VLLMWorker(arguments, PathLoader("{version}"), f"gen-{number}", "cpu")
            await worker.start()
            stack.push_async_callback(worker.close)
            workers.append(worker)
        return await measured(workers, seeds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three seeds instead of seven")
    quick = parser.parse_args().quick
    os.environ.update(engine_environment())
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(run(Path(folder), 3 if quick else 7))
    write("scheduling", "python benchmarks/end_to_end/scheduling.py" + (" --quick" if quick else ""), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
