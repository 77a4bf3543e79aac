"""The bytes of an answer, shaped as vLLM's. No I/O.

Answers are words of a fixed vocabulary, chosen by the request's seed; they run to their token limit, there
is no natural stop.
"""

import json
from typing import Any

import msgspec

from simulator.protocol import Call

FINGERPRINT = "ampacity-simulator"
# All words have the same length, so that the framing around a token can be prepared.
WORDS = tuple(f" {a}{b}{c}{d}" for a in "bdfgklmnprstvz" for b in "aeiou" for c in "lmnr" for d in "aeio")
_WORD_BYTES = tuple(word.encode() for word in WORDS)
_STRIDE = 389  # has no divisor in common with the size of the vocabulary: every word is used


def text(call: Call) -> str:
    """All tokens of an answer."""
    return "".join(WORDS[(call.text_seed + n * _STRIDE) % len(WORDS)] for n in range(call.output_tokens))


def usage(call: Call, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": call.prompt_tokens,
        "total_tokens": call.prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


def answer(call: Call, model: str, created: int) -> bytes:
    """The body of an answer that is not streamed."""
    tail = {"finish_reason": "length", "stop_reason": None, "token_ids": None}
    choice: dict[str, Any]
    if call.chat:
        message = {"role": "assistant", "content": text(call), "refusal": None, "reasoning": None}
        choice = {"index": 0, "message": message, "logprobs": None, **tail}
    else:
        choice = {"index": 0, "text": text(call), "logprobs": None, **tail}
    return msgspec.json.encode(
        {
            "id": call.request_id,
            "object": "chat.completion" if call.chat else "text_completion",
            "created": created,
            "model": model,
            "choices": [choice],
            "system_fingerprint": FINGERPRINT,
            "usage": usage(call, call.output_tokens)
            | {"prompt_tokens_details": None, "completion_tokens_details": None},
        }
    )


def _frame(payload: bytes) -> bytes:
    """One server-sent event as one chunk of a chunked HTTP body."""
    event = b"data: " + payload + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


class Frames:
    """The bytes of one streamed answer, token by token; what surrounds a token is built once."""

    __slots__ = ("_call", "_head", "_post", "_pre", "sent")

    def __init__(self, call: Call, model: str, created: int) -> None:
        self._call = call
        self.sent = 0
        kind = "chat.completion.chunk" if call.chat else "text_completion"
        self._head = (
            f'{{"id":"{call.request_id}","object":"{kind}","created":{created},"model":{json.dumps(model)},"choices":['
        ).encode()
        frame = _frame(self._payload(b"     ", last=False))
        self._pre, _, self._post = frame.rpartition(b"     ")

    def next(self) -> bytes:
        """The frames that the next token brings: role and usage chunks and [DONE] are in the same piece."""
        call = self._call
        position = self.sent
        self.sent = position + 1
        word = _WORD_BYTES[(call.text_seed + position * _STRIDE) % len(_WORD_BYTES)]
        last = position + 1 == call.output_tokens
        if not (last or position == 0 or call.continuous_usage):
            return self._pre + word + self._post
        parts = []
        if position == 0 and call.chat:
            parts.append(_frame(self._role()))
        parts.append(_frame(self._payload(word, last=last)))
        if last:
            if call.include_usage:
                figures = msgspec.json.encode(usage(call, call.output_tokens))
                parts.append(_frame(self._head + b'],"usage":' + figures + self._fingerprint() + b"}"))
            parts.append(_frame(b"[DONE]"))
        return b"".join(parts)

    def _role(self) -> bytes:
        delta = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return self._head + delta + self._running_usage(0) + b',"prompt_token_ids":null,"prompt_text":null}'

    def _payload(self, word: bytes, *, last: bool) -> bytes:
        reason = b'"finish_reason":"length","stop_reason":null' if last else b'"finish_reason":null'
        if self._call.chat:
            body = (
                b'{"index":0,"delta":{"content":"'
                + word
                + b'"},"logprobs":null,'
                + reason
                + b',"token_ids":null}]'
            )
        else:
            reason = reason if last else reason + b',"stop_reason":null'
            body = b'{"index":0,"text":"' + word + b'","logprobs":null,' + reason
            body += b',"prompt_token_ids":null,"token_ids":null}]'
        fingerprint = self._fingerprint() if last and not self._call.include_usage else b""
        return self._head + body + self._running_usage(self.sent) + fingerprint + b"}"

    def _fingerprint(self) -> bytes:
        return b',"system_fingerprint":"' + FINGERPRINT.encode() + b'"'

    def _running_usage(self, completion_tokens: int) -> bytes:
        if not self._call.continuous_usage:
            return b""
        figures = usage(self._call, completion_tokens) | {"completion_tokens_details": None}
        return b',"usage":' + msgspec.json.encode(figures)
