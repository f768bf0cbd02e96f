"""What each trajectory's requests and answers were, to be read back as one record.

Bytes are kept as they passed and decoded when they are asked for, so that recording costs a reference on the way.
Bounded by trajectories, by bytes and by age, oldest out first (tests/llmproxy/test_llmproxy_recording.py).

Token ids and log-probabilities are the engine's: `asking` puts what makes vLLM return them in front of a body's own
fields, whose values win where they name the same. Versions are the engine's spans where it tells them
(`/inference/v1/generate`); elsewhere the version that was served from the request's start to its end, and no spans at
all when an update came between.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec
from msgspec import Struct

from llmproxy.values import GenerateRequest, GenerateResult

from .config import GatewayConfig

_ASKING = {
    b"/v1/completions": b'"return_token_ids":true,"logprobs":0,',
    b"/v1/chat/completions": b'"return_token_ids":true,"logprobs":true,',
}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "max_completion_tokens", "stop", "n")


class Kept(Struct):
    """One request as it passed."""

    request_id: str
    endpoint: str
    worker: str
    status: int
    whole: bool
    seconds: float
    first_version: int
    last_version: int
    body: bytes
    answer: list[bytes]

    @property
    def size(self) -> int:
        return len(self.body) + sum(map(len, self.answer)) + 500


class Span(Struct):
    version: str | int
    start: int
    end: int


class Choice(Struct):
    """One sequence of an answer. `logprobs` are aligned with `token_ids`; None where the engine told none."""

    index: int
    token_ids: list[int] | None
    logprobs: list[float | None] | None
    spans: list[Span] | None
    finish_reason: str | None
    text: str


class Turn(Struct):
    """One request of a trajectory, decoded. `whole` is False when the answer was cut short."""

    request_id: str
    endpoint: str
    worker: str
    status: int
    whole: bool
    seconds: float
    versions: tuple[int, int]
    sampling: dict[str, Any]
    prompt_token_ids: list[int] | None
    choices: list[Choice]
    error: Any = None


class _Entry(Struct):
    logprob: float


class _Logprobs(Struct):
    content: list[_Entry] | None = None
    token_logprobs: list[float | None] | None = None

    @property
    def values(self) -> list[float | None] | None:
        return self.token_logprobs if self.content is None else [entry.logprob for entry in self.content]


class _Said(Struct):
    content: Any = None


class _Told(Struct):
    """An answer's choice, or one event's part of it."""

    index: int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[Span] | None = None
    finish_reason: str | None = None
    text: str | None = None
    message: _Said | None = None
    delta: _Said | None = None


class _Message(Struct):
    choices: list[_Told] | None = None
    prompt_token_ids: list[int] | None = None
    error: Any = None


class _Track(Struct):
    turns: list[Kept]
    size: int
    touched: float


class Recorder:
    """Trajectories by id."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._tracks: OrderedDict[str, _Track] = OrderedDict()
        self.size = 0
        self.dropped = 0
        """Trajectories that had to make room."""

    def __len__(self) -> int:
        return len(self._tracks)

    def __contains__(self, id: object) -> bool:
        return id in self._tracks

    def ids(self) -> list[str]:
        return list(self._tracks)

    def asking(self, path: bytes, body: bytes) -> bytes:
        """The body that makes the engine tell token ids and log-probabilities."""
        wish = _ASKING.get(path)
        rest = body.lstrip(b" \t\r\n")
        if wish is None or rest[:1] != b"{":
            return body
        inner = rest[1:].lstrip(b" \t\r\n")
        return b"{" + (wish[:-1] if inner[:1] == b"}" else wish) + inner

    def keep(self, id: str, kept: Kept, now: float) -> None:
        """Remember a request of trajectory `id`."""
        track = self._tracks.setdefault(id, _Track([], 0, now))
        track.turns.append(kept)
        track.size += kept.size
        track.touched = now
        self.size += kept.size
        self._tracks.move_to_end(id)
        while self._tracks and (
            len(self._tracks) > self._config.record_count or self.size > self._config.record_bytes
        ):
            self._drop(next(iter(self._tracks)))

    def forget_old(self, now: float) -> None:
        while self._tracks:
            id, track = next(iter(self._tracks.items()))
            if track.touched + self._config.record_age > now:
                return
            self._drop(id)

    def delete(self, id: str) -> bool:
        track = self._tracks.pop(id, None)
        if track is None:
            return False
        self.size -= track.size
        return True

    def get(self, id: str) -> list[Turn] | None:
        track = self._tracks.get(id)
        return None if track is None else [decode(kept) for kept in track.turns]

    def _drop(self, id: str) -> None:
        self.delete(id)
        self.dropped += 1


def of_generation(asked: GenerateRequest, result: GenerateResult, body: bytes) -> Kept:
    """A generation that the proxy carried, in the words of an engine."""
    choice = {
        "index": 0,
        "token_ids": result.token_ids,
        "logprobs": {"token_logprobs": result.logprobs},
        "weight_versions": result.spans,
        "finish_reason": result.finish_reason,
    }
    answer = msgspec.json.encode({"choices": [choice], "prompt_token_ids": asked.prompt_ids})
    seconds = result.timing.queued + result.timing.running
    versions = [span.version for span in result.spans]
    first, last = min(versions, default=0), max(versions, default=0)
    return Kept(asked.request_id, "/generate", result.worker, 200, True, seconds, first, last, body, [answer])


def decode(kept: Kept) -> Turn:
    """Read what passed. What cannot be read is left out, never guessed."""
    body = _json(kept.body)
    asked = body if isinstance(body, dict) else {}
    given = asked.get("sampling_params") or asked.get("sampling") or asked
    sampling = {name: given[name] for name in _SAMPLING if name in given} if isinstance(given, dict) else {}
    turn = Turn(
        kept.request_id,
        kept.endpoint,
        kept.worker,
        kept.status,
        kept.whole,
        kept.seconds,
        (kept.first_version, kept.last_version),
        sampling,
        _prompt(asked),
        [],
    )
    choices: dict[int, Choice] = {}
    for message in _messages(b"".join(kept.answer)):
        turn.error = message.error or turn.error
        turn.prompt_token_ids = message.prompt_token_ids or turn.prompt_token_ids
        for told in message.choices or ():
            turn.prompt_token_ids = told.prompt_token_ids or turn.prompt_token_ids
            index = told.index or 0
            choice = choices.setdefault(index, Choice(index, None, None, None, None, ""))
            _add(choice, told)
    turn.choices = [choices[index] for index in sorted(choices)]
    for choice in turn.choices:
        _complete(choice, kept)
    return turn


def token_ids(answer: list[bytes]) -> list[int]:
    """What the first sequence of an answer has of token ids; empty when the engine told none."""
    made: list[int] = []
    for message in _messages(b"".join(answer)):
        for told in message.choices or ():
            if not told.index:
                made += told.token_ids or ()
    return made


def _add(choice: Choice, told: _Told) -> None:
    if told.token_ids is not None:
        choice.token_ids = (choice.token_ids or []) + told.token_ids
    values = told.logprobs.values if told.logprobs else None
    if values is not None:
        choice.logprobs = (choice.logprobs or []) + values
    choice.spans = told.weight_versions or choice.spans
    said = told.message or told.delta
    text = told.text or (said and said.content)
    choice.text += text if isinstance(text, str) else ""
    choice.finish_reason = told.finish_reason or choice.finish_reason


def _complete(choice: Choice, kept: Kept) -> None:
    """Log-probabilities must match the tokens; versions are the gateway's own where no update came between."""
    if choice.token_ids is None or (choice.logprobs is not None and len(choice.logprobs) != len(choice.token_ids)):
        choice.logprobs = None
    if choice.spans is None and choice.token_ids and kept.first_version == kept.last_version:
        choice.spans = [Span(kept.first_version, 0, len(choice.token_ids))]


def _prompt(asked: dict[str, Any]) -> list[int] | None:
    prompt = asked.get("token_ids", asked.get("prompt"))
    return prompt if isinstance(prompt, list) and all(type(id) is int for id in prompt) else None


def _messages(answer: bytes) -> list[_Message]:
    """The JSON object of an answer, or those of its events."""
    if answer.lstrip()[:1] == b"{":
        parts = [answer]
    else:
        events = answer.replace(b"\r\n", b"\n").split(b"\n\n")
        parts = [event.removeprefix(b"data:").strip() for event in events if event.startswith(b"data:")]
    decoded = [_json(part, _Message) for part in parts]
    return [message for message in decoded if message is not None]


def _json(data: bytes, kind: Any = Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError):
        return None
