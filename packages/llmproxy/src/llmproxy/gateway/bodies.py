"""What is read of a body when no header says which trajectory it belongs to, and the checks that this allows.

Only these fields are looked at; the bytes that are passed on stay as they came
(tests/llmproxy/test_llmproxy_gateway_bad_input.py).
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Struct

from llmproxy.errors import InvalidRequest

from .refusals import Refusal

Id = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""A token id of some vocabulary; which one, the engine knows. Checked while it is decoded, which costs nothing."""
Name = Annotated[str, msgspec.Meta(max_length=256, pattern=r"\A[\x20-\x7e]*\Z")]
"""What may also stand in a header."""
_MISSING = re.compile("field `(.*)`")
"""The field that msgspec says is missing or unknown."""
_BYTES_A_TOKEN = 4
"""Of text, about; used to weigh requests against each other, never to refuse one."""


class _Completion(Struct):
    prompt: msgspec.Raw = msgspec.Raw(b"null")
    max_tokens: int | None = None
    trajectory_id: Name = ""
    task: Name = ""


class _Chat(Struct):
    messages: list[msgspec.Raw]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    trajectory_id: Name = ""
    task: Name = ""


class _Parameters(Struct, frozen=True):
    max_tokens: int | None = None


class _Generate(Struct):
    token_ids: list[Id]
    sampling_params: _Parameters = _Parameters()
    trajectory_id: Name = ""
    task: Name = ""


class Facts(Struct):
    """What a body told: `prompt_ids` where it holds ids, `tokens` the weight of what it does not hold as ids."""

    prompt_ids: list[int]
    tokens: int
    trajectory_id: str
    task: str


def decode(kind: type[Any], body: bytes, within: str = "") -> Any:
    """JSON as a value of a type; `within` names the field that holds it. Raises Refusal naming the field."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        where = f"the body is not UTF-8 at byte {error.start}"
        raise Refusal(400, "InvalidRequest", where, "body", "JSON in UTF-8") from None
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        field = within + path.rstrip("`") if within else path.rstrip("`").lstrip(".")
        missing = _MISSING.search(message)
        if missing is not None:
            field = f"{field}.{missing[1]}" if field else missing[1]
        raise Refusal(400, "InvalidRequest", str(error), field or "body", message) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refusal(400, "InvalidRequest", f"the body is not JSON: {error}", "body", "JSON; NaN is none") from None


def read(path: bytes, body: bytes, context_limit: int) -> Facts:
    """Look into the body of a request to an endpoint; raises Refusal or InvalidRequest. A limit of 0 is unknown."""
    if path == b"/inference/v1/generate":
        asked: _Generate = decode(_Generate, body)
        facts = _ids("token_ids", asked.token_ids, "sampling_params.max_tokens", asked.sampling_params.max_tokens)
    elif path == b"/v1/completions":
        facts = _completion(asked := decode(_Completion, body))
    else:
        facts = _chat(asked := decode(_Chat, body))
    facts.trajectory_id, facts.task = asked.trajectory_id, asked.task
    longest = len(facts.prompt_ids) + (facts.tokens if facts.prompt_ids else 0)
    if 0 < context_limit < longest:
        raise InvalidRequest(
            "max_tokens" if len(facts.prompt_ids) < context_limit else "prompt",
            f"prompt of {len(facts.prompt_ids)} tokens plus max_tokens {facts.tokens} exceeds the context",
            f"such that both fit in {context_limit}",
        )
    return facts


def _completion(asked: _Completion) -> Facts:
    prompt = bytes(asked.prompt)
    if prompt in (b"null", b'""', b"[]"):
        raise InvalidRequest("prompt", "is empty", "text or at least one token id")
    if prompt[:1] == b"[" and (prompt[1:].lstrip()[:1] or b"x") in b"-0123456789":
        return _ids("prompt", decode(list[Id], prompt, "prompt"), "max_tokens", asked.max_tokens)
    return Facts([], len(prompt) // _BYTES_A_TOKEN + _budget("max_tokens", asked.max_tokens), "", "")


def _chat(asked: _Chat) -> Facts:
    if not asked.messages:
        raise InvalidRequest("messages", "is empty", "at least one message")
    size = sum(len(bytes(message)) for message in asked.messages) // _BYTES_A_TOKEN
    budget = _budget("max_tokens", asked.max_tokens) + _budget("max_completion_tokens", asked.max_completion_tokens)
    return Facts([], size + budget, "", "")


def _ids(field: str, ids: list[int], budget_field: str, budget: int | None) -> Facts:
    if not ids:
        raise InvalidRequest(field, "is empty", "at least one token id")
    return Facts(ids, _budget(budget_field, budget), "", "")


def _budget(field: str, value: int | None) -> int:
    if value is not None and value <= 0:
        raise InvalidRequest(field, f"is {value}", "at least 1")
    return value or 0
