"""Diagnose from an answer which latencies of an endpoint can be measured. Pure.

The probe of every run and ``doctor`` use it. run.json keeps it as ``diagnosis``; it is applied to
the verdicts of the run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from ampacity.loadgen.probe.diagnosis_rules import Case, Facts, stream_cases, text_cases
from ampacity.loadgen.receive.thinking import InlineThinking
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.protocols import RequestShape


@dataclass(frozen=True)
class Finding:
    """One line. ``verdict``: ok, note or bad; ``spoils``: the METRICS that cannot be trusted."""

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
    """Diagnose an answer of the planned lengths.

    ``vocabulary``: the user's tokenizer, which counts what the server does not; ``thinks``: the
    thinking in the text.
    """
    facts = answer_facts(answer, shape, vocabulary, thinks)
    if shape.api == "embeddings":
        return tuple(choose(stream_cases(facts)))
    return tuple(choose(stream_cases(facts) | text_cases(facts)))


def spoilt(findings: Sequence[Finding]) -> bool:
    """Return whether some metric is certainly wrong."""
    return any(finding.verdict == "bad" and finding.spoils for finding in findings)


def warnings(findings: Sequence[Finding]) -> list[str]:
    """Return the warnings to print before the load begins."""
    return [f"{f.name}: {f.found} → {f.means}" for f in findings if f.verdict == "bad" and f.spoils]


def as_dicts(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return the entry ``diagnosis`` of run.json."""
    return [{**asdict(finding), "spoils": list(finding.spoils)} for finding in findings]


def choose(cases: Mapping[str, Sequence[Case]]) -> list[Finding]:
    """Return for each check the first case that holds."""
    first = {name: next(case for case in those if case[0]) for name, those in cases.items()}
    if "stream" in first and first["stream"][1] == "bad":
        first.pop("first event", None)  # it is the last one too
    return [Finding(name, *case[1:4], tuple(case[4])) for name, case in first.items()]


def answer_facts(
    answer: RequestRecord,
    shape: RequestShape,
    vocabulary: str | None,
    thinks: InlineThinking | None,
) -> Facts:
    """Return the facts that the diagnosis rules take."""
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
        "ttft_grew_s": 0.0,  # excess over a shorter answer's TTFT; 0: not measured
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
    """Return the time between two events of a record; None if either did not happen."""
    a, b = getattr(record, begin), getattr(record, end)
    return None if a is None or b is None else float(b - a) / 1e9


def stream_verdict(f: Facts) -> str:
    """Return the verdict on the stream alone."""
    return choose(stream_cases(f))[0].verdict
