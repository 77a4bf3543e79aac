"""``ampacity compare``: what makes runs comparable, what takes no part, what is no evidence, the
example of the docs.
"""

import asyncio
import io
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import typer
from rich.console import Console

from ampacity.analysis.change.comparable import by_option, differences
from ampacity.analysis.change.judged import CompareError, carried, prepare
from ampacity.analysis.change.results import Comparison, Setting
from ampacity.analysis.compare.findings import RUNS_NOT_SYSTEMS, VIRTUAL
from ampacity.analysis.compare.pairs import ComparedRun
from ampacity.analysis.compare.scorecard import compare
from ampacity.cli.judge.compare import show
from ampacity.cli.measure.search import make_search
from ampacity.config import make_settings
from ampacity.experiments.virtual.predict import predict
from ampacity.loadgen.rundir.files import load_run
from ampacity.progress import Progress
from ampacity.reports.change.compare import comparison_markdown, comparison_screen
from ampacity.simulator.models.hardware import find_config
from tests.support.compared_runs import RATE, arm, later, quantiles, rows, stage, ttfts
from tests.support.contract import on_stages
from tests.support.synthetic import Stage, make_run, request


@pytest.mark.parametrize(
    ("variable", "said", "change"),
    [
        (
            "workload.name",
            "--workload: A synthetic; B other",
            {"workload": {"name": "other", "arrivals": "poisson", "prompts": "unique"}},
        ),
        (
            "workload.output_tokens.text",
            "--output-tokens: A not given; B 64",
            json.loads("""{"workload": {"name": "synthetic", "arrivals": "poisson",
                "prompts": "unique", "output_tokens": {"text": "64"}}}"""),
        ),
        (
            "workload.tokenizer.name",
            "--tokenizer: A not given; B server",
            json.loads("""{"workload": {"name": "synthetic", "arrivals": "poisson",
                "prompts": "unique", "tokenizer": {"name": "server"}}}"""),
        ),
        ("model", "--model: A M; B N", {"endpoint": {"api": "chat", "model": "N"}}),
        ("api", "--api: A chat; B completions", {"endpoint": {"api": "completions", "model": "M"}}),
        (
            "client.connections",
            "--connections: A not given; B new",
            {"locked": {"connections": "new"}},
        ),
        (
            "client.timestamps",
            "--timestamps: A not given; B kernel",
            {"locked": {"timestamps": "kernel"}},
        ),
        ("client.think_s", "--think-time: A not given; B 1", {"locked": {"think_s": 1.0}}),
        (
            "extra_body.max_tokens",
            "--extra-body max_tokens: A not given; B 64",
            {"locked": {"extra_body": {"max_tokens": 64}}},
        ),
        (
            "workload.contents.trace",
            "contents of --trace: A 9c56; B 3f2a",
            {
                "workload": {
                    **{"name": "synthetic", "arrivals": "poisson", "prompts": "unique"},
                    "contents": {"trace": "3f2a"},
                }
            },
        ),
        ("predicted", "predicted: A no; B yes", {"predicted": True}),
    ],
)
def test_what_differs_is_named_and_nothing_is_compared(
    tmp_path: Path, ampacity: Any, capsys: Any, variable: str, said: str, change: dict[str, Any]
) -> None:
    trace = {"contents": {"trace": "9c56"}} if variable == "workload.contents.trace" else {}
    load = {"name": "synthetic", "arrivals": "poisson", "prompts": "unique", **trace}
    a = make_run(tmp_path / "a", [stage(ttfts(1, 200))], run_id="a", workload=load)
    b = make_run(tmp_path / "b", [stage(ttfts(1, 200))], run_id="b", **change)
    assert ampacity("compare", tmp_path / "a", tmp_path / "b") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    first, second, *hint, last = printed.err.splitlines()
    assert first.endswith(f"not comparable, they differ in {said.partition(':')[0]}")
    assert second == f"  {said}"
    assert ("ampacity simulate --model M" in "".join(hint)) == bool(hint) == (variable == "model")
    again = ["compare", tmp_path / "a", tmp_path / "b", "--force"]
    assert last == f"NEXT      ampacity {shlex.join(map(str, again))}"
    assert [row.variable for row in differences([prepare(a), prepare(b)])] == [variable]
    if variable == "model":
        assert ampacity(*again, "--json") == 0
        listed = json.loads(capsys.readouterr().out)["differences"]
        assert [row["variable"] for row in listed] == [variable]


def unlike(*runs: ComparedRun) -> list[Setting]:
    return differences([run.judged for run in runs])


def test_slos_lengths_and_cache_that_differ_are_named(tmp_path: Path) -> None:
    def changed(path: Path, slos: Sequence[str] = ("ttft_p99=1s",), **columns: Any) -> ComparedRun:
        records = [
            request(i, i / RATE, ttft_s=0.1, gaps_s=[0.01] * 4, **columns) for i in range(200)
        ]
        return arm(path, Stage(records, 10.0, offered_rps=RATE), slos)

    a = changed(tmp_path / "a", cached_tokens=0)
    for name, other in (
        ("slos", changed(tmp_path / "b", ["ttft_p99=2s"], cached_tokens=0)),
        ("realised.input_tokens", changed(tmp_path / "c", input_tokens=120, cached_tokens=0)),
        ("realised.output_tokens", changed(tmp_path / "d", output_tokens=7, cached_tokens=0)),
        ("realised.cached_token_share", changed(tmp_path / "e", cached_tokens=50)),
    ):
        assert [row.variable for row in unlike(a, other)] == [name]
    # 5 % longer, 2 points of cache
    close = changed(tmp_path / "f", input_tokens=105, cached_tokens=2)
    assert unlike(a, close) == []


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (
            {"gaps_s": [0.01], "output_tokens_planned": 5},
            "B's answers are 60% shorter",
        ),
        (
            {"gaps_s": [0.01] * 7, "output_tokens_planned": 5},
            "B's answers are 60% longer",
        ),
        ({"input_tokens": 30}, "B's prompts are 70% shorter"),
        ({"answered_by": "tiny"}, "model by the answers' own account: A m, B tiny"),
        ({"answered_by": None}, ""),  # not known
        ({}, ""),
    ],
)
def test_nobody_wins_who_did_other_work(odd: dict[str, Any], said: str, tmp_path: Path) -> None:
    """A/B pairs are compared whatever they sent; B is three times as fast."""
    usual: dict[str, Any] = {"gaps_s": [0.01] * 4, "answered_by": "m"}
    made = []
    for name, more, scale in (("A", {}, 1.0), ("B", odd, 0.3)):
        records = [
            request(i, i / RATE, ttft_s=float(t), **usual | more)
            for i, t in enumerate(ttfts(1, 400, scale))
        ]
        made.append(arm(tmp_path / name, Stage(records, 20.0, offered_rps=RATE)))
    result = compare(made)
    screen = comparison_screen(result)
    assert screen.table is not None
    won = {row[0].text for row in screen.table.rows} | {line.winner for line in result.scorecard}
    figures = {row[1].text: row[2].text for row in screen.table.rows}
    assert figures["TTFT p99"] != "–"
    if said:
        assert result.sentence == f"Not comparable: {said}."
        assert screen.answers[0].text == f"NOT COMPARABLE: {said}"
        assert "B" not in won
    else:
        assert "B is faster than A" in result.sentence
        assert (screen.answers[0].label, screen.answers[0].text) == ("WINNER", "B")
    status = 0
    try:
        show(msgspec.structs.replace(result, interleaved_pairs=2), None, None, None, as_json=True)
    except typer.Exit as ended:
        status = ended.exit_code
    assert status == (3 if said else 0)


def test_what_was_counted_or_is_the_engines_name_makes_no_other_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two presets in virtual time, over other loads: the context cuts more of the longer run, and
    texts are sent more often."""
    made: list[ComparedRun] = []
    find: dict[str, Any] = {"drive": make_search("50%", None, 0, False).run, "experiment": "search"}
    for name, step, how, rates in (
        ("a", "0.010", {}, "5,10"),
        ("b", "0.012", {}, "5,10,40"),
        ("c", "0.010", find, None),
        ("d", "0.020", find, None),
    ):
        settings = make_settings(
            {
                "url": "http://a/v1",
                "input_tokens": "lognormal:p50=100,p99=500",
                "output_tokens": "2",
                "duration": "20s",
                "slo": ["ttft_p50=200ms"],
                "max_requests": "600",
                "out": str(tmp_path / name),
                **({"rates": rates} if rates else {}),
            }
        )
        engine = replace(find_config(f"linear:{step},0.001"), max_model_len=300)
        quiet = Progress(Console(file=io.StringIO()))
        monkeypatch.setattr("ampacity.experiments.virtual.player.REQUESTS_MIN", 60)
        run = load_run(asyncio.run(predict(settings, engine, ["ampacity"], quiet, **how)))
        run.meta["workload"]["prompts"] = (
            f"9 from a.jsonl, each sent {1.5 + len(made)} times in the largest stage"
        )
        made.append(ComparedRun(name, prepare(run, limited_too=True), 1, None))
    for one, other in (made[:2], made[2:]):
        cut = [a.judged.run.meta["workload"]["clipped_to_context"] for a in (one, other)]
        assert cut[0] != cut[1]
        assert (
            one.judged.run.meta["endpoint"]["model"] != other.judged.run.meta["endpoint"]["model"]
        )
        assert unlike(one, other) == []
        sentence = compare([one, other]).sentence
        assert sentence.count("a is better in ") <= 1  # with all that it won
        assert ", req/s" not in sentence


def test_another_tools_definitions_are_listed_beside_ours(tmp_path: Path) -> None:
    """Known fault: two tools give very different TTFT for one server and nobody can say why."""
    told = json.loads("""{"tool": "X", "definitions": [{"what": "TTFT",
        "theirs": "first chunk, role or not", "ours": "first token"}]}""")
    a = arm(tmp_path / "a", stage(ttfts(1, 200)))
    b = arm(tmp_path / "b", stage(ttfts(1, 200)), imported=told)
    row = Setting("definition of TTFT", ["first token", "first chunk, role or not"])
    assert row in unlike(a, b)
    assert unlike(b, arm(tmp_path / "c", stage(ttfts(1, 200)), imported=told)) == []


def test_several_differences_are_listed_each(tmp_path: Path, ampacity: Any, capsys: Any) -> None:
    make_run(tmp_path / "a", [stage(ttfts(1, 200))], run_id="a")
    make_run(
        tmp_path / "b",
        [stage(ttfts(1, 200))],
        run_id="b",
        endpoint={"api": "chat", "model": "N"},
        locked={"timestamps": "kernel"},
    )
    assert ampacity("compare", tmp_path / "a", tmp_path / "b") == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("they differ in --model, --timestamps")
    assert lines[1:3] == ["  --model: A M; B N", "  --timestamps: A not given; B kernel"]


def test_fields_of_one_option_are_one_difference_and_values_that_read_alike_are_told_apart() -> (
    None
):
    settings = [
        Setting("workload.input_tokens.mean", [100.0, 120.0]),
        Setting("workload.input_tokens.text", ["fixed at 100", "fixed at 120"]),
        Setting("slos", [["ttft_p99=1s", "itl_p99=50ms"], []]),
        Setting("extra_body.n", [1, "1"]),
        Setting("modelled", [None, True]),
        Setting("workload.images.count", [1, 2.5]),
        Setting("workload.trace.notes", [["units", "cut to 5 s"], ["units", "cut from 5 s", "x"]]),
        Setting("workload.order", [["a", "b"], ["b", "a"]]),  # the same items
    ]
    assert by_option(settings) == json.loads(r"""{"--extra-body n": ["1", "\"1\""],
        "--input-tokens": ["fixed at 100", "fixed at 120"],
        "--slo": ["ttft_p99=1s, itl_p99=50ms", "none"], "modelled": ["not given", "yes"],
        "workload: images.count": ["1", "2.5"],
        "--trace": ["cut to 5 s", "cut from 5 s, x"],
        "workload: order": ["[\"a\", \"b\"]", "[\"b\", \"a\"]"]}""")


def test_stages_that_the_client_limited_are_left_out_and_said(tmp_path: Path) -> None:
    slow = stage(ttfts(1, 400, 3.0), 40.0, client_limited=True, start_s=100.0)
    for r in slow.records:
        r.request_id += 1000
    a = arm(tmp_path / "a", [stage(ttfts(1)), slow])
    b = arm(tmp_path / "b", stage(ttfts(1)))
    assert unlike(a, b) == []  # what is left of them can be compared
    result = compare([a, b])
    assert result.level == "20/s"
    assert len(result.curves[0].stages) == 1
    left_out = "A: 1 stage is left out, the client was the limit in it (index 1)."
    assert result.notes == [left_out, RUNS_NOT_SYSTEMS]
    c = arm(tmp_path / "c", [stage(ttfts(1)), later(stage(ttfts(1, 1500), 60.0), 100.0, 1000)])
    offered = rows(compare([a, c]))["output_tokens_per_s_per_gpu"]
    # at 20/s and at 60/s, five tokens each
    assert offered.values == pytest.approx([100, 300], rel=0.02)
    assert offered.winner is None  # nobody knows what A would do at 60/s
    assert "not what it can carry" in offered.reason


@pytest.mark.parametrize(
    ("stable", "settled", "slo_met", "cut_off", "steady"),
    [
        (True, False, False, 401, True),
        (False, True, True, 0, False),
        (None, True, None, 6, True),
        (None, True, None, 7, False),  # of 608: 0.99 % and 1.15 %
        (None, True, False, 0, False),
        (None, False, None, 0, False),
        (None, False, False, 401, False),
    ],
)
def test_where_no_steady_state_can_be_told_nothing_may_show_overload(
    stable: bool | None, settled: bool, slo_met: bool | None, cut_off: int, steady: bool
) -> None:
    made = {"stable": stable, "window": {"settled": settled}, "slo_met": slo_met, "requests": 608}
    assert on_stages(carried)(made | {"errors": {"unfinished": cut_off}}) is steady


def test_latencies_are_compared_at_the_highest_load_that_every_run_carries(tmp_path: Path) -> None:
    """At 40/s each answer of B takes 8 of the 10 s: filling up and overload look the same, and its
    TTFT of 7.96 s violates the SLO."""

    def made(name: str, at_40: Any, *, both: bool) -> ComparedRun:
        high = later(stage(at_40, 40.0), 100.0, 1000)
        return arm(tmp_path / name, [stage(ttfts(1)), high] if both else high, ["ttft_p90=500ms"])

    a, b = made("a", ttfts(1, 400), both=True), made("b", np.full(400, 7.96), both=True)
    over = b.judged.summary.stages[1]
    assert (over.stable, over.slo_met) == (None, False)
    result = compare([a, b])
    assert result.level == "20/s"
    assert "slower" not in result.sentence
    assert {q.verdict for t in result.shift for q in t.quantiles} <= {"equal", "inconclusive"}
    assert quantiles(result, "ttft")[0.5].verdict == "equal"
    alone = compare(
        [made("c", ttfts(1, 400), both=False), made("d", np.full(400, 7.96), both=False)]
    )
    assert alone.level is None
    assert "no load level that every run has, steady and with 100 requests" in alone.notes[-1]


def test_stages_of_other_lengths_take_no_part_and_that_is_said(tmp_path: Path) -> None:
    """B's p99 lengths take ten times as long, at the same load: nothing of it may touch the
    comparison."""
    slow = stage(ttfts(1, 400, 10.0), start_s=100.0, extra={"lengths": "p99"})
    for r in slow.records:
        r.request_id += 1000
    a, plain = arm(tmp_path / "a", stage(ttfts(1))), arm(tmp_path / "b", stage(ttfts(1)))
    result = compare([a, arm(tmp_path / "c", [stage(ttfts(1)), slow])])
    assert result.shift[0].quantiles == compare([a, plain]).shift[0].quantiles
    note, _ = result.notes
    assert note.startswith("C: its stages at other lengths (--lengths p99) are left out")
    assert result.runs[1].other_lengths == ["p99"]
    assert "other lengths" in comparison_markdown(result)


def test_runs_of_one_class_are_compared_as_those_of_none(tmp_path: Path) -> None:
    records = [
        request(i, i / RATE, ttft_s=float(t), gaps_s=[0.01] * 4, class_="chat")
        for i, t in enumerate(ttfts(1))
    ]
    made = [
        arm(tmp_path / n, Stage(records, 50.0, offered_rps=RATE), ["ttft_p99=1s"]) for n in "ab"
    ]
    plain = [arm(tmp_path / n, stage(ttfts(1)), ["ttft_p99=1s"]) for n in "cd"]
    of_class, of_none = compare(made), compare(plain)
    assert [t.quantiles for t in of_class.shift] == [t.quantiles for t in of_none.shift]
    assert [r.values for r in of_class.scorecard] == [r.values for r in of_none.scorecard]


def broken(path: Path, how: str) -> Path:
    make_run(path, [stage(ttfts(1, 200))], run_id="b", killed=how == "killed")
    meta = json.loads((path / "run.json").read_text())
    parquet = path / "requests.parquet"
    if how == "truncated":
        parquet.write_bytes(parquet.read_bytes()[:3000])
    elif how == "tampered":
        meta["stages"][0]["scheduled_requests"] = 300
    elif how == "newer":
        meta["schema_version"] = 9
    elif how == "empty":
        meta["stages"] = []
    elif how == "aborted":
        meta["status"] = "aborted"
    elif how == "no run":
        return path / "nothing"
    (path / "run.json").write_text(json.dumps(meta))
    return path


def test_a_run_that_is_still_going_on_is_refused_as_such(tmp_path: Path) -> None:
    run = replace(make_run(tmp_path / "a", [stage(ttfts(1, 200))], killed=True), going_s=4.2)
    with pytest.raises(
        CompareError, match="is still running, last written 4 s ago: wait for its end"
    ):
        prepare(run)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("truncated", "requests.parquet cannot be read"),
        ("tampered", "200 of 300"),
        ("newer", "schema_version 9"),
        ("empty", "is empty"),
        ("aborted", "is aborted"),
        ("killed", "was killed"),
        ("no run", "no run directory"),
    ],
)
def test_a_run_that_is_no_evidence_is_one_clear_line(
    tmp_path: Path, ampacity: Any, capsys: Any, how: str, says: str
) -> None:
    make_run(tmp_path / "a", [stage(ttfts(1, 200))], run_id="a")
    assert ampacity("compare", tmp_path / "a", broken(tmp_path / "b", how), "--force") == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tp", "C=2"], "--tp C=2"),
        (["--tp", "B=x"], "--tp B=x"),
        (["--gpu-hour", "0"], "--gpu-hour 0"),
        (["--labels", "A=none.jsonl"], "none.jsonl"),
        (["--html", "no/such/dir.html"], "cannot be written"),
    ],
)
def test_options_that_mean_nothing_are_one_clear_line(
    tmp_path: Path, ampacity: Any, capsys: Any, options: list[str], says: str
) -> None:
    for name in "ab":
        make_run(tmp_path / name, [stage(ttfts(1, 200))], run_id=name)
    assert ampacity("compare", tmp_path / "a", tmp_path / "b", *options) == 2
    assert says in capsys.readouterr().err


def test_one_run_or_a_run_twice_is_refused(tmp_path: Path, ampacity: Any, capsys: Any) -> None:
    make_run(tmp_path / "a", [stage(ttfts(1, 200))])
    assert ampacity("compare", tmp_path / "a") == 2
    assert ampacity("compare", tmp_path / "a", tmp_path / "a") == 2
    assert "given twice" in capsys.readouterr().err
    with pytest.raises(CompareError, match="two run directories"):
        compare([arm(tmp_path / "x", stage(ttfts(1, 200)))])


def test_the_worked_example_of_the_docs_says_what_the_docs_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ampacity: Any, capsys: Any
) -> None:
    text = (Path(__file__).parents[3] / "docs/compare.md").read_text()
    first, *commands = re.findall(r"^```sh\n(.*?)^```", text, re.S | re.M)[0].splitlines()
    monkeypatch.chdir(tmp_path)
    for command in [*commands, "ampacity compare runs/a runs/b --json"]:
        capsys.readouterr()
        program, *words = shlex.split(
            command.replace("$common", shlex.split(first)[0].removeprefix("common="))
        )
        assert program == "ampacity"
        assert ampacity(*words) == 0
    result = msgspec.json.decode(capsys.readouterr().out, type=Comparison)
    assert "A is faster than B in TTFT, ITL, TPOT, E2E at 5/s" in result.sentence
    cost = rows(result)["usd_per_thousand_good_requests"]
    assert cost.winner is None
    assert cost.changes[1].change == pytest.approx(-0.25, abs=0.01)
    for metric in ("itl", "tpot", "e2e"):
        assert 0.04 < quantiles(result, metric)[0.5].change < 0.1
    assert "A is faster" in Path("compare.md").read_text()
    assert "A is faster" in Path("compare.html").read_text()


def test_the_screen_names_the_winner_with_the_rows_of_its_claim(tmp_path: Path) -> None:
    """B's faster 70 % are 20 % slower and its tail is the same; it costs half, at the same load."""
    values = ttfts(1)
    slow = np.where(values < np.quantile(values, 0.7), 1.2 * values, values)
    runs = [
        arm(tmp_path / "a", stage(values), ["ttft_p99=1s"], usd=2.0),
        arm(tmp_path / "b", stage(slow), ["ttft_p99=1s"], usd=1.0),
    ]
    shown = comparison_screen(compare(runs))
    assert shown.answers[0].text == "A"
    assert "A is faster than B in TTFT, E2E" in shown.answers[0].aside
    won = [row[1].text for row in shown.table.rows if row[0].text == "A"]
    assert won == ["TTFT p80", "E2E p80"]
    cost = next(row for row in shown.table.rows if row[1].text == "USD per 1,000 good requests")
    assert cost[0].text == "–"
    labels = [row[1].text for row in shown.table.rows]
    assert "USD per million output tokens at full load" in labels
    assert shown.notes[0].startswith("USD per 1,000 good requests, TTFT p99 in s")
    assert ": no winner: a run's figures at a load that it carried" in shown.notes[0]


def test_where_no_p99_is_known_the_screen_shows_the_highest_quantile_that_is(
    tmp_path: Path,
) -> None:
    """Of 150 requests: a p95 needs 59, a p99 299."""
    runs = [arm(tmp_path / n, stage(ttfts(i, 150))) for i, n in enumerate("ab")]
    table = comparison_screen(compare(runs)).table
    assert table is not None
    figures = [row[1].text for row in table.rows]
    assert [f for f in figures if f.startswith(("TTFT", "E2E"))] == ["TTFT p95", "E2E p95"]


def test_a_difference_between_runs_is_not_claimed_as_one_between_systems(tmp_path: Path) -> None:
    """One run of each: the sentence and a line say what noise is assumed; of predictions, that
    there is none to see."""
    a, slow = arm(tmp_path / "a", stage(ttfts(1))), arm(tmp_path / "b", stage(ttfts(1, scale=1.2)))
    found = compare([a, slow])
    expected = "A is faster than B in TTFT, E2E at 20/s (one run of each: 0.5% of noise from run to run is assumed)."
    assert found.sentence == expected
    assert found.notes == [RUNS_NOT_SYSTEMS]
    assert found.assumed_run_noise == 0.005
    assert "ampacity ab takes turns and measures it" in comparison_markdown(found)
    equal = compare([a, arm(tmp_path / "c", stage(ttfts(1)))])
    assert equal.sentence == "No difference between A and C is shown, latencies at 20/s."
    assert equal.notes == [RUNS_NOT_SYSTEMS]  # "equal" rests on it as well
    slower = arm(tmp_path / "d", stage(ttfts(1, scale=1.4)))
    guess = arm(tmp_path / "e", stage(ttfts(1, scale=1.2)), predicted=True)
    for runs in ([a, slow, slower], [a, guess]):  # three runs; one of them predicted
        found = compare(runs)
        assert found.sentence.endswith(
            "(one run of each: 0.5% of noise from run to run is assumed)."
        )
        assert found.notes == [RUNS_NOT_SYSTEMS]
    both = [
        arm(tmp_path / n, stage(ttfts(1, scale=x)), predicted=True)
        for n, x in (("p", 1.0), ("q", 1.2))
    ]
    found = compare(both)
    assert found.sentence == "P is faster than Q in TTFT, E2E at 20/s."
    assert found.notes == [VIRTUAL]
