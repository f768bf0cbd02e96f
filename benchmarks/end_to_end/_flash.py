"""The experiments of ROLL Flash, one function each, giving rows of our value beside the published one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from _paper import (
    ALFWORLD,
    PARALLEL,
    Measured,
    Row,
    beside,
    changed,
    fleet,
    gain_of,
    h800,
    measure,
    normal_latency,
    over_batched,
    rounds_seconds,
    setup,
)

from rollart.simulate.catalog import builtin

BASE = {"RLVR": ("rlvr-base", 30720, 1)}
SHORT = {"RLVR": ("rlvr-base", 6144, 1)}
"""What fits into the published rollouts of 81 to 89 s: some 13 ms a token."""


def environment_level(quick: bool) -> Iterator[Row]:
    """Environment-level asynchronous over batched rollout, batch 512."""
    cases = ((10, 10, 2.46),) if quick else ((10, 1, 1.16), (10, 7, 2.12), (10, 10, 2.46), (50, 5, 1.20))
    groups = 16 if quick else 64
    for mean, sigma, published in cases:
        ratio = over_batched(mean, sigma, gpus=32, groups=groups, iterations=3)
        words = f"ROLL Flash, {8 * groups} environments, latency N({mean}, {sigma}): asynchronous over batched"
        yield beside(words, "x", ratio, published)


def flash_redundancy(quick: bool) -> Iterator[Row]:
    """ROLL Flash's: 256 rollouts in environments of N(10, 5) s a turn."""
    base = changed(
        setup("8B", "sync_plus", [fleet("H800", 16)], h800(16), {"ALFWorld": ALFWORLD}, groups=32, iterations=5),
        simulate__tasks__ALFWorld=normal_latency(10.0, 5.0),
    )
    plain = measure(base).rollout_s
    for size, groups, value in ((12, 36, 5.45), (11, 36, 5.24), (9, 36, 3.10))[: 1 if quick else 3]:
        run = measure(changed(base, buffer__spare_members=size - 8, buffer__spare_groups=groups - 32))
        yield beside(f"ROLL Flash, {groups} x {size} environments for 32 x 8", "x", plain / run.rollout_s, value)


def flash_scaling(quick: bool) -> Iterator[Row]:
    """ROLL Flash: RLVR on 16 to 128 GPUs, half of them training; 256 prompts of 16, scaled down to an eighth."""
    for name, published, over in (("rlvr-think", 7.6, (2.12, 2.24)), ("rlvr-base", None, (1.53, 2.24))):
        profiles = {"RLVR": (name, 30720, 1)}
        runs: dict[tuple[str, int], Measured] = {}
        for gpus in (4, 16) if quick else (2, 4, 8, 16):
            half = gpus // 2
            for mode, alpha in (("sync_plus", 0.0), ("rollart", 2.0)):
                shared = mode == "sync_plus"
                tree = setup(
                    "8B",
                    mode,
                    [fleet("H800", gpus if shared else half)],
                    h800(gpus if shared else half, shared=shared),
                    profiles,
                    groups=32,
                    size=16,
                    iterations=5,
                    alpha=alpha,
                )
                runs[mode, gpus] = measure(tree)
        least = min(gpus for _, gpus in runs)
        speedup = gain_of(runs["rollart", 16], runs["rollart", least])
        if published and not quick:
            yield beside(f"{name}: asynchronous, 8 times the GPUs", "x", speedup, published)
        most = max(gain_of(runs["rollart", gpus], runs["sync_plus", gpus]) for _, gpus in runs)
        yield beside(f"{name}: asynchronous over synchronous at most", "x", most, over)


def replication(quick: bool) -> Iterator[Row]:
    """ROLL Flash: members of a group as independent requests, over a group as one request to one engine."""
    cases = ((32, 16, 116 / 89), (64, 16, 149 / 81), (16, 32, 162 / 83), (16, 64, 1.84))
    for groups, size, published in cases[1:2] if quick else cases:
        base = setup("8B", "sync_plus", [fleet("H800", 8)], h800(8), BASE, groups=groups, size=size, iterations=4)
        runs = [measure(changed(base, simulate__placement=how)) for how in ("group", "trajectory")]
        yield beside(f"prompt replication, {groups} x {size}", "x", runs[0].rollout_s / runs[1].rollout_s, published)


def queue_scheduling(quick: bool) -> Iterator[Row]:
    """ROLL Flash: batches of 8 prompts x 8 with dynamic filtering. Rounds of 8 prompts, each waited for, until 8 are
    kept; or 8 prompts and 16 more under way at once, each replaced the moment it is filtered.
    """
    rounds, queued = _filtering(BASE, 3 if quick else 10)
    words = f"{queued:.0f} s a batch"
    yield beside("queue scheduling with filtering, over rounds", "x", rounds / queued, 125 / 37, words)


def _filtering(profiles: dict[str, tuple[str, int, int]], batches: int) -> tuple[float, float]:
    """Seconds of a batch by rounds and by the queue."""
    tree = setup("8B", "sync_plus", [fleet("H800", 8)], h800(8), profiles, groups=8, iterations=batches + 3)
    profile = msgspec.to_builtins(msgspec.structs.replace(builtin().profile("rlvr-base"), uniform=0.6))
    filtered = changed(tree, buffer__drop_uniform=True, simulate__tasks={"RLVR": profile})
    queued = measure(changed(filtered, buffer__spare_groups=16)).rollout_s
    return rounds_seconds(filtered, wanted=8, batches=batches), queued


def best_alpha(quick: bool) -> Iterator[Row]:
    """The alpha beyond which less than 3 % is gained: by length, batch and model size."""

    def knee(profile: str, groups: int, model: str) -> float:
        steps = {}
        for alpha in (0.0, 1.0, 2.0, 4.0):
            tree = setup(
                model, "rollart", [fleet("H800", 8, PARALLEL[model])], h800(8), {"RLVR": (profile, 30720, 1)},
                groups=groups, iterations=6, alpha=alpha,
            )  # fmt: skip
            steps[alpha] = measure(tree).step_s
        best = min(steps.values())
        return next(alpha for alpha, step in steps.items() if step <= 1.03 * best)

    yield beside("best alpha, mean length 2k", "alpha", knee("rlvr-base", 16, "8B"), None, "rises with length")
    yield beside("best alpha, mean length 11k", "alpha", knee("rlvr-think", 16, "8B"), None, "rises with length")
    if not quick:
        yield beside(
            "best alpha, 11k, batch four times", "alpha", knee("rlvr-think", 64, "8B"), None, "falls with batch"
        )
        yield beside("best alpha, 11k, 14B", "alpha", knee("rlvr-think", 16, "14B"), None, "flat in model size")


def few_turns(quick: bool) -> Iterator[Row]:
    """Redundancy where turn counts decay as the published times do: 45 s is four turns of 10 s, 243 s is 24."""
    if quick:
        return
    profile = normal_latency(10.0, 5.0) | {"turns": {"mean": 5, "std": 5, "low": 1, "high": 50}}
    base = changed(
        setup(
            "8B",
            "sync_plus",
            [fleet("H800", 16)],
            h800(16),
            {"ALFWorld": (*ALFWORLD[:2], 50)},
            groups=32,
            iterations=5,
        ),
        simulate__tasks__ALFWorld=profile,
    )
    plain = measure(base).rollout_s
    for size, groups, value in ((12, 36, 5.45), (11, 36, 5.24), (9, 36, 3.10)):
        run = measure(changed(base, buffer__spare_members=size - 8, buffer__spare_groups=groups - 32))
        yield beside(f"5 turns on average, {groups} x {size} for 32 x 8", "x", plain / run.rollout_s, value)


def alike(quick: bool) -> Iterator[Row]:
    """Environment-level async where episodes have 20 turns each; and where answers have 150 tokens each, too."""
    if quick:
        return
    for words, answers in (("20 turns each", {}), ("20 turns and 150 tokens each", {"response": {"mean": 150}})):
        for sigma, published in ((1, 1.16), (10, 2.46)):
            profile = normal_latency(10.0, sigma) | {"turns": {"mean": 20}, "instance": 0.0} | answers
            runs = [
                measure(
                    changed(
                        setup(
                            "8B", mode, [fleet("H800", 32)], h800(32), {"ALFWorld": ALFWORLD}, groups=64, iterations=3
                        ),
                        simulate__tasks__ALFWorld=profile,
                    )
                ).rollout_s
                for mode in ("sync", "sync_plus")
            ]
            seconds = f"{runs[0]:.0f} s, {runs[1]:.0f} s"
            yield beside(
                f"{words}, N(10, {sigma}): asynchronous over batched", "x", runs[0] / runs[1], published, seconds
            )


def short_answers(quick: bool) -> Iterator[Row]:
    """Prompt replication, asynchronous over synchronous and filtering where no answer has more than 6,144 tokens;
    replication on eight engines, on 32, where some have no group, and there with prompts that differ twice as much.
    """
    if quick:
        return
    differing = msgspec.to_builtins(builtin().profile("rlvr-base")) | {"instance": 1.0}
    cases: dict[str, tuple[int, dict[str, Any]]] = {
        "8 engines": (8, {}),
        "32 engines": (32, {}),
        "32 engines, differing prompts": (32, {"simulate__tasks": {"RLVR": differing}}),
    }
    for name, (engines, tasks) in cases.items():
        for groups, size, published in ((32, 16, 116 / 89), (64, 16, 149 / 81), (16, 32, 162 / 83), (16, 64, 1.84)):
            base = changed(
                setup(
                    "8B",
                    "sync_plus",
                    [fleet("H800", engines)],
                    h800(8),
                    SHORT,
                    groups=groups,
                    size=size,
                    iterations=4,
                ),
                **tasks,
            )
            runs = [measure(changed(base, simulate__placement=how)).rollout_s for how in ("group", "trajectory")]
            words = f"prompt replication on {name}, {groups} x {size}"
            yield beside(words, "x", runs[0] / runs[1], published, f"{runs[0]:.0f} s, {runs[1]:.0f} s")
    by_rounds, queued = _filtering(SHORT, 10)
    words = f"{by_rounds:.0f} s, {queued:.0f} s"
    yield beside("queue scheduling with filtering, over rounds", "x", by_rounds / queued, 125 / 37, words)
    both = [measure(tree) for tree in _sixteen(SHORT)]
    yield beside("asynchronous over synchronous, 16 GPUs", "x", gain_of(both[1], both[0]), (1.53, 2.24), _steps(both))


def full_caches(quick: bool) -> Iterator[Row]:
    """Thoughts of 11k tokens: a synchronous run that sends each group to one engine, and devices with 141 GB."""
    if quick:
        return
    think = {"RLVR": ("rlvr-think", 30720, 1)}
    large = msgspec.to_builtins(builtin().hardware["H800"]) | {"memory_gb": 141}
    for name, memory in (("", {}), ("141 GB, ", {"simulate__hardware": {"H800": large}})):
        plain, ours = (changed(tree, **memory) for tree in _sixteen(think))
        for words, peer in (("", plain), ("groups on one engine, ", changed(plain, simulate__placement="group"))):
            if name or words:
                both = [measure(peer), measure(ours)]
                note = f"{_steps(both)}; {both[1].run.preemptions} preemptions"
                metric = f"think, {name}{words}asynchronous over synchronous"
                yield beside(metric, "x", gain_of(both[1], both[0]), (2.12, 2.24), note)


def _sixteen(profiles: dict[str, tuple[str, int, int]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Synchronous and asynchronous on 16 GPUs, as `flash_scaling` has them."""
    sizes: dict[str, int] = {"groups": 32, "size": 16, "iterations": 5}
    return (
        setup("8B", "sync_plus", [fleet("H800", 16)], h800(16, shared=True), profiles, **sizes),
        setup("8B", "rollart", [fleet("H800", 8)], h800(8), profiles, alpha=2.0, **sizes),
    )


def _steps(runs: list[Measured]) -> str:
    return ", ".join(f"{run.step_s:.0f} s" for run in runs)


FLASH: dict[str, Callable[[bool], Iterator[Row]]] = {
    "environment_level": environment_level,
    "flash_redundancy": flash_redundancy,
    "flash_scaling": flash_scaling,
    "replication": replication,
    "queue_scheduling": queue_scheduling,
    "best_alpha": best_alpha,
    "few_turns": few_turns,
    "alike": alike,
    "short_answers": short_answers,
    "full_caches": full_caches,
}
