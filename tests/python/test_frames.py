"""``ampacity.load``: tables and percentiles of a run, and ``ampacity export``."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import ampacity as public
from ampacity.analysis.change.judged import CompareError
from ampacity.analysis.contract.part import plain
from ampacity.analysis.metrics.percentiles import LEVELS
from ampacity.loadgen.rundir.files import RunDirError
from tests.support.args import Command
from tests.support.synthetic import SLOS, Stage, fixed, make_run, request

DOCUMENT = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(1)
    busy = [
        request(1000 + i, 100 + i * 0.01, stage=1, ttft_s=t, gaps_s=g, chunk_tokens=[1, 1, 3])
        for i, (t, g) in enumerate(
            zip(rng.exponential(0.1, 3200), rng.exponential(0.02, (3200, 2)), strict=True)
        )
    ]
    failed = request(4200, 132.0, stage=1, ttft_s=None, status="timeout")
    late = request(1, 0.1, ttft_s=0.3, start_delay_s=0.2, gaps_s=[0.01, 0.02])
    quiet = [late, *fixed(398, 0.1, first=2, start_s=0.2)]
    stages = [Stage(quiet, 40.0, offered_rps=10.0), Stage([*busy, failed], 33.0, start_s=100.0)]
    return make_run(tmp_path_factory.mktemp("api") / "run", stages, SLOS, warmup_requests=0).path


@pytest.fixture(scope="module")
def run(path: Path) -> public.Run:
    return public.load(path)


def test_any_percentile_is_that_of_summary_json(run: public.Run) -> None:
    names = {name: name.replace("_", ".") for name in LEVELS}
    found = run.percentiles(names.values())
    assert len(found) == 2 * 8 * len(LEVELS)
    for row in found.astype(object).where(found.notna(), None).itertuples():
        held = plain(getattr(run.summary.stages[row.stage], row.metric))
        assert row.value_s == held.get(row.percentile), row
        assert row.n == held["n"]
        if row.percentile in ("p99", "p99.9") and row.value_s is not None:
            assert [row.low_s, row.high_s] == list(held[f"{row.percentile}_ci"])
        if row.value_s is None:
            assert row.reason == held.get(f"{row.percentile}_reason") or held["reason"]
    judged = run.summary.stages[1].slo_verdicts[0]
    [row] = run.percentiles([99], metric="ttft_from_schedule_s", stage=1).itertuples()
    ends = [np.nan if end is None else end for end in judged.value_s_ci]
    np.testing.assert_array_equal([row.value_s, row.low_s, row.high_s], [judged.value_s, *ends])


def test_percentiles_of_other_levels_are_order_statistics(run: public.Run) -> None:
    found = run.percentiles([37.5, 99.95, 100], metric="ttft_s", stage=1).set_index("percentile")
    ok = run.requests.query("stage == 1 and status == 'ok'")["ttft_s"]
    ranked = np.sort([*ok, np.inf])  # the failed one is infinitely slow
    assert found.value_s["p37.5"] == pytest.approx(ranked[int(np.ceil(0.375 * 3201)) - 1])
    assert found.low_s["p37.5"] < found.value_s["p37.5"] < found.high_s["p37.5"]
    assert np.isnan(found.value_s["p99.95"])
    assert found.reason["p99.95"] == "needs 5990 requests, has 3201"  # ln 0.05 / ln 0.9995
    assert found.reason["max"] == "infinite: 1 of 3201 requests failed"
    for level in (-1, 101, "p", "median", None, float("nan")):
        with pytest.raises(ValueError, match="give a percent from 0 to 100"):
            run.percentiles([level])
    with pytest.raises(ValueError, match="choose one of ttft_s, ttft_from_schedule_s"):
        run.percentiles(metric="ttft")
    with pytest.raises(ValueError, match="stage 2: choose one of 0, 1"):
        run.percentiles(stage=2)
    assert run.percentiles(99).equals(run.percentiles([99]))


def test_where_all_requests_failed_a_percentile_is_a_number_that_is_not_known(
    tmp_path: Path,
) -> None:
    failed = [request(i, 0.1 * i, ttft_s=None, status="timeout") for i in range(40)]
    dead = make_run(tmp_path / "run", [Stage(failed, 4.0, offered_rps=10.0)], SLOS)
    found = public.load(dead.path).percentiles([50, 99], metric="ttft_s")
    numbers = found[["value_s", "low_s", "high_s"]]
    assert set(numbers.dtypes) == {np.dtype("float64")}
    assert numbers.isna().to_numpy().all()
    assert found.reason.notna().all()


def test_times_of_a_request_by_hand(run: public.Run) -> None:
    row = run.requests.iloc[0]
    assert (row.request_id, row["class"], row.output_tokens) == (1, "default", 3)
    values = json.loads("""{"scheduled_at_s": 0.1, "started_at_s": 0.3,
        "first_token_at_s": 0.6, "ended_at_s": 0.63, "ttft_s": 0.3,
        "ttft_from_schedule_s": 0.5, "e2e_s": 0.33, "e2e_from_schedule_s": 0.53,
        "tpot_s": 0.015, "slip_s": 0.0}""")
    assert {name: row[name] for name in values} == pytest.approx(values, abs=1e-6)
    assert run.requests.iloc[-1][["status", "ttft_s"]].isna().tolist() == [False, True]
    tokens = run.tokens.query("request_id == 1")
    assert tokens.at_s.tolist() == pytest.approx([0.6, 0.61, 0.63], abs=2e-6)
    assert tokens.gap_s.tolist()[1:] == pytest.approx([0.01, 0.02], abs=2e-6)
    assert np.isnan(tokens.gap_s.iloc[0])
    assert tokens.tokens.tolist() == [1, 1, 1]
    assert run.tokens.tokens.sum() == run.requests.output_tokens.sum()


def test_stages_have_the_figures_of_the_summary(run: public.Run, tmp_path: Path) -> None:
    stage = run.summary.stages[1]
    row = run.stages.set_index("index").loc[1]
    assert row["ttft_from_schedule_s.p99"] == stage.ttft_from_schedule_s.p99
    assert (row["errors.timeout"], row["window.end_s"]) == (1, stage.window.end_s)
    assert list(run.server) == ["at_s"]
    assert not any(isinstance(v, list) for v in run.stages.to_numpy().ravel())
    empty = make_run(tmp_path / "empty", [], [])
    assert len(public.load(empty.path).stages) == len(public.load(empty.path).tokens) == 0


def test_every_column_is_in_the_document(run: public.Run) -> None:
    told = set(re.findall(r"`(\w+)`", DOCUMENT))
    frames = run.requests, run.tokens, run.percentiles([50])
    assert {name for frame in frames for name in frame} - told == set()


def test_export_writes_each_table_and_keeps_what_is_there(
    run: public.Run,
    path: Path,
    tmp_path: Path,
    command: Command,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command("export", path, "-o", tmp_path / "out", status=2)
    assert "--csv, --parquet or --hgrm" in capsys.readouterr().err
    command("export --csv --parquet", path, "-o", tmp_path / "out")
    csv = pd.read_csv(tmp_path / "out" / "requests.csv")
    assert csv.ttft_s.to_numpy() == pytest.approx(run.requests.ttft_s.to_numpy(), nan_ok=True)
    for name in ("requests", "stages", "tokens", "server", "percentiles"):
        written = pd.read_parquet(tmp_path / "out" / f"{name}.parquet")
        assert list(written) == list(pd.read_csv(tmp_path / "out" / f"{name}.csv"))
    (tmp_path / "out" / "requests.csv").write_text("mine")
    command("export --csv", path, "-o", tmp_path / "out", status=2)
    assert "requests.csv exists: --overwrite replaces it" in capsys.readouterr().err
    assert (tmp_path / "out" / "requests.csv").read_text() == "mine"
    for other in (path, tmp_path / "out"):  # a run directory's own records are never replaced
        (other / "run.json").touch()
        command("export --parquet --overwrite", path, "-o", other, status=2)
        assert "is a run directory" in capsys.readouterr().err
    (tmp_path / "out" / "run.json").unlink()
    command("export --csv --overwrite", path, "-o", tmp_path / "out")
    assert (tmp_path / "out" / "requests.csv").read_text() != "mine"


def test_a_histogram_file_is_what_plotters_read(
    run: public.Run, path: Path, tmp_path: Path, command: Command
) -> None:
    command("export --hgrm", path, "-o", tmp_path)
    text = (tmp_path / "stage-1-itl_s.hgrm").read_text()
    # the patterns of hdr-plot, and of HdrHistogram's own plotFiles.html
    lines = re.findall(r"^\s+([0-9.]+)\s+([0-9.]+)\s+([0-9.]+)\s+([0-9.]+)$", text, re.M)
    mean, deviation = re.findall(r"#\[Mean\s+=\s+([0-9.]+),\s+StdDeviation\s+=\s+([0-9.]+)", text)[
        0
    ]
    _, count = re.findall(r"#\[Max\s+=\s+([0-9.]+),\s+Total count\s+=\s+([0-9.]+)", text)[0]
    gaps = run.tokens.query("stage == 1").dropna()
    tokens = gaps.tokens.to_numpy(dtype=int)
    each_ms = np.repeat(1e3 * gaps.gap_s.to_numpy() / tokens, tokens)
    assert int(count) == len(each_ms) == 4 * 3200
    assert float(mean) == pytest.approx(each_ms.mean(), rel=0.002)
    assert float(deviation) == pytest.approx(each_ms.std(), rel=0.002)
    for ms, share, upto, _ in lines[1:]:
        assert int(upto) >= float(share) * int(count) - 1
        below = np.quantile(each_ms, int(upto) / int(count), method="inverted_cdf")
        assert float(ms) == pytest.approx(below, rel=0.002, abs=0.002)  # three digits of it


def test_importing_is_light_and_a_wrong_path_is_one_line(tmp_path: Path) -> None:
    code = (
        "import sys, time; began = time.process_time(); import ampacity; "
        "took = time.process_time() - began; "
        "assert took < 0.05, took; assert not {'numpy', 'pandas', 'typer'} & set(sys.modules); "
        "assert 'sweep' in dir(ampacity)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    (tmp_path / "file").touch()
    wrong: dict[object, str] = {tmp_path: "it has no run.json", 3: "3 is no run directory"}
    wrong |= {tmp_path / "x": "it is missing", tmp_path / "file": "it is a file"}
    for path, why in wrong.items():
        for call in (public.load, public.compare):
            with pytest.raises(RunDirError, match=why):
                call(path)
    with pytest.raises(CompareError, match="give two run directories or more"):
        public.compare()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = public.nothing
