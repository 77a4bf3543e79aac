"""Bytes of whole requests: a prompt of the planned length, the JSON body, the head."""

from __future__ import annotations

from loadgen.endpoint import Endpoint
from loadgen.protocols import RequestShape
from loadgen.proxy import Proxy
from workloads.prompts import PromptMaker


class RequestMaker:
    """Makes the request of a row of the schedule; ``run_id`` and the request's number go into X-Request-Id."""

    def __init__(
        self, endpoint: Endpoint, prompts: PromptMaker, run_id: str, proxy: Proxy | None = None
    ) -> None:
        self._endpoint = endpoint
        self._through_proxy = proxy.header() if proxy is not None and endpoint.scheme == "http" else None
        self._prompts = prompts
        self._run_id = run_id
        self._number = 0

    def make(self, shape: RequestShape, request_id: int, input_tokens: int, output_tokens: int) -> bytes:
        """All bytes of one request; its prompt has ``input_tokens`` tokens as the server is expected to count."""
        body = shape.body(self._prompts.make(max(request_id, 0), input_tokens), output_tokens)
        head = b"%bX-Request-Id: %b-%d\r\nContent-Length: %d\r\n\r\n" % (
            self._endpoint.request_prefix(shape.api, self._through_proxy), self._run_id.encode(), request_id, len(body),
        )  # fmt: skip
        return head + body

    def numbered(self, shape: RequestShape, input_tokens: int, output_tokens: int) -> bytes:
        """A probing request, each with a prompt of its own."""
        self._number += 1
        return self.make(shape, self._number, input_tokens, output_tokens)
