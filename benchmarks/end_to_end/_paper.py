"""What the papers' experiments are made of: the set-ups that they share, and how one simulation is measured."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Mapping
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from envmanager import collect
from llmproxy import LLMProxy
from rollart.policy import TokenPolicy
from rollart.runtime.folder import RunFolder
from rollart.simulate.build import make_world
from rollart.simulate.catalog import builtin
from rollart.simulate.clock import VirtualLoop
from rollart.simulate.config import make_simulation
from rollart.simulate.run import Simulated, simulate
from rollart.simulate.spread import Spread
from rollart.simulate.summary import Summary, summarize

MODELS = {"8B": "qwen3-8b", "14B": "qwen3-14b", "32B": "qwen3-32b"}
PARALLEL = {"8B": 1, "14B": 2, "32B": 4}
AGENTIC = {
    "WebShop": ("webshop", 1024, 30),
    "FrozenLake": ("frozenlake", 256, 100),
    "GEM-math": ("gem-math", 16384, 5),
    "GEM-game": ("gem-game", 16384, 1),
}
ALFWORLD = ("alfworld", 4096, 30)
SWE = {"SWE": ("swe-bench", 2048, 50)}
TO_H20 = {"default": "H800", "GEM-math": "H20", "GEM-game": "H20"}

logging.getLogger().setLevel(logging.ERROR)


class Row(msgspec.Struct, kw_only=True):
    """One of our numbers beside a published one."""

    metric: str
    unit: str
    ours: float | None
    peer: str | None = None
    peer_value: float | None = None
    published: str | None = None
    ratio: float | None = None
    spread: str | None = None


def beside(metric: str, unit: str, ours: float, published: float | tuple[float, float] | None, note: str = "") -> Row:
    """A row with the deviation from a published value, or from the nearer end of a published range."""
    if published is None:
        return Row(metric=metric, unit=unit, ours=ours, spread=note or None)
    low, high = published if isinstance(published, tuple) else (published, published)
    nearest = min(max(ours, low), high)
    deviation = 100 * (ours / nearest - 1) if nearest else 0.0
    text = f"{low:g}" if low == high else f"{low:g}-{high:g}"
    words = "within" if nearest == ours and low != high else f"{deviation:+.0f} %"
    return Row(metric=metric, unit=unit, ours=ours, published=text, spread=f"{words}{'; ' + note if note else ''}")


def tasks_of(profiles: Mapping[str, tuple[str, int, int]]) -> dict[str, Any]:
    return {
        name: {"kind": "env", "env": f"sim:{profile}", "max_tokens": tokens, "max_turns": turns}
        for name, (profile, tokens, turns) in profiles.items()
    }


def setup(
    model: str,
    mode: str,
    generation: list[dict[str, Any]],
    training: dict[str, Any],
    profiles: Mapping[str, tuple[str, int, int]],
    *,
    groups: int,
    size: int = 8,
    alpha: float = 0.0,
    iterations: int = 8,
    transport: str = "broadcast",
    context: int = 32768,
    affinity: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A configuration as nested dictionaries. The papers' systems have no parity probe, so it takes no time here."""
    tree: dict[str, Any] = {
        "run": {"name": "paper", "mode": mode, "iterations": iterations},
        "tasks": tasks_of(profiles),
        "generation": {"max_model_len": context},
        "buffer": {"batch_groups": groups, "group_size": size, "alpha": alpha, "drop_uniform": False},
        "eval": {"every": 1000, "episodes": 1},
        "checkpoint": {"every": 1000},
        "simulate": {
            "model": MODELS.get(model, model),
            "generation": generation,
            "training": training,
            "tasks": {name: profile for name, (profile, _, _) in profiles.items()},
            "transport": transport,
            "probe": False,
        },
    }
    if affinity:
        tree["generation"]["affinity"] = dict(affinity)
    return tree


def changed(tree: dict[str, Any], **paths: Any) -> dict[str, Any]:
    """A copy with some keys set; `__` stands for the dot."""
    copy = deepcopy(tree)
    for path, value in paths.items():
        *sections, leaf = path.split("__")
        section = copy
        for name in sections:
            section = section.setdefault(name, {})
        section[leaf] = value
    return copy


class Measured(msgspec.Struct):
    """A simulation's summary, the run itself, and the CPU seconds that it took here."""

    summary: Summary
    run: Simulated
    cpu_s: float

    @property
    def step_s(self) -> float:
        return self.summary.step_s

    @property
    def rollout_s(self) -> float:
        """What an iteration waits for its batch."""
        return self.summary.parts.get("get_batch", 0.0)


_SEEN: dict[str, Measured] = {}


def measure(tree: dict[str, Any]) -> Measured:
    """Simulate, once for each configuration."""
    key = msgspec.json.encode(tree, order="sorted").decode()
    if key not in _SEEN:
        simulation = make_simulation(tree)
        start = time.process_time()
        with tempfile.TemporaryDirectory() as place:
            folder = RunFolder(Path(place) / "run")
            folder.create(simulation.config)
            run = simulate(simulation, folder)
            folder.close()
        _SEEN[key] = Measured(summarize(simulation, run), run, time.process_time() - start)
    return _SEEN[key]


def rounds_seconds(tree: dict[str, Any], *, wanted: int, batches: int) -> float:
    """Seconds of a batch when `wanted` prompts are generated, waited for and filtered, until so many are kept."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_rounds(tree, wanted, batches)) / batches


async def _rounds(tree: dict[str, Any], wanted: int, batches: int) -> float:
    simulation = make_simulation(tree)
    world = make_world(simulation)
    setting, size = world.setting, simulation.config.buffer.group_size
    proxy = LLMProxy(world.engines, router=world.parts().router, version=0)
    policy = TokenPolicy(proxy, setting.settings, prefix="round-", observe=lambda *_: None)
    keys = setting.train_keys()
    for _ in range(batches):
        kept = 0
        while kept < wanted:
            asked = list(islice(keys, wanted))
            played = await collect(
                setting.make_env, policy, asked, group_size=size, reward=setting.tasks.reward, limits=setting.limits
            )
            kept += sum(len({each.reward for each in group.trajectories}) > 1 for group in played.groups)
    await proxy.close()
    return asyncio.get_running_loop().time()


def fleet(hardware: str, gpus: int, parallel: int = 1, role: str = "both") -> dict[str, Any]:
    return {"hardware": hardware, "gpus": gpus, "tensor_parallel": parallel, "role": role}


def h800(gpus: int, *, shared: bool = False) -> dict[str, Any]:
    return {"hardware": "H800", "gpus": gpus, "shared": shared}


def normal_latency(mean: float, sigma: float) -> dict[str, Any]:
    """ALFWorld with turns that take so long."""
    slow = Spread(mean=mean, std=sigma, shape="normal")
    tree: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(builtin().profile("alfworld"), step_s=slow))
    return tree


def gain_of(better: Measured, worse: Measured) -> float:
    return better.summary.tokens_per_s / worse.summary.tokens_per_s


def parts_of(run: Measured) -> str:
    return ", ".join(f"{name} {value:.0f}" for name, value in run.summary.parts.items() if value >= 0.5)


def over_batched(mean: float, sigma: float, *, gpus: int, groups: int, iterations: int) -> float:
    """How much sooner trajectory-level rollout has a batch than batch-level, with turns of N(mean, sigma) s."""
    rollouts = []
    for mode in ("sync_plus", "sync"):
        tree = setup(
            "8B",
            mode,
            [fleet("H800", gpus)],
            h800(gpus),
            {"ALFWorld": ALFWORLD},
            groups=groups,
            iterations=iterations,
        )
        rollouts.append(measure(changed(tree, simulate__tasks__ALFWorld=normal_latency(mean, sigma))).rollout_s)
    return rollouts[1] / rollouts[0]
