"""Runs against a scripted hosted provider: its quota, its errors, its price, its keys."""

import asyncio
import io
import json
import random
import re
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from rich.console import Console

from ampacity.analysis.decision.money import read_prices
from ampacity.config import make_settings
from ampacity.experiments.stages.budget import approve, estimate, planned
from ampacity.loadgen.drive.account import Account
from ampacity.loadgen.drive.options import RunnerOptions
from ampacity.loadgen.net.http import Client
from ampacity.loadgen.plan import Limits, Live, StagePlan
from ampacity.loadgen.rundir.files import load_run
from ampacity.loadgen.rundir.records import RequestRecord, to_batch
from ampacity.loadgen.send.endpoint import is_private, parse_endpoint
from ampacity.loadgen.workers.setup import Route
from ampacity.progress import Progress
from ampacity.values import ConfigError
from tests.support.args import Command
from tests.support.repeats import often
from tests.support.servers.hosted import OVERLOADED, Provider
from tests.support.stage_driving import played, requests_to, schedule_at

SHORT = "--model m --input-tokens 8 --output-tokens 2 --arrivals constant"
PRICES = "# made up for this test, 2026-11-29\nmodel,input,output,cached\nm,1000,4000,100\n"


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    path = tmp_path / "prices.csv"
    path.write_text(PRICES)
    return path


def drive(
    provider: Provider, plan: dict[str, Any], account: Account | None = None, retries: int = 0
) -> list[RequestRecord]:
    """Run one stage against a provider and return its records; ``plan``: of StagePlan."""

    async def main() -> list[RequestRecord]:
        endpoint = parse_endpoint(provider.url)
        made = requests_to(endpoint)
        client = Client(endpoint, endpoint.addresses(), None)
        options = RunnerOptions(limits=Limits(retries=retries), account=account or Account())
        return (await played(client, made, StagePlan(0, **plan), options)).records

    return asyncio.run(main())


def summary_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "summary.json").read_text())
    return found


@pytest.mark.slow
def test_a_sweep_finds_the_quota_and_climbs_no_further(
    ampacity: Callable[..., object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """100 requests a second: a bucket of 100 is empty 2 s into the stage at 150/s."""
    key = "sk-PLANTED-hosted-0123456789"
    (tmp_path / "key").write_text(key)
    (tmp_path / "key").chmod(0o600)
    load = f"{SHORT} --rates 40,150,400 --duration 6s --slo ttft_p95=1s --peak-rps 900"
    with Provider(requests=100, window_s=1.0, keys=[key]) as provider:
        command = ["--api-key-command", f"cat {tmp_path}/key # {key}", "--out", tmp_path / "run"]
        assert ampacity("sweep", provider.url, *load.split(), *command) == 0
    found = summary_of(tmp_path / "run")
    assert found["quota"]["per_min"] == pytest.approx(6000, rel=0.03)
    assert found["quota"]["text"].endswith("requests/min (header says 100)")
    assert {s["offered_rps"] for s in found["stages"]} == {40.0, 150.0}
    assert found["capacity"]["capacity_rps"] is None
    assert found["fleet"]["instances"] is None
    assert "no higher load is run: " in (told := "".join(capsys.readouterr()))
    assert "of the requests at 150 req/s are refused with 429" in told
    met_rps = found["capacity"]["verified_rps"]  # none where other work held this machine up
    assert (met_rps == 40 and "up to 40 req/s met" in found["verdict"]) or met_rps is None
    assert "quota" in (tmp_path / "run" / "report.html").read_text()
    rows = load_run(tmp_path / "run").requests.to_pylist()
    refused = [row for row in rows if row["http_status"] == 429]
    assert {row["quota_requests"] for row in rows} == {100.0}
    assert {row["quota_requests_left"] for row in refused} <= {0.0, 1.0}
    assert None not in {row["retry_after_s"] for row in refused}
    assert key not in str(rows)
    for path in (tmp_path / "run").iterdir():
        assert key.encode() not in path.read_bytes(), path


NAMED = {
    "429 Too Many Requests": "rate_limited",
    "529 Overloaded": "rate_limited",
    "401 Unauthorized": "auth",
    "403 Forbidden": "auth",
    "503 Service Unavailable": "overloaded",
    "400 Bad Request": "bad_request",
    "500 Internal Server Error": "upstream",
    "502 Bad Gateway": "upstream",
    "522 Timed Out": "upstream",
    OVERLOADED: "stream_error",
}


def test_every_class_of_error_is_named(command: Command, tmp_path: Path) -> None:
    load = f"{SHORT} --rates 40 --duration 1s --warmup 0 --out"
    with Provider(script=NAMED) as provider:
        command(f"run {provider.url} {load}", tmp_path / "run")
    counts: dict[str, int] = {}
    for kind in NAMED.values():
        counts[kind] = counts.get(kind, 0) + 1
    assert {kind: n for kind, n in summary_of(tmp_path / "run")["errors"].items() if n} == counts
    assert "rate_limited" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize("named", ["seconds", "ms", "date"])
def test_no_retry_comes_before_the_time_that_a_refusal_named(named: str) -> None:
    times_s = [0.01 * i for i in range(60)]
    with Provider(requests=20, window_s=1.0, named=named) as provider:
        plan = {"kind": "open", "schedule": schedule_at(times_s), "duration_s": 0.6}
        records = drive(provider, plan | {"drain_s": 8.0}, retries=6)
    assert provider.answers["429"] > 10
    assert provider.early == 0
    assert sum(r.attempt > 0 for r in records) == provider.answers["429"] - sum(
        r.attempt == 6 and r.http_status == 429 for r in records
    )
    refused = {r.request_id for r in records if r.http_status == 429}
    assert {r.request_id for r in records if r.attempt and r.status == "ok"} <= refused


@pytest.mark.parametrize(
    ("limits", "sent"), [({"requests": 4}, 4), ({"tokens": 50}, 5), ({"requests": None}, 10)]
)
def test_what_is_sent_again_counts_too(limits: dict[str, int | None], sent: int) -> None:
    """Of five requests of 8 + 4 tokens each fails and is sent again: the fifth uses 50 up."""
    schedule = schedule_at([0.05 * i for i in range(5)])
    with Provider(script=[OVERLOADED] * 99) as provider:
        plan = {"kind": "open", "schedule": schedule, "duration_s": 0.3}
        records = drive(provider, plan, Account(limits=limits), retries=1)
    assert len(records) == sent
    before = Account(limits=limits)
    before.spent_before(pa.Table.from_batches([to_batch(records)]))
    assert bool(before.used_up) == (sent < 10)


def test_an_overload_event_in_a_stream_is_tried_again() -> None:
    with Provider(script=[OVERLOADED] * 2) as provider:
        plan = {"kind": "open", "schedule": schedule_at([0.0, 0.1]), "duration_s": 0.2}
        records = drive(provider, plan, retries=1)
    statuses = sorted((r.request_id, r.attempt, r.status) for r in records)
    assert statuses == [
        *((0, 0, "stream_error"), (0, 1, "ok")),
        *((1, 0, "stream_error"), (1, 1, "ok")),
    ]


def test_the_spend_exceeds_no_limit_by_more_than_is_in_flight() -> None:
    """Over random limits; the provider keeps the books. It ends near the limit, too."""
    drawn, users = random.Random(7), 4
    with Provider(prices=(1000.0, 4000.0)) as provider:
        for _ in range(often(8, 50)):
            limit_usd, before_usd = drawn.uniform(0.2, 3.0), provider.spent_usd
            account = Account(None, (1000.0, 100.0, 4000.0), limit_usd)
            schedule = schedule_at([0.0] * 400, output_tokens=drawn.randint(1, 9))
            plan = {"kind": "closed", "schedule": schedule, "duration_s": 20.0}
            records = drive(provider, plan | {"concurrency": users}, account)
            spent_usd = provider.spent_usd - before_usd
            one_usd = spent_usd / len(records)
            assert limit_usd - 2 * users * one_usd <= spent_usd <= limit_usd + users * one_usd
            assert account.used_up == f"--max-cost {limit_usd:g} is used up"
            assert {r.status for r in records} == {"ok"}  # ended cleanly
            assert account._spent_usd == pytest.approx(spent_usd)


def test_a_run_ends_at_its_limit(
    command: Command, tmp_path: Path, prices: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = f"{SHORT} --rates 50,60 --duration 2s --max-cost 1.5 --prices {prices} --out"
    with Provider(prices=(1000.0, 4000.0)) as provider:
        command(f"sweep {provider.url} {load}", tmp_path / "run")
    found = summary_of(tmp_path / "run")
    assert found["spent_usd"] == pytest.approx(provider.spent_usd)
    assert 1.4 <= provider.spent_usd <= 1.6
    assert "--max-cost 1.5 is used up" in found["partial"]
    told = capsys.readouterr().err
    assert "answers as long as planned, no prompt cached" in told  # before the first request
    assert "at most --max-cost 1.5" in told
    assert "of $1.5 spent" in told
    assert told.index("are planned") < told.index("stage 0")


def test_processes_add_up_what_they_spend(command: Command, tmp_path: Path, prices: Path) -> None:
    load = f"{SHORT} --rates 40 --duration 1s --workers 2 --prices {prices} --out"
    with Provider(prices=(1000.0, 4000.0)) as provider:
        command(f"run {provider.url} {load}", tmp_path / "run")
    assert summary_of(tmp_path / "run")["spent_usd"] == pytest.approx(provider.spent_usd)


def test_failures_end_a_run_and_by_default_a_stage(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = ["503 Service Unavailable", "503 Service Unavailable", ""]
    load = f"{SHORT} --rates 40,60 --duration 2s"
    with Provider(script=cycle(script)) as provider:
        command(f"sweep {provider.url} {load} --out", tmp_path / "stage")
    stages = summary_of(tmp_path / "stage")["stages"]
    told = "".join(capsys.readouterr())
    assert {stage["offered_rps"] for stage in stages} == {40.0}  # a busy client has two
    assert stages[-1]["window"]["end_s"] < 1.95  # 40 of 80 have failed after 1.5 s
    assert re.search(r"stage 0 was ended after \d\d of 80 requests: most of its requests f", told)
    assert "no higher load is run: most of the requests at 40 req/s failed" in told
    warned = {w["code"]: w["text"] for w in summary_of(tmp_path / "stage")["warnings"]}
    assert re.search(
        r"^Stage 0 was ended after \d\d of 80 requests: most of .*\.$", warned["events"]
    )
    with Provider(script=cycle(script)) as provider:
        command(f"sweep {provider.url} {load} --max-errors 5% --out", tmp_path / "run", status=3)
    said = r"ended at stage 0 \(40 req/s\) by --max-errors 5%: (\d+) of (\d+) requests failed"
    ended = re.fullmatch(said, summary_of(tmp_path / "run")["partial"])
    assert ended
    failed, of = map(int, ended.groups())
    assert of >= 20
    assert failed == pytest.approx(2 / 3 * of, abs=4)  # by the script, in the order of their ends


@pytest.mark.parametrize(
    "load",
    [
        "run --rates 20 --duration 2s",
        "run --rates 20 --duration 2s --workers 2",
        "soak --rps 20 --duration 3s --window 1s",
    ],
)
def test_why_a_key_could_not_be_renewed_is_said_by_the_run(
    load: str, ampacity: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command's first key expires after a second; its next call ends with status 3."""
    once = f"[ -e {tmp_path}/called ] && exit 3; touch {tmp_path}/called; "
    command = once + """echo '{"key": "sk-1", "expires_in": 1}'"""
    experiment, *loads = load.split()
    with Provider(keys=["sk-1"]) as provider:
        words = [provider.url, *loads, *SHORT.split(), "--api-key-command", command]
        assert ampacity(experiment, *words, "-q", "--out", tmp_path / "run") == 0
        assert ampacity("report", tmp_path / "run") == 0
    (event,) = json.loads((tmp_path / "run" / "run.json").read_text())["events"]
    said = r"at (\d\.\d) s the API key could not be renewed, and the old one was used on \((.*)\)"
    found = re.fullmatch(said, event)
    assert found
    assert float(found[1]) <= 2.0
    assert found[2].startswith("--api-key-command: the command ended with status 3")
    warned = {w["code"]: w["text"] for w in summary_of(tmp_path / "run")["warnings"]}
    assert warned["events"] == f"A{event[1:]}."
    assert "API key could not be renewed" in " ".join(capsys.readouterr().out.split())


def test_a_request_that_is_sent_again_fails_once() -> None:
    """A quarter of 24 requests is refused 7 times each: 42 attempts failed, and 6 requests."""
    plan = StagePlan(0, "open", schedule_at([0.0] * 24), 4.0, offered_rps=6, ends_when_failing=True)
    live, account = Live.of(plan, 0.0), Account()
    for number in range(24):
        for attempt in range(7 if number % 4 == 0 else 1):
            status = "http_error" if number % 4 == 0 else "ok"
            live.count(RequestRecord(number, 0, 0, status, http_status=503, attempt=attempt))
    account.look(live, 0.25)
    assert (live.ended, live.judged, live.failed) == (60, 24, 6)
    assert not live.mostly_failed(plan)
    assert account.used_up is None
    account.look(live, 0.24)
    assert account.used_up == "--max-errors 24%: 6 of 24 requests failed"


def settings_of(**raw: Any) -> Any:
    given = {"model": "m", "rates": "10", "duration": "10s", "arrivals": "constant"}
    return make_settings(
        {"url": "http://h/v1", "input_tokens": 100, "output_tokens": 50, **given, **raw}
    )


def asked(settings: Any, address: str) -> str:
    """Return what is printed before a load to an address. Raises as ``approve`` does."""
    out = io.StringIO()
    route = Route(settings.endpoint, [address])
    approve(settings, None, [route], Progress(Console(file=out, width=500)))
    return out.getvalue()


def test_load_to_a_public_address_is_asked_for(
    prices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, yes = settings_of(), settings_of(yes=True, prices=str(prices))
    planned = "about 100 requests and 15,000 tokens"
    assert asked(plain, "127.0.0.1") == ""
    limited = asked(settings_of(max_requests=70), "127.0.0.1")
    assert limited.rstrip().endswith("at most --max-requests 70")
    assert planned in limited
    for address in ("10.1.2.3", "192.168.0.9", "fd00::1"):
        assert planned in asked(plain, address)
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    with pytest.raises(ConfigError, match="public address: --yes confirms the load") as refused:
        asked(plain, "8.8.8.8")
    assert planned in str(refused.value)
    # 100 requests x (100 x $1000 + 50 x $4000) / 1e6
    assert f"{planned}, about $30 are planned (assumed: " in asked(yes, "8.8.8.8")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    with pytest.raises(ConfigError, match="nothing was sent"):
        asked(plain, "8.8.8.8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\n"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert "Send this load to a public address? [y/N]" in asked(plain, "8.8.8.8")
    assert not is_private(["10.0.0.1", "2606:4700::1"])


def test_without_a_terminal_the_command_ends_with_2(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    command(f"run http://8.8.8.8:9/v1 {SHORT} --rates 5 --duration 1s", status=2)
    assert "--yes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"max_cost": 5}, "--max-cost goes with --prices"),
        ({"max_cost": 5, "workers": 2, "prices": "P"}, "drop --workers"),
        ({"max_requests": 5, "workers": 2, "retries": 1}, "--max-requests with --retries is kept"),
        ({"ray": "auto"}, "--ray goes with --workers"),
        ({"ray": "auto", "workers": 2, "cpus": "0"}, "of this machine: drop them, or --ray"),
        ({"max_errors": "105%"}, "share below 1"),
        ({"max_errors": "few"}, "share below 1"),
        ({"model": None, "prices": "P"}, "name the model with --model, .*; it has m, n"),
        ({"model": "other", "prices": "P"}, "no price of other; it has m, n"),
    ],
)
def test_limits_that_cannot_be_kept(raw: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(f"{PRICES}n,1,2,\n")
    assert read_prices(path)["n"].read == 1
    raw = {name: str(path) if value == "P" else value for name, value in raw.items()}
    with pytest.raises(ConfigError, match=message):
        estimate(settings_of(**raw), None)


def test_a_load_that_is_looked_for_costs_so_much_a_request(prices: Path) -> None:
    settings = settings_of(rates=None, prices=str(prices), max_requests=900)
    text = estimate(settings, None)
    assert planned(settings, None) is None
    assert planned(settings_of(prices=str(prices)), None, times=3)["requests"] == 300
    assert "about 300 requests" in estimate(settings_of(), None, times=3)  # as ab runs them
    assert "about 150 tokens a request, $0.3 (assumed" in text
    assert "at most --max-requests 900" in text


def test_what_is_not_billed() -> None:
    account = Account(None, (1000.0, 100.0, 4000.0))
    planned = {"input_tokens_planned": 1000, "output_tokens_planned": 100, "started_ns": 1}
    for status, columns, usd in (
        ("http_error", {}, 0.0),
        ("connect_error", {}, 0.0),
        ("ok", {"input_tokens": 1000, "cached_tokens": 600, "output_tokens": 10}, 0.5),
        ("timeout", {"chunk_at_us": [1, 2, 3]}, 1.012),
        # a count below the chunks cannot be true: 1,000 planned and 3 chunks are taken
        ("ok", {"input_tokens": 1, "output_tokens": 1, "chunk_at_us": [1, 2, 3]}, 1.012),
    ):
        before = account._spent_usd
        account.ended(RequestRecord(0, 0, 0, status, **planned, **columns))
        assert account._spent_usd - before == pytest.approx(usd), status
