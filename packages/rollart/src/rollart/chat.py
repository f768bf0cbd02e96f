"""How text becomes tokens and tokens become actions: chat formats of model families, and plain text.

Invariants (tests/rollart/test_rollart_chat.py):
- the tokens of a conversation, built turn by turn, are those that the family's template makes of the whole;
- text of an environment never becomes a control token, whatever it says;
- a reply that was cut before its end token is closed before the next message.

Formats: Qwen (ChatML with Hermes tool calls) and Llama 3, as their model cards describe them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, Protocol

import msgspec

Family = Literal["qwen3", "llama3", "plain"]


# Characters or tokens of a text that comes again often, such as a small map. Of longer ones a few are kept, for the
# members of a group see the same: as many as of short ones would take gigabytes.
_SHORT, _RECENT = 128, 256


class Codec:
    """Text to token ids and back, by a Hugging Face tokenizer. Texts that come again are encoded once."""

    def __init__(self, tokenizer: Any, cache: int = 65_536) -> None:
        encode: Callable[..., list[int]] = tokenizer.encode
        decode: Callable[..., str] = tokenizer.decode
        self._tokenizer = tokenizer
        # Split: what looks like a control token in text is text.
        caches = lru_cache(cache), lru_cache(_RECENT)
        self._encode = [
            kept(lambda text: tuple(encode(text, add_special_tokens=False, split_special_tokens=True)))
            for kept in caches
        ]
        self._decode = [kept(lambda ids: decode(list(ids))) for kept in caches]

    def encode(self, text: str) -> list[int]:
        return list(self._encode[len(text) > _SHORT](text))

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._decode[len(token_ids) > _SHORT](tuple(token_ids))

    def control(self, name: str) -> int:
        """The id of a control token. Raises ValueError when the tokenizer has none of that name."""
        found = self._tokenizer.get_vocab().get(name)
        if found is None:
            raise ValueError(f"the tokenizer has no token {name!r}")
        return int(found)


class Format(Protocol):
    """One way to write an episode as tokens."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a reply."""
        ...

    def observation(self, text: str, previous: Sequence[int] | None) -> list[int]:
        """The tokens that a turn adds before its reply; `previous` are those of the reply before it, if any."""
        ...

    def action(self, token_ids: Sequence[int]) -> str:
        """What the environment is told."""
        ...


class Plain:
    """Observations as they are; a reply is all that was generated."""

    stop_token_ids: tuple[int, ...] = ()

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def observation(self, text: str, previous: Sequence[int] | None) -> list[int]:
        return self._codec.encode(text)

    def action(self, token_ids: Sequence[int]) -> str:
        return self._codec.decode(token_ids)


class Template(msgspec.Struct, frozen=True):
    """A family's control tokens. A message is `head`, role, `neck`, text, `end`; `between` follows a reply's end."""

    begin: str
    head: str
    neck: str
    after_role: str
    end: str
    between: str
    tool_role: str
    tool_text: str

    @property
    def control(self) -> list[str]:
        """The control tokens it needs."""
        return [token for token in (self.begin, self.head, self.neck, self.end) if token]


TEMPLATES = {
    "qwen3": Template(
        "", "<|im_start|>", "", "\n", "<|im_end|>", "\n", "user", "<tool_response>\n{}\n</tool_response>"
    ),
    "llama3": Template(
        "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "\n\n", "<|eot_id|>", "", "ipython", "{}"
    ),
}


class Chat:
    """A conversation: the environment is the user, or the tool after a tool call."""

    def __init__(self, codec: Codec, family: str, *, system: str = "", tools: bool = False) -> None:
        self._codec = codec
        self._family = family
        self._template = TEMPLATES[family]
        self._system = system
        self._tools = tools
        self._control = {name: codec.control(name) for name in self._template.control}
        self._end = self._control[self._template.end]
        self.stop_token_ids = (self._end,)

    def observation(self, text: str, previous: Sequence[int] | None) -> list[int]:
        template, encode = self._template, self._codec.encode
        role = "user"
        if previous is None:
            ids = [self._control[template.begin]] if template.begin else []
            if self._system:
                ids += [*self._message("system", self._system), *encode(template.between)]
        else:
            ids = [] if previous and previous[-1] == self._end else [self._end]
            ids += encode(template.between)
            if self._tools and self._call(previous) is not None:
                role, text = template.tool_role, template.tool_text.format(text)
        return [*ids, *self._message(role, text), *encode(template.between), *self._opening("assistant", "")]

    def action(self, token_ids: Sequence[int]) -> str:
        if self._tools and (call := self._call(token_ids)) is not None:
            return msgspec.json.encode(call).decode()
        return self._said(token_ids)

    def _said(self, token_ids: Sequence[int]) -> str:
        text = self._codec.decode([token for token in token_ids if token != self._end])
        return text.rpartition("</think>")[2].strip()

    def _call(self, token_ids: Sequence[int]) -> ToolCall | None:
        return parse_tool_call(self._said(token_ids), self._family)

    def _message(self, role: str, text: str) -> list[int]:
        return [*self._opening(role, text), self._end]

    def _opening(self, role: str, text: str) -> list[int]:
        """A message without its end. Text between two control tokens is encoded in one piece, as a template would."""
        template, control = self._template, self._control
        if not template.neck:
            return [control[template.head], *self._codec.encode(role + template.after_role + text)]
        head = [control[template.head], *self._codec.encode(role), control[template.neck]]
        return head + self._codec.encode(template.after_role + text)


class ToolCall(msgspec.Struct, frozen=True):
    """A tool that the model wants called."""

    name: str
    arguments: dict[str, Any]


class _LlamaCall(msgspec.Struct):
    name: str
    parameters: dict[str, Any]


def parse_tool_call(text: str, family: str) -> ToolCall | None:
    """The last tool call of a reply; None when there is none, or it is not well formed."""
    try:
        if family == "llama3":
            call = msgspec.json.decode(text.rpartition("<|python_tag|>")[2], type=_LlamaCall)
            return ToolCall(call.name, call.parameters)
        _, opened, rest = text.rpartition("<tool_call>")
        body, closed, _ = rest.partition("</tool_call>")
        return msgspec.json.decode(body, type=ToolCall) if opened and closed else None
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return None


def make_format(codec: Codec, family: Family, *, system: str = "", tools: bool = False) -> Format:
    """The format of a family. Raises ValueError when the tokenizer lacks its control tokens."""
    if family == "plain":
        return Plain(codec)
    return Chat(codec, family, system=system, tools=tools)
