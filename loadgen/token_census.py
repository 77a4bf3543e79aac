"""How a server counts our words, exactly on average: each of them is asked for once.

Words drawn at random would leave an error of some percent where a vocabulary cuts them into one to three tokens.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from typing import Any

from loadgen.endpoint import Endpoint, EndpointError, redact
from loadgen.http import Client
from loadgen.pages import PageError, Pages
from loadgen.probe import Calibration, ask
from loadgen.protocols import RequestShape, error_text, printable
from workloads.prompts import built_in_words

_TIMEOUT_S = 20.0
_SAME_VOCABULARY = 0.03
_WORST_TOKENS_PER_WORD = 4.0
SLOWEST_S = 0.5  # a server that needs longer for the probe's 32 words is not asked for 2,048

Send = Callable[[RequestShape, str, int], bytes]  # the request that says a text


def shuffled_words() -> list[str]:
    """Every word of our prompts once, in a random order, so that no cache of an earlier run holds them."""
    words = list(built_in_words())
    random.shuffle(words)
    return words


def by_vocabulary(rough: Calibration, tokenizer: str) -> tuple[Calibration, list[str]]:
    """The calibration of a vocabulary, whose own count is exact unless the server counts otherwise: then it is said."""
    if not rough.measured or abs(rough.tokens_per_word - 1) <= _SAME_VOCABULARY:
        return dataclasses.replace(rough, tokens_per_word=1.0), []
    return rough, [
        f"the server counts {rough.tokens_per_word:.2f} tokens for each of {tokenizer}: that is not its vocabulary; "
        "prompts are made shorter or longer by this factor"
    ]


async def census_by_usage(
    client: Client, shape: RequestShape, rough: Calibration, context: int | None, send: Send
) -> Calibration:
    """Three prompts: both halves of the words, and all of them. The overhead is that by which the halves exceed the whole.

    ``rough`` is given back where the context is too short for it or an answer has no usage.
    """
    words = shuffled_words()
    if (
        context is not None
        and context < len(words) * min(rough.tokens_per_word * 1.3, _WORST_TOKENS_PER_WORD) + 64
    ):
        return rough
    middle = len(words) // 2
    counts = []
    for part in (words[:middle], words[middle:], words):
        record = await ask(client, shape.api, send(shape, " ".join(part), 1))
        if record.status != "ok" or record.input_tokens is None:
            return rough
        counts.append(record.input_tokens)
    overhead = max(counts[0] + counts[1] - counts[2], 0)
    per_word = (counts[2] - overhead) / len(words)
    return (
        dataclasses.replace(rough, tokens_per_word=per_word, overhead_tokens=overhead)
        if per_word > 0
        else rough
    )


async def census_by_tokenize(pages: Pages, endpoint: Endpoint, model: str, rough: Calibration) -> Calibration:
    """As the server's own /tokenize counts (vLLM, SGLang, llama.cpp). Raises EndpointError where there is none.

    The overhead is that of a chat prompt where it counts chats, else the one of ``rough``.
    """
    text = " ".join(shuffled_words())
    plain = await _count(
        pages, endpoint, {"model": model, "prompt": text, "content": text, "add_special_tokens": False}
    )
    if isinstance(plain, str) or plain <= 0:
        raise EndpointError(
            f"--tokenizer server: {endpoint.root}/tokenize does not count tokens ({plain}): use the tokenizer words"
        )
    chat = await _count(pages, endpoint, {"model": model, "messages": [{"role": "user", "content": text}]})
    overhead = chat - plain if isinstance(chat, int) and chat > plain else rough.overhead_tokens
    return Calibration(plain / len(built_in_words()), overhead, measured=True)


async def _count(pages: Pages, endpoint: Endpoint, body: dict[str, Any]) -> int | str:
    """Tokens, or why there is no number."""
    headers = {**endpoint.all_headers(), "Content-Type": "application/json"}
    try:
        page = await pages.post(f"{endpoint.root}/tokenize", headers, json.dumps(body).encode(), _TIMEOUT_S)
        if page.status != 200:
            return f"HTTP {page.status}: {redact(printable(error_text(page.body), 120), endpoint.secrets)}"
        held = json.loads(page.body)
        found = held.get("count", len(held["tokens"]) if isinstance(held.get("tokens"), list) else None)
    except TimeoutError:
        return f"no answer within {_TIMEOUT_S:g} s"
    except (PageError, ValueError, AttributeError, RecursionError) as error:
        return type(error).__name__
    return found if isinstance(found, int) and not isinstance(found, bool) else "the answer holds no count"
