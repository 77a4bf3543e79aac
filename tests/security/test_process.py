"""The process itself: core files, tracebacks, commands that print keys, TLS, who may read a run."""

import asyncio
import json
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ampacity.loadgen.net.pages import Page, PageError, Pages
from ampacity.loadgen.rundir.write import RunWriter
from ampacity.loadgen.send import keys
from ampacity.loadgen.send.endpoint import EndpointError, Tls
from tests.support.args import args_of
from tests.support.servers.certificates import make_certificate
from tests.support.servers.fault_server import FaultServer
from tests.support.waiting import gone, wait_until

KEY = "sk-planted-4711-abcdef"


def in_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def test_no_core_file_is_left() -> None:
    """A limit of 1 byte, which also keeps Linux from handing the core to a program."""
    get = (
        "import resource as r; print(r.getrlimit(r.RLIMIT_CORE)[0], r.getrlimit(r.RLIMIT_DATA)[0])"
    )
    core, data = in_python(f"from ampacity.process import protect; protect(); {get}").split()
    assert core in ("0", "1")  # 0 where the hard limit is
    assert int(data) <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_traceback_of_ours_shows_no_key(
    monkeypatch: pytest.MonkeyPatch, command: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError(f"a bug with Bearer {KEY}")

    monkeypatch.setenv("A_KEY", KEY)
    monkeypatch.setattr("ampacity.experiments.stages.conduct._routes", broken)
    command("run http://127.0.0.1:9/v1 --rates 1 --api-key-env A_KEY", status=2)
    shown = capfd.readouterr().err
    assert "RuntimeError: a bug with Bearer ***" in shown
    assert KEY[:14] not in shown


def test_a_refused_key_is_reported_with_one_status(
    monkeypatch: pytest.MonkeyPatch, command: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("A_KEY", KEY)
    with FaultServer(api_key="another") as server:
        command(f"run {server.url} --model m --rates 1 --api-key-env A_KEY", status=2)
    line = capfd.readouterr().err
    assert "refuses the API key (HTTP 401: wrong key: Bearer ***); check --api-key-env" in line
    assert line.count("401") == 1


def test_a_command_that_hangs_ends_with_the_process(tmp_path: Path) -> None:
    """And so does what it started: the renewal of a key at the end of a run."""
    noted, called = tmp_path / "pid", tmp_path / "called"
    command = f"if [ -e {called} ]; then sleep 300 & echo $! > {noted}; wait; fi; touch {called}; echo k-1"
    in_python(
        "import threading, time, pathlib; from ampacity.loadgen.send.keys import Keys\n"
        f"keys = Keys('api_key_command', {command!r})\n"
        "threading.Thread(target=keys.renew, daemon=True).start()\n"
        f"while not (p := pathlib.Path({str(noted)!r})).exists() or not p.read_text(): time.sleep(0.01)"
    )
    assert wait_until(lambda: gone(int(noted.read_text())), 5)


@pytest.mark.parametrize(
    ("command", "message"),
    [("sleep 30", "took more than 2 s"), ("yes", "prints more than a key: over 1 MiB")],
)
def test_a_command_is_bounded_in_time_and_output(
    command: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "COMMAND_MAX_S", 2.0)
    began_s = time.monotonic()
    with pytest.raises(EndpointError, match=message):
        keys.Keys("api_key_command", command)
    assert time.monotonic() - began_s < 10


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_certificate(tmp_path_factory.mktemp("tls"), "IP:127.0.0.1")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module", params=["plain", "wants a client certificate"])
def tls_server(request: pytest.FixtureRequest, certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    if request.param != "plain":
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(certificate)
    return context


@pytest.mark.parametrize("cert", [False, True], ids=["", "cert"])
@pytest.mark.parametrize("trusts", ["system", "cacert", "insecure"])
def test_tls(trusts: str, cert: bool, tls_server: ssl.SSLContext, certificate: Path) -> None:
    """Nobody signed the server's certificate, and it has no other name than 127.0.0.1."""
    tls = Tls(
        cacert=certificate if trusts == "cacert" else None,
        cert=certificate if cert else None,
        insecure=trusts == "insecure",
    )

    async def get(url: str) -> Page:
        async with Pages(tls) as pages:
            return await pages.get(url, {}, 10.0)

    works = trusts != "system" and (cert or tls_server.verify_mode == ssl.CERT_NONE)
    with FaultServer(tls=tls_server) as server:
        if works:
            assert asyncio.run(get(f"{server.url}/models")).status == 200
            elsewhere = f"{server.url}/models".replace("127.0.0.1", "localhost")
            if trusts == "cacert":  # the name is checked too
                with pytest.raises(PageError, match="certificate verify failed"):
                    asyncio.run(get(elsewhere))
        else:
            why = (
                "certificate verify failed"
                if trusts == "system"
                else "(?i)certificate.required|closed|reset"
            )
            with pytest.raises(PageError, match=why):
                asyncio.run(get(f"{server.url}/models"))


@pytest.fixture
def refusal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[..., None],
    capfd: pytest.CaptureFixture[str],
) -> Callable[[str], str]:
    """Return what a command that is refused prints, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def of(words: str) -> str:
        command(words, status=2)
        return capfd.readouterr().err

    return of


@pytest.mark.parametrize("command_name", ["doctor", "run --rates 9 --duration 1s"])
def test_a_certificate_that_is_trusted_is_for_one_name(
    command_name: str,
    tls_server: ssl.SSLContext,
    certificate: Path,
    command: Callable[..., None],
    refusal: Callable[[str], str],
) -> None:
    """Doctor, the first command of a newcomer, knows the options of TLS too."""
    name, _, rest = command_name.partition(" ")
    lengths = "--model m --input-tokens 4 --output-tokens 2"
    with FaultServer(tls=tls_server) as server:
        words = f"{server.url} --cacert {certificate} --cert {certificate} {lengths} {rest}"
        command(f"{name} {words}")
        said = refusal(f"{name} {words.replace('127.0.0.1', 'localhost')}").splitlines()[-1]
    assert "Hostname mismatch" in said
    assert said.endswith("use the name that its certificate was issued for in the URL")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--cacert none.pem", "--cacert none.pem: cannot be used: No such file"),
        ("--cacert text.pem", "--cacert text.pem: cannot be used: NO_CERTIFICATE"),
        ("--cert shared.pem", "others may read it (mode 0644): chmod 600 it"),
        ("--cert text.pem", "--cert text.pem: cannot be used"),
        ("--insecure", "go with an https:// URL"),
    ],
)
def test_tls_options_that_cannot_be_used(
    options: str, message: str, certificate: Path, tmp_path: Path, refusal: Callable[[str], str]
) -> None:
    (tmp_path / "text.pem").write_text("no certificate")
    (tmp_path / "text.pem").chmod(0o600)
    (tmp_path / "shared.pem").write_bytes(certificate.read_bytes())
    (tmp_path / "shared.pem").chmod(0o644)
    scheme = "http" if options == "--insecure" else "https"
    assert message in refusal(f"run {scheme}://127.0.0.1:9/v1 --rates 1 {options}")


def test_a_run_without_a_check_of_the_certificate_tells_so(
    certificate: Path, tmp_path: Path, command: Callable[..., None]
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    load = "--rates 5 --duration 1s --input-tokens 5 --output-tokens 2 --insecure --model m --out"
    with FaultServer(tls=context) as server:
        command(*args_of("run", server.url, load, tmp_path / "run"))
    meta = json.loads((tmp_path / "run" / "run.json").read_text())
    note = "--insecure: nobody checked that the answers came from the endpoint itself"
    assert meta["endpoint"]["certificate_checked"] is False
    assert note in meta["notes"]
    assert note in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize("private", [False, True])
def test_a_run_that_keeps_answers_is_its_owners(private: bool, tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", {"stages": []}, private=private):
        others = (tmp_path / "run").stat().st_mode & 0o077
    assert (others == 0) == private
