"""What the answers of an endpoint let be known of its latencies: one diagnosis, for the probe of every run and for doctor.

It is kept in run.json as ``diagnosis`` and applied to the verdicts of the run. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from ampacity.loadgen.receive.thinking import InlineThinking
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.protocols import RequestShape

METRICS = ("ttft", "itl", "icl", "tpot", "e2e", "tokens")
OF_STREAM = METRICS[:4]
TOGETHER_S = 0.001  # an event so long before the first token came with it
HELD_BACK = 0.33  # of an answer's time: its first token is so much later than a shorter answer's
HELD_BACK_MIN_S = 0.02
COALESCED = 0.1  # share of the chunks that share a read with the one before; share of TTFT or TPOT that bunches may change
FINE_S = 0.002  # bunches so close matter to nobody
SEVERAL = 1.02  # tokens per chunk that are more than one
OF_LENGTH = ("max_", "min_tokens", "ignore_eos", "stop")  # options, by how they begin
SOURCES = {
    "usage": "usage at the end",
    "usage_per_chunk": "usage in each chunk",
    "logprobs": "logprobs",
}

Facts = dict[str, Any]
Case = tuple[Any, str, str, str, Sequence[str]]  # whether it is so, and the rest of a Finding


@dataclass(frozen=True)
class Finding:
    """One line. ``verdict``: ok, note or bad; ``spoils``: which of METRICS are not to be trusted."""

    name: str
    verdict: str
    found: str
    means: str
    spoils: tuple[str, ...]


def diagnose(
    answer: RequestRecord,
    shape: RequestShape,
    vocabulary: str | None = None,
    thinks: InlineThinking | None = None,
) -> tuple[Finding, ...]:
    """What an answer of the planned lengths shows, with the thinking in its text.

    ``vocabulary``: of the user's tokenizer, which counts what the server does not.
    """
    facts = answer_facts(answer, shape, vocabulary, thinks)
    if shape.api == "embeddings":
        return tuple(choose(stream_cases(facts)))
    return tuple(choose(stream_cases(facts) | text_cases(facts)))


def spoilt(findings: Sequence[Finding]) -> bool:
    """Whether some figure is certainly not what it seems."""
    return any(finding.verdict == "bad" and finding.spoils for finding in findings)


def warnings(findings: Sequence[Finding]) -> list[str]:
    """What is to be said before the load begins."""
    return [f"{f.name}: {f.found} → {f.means}" for f in findings if f.verdict == "bad" and f.spoils]


def as_dicts(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """The entry ``diagnosis`` of run.json."""
    return [{**asdict(finding), "spoils": list(finding.spoils)} for finding in findings]


def choose(cases: Mapping[str, Sequence[Case]]) -> list[Finding]:
    """Of each line the first case that is so."""
    first = {name: next(case for case in those if case[0]) for name, those in cases.items()}
    if "stream" in first and first["stream"][1] == "bad":
        first.pop("first event", None)  # the first is the last
    return [Finding(name, *case[1:4], tuple(case[4])) for name, case in first.items()]


def answer_facts(
    answer: RequestRecord,
    shape: RequestShape,
    vocabulary: str | None,
    thinks: InlineThinking | None,
) -> Facts:
    """The numbers that ``stream_cases`` and ``text_cases`` rest on."""
    at_us, tokens = list(answer.chunk_at_us), answer.output_tokens or 0
    reads, reasoning = sorted(set(at_us)), answer.reasoning_tokens or 0
    reasoning_sent = answer.first_answer_ns != answer.first_token_ns
    visible = tokens - (reasoning if reasoning and not reasoning_sent else 0)
    end_token = answer.finish_reason == "stop" and len(at_us) + 1 == visible
    known = answer.chunk_tokens is not None or len(at_us) == visible or end_token
    in_chunks = sum(answer.chunk_tokens) if answer.chunk_tokens is not None else len(at_us)
    return {
        "api": shape.api,
        "output_tokens_asked": answer.output_tokens_planned or 0,
        "output_tokens": tokens,
        "finish_reason": answer.finish_reason,
        "max_tokens_field": shape.dialect.max_tokens_field,
        "ignore_eos_taken": shape.dialect.ignore_eos,
        "extra_body": sorted(shape.extra),
        "chunks": len(at_us),
        "reads": len(reads),
        "read_gap_p50_s": median([b - a for a, b in pairwise(reads)] or [0]) / 1e6,
        "span_s": seconds_between(answer, "first_token_ns", "last_token_ns") or 0.0,
        "lasts_s": seconds_between(answer, "started_ns", "last_token_ns") or 0.0,
        "ttft_s": seconds_between(answer, "started_ns", "first_token_ns") or 0.0,
        "ttft_grew_s": 0.0,  # by which its first token came later than a shorter answer's; 0: nobody looked
        "first_event_s": seconds_between(answer, "started_ns", "first_event_ns"),
        "early_s": seconds_between(answer, "first_event_ns", "first_token_ns") or 0.0,
        "token_source": answer.token_source,
        "tokens_per_chunk": (in_chunks if known else tokens) / max(len(at_us), 1),
        "chunk_tokens_known": known,
        "vocabulary": vocabulary,
        "tokens_visible": visible if tokens else 0,
        "reasoning_tokens": reasoning,
        "first_answer_s": seconds_between(answer, "started_ns", "first_answer_ns"),
        "reasoning_sent": reasoning_sent,
        "thinks_inline": thinks.closing if thinks else None,
        "thinking_is_opened": bool(thinks and thinks.opened),
    }


def seconds_between(record: RequestRecord, begin: str, end: str) -> float | None:
    """From one time of a record to another; None where either did not happen."""
    a, b = getattr(record, begin), getattr(record, end)
    return None if a is None or b is None else float(b - a) / 1e9


def duration_text(value_s: float | None) -> str:
    """A duration for people: ms below 1 s; a dash where it is not known."""
    if value_s is None:
        return "–"
    return f"{value_s * 1e3:.3g} ms" if value_s < 0.9995 else f"{value_s:.3g} s"


def ended_at_once(f: Facts) -> bool:
    """Whether the end token, which has no text, was all of the answer."""
    return not f["chunks"] and f["output_tokens"] == 1 and f["finish_reason"] == "stop"


def stream_cases(f: Facts) -> dict[str, list[Case]]:
    """A longer answer's first token comes no later than a short one's, else it was held back, or waited by chance."""
    tokens, gap_s = f"{f['output_tokens']} tokens in {f['chunks']} chunks", f["read_gap_p50_s"]
    grew_s = f["ttft_grew_s"]
    coalesced = f["reads"] < (1 - COALESCED) * f["chunks"]
    share = gap_s / max(f["span_s"], 1e-9)
    changed = {
        "itl": True,
        "icl": True,
        "ttft": gap_s > COALESCED * f["ttft_s"],
        "tpot": share > COALESCED,
    }
    spoilt = [metric for metric, much in changed.items() if much]
    uncounted = f["token_source"] == "chunks"  # one piece, and nobody says of how many tokens
    in_one_piece = f["chunks"] == 1 and (
        f["output_tokens"] > 1 or (uncounted and f["output_tokens_asked"] > 1)
    )
    said = (
        "the whole answer in one piece"
        if uncounted
        else f"{f['output_tokens']} tokens in one piece"
    )
    return {
        "stream": [
            (
                f["api"] == "embeddings",
                "ok",
                "vectors are not streamed",
                "E2E is what there is",
                OF_STREAM,
            ),
            (
                ended_at_once(f),
                "note",
                "the model ended its answer at once: no text came, and whether it streams cannot be seen",
                "TTFT, ITL, TPOT: none of such an answer",
                (),
            ),
            (
                not f["chunks"],
                "bad",
                f"no text came; tokens counted all the same: {f['output_tokens']}",
                "TTFT, ITL, TPOT: none",
                OF_STREAM,
            ),
            (
                in_one_piece,
                "bad",
                f"not streamed: {said}, after {duration_text(f['lasts_s'])}",
                "TTFT is E2E; no ITL, no TPOT: judge by e2e",
                OF_STREAM,
            ),
            (
                f["chunks"] < 2,
                "note",
                "a single token: whether it streams cannot be seen",
                "ITL, TPOT: none",
                OF_STREAM[1:],
            ),
            (
                f["reads"] == 1,
                "bad",
                f"held back: {tokens} in one read, {duration_text(f['lasts_s'])} after the request",
                "something buffers the stream (a proxy, compression): TTFT is E2E, ITL and TPOT are the buffer's; judge by e2e",
                OF_STREAM,
            ),
            (
                grew_s > max(HELD_BACK_MIN_S, HELD_BACK * f["lasts_s"]),
                "note",
                f"may be held back: {tokens} within {duration_text(f['span_s'])}, the first {duration_text(grew_s)} later than that of a short answer",
                "a buffer whose TTFT grows with the answer (a proxy, compression), or this request waited by chance: repeat doctor; if it stays, judge by e2e",
                OF_STREAM,
            ),
            (
                coalesced and gap_s < FINE_S,
                "ok",
                f"{tokens} came in {f['reads']} reads, {duration_text(gap_s)} apart",
                f"TTFT, ITL, ICL: right to within {duration_text(gap_s)}",
                (),
            ),
            (
                coalesced,
                "note",
                f"coalesced: {tokens} came in {f['reads']} reads, {duration_text(gap_s)} apart",
                f"TTFT: up to {duration_text(gap_s)} too long; ITL, ICL: 0 within a bunch, too long between two; TPOT: right to within {share:.0%}",
                spoilt,
            ),
            (
                True,
                "ok",
                f"{tokens}, {duration_text(f['span_s'])} from the first to the last",
                "TTFT, ICL: of tokens as they are made",
                (),
            ),
        ]
    }


def stream_verdict(f: Facts) -> str:
    """Of the stream alone."""
    return choose(stream_cases(f))[0].verdict


def text_cases(f: Facts) -> dict[str, list[Case]]:
    """What is in the answer's events."""
    vocabulary, ratio = f["vocabulary"], f"{f['tokens_per_chunk']:.3g} tokens in a chunk"
    source = SOURCES.get(f["token_source"], "unknown")
    by_chunks = f["token_source"] == "chunks"
    asked, got, chunks = f["output_tokens_asked"], f["output_tokens"], f["chunks"]
    taken, counted, answer_s = f["ignore_eos_taken"], f["reasoning_tokens"], f["first_answer_s"]
    length = f"{asked} tokens asked for, {got} answered, finish reason {f['finish_reason']}"
    ends = "answers end where the model ends them: compare only runs with answers as long"
    as_asked = chunks == asked != got and not f["chunk_tokens_known"]
    doubts = {
        f"{got} tokens counted, and no text came": not chunks and not ended_at_once(f),
        f"{counted} reasoning tokens of {got} in all": counted > got,
        f"{f['tokens_visible']} tokens for {chunks} chunks with text": f["tokens_visible"] < chunks,
        f"{got} tokens counted, {asked} asked for, and as many chunks came": as_asked,
    }
    doubt = next((why for why, so in doubts.items() if so and not by_chunks), "")
    handles = "the server's count can be believed" if doubt else "chunks tell"
    answer_after = (
        f"the answer after {duration_text(answer_s)}"
        if answer_s
        else "no answer within these tokens"
    )
    own = [name for name in f["extra_body"] if name.startswith(OF_LENGTH)]
    return {
        "first event": [
            (
                f["early_s"] < TOGETHER_S,
                "ok",
                f"with the first text, {duration_text(f['ttft_s'])} after the request",
                "TTFT: the same by any definition",
                (),
            ),
            (
                True,
                "ok",
                f"without text, {duration_text(f['first_event_s'])} after the request; the first text {duration_text(f['early_s'])} later",
                f"TTFT: trusted, it is the first text's ({duration_text(f['ttft_s'])}); a tool that takes any event for a token reports {duration_text(f['early_s'])} less",
                (),
            ),
        ],
        "token counts": [
            (
                doubt,
                "bad",
                f"{source}: {doubt}",
                "the server's count or its stream is wrong: ITL, TPOT, tokens/s say nothing",
                ("itl", "tpot", "tokens"),
            ),
            (
                by_chunks and vocabulary,
                "note",
                f"no usage: --tokenizer {vocabulary} counts the text",
                "ITL, TPOT, tokens/s: right if that is the model's vocabulary",
                (),
            ),
            (
                by_chunks,
                "bad",
                "no usage: chunks are taken for tokens",
                "ITL, TPOT, tokens/s: of chunks, not of tokens; name the model's vocabulary with --tokenizer",
                ("itl", "tpot", "tokens"),
            ),
            (
                ended_at_once(f),
                "note",
                f"{source}; one token, which ended the answer",
                "how many tokens a chunk holds cannot be seen",
                (),
            ),
            (
                not f["chunk_tokens_known"],
                "note",
                f"{source}; {ratio} on average, how many in which is not said",
                "ITL: not given, chunks are no tokens; ICL, TPOT: trusted; --tokenizer with the model's vocabulary may tell",
                ("itl",),
            ),
            (
                f["tokens_per_chunk"] > SEVERAL,
                "ok",
                f"{source}; {ratio} on average",
                "ITL: a chunk's gap is shared out among its tokens; ICL: what a reader sees",
                (),
            ),
            (
                True,
                "ok",
                f"{source}; one token in a chunk",
                "ITL: of tokens; tokens/s: the server's own count",
                (),
            ),
        ],
        "output length": [
            (
                own and got != asked,
                "note",
                f"{length}; --extra-body has {', '.join(own)}",
                "your own option decides, not the plan",
                ("tokens",) if got > asked else (),
            ),
            (
                doubt or (got != asked and by_chunks),
                "note",
                f"{length}, as far as {handles}",
                "whether planned output lengths are kept cannot be said",
                (),
            ),
            (
                got > asked,
                "bad",
                f"{length}: {f['max_tokens_field']} is not obeyed",
                "the load is another one than planned",
                ("tokens",),
            ),
            (
                got < asked and f["finish_reason"] == "length",
                "note",
                f"{length}: the server has a limit of its own",
                "answers are shorter than planned",
                (),
            ),
            (
                got < asked,
                "note",
                f"{length}: ignore_eos is {'not obeyed' if taken else 'refused'}",
                ends,
                (),
            ),
            (not taken, "note", f"{length}; ignore_eos is refused", ends, ()),
            (True, "ok", length, "planned output lengths are kept", ()),
        ],
        "reasoning": [
            (
                counted > got,
                "note",
                f"{counted} tokens are counted, of {got} in all",
                "cannot be: see token counts",
                (),
            ),
            (
                f["thinks_inline"],
                "note",
                f"inline: it stands in the text and ends with {f['thinks_inline']}{'' if f['thinking_is_opened'] else ', with no tag at its beginning'}; {answer_after}",
                f"TTFT: the first token of the thinking; first_answer: from behind {f['thinks_inline']} on, none in answers that end before",
                (),
            ),
            (
                not counted and not f["reasoning_sent"],
                "ok",
                "none",
                "TTFT: the answer's first token" if chunks else "TTFT: none",
                (),
            ),
            (
                not f["reasoning_sent"],
                "note",
                f"{counted} tokens are counted and not sent",
                "TTFT: with the thinking; ITL, TPOT: of the visible tokens",
                (),
            ),
            (
                True,
                "note",
                f"comes first; {answer_after}",
                "TTFT: the first reasoning token; for the answer's there is --slo first_answer_p99=T",
                (),
            ),
        ],
    }
