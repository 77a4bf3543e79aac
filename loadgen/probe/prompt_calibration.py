"""Calibrate prompts to planned lengths: tokens = overhead + own tokens × tokens_per_word.

Two prompts of different lengths suffice if each word is one token of the server. If words have one
to three tokens, a line through two points is off by dozens of tokens. Then the server's
``/tokenize`` selects words of equal token counts; without it, each word is sent once and ``usage``
is read. The prompts are the same in every run, so the same server gives the same calibration.
"""

import dataclasses
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Any

from ampacity.loadgen.net.http import Client
from ampacity.loadgen.net.pages import PageError, Pages
from ampacity.loadgen.probe.ask import ask
from ampacity.loadgen.probe.dialect import SHORT_TOKENS
from ampacity.loadgen.probe.results import Calibration
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.endpoint import Endpoint, EndpointError
from ampacity.loadgen.send.protocols import RequestShape, error_text, printable
from ampacity.loadgen.send.secrets import redact
from ampacity.workloads.prompts.synthetic import MIN_VOCABULARY, PromptMaker, built_in_words
from ampacity.workloads.prompts.tokenizers import WORD_TOKENIZERS, Tokenizer

LONG_TOKENS = 256
FIRST_WORD_TOKENS = 2  # by which a prompt's first word, without a space before it, may differ
STABLE_TOKENS = 0.5  # standard error of the overhead at which no more prompts are sent ...
OFFSETS_MIN, OFFSETS_MAX = 4, 10  # ... within these numbers of prompts
PARTS = 8  # of all words, sent apart and together
CENSUS_MAX_S = 20.0  # no more requests to a slow server after this
OTHER_VOCABULARY = 0.03
OTHER_TOKENIZE = (
    0.15  # by which a mean word of /tokenize and of two prompts' usage differ by chance
)
_TIMEOUT_S = 20.0

Send = Callable[[RequestShape, str, int], bytes]  # builds the request of a text


@dataclasses.dataclass(frozen=True)
class Counting:
    """The server and how to ask it; ``asked_for``: the user's ``--tokenizer``."""

    pages: Pages
    client: Client
    endpoint: Endpoint
    shape: RequestShape
    context: int | None
    tokenizer: Tokenizer
    asked_for: str
    say: Send

    def prompts(self, words: Sequence[str] | None = None) -> PromptMaker:
        """Return the maker of the calibrating prompts, the same in every run."""
        return PromptMaker(self.tokenizer, "calibration", words=words)

    async def count(self, text: str) -> tuple[int | None, RequestRecord]:
        """Return the server's token count of a prompt with its template; None: not reported."""
        record = await ask(self.client, self.shape.api, self.say(self.shape, text, 1))
        return (record.input_tokens if record.status == "ok" else None), record


async def calibrate(
    how: Counting, short: RequestRecord
) -> tuple[Calibration, RequestRecord, list[str]]:
    """Return the calibration, the last good record, and notes.

    ``short``: a good answer to a prompt of SHORT_TOKENS own tokens. Raises EndpointError for
    ``--tokenizer server`` without a /tokenize.
    """
    found, record = await _by_two_lengths(how, short)
    name, notes = how.asked_for, list[str]()
    if name == "server" or (name in WORD_TOKENIZERS and not _is_exact(found)):
        found = await _by_tokenize(how, found, notes)
    if found.measured and not _is_exact(found) and found.method != "tokenize":
        found = await _by_parts(how, found)
    if (
        name not in WORD_TOKENIZERS
        and found.measured
        and abs(found.tokens_per_word - 1) > OTHER_VOCABULARY
    ):
        notes.append(
            f"the server counts {found.tokens_per_word:.2f} tokens for each of {name}: that is not "
            "its vocabulary; prompts are made shorter or longer by this factor"
        )
    if not found.measured:
        by = "a word is taken for a token" if name in WORD_TOKENIZERS else f"{name} counts them"
        notes.append(
            "the server does not say how many tokens its prompts have, or not as can be true: "
            f"{by}, without a chat template, so their real lengths are not known"
        )
    return found, record, notes


def _is_exact(found: Calibration) -> bool:
    return found.measured and found.tokens_per_word == 1.0 and found.word_sd_tokens == 0.0


async def _by_two_lengths(how: Counting, short: RequestRecord) -> tuple[Calibration, RequestRecord]:
    """Fit a line through two prompts: exact if each own token is one of the server's."""
    if short.input_tokens is None:
        return Calibration(), short
    own = LONG_TOKENS
    if how.context is not None:  # an upper bound of tokens per word: the template is included
        own = min(own, int((how.context - 2) / max(short.input_tokens / SHORT_TOKENS, 1.0)))
    if own <= SHORT_TOKENS:
        return Calibration(), short
    counted, long = await how.count(how.prompts().text(0, own))
    if counted is None:
        return Calibration(), short
    per_word = (counted - short.input_tokens) / (own - SHORT_TOKENS)
    if per_word <= 0:
        return Calibration(), long
    exact = per_word == 1.0
    overhead = max(counted - per_word * own, 0.0)
    return Calibration(
        per_word,
        round(overhead, 2),
        measured=True,
        method="usage",
        overhead_error_tokens=0.0 if exact else None,
        word_sd_tokens=0.0 if exact else None,
    ), long


# -- /tokenize ------------------------------------------------------------------------------------


async def _by_tokenize(how: Counting, rough: Calibration, notes: list[str]) -> Calibration:
    """Calibrate by the server's /tokenize (vLLM, SGLang, llama.cpp); ``rough`` if unusable.

    That of a gateway may be another model's: then usage, which was measured, is believed, and a
    note says so. Raises EndpointError where there is none with ``--tokenizer server``.
    """
    words = built_in_words()
    text = " ".join(words)
    plain = await _tokens(how, {"prompt": text, "content": text, "add_special_tokens": False})
    if isinstance(plain, str) or not plain:
        if how.asked_for != "server":
            return rough
        raise EndpointError(
            f"--tokenizer server: {how.endpoint.root}/tokenize does not count tokens "
            f"({plain or 'no tokens'}): use the tokenizer words"
        )
    mean = len(plain) / len(words)
    if rough.measured and abs(mean / rough.tokens_per_word - 1) > OTHER_TOKENIZE:
        notes.append(
            f"/tokenize counts {mean:.2f} tokens a word, and usage about "
            f"{rough.tokens_per_word:.2f}: it is another model's, and is not used"
        )
        return rough
    counts = dict.fromkeys(words, (1, 1)) if mean == 1 else await _tokens_by_word(how)
    taken, tokens = _equal_words(counts)
    if taken:
        offsets = await _offsets(how, taken, tokens)
        if offsets is not None:
            overhead, error = offsets
            return Calibration(
                float(tokens),
                overhead,
                measured=True,
                method="tokenize",
                overhead_error_tokens=error,
                word_sd_tokens=0.0,
                words=None if len(taken) == len(words) else taken,
            )
    sd = pstdev([spaced for spaced, _ in counts.values()]) if counts else None
    return await _mean_by_tokenize(how, rough, mean, sd)


async def _mean_by_tokenize(
    how: Counting, rough: Calibration, mean: float, sd: float | None
) -> Calibration:
    """Use the mean tokens of all words, and the overhead of one prompt."""
    text = how.prompts().text(0, SHORT_TOKENS)
    plain = await _tokens(how, {"prompt": text, "content": text, "add_special_tokens": False})
    chat = await _tokens(how, {"messages": [{"role": "user", "content": text}]})
    counted, _ = await how.count(text)
    if counted is None and not isinstance(chat, str):
        counted = len(chat)
    overhead = rough.overhead_tokens
    if counted is not None and not isinstance(plain, str) and counted >= len(plain):
        overhead = counted - len(plain)
    return Calibration(
        mean,
        overhead,
        measured=True,
        method="tokenize",
        overhead_error_tokens=None,
        word_sd_tokens=sd,
    )


async def _tokens_by_word(how: Counting) -> dict[str, tuple[int, int]]:
    """Return each word's tokens after a space and at the start of a text; {} if unknown.

    One request has each form of a word on a line of its own; the token that appears once per line
    end separates them.
    """
    words = built_in_words()
    lines = [form for word in words for form in (f" {word}", word)]
    text = "\n" + "\n".join(lines) + "\n"
    tokens = await _tokens(how, {"prompt": text, "content": text, "add_special_tokens": False})
    ends = (
        [t for t, n in Counter(tokens).items() if n == len(lines) + 1]
        if isinstance(tokens, list)
        else []
    )
    if len(ends) != 1 or isinstance(tokens, str):
        return {}
    places = [i for i, token in enumerate(tokens) if token == ends[0]]
    lengths = [b - a - 1 for a, b in pairwise(places)]
    if min(lengths) < 1:
        return {}
    return dict(zip(words, zip(lengths[::2], lengths[1::2], strict=True), strict=True))


def _equal_words(counts: dict[str, tuple[int, int]]) -> tuple[tuple[str, ...], int]:
    """Return (words of equal token counts, that count); no words if there are not enough.

    Words with the same count at the start of a text are preferred.
    """
    for alike in (True, False):
        for tokens in sorted({spaced for spaced, _ in counts.values()}):
            taken = tuple(
                w
                for w, (spaced, bare) in counts.items()
                if spaced == tokens and (bare == tokens or not alike)
            )
            if len(taken) >= MIN_VOCABULARY:
                return taken, tokens
    return (), 0


async def _offsets(how: Counting, words: Sequence[str], tokens: int) -> tuple[float, float] | None:
    """Return (overhead, standard error) from prompts of two lengths; None if inconsistent."""
    long = (
        LONG_TOKENS // tokens
        if how.context is None
        else min(LONG_TOKENS, how.context // 2) // tokens
    )
    prompts, found = how.prompts(words), []
    for number in range(OFFSETS_MAX):
        own = max(long, 1) if number == 1 else SHORT_TOKENS // 2
        counted, _ = await how.count(prompts.text(number, own))
        if counted is None:
            return None
        found.append(counted - tokens * own)
        spread = pstdev(found)
        if len(found) >= OFFSETS_MIN and spread / len(found) ** 0.5 <= STABLE_TOKENS:
            break
    if min(found) < 0 or max(found) - min(found) > FIRST_WORD_TOKENS:
        return None
    return round(fmean(found), 2), round(spread / len(found) ** 0.5, 2)


async def _tokens(how: Counting, body: dict[str, Any]) -> list[Any] | str:
    """Return the tokens from /tokenize, or why there are none."""
    endpoint = how.endpoint
    headers = {**endpoint.all_headers(), "Content-Type": "application/json"}
    body = {"model": how.shape.model, **body}
    try:
        page = await how.pages.post(
            f"{endpoint.root}/tokenize", headers, json.dumps(body).encode(), _TIMEOUT_S
        )
        if page.status != 200:
            why = redact(printable(error_text(page.body), 120), endpoint.secrets)
            return f"HTTP {page.status}: {why}"
        held = json.loads(page.body)
        found = held["tokens"] if isinstance(held.get("tokens"), list) else None
    except TimeoutError:
        return f"no answer within {_TIMEOUT_S:g} s"
    except (PageError, ValueError, AttributeError, RecursionError) as error:
        return type(error).__name__
    return "the answer holds no tokens" if found is None else [json.dumps(token) for token in found]


# -- usage ----------------------------------------------------------------------------------------


async def _by_parts(how: Counting, rough: Calibration) -> Calibration:
    """Send all words in ``PARTS`` prompts, then in fewer: the sums differ by the overheads alone.

    Returns ``rough`` if an answer has no usage. A slow server gets what fits into CENSUS_MAX_S.
    """
    words = list(built_in_words())
    random.Random(0).shuffle(words)  # mixed as in prompts, the same in every run
    size, give_up_s = len(words) // PARTS, time.monotonic() + CENSUS_MAX_S
    texts = [" ".join(words[i * size : (i + 1) * size]) for i in range(PARTS)]
    parts: list[int] = []
    while len(parts) < PARTS and (len(parts) < 2 or time.monotonic() < give_up_s):
        counted, _ = await how.count(texts[len(parts)])
        if counted is None:
            return rough
        parts.append(counted)
    excess, more = 0, 0  # tokens of parts beyond the wholes, and the overheads in it
    for together in (8, 4, 2):
        if together > len(parts) or (how.context and sum(parts[:together]) > how.context):
            continue
        for first in range(0, len(parts) - together + 1, together):
            whole, _ = await how.count(" ".join(texts[first : first + together]))
            if whole is None:  # the context is shorter than known
                break
            excess += sum(parts[first : first + together]) - whole
            more += together - 1
            if time.monotonic() > give_up_s:
                break
        if more:
            break
    own = [how.tokenizer.count(text) for text in texts[: len(parts)]]
    overhead = max(excess / more, 0.0) if more else 0.0
    per_word = (sum(parts) - len(parts) * overhead) / sum(own)
    if not more or per_word <= 0:
        return rough
    rest = [c - overhead - per_word * n for c, n in zip(parts, own, strict=True)]
    sd = (sum(r * r for r in rest) / (len(parts) - 1) / size) ** 0.5
    return Calibration(
        per_word,
        round(overhead, 2),
        measured=True,
        method="usage",
        overhead_error_tokens=round(sd / more**0.5, 2),
        word_sd_tokens=round(sd, 3),
    )
