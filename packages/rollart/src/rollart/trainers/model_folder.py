"""A Hugging Face model folder: its shape, its weights by name, and a copy of it with other weights.

Invariant: what is read and written again is equal bit by bit, under the same names, in the same types
(``tests/rollart/test_rollart_trainer_folder.py``). Weights are read tensor by tensor; none is unpickled.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from torch import Tensor

from rollart.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TOKENIZER = "tokenizer*"


Count = Annotated[int, Meta(ge=1)]
T = TypeVar("T")


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What decides how a model can be cut and what it takes, from its config.json."""

    model_type: str
    vocab_size: Count
    hidden_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    intermediate_size: Count
    head_dim: Count | None = None
    max_position_embeddings: Count | None = None
    dtype: str | None = None
    torch_dtype: str | None = None

    @property
    def head_size(self) -> int:
        """Columns of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


class ModelFolder:
    """A folder with config.json, a tokenizer and safetensors."""

    def __init__(self, path: Path, config: dict[str, Any], files: dict[str, str]) -> None:
        """`config` is the content of config.json, `files` names each tensor's file."""
        self.path = path
        self.config = config
        self.files = files
        key_value_heads = config.get("num_key_value_heads") or config.get("num_attention_heads")
        self.shape = msgspec.convert({**config, "num_key_value_heads": key_value_heads}, ModelShape)

    @classmethod
    def read(cls, path: str | Path) -> ModelFolder:
        """Raises ConfigError (key ``model.path``) naming what is missing, damaged or of another model."""
        path = Path(path)
        for pattern, what in (("config.json", "a model"), (_TOKENIZER, "a tokenizer"), ("*.safetensors", "weights")):
            if not (os.path.isdir(path) and any(path.glob(pattern))):
                raise _refused(path, f"holds no {pattern}: name a Hugging Face folder with {what}")
        config = _json(path / "config.json", dict[str, Any])
        try:
            folder = cls(path, config, _files(path))
        except msgspec.ValidationError as error:
            reason = f"its config.json lacks what a decoder has ({error}); name a Qwen3 or Llama folder"
            raise _refused(path, reason) from None
        _check_kind(folder)
        _check_weights(folder)
        return folder

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


def _refused(path: Path, reason: str) -> ConfigError:
    return ConfigError("model.path", str(path), reason)


def _json(file: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise _refused(file.parent, f"its {file.name} cannot be read ({error}); copy it again") from None


def _files(path: Path) -> dict[str, str]:
    """The file of each tensor. The header of every file is read: one that is cut off is found here."""
    single, index = path / _SINGLE, path / _INDEX
    if not index.exists():
        files = [single] if single.exists() else sorted(path.glob("*.safetensors"))
        return {name: file.name for file in files for name in _names(file)}
    found = _json(index, dict[str, Any]).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise _refused(path, f"its {_INDEX} has no weight_map of names to files; copy it again")
    held = {file: set(_names(path / file)) for file in set(found.values())}
    for name, file in found.items():
        if name not in held[file]:
            raise _refused(path, f"its {_INDEX} says that {file} holds {name}, which it does not; copy both again")
    return found


def _names(file: Path) -> list[str]:
    """In the file's own order: ranks export together, so each must go through them alike."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (OSError, SafetensorError) as error:
        raise _refused(
            file.parent, f"its {file.name} is no whole safetensors file ({error}); copy it again"
        ) from None


def _check_kind(folder: ModelFolder) -> None:
    """Both backends and the engines take what generates text from left to right."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    named = folder.config.get("architectures") or [KNOWN.get(folder.shape.model_type)]
    if folder.shape.model_type not in KNOWN or named[0] not in KNOWN.values():
        reason = f"a {folder.shape.model_type} ({named[0]}) is no causal language model; name a Qwen3 or Llama folder"
        raise _refused(folder.path, reason)


def _check_weights(folder: ModelFolder) -> None:
    """The weights are those that config.json describes: as many layers, as many words."""
    shape = folder.shape
    layers = {found[1] for name in folder.files if (found := re.search(r"\blayers\.(\d+)\.", name))}
    if layers and len(layers) != shape.num_hidden_layers:
        reason = f"its config.json has {shape.num_hidden_layers} layers, its weights {len(layers)}; copy both again"
        raise _refused(folder.path, reason)
    said = (shape.vocab_size, shape.hidden_size)
    for name in folder.files:
        if name.endswith("embed_tokens.weight") and (table := folder.shape_of(name)) != said:
            raise _refused(folder.path, f"{name} is {table}, by config.json it is {said}; copy both again")
