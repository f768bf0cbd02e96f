"""What rollout did, as counts and trace spans: the ears of the driver."""

from __future__ import annotations

from llmproxy import GenerateResult
from rollart.observe.trace import Trace

# A turn's generation is drawn by worker, as the proxy tells it, and on the row of its trajectory.
_ROWS = {"reset": "env", "step": "env", "reward": "reward"}


class Meter:
    """Told of every generation and every environment step."""

    def __init__(self, trace: Trace) -> None:
        self._tokens = 0
        self._trace = trace

    def take_tokens(self) -> int:
        """Tokens generated since the last call."""
        tokens, self._tokens = self._tokens, 0
        return tokens

    def generated(self, result: GenerateResult, start: float, end: float) -> None:
        """A generation ended on `result.worker`; start and end are on the loop's clock."""
        self._tokens += len(result.token_ids)
        versions = "-".join([str(span.version) for span in result.spans])
        self._trace.span(result.worker, f"generate v{versions}", start, end, tokens=len(result.token_ids))

    def environment(self, kind: str, id: str, start: float, end: float) -> None:
        """A phase of trajectory `id` ended: its environment, its generation or its reward was busy."""
        self._trace.story(id, kind, start, end)
        row = _ROWS.get(kind)
        if row is not None:
            self._trace.span(row, kind, start, end, trajectory=id)
