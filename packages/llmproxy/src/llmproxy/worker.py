"""What the proxy asks of an inference worker, and what an engine worker asks of its source of weights."""

from __future__ import annotations

from typing import Any, Literal, Protocol, runtime_checkable

from .values import Ack, GenerateRequest, GenerateResult, Handoff, Partial

Role = Literal["prefill", "decode", "both"]


class Worker(Protocol):
    """One engine, wherever it runs.

    Any call may raise `WorkerLost`. `generate` and `update` may take long; the others answer soon.
    """

    @property
    def id(self) -> str: ...
    @property
    def hardware(self) -> str: ...
    @property
    def role(self) -> Role: ...
    @property
    def version(self) -> int | None:
        """The version of the weights held; None when that is not certain."""
        ...

    @property
    def context_limit(self) -> int:
        """The most tokens of prompt and generation together."""
        ...

    async def generate(self, request: GenerateRequest) -> GenerateResult | Partial:
        """Run to the end, or return a Partial when interrupted (or paused, where the engine cannot keep).

        Results cover `request.resume`. On a paused worker the request waits. Cancelling frees the engine's
        request.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End the request in the engine; `generate` returns soon, with what there is."""
        ...

    async def interrupt(self, request_id: str) -> None:
        """Make `generate` return a Partial; does nothing when the request is not here."""
        ...

    async def pause(self) -> None:
        """Stop between two tokens. Running generations are kept, their caches are dropped. Idempotent."""
        ...

    async def prefetch(self, version: int) -> None:
        """Stage a version on the host while generation goes on."""
        ...

    async def update(self, version: int) -> Ack:
        """Pause, load `version`, and stay paused. Raises UpdateFailed when the engine does not hold it."""
        ...

    async def resume(self) -> None:
        """Go on after pause. Idempotent."""
        ...

    async def probe(self) -> int | None:
        """The version that the engine itself says it holds."""
        ...


class PrefillWorker(Worker, Protocol):
    """A worker of role "prefill": computes contexts whose generation goes on elsewhere."""

    async def prefill(self, request: GenerateRequest) -> Handoff | None:
        """Compute the cache of the request's context and hold it; None when interrupted before that.

        Cancelling frees it; so does time, in the end.
        """
        ...


class DecodeWorker(Worker, Protocol):
    """A worker of role "decode": `generate` takes the cache of the context from `request.handoff`.

    When it cannot, or without a handoff, it computes the context itself. A cache of other weights than its own is not
    taken: pausing hands back, as a Partial, what waits for its cache, and so is what comes while it is paused.
    """

    async def release(self, handoff: Handoff) -> None:
        """Tell the prefill worker that nobody will come for this cache."""
        ...


@runtime_checkable
class Reports(Protocol):
    """A worker that knows its backlog; others are judged by what they were given and have not answered."""

    def backlog(self) -> int:
        """Tokens not yet computed, of all callers: contexts to prefill, and what budgets still allow to be made."""
        ...


class WeightLoader(Protocol):
    """Brings versions of the weights into an engine; given to a worker when it is made."""

    def engine_args(self) -> dict[str, Any]:
        """Arguments that the engine must be made with for this loader to work."""
        ...

    async def start(self, engine: Any) -> None: ...

    async def prefetch(self, version: int) -> None:
        """Wait until `version` is published and stage it on the host."""
        ...

    async def load(self, engine: Any, version: int) -> str:
        """Load into the paused engine; the hex digest of the bytes handed over."""
        ...

    async def close(self) -> None: ...
