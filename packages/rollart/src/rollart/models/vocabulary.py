"""Vocabularies of tiny models: the symbols of small games, or bytes with the control tokens of a chat.

Invariants (tests/rollart/test_rollart_models.py):
- with `symbols`, every character of an observation and every action is one token;
- with `bytes`, any text goes to tokens and back unchanged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

Vocabulary = Literal["symbols", "bytes"]

# 16 entries: two control tokens, the cells, the layout, the moves and three spares for other small games.
SYMBOLS = ("<pad>", "<eos>", "S", "F", "H", "G", "P", "\n", ">", "L", "D", "R", "U", ".", "#", "?")


def _byte_level() -> tuple[str, ...]:
    from tokenizers.pre_tokenizers import ByteLevel

    # Spares make the size divisible by 8, so that the output layer can be cut over as many ranks.
    spares = (f"<|spare_{number}|>" for number in range(5))
    return (*sorted(ByteLevel.alphabet()), "<|endoftext|>", "<|im_start|>", "<|im_end|>", *spares)


VOCABULARIES: dict[str, tuple[str, ...]] = {"symbols": SYMBOLS, "bytes": _byte_level()}
# Padding and end of sequence.
CONTROL = {"symbols": ("<pad>", "<eos>"), "bytes": ("<|endoftext|>", "<|im_end|>")}


def write_tokenizer(folder: Path, vocabulary: Vocabulary) -> None:
    """Write a Hugging Face tokenizer into `folder`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pad, eos = CONTROL[vocabulary]
    ids = {symbol: i for i, symbol in enumerate(VOCABULARIES[vocabulary])}
    options: dict[str, Any] = {"pad_token": pad, "eos_token": eos}
    if vocabulary == "symbols":
        tokenizer = Tokenizer(models.WordLevel(ids, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        tokenizer.decoder = decoders.Fuse()
        options["unk_token"] = "?"
    else:
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        options["additional_special_tokens"] = ["<|im_start|>"]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **options
    ).save_pretrained(folder)
