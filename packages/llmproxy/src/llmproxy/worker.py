"""What the proxy asks of an inference worker, and what an engine worker asks of its source of weights."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from .values import Ack, GenerateRequest, GenerateResult, Partial

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
