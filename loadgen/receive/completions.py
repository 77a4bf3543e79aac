"""The events of one chat completion or completion; the other APIs are in ``answers``.

A chunk bears tokens when it carries text, reasoning text or tool-call arguments. A role-only or
empty first chunk bears none, and the tokens that a server counts in a chunk without text belong to
the next chunk that has some.
"""

import re
from array import array
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from ampacity.loadgen.receive import hot_path
from ampacity.loadgen.receive.choices import ChoiceOrder
from ampacity.loadgen.receive.chunks import (
    BAD_JSON,
    Choice,
    Chunk,
    Usage,
    decode_chunk,
    error_of,
    kind_and_text,
    text_chunk_content,
    tokens_in,
)
from ampacity.loadgen.receive.templates import (
    ChunkContent,
    ChunkTemplate,
    decoded_text,
    last_chunk,
    learn,
)
from ampacity.loadgen.receive.thinking import Kind, Thinking
from ampacity.loadgen.receive.token_tally import TokenTally
from ampacity.loadgen.rundir.records import CHUNK_AT_MAX_US, THEN, RequestRecord
from ampacity.loadgen.send.history import CallPieces
from ampacity.loadgen.send.protocols import (
    decoded,
    error_text,
    excerpt,
    printable,
    stream_error,
    with_lone_surrogates,
)

T = TypeVar("T")
TIMES = "L" if array("L").itemsize == 8 else "Q"  # "q" is several times slower
FAILED_REASON = re.compile(
    "error|abort|fail|cancel|time.?out|overload|unavailable|network|insufficient", re.IGNORECASE
)
"""In finish reasons of failures (OpenRouter, Cohere, an engine's abort, Z.ai, DeepSeek) and in
events that are mere words."""
NO_REASONS = ("null", "None")  # DashScope, in every chunk but the last
SEVERAL_TEXTS = "trailing characters"  # as msgspec says it
LEARN_MISSES_MAX = 4  # reads in a row that match no template: then learning stops


class Answer:
    """The content of one response, read event by event. Times are ns of the reads."""

    # the content of an event that is only text, or None; None: such events match no template
    content_of: Callable[[bytes], ChunkContent | None] | None = staticmethod(text_chunk_content)

    def __init__(self, thinks_until: str | None = None) -> None:
        """Begin an answer. ``thinks_until``: see ``Thinking``."""
        self.thinking = Thinking(thinks_until)
        self._scans_text = True  # every text may be thinking, not only one with a tag
        self.chunk_at_ns = array(TIMES)  # token-bearing chunks
        self.tally = TokenTally()
        self.choices = ChoiceOrder()
        self.first_event_ns: int | None = None
        self.first_answer_ns: int | None = None
        self.whole_ns: int | None = None  # end of an answer whose API has no tokens
        self.finish_reason: str | None = None
        self.model: str | None = None  # as the answer names it; "": not at all
        self.error: str | None = None  # the message of an error object
        self._foreign: tuple[int, bytes] | None = None  # of an event that is no chunk: see there
        self.bad_json: str | None = None
        self.done = False
        self.texts: list[tuple[Kind, str]] | None = None  # kept after ``keep_text``
        self.calls: CallPieces | None = None
        # of chunks that matched since the last parsed one: their texts, if kept, and token counts
        self._matched: list[bytes] = []
        self._matched_counts: list[int] = []
        self._template: ChunkTemplate | None = None
        self._template_choice: Any = None  # the index of its choice
        self._template_usage: Usage | None = None
        self._usage_beside_text: Usage | None = None  # in the latest chunk
        self._misses = self._missed_at = 0  # in a row, and the number of chunks at the last
        self.may_match = hot_path.COMPILED and self.content_of is not None  # else all is parsed

    @property
    def whole(self) -> bool:
        """Tell whether [DONE] has come, or both the finish reason and the last usage."""
        return self.done or bool(self.finish_reason is not None and self.tally.totals)

    def keep_text(self) -> None:
        self.texts, self.calls = [], CallPieces()

    def read_handler(self, fallback: hot_path.ReadHandler) -> hot_path.ReadHandler | None:
        """Return a handler of reads that match the template; None where there is none."""
        template = self._template
        if template is None or self.error or self._template_choice != self.choices.latest:
            return None
        content = template.content
        of_text = content.call is None
        if content.kind == "answer" and (
            self._scans_text if of_text else self.first_answer_ns is None
        ):
            return None
        counted = content.listed is not None or self._template_usage is not None
        add_text = None if self.texts is None else self._matched.append
        counts = self.tally.chunk_counts
        return template.read_handler(
            self.chunk_at_ns.append,
            self._matched_counts.append if counted else None,
            add_text,
            fallback,
            (counts[-1] if counts else 0) or 0,
        )

    def _count_matched(self) -> None:
        """Count the tokens of the chunks that matched the template since the last parsed one."""
        counts, template = self.tally.chunk_counts, self._template
        new = len(self.chunk_at_ns) - len(counts)
        if template is None or not new:  # else an old usage would replace the latest
            return
        kind, _, total, _, call = template.content
        if self.texts is not None:
            texts = [decoded_text(text) for text in self._matched]
            self.texts += [(kind, text if call is None else "") for text in texts]
            if call is not None and self.calls is not None:
                self.calls.add_pieces(*call, texts)
            self._matched.clear()
        usage, matched = self._template_usage, self._matched_counts
        if usage is not None:
            self.tally.usage = usage
            if matched and total is not None:
                usage.completion_tokens = matched[-1]
        counts += matched or [None] * new
        matched.clear()

    def learn(self, read: bytes, new: int) -> None:
        """Learn a template from a parsed read that had ``new`` token-bearing chunks."""
        assert self.content_of is not None
        chunks = len(self.chunk_at_ns)
        self._misses = self._misses + 1 if chunks - new == self._missed_at else 1
        self._missed_at = chunks
        if self._misses > LEARN_MISSES_MAX:
            self.may_match = self._template is not None
            return
        if (found := learn(last_chunk(read), self.content_of)) is not None:
            self._template, self._template_usage = found, self._usage_beside_text
            self._template_choice = self.choices.latest

    def on_event(self, at_ns: int, data: bytes) -> None:
        """Read one SSE event that was completed at ``at_ns``."""
        if len(self.chunk_at_ns) != len(self.tally.chunk_counts):
            self._count_matched()
        if self.first_event_ns is None:
            self.first_event_ns = at_ns
        if data[:1] != b"{" and data.strip() == b"[DONE]":
            self.done = True
            return
        self._on_json(at_ns, data)

    def on_rest(self, at_ns: int, data: bytes) -> None:
        """Read what the body ends with: an event without its blank line, or half of one.

        If nothing came before it, it is judged like any other.
        """
        bad_json, is_first = self.bad_json, self.first_event_ns is None
        self.on_event(at_ns, data)
        if not is_first:
            self.bad_json = bad_json

    def on_whole(self, at_ns: int, body: bytes) -> None:
        self.first_event_ns = at_ns
        self._on_json(at_ns, body)
        self.done = self.bad_json is None

    def _decoded(self, decode: Callable[[bytes], T | None], kind: type[T], data: bytes) -> T | None:
        """Decode an event; None where it is empty, ``null``, or bad JSON, which is noted.

        Where that is a list with the server's own error (Gemini), or words of failure in place of
        an object, the error is noted.
        """
        try:
            return decode(data) if data else None
        except BAD_JSON as error:
            with suppress(*BAD_JSON):  # log-probabilities of another form
                return msgspec.json.decode(data, type=kind)
            if (value := with_lone_surrogates(data, kind)) is not None:
                return value
            if data.lstrip()[:1] == b"[" and (message := stream_error(data)) is not None:
                self.error = self.error or message
            elif data[:1] not in b'{"' and FAILED_REASON.search(words := excerpt(data)):
                self.error = self.error or words
            else:
                is_json = isinstance(error, msgspec.ValidationError)
                why = f"{'JSON, but no event of this API' if is_json else 'not JSON'}: {error}"
                if SEVERAL_TEXTS in str(error):
                    why = "JSON lines, no event stream"
                self.bad_json = self.bad_json or f"{why}: {excerpt(data)}"
            return None

    def _on_json(self, at_ns: int, data: bytes) -> None:
        chunk = self._decoded(decode_chunk, Chunk, data)
        if chunk is None:
            return
        if chunk.error or chunk.choices is None:
            if message := stream_error(data):
                self.error = self.error or message
                return
            if chunk.usage is None:
                self._on_foreign(data)
        if self.model is None and chunk.choices:  # Azure's first chunk has neither
            self._on_model(decoded(data))  # once: a further field would slow down every chunk
        kind: Kind | None = None
        counted: int | None = None
        for choice in chunk.choices or ():
            choice_kind = self._on_text(choice, kind is not None)
            if choice.finish_reason or error_of(choice):
                has_text = kind is not None or choice_kind is not None
                self._on_choice_end(choice, len(self.chunk_at_ns) + has_text)
            if choice_kind is None:
                continue
            tokens = None
            if choice.token_ids is not None or choice.logprobs is not None:
                tokens = tokens_in(choice)
            if kind is not None:  # a second choice with text in one chunk
                tokens = None if counted is None or tokens is None else counted + tokens
            kind, counted = choice_kind, tokens
        looks = self.model and (kind is None or self.finish_reason)
        if looks and f'"{self.model}"'.encode() not in data:  # a fallback changes it halfway
            self._on_model(decoded(data))
        usage = chunk.usage
        if usage is not None:
            counted = self.tally.add_usage(usage, has_text=kind is not None) or counted
        if kind is not None:
            if kind == "answer" and self.first_answer_ns is None:
                self.first_answer_ns = at_ns
            self._usage_beside_text = usage
            self.chunk_at_ns.append(at_ns)
            self.tally.chunk_counts.append(counted)

    def _on_model(self, holder: object) -> None:
        """Take the model that an object of the answer names, and the first other one later."""
        if not isinstance(holder, dict):
            return
        name, before = holder.get("model"), self.model or ""
        name = printable(name) if isinstance(name, str) else ""
        if not before:
            self.model = name
        elif name not in ("", before) and THEN not in before:
            self.model = f"{before}{THEN}{name}"

    def _on_choice_end(self, choice: Choice, chunks: int) -> None:
        """Take the error or the finish reason of a choice, after this many chunks with text."""
        if error := error_of(choice):
            self.error = self.error or error_text(msgspec.json.encode({"error": error}))
        if not choice.finish_reason or choice.finish_reason in NO_REASONS:
            return
        self._on_reason(str(choice.finish_reason))
        self.choices.on_finish(choice.index, chunks)

    def _on_reason(self, reason: str) -> None:
        self.finish_reason = printable(reason)
        if FAILED_REASON.search(reason):
            self.error = self.error or f"finish reason {self.finish_reason}"

    def _on_foreign(self, data: bytes) -> None:
        """Keep an event that is no chunk: if the answer has no proper end, that is the reason."""
        if data.strip() != b"{}":
            self._foreign = len(self.chunk_at_ns), data

    def _on_text(self, choice: Choice, in_one_chunk: bool) -> Kind | None:
        """Take the text of a choice; return its kind, None where it has none."""
        kind: Kind
        delta = choice.delta
        if delta is not None and delta.content.__class__ is str and delta.content:
            kind, text = "answer", delta.content  # nearly every chunk
        elif (content := kind_and_text(choice)) is not None:
            kind, text = content
        else:
            return None
        if in_one_chunk or choice.index != self.choices.latest:
            self.choices.on_text(choice.index, len(self.chunk_at_ns), in_one_chunk)
        if (
            kind == "answer"
            and text
            and (self._scans_text or ">" in text or "]" in text or "▷" in text)  # ends of tags
        ):
            kind, text = self._classify(text)
        if self.texts is not None:
            self.texts.append((kind, text))
            delta = delta or choice.message
            if delta is not None and self.calls is not None:
                self.calls.add_chat(delta.tool_calls)
                if isinstance(delta.function_call, dict):
                    self.calls.add_chat([{"function": delta.function_call}])
        return kind

    def _classify(self, text: str) -> tuple[Kind, str]:
        """Tell inline thinking from answer text; return the kind and what belongs in the answer."""
        thinking = self.thinking
        kind, text = thinking.classify(text)
        self._scans_text = thinking.must_scan
        if thinking.all_was_thinking:
            thinking.all_was_thinking, self.first_answer_ns = False, None
            if self.texts is not None:
                self.texts[:] = [("reasoning", earlier) for _, earlier in self.texts]
        return kind, text

    def finish(self) -> None:
        """End the answer: take what its latest usage reports, and why it broke off."""
        self._count_matched()
        if self.finish_reason is None and self._foreign is not None:
            chunks, data = self._foreign
            if chunks == len(self.chunk_at_ns):  # no token came after it
                self.error = self.error or error_text(data)
        self.choices.finish(len(self.chunk_at_ns))
        self.tally.finish(self.choices.finishes)

    def write_into(self, record: RequestRecord) -> None:
        tally = self.tally
        record.first_event_ns = self.first_event_ns
        record.first_answer_ns = self.first_answer_ns
        record.finish_reason = self.finish_reason
        record.answered_by = record.answered_by or self.model or None
        record.input_tokens = tally.input_tokens
        record.cached_tokens = tally.cached_tokens
        record.output_tokens, record.token_source = tally.output
        record.reasoning_tokens = tally.reasoning_tokens
        record.last_token_ns = self.whole_ns
        if self.chunk_at_ns and (start := record.started_ns) is not None:
            record.first_token_ns, record.last_token_ns = self.chunk_at_ns[0], self.chunk_at_ns[-1]
            # numpy is slower for so few
            at_us = [(at_ns - start) // 1000 for at_ns in self.chunk_at_ns]
            if at_us[-1] > CHUNK_AT_MAX_US or at_us[0] < 0:
                at_us = [min(max(at, 0), CHUNK_AT_MAX_US) for at in at_us]
            record.chunk_at_us = array("I", at_us)
            record.chunk_tokens = tally.per_chunk()
