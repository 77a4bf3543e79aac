"""Lying servers, broken disks and secrets that come back: through records and files as a user gets
them.
"""

import asyncio
import errno
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from ampacity.config import make_settings
from ampacity.experiments.rerun import command_line, command_of, repeatable
from ampacity.loadgen.audit import Measures, Tolerance, judge
from ampacity.loadgen.net.pages import Pages
from ampacity.loadgen.receive.completions import Answer
from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.rundir.files import RunDirError, load_run, read_stream
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.rundir.write import FLUSH_ROWS, StreamWriter
from ampacity.loadgen.send.protocols import error_text
from ampacity.loadgen.send.secrets import redact
from ampacity.loadgen.telemetry import Telemetry
from ampacity.run_file import read_run_file
from tests.support.args import COMMAND, COMMAND_ONCE, Cli, args_of
from tests.support.servers.http_server import http_server, model_server, reply, stream

SHORT = "--duration 1s --input-tokens 5 --output-tokens 2"
NOWHERE = "http://127.0.0.1:9/v1"
KEY = "sk-right-4711-0815"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPACITY_KEY", KEY)


TOKEN = b'{"choices":[{"delta":{"content":"x"}}]}'
LAST = b'{"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}]}'


def usage(completion: str, prompt: str = "5") -> bytes:
    return f'{{"choices":[],"usage":{{"prompt_tokens":{prompt},"completion_tokens":{completion}}}}}'.encode()


@pytest.mark.parametrize(
    "lie",
    [
        "1e18",
        "1000000000000000000",
        "3000000000",
        "1" + "0" * 25,
        "-4",
        "true",
        '"7"',
        "2.5",
        "[1]",
    ],
)
def test_a_lying_usage_is_not_believed_and_costs_no_record(lie: str) -> None:
    answer = Answer()
    for event in (TOKEN, LAST, usage(lie, lie)):
        answer.on_event(1, event)
    answer.finish()
    assert answer.tally.output == (2, "chunks")
    assert answer.tally.input_tokens is None


def test_a_run_survives_lies_in_any_answer(cli: Cli, tmp_path: Path) -> None:
    lies = ["1000000000000000000", "1" + "0" * 25, "3000000000"]

    def answer(handler: BaseHTTPRequestHandler, number: int) -> None:
        stream(handler, TOKEN, LAST, usage(lies[number % 3] if number > 4 else "2"))

    with model_server(answer) as url:
        result = cli("run", url, *args_of(f"--rates 20 {SHORT} --out"), tmp_path / "r")
    assert result.returncode == 0, result.stderr
    rows = pq.read_table(tmp_path / "r" / "requests.parquet").to_pylist()
    assert rows
    assert {(r["status"], r["output_tokens"]) for r in rows} == {("ok", 2)}


def test_deep_json_is_one_protocol_error_and_no_traceback() -> None:
    deep = b'{"choices":[{"delta":{"content":' + b"[" * 100_000 + b"]" * 100_000 + b"}}]}"
    ended: list[Exchange] = []
    exchange = Exchange(RequestRecord(0, 0, 0, "unfinished", started_ns=0), b"", ended.append)
    body = b"data: " + deep + b"\n\ndata: [DONE]\n\n"
    exchange.feed(
        1,
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%b"
        % (len(body), body),
    )
    assert exchange.record.status == "protocol_error"


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
def test_a_body_without_end_is_given_up(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampacity.loadgen.receive.bodies.WHOLE_BODY_BYTES", 1 << 20)
    exchange = Exchange(RequestRecord(0, 0, 0, "unfinished", started_ns=0), b"", lambda _: None)
    exchange.feed(1, f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n\r\n".encode())
    for i in range(100):
        exchange.feed(i + 2, b"x" * 65_536)
        if exchange.ended:
            break
    assert exchange.record.status == "protocol_error"
    assert i < 40
    assert "1 MiB" in (exchange.record.error or "")


@pytest.mark.parametrize(
    "models",
    [
        b"[" * 200_000,
        b'{"data":[{"id":"m","max_model_len":' + b"1" + b"0" * 30 + b"}]}",
        b'{"data":[{"id":"m","max_model_len":0}]}',
        b'{"data":[{"id":"m","max_model_len":true}]}',
        b'{"data":[{"id":"\\ud800"}]}',
        b'{"data":[{"id":"m\\u001b[31m\\nx"}]}',
        b"<html>",
        b"",
    ],
)
def test_a_lying_models_list(cli: Cli, models: bytes, tmp_path: Path) -> None:
    with model_server(lambda handler, _: stream(handler, TOKEN, LAST), models) as url:
        load = SHORT.replace("1s", "300ms")
        result = cli("run", url, *args_of(f"--model m --rates 20 {load} --out"), tmp_path / "r")
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert "\x1b" not in result.stderr + result.stdout


def test_what_a_server_says_is_no_command_to_the_terminal(cli: Cli, tmp_path: Path) -> None:
    names = json.dumps({"data": [{"id": "a\x1b[31m\x07\nb" * 1000}, {"id": "c"}]}).encode()
    with model_server(lambda handler, _: handler.send_error(404, "x"), names) as url:
        result = cli("run", url, *args_of("--model nope --rates 5"))
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert len(result.stderr) < 1000
    assert "\x1b" not in result.stderr


def test_a_secret_that_is_cut_off_is_hidden_too() -> None:
    assert redact("the key sk-right-4711-0815 is wrong", (KEY,)) == "the key *** is wrong"
    assert redact("the key sk-right-47…", (KEY,)) == "the key ***…"
    assert redact("the key sk-r…", (KEY,)) == "the key ***"
    assert redact("****", ("****",)) == "***"
    assert redact("risk", (KEY,)) == "risk"


PLANTED = "sk-SECRET/12345+67890=99"
OTHER_FORMS = {  # by other tools than ours where they are not plain to see
    "its second half": "ET/12345+67890=99",
    "its middle": "ECRET/12345+67",
    "every byte in percents": "%73%6B%2D%53%45%43%52%45%54%2F%31%32%33%34%35%2B%36%37%38%39%30%3D%39%39",
    "in percents twice": "sk-SECRET%252F12345%252B67890%253D99",
    "entities": "".join(f"&#{ord(c)};" for c in PLANTED),
    "hexadecimal entities": "".join(f"&#x{ord(c):X};" for c in PLANTED),
    "spaced": "s k - S E C R E T / 1 2 3 4 5 + 6 7 8 9 0 = 9 9",
    "hex": "736B2D5345435245542F31323334352B36373839303D3939",
    "hex with colons": "73:6b:2d:53:45:43:52:45:54:2f:31:32:33:34:35:2b:36:37:38:39:30:3d:39:39",
    "Base32": "ONVS2U2FINJEKVBPGEZDGNBVFM3DOOBZGA6TSOI=",
    "Base64 twice": "YzJzdFUwVkRVa1ZVTHpFeU16UTFLelkzT0Rrd1BUazU=",
}


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_a_secret_is_hidden_in_forms_of_gateways_and_of_parts(form: str) -> None:
    found = redact(f"<{OTHER_FORMS[form]}> and ET/1234 is half", (PLANTED,))
    assert found == "<***> and ET/1234 is half"


@pytest.mark.parametrize(
    "written",
    (
        "sk-SECRET%2F12345%2B67890%3D99 c2stU0VDUkVULzEyMzQ1KzY3ODkwPTk5 "
        "QmVhcmVyIHNrLVNFQ1JFVC8xMjM0NSs2Nzg5MD05OQ== SK-SECRET/12345+67890=99 "
        "sk-SECRET/12345+67... sk-SECRET/12345+67890=99"
    ).split(),
)
def test_a_secret_is_hidden_in_every_usual_form(written: str) -> None:
    assert redact(f"key <{written}> is wrong", ("sk-SECRET/12345+67890=99",)).startswith("key <***")
    assert "12345" not in redact(f"key <{written}> is wrong", ("sk-SECRET/12345+67890=99",))


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("--header|X-Key: a b", "--header|X-Key: ***"),
        ("--header=X-Key: a=b", "--header=X-Key: ***"),
        ("--api-key-command|vault kv get --token=hvs.1", "--api-key-command|***"),
        ("--api-key-command=curl -u me:x http://h", "--api-key-command=***"),
        ("--api-key-env|NAME", "--api-key-env|NAME"),
    ],
)
def test_values_that_may_hold_a_secret_are_not_written_down(given: str, written: str) -> None:
    argv = ["ampacity", "run", *given.split("|"), "--rates", "1"]
    assert command_line(argv) == ["ampacity", "run", *written.split("|"), "--rates", "1"]


def test_a_command_that_stands_in_run_json_is_not_executed() -> None:
    words = ["ampacity", "run", "http://h/v1", "--api-key-command", "touch HERE", "--rates", "1"]
    again = command_of({"command_line": words}, Path("out"), 7)
    assert "touch HERE" not in again
    assert not repeatable(again)


def test_the_query_of_a_url_is_not_written_down() -> None:
    argv = args_of(
        "ampacity run http://h/v1 --metrics-url http://h/m?token=T "
        "--metrics-url=https://h/m?a=b&c=T"
    )
    assert command_line(argv)[2:] == args_of(
        "http://h/v1 --metrics-url http://h/m?*** --metrics-url=https://h/m?***"
    )


@pytest.mark.parametrize(
    "secret",
    ['pass"word', "back\\slash", "tab\tand  spaces", "caf\xe9\xa0cr\xe8me", "\x80\x85contr"],
)
def test_a_secret_is_hidden_however_a_server_writes_it(secret: str) -> None:
    """Plainly, in JSON that is shown as it came or encoded anew, and made printable."""
    nested = json.dumps({"error": {"reason": {"header": f"<{secret}>"}}}).encode()
    broken = json.dumps({"sent": f"<{secret}>"}, ensure_ascii=False).encode() + b"}"
    said = json.dumps({"error": {"message": f"<{secret}>"}}).encode()
    for body in (nested, broken, broken + nested, said):
        assert "<***>" in redact(error_text(body), (secret,))
    assert redact(f"<{secret}>", (secret,)) == "<***>"


@pytest.mark.parametrize(
    "url",
    json.loads("""["http://u:secret@127.0.0.1:abc/v1", "ftp://u:secret@h/v1",
        "http://h/v1?key=secret", "http://h/v1#secret"]"""),
)
def test_a_secret_in_a_url_is_not_repeated(cli: Cli, url: str) -> None:
    result = cli("run", url, "--rates", "1")
    assert result.returncode == 2
    assert "secret" not in result.stderr.replace("give secrets", "")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["http://a..b/v1"],
        ["http://[::1/v1"],
        ["http://[zz]/v1"],
        ["http://127.0.0.1:9/ü€"],
        [NOWHERE, "--header", "X: €"],
        [NOWHERE, "--header", "X: a\x1bb"],
        [NOWHERE, "--header", "Transfer-Encoding: chunked"],
        [NOWHERE, "--extra-body", '{"a":NaN}'],
        [NOWHERE, "--extra-body", '{"a":1e999}'],
        [NOWHERE, "--extra-body", '{"a":"\\ud800"}'],
        [NOWHERE, "--extra-body", "[" * 5000],
        [NOWHERE, "--concurrency", "100000000"],
        [NOWHERE, "--workers", "100000"],
        [NOWHERE, "--duration", "99999999999999h"],
        [NOWHERE, "--duration", "0s"],
        args_of(f"{NOWHERE} --slo ttft_p99=1s --slo ttft_p99=2s"),
        args_of(f"{NOWHERE} --lock a=1 --lock a=2"),
        [NOWHERE, "--model", "\x1b[31m"],
    ],
)
def test_odd_input_is_one_line(cli: Cli, arguments: list[str]) -> None:
    extra = [] if "--concurrency" in arguments else ["--rates", "1"]
    result = cli("run", *arguments, *extra)
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert "\x1b" not in result.stderr


@pytest.mark.parametrize(
    "text",
    [
        "trace: 5",
        "trace: [a]",
        "out: 3",
        "out: [x]",
        "api_key_env: 5",
        "model: [1]",
        "rates: 1\nrates: 2",
        "idle-timeout: 1s\nidle_timeout: 2s",
        "extra_body: {a: .nan}",
        "lock: {a: {b: c}}",
        "[" * 2000,
        "url: 5",
    ],
)
def test_odd_run_files_are_one_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "bench.yaml"
    file.write_text(
        ("" if "url" in text or text.startswith("[") else "url: http://127.0.0.1:9/v1\n")
        + text
        + "\n"
    )
    with pytest.raises(ValueError) as caught:
        make_settings(read_run_file(file))
    assert type(caught.value).__module__.startswith("ampacity.")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "flags", "message"),
    [
        ("ramp: -5", [], ":3: ramp -5: write a duration with its unit"),
        ("rampp: 5", [], ":3: unknown setting 'rampp'; did you mean 'ramp'?"),
        ('seed: 1\nlengths: "p50,,p99"', [], ":4: lengths 'p50,,p99': write quantiles"),
        (
            "slo:\n  - ttft_p99=2s\n  - ttft_p9x=2s",
            [],
            ":5: slo: SLO 'ttft_p9x=2s': percentile p9x",
        ),
        ("idle-timeout: soon", [], ":3: idle_timeout soon: write a duration"),
        ("rates: 3", [], ":3: this is no YAML: 'rates' stands there twice"),
        ("seed: 010", [], ":3: this is no YAML: 010 is 8 in YAML 1.1"),
        ("max_requests:", [], ":3: max_requests is empty: give a value or drop the line"),
        ("retries: ~", ["--retries", "1"], ":3: retries is empty"),
        ("header:\n  - X-A: [s]", [], ":3: header: give text for each name"),
        ('extra_body: \'{"a": 1, "a": 2}\'', [], ":3: extra_body is not valid JSON: 'a' stands"),
        ("ramp: 5s", ["--ramp", "-5"], "--ramp -5: write a duration"),
    ],
)
def test_a_wrong_setting_of_a_run_file_is_said_with_file_line_and_field(
    cli: Cli, lines: str, flags: list[str], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "bench.yaml"
    file.write_text(f"url: http://127.0.0.1:9/v1\nrates: [2]\n{lines}\n")
    result = cli("run", "-c", str(file), *flags)
    assert result.returncode == 2
    where = file if message.startswith(":") else ""
    assert result.stderr.startswith(f"ampacity: {where}{message}"), result.stderr
    assert result.stderr.count("\n") == 1


def test_a_repeatable_setting_may_be_a_mapping_or_a_list_of_them(tmp_path: Path) -> None:
    """As YAML takes ``- X-A: b`` without quotes."""
    file = tmp_path / "bench.yaml"
    lines = "header:\n  - X-A: b\n  - X-B: 5", "slo: {ttft_p95: 1s, itl_p99: 50ms}", "lock: [a: 1]"
    file.write_text("\n".join(("url: http://127.0.0.1:9/v1", *lines)))
    settings = make_settings(read_run_file(file))
    assert settings.endpoint.headers == (("X-A", "b"), ("X-B", "5"))
    assert [slo.text for slo in settings.slos] == ["ttft_p95=1s", "itl_p99=50ms"]
    assert settings.locked == {"a": "1"}


def test_a_flag_beats_the_run_file_even_with_the_default_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ampacity.cli import experiment, main

    seen: dict[str, Any] = {}
    monkeypatch.setattr(experiment, "run_experiment", lambda raw, **_: seen.update(raw))
    file = tmp_path / "bench.yaml"
    file.write_text("url: http://127.0.0.1:9/v1\napi: completions\nseed: 7\ntp: 4\nrates: 3\n")
    monkeypatch.setattr(
        sys, "argv", ["ampacity", "run", "-c", str(file), *args_of("--api chat --seed 1 --tp 1")]
    )
    with pytest.raises(SystemExit):
        main()
    assert (seen["api"], seen["seed"], seen["tp"], seen["rates"]) == ("chat", 1, 1, 3)


def test_records_reach_the_disk_within_a_second(tmp_path: Path) -> None:
    """A kill takes a second's records at most, also from a slow endpoint."""
    with model_server(lambda handler, _: stream(handler, TOKEN, LAST)) as url:
        process = subprocess.Popen(
            [
                *COMMAND,
                "run",
                url,
                *args_of("--rates 4 --duration 60s --input-tokens 5 --output-tokens 2 --out"),
                str(tmp_path / "r"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            path = tmp_path / "r" / "requests.arrows"
            for _ in range(600):
                if path.exists() and read_stream(path).num_rows >= 5:
                    break
                threading.Event().wait(0.1)
        finally:
            process.kill()
            process.wait()
    assert read_stream(path).num_rows >= 5


def test_a_full_disk_stops_the_run_with_one_line_and_keeps_what_was_written(tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path / "requests.arrows")
    writer.append(RequestRecord(0, 0, 0, "ok"))
    writer.flush()
    writer.wait()

    class Full:
        closed = False

        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    kept = writer._file
    writer._file = Full()
    for i in range(FLUSH_ROWS + 1):
        writer.append(RequestRecord(i + 1, 0, 0, "ok"))  # in the receive path nothing may be raised
    writer.wait()
    assert "No space left" in (writer.failed or "")
    writer.close()
    kept.close()
    assert read_stream(tmp_path / "requests.arrows").num_rows >= 1


def test_out_of_descriptors_is_the_clients_own_fault() -> None:
    measures = Measures(shortages=3)
    audit = judge(measures, Tolerance())
    assert audit.client_limited
    assert "file descriptors" in (audit.client_limited_reason or "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-"])
def test_closed_standard_streams_harm_nothing(closed: str, tmp_path: Path) -> None:
    with model_server(lambda handler, _: stream(handler, TOKEN, LAST)) as url:
        start = ["bash", "-c", f'exec {closed}; exec "$@"', "_", *COMMAND_ONCE]
        load = SHORT.replace("1s", "300ms")
        start += ["run", url, *args_of(f"--rates 20 {load} --out"), str(tmp_path / "r")]
        result = subprocess.run(start, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "r" / "report.html").is_file()


@pytest.mark.parametrize(
    "change",
    json.loads("""[{"stages": 5}, {"slos": 5}, {"workload": 5}, {"tool": []},
        {"clock": "x"}, {"endpoint": 1}, {"locked": 2}, {"host": 3}, {"stages": [5]},
        {"stages": [{"start_ns": "x"}]}, {"stages": [{"audit": 7}]},
        {"locked": {"max_model_len": 1e400}}, {"locked": {"max_model_len": 9999999999}},
        {"locked": {"think_s": "x"}}, {"host": {"cpus": -1}}, {"workers": "x"}, {"seed": 0.5},
        {"stages": [{"start_ns": 0, "end_ns": 1, "alpha": 7}]}]"""),
)
def test_a_tampered_run_json_is_one_line(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"schema_version": 1, **change}))
    with pytest.raises(RunDirError) as caught:
        load_run(tmp_path)
    assert "\n" not in str(caught.value)
    assert "run.json" in str(caught.value)


def test_a_url_without_v1_gets_a_hint(cli: Cli) -> None:
    with http_server(lambda handler: handler.send_error(404)) as url:
        result = cli("run", url, "--rates", "1")
    assert result.returncode == 2
    assert "/v1?" in result.stderr


def test_metrics_redirects_are_not_followed() -> None:
    """The headers of a request hold secrets; another origin must not get them."""
    stolen: list[str] = []

    async def sample(url: str) -> dict[str, float]:
        async with Pages() as pages:
            return await Telemetry(pages, {f"{url}/metrics": {"X-Secret": "s"}}).sample()

    with (
        http_server(lambda handler: (stolen.append(handler.path), reply(handler))) as thief,
        http_server(lambda handler: reply(handler, b"", 302, Location=f"{thief}/steal")) as url,
    ):
        assert asyncio.run(sample(url)) == {}
    assert stolen == []


def test_the_first_answer_is_waited_for_as_long_as_the_timeout_says_and_no_longer(
    cli: Cli, tmp_path: Path
) -> None:
    silent = threading.Event()
    with model_server(lambda *_: silent.wait(30)) as url:
        result = cli("run", url, *args_of("--rates 1 --timeout 1s --out"), tmp_path / "run")
        silent.set()
    assert result.returncode == 2
    assert "no complete answer within 1 s" in result.stderr
