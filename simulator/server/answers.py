"""The bytes of an answer, shaped as vLLM's. No I/O."""

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
    """One server-sent event as one chunk of a chunked HTTP body."""
    return chunk(b"data: " + payload + b"\n\n")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def error_frames(message: str) -> bytes:
    """What vLLM writes into a stream when its engine dies."""
    return frame(error_body(message, "InternalServerError", None, 500)) + frame(b"[DONE]")


def usage(call: Call, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": call.prompt_tokens,
        "total_tokens": call.prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


def reasoning_tokens(call: Call, choice: Choice, face: Face) -> int:
    """Tokens of a choice that come before its answer."""
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
    """Of the tokens first to end - 1. The end-of-sequence token has its own name."""
    top = call.top_logprobs
    if top is None:
        return None
    natural = choice.ending.finish_reason == "stop" and choice.ending.stop_reason is None
    eos = choice.ending.tokens - 1 if natural else -1
    found = [
        logprobs(choice.seed, position, top, last=position == eos) for position in range(first, end)
    ]
    if call.chat:
        return {"content": [_chat_entry(t) for t in found]}
    return {
        "text_offset": [position * WORD_CHARACTERS for position in range(first, end)],
        "token_logprobs": [t.logprob for t in found],
        "tokens": [t.token for t in found],
        "top_logprobs": [dict(t.top or ((t.token, t.logprob),)) for t in found],
    }


def _chat_entry(found: TokenLogprobs) -> dict[str, Any]:
    def entry(token: str, value: float) -> dict[str, Any]:
        return {"token": token, "logprob": value, "bytes": list(token.encode())}

    return entry(found.token, found.logprob) | {
        "top_logprobs": [entry(*other) for other in found.top]
    }


def answer(call: Call, face: Face, created: int, cached_tokens: int = 0) -> bytes:
    """The body of an answer that is not streamed."""
    figures = _final_usage(call, face, cached_tokens)
    for details in (
        "prompt_tokens_details",
        "completion_tokens_details",
    ):  # are there, if only as null
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
    cut = (
        end.characters if thought == end.tokens else min(end.characters, thought * WORD_CHARACTERS)
    )
    message = {
        "role": "assistant",
        "content": None if thought == end.tokens else characters(choice.seed, cut, end.characters),
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
    """What /v1/models says, one card each: the first name is the base model, the others are its adapters."""
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
    """What the choices of one streamed request share: the head of each chunk, the roles and the end."""

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
        """One for each choice. The role chunks come with the first token, or are asked for before (`opening`)."""
        return [ChoiceFrames(self, choice) for choice in self.call.choices]

    def opening(self) -> bytes:
        """The chunks that say who speaks, one for each choice of a chat; b'' when they are out."""
        if self._opened or not self.call.chat:
            return b""
        self._opened = True
        told = {
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        absent = {"prompt_token_ids": None, "prompt_text": None}
        choices = self.call.choices
        return b"".join(
            self._event([{"index": choice.index} | told], 0, absent) for choice in choices
        )

    def tail(self) -> bytes:
        """The usage chunk and [DONE], as far as they are there."""
        done = frame(b"[DONE]") if self.face.done else b""
        if not self.include_usage:
            return done
        figures = _final_usage(self.call, self.face, self.cached())
        return self._event([], None, {"usage": figures, "system_fingerprint": FINGERPRINT}) + done

    def turn(self) -> bytes:
        """What stands between the thinking and the answer."""
        return b""

    def error(self, message: str) -> bytes:
        """What is written into the stream when the engine dies."""
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
        """One chunk of text. field: the name in a chat's delta; shown: tokens of the choice up to here."""
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
    """The frames of one choice, token by token. What surrounds a plain token is built once."""

    def __init__(self, stream: Stream, choice: Choice) -> None:
        self._stream = stream
        self._choice = choice
        self._thought = reasoning_tokens(stream.call, choice, stream.face)
        self.made = 0  # tokens that were pushed
        self._shown = 0  # of them in chunks
        self._pre = self._post = b""
        self._plain_from = self._plain_to = 0  # tokens whose chunk is _pre + word + _post

    def push(self, count: int = 1) -> bytes:
        """The frames that the next tokens bring, b'' when they are held back. The last brings the stream's end."""
        position = self.made
        if count == 1 and self._plain_from <= position < self._plain_to:
            self.made = self._shown = position + 1
            return (
                self._pre
                + WORD_BYTES[(self._choice.seed + position * _STRIDE) % _VOCABULARY]
                + self._post
            )
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
        """Characters that a reader has after so many tokens; what may begin a stop string is held back."""
        end = self._choice.ending
        if tokens == end.tokens:
            return end.characters
        return min(
            end.characters, max(0, tokens * WORD_CHARACTERS - self._stream.call.held_characters)
        )

    def _field(self, position: int) -> str:
        return self._stream.face.reasoning_field if position < self._thought else "content"

    def _prepare(self) -> None:
        """Build the surroundings of the plain tokens that come next."""
        stream = self._stream
        call = stream.call
        several = stream.face.chunk_tokens > 1
        if (
            stream.continuous_usage
            or several
            or call.top_logprobs is not None
            or call.held_characters
        ):
            return
        mark = " " * WORD_CHARACTERS
        payload = stream.text(self._choice, self._field(self.made), mark, 0)
        self._pre, _, self._post = payload.rpartition(mark.encode())
        self._plain_from = self.made
        self._plain_to = (
            self._thought if self.made < self._thought else self._choice.ending.tokens
        ) - 1
