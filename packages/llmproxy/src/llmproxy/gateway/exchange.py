"""One request on its way through a worker and back; its bytes pass as they are.

Invariants (tests/llmproxy/test_llmproxy_gateway_faults.py):
- it ends exactly once: the worker's whole answer, an error of the gateway's, or a connection closed in the middle of
  an answer, which no client takes for a whole one;
- it is sent to another worker only while its client has been given nothing, and only after the connection to the last
  one was closed, so that a second answer cannot come;
- whatever ends it releases its worker's charge, once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmproxy.errors import Aborted, NoWorker, WorkerLost
from llmproxy.fleet import Slot
from llmproxy.upstream import Upstream
from llmproxy.values import GenerateRequest, GenerateResult

from .recording import token_ids
from .refusals import REASONS, Refusal, refusal

if TYPE_CHECKING:
    from .client import Client, Request
    from .server import Gateway

_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade", b"transfer-encoding")
)
_STATUS = {status: b"HTTP/1.1 %d %b\r\n" % (status, reason) for status, reason in REASONS.items()}


class Exchange:
    """A `Carrier` for the routing core and a `Receiver` of a worker's answer."""

    __slots__ = (
        "_attempts",
        "_chunked",
        "_errors",
        "_gateway",
        "_held",
        "_out",
        "answer",
        "avoid",
        "body",
        "client",
        "endpoint",
        "incoming",
        "named",
        "request",
        "since",
        "slot",
        "started",
        "status",
        "upstream",
        "version",
        "worker",
    )

    def __init__(
        self,
        gateway: Gateway,
        client: Client,
        endpoint: str,
        incoming: Request,
        request: GenerateRequest,
        body: bytes,
        named: bool,
    ) -> None:
        """`incoming` is what the client sent, `body` what the worker is sent, `request` what routing knows of it.

        `named`: the client said which trajectory it is of; else it stands for itself.
        """
        self._gateway = gateway
        self.client = client
        self.endpoint = endpoint
        self.incoming = incoming
        self.request = request
        self.body = body
        self.named = named
        self.since = gateway.now()
        self.slot: Slot | None = None
        self.avoid: Slot | None = None
        self.upstream: Upstream | None = None
        self.version = self.status = 0
        self.worker = ""
        self.started = False
        kept = request.prompt_ids or (named and gateway.recorder is not None)
        self.answer: list[bytes] | None = [] if kept else None
        self._attempts = self._errors = 0
        self._chunked = self._held = False
        self._out: list[bytes] = []

    # The routing core calls these.

    def placed(self, slot: Slot, version: int) -> None:
        self.slot = slot
        self.version = version
        self._attempts += 1
        self.worker = slot.id
        self.upstream = None
        worker = self._gateway.worker(slot)
        lines = self.incoming.head
        if self.incoming.authorization and not (worker.authorization or self._gateway.config.api_key):
            lines = [*lines, b"authorization: %b\r\n" % self.incoming.authorization]
        head = b"%b%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (
            worker.start_line(self.incoming.url),
            b"".join(lines),
            self.request.request_id.encode(),
            len(self.body),
        )
        worker.pool.send(self, head, self.body)

    def moved(self, slot: Slot, reason: str) -> None:
        self._gateway.worker(slot).pool.cancel(self)
        self._go_on(slot, reason)

    def refused(self, error: NoWorker) -> None:
        self._fail(refusal(error))

    # The connection to the worker calls these.

    def on_head(self, upstream: Upstream) -> None:
        slot, gateway = self.slot, self._gateway
        assert slot is not None
        self.status = status = upstream.status
        if status >= 500:
            gateway.troubled(slot, status)
            if self.slot is not slot:
                return  # that fenced the worker, and took this request away from it
            if self._errors == 0 and gateway.others(slot):
                self._errors += 1
                gateway.worker(slot).pool.cancel(self)
                self._leave(served=False)
                self._again(slot)
                return
        else:
            gateway.fine(slot)
        out = self._out
        out.append(_STATUS.get(status) or b"HTTP/1.1 %d Status\r\n" % status)
        self._chunked = True
        for name, value in upstream.headers:
            key = name.lower()
            if key == b"content-length":
                self._chunked = False
            elif key in _HOP or key == b"x-request-id":
                continue
            out.append(b"%b: %b\r\n" % (name, value))
        out.append(gateway.mark(slot, self.version))
        out.append(b"x-request-id: %b\r\n" % self.request.request_id.encode())
        if self.named:
            out.append(b"x-trajectory-id: %b\r\n" % self.request.trajectory_id.encode())
        if self.client.closes:
            out.append(b"connection: close\r\n")
        out.append(b"transfer-encoding: chunked\r\n\r\n" if self._chunked else b"\r\n")
        if self._chunked:
            self._write()
        self.started = True

    def on_body(self, data: bytes) -> None:
        self._out.append(data)
        if self.answer is not None:
            self.answer.append(data)

    def flush(self) -> None:
        if self._out:
            self._write()

    def on_end(self) -> None:
        out = self._out
        if self._chunked:
            if out:
                body = b"".join(out)
                self.client.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
                self._gateway.metrics.chunks += 1
            else:
                self.client.transport.write(b"0\r\n\r\n")
        elif out:
            self.client.transport.write(b"".join(out))
        if self._held:
            self.unhold()  # the connection goes on to other requests
        self._served()
        self._gateway.ended(self, self.status, whole=True)
        self.client.finished()

    def on_lost(self, reason: str) -> None:
        slot = self.slot
        assert slot is not None
        self._gateway.lost(self, slot, reason)
        self._go_on(slot, reason)

    # The client and the gateway call these.

    def hold(self) -> None:
        """The client does not take what it is sent: read no more."""
        if self.upstream is not None and not self.upstream.transport.is_closing():
            self.upstream.transport.pause_reading()
            self._held = True

    def unhold(self) -> None:
        if self._held and self.upstream is not None and not self.upstream.transport.is_closing():
            self.upstream.transport.resume_reading()
        self._held = False

    def abandon(self) -> None:
        """The client is gone. Closing the connection tells the worker, which ends the request in its engine."""
        self._cancel()
        self._gateway.metrics.disconnects += 1
        self._gateway.ended(self, 499, whole=False)

    def expire(self) -> None:
        self._cancel()
        limit = f"{self._gateway.config.request_timeout} s"
        self._fail(Refusal(504, "Timeout", "the request took too long", "request", limit))

    def abort(self) -> None:
        """End it for good."""
        self._cancel()
        self._fail(refusal(Aborted(f"request {self.request.request_id} was aborted")))

    # How it goes on.

    def _go_on(self, slot: Slot, reason: str) -> None:
        """Its worker is gone, and it has left it."""
        self.slot = None
        if self.started or self._attempts >= self._gateway.config.attempts:
            self._fail(refusal(WorkerLost(slot.id, reason)))
        else:
            self._again(slot)

    def _again(self, avoid: Slot) -> None:
        self._out.clear()
        if self.answer is not None:
            self.answer.clear()
        self.avoid = avoid
        self._gateway.metrics.retries += 1
        self._gateway.proxy.passages.enter(self)

    def _cancel(self) -> None:
        if self.slot is not None:
            self._gateway.worker(self.slot).pool.cancel(self)
        self._leave(served=False)

    def _served(self) -> None:
        """The worker's cache holds the trajectory now; where token ids are known, they find it again."""
        result = None
        if self.request.prompt_ids and self.answer and self.status < 400:
            made = token_ids(self.answer)
            result = made and GenerateResult(made, [], [], "stop", self.worker)
        self.slot = None
        known = (self.named or bool(result)) and self.status < 400
        self._gateway.proxy.passages.leave(self, served=known, result=result or None)

    def _leave(self, *, served: bool) -> None:
        self.slot = None
        self._gateway.proxy.passages.leave(self, served=served)

    def _fail(self, error: Refusal) -> None:
        self._gateway.ended(self, error.status, whole=False)
        if self.started:
            self._gateway.metrics.truncated += 1
            self.client.truncate()
        else:
            self.client.respond(self._gateway.refused(error))

    def _write(self) -> None:
        out = self._out
        if self._chunked and self.started:
            body = b"".join(out)
            self.client.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
            self._gateway.metrics.chunks += 1
        else:
            self.client.transport.write(b"".join(out))
        out.clear()
