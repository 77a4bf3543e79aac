"""The bytes of whole requests: prompt, JSON body, head."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from ampacity.loadgen.send.conversations import Conversations, entry_of
from ampacity.loadgen.send.endpoint import Endpoint, Proxy
from ampacity.loadgen.send.history import AnswerContent, message
from ampacity.loadgen.send.protocols import PROTOCOLS, RequestShape
from ampacity.workloads.classes import RequestClass
from ampacity.workloads.prompts.files import PromptFile
from ampacity.workloads.prompts.images import Images
from ampacity.workloads.prompts.synthetic import PromptMaker
from ampacity.workloads.schedule import Schedule
from ampacity.workloads.traces.recorded import Recorded


def _proxy_header(endpoint: Endpoint, proxy: Proxy | None) -> str | None:
    return proxy.header() if proxy is not None and endpoint.scheme == "http" else None


def _whole(prefix: bytes, run_id: str, request_id: int, body: bytes) -> bytes:
    head = f"X-Request-Id: {run_id}-{request_id}\r\nContent-Length: {len(body)}\r\n\r\n"
    return b"".join((prefix, head.encode(), body))


class RequestMaker:
    """Makes single requests, as a probe sends them; X-Request-Id is run id and number."""

    def __init__(
        self, endpoint: Endpoint, prompts: PromptMaker, run_id: str, proxy: Proxy | None = None
    ) -> None:
        self._endpoint, self._through_proxy = endpoint, _proxy_header(endpoint, proxy)
        self._prompts, self._run_id, self._number = prompts, run_id, 0

    def make(
        self, shape: RequestShape, request_id: int, input_tokens: int, output_tokens: int
    ) -> bytes:
        """Return one request with ``input_tokens`` tokens as the server should count."""
        prompt = self._prompts.make(max(request_id, 0), input_tokens)
        return self._request(shape, request_id, prompt, output_tokens)

    def numbered(self, shape: RequestShape, input_tokens: int, output_tokens: int) -> bytes:
        """Return a probe request with the next unique prompt."""
        self._number += 1
        return self.make(shape, self._number, input_tokens, output_tokens)

    def saying(self, shape: RequestShape, text: str | msgspec.Raw, output_tokens: int) -> bytes:
        """Return a probe request with this prompt."""
        self._number += 1
        return self._request(shape, self._number, text, output_tokens)

    def _request(
        self, shape: RequestShape, number: int, prompt: str | msgspec.Raw, output_tokens: int
    ) -> bytes:
        prefix = self._endpoint.request_prefix(shape.api, self._through_proxy)
        return _whole(prefix, self._run_id, number, shape.body(prompt, output_tokens))


class ScheduledRequests:
    """The requests of schedules for one or more endpoints; call ``prepare`` before ``make``."""

    def __init__(
        self,
        routes: Sequence[tuple[Endpoint, Proxy | None]],
        shape: RequestShape,
        prompts: PromptMaker,
        run_id: str,
        *,
        classes: Sequence[RequestClass] = (),
        planned_histories: bool = False,
        file: PromptFile | Recorded | None = None,
        images: Images | None = None,
    ) -> None:
        """Use the ``classes`` that a schedule names; its ``entry`` column points into ``file``."""
        self._shape, self._prompts, self._run_id = shape, prompts, run_id
        self._planned, self._file, self._images = planned_histories, file, images
        self._system_apart = PROTOCOLS[shape.api].system_apart
        self._classes = {c.name: c for c in classes}
        self._prefixes = [
            [
                endpoint.request_prefix(shape.api, _proxy_header(endpoint, proxy), turn)
                for turn in range(len(endpoint.keys.current) if endpoint.keys else 1)
            ]
            for endpoint, proxy in routes
        ]
        self._shapes: dict[tuple[str, str, object], RequestShape] = {}
        self._conversations: Conversations | None = None

    def prepare(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._conversations = None
        if schedule.continues is not None:
            self._conversations = Conversations(
                self._prompts, schedule, planned=self._planned, api=self._shape.api, file=self._file
            )

    def make(self, index: int, target: int = 0) -> bytes:
        """Return the bytes of the schedule's request ``index`` to endpoint ``target``."""
        schedule = self._schedule
        class_ = schedule.class_name(index)
        shape = self._shape_of(class_, schedule.model_name(index), index)
        body = shape.body(self._prompt(index), int(schedule.output_tokens[index]))
        request_id, prefixes = schedule.request_id(index), self._prefixes[target]
        prefix = prefixes[request_id % len(prefixes)]  # the keys take turns
        if class_ in self._classes:
            lines = (f"{name}: {value}\r\n" for name, value in self._classes[class_].headers)
            prefix += "".join(lines).encode("latin-1")
        return _whole(prefix, self._run_id, request_id, body)

    def wanted(self, index: int) -> bool:
        """Tell whether a later request needs the answer to this one."""
        return self._conversations is not None and self._conversations.wanted(index)

    def answered(self, index: int, answer: AnswerContent) -> None:
        """Take the answer of a finished request, empty unless it was wanted."""
        if self._conversations is not None:
            self._conversations.answered(index, answer)

    def _shape_of(self, class_: str, model: str | None, index: int) -> RequestShape:
        recorded: dict[str, Any] = {}
        key, entry = None, entry_of(self._schedule, index)
        if entry >= 0 and isinstance(self._file, Recorded):
            key, recorded = self._file.body_fields(entry, system_apart=self._system_apart)
            recorded = recorded if PROTOCOLS[self._shape.api].conversation else {}
        shape = self._shapes.get((class_, model or "", key))
        if shape is None:
            extra = recorded | dict(self._shape.extra)
            if class_ in self._classes:
                extra |= self._classes[class_].body()
            shape = dataclasses.replace(self._shape, model=model or self._shape.model, extra=extra)
            self._shapes[class_, model or "", key] = shape
        return shape

    def _prompt(self, index: int) -> str | msgspec.Raw:
        schedule, request_id = self._schedule, self._schedule.request_id(index)
        entry = entry_of(schedule, index)
        if self._conversations is not None:
            messages = self._conversations.messages(index)
        elif entry >= 0 and isinstance(self._file, Recorded):
            turn = self._file.turn(entry, system_apart=self._system_apart)
            messages = b",".join(map(bytes, turn))
        elif entry >= 0 and self._file is not None:
            messages = b",".join(msgspec.json.encode(m) for m in self._file.turn(entry, 0))
        else:
            shared = schedule.shared.of(index) if schedule.shared is not None else ()
            tokens = int(schedule.input_tokens[index])
            text = " ".join(filter(None, self._prompts.parts(request_id, tokens, shared)))
            if self._images is None:
                return text
            parts = [{"type": "text", "text": text}, *self._images.parts(request_id)]
            messages = message("user", parts)
        messages = b"[" + messages + b"]"
        if PROTOCOLS[self._shape.api].conversation:
            return msgspec.Raw(messages)
        return "\n".join(_text_of(m.get("content")) for m in msgspec.json.decode(messages))


def _text_of(content: Any) -> str:
    """Return the text of a message's content, for an API without messages."""
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")
