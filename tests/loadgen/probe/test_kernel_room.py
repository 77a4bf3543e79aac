"""``ampacity doctor``: settings of this machine that are short of what a load needs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ampacity.config import make_settings
from ampacity.experiments.checkup import checkup
from ampacity.loadgen import host
from ampacity.loadgen.probe.kernel_room import READ
from tests.experiments.test_checkup import record, seen

HEALTHY = {
    "net/ipv4/ip_local_port_range": "32768\t60999\n",  # 28,232 ports
    "net/ipv4/tcp_tw_reuse": "2\n",  # for this machine itself
    "net/core/somaxconn": "4096\n",
    "net/ipv4/tcp_mem": "91386\t121851\t182772\n",  # of 8 GB
    "net/ipv4/tcp_rmem": "4096\t131072\t6291456\n",
    "fs/nr_open": "1048576\n",
}


def short(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    planted: dict[str, str],
    options: dict[str, Any],
    *,
    here: bool = True,
    room: int | None = 20_000,
) -> dict[str, tuple[str, str]]:
    """(what was found, what it means) of each setting that is short."""
    for name, text in planted.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    monkeypatch.setattr(host, "PROC_SYS", folder)
    given = replace(
        seen(record()),
        settings=make_settings({"url": "http://127.0.0.1:9/v1", **options}),
        kernel={name: host.kernel_setting(name) for name in READ},
        here=here,
        room=room,
    )
    checks, _ = checkup(given)
    assert all(c.verdict == "note" and not c.spoils for c in checks if "." in c.name)
    limits = ("open files", *READ)
    return {check.name: (check.found, check.means) for check in checks if check.name in limits}


@pytest.mark.parametrize("planted", [HEALTHY, {}])
@pytest.mark.parametrize("here", [True, False])
def test_a_healthy_machine_has_no_line_for_10000_streams(
    planted: dict[str, str], here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor has one without /proc and without a limit of files."""
    room = 20_000 if planted else None
    assert short(tmp_path, monkeypatch, planted, {}, here=here, room=room) == {}


@pytest.mark.parametrize(
    ("options", "planted", "here", "name", "found", "mend"),
    [
        # 60,999 - 32,768 + 1 ports for each source address; 64,512 at most
        (
            {"concurrency": "30000"},
            {},
            True,
            "net.ipv4.ip_local_port_range",
            "28,232 ports for connections to the endpoint; 30,000 streams need 30,000",
            'sysctl -w net.ipv4.ip_local_port_range="1024 65535"',
        ),
        (
            {"concurrency": "100000", "source_address": "127.0.0.2-127.0.0.4"},
            {},
            True,
            "net.ipv4.ip_local_port_range",
            "84,696 ports for connections to the endpoint; 100,000 streams need 100,000",
            'sysctl -w net.ipv4.ip_local_port_range="1024 65535"',
        ),
        (
            {"concurrency": "100000"},
            {},
            True,
            "net.ipv4.ip_local_port_range",
            "28,232 ports for connections to the endpoint; 100,000 streams need 100,000",
            'sysctl -w net.ipv4.ip_local_port_range="1024 65535", '
            "and --source-address with 2 addresses",
        ),
        (
            {"concurrency": "15000"},
            {},
            False,
            "net.ipv4.tcp_tw_reuse",
            "a closed connection keeps one of 28,232 ports for 60 s; "
            "15,000 streams need 30,000 if all are opened anew",
            "sysctl -w net.ipv4.tcp_tw_reuse=1",
        ),
        (
            {},
            {"net/core/somaxconn": "128\n"},
            True,
            "net.core.somaxconn",
            "a server here holds 128 connections that it has not accepted; "
            "10,000 streams need 4,096",
            "sysctl -w net.core.somaxconn=4096",
        ),
        # a page at each end
        (
            {},
            {"net/ipv4/tcp_mem": "12000 16000 24000\n"},
            True,
            "net.ipv4.tcp_mem",
            "pressure from 16,000 pages on; 10,000 streams need 20,000",
            'sysctl -w net.ipv4.tcp_mem="15000 20000 30000"',
        ),
        (
            {},
            {"net/ipv4/tcp_rmem": "4096 16384 65536\n"},
            True,
            "net.ipv4.tcp_rmem",
            "at most 65,536 bytes a connection; 10,000 streams need 131,072",
            'sysctl -w net.ipv4.tcp_rmem="4096 16384 131072"',
        ),
        # 64 files are the client's own
        (
            {},
            {"fs/nr_open": "8192\n"},
            True,
            "fs.nr_open",
            "at most 8,192 files a process; 10,000 streams need 10,064",
            "sysctl -w fs.nr_open=10064",
        ),
        # 25,000 in each of two workers, or 20,000 in each of three
        (
            {"concurrency": "50000", "workers": 2, "source_address": "127.0.0.2,127.0.0.3"},
            {},
            True,
            "open files",
            "room for 20,000 connections in each process; 50,000 streams need 25,000",
            "ulimit -n 25064, or --workers 3",
        ),
        # 200/s for the 0.41 s of an answer of 32 tokens, made 320 tokens long: 200 x 4.1 = 820
        (
            {"rates": "10,200", "input_tokens": 100, "output_tokens": 320},
            {"fs/nr_open": "512\n"},
            True,
            "fs.nr_open",
            "at most 512 files a process; 820 streams need 884",
            "sysctl -w fs.nr_open=884",
        ),
    ],
)
def test_what_is_short_has_a_line_with_the_command_that_mends_it(
    options: dict[str, Any],
    planted: dict[str, str],
    here: bool,
    name: str,
    found: str,
    mend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = short(tmp_path, monkeypatch, HEALTHY | planted, options, here=here)
    assert lines[name] == (found, f"before a run: {mend}")
    if not options:
        assert list(lines) == [name]


def test_a_small_load_that_is_named_needs_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = HEALTHY | {"net/core/somaxconn": "128\n"}
    assert short(tmp_path, monkeypatch, planted, {"concurrency": "64"}, room=100) == {}
    lines = short(tmp_path, monkeypatch, planted, {"concurrency": "101"}, room=100)
    assert list(lines) == ["open files"]
