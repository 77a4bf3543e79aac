"""Build the bytes of an answer in vLLM's format. No I/O."""

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ampacity.simulator.server.apierrors import error_body
from ampacity.simulator.server.face import Face
from ampacity.simulator.server.protocol import Call, Choice
from ampacity.simulator.server.text import (
    WORD_BYTES,
    WORD_CHARACTERS,
    WORDS,
    TokenLogprobs,
    characters,
    logprobs,
    word_index,
)

FINGERPRINT = "ampacity-simulator"
GARBAGE = b'data: {"id":"chatcmpl-\xff\xfe\x00","choices":[{"delta":{"content":'
_STRIDE, _VOCABULARY = word_index(0, 1), len(WORDS)


def frame(payload: bytes) -> bytes:
    """Return a server-sent event as one chunk of a chunked HTTP body."""
    return chunk(b"data: " + payload + b"\n\n")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def error_frames(message: str) -> bytes:
    """Return what vLLM writes into a stream when its engine dies."""
    return frame(error_body(message, "InternalServerError", None, 500)) + frame(b"[DONE]")


def usage(call: Call, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": call.prompt_tokens,
        "total_tokens": call.prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


def reasoning_tokens(call: Call, choice: Choice, face: Face) -> int:
    """Return the reasoning tokens of a choice."""
    return round(face.reasoning_share * choice.ending.tokens) if call.chat else 0


def _final_usage(call: Call, face: Face, cached_tokens: int) -> dict[str, Any]:
    figures = usage(call, call.output_tokens)
    if face.prompt_tokens_details:
        figures["prompt_tokens_details"] = {
            "cached_tokens": cached_tokens,
            "created_cache_tokens": 0,
        }
    if face.prompt_tokens_details or face.reasoning_share:
        thought = sum(reasoning_tokens(call, choice, face) for choice in call.choices)
        figures["completion_tokens_details"] = {"reasoning_tokens": thought}
    return figures


def _shaped_logprobs(call: Call, choice: Choice, first: int, end: int) -> dict[str, Any] | None:
    """Return the log-probabilities of the tokens first to end - 1."""
    top = call.top_logprobs
    if top is None:
        return None
    natural = choice.ending.finish_reason == "stop" and choice.ending.stop_reason is None
    eos = choice.ending.tokens - 1 if natural else -1
    found = [logprobs(choice.seed, at, top, last=at == eos) for at in range(first, end)]
    if call.chat:
        return {"content": [_chat_entry(t) for t in found]}
    return {
        "text_offset": [at * WORD_CHARACTERS for at in range(first, end)],
        "token_logprobs": [t.logprob for t in found],
        "tokens": [t.token for t in found],
        "top_logprobs": [dict(t.top or ((t.token, t.logprob),)) for t in found],
    }


def _chat_entry(found: TokenLogprobs) -> dict[str, Any]:
    def entry(token: str, value: float) -> dict[str, Any]:
        return {"token": token, "logprob": value, "bytes": list(token.encode())}

    top = [entry(*other) for other in found.top]
    return entry(found.token, found.logprob) | {"top_logprobs": top}


def answer(call: Call, face: Face, created: int, cached_tokens: int = 0) -> bytes:
    """Return the body of an answer that is not streamed."""
    figures = _final_usage(call, face, cached_tokens)
    for details in ("prompt_tokens_details", "completion_tokens_details"):
        figures.setdefault(details, None)
    value = {
        "id": call.request_id,
        "object": "chat.completion" if call.chat else "text_completion",
        "created": created,
        "model": call.model,
        "choices": [_whole_choice(call, choice, face) for choice in call.choices],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": figures,
    }
    if call.chat:
        value |= {"prompt_logprobs": None, "prompt_token_ids": None}
    return msgspec.json.encode(value | {"kv_transfer_params": None})


def _whole_choice(call: Call, choice: Choice, face: Face) -> dict[str, Any]:
    end = choice.ending
    tail = {
        "logprobs": _shaped_logprobs(call, choice, 0, end.tokens),
        "finish_reason": end.finish_reason,
        "stop_reason": end.stop_reason,
        "token_ids": None,
    }
    if not call.chat:
        text = characters(choice.seed, 0, end.characters)
        absent = {"prompt_logprobs": None, "prompt_token_ids": None}
        return {"index": choice.index, "text": text, **tail, **absent}
    thought = reasoning_tokens(call, choice, face)
    no_answer = thought == end.tokens
    cut = end.characters if no_answer else min(end.characters, thought * WORD_CHARACTERS)
    message = {
        "role": "assistant",
        "content": None if no_answer else characters(choice.seed, cut, end.characters),
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        face.reasoning_field: characters(choice.seed, 0, cut) if thought else None,
    }
    return {"index": choice.index, "message": message, **tail}


def model_cards(
    names: Sequence[str], root: str, max_model_len: int, created: int
) -> list[dict[str, Any]]:
    """Return the cards of /v1/models. The first name is the base model, the others are adapters."""
    base = names[0]
    return [
        {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": root if name == base else name,
            "parent": None if name == base else base,
            "max_model_len": max_model_len if name == base else None,
            "permission": [
                {
                    "id": f"modelperm-{zlib.crc32(name.encode('utf-8', 'replace')):016x}",
                    "object": "model_permission",
                    "created": created,
                    "allow_create_engine": False,
                    "allow_sampling": True,
                    "allow_logprobs": True,
                    "allow_search_indices": False,
                    "allow_view": True,
                    "allow_fine_tuning": False,
                    "organization": "*",
                    "group": None,
                    "is_blocking": False,
                }
            ],
        }
        for name in names
    ]


class Stream:
    """The common parts of a streamed request's choices: head of each chunk, role chunks, end."""

    def __init__(self, call: Call, face: Face, created: int) -> None:
        self.call = call
        self.face = face
        self.created = created
        self.include_usage = call.include_usage and face.usage != "none"
        self.continuous_usage = call.continuous_usage and face.usage == "full"
        self.unfinished = len(call.choices)
        self._opened = False
        self.cached: Callable[[], int] = lambda: 0  # prompt tokens that a prefix cache had
        kind = "chat.completion.chunk" if call.chat else "text_completion"
        self._head = {
            "id": call.request_id,
            "object": kind,
            "created": created,
            "model": call.model,
        }

    def choices(self) -> list["ChoiceFrames"]:
        """Return the frames of each choice; the first has the role chunks, unless `opening` had."""
        return [ChoiceFrames(self, choice) for choice in self.call.choices]

    def opening(self) -> bytes:
        """Return the role chunk of each choice of a chat; b'' if they were sent."""
        if self._opened or not self.call.chat:
            return b""
        self._opened = True
        delta = {"role": "assistant", "content": ""}
        shared = {"delta": delta, "logprobs": None, "finish_reason": None}
        absent = {"prompt_token_ids": None, "prompt_text": None}
        return b"".join(
            self._event([{"index": choice.index} | shared], 0, absent)
            for choice in self.call.choices
        )

    def tail(self) -> bytes:
        """Return the usage chunk and [DONE], if the options have them."""
        done = frame(b"[DONE]") if self.face.done else b""
        if not self.include_usage:
            return done
        figures = _final_usage(self.call, self.face, self.cached())
        return self._event([], None, {"usage": figures, "system_fingerprint": FINGERPRINT}) + done

    def turn(self) -> bytes:
        """Return what separates reasoning and answer."""
        return b""

    def error(self, message: str) -> bytes:
        """Return what is written into the stream when the engine dies."""
        return error_frames(message)

    def text(
        self,
        choice: Choice,
        field: str,
        text: str,
        shown: int,
        *,
        last: bool = False,
        log: object = None,
    ) -> bytes:
        """Return one chunk. field: name in a chat's delta; shown: tokens of the choice so far."""
        end = choice.ending
        reasons: dict[str, Any] = {"finish_reason": end.finish_reason if last else None}
        if last or not self.call.chat:
            reasons["stop_reason"] = end.stop_reason if last else None
        said: dict[str, Any] = {"delta": {field: text}} if self.call.chat else {"text": text}
        absent = (
            {"token_ids": None} if self.call.chat else {"prompt_token_ids": None, "token_ids": None}
        )
        one = {"index": choice.index, **said, "logprobs": log, **reasons, **absent}
        more = {"system_fingerprint": FINGERPRINT} if last and not self.include_usage else {}
        return self._event([one], shown, more)

    def _event(self, choices: list[Any], shown: int | None, more: dict[str, Any]) -> bytes:
        value = {**self._head, "choices": choices}
        if self.continuous_usage and shown is not None:
            value["usage"] = usage(self.call, shown) | {"completion_tokens_details": None}
        return frame(msgspec.json.encode(value | more))


class ChoiceFrames:
    """The frames of one choice, by token. The text around a plain token is built once."""

    def __init__(self, stream: Stream, choice: Choice) -> None:
        self._stream = stream
        self._choice = choice
        self._thought = reasoning_tokens(stream.call, choice, stream.face)
        self.made = 0  # tokens pushed
        self._shown = 0  # of them in chunks
        self._pre = self._post = b""
        self._plain_from = self._plain_to = 0  # tokens whose chunk is _pre + word + _post

    def push(self, count: int = 1) -> bytes:
        """Return the frames for the next tokens, b'' if held back; the last ends the stream."""
        position = self.made
        if count == 1 and self._plain_from <= position < self._plain_to:
            self.made = self._shown = position + 1
            word = WORD_BYTES[(self._choice.seed + position * _STRIDE) % _VOCABULARY]
            return self._pre + word + self._post
        return self._push_slowly(count)

    def _push_slowly(self, count: int) -> bytes:
        stream, total = self._stream, self._choice.ending.tokens
        start = self._shown
        made = self.made = min(self.made + count, total)
        parts = [stream.opening()]
        last = made == total
        turns = start < self._thought <= made
        if last or turns or start == 0 or made - start >= stream.face.chunk_tokens:
            cuts = [start, self._thought, made] if turns and self._thought < made else [start, made]
            for first, end in itertools.pairwise(cuts):
                parts.append(self._chunk(first, end))
                if first < end == self._thought < total:
                    parts.append(stream.turn())
            self._shown = made
        if last:
            stream.unfinished -= 1
            if not stream.unfinished:
                parts.append(stream.tail())
        else:
            self._prepare()
        return b"".join(parts)

    def _chunk(self, first: int, end: int) -> bytes:
        choice = self._choice
        text = characters(choice.seed, self._visible(first), self._visible(end))
        log = _shaped_logprobs(self._stream.call, choice, first, end)
        last = end == choice.ending.tokens
        return self._stream.text(choice, self._field(first), text, end, last=last, log=log)

    def _visible(self, tokens: int) -> int:
        """Return the characters sent after some tokens; a possible stop string is held back."""
        end = self._choice.ending
        if tokens == end.tokens:
            return end.characters
        sent = tokens * WORD_CHARACTERS - self._stream.call.held_characters
        return min(end.characters, max(0, sent))

    def _field(self, position: int) -> str:
        return self._stream.face.reasoning_field if position < self._thought else "content"

    def _prepare(self) -> None:
        """Build the text around the next plain tokens."""
        stream = self._stream
        call = stream.call
        if stream.continuous_usage or stream.face.chunk_tokens > 1 or call.held_characters:
            return
        if call.top_logprobs is not None:
            return
        mark = " " * WORD_CHARACTERS
        payload = stream.text(self._choice, self._field(self.made), mark, 0)
        self._pre, _, self._post = payload.rpartition(mark.encode())
        self._plain_from = self.made
        thinks = self.made < self._thought
        self._plain_to = (self._thought if thinks else self._choice.ending.tokens) - 1
