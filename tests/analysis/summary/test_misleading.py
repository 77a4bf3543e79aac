"""Headlines and advice that misled a user, each with its smallest case."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ampacity.experiments.stages.rig import Rig
from tests.support.args import args_of
from tests.support.contract import summarise
from tests.support.synthetic import Stage, make_run, request


def failing(share: float, status: str) -> Stage:
    """200 requests at 8/s, of which every so many fails; the answers take 10 ms."""
    every = round(1 / share)
    rows = [
        request(
            i,
            i / 8,
            ttft_s=None if i % every == 0 else 0.01,
            status=status if i % every == 0 else "ok",
        )
        for i in range(200)
    ]
    return Stage(rows, 25.0, 0.0, 8.0)


def test_failures_that_no_load_explains_are_said_first(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run", [failing(0.5, "http_error")], ["ttft_p95=300ms"], warmup_requests=0
    )
    verdict = summarise(run)["verdict"]
    assert verdict.startswith("50% of the requests failed at the lowest load (")
    assert "http_error): find out why before measuring." in verdict


@pytest.mark.parametrize(("share", "status"), [(0.05, "http_error"), (0.5, "timeout")])
def test_few_failures_and_those_of_a_slow_server_are_no_headline(
    tmp_path: Path, share: float, status: str
) -> None:
    run = make_run(
        tmp_path / "run", [failing(share, status)], ["ttft_p95=300ms"], warmup_requests=0
    )
    assert "find out why before measuring" not in summarise(run)["verdict"]


@pytest.mark.parametrize(
    ("plan", "deviation"), [("requested", 8.0), ("estimated from the texts", None)]
)
def test_given_texts_miss_no_plan(tmp_path: Path, plan: str, deviation: float | None) -> None:
    """One word of a prompt file is 9 tokens with the chat template: that is the load that was asked
    for."""
    rows = [request(i, i / 8, input_tokens_planned=1, input_tokens=9) for i in range(100)]
    workload = {"name": "x", "input_plan": plan}
    summary = summarise(
        make_run(tmp_path / "run", [Stage(rows, 12.5, 0.0, 8.0)], [], workload=workload)
    )
    assert summary["workload"]["realised"]["input_deviation"] == deviation
    assert ("Not the load that was planned" in summary["verdict"]) == (deviation is not None)
    assert ("inputs_off" in {w["code"] for w in summary["warnings"]}) == (deviation is not None)


def test_a_proposed_command_writes_to_a_new_directory() -> None:
    words: list[Any] = args_of("ampacity sweep URL --out runs/a --max-duration 1m --seed 3")
    book: Any = SimpleNamespace(_writer=SimpleNamespace(meta={"command_line": words}))
    expected = "ampacity sweep URL --seed 3 --max-duration 10m"
    assert Rig.again(book, "--max-duration", "10m") == expected


@pytest.mark.parametrize(
    ("answers", "cut"),
    [
        ([(8, "length")] * 97 + [(3, None)] * 3, 3),  # [DONE] alone after 3 tokens of 8
        (
            [(8, None)] * 97 + [(3, None)] * 3,
            3,
        ),  # a server that gives no reasons, and keeps to the plan
        ([(8, "length")] * 97 + [(8, None)] * 3, 0),  # whole
        ([(8, "length")] * 97 + [(3, "stop")] * 3, 0),  # the model ended them
        ([(4, "stop")] * 97 + [(3, None)] * 3, 0),  # as long as the others
        ([(n % 8 + 1, None) for n in range(100)], 0),  # all of them end where the model ends
    ],
)
def test_answers_cut_off_without_a_reason_are_said(
    tmp_path: Path, answers: list[tuple[int, str | None]], cut: int
) -> None:
    rows = [
        request(i, i / 8, gaps_s=[0.01] * (n - 1), finish_reason=reason, output_tokens_planned=8)
        for i, (n, reason) in enumerate(answers)
    ]
    summary = summarise(
        make_run(tmp_path / "run", [Stage(rows, 12.5, 0.0, 8.0)], [], warmup_requests=0)
    )
    said = [w["text"] for w in summary["warnings"] if w["code"] == "cut_short"]
    assert len(said) == bool(cut)
    assert all(
        text.startswith(f"{cut} of 100 answers ended without a finish reason") for text in said
    )


@pytest.mark.parametrize(
    ("odd", "unseen"),
    [
        ({"reasoning_tokens": 8}, 3),  # all of it was hidden reasoning
        ({"reasoning_tokens": None}, 3),  # special tokens, which have no text
        ({"output_tokens": 1}, 0),  # the end token alone
        ({"status": "empty"}, 0),  # a failure, which is counted as one
        ({"ttft_s": 0.1}, 0),  # one token was seen
    ],
)
def test_answers_without_a_visible_token_are_said(
    tmp_path: Path, odd: dict[str, Any], unseen: int
) -> None:
    rows = [request(i, i / 8, gaps_s=[0.01] * 7) for i in range(97)]
    rows += [request(97 + i, 12.2, **{"ttft_s": None, "output_tokens": 8} | odd) for i in range(3)]
    stage = Stage(rows, 12.5, 0.0, 8.0)
    slos = ["ttft_p50=1s", "goodput=50%"]
    summary = summarise(make_run(tmp_path / "run", [stage], slos, warmup_requests=0))
    said = [w["text"] for w in summary["warnings"] if w["code"] == "unseen"]
    assert len(said) == bool(unseen)
    assert all(t.startswith(f"{unseen} of 100 requests were answered without") for t in said)
    imported = {"tool": "x", "definitions": [], "notes": []}
    other = make_run(tmp_path / "other", [stage], slos, warmup_requests=0, imported=imported)
    assert "unseen" not in {w["code"] for w in summarise(other)["warnings"]}
    good = next(v for v in summary["stages"][0]["slo_verdicts"] if v["slo"] == "goodput=50%")
    assert good["attainment"] == pytest.approx(1 - (3 if odd.get("status") else unseen) / 100)


EIGHT: dict[str, Any] = {"gaps_s": [0.01] * 7, "output_tokens_planned": 8}


def summary_of(tmp_path: Path, odd: dict[str, Any], n: int = 10) -> dict[str, Any]:
    """A stage of 100 answers of 8 chunks, 8 requests/s, of which the last ``n`` are ``odd``."""
    rows = [
        request(i, i / 8, **EIGHT | {"answered_by": "M"} | (odd if i >= 100 - n else {}))
        for i in range(100)
    ]
    stage = Stage(rows, 12.5, 0.0, 8.0)
    return summarise(make_run(tmp_path / "run", [stage], [], warmup_requests=0))


def texts(summary: dict[str, Any], code: str) -> list[str]:
    return [w["text"] for w in summary["warnings"] if w["code"] == code]


def test_counts_that_the_probe_had_and_the_load_lacks_are_said(tmp_path: Path) -> None:
    """Every fourth answer has none, or one below 0, which no record holds."""
    for method, n in (("usage", 25), ("usage", 0), ("tokenize", 25)):
        rows = [
            request(i, i / 8, **EIGHT, token_source="chunks" if i % 4 == 0 and n else "usage")
            for i in range(100)
        ]
        workload = {"name": "x", "tokenizer": {"method": method}}
        stage = Stage(rows, 12.5, 0.0, 8.0)
        run = make_run(tmp_path / f"{method}{n}", [stage], [], warmup_requests=0, workload=workload)
        found = "".join(texts(summarise(run), "impossible_counts"))
        said = "25 of 100 answers have no count of tokens, or none that can be true"
        assert (said in found) == (method == "usage" and n > 0)


@pytest.mark.parametrize(
    ("lost", "method", "began_s", "said"),
    [
        (range(60, 100), "usage", 0.0, "From 7.5 s on"),
        (range(60, 100), "tokenize", 0.0, "From 7.5 s on"),
        (range(99, 100), "usage", 0.0, None),  # one alone is 1 % of them
        (range(100), "usage", 40.0, "From 40.0 s on"),  # a window of a soak
        (range(100), "tokenize", 40.0, None),  # it never counted
        (range(0, 100, 2), "usage", 0.0, "50 of 100 answers have no count"),
        (range(0, 40), "usage", 0.0, "40 of 100 answers have no count"),  # it came back
    ],
)
def test_since_when_the_answers_have_no_usage_is_said(
    lost: range, method: str, began_s: float, said: str | None, tmp_path: Path
) -> None:
    """Answer i was due at i / 8 s; its chunks are as many as its tokens."""
    rows = [
        request(i, i / 8, **EIGHT, token_source="chunks" if i in lost else "usage")
        for i in range(100)
    ]
    workload = {"name": "x", "tokenizer": {"method": method}}
    stage = Stage(rows, 12.5, 0.0, 8.0)
    run = make_run(tmp_path / "run", [stage], [], warmup_requests=0, workload=workload)
    run.meta["stages"][0]["from_s"] = began_s
    found = texts(summarise(run), "impossible_counts")
    assert [text.startswith(said or "-") for text in found] == ([True] if said else [])


@pytest.mark.parametrize(
    ("tokens_per_chunk", "said"), [(1, "Chunks are not tokens and"), (3, "(3 tokens per chunk)")]
)
def test_the_ratio_of_tokens_to_chunks_is_given_where_it_is_one(
    tokens_per_chunk: int, said: str, tmp_path: Path
) -> None:
    counted: dict[str, Any] = {**EIGHT, "output_tokens": 8 * tokens_per_chunk}
    counted["output_tokens_planned"] = 8 * tokens_per_chunk
    unknown: dict[str, Any] = {"gaps_s": [0.01] * 2, "output_tokens": 3, "token_source": "chunks"}
    unknown["output_tokens_planned"] = 8
    rows = [request(i, i / 8, **(unknown if i % 2 else counted)) for i in range(100)]
    run = make_run(tmp_path / "run", [Stage(rows, 12.5, 0.0, 8.0)], [], warmup_requests=0)
    (text,) = texts(summarise(run), "tokens_per_chunk")
    assert said in text


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"cached_tokens": 101}, "10 count more cached tokens than input tokens"),
        ({"reasoning_tokens": 9}, "10 count more reasoning tokens than output tokens"),
        ({"output_tokens": 16}, "10 count fewer tokens than chunks came, or others than asked for"),
        ({"output_tokens": 4}, "10 count fewer tokens than chunks came"),
        ({"output_tokens": 4, "output_tokens_planned": 4}, "10 count fewer tokens than chunks"),
        ({"output_tokens": 7, "output_tokens_planned": 20}, "10 count fewer tokens than chunks"),
        ({"output_tokens": 7, "finish_reason": "stop"}, "10 count fewer tokens than chunks"),
        ({"output_tokens": 7, "output_tokens_planned": None}, "10 count fewer tokens than chunks"),
        ({"cached_tokens": 100, "reasoning_tokens": 8}, ""),
        ({"output_tokens": 9, "finish_reason": "stop"}, ""),  # the end token has no text
        ({"output_tokens": 16, "output_tokens_planned": 16}, ""),  # two tokens a chunk
        ({"output_tokens": 16, "chunk_tokens": [2] * 8}, ""),
        ({"reasoning_tokens": 5}, ""),  # thinking that came as text
    ],
)
def test_counts_that_cannot_be_true_are_left_out_and_said(
    tmp_path: Path, odd: dict[str, Any], said: str
) -> None:
    summary = summary_of(tmp_path, odd)
    found = texts(summary, "impossible_counts")
    assert len(found) == bool(said)
    assert all(f"Of 100 answers {said}" in text for text in found)
    stage = summary["stages"][0]
    if "output_tokens" in odd and said:  # 10 % of the answers have no count
        assert stage["output_tokens_per_s"] is None
        assert "contradict" in stage["output_tokens_per_s_reason"]
    elif said:  # 8 x 8 tokens/s, less those at the end of the window
        assert stage["output_tokens_per_s"] == pytest.approx(64, rel=0.02)
        assert summary["workload"]["realised"]["cached_token_share"] is None


@pytest.mark.parametrize(
    ("odd", "n", "said"),
    [
        ({"answered_by": "m-small"}, 10, "10 of 100 answers"),  # a fallback
        ({"answered_by": "a cache"}, 100, "100 of 100 answers"),
        ({"answered_by": "a cache"}, 1, "1 of 100 answers"),
        ({"answered_by": "M, then m-small"}, 100, "100 of 100 answers"),  # a fallback halfway
        ({"answered_by": "M-2024-08-06"}, 100, ""),  # an alias; the probe names it
        ({"answered_by": None}, 10, ""),
    ],
)
def test_answers_from_elsewhere_are_said(
    tmp_path: Path, odd: dict[str, Any], n: int, said: str
) -> None:
    summary = summary_of(tmp_path, odd, n)
    found = texts(summary, "strangers")
    assert len(found) == bool(said)
    assert all(text.startswith(said) for text in found)
    assert summary["verdict"].startswith("Not the load that was planned") == bool(said)


@pytest.mark.parametrize(
    ("reason", "said"), [("content_filter", 10), ("banana", 10), ("STOP", 0), (None, 0)]
)
def test_endings_of_an_unknown_kind_are_said(tmp_path: Path, reason: str | None, said: int) -> None:
    found = texts(summary_of(tmp_path, {"finish_reason": reason}), "endings")
    assert len(found) == bool(said)
    assert all("10 of 100 answers ended neither" in text for text in found)


def test_answers_of_other_lengths_claim_no_clean_capacity(tmp_path: Path) -> None:
    short = {"gaps_s": [0.01], "output_tokens": 2}
    verdict = summary_of(tmp_path, short, 100)["verdict"]
    assert verdict.startswith(
        "Not the load that was planned. Answers were 75% shorter than planned"
    )


@pytest.mark.parametrize(
    ("columns", "share"),
    [
        # 10 asked for: 18 and 2 in turn, |8| / 10; 12 and 8, which may be a count's tolerance; a
        # tenth of the answers 100 longer, the others 11 shorter
        ([{"output_tokens": n, "output_tokens_planned": 10} for n in (18, 2)], "Answers were 80%"),
        ([{"output_tokens": n, "output_tokens_planned": 10} for n in (12, 8)], ""),
        (
            [{"output_tokens": n, "output_tokens_planned": 50} for n in (149, *[39] * 9)],
            "Answers were 40%",
        ),
        ([{"input_tokens": n, "input_tokens_planned": 100} for n in (150, 50)], "Prompts were 50%"),
    ],
)
def test_lengths_that_are_right_on_average_alone_are_said(
    columns: list[dict[str, Any]], share: str, tmp_path: Path
) -> None:
    rows = [request(i, i / 8, **columns[i % len(columns)]) for i in range(100)]
    run = make_run(tmp_path / "run", [Stage(rows, 12.5, 0.0, 8.0)], [], warmup_requests=0)
    summary = summarise(run)
    found = [*texts(summary, "lengths_off"), *texts(summary, "inputs_off")]
    assert [t.startswith(f"{share} off one by one, though not on average") for t in found] == (
        [True] if share else []
    )
    assert summary["verdict"].startswith("Not the load that was planned") == bool(share)


@pytest.mark.parametrize(("n", "tokens", "said"), [(20, 30, 1), (2, 30, 1), (1, 30, 0), (20, 4, 0)])
def test_some_answers_in_one_piece_are_said(tmp_path: Path, n: int, tokens: int, said: int) -> None:
    """``n`` of 100 answers come whole, after as long as the others take."""
    streamed, whole = [0.01] * (tokens - 1), [0.0] * (tokens - 1)
    rows = [
        request(i, i / 8, ttft_s=0.4, gaps_s=whole)
        if i < n
        else request(i, i / 8, ttft_s=0.1, gaps_s=streamed)
        for i in range(100)
    ]
    run = make_run(tmp_path / "run", [Stage(rows, 12.5, 0.0, 8.0)], [], warmup_requests=0)
    found = texts(summarise(run), "not_streamed")
    assert len(found) == said
    assert all(text.startswith(f"{n} of 100 answers came in one piece") for text in found)


@pytest.mark.parametrize(
    ("tokens", "after_s", "gap_s", "streamed"),
    [
        (10, 0.0006, 0.0, False),
        (30, 0.005, 0.0, False),
        (4, 0.0006, 0.0, True),  # so few may share a read by chance
        (10, 0.0006, 0.001, True),  # token by token
    ],
)
def test_answers_in_one_piece_have_no_first_token_however_fast(
    tokens: int, after_s: float, gap_s: float, streamed: bool, tmp_path: Path
) -> None:
    rows = [request(i, i / 8, ttft_s=after_s, gaps_s=[gap_s] * (tokens - 1)) for i in range(200)]
    stage = Stage(rows, 25.0, 0.0, 8.0)
    summary = summarise(make_run(tmp_path / "run", [stage], ["ttft_p50=1s"], warmup_requests=0))
    assert summary["stages"][0]["slo_verdicts"][0]["verdict"] == (
        "met" if streamed else "inconclusive"
    )
    assert len(texts(summary, "not_streamed")) == (not streamed)
    assert "held_back" not in {limit["rule"] for limit in summary["limits"] if limit["holds"]}


@pytest.mark.parametrize(
    ("refused", "context", "kind"),
    [
        ((30, 10), 8192, "bad_request"),  # as long as those that are answered
        ((20, 10), 8192, "bad_request"),
        ((20, 21), 8192, "too_long"),  # longer than each of them
        ((30, 10), 42, "too_long"),  # near the listed context, as the plan has an error
        ((30, 10), None, "too_long"),  # no context is listed
        ((30, 10), "8192", "too_long"),  # by --lock: the server lists none
    ],
)
def test_what_fits_and_is_called_too_long_is_a_failure(
    refused: tuple[int, int], context: int | str | None, kind: str, tmp_path: Path
) -> None:
    lengths = {"input_tokens_planned": 30, "output_tokens_planned": 10}
    no: dict[str, Any] = {"ttft_s": None, "status": "too_long", "http_status": 400}
    odd = no | dict(zip(lengths, refused, strict=True))
    rows = [request(i, i / 8, **(odd if i % 2 else lengths)) for i in range(200)]
    stage, locked = Stage(rows, 25.0, 0.0, 8.0), {"max_model_len": context}
    slos = ["error_rate=1%"]
    run = make_run(tmp_path / "run", [stage], slos, warmup_requests=0, locked=locked)
    summary = summarise(run)
    assert {k: n for k, n in summary["errors"].items() if n} == {kind: 100}
    (verdict,) = summary["stages"][0]["slo_verdicts"]
    assert verdict["attainment"] == (0.5 if kind == "bad_request" else 1.0)


def test_silent_answers_leave_ttft_open(tmp_path: Path) -> None:
    """Half of the answers show no token: no median of TTFT is known, whatever the others had."""
    rows = [
        request(
            i,
            i / 8,
            **EIGHT | ({"ttft_s": None, "gaps_s": [], "output_tokens": 8} if i % 2 else {}),
        )
        for i in range(400)
    ]
    stage = Stage(rows, 50.0, 0.0, 8.0)
    summary = summarise(make_run(tmp_path / "run", [stage], ["ttft_p90=1s"], warmup_requests=0))
    (verdict,) = summary["stages"][0]["slo_verdicts"]
    assert verdict["verdict"] == "inconclusive"
    assert "200 were cut off, or gave no token" in verdict["reason"]
