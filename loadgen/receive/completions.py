"""The events of one chat completion or completion read, and its tokens counted; the other APIs are in ``answers``.

A chunk bears tokens when it carries text, reasoning text or tool-call arguments. A role-only or empty
first chunk is no token, and the tokens that a server counts in a chunk without text belong to the
next chunk that has some.
"""

from __future__ import annotations

from array import array
from operator import sub
from typing import Any, cast

import msgspec

from ampacity.loadgen.receive.hot_path import ReadHandler
from ampacity.loadgen.receive.repeats import (
    ChunkContent,
    ChunkTemplate,
    in_pieces,
    last_chunk,
    learn,
)
from ampacity.loadgen.receive.thinking import Kind, Thinking
from ampacity.loadgen.rundir.records import CHUNK_AT_MAX_US, RequestRecord
from ampacity.loadgen.send.protocols import (
    error_text,
    excerpt,
    printable,
    stream_error,
    with_halves,
)
from ampacity.loadgen.send.retold import CallPieces

STAMPS = "L" if array("L").itemsize == 8 else "Q"  # "q" takes Python several times as long
FAILED_REASONS = frozenset(
    ("error", "ERROR", "abort", "network_error", "insufficient_system_resource")
)
"""Of an end: OpenRouter's, Cohere's, that of an engine which gave the request up, Z.ai's and DeepSeek's."""
NO_REASONS = ("null", "None")  # as text, in every chunk of an answer that goes on: DashScope's
TOKENS_MAX = 2**31 - 1  # what a column of the records holds
BAD_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: Any = None
    completion_tokens: Any = None
    prompt_tokens_details: Any = None
    completion_tokens_details: Any = None
    reasoning_tokens: Any = None  # SGLang's place for it


class _Delta(msgspec.Struct, gc=False):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None
    function_call: Any = None  # of before there were several
    refusal: Any = None


class _Choice(
    msgspec.Struct, gc=False
):  # in the order in which servers write them, which is found soonest
    index: Any = None
    delta: _Delta | None = None
    message: _Delta | None = None
    text: Any = None
    logprobs: Any = None
    finish_reason: Any = None
    token_ids: Any = None
    error: Any = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    detail: Any = None


_decode = msgspec.json.Decoder(_Chunk | None).decode
MISSES_MAX = 4  # reads in a row that repeat no other: a server whose chunks always differ is not learned from


class Answer:
    """The content of one response, read event by event. Times are ns of the reads that brought them."""

    __slots__ = (
        "_chunk_tokens",
        "_finished",
        "_finished_choices",
        "_form",
        "_form_usage",
        "_index",
        "_indices",
        "_looks",
        "_missed_at",
        "_misses",
        "_usage",
        "_usage_beside",
        "_usage_per_chunk",
        "_usage_totals",
        "bad_json",
        "cached_tokens",
        "calls",
        "chunk_at_ns",
        "done",
        "error",
        "finish_reason",
        "first_answer_ns",
        "first_event_ns",
        "input_tokens",
        "reasoning_tokens",
        "said",
        "several",
        "thinking",
        "whole_ns",
    )

    repeats = True  # whether chunks can be told by their form

    def __init__(self, thinks_until: str | None = None) -> None:
        """``thinks_until``: see ``Thinking``."""
        self.thinking = Thinking(thinks_until)
        self._looks = (
            True  # whether any text of the answer may be thinking, not only one with a tag
        )
        self.first_event_ns: int | None = None
        self.first_answer_ns: int | None = None
        self.chunk_at_ns = array(STAMPS)  # token-bearing chunks
        self._chunk_tokens: list[
            int | None
        ] = []  # cumulative where _usage_per_chunk, else per chunk
        self._usage_per_chunk = False
        self._usage_totals: list[int] = []  # completion_tokens of chunks without text
        self._finished_choices = 0
        self._index: Any = None  # of the latest choice with text ...
        self._indices: set[int | str] | None = (
            None  # ... of all of them, if there are several, and of one that had an end
        )
        self._finished: Any = None
        self.several = False  # choices came, of which one was asked for
        self._form: ChunkTemplate | None = None  # of text chunks, and the usage beside it
        self._form_usage: _Usage | None = None
        self._misses = self._missed_at = (
            0  # reads in a row that repeated nothing; the chunks up to the last
        )
        self._usage: _Usage | None = None
        self._usage_beside: _Usage | None = None  # the text of the latest chunk
        self.input_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.reasoning_tokens: int | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None  # an error object, in the server's words
        self.bad_json: str | None = None
        self.done = False
        self.whole_ns: int | None = (
            None  # when an answer that has no tokens by its nature was complete
        )
        self.said: list[tuple[Kind, str]] | None = None  # a list, where somebody wants the text ...
        self.calls: CallPieces | None = None  # ... and the calls of tools

    def listen(self) -> None:
        """Keep what is said."""
        self.said, self.calls = [], CallPieces()

    def read_handler(self, otherwise: ReadHandler) -> ReadHandler | None:
        """What takes reads that repeat the form and hands on all others; None where no form is known."""
        form, note, said = self._form, self.chunk_at_ns.append, self.said
        if form is None:
            return None
        followed, thinking = self._looks and form.kind == "answer", self.thinking
        if followed and thinking.parsed:
            return None
        if said is None and not followed:
            return form.read_handler(note, otherwise)
        kind: Kind = "reasoning" if thinking.state == "thinking" else form.kind

        def handles(chunk: bytes) -> bool:  # there is more to note than the time
            text = form.text_of(chunk)
            if text is None:
                return False
            if followed and not thinking.goes_on(text.decode()):
                form.total = form.total and form.total - 1
                return False
            if said is not None:
                said.append((kind, text.decode()))
            return True

        return in_pieces(handles, note, otherwise)

    def _catch_up(self) -> None:
        """Note the tokens of the repetitions since the last chunk that was read event by event: one each."""
        form, usage, new = (
            self._form,
            self._form_usage,
            len(self.chunk_at_ns) - len(self._chunk_tokens),
        )
        if not new or form is None:
            return
        if usage is not None:
            self._usage = usage
        if form.total is None:
            self._chunk_tokens += [None] * new
            return
        self._chunk_tokens += range(form.total - new + 1, form.total + 1)
        if usage is not None:
            usage.completion_tokens = form.total

    def learn(self, read: bytes, new: int) -> None:
        """``read`` was read event by event and had ``new`` chunks with tokens: those that follow may repeat its last one."""
        if not self.repeats:
            return
        read = last_chunk(read)
        form, total, chunks = self._form, self._chunk_tokens[-1], len(self.chunk_at_ns)
        if form is not None and form.total is not None and total:
            form.total = total - 1
            if form.text_of(read) is not None:  # several tokens in one chunk, and else the same
                return
            form.total = total
        self._misses = self._misses + 1 if chunks - new == self._missed_at else 1
        self._missed_at = chunks
        if self._misses <= MISSES_MAX and (found := learn(read, _said)) is not None:
            self._form, self._form_usage = found, self._usage_beside

    def on_event(self, at_ns: int, data: bytes) -> None:
        """One SSE event that was completed at ``at_ns``."""
        self._catch_up()
        if self.first_event_ns is None:
            self.first_event_ns = at_ns
        if data[:1] != b"{" and data.strip() == b"[DONE]":
            self.done = True
            return
        self._on_json(at_ns, data)

    def on_rest(self, at_ns: int, data: bytes) -> None:
        """What the end of the body left without its blank line: an event, or half of one that is dropped."""
        bad_json = self.bad_json
        self.on_event(at_ns, data)
        self.bad_json = bad_json

    def on_whole(self, at_ns: int, body: bytes) -> None:
        """A body that is no stream: everything arrives at once."""
        self.first_event_ns = at_ns
        self._on_json(at_ns, body)
        self.done = self.bad_json is None

    def _on_json(self, at_ns: int, data: bytes) -> None:
        try:
            chunk = _decode(data) if data else None
        except BAD_JSON as error:
            chunk = with_halves(data, _Chunk)
            if chunk is None:
                self._on_bad_json(error, data)
                return
        if chunk is None:  # ``data: null`` and empty events are seen: no token, no fault
            return
        if (chunk.error or chunk.choices is None) and (told := stream_error(data)):
            self.error = self.error or told
            return
        bears_text, reasoning, counted = False, False, None
        for choice in chunk.choices or ():
            if choice.error:  # OpenRouter's place for it
                self.error = self.error or error_text(msgspec.json.encode({"error": choice.error}))
            if choice.finish_reason and choice.finish_reason not in NO_REASONS:
                self.finish_reason = printable(str(choice.finish_reason))
                if self.finish_reason in FAILED_REASONS:
                    self.error = self.error or f"finish reason {self.finish_reason}"
                self._finished_choices += 1
                ended, self._finished = self._finished, choice.index or 0
                if ended is not None and ended != self._finished:
                    self.several = True
            delta, text = choice.delta, None
            if (
                delta is not None and delta.content.__class__ is str and delta.content
            ):  # nearly every chunk
                kind: Kind | None = "answer"
                text = delta.content
            else:
                kind = _kind_of(choice)
            if kind is not None:
                if bears_text and (choice.index is None or choice.index != self._index):
                    self.several = True  # two that have text in one chunk
                if choice.index != self._index:
                    self._on_other(choice)
                if text is None:
                    text = _text_of(choice)
                if (
                    kind == "answer"
                    and text
                    and (self._looks or ">" in text or "]" in text or "▷" in text)  # a tag ends so
                ):
                    kind, text = self._heard(text)
                if self.said is not None:
                    self._tell(kind, text, choice)
                reasoning = kind == "reasoning"
                tokens = None
                if choice.token_ids is not None or choice.logprobs is not None:
                    tokens = _tokens_in(choice)
                if not bears_text:
                    counted = tokens
                elif counted is not None:  # a second choice with text in one chunk
                    counted = None if tokens is None else counted + tokens
                bears_text = True
        if bears_text and not reasoning and self.first_answer_ns is None:
            self.first_answer_ns = at_ns
        usage = chunk.usage
        if usage is not None:
            if not bears_text or self._usage is None:
                self._on_usage(usage, bears_text)
            self._usage = (
                usage  # running totals: of those beside text only the latest is looked at whole
            )
            if bears_text and (total := token_count(usage.completion_tokens)):
                self._usage_per_chunk = True
                counted = total
        if bears_text:
            self._usage_beside = usage
            self._append(at_ns, counted)

    def _on_other(self, choice: _Choice) -> None:
        """Text of another choice than the one before: who comes back to a choice sends several."""
        last, self._index = self._index, choice.index
        if last is None and not self.chunk_at_ns:
            return
        before, number = _number(last), _number(choice.index)
        if number == before:
            return
        if self._indices is None:
            self._indices = {before}
        self.several = self.several or number in self._indices
        self._indices.add(number)

    def _tell(self, kind: Kind, text: str, choice: _Choice) -> None:
        """Keep what a chunk said, where somebody wants it."""
        if self.said is not None:
            self.said.append((kind, text))
        said = choice.delta or choice.message
        if said is not None and self.calls is not None:
            self.calls.add_chat(said.tool_calls)
            if isinstance(said.function_call, dict):
                self.calls.add_chat([{"function": said.function_call}])

    def _heard(self, text: str) -> tuple[Kind, str]:
        """What a text of the answer is: thinking that stands in it is none. And what of it is to be told again."""
        thinking = self.thinking
        kind, text = thinking.take(text)
        self._looks = thinking.parsed or thinking.followed
        if thinking.all_thought:
            thinking.all_thought, self.first_answer_ns = False, None
            if self.said is not None:
                self.said[:] = [("reasoning", said) for _, said in self.said]
        return kind, text

    def _on_bad_json(self, error: Exception, data: bytes) -> None:
        """What is no JSON of the right shape: an error all the same where it is a list that holds one."""
        told = stream_error(data) if data.lstrip()[:1] == b"[" else None
        if told is not None:
            self.error = self.error or told
        else:
            self.bad_json = self.bad_json or f"{error}: {excerpt(data)}"

    def _append(self, at_ns: int, tokens: int | None) -> None:
        self.chunk_at_ns.append(at_ns)
        self._chunk_tokens.append(tokens)

    def _on_usage(self, usage: _Usage, bears_text: bool) -> None:
        total = token_count(usage.completion_tokens)
        if total is not None and not bears_text:
            self._usage_totals.append(total)
        prompt = token_count(usage.prompt_tokens)
        if prompt:
            self.input_tokens = prompt
        self.cached_tokens = token_detail(
            usage.prompt_tokens_details, "cached_tokens", self.cached_tokens
        )
        reasoning = token_count(usage.reasoning_tokens)
        before = self.reasoning_tokens if reasoning is None else reasoning
        self.reasoning_tokens = token_detail(
            usage.completion_tokens_details, "reasoning_tokens", before
        )

    def tokens_so_far(self) -> int:
        """Tokens received by now: the server's running total, or a token for each chunk."""
        counted = self._chunk_tokens[-1] if self._usage_per_chunk else None
        return counted or len(self.chunk_at_ns)

    @property
    def chunk_tokens(self) -> list[int] | None:
        """Tokens in each token-bearing chunk, or None where the server did not say."""
        counts = self._chunk_tokens
        if not counts or None in counts:
            return None
        known = cast("list[int]", counts)
        if not self._usage_per_chunk:
            return known
        gains = list(map(sub, known, [0, *known[:-1]]))
        return gains if min(gains) >= 1 else None  # counts that stand still or fall are no counts

    @property
    def merged_events(self) -> int:
        """Token events that shared their read with the one before."""
        return len(self.chunk_at_ns) - len(set(self.chunk_at_ns))

    def finish(self) -> None:
        """The answer is over: take what its latest usage says.

        A server that numbers the tokens of its one choice by ``index``, as TGI did, has about as many of them as chunks.
        """
        self._catch_up()
        numbers = len(self._indices or ())
        self.several = self.several or 1 < numbers <= len(self.chunk_at_ns) / 2
        if self._usage is not None:
            self._on_usage(self._usage, bears_text=True)

    def write_into(self, record: RequestRecord) -> None:
        """What it says of itself: times, tokens, finish reason."""
        record.first_event_ns = self.first_event_ns
        record.first_answer_ns = self.first_answer_ns
        record.finish_reason = self.finish_reason
        record.input_tokens = self.input_tokens
        record.cached_tokens = self.cached_tokens
        record.output_tokens, record.token_source = self.output_tokens()
        record.reasoning_tokens = self.reasoning_tokens
        record.last_token_ns = self.whole_ns
        if self.chunk_at_ns and (start := record.started_ns) is not None:
            record.first_token_ns, record.last_token_ns = self.chunk_at_ns[0], self.chunk_at_ns[-1]
            at_us = [
                (at_ns - start) // 1000 for at_ns in self.chunk_at_ns
            ]  # numpy takes longer for so few
            if at_us[-1] > CHUNK_AT_MAX_US or at_us[0] < 0:
                at_us = [min(max(at, 0), CHUNK_AT_MAX_US) for at in at_us]
            record.chunk_at_us = array("I", at_us)
            record.chunk_tokens = self.chunk_tokens

    def output_tokens(self) -> tuple[int | None, str | None]:
        """(tokens generated, token_source). A usage of 0 beside visible text is not believed."""
        if self._usage_totals:
            # with n > 1 some servers send one total for each choice, others one for all; the same total
            # or a growing one may also come several times for a single choice
            per_choice = (
                len(self._usage_totals) == self._finished_choices and not self._usage_per_chunk
            )
            total = sum(self._usage_totals) if per_choice else self._usage_totals[-1]
            if self._usage_per_chunk:  # a stream may break off before its last usage
                total = max(total, self._chunk_tokens[-1] or 0)
            if total >= 1 or not self.chunk_at_ns:
                return total, "usage_per_chunk" if self._usage_per_chunk else "usage"
        per_chunk = self.chunk_tokens
        if self._usage_per_chunk and (last := self._chunk_tokens[-1]):
            return last, "usage_per_chunk" if per_chunk and len(per_chunk) > 1 else "usage"
        if per_chunk is not None:
            return sum(per_chunk), "logprobs"
        if self.chunk_at_ns:
            return len(self.chunk_at_ns), "chunks"
        return None, None


def _said(data: bytes) -> ChunkContent | None:
    """What an event says that is text of one choice, perhaps with a running total, and nothing else that counts."""
    try:
        chunk = _decode(data)
    except BAD_JSON:
        return None
    if chunk is None or chunk.error or not chunk.choices or len(chunk.choices) > 1:
        return None
    choice = chunk.choices[0]
    kind = _kind_of(choice)
    if (
        choice.error
        or kind is None
        or choice.finish_reason
        or choice.token_ids is not None
        or choice.logprobs is not None
    ):
        return None
    total = None if chunk.usage is None else token_count(chunk.usage.completion_tokens)
    return kind, _text_of(choice), total or None


def _number(index: Any) -> int | str:
    """Which of several choices it is; one without a number is the first."""
    return index if isinstance(index, int | str) else 0


def _kind_of(choice: _Choice) -> Kind | None:
    """What a choice carries; None where it carries no token. Text sent under two names counts once."""
    delta = choice.delta or choice.message
    if delta is None:
        return "answer" if choice.text else None
    if isinstance(delta.content, list):  # Mistral's parts
        return _kind_of_parts(delta.content)
    if delta.content or delta.refusal:
        return "answer"
    if delta.reasoning_content or delta.reasoning:
        return "reasoning"
    return "answer" if delta.tool_calls or delta.function_call else None


def _kind_of_parts(parts: list[Any]) -> Kind | None:
    """What a content in parts carries: text of the answer, or thinking alone."""
    kinds = {str(part.get("type")) for part in parts if isinstance(part, dict)}
    if not kinds:
        return None
    return "reasoning" if kinds <= {"thinking", "reasoning"} else "answer"


def _text_of_parts(parts: list[Any]) -> str:
    """The text of a content in parts; that of thinking is in parts again."""
    inner = [part.get("text", part.get("thinking")) for part in parts if isinstance(part, dict)]
    flat = [piece for one in inner for piece in (one if isinstance(one, list) else [one])]
    texts = [piece.get("text") if isinstance(piece, dict) else piece for piece in flat]
    return "".join(text for text in texts if isinstance(text, str))


def _text_of(choice: _Choice) -> str:
    """The text of a choice that bears tokens; that of tool calls is left out."""
    delta = choice.delta or choice.message or _Delta()
    if isinstance(delta.content, list):
        return _text_of_parts(delta.content)
    for text in (
        delta.content,
        delta.refusal,
        delta.reasoning_content,
        delta.reasoning,
        choice.text,
    ):
        if isinstance(text, str) and text:
            return text
    return ""


def _tokens_in(choice: _Choice) -> int | None:
    if isinstance(choice.token_ids, list) and choice.token_ids:
        return len(choice.token_ids)
    logprobs = choice.logprobs
    if isinstance(logprobs, dict):
        tokens = logprobs.get("content") or logprobs.get("tokens")
        if isinstance(tokens, list) and tokens:
            return len(tokens)
    return None


def token_count(value: Any) -> int | None:
    """A number of tokens; what is none, or cannot be one, is not believed."""
    return (
        value if type(value) is int and 0 <= value <= TOKENS_MAX else None
    )  # a bool is of another type


def token_detail(details: Any, name: str, before: int | None) -> int | None:
    """A count out of usage's details, or the one before."""
    value = token_count(details.get(name)) if isinstance(details, dict) else None
    return before if value is None else value
