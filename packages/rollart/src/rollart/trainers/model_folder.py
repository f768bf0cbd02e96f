"""A Hugging Face model folder: its shape, its weights by name, and a copy of it with other weights.

Invariant: what is read and written again is equal bit by bit, under the same names, in the same types
(``tests/rollart/test_rollart_trainer_folder.py``). Weights are read tensor by tensor; none is unpickled.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from rollart.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TOKENIZER = "tokenizer*"


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What decides how a model can be cut, from its config.json."""

    model_type: str
    vocab_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int


class ModelFolder:
    """A folder with config.json, a tokenizer and safetensors."""

    def __init__(self, path: Path, config: dict[str, Any], files: dict[str, str]) -> None:
        """`config` is the content of config.json, `files` names each tensor's file."""
        self.path = path
        self.config = config
        self.files = files
        self.shape = msgspec.convert({"num_key_value_heads": config.get("num_attention_heads"), **config}, ModelShape)

    @classmethod
    def read(cls, path: str | Path) -> ModelFolder:
        """Raises ConfigError (key ``model.path``) when something is missing, naming it."""
        path = Path(path)
        for pattern, what in (("config.json", "a model"), (_TOKENIZER, "a tokenizer"), ("*.safetensors", "weights")):
            if not any(path.glob(pattern)):
                reason = f"holds no {pattern}: name a Hugging Face folder with {what}"
                raise ConfigError("model.path", str(path), reason)
        config = msgspec.json.decode((path / "config.json").read_bytes(), type=dict[str, Any])
        try:
            return cls(path, config, _files(path))
        except msgspec.ValidationError as error:
            reason = f"its config.json lacks what a decoder has ({error}); name a Qwen3 or Llama folder"
            raise ConfigError("model.path", str(path), reason) from None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every stored tensor by name, one at a time."""
        for name in self.files:
            yield name, self.tensor(name)

    def tensor(self, name: str) -> Tensor:
        """A stored tensor. Raises KeyError when the folder has none of this name."""
        from safetensors import safe_open

        with safe_open(self.path / self.files[name], framework="pt") as opened:
            return opened.get_tensor(name)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a stored tensor, without reading it."""
        from safetensors import safe_open

        with safe_open(self.path / self.files[name], framework="pt") as opened:
            return tuple(opened.get_slice(name).get_shape())

    def write(self, target: str | Path, tensors: Iterator[tuple[str, Tensor]], *, writes: bool = True) -> None:
        """A folder like this one with other weights, each file as soon as its tensors are there.

        All of `tensors` are consumed, whether or not this process `writes`: making them may be collective. Raises
        ValueError when one is missing or there is one too many.
        """
        from safetensors.torch import save_file

        target = Path(target)
        if writes:
            target.mkdir(parents=True, exist_ok=True)
            self._copy_rest(target)
        missing = dict(self.files)
        waiting: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors:
            file = missing.pop(name, None)
            if file is None:
                if self._tied(name):
                    continue
                raise ValueError(f"tensor {name!r} is not in {self.path}; export to the folder it came from")
            if not writes:
                continue
            waiting.setdefault(file, {})[name] = tensor.to(self._dtype(name)).cpu().contiguous()
            if file not in missing.values():
                save_file(waiting.pop(file), target / file, metadata={"format": "pt"})
        if missing:
            raise ValueError(f"tensor {next(iter(missing))!r} of {self.path} was not given")

    def _tied(self, name: str) -> bool:
        """Models with tied embeddings know the output layer by name, and their folders do not store it."""
        return name == "lm_head.weight" and bool(self.config.get("tie_word_embeddings"))

    def _dtype(self, name: str) -> Any:
        return self.tensor(name).dtype

    def _copy_rest(self, target: Path) -> None:
        for entry in self.path.iterdir():
            if entry.is_file() and entry.suffix != ".safetensors":
                shutil.copyfile(entry, target / entry.name)


def _files(path: Path) -> dict[str, str]:
    index = path / _INDEX
    if index.exists():
        found = msgspec.json.decode(index.read_bytes(), type=dict[str, Any])["weight_map"]
        return dict(found)
    from safetensors import safe_open

    files = [path / _SINGLE] if (path / _SINGLE).exists() else sorted(path.glob("*.safetensors"))
    names: dict[str, str] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names.update(dict.fromkeys(opened.keys(), file.name))
    return names
