"""Rules of the diagnosis: what an answer's facts mean for the metrics. In each list the first
case that holds applies."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from ampacity.loadgen.rundir.records import came_together

METRICS = ("ttft", "itl", "icl", "tpot", "e2e", "tokens")
OF_STREAM = METRICS[:4]
TOGETHER_S = 0.001  # an event this long before the first token came with it
HELD_BACK = 0.33  # share of an answer's time by which its TTFT exceeds a shorter answer's
HELD_BACK_MIN_S = 0.02
COALESCED = 0.1  # share of coalesced chunks, or of TTFT or TPOT that coalescing may change
FINE_S = 0.002  # reads this close together do not matter
SEVERAL = 1.02  # tokens per chunk that are more than one
OF_LENGTH = ("max_", "min_tokens", "ignore_eos", "stop")  # prefixes of options that set lengths
SOURCES = {
    "usage": "usage at the end",
    "usage_per_chunk": "usage in each chunk",
    "logprobs": "logprobs",
}

Facts = dict[str, Any]
Case = tuple[Any, str, str, str, Sequence[str]]  # whether it holds, and the rest of a Finding


def _case(verdict: str, holds: Any, found: str, means: str, spoils: Sequence[str] = ()) -> Case:
    return holds, verdict, found, means, spoils


_ok, _note, _bad = (partial(_case, verdict) for verdict in ("ok", "note", "bad"))


def duration_text(value_s: float | None) -> str:
    """Format a duration: ms below 1 s; a dash for None."""
    if value_s is None:
        return "–"
    return f"{value_s * 1e3:.3g} ms" if value_s < 0.9995 else f"{value_s:.3g} s"


def ended_at_once(f: Facts) -> bool:
    """Return whether the end token, which has no text, was the whole answer."""
    return not f["chunks"] and f["output_tokens"] == 1 and f["finish_reason"] == "stop"


def stream_cases(f: Facts) -> dict[str, list[Case]]:
    """Return the cases of how the answer was streamed."""
    return {"stream": [*_unstreamed_cases(f), *_delayed_cases(f)]}


def text_cases(f: Facts) -> dict[str, list[Case]]:
    """Return the cases of what the events of the answer contain."""
    doubt = _doubt_about_count(f)
    return {
        "first event": _first_event_cases(f),
        "token counts": _token_count_cases(f, doubt),
        "output length": _length_cases(f, doubt),
        "reasoning": _reasoning_cases(f),
    }


def _unstreamed_cases(f: Facts) -> list[Case]:
    got, chunks, lasts = f["output_tokens"], f["chunks"], duration_text(f["lasts_s"])
    uncounted = f["token_source"] == "chunks"  # one chunk of an unknown number of tokens
    several = got > 1 or (uncounted and f["output_tokens_asked"] > 1)
    what = "the whole answer" if uncounted else f"{got} tokens"
    within = "in one read" if f["reads"] == 1 else f"within {duration_text(f['span_s'])}"
    return [
        _ok(
            f["api"] == "embeddings",
            "vectors are not streamed",
            "only E2E can be measured",
            OF_STREAM,
        ),
        _note(
            ended_at_once(f),
            "the model ended its answer at once, without text: streaming cannot be checked",
            "TTFT, ITL, TPOT: none for such an answer",
        ),
        _bad(
            not chunks,
            f"no text came; tokens counted all the same: {got}",
            "TTFT, ITL, TPOT: none",
            OF_STREAM,
        ),
        _bad(
            chunks == 1 and several,
            f"not streamed: {what} in one piece, after {lasts}",
            "TTFT is E2E; no ITL, no TPOT: judge by e2e",
            OF_STREAM,
        ),
        _note(
            chunks < 2,
            "a single token: streaming cannot be checked",
            "ITL, TPOT: none",
            OF_STREAM[1:],
        ),
        _bad(
            f["reads"] == 1
            or (
                f["lasts_s"] > FINE_S
                and came_together(f["span_s"], f["lasts_s"], max(got, chunks, 2))
            ),
            f"held back: {got} tokens in {chunks} chunks {within}, {lasts} after the request",
            "something buffers the stream (a proxy, compression): TTFT is E2E, ITL and TPOT are "
            "the buffer's; judge by e2e",
            OF_STREAM,
        ),
    ]


def _delayed_cases(f: Facts) -> list[Case]:
    """A first token that comes later in a longer answer was held back, or queued by chance."""
    tokens, gap_s = f"{f['output_tokens']} tokens in {f['chunks']} chunks", f["read_gap_p50_s"]
    gap, grew, span = (duration_text(s) for s in (gap_s, f["ttft_grew_s"], f["span_s"]))
    in_reads = f"{tokens} came in {f['reads']} reads, {gap} apart"
    coalesced = f["reads"] < (1 - COALESCED) * f["chunks"]
    share = gap_s / max(f["span_s"], 1e-9)
    spoilt = ["itl", "icl"]
    spoilt += ["ttft"] if gap_s > COALESCED * f["ttft_s"] else []
    spoilt += ["tpot"] if share > COALESCED else []
    return [
        _note(
            f["ttft_grew_s"] > max(HELD_BACK_MIN_S, HELD_BACK * f["lasts_s"]),
            f"may be held back: {tokens} within {span}, the first {grew} later than that of a "
            "short answer",
            "a buffer whose TTFT grows with the answer (a proxy, compression), or this request "
            "waited by chance: repeat doctor; if it stays, judge by e2e",
            OF_STREAM,
        ),
        _ok(coalesced and gap_s < FINE_S, in_reads, f"TTFT, ITL, ICL: right to within {gap}"),
        _note(
            coalesced,
            f"coalesced: {in_reads}",
            f"TTFT: up to {gap} too long; ITL, ICL: 0 within a read, too long between two; "
            f"TPOT: right to within {share:.0%}",
            spoilt,
        ),
        _ok(
            True,
            f"{tokens}, {span} from the first to the last",
            "TTFT, ICL: of tokens as they are made",
        ),
    ]


def _doubt_about_count(f: Facts) -> str:
    """Return why the server's token count cannot be right; empty if there is no doubt."""
    asked, got, chunks = f["output_tokens_asked"], f["output_tokens"], f["chunks"]
    counted, visible = f["reasoning_tokens"], f["tokens_visible"]
    as_asked = chunks == asked != got and not f["chunk_tokens_known"]
    doubts = {
        f"{got} tokens counted, and no text came": not chunks and not ended_at_once(f),
        f"{counted} reasoning tokens of {got} in all": counted > got,
        f"{visible} tokens for {chunks} chunks with text": visible < chunks,
        f"{got} tokens counted, {asked} asked for, and as many chunks came": as_asked,
    }
    by_chunks = f["token_source"] == "chunks"
    return next((why for why, holds in doubts.items() if holds and not by_chunks), "")


def _first_event_cases(f: Facts) -> list[Case]:
    ttft, first, early = (duration_text(f[name]) for name in ("ttft_s", "first_event_s", "early_s"))
    return [
        _ok(
            f["early_s"] < TOGETHER_S,
            f"with the first text, {ttft} after the request",
            "TTFT: the same by any definition",
        ),
        _ok(
            True,
            f"without text, {first} after the request; the first text {early} later",
            f"TTFT: trusted, it is the first text's ({ttft}); a tool that takes any event for a "
            f"token reports {early} less",
        ),
    ]


def _token_count_cases(f: Facts, doubt: str) -> list[Case]:
    vocabulary, ratio = f["vocabulary"], f"{f['tokens_per_chunk']:.3g} tokens in a chunk"
    source, by_chunks = SOURCES.get(f["token_source"], "unknown"), f["token_source"] == "chunks"
    return [
        _bad(
            doubt,
            f"{source}: {doubt}",
            "the server's count or its stream is wrong: ITL, TPOT, tokens/s are meaningless",
            ("itl", "tpot", "tokens"),
        ),
        _note(
            by_chunks and vocabulary,
            f"no usable usage: --tokenizer {vocabulary} counts the text",
            "ITL, TPOT, tokens/s: right if that is the model's vocabulary",
        ),
        _bad(
            by_chunks,
            "no usable usage: chunks are taken for tokens",
            "ITL, TPOT, tokens/s: of chunks, not of tokens; name the model's vocabulary with "
            "--tokenizer",
            ("itl", "tpot", "tokens"),
        ),
        _note(
            ended_at_once(f),
            f"{source}; one token, which ended the answer",
            "tokens per chunk: unknown",
        ),
        _note(
            not f["chunk_tokens_known"],
            f"{source}; {ratio} on average, the number in each is not reported",
            "ITL: not given, chunks are no tokens; ICL, TPOT: trusted; --tokenizer with the "
            "model's vocabulary may help",
            ("itl",),
        ),
        _ok(
            f["tokens_per_chunk"] > SEVERAL,
            f"{source}; {ratio} on average",
            "ITL: a chunk's gap is divided among its tokens; ICL: what a reader sees",
        ),
        _ok(
            True,
            f"{source}; one token in a chunk",
            "ITL: of tokens; tokens/s: the server's own count",
        ),
    ]


def _length_cases(f: Facts, doubt: str) -> list[Case]:
    asked, got, accepted = f["output_tokens_asked"], f["output_tokens"], f["ignore_eos_taken"]
    length = f"{asked} tokens asked for, {got} answered, finish reason {f['finish_reason']}"
    ends = "answers end where the model ends them: compare only runs with answers as long"
    trust = "the server's count can be believed" if doubt else "chunks tell"
    own = [name for name in f["extra_body"] if name.startswith(OF_LENGTH)]
    return [
        _note(
            own and got != asked,
            f"{length}; --extra-body has {', '.join(own)}",
            "your own option decides, not the plan",
            ("tokens",) if got > asked else (),
        ),
        _note(
            doubt or (got != asked and f["token_source"] == "chunks"),
            f"{length}, as far as {trust}",
            "cannot check whether planned output lengths are kept",
        ),
        _bad(
            asked and got >= 2 * asked and not got % asked and f["finish_reason"] == "length",
            f"{length}: {got // max(asked, 1)} choices may have come as one",
            "gaps between the tokens of one choice are not known, the load differs from the plan",
            ("itl", "icl", "tpot", "tokens"),
        ),
        _bad(
            got > asked,
            f"{length}: {f['max_tokens_field']} is not obeyed, or several choices come as one",
            "the load differs from the plan",
            ("tokens",),
        ),
        _note(
            got < asked and f["finish_reason"] == "length",
            f"{length}: the server has a limit of its own",
            "answers are shorter than planned",
        ),
        _note(
            got < asked, f"{length}: ignore_eos is {'not obeyed' if accepted else 'refused'}", ends
        ),
        _note(not accepted, f"{length}; ignore_eos is refused", ends),
        _ok(True, length, "planned output lengths are kept"),
    ]


def _reasoning_cases(f: Facts) -> list[Case]:
    counted, answer_s, tag = f["reasoning_tokens"], f["first_answer_s"], f["thinks_inline"]
    opened = "" if f["thinking_is_opened"] else ", with no tag at its beginning"
    answer = "no answer within these tokens"
    if answer_s:
        answer = f"the answer after {duration_text(answer_s)}"
    return [
        _note(
            counted > f["output_tokens"],
            f"{counted} tokens are counted, of {f['output_tokens']} in all",
            "impossible: see token counts",
        ),
        _note(
            tag,
            f"inline: it is in the text and ends with {tag}{opened}; {answer}",
            f"TTFT: the first token of the thinking; first_answer: after {tag}, none in answers "
            "that end before",
        ),
        _ok(
            not counted and not f["reasoning_sent"],
            "none",
            "TTFT: the answer's first token" if f["chunks"] else "TTFT: none",
        ),
        _note(
            not f["reasoning_sent"],
            f"{counted} tokens are counted and not sent",
            "TTFT: with the thinking; ITL, TPOT: of the visible tokens",
        ),
        _note(
            True,
            f"comes first; {answer}",
            "TTFT: the first reasoning token; for the answer's there is --slo first_answer_p99=T",
        ),
    ]
