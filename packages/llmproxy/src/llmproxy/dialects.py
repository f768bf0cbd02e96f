"""How each kind of server is spoken to: what a generation looks like on the wire, and which controls it has.

A dialect is plain data in, plain data out; `HTTPWorker` moves the bytes. `VLLM` is tried against a real server
(tests/llmproxy/test_llmproxy_http_engine.py), the others against doubles (test_llmproxy_http_worker.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol
from urllib.parse import urlencode

import msgspec
from msgspec import Struct

from .values import Sampling


class Told(Struct):
    """What an answer has told so far. `runs` are (version, start, end) and `error` is one, in the server's words."""

    token_ids: list[int] = []
    logprobs: list[float] = []
    runs: list[tuple[str, int, int]] = []
    finish: str = ""
    cached: int = 0
    error: Any = None


class Control(NamedTuple):
    """A request of ours: POST with a body, GET without."""

    path: str
    body: dict[str, Any] | None


class Asked(NamedTuple):
    """A generation to be asked for. `id` is one that the server has not seen."""

    id: str
    context: list[int]
    sampling: Sampling
    budget: int
    seed: int | None
    model: str


class Dialect(Protocol):
    keeps: bool
    """Whether running generations can be held over a pause, their caches dropped."""
    pause: tuple[Control, ...]
    resume: tuple[Control, ...]
    version: Control | None
    """Asks for the version; None when the server has none to tell."""

    def generation(self, asked: Asked) -> Control:
        """A streamed generation from token ids."""
        ...

    def hear(self, event: bytes, told: Told) -> None:
        """Take in one event of the stream."""
        ...

    def abort(self, id: str) -> Control | None:
        """End a generation that `generation` began under this id; it answers with what it has."""
        ...

    def engine_ids(self, path: str, id: str) -> list[str]:
        """The ids that the engine gave to a request sent to `path` with `id` as its x-request-id."""
        ...

    def abort_ids(self, ids: list[str]) -> Control | None: ...

    def announce(self, version: int) -> Control | None:
        """Tell the server which version it holds now."""
        ...

    def held(self, answer: Any) -> str:
        """The version in the answer to `version`."""
        ...


class _Entry(Struct):
    token_id: int
    logprob: float


class _Content(Struct):
    content: list[_Entry] | None = None


class _Run(Struct):
    version: str
    start: int
    end: int


class _VLLMChoice(Struct):
    token_ids: list[int] | None = None
    logprobs: _Content | None = None
    finish_reason: str | None = None
    weight_versions: list[_Run] | None = None


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens_details: _Details | None = None


class _VLLMEvent(Struct):
    choices: list[_VLLMChoice] = []
    usage: _Usage | None = None
    error: Any = None


class VLLM:
    """vLLM's token endpoint. Pause, update and abort need a server started with VLLM_SERVER_DEV_MODE=1."""

    keeps = True
    pause: tuple[Control, ...] = (Control("/pause?" + urlencode({"mode": "keep", "clear_cache": "true"}), {}),)
    resume: tuple[Control, ...] = (Control("/resume", {}),)
    version: Control | None = Control("/weight_info", None)
    _decode = msgspec.json.Decoder(_VLLMEvent).decode

    def generation(self, asked: Asked) -> Control:
        sampling = asked.sampling
        parameters: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop_token_ids": sampling.stop_token_ids,
            "ignore_eos": sampling.ignore_eos,
            "max_tokens": asked.budget,
            "logprobs": 0,
            "detokenize": False,
        }
        if sampling.allowed_token_ids is not None:
            parameters["allowed_token_ids"] = sampling.allowed_token_ids
        if asked.seed is not None:
            parameters["seed"] = asked.seed
        body: dict[str, Any] = {
            "request_id": asked.id,
            "token_ids": asked.context,
            "sampling_params": parameters,
            "stream": True,
        }
        body["stream_options"] = {"include_usage": True}
        return Control("/inference/v1/generate", body | ({"model": asked.model} if asked.model else {}))

    def hear(self, event: bytes, told: Told) -> None:
        heard = self._decode(event)
        told.error = heard.error or told.error
        if heard.usage is not None and heard.usage.prompt_tokens_details is not None:
            told.cached = heard.usage.prompt_tokens_details.cached_tokens or 0
        for choice in heard.choices:
            before = len(told.token_ids)
            told.token_ids += choice.token_ids or ()
            if choice.logprobs is not None:
                told.logprobs += [entry.logprob for entry in choice.logprobs.content or ()]
            told.finish = choice.finish_reason or told.finish
            if choice.weight_versions:
                told.runs = _runs(told.runs, choice.weight_versions, before, len(told.token_ids))

    def abort(self, id: str) -> Control | None:
        return self.abort_ids([f"generate-tokens-{id}"])

    def engine_ids(self, path: str, id: str) -> list[str]:
        match path:
            case "/v1/chat/completions":
                return [f"chatcmpl-{id}"]
            case "/v1/completions":
                return [f"cmpl-{id}-0"]
        return [f"generate-tokens-{id}"]

    def abort_ids(self, ids: list[str]) -> Control | None:
        return Control("/inference/v1/abort_requests", {"request_ids": ids}) if ids else None

    def announce(self, version: int) -> Control | None:
        return Control("/update_weight_version", {"new_version": str(version)})

    def held(self, answer: Any) -> str:
        return _weight_version(answer)


class _OpenAILogprobs(Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []


class _OpenAIChoice(Struct):
    token_ids: list[int] | None = None
    logprobs: _OpenAILogprobs | None = None
    finish_reason: str | None = None


class _OpenAIEvent(Struct):
    choices: list[_OpenAIChoice] = []
    usage: _Usage | None = None
    error: Any = None


class OpenAI:
    """`/v1/completions` with token ids as prompt, for servers that return token ids. No pause and no versions."""

    keeps = False
    pause: tuple[Control, ...] = ()
    resume: tuple[Control, ...] = ()
    version: Control | None = None
    _decode = msgspec.json.Decoder(_OpenAIEvent).decode

    def generation(self, asked: Asked) -> Control:
        sampling = asked.sampling
        body: dict[str, Any] = {
            "model": asked.model,
            "prompt": asked.context,
            "max_tokens": asked.budget,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stream": True,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        wanted = {
            "top_k": sampling.top_k,
            "stop_token_ids": sampling.stop_token_ids,
            "ignore_eos": sampling.ignore_eos,
            "allowed_token_ids": sampling.allowed_token_ids,
        }
        body |= {name: value for name, value in wanted.items() if value}
        return Control("/v1/completions", body | ({} if asked.seed is None else {"seed": asked.seed}))

    def hear(self, event: bytes, told: Told) -> None:
        heard = self._decode(event)
        told.error = heard.error or told.error
        for choice in heard.choices:
            logprobs = choice.logprobs or _OpenAILogprobs()
            ids = choice.token_ids
            if ids is None:
                ids = [int(name.removeprefix("token_id:")) for name in logprobs.tokens]
            told.token_ids += ids
            told.logprobs += [value for value in logprobs.token_logprobs if value is not None]
            told.finish = choice.finish_reason or told.finish

    def abort(self, id: str) -> Control | None:
        return None

    def engine_ids(self, path: str, id: str) -> list[str]:
        return []

    def abort_ids(self, ids: list[str]) -> Control | None:
        return None

    def announce(self, version: int) -> Control | None:
        return None

    def held(self, answer: Any) -> str:
        raise ValueError("servers of this dialect tell no version")


class _Finish(Struct):
    type: str = ""


class _Meta(Struct, frozen=True):
    output_token_logprobs: list[tuple[float, int, Any]] = []
    finish_reason: _Finish | None = None
    weight_version: str | None = None
    cached_tokens: int = 0


class _SGLangEvent(Struct):
    meta_info: _Meta = _Meta()
    error: Any = None


class SGLang:
    """SGLang's `/generate`. Pausing takes running requests back to its queue and empties its cache."""

    keeps = True
    pause: tuple[Control, ...] = (Control("/pause_generation", {"mode": "retract"}), Control("/flush_cache", {}))
    resume: tuple[Control, ...] = (Control("/continue_generation", {}),)
    version: Control | None = Control("/get_weight_version", None)
    _decode = msgspec.json.Decoder(_SGLangEvent).decode

    def generation(self, asked: Asked) -> Control:
        sampling = asked.sampling
        parameters: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "stop_token_ids": sampling.stop_token_ids,
            "ignore_eos": sampling.ignore_eos,
            "max_new_tokens": asked.budget,
        }
        if asked.seed is not None:
            parameters["sampling_seed"] = asked.seed
        body = {
            "rid": asked.id,
            "input_ids": asked.context,
            "sampling_params": parameters,
            "return_logprob": True,
            "stream": True,
        }
        return Control("/generate", body)

    def hear(self, event: bytes, told: Told) -> None:
        heard = self._decode(event)
        told.error = heard.error or told.error
        if told.error:
            return
        meta, before = heard.meta_info, len(told.token_ids)
        told.logprobs = [entry[0] for entry in meta.output_token_logprobs]  # each event tells all from the first
        told.token_ids = [entry[1] for entry in meta.output_token_logprobs]
        told.cached = meta.cached_tokens
        if meta.finish_reason is not None:
            told.finish = meta.finish_reason.type
        if meta.weight_version is not None:
            run = _Run(meta.weight_version, 0, len(told.token_ids) - before)
            told.runs = _runs(told.runs, [run], before, len(told.token_ids))

    def abort(self, id: str) -> Control | None:
        return self.abort_ids([id])

    def engine_ids(self, path: str, id: str) -> list[str]:
        return []

    def abort_ids(self, ids: list[str]) -> Control | None:
        return Control("/abort_request", {"rid": ids[0]}) if ids else None

    def announce(self, version: int) -> Control | None:
        return Control("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    def held(self, answer: Any) -> str:
        return _weight_version(answer)


def _weight_version(answer: Any) -> str:
    return str(answer.get("weight_version") if isinstance(answer, dict) else None)


def _runs(runs: list[tuple[str, int, int]], told: list[_Run], before: int, after: int) -> list[tuple[str, int, int]]:
    """Runs after an event that brought tokens `[before, after)`, told from the first token or from its own first."""
    if told[-1].end == after and told[0].start == 0:
        return [(run.version, run.start, run.end) for run in told]
    return runs + [(run.version, before + run.start, before + run.end) for run in told]


DIALECTS: dict[str, type[Dialect]] = {"vllm": VLLM, "openai": OpenAI, "sglang": SGLang}
