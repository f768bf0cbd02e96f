"""One way to use a set of devices, as a change of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from msgspec import Struct
from msgspec.structs import replace


class Part(Struct, frozen=True):
    """Devices of one class, and how engines are made of them."""

    hardware: str
    gpus: int
    tensor_parallel: int = 1
    role: str = "both"


class Candidate(Struct, frozen=True):
    """`affinity` maps tasks to classes; empty where any engine takes any task."""

    generation: tuple[Part, ...]
    training: Part
    affinity: tuple[tuple[str, str], ...] = ()
    alpha: float = 1.0
    spare_groups: int = 0
    spare_members: int = 0

    def tree(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration with this in place of what it said."""
        tree: dict[str, Any] = deepcopy(dict(base))
        world = tree.setdefault("simulate", {})
        world["generation"] = [_fleet(part) for part in self.generation]
        world["training"] = _training(world.get("training") or {}, self.training)
        buffer = tree.setdefault("buffer", {})
        buffer["alpha"] = self.alpha
        buffer["spare_groups"], buffer["spare_members"] = self.spare_groups, self.spare_members
        generation = tree.setdefault("generation", {})
        generation.pop("affinity", None)
        if self.affinity:
            generation["affinity"] = {"default": self.generation[0].hardware, **dict(self.affinity)}
        return tree  # as many environments as the file says; where it does not, as the buffer has room for

    @property
    def words(self) -> str:
        """In one line."""
        fleets = " + ".join(
            f"{part.gpus} {part.hardware}"
            + (f" TP{part.tensor_parallel}" if part.tensor_parallel > 1 else "")
            + (f" {part.role}" if part.role != "both" else "")
            for part in self.generation
        )
        moved = ", ".join(f"{task} on {hardware}" for task, hardware in self.affinity)
        spare = f", {self.spare_groups}+{self.spare_members} spare" if self.spare_groups or self.spare_members else ""
        trains = f"{self.training.gpus} {self.training.hardware} train"
        return f"{trains}, {fleets} generate, alpha {self.alpha:g}{spare}" + (f"; {moved}" if moved else "")


def _parallel_of(candidate: Candidate, part: Part) -> int:
    """How engines of this class are made there, where the devices allow the same here."""
    found = (one.tensor_parallel for one in candidate.generation if one.hardware == part.hardware)
    parallel = next(found, part.tensor_parallel)
    return parallel if part.gpus % parallel == 0 else part.tensor_parallel


def _training(given: Mapping[str, Any], part: Part) -> dict[str, Any]:
    """As many devices for each rank that pushes its part of the weights as were given."""
    training = {**given, "hardware": part.hardware, "gpus": part.gpus, "shared": False}
    if "push_streams" in given and "gpus" in given:
        training["push_streams"] = max(1, round(given["push_streams"] * part.gpus / given["gpus"]))
    return training


def _fleet(part: Part) -> dict[str, Any]:
    return {
        "hardware": part.hardware,
        "gpus": part.gpus,
        "tensor_parallel": part.tensor_parallel,
        "role": part.role,
    }


def steps_between(start: Candidate, end: Candidate) -> list[tuple[str, Candidate]]:
    """`start` turned into `end` one kind of decision after the other, each with its name."""
    found: list[tuple[str, Candidate]] = []
    current = start
    split = tuple(replace(part, tensor_parallel=_parallel_of(start, part), role="both") for part in end.generation)
    if len({part.hardware for part in split}) < len(split):  # a class cut into roles has no such form
        split = end.generation
    for name, change in (
        ("split", {"generation": split, "training": end.training}),
        ("tensor parallel, prefill apart", {"generation": end.generation}),
        ("affinity", {"affinity": end.affinity}),
        ("alpha", {"alpha": end.alpha}),
        ("redundancy", {"spare_groups": end.spare_groups, "spare_members": end.spare_members}),
    ):
        following = replace(current, **change)
        if following != current:
            found.append((name, following))
            current = following
    return found
