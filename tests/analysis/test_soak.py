"""A soak: its verdict over all windows, and what changed over the hours."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ampacity.analysis.contract.soak import Soak, SoakChange
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.contract.summary import read_summary
from ampacity.analysis.next_run import budgets_times
from ampacity.analysis.slo import parse_slo
from ampacity.analysis.soak.change_point import find_change
from ampacity.analysis.soak.sentence import change_text, changes, clock, soak_command
from ampacity.analysis.soak.summarise import join_windows, soak_of
from ampacity.analysis.summary import summarise
from ampacity.reports.pages.soak import _changed, soak_answers, soak_table
from tests.support import sample_summary, synthetic

SLO = "ttft_p99=2s"
WINDOW_S = 600.0
LATENCIES = ("ttft_from_schedule_s", "itl_s", "e2e_from_schedule_s")
WINDOW = msgspec.convert(sample_summary.stage(0, 5.0, 0.2, 10.0, n=3000), Stage)


def window(index: int, rng: np.random.Generator, tail: float = 1.0, **changes: Any) -> Stage:
    """One window whose figures scatter as those of 3,000 requests: 3 % a median, 10 % a p99."""
    found: dict[str, Any] = {"index": index, **changes}
    for name in LATENCIES:
        held = getattr(WINDOW, name)
        scatter = np.exp(rng.normal(size=3) * (0.03, 0.06, 0.1))
        drawn = {
            p: getattr(held, p) * s * tail
            for p, s in zip(("p50", "p95", "p99"), scatter, strict=True)
        }
        found[name] = msgspec.structs.replace(held, **drawn)
    found["carried_rps"] = 5 * (1 + 0.018 * rng.normal())
    return msgspec.structs.replace(WINDOW, **found)


def soak(stages: list[Stage], **audit: list[float]) -> Soak:
    """The soak of these windows; ``audit``: figures of the client in each."""
    metas = [
        {
            "index": i,
            "from_s": i * WINDOW_S,
            "start_ns": 0,
            "end_ns": int(WINDOW_S * 1e9),
            "audit": {name: values[i] for name, values in audit.items()},
        }
        for i in range(len(stages))
    ]
    planned = {"rate_rps": 5.0, "duration_s": 48 * WINDOW_S, "window_s": WINDOW_S}
    return soak_of({"soak": planned, "stages": metas}, stages, [parse_slo(SLO)])


def changed(found: Soak) -> dict[str, SoakChange]:
    return {c.name: c for c in found.changes if c.verdict in ("step", "drift")}


def test_a_change_is_found_where_it_is() -> None:
    """12 values below 12 others: the rank sum is as far from its mean as it can be, and of 9,999
    random orders none is as far."""
    ups_and_downs = [0.0, 0.2, 0.1] * 4
    found = find_change([*ups_and_downs, *(5 + v for v in ups_and_downs)])
    assert (found.first, found.p, found.ends) == (12, 1e-4, None)
    assert found.step == pytest.approx((0.1, 5.1))
    line = find_change(list(range(24)))
    assert line.ends == pytest.approx((0, 23))
    assert find_change([3.0] * 24).p == 1.0
    assert find_change([1.0] * 23 + [50.0]).p > 0.05  # one bad window is no change


def test_of_healthy_soaks_at_most_5_per_cent_show_any_change() -> None:
    """48 windows, 12 figures each, 200 soaks: more than 17 false ones have a chance of 1 %."""
    rng = np.random.default_rng(4)
    false = 0
    for _ in range(200):
        lag, cpu = (rng.lognormal(0, 0.3, 48).tolist() for _ in range(2))
        memory = (1e8 + 1e5 * rng.normal(size=48)).tolist()
        stages = [window(i, rng) for i in range(48)]
        found = soak(stages, loop_lag_p99_s=lag, cpu_fraction=cpu, rss_bytes=memory)
        false += bool(changed(found))
    assert false <= 17


def test_a_step_of_25_per_cent_and_a_drift_are_found_and_when() -> None:
    """A p99 scatters by 10 % from window to window, a median by 3 %."""
    rng = np.random.default_rng(5)
    seen, where = 0, []
    for _ in range(20):
        tail = [1.0] * 19 + [1.25] * 29
        found = changed(soak([window(i, rng, tail[i]) for i in range(48)]))
        seen += {"TTFT p50", "TTFT p95", "TTFT p99", "E2E p50", "ITL p99"} <= found.keys()
        where += [found[name].window for name in ("TTFT p50", "TTFT p95") if name in found]
    assert seen >= 18
    assert np.mean([abs((w or 0) - 19) <= 1 for w in where]) >= 0.9
    found = changed(soak([window(i, rng, 1 + 0.25 * i / 47) for i in range(48)]))
    assert found["TTFT p50"].verdict == "drift"
    assert found["TTFT p50"].before == pytest.approx(0.2, rel=0.05)
    assert found["TTFT p50"].after == pytest.approx(0.25, rel=0.05)


def test_memory_and_errors_that_grow_are_named_in_words() -> None:
    rng = np.random.default_rng(6)
    failing = sample_summary.errors(timeout=60)
    stages = [window(i, rng, **({"errors": failing} if i >= 19 else {})) for i in range(48)]
    found = changed(soak(stages, rss_bytes=[1e8 + 1e6 * i for i in range(48)]))
    assert found.keys() == {"errors: timeout", "client memory"}
    assert change_text(found["errors: timeout"]) == "since 03:10 (window 19) from 0 % to 2 %"
    assert change_text(found["client memory"]) == "drifts from 100 MB to 147 MB"
    assert clock(75) == "00:01:15"


def test_too_few_windows_and_windows_of_a_busy_client_show_nothing() -> None:
    rng = np.random.default_rng(7)
    few = soak([window(i, rng, 1 + i) for i in range(29)])
    assert {c.verdict for c in few.changes} == {"inconclusive"}
    assert few.changes[0].reason == "needs 30 windows, 29 of 29 count"
    busy = [window(i, rng, client_limited=True) for i in range(3)]
    assert (soak(busy).verdict, soak(busy).client_limited_windows) == ("inconclusive", [0, 1, 2])


def test_what_changed_at_the_server_comes_before_the_clients_own_figures() -> None:
    rng = np.random.default_rng(10)
    growing = [1e8 + 1e6 * i for i in range(48)]
    healthy = soak([window(i, rng) for i in range(48)], rss_bytes=growing)
    assert [c.name for c in changes(healthy)] == ["client memory"]
    assert _changed(healthy).text == "nothing of the server"
    failing = sample_summary.errors(timeout=60)
    ill = soak([window(i, rng, errors=failing if i > 19 else {}) for i in range(48)])
    both = msgspec.structs.replace(ill, changes=[*healthy.changes, *ill.changes])
    assert [c.name for c in changes(both)] == ["errors: timeout", "client memory"]
    assert _changed(both).aside.startswith("errors: timeout since 03:20 (window 20)")


@pytest.mark.parametrize(
    ("busy", "expected"),
    [
        (0, "--duration 3m --window 5s"),  # 33 windows: 5.45 s each, whole seconds
        (35, "--duration 8m --window 3.75s"),  # 33 of 13/48 of them: 122 windows, 457 s
        (47, "--duration 11m --window 3.75s"),  # at most five times as many: 165, 619 s
    ],
)
def test_a_soak_with_too_few_windows_is_repeated_as_long_as_it_takes(
    busy: int, expected: str
) -> None:
    """A longer soak, not shorter windows, where this machine was the limit in many of them."""
    rng = np.random.default_rng(11)
    few = soak([window(i, rng, client_limited=i < busy) for i in range(48 if busy else 29)])
    few = msgspec.structs.replace(few, planned_s=180.0, window_s=3.75)
    whole = read_summary(sample_summary.open_sweep() | {"partial": None})
    summary = msgspec.structs.replace(whole, soak=few)
    command = "ampacity soak http://h/v1 --rps 20".split()
    assert (
        soak_command(summary, {"command_line": command}, "x") == f"{' '.join(command)} {expected}"
    )


def test_a_longer_soak_has_a_budget_for_it() -> None:
    """That ended one of 90 s; what is advised takes 3 min."""
    few = soak([window(i, np.random.default_rng(11)) for i in range(29)])
    few = msgspec.structs.replace(few, planned_s=180.0, window_s=3.75, duration_s=90.0)
    whole = read_summary(sample_summary.open_sweep() | {"partial": None})
    command = "ampacity soak u --rps 20 --max-requests 150 --max-cost=0.02".split()
    told = soak_command(msgspec.structs.replace(whole, soak=few), {"command_line": command}, "x")
    assert told is not None
    assert told.endswith(" --duration 3m --window 5s --max-cost 0.04 --max-requests 300")
    assert budgets_times(command, 2.53) == {"--max-requests": "380", "--max-cost": "0.051"}


@pytest.mark.parametrize(
    ("missed", "word"),
    [
        ([0.0] * 24, "met"),
        ([0.03] * 24, "violated"),  # 3 % of 72,000, 1 % may
        ([0.0101] * 24, "inconclusive"),
        ([0.0] * 23 + [0.2], "inconclusive"),  # one bad window: 0.83 % of all, but one cluster
        ([0.0] * 12 + [0.04] * 12, "violated"),
    ],
)
def test_an_slo_is_judged_over_all_windows(missed: list[float], word: str) -> None:
    rng = np.random.default_rng(8)
    verdicts = [
        msgspec.convert(
            sample_summary.verdict(SLO, "inconclusive", 1.0, 1 - share, 3000), type(one)
        )
        for share in missed
        for one in WINDOW.slo_verdicts[:1]
    ]
    stages = [window(i, rng, slo_verdicts=[v]) for i, v in enumerate(verdicts)]
    found = soak(stages)
    assert found.verdict == word
    assert found.slo_verdicts[0].attainment == pytest.approx(1 - np.mean(missed))


@pytest.mark.parametrize(
    ("undecided", "word", "why"),
    [
        (0.0, "violated", "3 % missed it, 1 % may"),  # 2,160 of 72,000
        (0.03, "inconclusive", "0 % missed it, 1 % may; 3 % were cut off, or gave no token"),
        (0.01, "violated", "2 % missed it, 1 % may; 1 % were cut off, or gave no token"),
    ],
)
def test_requests_cut_off_before_the_limit_are_no_misses(
    undecided: float, word: str, why: str
) -> None:
    """Of 24 windows 97 % of the requests met the limit, and ``undecided`` were cut off before it."""
    rng = np.random.default_rng(8)
    known = {**sample_summary.verdict(SLO, "inconclusive", 1.0, 0.97, 3000), "undecided": undecided}
    verdict = msgspec.convert(known, type(WINDOW.slo_verdicts[0]))
    (found,) = soak([window(i, rng, slo_verdicts=[verdict]) for i in range(24)]).slo_verdicts
    assert (found.verdict, found.undecided) == (word, pytest.approx(undecided))
    assert str(found.reason).startswith(why)


def test_the_percentiles_of_a_metric_are_those_of_the_same_windows() -> None:
    """Five slow windows have no p95: the median over all ten, 300 ms, would be above the p95."""
    rng = np.random.default_rng(8)
    held = [(0.5, None)] * 5 + [(0.1, 0.2)] * 5
    ttft = [
        msgspec.structs.replace(WINDOW.ttft_from_schedule_s, p50=p50, p95=p95, p99=None)
        for p50, p95 in held
    ]
    stages = [
        msgspec.structs.replace(window(i, rng), ttft_from_schedule_s=of)
        for i, of in enumerate(ttft)
    ]
    found = {c.name: c.before for c in soak(stages).changes}
    assert (found["TTFT p50"], found["TTFT p95"]) == (0.1, 0.2)
    assert "TTFT p99" not in found


def test_a_soak_says_how_long_it_was_and_which_windows_were_cut() -> None:
    """Killed 9.4 s into its third window of 20 s, resumed, and killed 2.5 s into the fifth piece."""
    rng = np.random.default_rng(8)
    ended = msgspec.structs.replace(WINDOW.window, end_s=2.5)
    stages = [*(window(i, rng) for i in range(4)), window(4, rng, window=ended)]
    played = soak(stages)
    assert played.duration_s == 4 * WINDOW_S + 2.5
    cut = msgspec.structs.replace(played, window_s=20.0, begin_s=[0, 20, 40, 49.4, 60])
    whole = read_summary(sample_summary.open_sweep() | {"partial": None})
    shown = soak_answers(msgspec.structs.replace(whole, soak=cut))[2]
    assert str(shown.aside).endswith("5 windows of up to 20s (1 cut in two)")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("M", "M-v2"), "3 of 6 answers are, by their own account, not from the model"),
        (("M-v1", "M-v2"), "6 of 6 answers"),  # neither is the model that was asked for
        (("M-v1", "M-v1"), ""),  # an alias
        (("M", "a cache"), "3 of 6 answers"),
        ((None, "M"), ""),
    ],
)
def test_another_model_from_some_window_on_is_said(
    names: tuple[str | None, str | None], said: str, tmp_path: Path
) -> None:
    """Within a window it would be an alias."""
    runs = []
    for i, name in enumerate(names):
        rows = [synthetic.request(k, k / 2, answered_by=name) for k in range(3)]
        runs.append(synthetic.make_run(tmp_path / str(i), [synthetic.Stage(rows, 2.0)]))
    parts = [summarise(run) for run in runs]
    runs[0].meta["soak"] = {"rate_rps": 2.0, "duration_s": 4.0, "window_s": 2.0}
    runs[0].meta["stages"] *= 2
    whole = join_windows(parts, runs[0])
    found = [w.text for w in whole.warnings if w.code == "strangers"]
    assert [text.startswith(said) for text in found] == ([True] if said else [])
    assert whole.verdict.startswith("Not the load that was planned") == bool(said)


def test_why_nothing_is_known_is_said_once() -> None:
    rng = np.random.default_rng(5)
    few, enough = (soak([window(i, rng) for i in range(n)]) for n in (4, 40))
    told = _changed(few)
    assert (told.text, told.aside[:26]) == ("not known", "needs 30 windows, 4 of 4 c")
    assert {row[-1].text for row in soak_table(few).rows} == {"inconclusive"}
    assert "no change" in {row[-1].text for row in soak_table(enough).rows}
