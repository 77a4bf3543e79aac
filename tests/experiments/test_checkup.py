"""``ampacity doctor``: the judgement of what was seen, by hand."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import pytest

from ampacity.config import make_settings
from ampacity.experiments.checkup import checkup, trusted
from ampacity.experiments.doctor import DoctorResult, _Answers, _busy_with
from ampacity.loadgen.probe.diagnosis import Finding
from ampacity.loadgen.probe.diagnosis_rules import METRICS
from ampacity.loadgen.probe.network import RoundTrip
from ampacity.loadgen.probe.results import Calibration, ProbeResult, Served
from ampacity.loadgen.rundir.records import CACHE, RequestRecord
from ampacity.loadgen.send.protocols import RequestShape


def record(
    ttft_s: float = 0.1,
    chunk_gaps_s: Sequence[float] = (0.01,) * 31,
    *,
    asked: int = 32,
    tokens: int = 32,
    **more: Any,
) -> RequestRecord:
    """A request for 32 tokens, answered with a chunk for each, 10 ms apart."""
    at_us = [round(1e6 * (ttft_s + sum(chunk_gaps_s[:k]))) for k in range(len(chunk_gaps_s) + 1)]
    begun = dict.fromkeys(("dispatched_ns", "connected_ns", "started_ns"), 0)
    first = ("first_event_ns", "first_token_ns", "first_answer_ns")
    made = RequestRecord(
        *(0, 0, 0, "ok"),
        **begun,
        **dict.fromkeys(first, at_us[0] * 1000),
        last_token_ns=at_us[-1] * 1000,
        http_status=200,
        finish_reason="length",
        input_tokens_planned=100,
        input_tokens=100,
        output_tokens_planned=asked,
        output_tokens=tokens,
        token_source="usage",
        chunk_at_us=at_us,
    )
    return replace(made, **more)


def small(ttft_s: float = 0.1) -> RequestRecord:
    return record(ttft_s, [0.01] * 3, asked=4, tokens=4)


def seen(answer: RequestRecord, short_ttft_s: float = 0.1) -> DoctorResult:
    short = small(short_ttft_s)
    network = RoundTrip(0.0001, 0.001)
    shape, scale = RequestShape("chat", "m"), Calibration(1.0, 0, True)
    probe = ProbeResult(Served(("m",)), shape, scale, short, network=network)
    settings = make_settings({"url": "http://127.0.0.1:9/v1"})
    asked, gauges = (24, 0, 24, True, False, None), ("running",)
    rest = (*asked, (2e-5,), gauges, 20_000)
    return DoctorResult(settings, probe, answer, short, short, (), *rest, compiled=True)


@pytest.mark.parametrize(
    ("bodies", "verdict"), [(8, "bad"), (1, "bad"), (23, "bad"), (0, "ok"), (24, "ok")]
)
def test_answers_that_come_as_one_body_are_counted(bodies: int, verdict: str) -> None:
    """All answers that doctor has are looked at; the long one was streamed, or the API has none."""
    checks, _ = checkup(replace(seen(small()), bodies=bodies))
    (stream,) = [check for check in checks if check.name == "stream"]
    said = f"{bodies} of 24 answers came as one body, not streamed"
    assert (stream.verdict, said in stream.found) == (verdict, verdict == "bad")
    assert stream.spoils == (("ttft", "itl", "icl", "tpot") if verdict == "bad" else ())


@pytest.mark.parametrize(
    ("names", "verdict", "text", "spoils"),
    [
        (("m", "m", "m"), "ok", "m is served", ()),
        ((None, None, None), "ok", "m is served", ()),  # Responses without a name
        (("tiny", "tiny", "tiny"), "note", "m was asked for, tiny answers by its own", ()),
        (("m", "m", "m, then tiny"), "note", "m was asked for, m, then tiny answers", ()),
        (("m", CACHE, CACHE), "bad", "2 of 3 answers come from a cache", METRICS),
    ],
)
def test_who_answers_by_the_answers_own_account(
    names: tuple[str | None, ...], verdict: str, text: str, spoils: tuple[str, ...]
) -> None:
    given = seen(replace(record(), answered_by=names[2]))
    short, again = (replace(small(), answered_by=name) for name in names[:2])
    check = found("model", replace(given, short=short, again=again))
    assert (check.verdict, check.spoils) == (verdict, spoils)
    assert check.found.startswith(text)


def found(name: str, given: DoctorResult) -> Finding:
    return next(check for check in checkup(given)[0] if check.name == name)


def verdict(answer: RequestRecord, name: str, short_ttft_s: float = 0.1) -> tuple[str, list[str]]:
    given = seen(answer, short_ttft_s)
    fine = trusted(checkup(given)[0])
    return found(name, given).verdict, [metric for metric in fine if not fine[metric]]


LATENCIES = ["ttft", "itl", "icl", "tpot"]
TOKENS = ["itl", "tpot", "tokens"]
EVERY_10_MS = [0.01] * 31
FOUR_BUNCHES = ([0.0] * 7 + [0.08]) * 3 + [0.0] * 7


@pytest.mark.parametrize(
    ("ttft_s", "gaps_s", "short_ttft_s", "expected"),
    [
        (0.1, EVERY_10_MS, 0.1, ("ok", [])),
        # the first token comes 0.27 s later than the short answer's, of 0.4 s: a buffer, or one
        # wait in a queue
        (0.37, [0.001] * 31, 0.1, ("note", LATENCIES)),
        # held for its 32 tokens of 10 ms and replayed over as long: 0.28 s later than that of 4, of
        # 0.69 s
        (0.38, EVERY_10_MS, 0.1, ("note", LATENCIES)),
        # 17 ms of 37.5 are more than a third, and may be noise
        (0.022, [0.0005] * 31, 0.005, ("ok", [])),
        (0.2, EVERY_10_MS, 0.1, ("ok", [])),  # 0.1 s of 0.51 s are less than a third
        (0.4, [0.0] * 31, 0.1, ("bad", LATENCIES)),
        # a prompt that takes 20 s with an answer of 0.16 s is none that was held back
        (20.0, [0.005] * 31, 20.0, ("ok", [])),
        # 80 ms between bunches are much of a TTFT of 0.1 s and nothing of one of 20 s; a third of
        # the time of 4 bunches, a fifteenth of that of 16
        (0.1, FOUR_BUNCHES, 0.1, ("note", LATENCIES)),
        (20.0, FOUR_BUNCHES, 20.0, ("note", ["itl", "icl", "tpot"])),
        (20.0, [0.0, 0.08] * 15 + [0.0], 20.0, ("note", ["itl", "icl"])),
        (0.02, [0.0, 0.0005] * 15 + [0.0], 0.02, ("ok", [])),  # 0.5 ms matter to nobody
    ],
)
def test_whether_chunks_come_as_they_are_made(
    ttft_s: float, gaps_s: list[float], short_ttft_s: float, expected: tuple[str, list[str]]
) -> None:
    assert verdict(record(ttft_s, gaps_s), "stream", short_ttft_s) == expected


def chunks(n: int) -> list[int]:
    return [10_000 * k for k in range(n)]


@pytest.mark.parametrize(
    ("more", "name", "expected"),
    [
        ({"output_tokens": 40, "chunk_at_us": chunks(40)}, "output length", ("bad", ["tokens"])),
        # 32 chunks as asked, and another number of tokens; more chunks than tokens; more reasoning
        # than tokens
        ({"output_tokens": 224}, "token counts", ("bad", TOKENS)),
        ({"output_tokens": 224}, "output length", ("note", TOKENS)),
        ({"chunk_at_us": chunks(64)}, "token counts", ("bad", TOKENS)),
        ({"reasoning_tokens": 96}, "reasoning", ("note", TOKENS)),
        ({"reasoning_tokens": 96, "first_answer_ns": None}, "token counts", ("bad", TOKENS)),
        # 40 tokens in 20 chunks: several in each, nothing to doubt
        (
            {"output_tokens": 40, "output_tokens_planned": 40, "chunk_at_us": chunks(20)},
            "token counts",
            ("note", ["itl"]),
        ),
        ({"output_tokens": 20, "chunk_at_us": chunks(20)}, "output length", ("note", [])),
        ({"input_tokens": 150}, "input length", ("bad", ["tokens"])),
        ({"input_tokens": 109}, "input length", ("ok", [])),
        ({"cached_tokens": 90}, "prompt cache", ("bad", ["ttft"])),
        ({"first_answer_ns": 300_000_000}, "reasoning", ("note", [])),
        ({"first_answer_ns": None}, "reasoning", ("note", [])),
        # hidden: 32 are visible
        ({"reasoning_tokens": 8, "output_tokens": 40}, "token counts", ("ok", ["tokens"])),
        ({"first_event_ns": 40_000_000}, "first event", ("ok", [])),
        (
            {"token_source": "usage_per_chunk", "chunk_tokens": [2] * 32, "output_tokens": 63},
            "token counts",
            ("ok", ["tokens"]),
        ),
    ],
)
def test_what_the_answer_says_of_its_tokens(
    more: dict[str, Any], name: str, expected: tuple[str, list[str]]
) -> None:
    assert verdict(record(**more), name) == expected


def test_an_answer_that_ends_by_itself_counts_an_end_token_that_no_chunk_has() -> None:
    """33 tokens in 32 chunks, ended by "stop": one token in each; by "length" nobody knows which
    chunk had two."""
    for finish_reason, known, ratio in (("stop", True, 1.0), ("length", False, 33 / 32)):
        given = seen(record(asked=64, tokens=33, finish_reason=finish_reason))
        _, facts = checkup(given)
        assert (facts["chunk_tokens_known"], facts["tokens_per_chunk"]) == (known, ratio)
        said = found("output length", given).found
        assert ("ignore_eos is not obeyed" in said) is (finish_reason == "stop")


def test_tokens_without_text_and_vectors_have_no_latency_of_a_stream() -> None:
    none = dict.fromkeys(("first_token_ns", "last_token_ns", "first_answer_ns"))
    hidden = replace(small(), chunk_at_us=[], **none)
    for name in ("stream", "token counts"):
        assert verdict(hidden, name) == ("bad", [*LATENCIES, "tokens"])
    vector = replace(hidden, output_tokens=None, token_source=None, last_token_ns=100_000_000)
    asked = seen(vector)
    checks, _ = checkup(replace(asked, settings=replace(asked.settings, api="embeddings")))
    assert ", ".join(check.name for check in checks) == (
        "connection, network, model, stream, input length, prompt cache, metrics, clock, "
        "receive path"
    )
    assert [c.name for c in checks if c.verdict != "ok"] == ["prompt cache"]
    assert [metric for metric, fine in trusted(checks).items() if fine] == ["e2e", "tokens"]


def test_the_first_event_is_told_with_what_another_tool_would_report() -> None:
    """A role at 40 ms and text at 100 ms: 60 ms less."""
    said = found("first event", seen(record(first_event_ns=40_000_000)))
    assert "40 ms after the request; the first text 60 ms later" in said.found
    assert said.means.endswith("reports 60 ms less")


FIVE = {"output_tokens": 5, "chunk_at_us": [0, 1, 2, 3, 4]}  # of 32


@pytest.mark.parametrize(
    ("options", "more", "name", "expected"),
    [
        # by the user's own option, or else by the server
        (
            {"extra_body": {"max_new_tokens": 5}},
            FIVE,
            "output length",
            "note .*extra-body has max_new_tokens → your own",
        ),
        ({"extra_body": {"top_p": 1}}, FIVE, "output length", "note .*a limit of its own"),
        ({"extra_body": {"ignore_eos": True}}, {}, "output length", "ok .*lengths are kept"),
        (
            {"input_tokens": 8000, "output_tokens": 32},
            {},
            "input length",
            "note .*the workload's 8,000 are cut to the model's context of 200",
        ),
        ({"input_tokens": 100, "output_tokens": 32}, {}, "input length", "ok .*server"),
        ({}, {}, "clock", "ok .*while idle; taken out of all times$"),
        ({"timestamps": "read"}, {}, "clock", "ok .*--timestamps kernel takes it out$"),
    ],
)
def test_what_was_asked_for_is_not_the_servers_doing(
    options: dict[str, Any], more: dict[str, Any], name: str, expected: str
) -> None:
    given = seen(record(**more))
    check = found(
        name,
        replace(
            given,
            settings=make_settings({"url": "http://127.0.0.1:9/v1", **options}),
            probe=replace(given.probe, served=Served(("m",), max_model_len=200)),
        ),
    )
    assert re.match(expected, f"{check.verdict} {check.found} → {check.means}")


@pytest.mark.parametrize(
    ("new_s", "again_s", "said"),
    [
        (0.1, 0.02, "takes 20 ms instead of 100 ms"),
        (0.1, 0.06, "is no faster"),
        (0.003, 0.001, "is no faster"),
    ],
)
def test_a_repeated_prompt_is_faster_by_half_and_by_more_than_noise(
    new_s: float, again_s: float, said: str
) -> None:
    given = replace(seen(record(), new_s), again=small(again_s))
    assert found("prompt cache", given).found.endswith(f"a repeated prompt {said}")


@pytest.mark.parametrize(("compiled", "verdict"), [(True, "ok"), (False, "note")])
def test_it_says_whether_the_receive_path_was_compiled(compiled: bool, verdict: str) -> None:
    assert found("receive path", replace(seen(record()), compiled=compiled)).verdict == verdict


def test_failures_are_counted_and_each_kind_is_said_once() -> None:
    failures = ("reset: gone", "reset: gone", "timeout: 9 s")
    said = found("connection", replace(seen(record()), failures=failures, asked=24)).found
    assert said.endswith("3 of 24 requests failed (reset: gone; timeout: 9 s)")


@pytest.mark.parametrize("busy", [(), ("make 1.9 cores",)])
def test_a_busy_machine_is_named_before_a_proxy(busy: tuple[str, ...]) -> None:
    """32 chunks in 4 reads, 80 ms apart: coalesced. A good stream is good however busy the machine
    was."""
    for gaps_s, bad in ((FOUR_BUNCHES, True), (EVERY_10_MS, False)):
        stream = found("stream", replace(seen(record(0.1, gaps_s)), busy_with=busy))
        assert (stream.verdict != "ok") is bad
        assert ("make 1.9 cores" in stream.means) is (bad and bool(busy))
        assert stream.means.startswith("this machine was busy") is (bad and bool(busy))


@pytest.mark.parametrize(
    ("held", "asked", "alike"), [(0, 1, 1), (1, 2, 1), (2, 3, 1), (3, 3, 3), (4, 3, 3)]
)
def test_an_odd_stream_is_asked_for_again_twice_at_most(held: int, asked: int, alike: int) -> None:
    """The first ``held`` answers come in four bunches. The last one counts, and how many were so."""
    given = seen(record())
    answers = _Answers(given.settings, given.probe, Mock(), Mock())
    odd, good = record(0.1, FOUR_BUNCHES), record()
    with patch.object(answers, "ask", AsyncMock(side_effect=[odd] * held + [good])):
        last = good if held < asked else odd
        assert asyncio.run(answers.long_answer(0.1)) == (last, asked, alike)


def test_what_takes_most_of_the_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two cores, in 10 s: 19 s of make are 1.9 cores, and 12 s are no more than 1.2, which is
    not most."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for used_s, said in ((19.0, ("make 1.9 cores", "sh 0.1 cores")), (12.0, ())):
        after = {7: ("make", 100 + used_s), 8: ("sh", 1.0)}
        monkeypatch.setattr("ampacity.experiments.doctor.cpu_seconds", lambda after=after: after)
        assert _busy_with({7: ("make", 100.0)}, 10.0) == said
