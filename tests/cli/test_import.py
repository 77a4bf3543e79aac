"""``ampacity import``: files of the real tools, files made by hand, and damaged files."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ampacity.imports.into_run import read_file, write_run
from ampacity.imports.results import ImportedFileError
from ampacity.loadgen.rundir.files import load_run
from tests.support.contract import summarise
from tests.support.repeats import often

SAMPLES = Path(__file__).parents[1] / "samples_other_tools"
FILES = {
    "vllm bench serve": SAMPLES / "vllm_open.json",
    "aiperf": SAMPLES / "aiperf" / "profile_export.jsonl",
    "guidellm": SAMPLES / "guidellm.json",
    "genai-bench": SAMPLES / "genai_bench.json",
    "SGLang bench_serving": SAMPLES / "sglang_open.jsonl",
}
TEXTS = {tool: path.read_text() for tool, path in FILES.items()}


def imported(tmp_path: Path, *paths: Path) -> dict[str, Any]:
    write_run(tmp_path / "run", paths, [read_file(p) for p in paths], [], {})
    return summarise(load_run(tmp_path / "run"))


# ---- what the real tools wrote


def beside(path: Path, tool: str) -> tuple[dict[str, Any], list[dict[str, Any]], list[float], Any]:
    """What the tool says itself; rows, TTFTs in ms and notes of the run that is made of it."""
    imported(path, FILES[tool])
    run = load_run(path / "run")
    rows = run.requests.to_pylist()
    ttfts_ms = [(r["first_token_ns"] - r["started_ns"]) / 1e6 for r in rows]
    return json.loads(FILES[tool].read_text()), rows, ttfts_ms, run.meta["notes"]


def test_vllm_percentiles_are_those_of_vllm(tmp_path: Path) -> None:
    theirs, rows, ttfts, notes = beside(tmp_path, "vllm bench serve")
    assert np.median(ttfts) == pytest.approx(theirs["median_ttft_ms"], abs=1e-4)
    icl = [g / 1e3 for r in rows for g in np.diff(r["chunk_at_us"])]
    # our chunk times are in microseconds
    assert np.mean(icl) == pytest.approx(theirs["mean_itl_ms"], abs=2e-3)
    waits = [(r["started_ns"] - r["scheduled_ns"]) / 1e9 for r in rows]
    assert sorted(waits) == pytest.approx(sorted(theirs["queue_times"]), abs=1e-8)
    assert sum(r["output_tokens"] for r in rows) == theirs["total_output_tokens"]
    # in a chat its first "token" is the message that names the role: eight tokens in nine messages
    assert any("24 of 24 answers have one message more than tokens" in note for note in notes)


def test_known_fault_73_the_report_lists_what_is_defined_otherwise(
    tmp_path: Path, ampacity: Any, capsys: Any
) -> None:
    for tool, path in FILES.items():
        out = tmp_path / tool.replace(" ", "-")
        assert ampacity("import", path, "--out", out) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert f"Measured by {tool}, not by ampacity" in said
        page = (out / "report.html").read_text()
        assert f"Where {tool} differs" not in said
        assert f'aria-label="Where {tool} differs"' in page
        for definition in json.loads((out / "run.json").read_text())["imported"]["definitions"]:
            assert definition["what"] in page
            assert definition["theirs"].split(":")[0].split("'")[0] in page


def test_failed_requests_stay_and_break_percentiles(tmp_path: Path) -> None:
    # as the tools' own summaries count them
    failed = {"aiperf": 5, "guidellm": 6, "genai-bench": 1}  # 5xx
    for tool, count in failed.items():
        summary = imported(tmp_path / tool, FILES[tool])
        assert summary["errors"]["upstream"] == count
    summary = imported(tmp_path / "closed", SAMPLES / "vllm_closed.json")
    assert summary["errors"]["http_error"] == 4
    assert summary["stages"][0]["kind"] == "closed"
    assert summary["stages"][0]["concurrency_set"] == 4
    assert summary["stages"][0]["ttft_s"]["infinite"] == 4


def test_guidellm_times_and_slip(tmp_path: Path) -> None:
    first = json.loads(FILES["guidellm"].read_text())["benchmarks"][0]["requests"]["successful"][0]
    write_run(tmp_path / "run", [FILES["guidellm"]], [read_file(FILES["guidellm"])], [], {})
    run = load_run(tmp_path / "run")
    found = [
        (r["first_token_ns"] - r["started_ns"]) / 1e6
        for r in run.requests.to_pylist()
        if r["status"] == "ok"
    ]
    assert min(abs(t - first["time_to_first_token_ms"]) for t in found) < 1e-3
    stage = summarise(run)["stages"][0]
    assert stage["offered_rps"] == 6.0
    assert stage["slip_s"]["p99"] > 0
    assert "no times of their chunks" in stage["itl_s"]["reason"] == stage["icl_s"]["reason"]


def test_aiperf_takes_the_servers_count_of_tokens(tmp_path: Path) -> None:
    summary = imported(tmp_path, FILES["aiperf"])
    realised = summary["workload"]["realised"]
    # its own tokenizer counted 22 of the same text
    assert realised["output_tokens"]["received"]["max"] == 8
    assert realised["token_source"] == {"usage": 15}
    # eight tokens have seven gaps; a failure is one
    assert summary["stages"][0]["itl_s"]["n"] == 15 * 7 + 5


def test_client_of_another_tool_is_not_said_to_have_kept_up(tmp_path: Path) -> None:
    summary = imported(tmp_path, FILES["vllm bench serve"])
    assert summary["audit"]["client_limited"] is None
    assert next(w["code"] for w in summary["warnings"]) == "imported"


def test_two_tools_are_not_compared_unasked(tmp_path: Path, ampacity: Any, capsys: Any) -> None:
    for tool in ("vllm bench serve", "guidellm"):
        assert ampacity("import", FILES[tool], "--out", tmp_path / tool[:4]) == 0
    assert ampacity("compare", tmp_path / "vllm", tmp_path / "guid") == 2
    assert "imported" in capsys.readouterr().err


def sglang(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    path = tmp_path / "s.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_sglang_percentiles_are_those_of_sglang(tmp_path: Path) -> None:
    theirs, rows, ttfts, (note,) = beside(tmp_path, "SGLang bench_serving")
    assert np.median(ttfts) == pytest.approx(theirs["median_ttft_ms"], abs=1e-3)
    assert np.percentile(ttfts, 99) == pytest.approx(theirs["p99_ttft_ms"], abs=1e-3)
    icl = [g / 1e3 for r in rows for g in np.diff(r["chunk_at_us"])]
    assert np.mean(icl) == pytest.approx(theirs["mean_itl_ms"], abs=2e-3)
    assert np.percentile(icl, 99) == pytest.approx(theirs["p99_itl_ms"], abs=5e-3)
    assert sum(r["output_tokens"] for r in rows) == theirs["total_output_tokens"]
    lasts = [r["ended_ns"] for r in rows]
    assert (max(lasts) - rows[0]["started_ns"]) / 1e9 == pytest.approx(theirs["duration"], abs=1e-3)
    assert "laid out in its order, at equal distances" in note
    assert "15.86 requests/s in 1.513 s" in note


def test_sglang_runs_of_one_file_are_stages_and_its_failures_stay(tmp_path: Path) -> None:
    summary = imported(tmp_path, SAMPLES / "sglang_closed.jsonl")
    closed, held = summary["stages"]
    assert (closed["kind"], closed["concurrency_set"]) == ("closed", 4)
    assert (held["kind"], held["offered_rps"]) == ("open", 20.0)
    assert summary["errors"]["http_error"] == (24 - 21) + (24 - 23)
    run = load_run(tmp_path / "run")
    assert any("held to 4 in flight" in note for note in run.meta["notes"])
    # four users who never pause: 21 answers of 71.5 ms take 0.376 s, of the 0.411 s by its clock
    starts = [r["started_ns"] for r in run.requests.to_pylist() if r["stage"] == 0]
    assert starts[:4] == [starts[0]] * 4
    assert (max(starts) - starts[0]) / 1e9 == pytest.approx(0.36, abs=0.05)


def test_sglang_without_details_says_what_to_do_and_what_it_holds(tmp_path: Path) -> None:
    plain = SAMPLES / "sglang_plain.jsonl"
    with pytest.raises(
        ImportedFileError,
        match=r"no single .*19 requests in 1\.603 s, mean_ttft_ms 8\.166, .*--output-details",
    ):
        read_file(plain)
    detailed = json.loads(FILES["SGLang bench_serving"].read_text())
    result = read_file(sglang(tmp_path, detailed, json.loads(plain.read_text())))
    assert len(result.stages) == 1
    assert "1 of 2 runs in the file have no single requests" in result.notes[0]


def test_sglang_answers_in_one_piece_have_no_first_token(tmp_path: Path) -> None:
    summary = imported(tmp_path, SAMPLES / "sglang_not_streamed.jsonl")
    assert summary["stages"][0]["ttft_s"]["p50"] is None
    assert summary["imported"]["missing"]["first_token_ns"].startswith(
        "the answers were not streamed"
    )
    assert any("not streamed" in note for note in summary["imported"]["notes"])


def test_sglang_by_hand(tmp_path: Path) -> None:
    """Three requests of two users: 0.3 s, 0.5 s, then an empty answer from 0.3 s on."""
    run = {
        "backend": "sglang",
        "request_rate": float("inf"),
        "max_concurrency": 2,
        "duration": 0.6,
        "completed": 3,
        "total_output_tokens": 7,
        "total_output_tokens_retokenized": 7,
        "input_lens": [5, 6, 7],
        "output_lens": [3, 4, 0],
        "ttfts": [0.1, 0.2, 0.0],
        "itls": [[0.1, 0.1], [0.1, 0.1, 0.1], []],
        "errors": ["", "", ""],
        "cached_tokens": [0, 4, 0],
        "mean_ttft_ms": 100.0,
        "mean_itl_ms": 100.0,
        "accept_length": None,
    }
    write_run(tmp_path / "run", [path := sglang(tmp_path, run)], [read_file(path)], [], {})
    rows = load_run(tmp_path / "run").requests.to_pylist()
    assert [r["status"] for r in rows] == ["ok", "ok", "empty"]
    assert [round((r["started_ns"] - rows[0]["started_ns"]) / 1e6) for r in rows] == [0, 0, 300]
    assert [r["chunk_at_us"] for r in rows[:2]] == [
        [100_000, 200_000, 300_000],
        [200_000, 300_000, 400_000, 500_000],
    ]
    assert [r["cached_tokens"] for r in rows] == [0, 4, 0]
    trace = {
        **run,
        "request_rate": "trace",
        "max_concurrency": None,
        "mean_itl_ms": 55.0,
        "accept_length": 2.5,
    }
    # by its count the third one failed, without a word
    silent = {**run, "completed": 2, "mean_ttft_ms": 150.0}
    assert read_file(sglang(tmp_path, silent)).stages[0].requests[2].status == "http_error"
    (stage,) = read_file(sglang(tmp_path, trace)).stages  # its ITL is by its own tokenizer then
    assert (stage.offered_rps, stage.concurrency) == (None, None)
    for damage, complaint in (
        ({"total_output_tokens": 9}, "total_output_tokens is 9"),
        ({"mean_ttft_ms": 50.0}, "mean_ttft_ms is 50"),
        ({"mean_itl_ms": 50.0}, "mean_itl_ms is 50"),
        ({"errors": [""]}, "errors has 1 entries"),
        ({"ttfts": [0.1, -1, 0]}, "request 1: ttfts is -1"),
        ({"request_rate": 0}, "request_rate is 0"),
        ({"duration": 0}, "duration is 0 s, but a request took"),
        ({"input_lens": None}, "input_lens is missing, not a list"),
        ({"ttfts": [], "itls": []}, "entries, 0 are due"),
    ):
        with pytest.raises(ImportedFileError, match=complaint):
            read_file(sglang(tmp_path, run | damage))


# ---- made by hand


def vllm(n: int = 400, rate: float = 10.0, **changes: Any) -> dict[str, Any]:
    """n requests, one each 1/rate s; TTFT 100 ms, then four tokens 20 ms apart."""
    return {
        "date": "20260101-000000",
        "backend": "openai",
        "model_id": "m",
        "request_rate": rate,
        "burstiness": 1.0,
        "max_concurrency": None,
        "duration": n / rate,
        "total_token_throughput": 1.0,
        "input_lens": [50] * n,
        "output_lens": [5] * n,
        "ttfts": [0.1] * n,
        "itls": [[0.02] * 4] * n,
        "start_times": [100 + i / rate for i in range(n)],
        "queue_times": [0.0] * n,
        "errors": [""] * n,
    } | changes


def written(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document))
    return path


def test_figures_worked_out_by_hand(tmp_path: Path) -> None:
    stage = imported(tmp_path, written(tmp_path / "a.json", vllm()))["stages"][0]
    assert stage["ttft_s"]["p99"] == pytest.approx(0.1)
    assert stage["itl_s"]["p99"] == pytest.approx(0.02)
    assert stage["tpot_s"]["p50"] == pytest.approx(0.02)
    assert stage["e2e_s"]["p50"] == pytest.approx(0.18)
    assert stage["offered_rps"] == 10.0
    assert stage["achieved_rps"] == pytest.approx(10.0, rel=0.02)
    assert stage["output_tokens_per_s"] == pytest.approx(50.0, rel=0.02)
    assert stage["concurrency"] == pytest.approx(1.8, rel=0.02)  # Little: 10/s of 0.18 s


def test_queue_of_an_open_loop_that_is_held_counts_from_the_schedule(tmp_path: Path) -> None:
    held = vllm(max_concurrency=1, queue_times=[1.0] * 400)
    stage = imported(tmp_path, written(tmp_path / "a.json", held))["stages"][0]
    assert stage["ttft_s"]["p99"] == pytest.approx(0.1)
    assert stage["ttft_from_schedule_s"]["p99"] == pytest.approx(1.1)


def test_tpot_without_chunk_times_takes_one_token_as_the_first(tmp_path: Path) -> None:
    rows = [{"ttft": 0.1, "e2e_latency": 0.5, "num_input_tokens": 9, "num_output_tokens": 5}] * 300
    document = {"aggregated_metrics": {"num_concurrency": 3}, "individual_request_metrics": rows}
    stage = imported(tmp_path, written(tmp_path / "a.json", document))["stages"][0]
    assert stage["tpot_s"]["p99"] == pytest.approx(0.1)  # 0.4 s over four tokens
    assert stage["achieved_rps"] == pytest.approx(6.0, rel=0.05)  # three users, 0.5 s each
    assert stage["concurrency"] == pytest.approx(3.0, rel=0.02)
    in_ms = [{**row, "ttft": 100, "e2e_latency": 500} for row in rows]
    document = {**document, "individual_request_metrics": in_ms, "_time_unit": "ms"}
    (tmp_path / "ms").mkdir()
    assert imported(tmp_path / "ms", written(tmp_path / "b.json", document))["stages"][0]["e2e_s"][
        "p50"
    ] == pytest.approx(0.5)


def test_files_are_load_levels_and_feed_capacity_gate_and_baseline(
    tmp_path: Path, ampacity: Any, capsys: Any
) -> None:
    rng = np.random.default_rng(1)
    slow = {2.0: 0.1, 4.0: 0.2, 8.0: 3.0}
    paths = [
        written(
            tmp_path / f"{rate:g}.json",
            vllm(600, rate, ttfts=list(ttft * rng.lognormal(0, 0.1, 600))),
        )
        for rate, ttft in slow.items()
    ]
    assert ampacity("import", *paths, "--out", tmp_path / "run", "--slo", "ttft_p90=1s") == 0
    capacity = json.loads((tmp_path / "run" / "summary.json").read_text())["capacity"]
    low, high = capacity["capacity_rps_ci"]
    assert low < 4.1
    assert 4 < high <= 8.0  # the load beyond, at most
    assert ampacity("baseline", tmp_path / "run", "-o", tmp_path / "base.json") == 0
    assert ampacity("gate", tmp_path / "run", "--baseline", tmp_path / "base.json") == 0
    worse = [
        written(
            tmp_path / f"w{rate:g}.json",
            vllm(600, rate, ttfts=list(1.5 * ttft * rng.lognormal(0, 0.1, 600))),
        )
        for rate, ttft in slow.items()
    ]
    assert ampacity("import", *worse, "--out", tmp_path / "worse") == 0
    assert ampacity("gate", tmp_path / "worse", "--baseline", tmp_path / "base.json") == 1
    # another tool's run cannot be repeated
    again = ["--max-samples", "2", "--tolerance", "ttft_p50=0.1%"]
    assert ampacity("gate", tmp_path / "run", "--baseline", tmp_path / "base.json", *again) in (
        0,
        3,
    )


def test_credentials_in_a_url_are_not_kept(tmp_path: Path) -> None:
    document = json.loads(FILES["guidellm"].read_text())
    document["config"]["spec"]["backend"]["target"] = "http://me:secret@host:1"
    imported(tmp_path, written(tmp_path / "g.json", document))
    assert "secret" not in (tmp_path / "run" / "run.json").read_text()


# ---- what is refused


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "[1, 2]",
        "nonsense",
        '{"a": 1}',
        '{"a": 1}\n{"b": 2}',
        "\x00\x01",
        "[" * 9000,
        '{"benchmarks": []}',
        '{"duration": 1, "total_token_throughput": 2}',
    ],
)
def test_other_files_are_refused_in_one_line(
    tmp_path: Path, ampacity: Any, capsys: Any, text: str
) -> None:
    (tmp_path / "f.json").write_text(text)
    assert ampacity("import", tmp_path / "f.json", "--out", tmp_path / "run") == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_aiperf_summary_alone_names_the_file_to_give(tmp_path: Path) -> None:
    shutil.copy(SAMPLES / "aiperf" / "profile_export_aiperf.json", tmp_path)
    with pytest.raises(ImportedFileError, match=r"give profile_export\.jsonl"):
        read_file(tmp_path / "profile_export_aiperf.json")


def changed(tool: str, folder: Path, change: Callable[[Any], object]) -> Path:
    """Write a changed sample; ``change`` gets the document, or aiperf's rows and settings."""
    if tool != "aiperf":
        document = json.loads(TEXTS[tool])
        change(document)
        return written(folder / "f.json", document)
    rows = [json.loads(row) for row in TEXTS[tool].splitlines()]
    told = json.loads((SAMPLES / "aiperf" / "profile_export_aiperf.json").read_text())
    change((rows, told))
    written(folder / "profile_export_aiperf.json", told)
    (folder / "profile_export.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "profile_export.jsonl"


def times(factor: float, holder: Any, *names: str) -> None:
    """Times as if they were in another unit."""
    for name in names:
        found = holder[name]
        holder[name] = [factor * v for v in found] if isinstance(found, list) else factor * found


def guided(document: Any) -> Any:
    return document["benchmarks"][0]


CONTRADICTIONS: list[tuple[str, Callable[[Any], object], str]] = [
    (
        "vllm bench serve",
        lambda d: times(1000, d, "ttfts"),
        "mean_ttft_ms is 57.38, but 57380 by the single",
    ),
    # 2 * 3.2408 + 2
    (
        "vllm bench serve",
        lambda d: (times(1000, d, "ttfts"), d.pop("mean_ttft_ms")),
        "more than 8.48161 s",
    ),
    ("vllm bench serve", lambda d: times(1000, d, "start_times"), "more than 8.48161 s"),
    ("vllm bench serve", lambda d: d.update(completed=5), "completed is 5, but 24"),
    (
        "vllm bench serve",
        lambda d: d["output_lens"].__setitem__(0, 0),
        "total_output_tokens is 192, but 184",
    ),
    (
        "vllm bench serve",
        lambda d: d["itls"].__setitem__(0, d["itls"][0][:3]),
        "mean_itl_ms is 10.3332, but",
    ),
    (
        "genai-bench",
        lambda d: [
            times(1000, r, "ttft", "e2e_latency")
            for r in d["individual_request_metrics"]
            if r["ttft"]
        ],
        "more than 4.07566 s",
    ),
    (
        "genai-bench",
        lambda d: d["individual_request_metrics"].pop(0),
        "num_completed_requests is 23, but 22",
    ),
    (
        "genai-bench",
        lambda d: d["individual_request_metrics"][0].update(num_output_tokens=0),
        "sum is 184, but 176",
    ),
    (
        "guidellm",
        lambda d: guided(d)["requests"]["successful"].pop(),
        "request_totals.successful is 6, but 5",
    ),
    (
        "guidellm",
        lambda d: guided(d)["requests"]["successful"][0]["info"]["timings"].update(
            request_end=1795834199.5
        ),
        "more than 5.28909 s",
    ),
    (
        "guidellm",
        lambda d: guided(d)["requests"]["successful"][0]["info"]["timings"].update(
            first_token_iteration=1795834199.0
        ),
        "the tokens of a request",
    ),
    (
        "aiperf",
        lambda d: d[0][0]["metrics"]["time_to_first_token"].update(unit="s"),
        "take longer than its 0.100934 s",
    ),
    (
        "aiperf",
        lambda d: d[0][0]["metrics"]["inter_chunk_latency"].update(unit="s"),
        "take longer than its 0.100934 s",
    ),
    ("aiperf", lambda d: d[0].pop(0), "request_latency.count is 15, but 14"),
]


@pytest.mark.parametrize(("tool", "change", "wrong"), CONTRADICTIONS)
def test_a_file_that_contradicts_itself_is_refused(
    tmp_path: Path,
    ampacity: Any,
    capsys: Any,
    tool: str,
    change: Callable[[Any], object],
    wrong: str,
) -> None:
    assert ampacity("import", changed(tool, tmp_path, change), "--out", tmp_path / "run") == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert wrong in said
    assert "contradicts" in said


def test_files_of_two_tools_are_two_runs(tmp_path: Path, ampacity: Any, capsys: Any) -> None:
    assert (
        ampacity("import", FILES["guidellm"], FILES["genai-bench"], "--out", tmp_path / "run") == 2
    )
    assert "import each tool by itself" in capsys.readouterr().err
    assert ampacity("import", FILES["guidellm"], "--format", "vllm", "--out", tmp_path / "run") == 2


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:3])
        if isinstance(value, list)
        else ()
    )
    return [path, *(p for key, v in inner for p in _places(v, (*path, key)))]


DOCUMENTS = {
    t: json.loads(x) if t != "aiperf" else [json.loads(r) for r in x.splitlines()]
    for t, x in TEXTS.items()
}
PLACES = {tool: _places(document)[1:] for tool, document in DOCUMENTS.items()}
BAD = [
    None,
    -1,
    1e300,
    1e11,
    3e9,
    9e18,
    float("nan"),
    float("inf"),
    "x",
    True,
    [],
    {},
    [[]],
    2**70,
    "20",
    0,
]


@settings(
    max_examples=often(62, 250),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_damaged_files_never_give_a_traceback(tmp_path: Path, data: st.DataObject) -> None:
    tool = data.draw(st.sampled_from(sorted(FILES)))
    if data.draw(st.booleans()):
        text = TEXTS[tool][: data.draw(st.integers(0, len(TEXTS[tool])))]
    else:
        document = json.loads(json.dumps(DOCUMENTS[tool]))
        *way, last = data.draw(st.sampled_from(PLACES[tool]))
        holder = document
        for key in way:
            holder = holder[key]
        holder[last] = data.draw(st.sampled_from(BAD))
        text = "\n".join(map(json.dumps, document)) if tool == "aiperf" else json.dumps(document)
    path = tmp_path / ("f.jsonl" if tool == "aiperf" else "f.json")
    path.write_text(text)
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    try:
        write_run(tmp_path / "run", [path], [read_file(path)], [], {})
    except ImportedFileError as damage:  # the one error that it may raise
        said: str | None = str(damage)
    else:
        said = None
    if said is not None:
        assert said.isprintable()  # one line
        return
    run = load_run(tmp_path / "run")
    assert summarise(run)["requests"] == run.requests.num_rows > 0


def test_pandas_is_imported_only_to_import(tmp_path: Path) -> None:
    """Neither the start of the command line nor Arrow's first conversion imports pandas."""
    script = "import sys, ampacity.cli, ampacity.cli.app, ampacity.loadgen.rundir.write as files\n"
    script += "files.to_batch([]), files.pa.array([1]), sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
