"""One generation on a simulated engine, from its request to its last token.

Its spans cover the `made` tokens without gaps, each by the version that made them; an engine counts whole tokens only
(tests/llmproxy/test_llmproxy_engine.py).
"""

from __future__ import annotations

from typing import Any

from llmproxy.values import GenerateRequest, Span


class Job:
    """`before` tokens came with its request. While it decodes, `joined` is where the step counter stood when it was
    last counted.
    """

    __slots__ = (
        "answer",
        "base",
        "before",
        "cached",
        "due",
        "joined",
        "key",
        "known",
        "length",
        "made",
        "need",
        "only_prefill",
        "request",
        "serial",
        "spans",
    )

    def __init__(self, request: GenerateRequest, length: int, answer: Any, only_prefill: bool = False) -> None:
        self.request = request
        self.length = length
        self.answer = answer
        self.only_prefill = only_prefill
        resume = request.resume
        self.before = len(request.prompt_ids) + (len(resume.token_ids) if resume else 0)
        self.need = 0.0
        self.cached: int | None = None  # of its context, when it was first looked for
        self.known = 0  # the same, when last
        self.made = 0
        self.joined: float | None = None
        self.base = 0.0  # tokens held minus where the counter stands, the same for as long as it decodes
        self.due = 0.0  # tokens its budget still allows, plus where the counter stands
        self.serial = 0
        self.key: int | None = None  # its prompt's, when nothing of its trajectory was cached
        self.spans: list[Span] = []

    @property
    def held(self) -> int:
        """Tokens whose keys and values it needs."""
        return self.before + self.made

    def found(self, known: int) -> None:
        """So much of its context need not be computed now."""
        self.known = known
        if self.cached is None:
            self.cached = known

    def make(self, tokens: int, version: int) -> None:
        if tokens > 0:
            self.spans.append(Span(version, self.made, self.made + tokens))
            self.made += tokens
