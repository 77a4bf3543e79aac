"""What the client itself may have added to a figure is no finding about the server, metric by
metric.
"""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampacity.analysis.contract.summary import read_summary
from ampacity.analysis.stage_warnings import Facts
from ampacity.analysis.warnings import find_warnings
from ampacity.config import make_settings
from ampacity.loadgen.audit import STALLS_MAX, Measures, StageWatch, Tolerance, judge
from ampacity.loadgen.host import busiest, changing_variables, cores_used, cpu_seconds
from ampacity.sleeper import Sleeper
from ampacity.values import ConfigError
from tests.support.contract import summarise
from tests.support.repeats import often
from tests.support.synthetic import ORIGIN_NS, Stage, at_ns, make_run, request

SLOS = ["ttft_p99=2s", "itl_p99=25ms"]
TOKENS = 100
DURATION_S = 60.0


def stalled_stage(
    stall_s: float = 0.05,
    *,
    every_s: float = 1.0,
    told: bool = True,
    by_kernel: bool = True,
    worker: int = 0,
    slip_s: float = 0.0,
    seed: int = 0,
) -> Stage:
    """10 streams/s, a token every 8 to 12 ms. The client stands still for ``stall_s`` in every
    ``every_s``: what comes in it has the date of the stream's last token in it (by the kernel), or
    of its end. ``told``: whether its clock saw that."""
    rng = np.random.default_rng(seed)
    stalls = [
        (0.3 + every_s * k, 0.3 + every_s * k + stall_s) for k in range(int(DURATION_S / every_s))
    ]
    records = []
    for i, t in enumerate(np.sort(rng.uniform(0, DURATION_S - 2, int(10 * DURATION_S))).tolist()):
        at = t + 0.1 + np.concatenate([[0.0], np.cumsum(rng.uniform(0.008, 0.012, TOKENS - 1))])
        for a, b in stalls:
            if b < at[0] or a >= at[-1]:
                continue
            held = np.flatnonzero((at > a) & (at <= b))
            if len(held):
                at[held] = at[held[-1]] if by_kernel else b + 0.0001
        left = t + (slip_s if i % 20 == 0 else 0.0)
        at = np.maximum.accumulate(at) + left - t
        records.append(
            request(
                i,
                t,
                ttft_s=float(at[0] - left),
                gaps_s=np.diff(at),
                start_delay_s=left - t,
                worker=0,
                dispatched_ns=at_ns(left),
            )
        )
    seen = [
        # the loop should have looked at its clock between 0 and 20 ms after it was held up
        (worker, at_ns(a + 0.02 * rng.random()), at_ns(b))
        for a, b in stalls
        if b - a > 0.022
    ]
    stage = Stage(records, DURATION_S, offered_rps=10.0)
    audit = stage.meta(0)["audit"] | {"dated_by_kernel": by_kernel, "stalls": seen if told else []}
    stage.extra = {"audit": audit}
    return stage


def judged(path: Path, stage: Stage, slos: Any = SLOS) -> tuple[dict[str, Any], dict[str, Any]]:
    summary = summarise(make_run(path, [stage], slos, warmup_requests=0))
    return summary, summary["stages"][0]


@pytest.mark.parametrize("by_kernel", [True, False])
def test_a_client_that_stood_still_for_50_ms_in_each_second_is_no_finding(
    tmp_path: Path, by_kernel: bool
) -> None:
    """Some 1 % of the gaps hold such a pause: p99 is at most 12 ms, and comes out at 40."""
    for seed in range(often(2, 5)):
        stage = stalled_stage(by_kernel=by_kernel, seed=seed)
        summary, held = judged(tmp_path / f"{seed}", stage)
        assert held["client_limited"] is True
        assert "itl" in held["client_limited_metrics"]
        assert held["slo_met"] is None
        assert held["itl_s"]["p50"] == pytest.approx(0.01, rel=0.05)
        assert "client_limited" in {w["code"] for w in summary["warnings"]}
        assert summary["capacity"]["capacity_rps"] is None


def test_the_same_pauses_are_the_servers_where_the_client_was_awake(tmp_path: Path) -> None:
    _, held = judged(tmp_path / "run", stalled_stage(told=False))
    assert (held["client_limited"], held["client_limited_metrics"]) == (False, {})
    assert held["itl_s"]["p99"] is not None


def test_a_stall_of_one_worker_excuses_no_other(tmp_path: Path) -> None:
    _, held = judged(tmp_path / "run", stalled_stage(worker=1))
    assert held["client_limited"] is False


def test_a_quiet_client_is_never_the_limit(tmp_path: Path) -> None:
    """Stalls of 3 ms, as any machine has them, and one of 30 ms in a minute; one request in twenty
    leaves 1 ms late."""
    for seed in range(often(4, 10)):
        quiet = stalled_stage(0.003, every_s=0.5, slip_s=0.001, seed=seed)
        rng = np.random.default_rng(seed)
        quiet.extra["audit"]["stalls"] = [
            (0, at_ns(s), at_ns(s + 0.003)) for s in np.sort(rng.uniform(0, 60, 60)).tolist()
        ] + [(0, at_ns(59.0), at_ns(59.03))]
        summary, held = judged(tmp_path / str(seed), quiet)
        assert (held["client_limited"], held["client_limited_metrics"]) == (False, {})
        assert held["slo_verdicts"][1]["verdict"] == "met"
        assert "client_limited" not in {w["code"] for w in summary["warnings"]}


def test_what_no_slo_is_on_is_left_out_and_the_stage_stands(tmp_path: Path) -> None:
    summary, held = judged(tmp_path / "run", stalled_stage(every_s=0.7), ["ttft_p50=2s"])
    assert held["client_limited"] is False
    assert held["itl_s"]["p99"] is None
    assert held["itl_s"]["p99_reason"].startswith("between 1")
    assert held["itl_s"]["p99_ci"] is None
    assert held["slo_verdicts"][0]["verdict"] == "met"
    said = next(w["text"] for w in summary["warnings"] if w["code"] == "client_limited")
    assert said.startswith("The client itself was late at 10 req/s: ")


@pytest.mark.parametrize(
    ("slos", "limited"),
    [(["icl_p99=25ms"], True), (["tpot_p99=25ms"], False), (["e2e_p99=3s"], False), ([], True)],
)
def test_a_stall_spoils_what_is_between_tokens_and_no_mean_over_them(
    slos: list[str], limited: bool, tmp_path: Path
) -> None:
    """50 ms in 0.5 s: the gaps' p99 moves from 12 to 40 ms, TPOT over 100 tokens hardly at all."""
    _, held = judged(tmp_path / "run", stalled_stage(every_s=0.5), slos)
    assert held["client_limited"] is limited
    assert held["icl_s"]["p99"] is None
    assert held["tpot_s"]["p99"] is not None


def test_requests_that_left_late_move_ttft_and_not_the_gaps(tmp_path: Path) -> None:
    """One in twenty leaves 150 ms late, TTFT is 100 ms: p99 is 250 ms from the schedule, and a
    limit of 200 ms is broken by the client."""
    stage = stalled_stage(0.0001, slip_s=0.15)
    _, held = judged(tmp_path / "run", stage, ["ttft_p95=200ms", "itl_p99=25ms"])
    assert held["ttft_from_schedule_s"]["p99"] is None
    expected = "between 100ms and 250ms: the client was late"
    assert held["ttft_from_schedule_s"]["p99_reason"] == expected
    assert held["client_limited"] is True
    assert set(held["client_limited_metrics"]) == {"ttft", "e2e"}  # of 1.1 s it is a tenth, too


def test_an_older_run_has_the_account_that_its_client_gave(tmp_path: Path) -> None:
    stage = stalled_stage()
    del stage.extra["audit"]["stalls"]
    _, held = judged(tmp_path / "run", stage)
    assert held["client_limited"] is False


@pytest.mark.parametrize(
    ("used", "named"),
    [
        ([], ""),
        ([("backup", 0.97), ("cc1", 0.5)], " (backup 0.97 cores, cc1 0.5 cores)"),
        # the three with the most, whatever the order
        (
            [("a", 0.2), ("b", 0.9), ("c", 0.3), ("d", 0.1), ("e", 0.5)],
            " (b 0.9 cores, e 0.5 cores, c 0.3 cores)",
        ),
    ],
)
def test_the_warning_names_what_else_ran_and_what_helps(
    used: list[tuple[str, float]], named: str, tmp_path: Path
) -> None:
    stage = stalled_stage()
    stage.extra["audit"] |= {
        "cpu_fraction": 0.03,
        "busiest": [{"name": name, "cores": cores} for name, cores in used],
    }
    summary, _ = judged(tmp_path / "run", stage)
    found = find_warnings(Facts(read_summary(summary)))
    (said,) = [w.text for w in found if w.code == "client_limited"]
    expected = f"Stop (or nice) other work on this machine{named}, or pin the client with --cpus"
    assert expected in said


def test_the_loop_notes_when_it_was_held_up() -> None:
    measures = Measures(worker=3)

    async def main() -> None:
        with StageWatch(Sleeper(), measures):
            await asyncio.sleep(0.05)
            time.sleep(0.08)  # noqa: ASYNC251 - holds the loop up
            await asyncio.sleep(0.05)

    before_ns = time.monotonic_ns()
    asyncio.run(main())
    worker, due_ns, looked_ns = max(measures.stalls, key=lambda s: s[2] - s[1])
    assert worker == 3
    # 80 ms, less the 20 ms at most until it should have looked
    assert (looked_ns - due_ns) / 1e9 >= 0.055
    assert before_ns + 50_000_000 <= looked_ns
    assert (worker, due_ns, looked_ns) in judge(measures, Tolerance()).stalls


def test_of_very_many_stalls_the_longest_are_kept() -> None:
    stalls = [(0, ORIGIN_NS + k, ORIGIN_NS + k + 2_000_001 + k) for k in range(STALLS_MAX + 100)]
    assert judge(Measures(stalls=stalls), Tolerance()).stalls == stalls[100:]


def test_the_busiest_processes_of_a_stage() -> None:
    """Over 10 s; a kernel thread with 500 s since the boot takes another name and 1 s."""
    before = {1: ("init", 5.0), 2: ("backup", 10.0), 3: ("a", 0.0), 6: ("kworker/0:1", 500.0)}
    after = {
        1: ("init", 5.0),
        2: ("backup", 19.0),
        3: ("a", 2.0),
        5: ("new", 4.0),
        6: ("kworker/0:1-ext4", 501.0),
    }
    found = busiest(cores_used(before, after, 10.0))
    assert [(p["name"], p["cores"]) for p in found] == [("backup", 0.9), ("new", 0.4), ("a", 0.2)]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_this_process_is_none_of_the_others() -> None:
    others = cpu_seconds()
    assert os.getpid() not in others
    assert all(seconds >= 0 for _, seconds in others.values())


def test_variables_that_change_a_run_are_named_without_their_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        os,
        "environ",
        {
            "SSL_CERT_FILE": "/x",
            "https_proxy": "http://me:secret@p",
            "PYTHONHASHSEED": "0",
            "HOME": "/",
            "NO_PROXY": "",
            "HOSTALIASES": "/etc/aliases",  # another host under the same name
            "GLIBC_TUNABLES": "glibc.malloc.arena_max=1",
            "MYPYTHONPATH": "/",
        },
    )
    resolver, memory = "HOSTALIASES", "GLIBC_TUNABLES"
    named = [memory, resolver, "PYTHONHASHSEED", "SSL_CERT_FILE", "https_proxy"]
    assert changing_variables() == named


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no pinning here")
def test_cores_to_pin_the_client_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    load = {"url": "http://127.0.0.1:1/v1", "rates": 1}
    assert make_settings(load | {"cpus": "2-4,6"}).cpus == (2, 3, 4, 6)
    assert make_settings(load | {"cpus": 3}).cpus == (3,)
    assert make_settings(load).cpus == ()
    for wrong in ("9", "4-2", "x"):
        with pytest.raises(ConfigError, match="--cpus"):
            make_settings(load | {"cpus": wrong})
