"""Find the settings of this machine that are short of what many streams need. Pure."""

import math
from collections.abc import Iterator

from ampacity.loadgen.host import OWN_FILES
from ampacity.loadgen.probe.diagnosis import Finding
from ampacity.loadgen.probe.diagnosis_rules import Facts

PORTS = "net.ipv4.ip_local_port_range"
REUSE = "net.ipv4.tcp_tw_reuse"
QUEUE = "net.core.somaxconn"
PAGES = "net.ipv4.tcp_mem"
BUFFER = "net.ipv4.tcp_rmem"
FILES = "fs.nr_open"
READ = (PORTS, REUSE, QUEUE, PAGES, BUFFER, FILES)

STREAMS = 10_000  # where the user names no load
PORTS_MAX = 65_535 - 1_023
QUEUE_MIN = 4_096  # the default since Linux 5.4
BUFFER_MIN = 131_072  # bytes for tokens that wait to be read, the default


def short_settings(f: Facts) -> list[Finding]:
    """Return a finding for each setting that is short, with the command that mends it."""
    n, kernel = f["streams"], f["kernel"]
    known = {name: kernel[name] for name in READ if kernel.get(name)}
    return [
        Finding(name, "note", f"{found}; {n:,} streams need {needed}", f"before a run: {mend}", ())
        for name, found, needed, mend in (*_files(f, known), *_ports(f, known), *_memory(f, known))
    ]


def _files(f: Facts, known: dict[str, list[int]]) -> Iterator[tuple[str, str, str, str]]:
    """Yield what limits descriptors: (setting, what it is, what is needed, the command)."""
    room, each = f["connections_room"], math.ceil(f["streams"] / f["workers"])
    if room is not None and room < each:
        files = each + OWN_FILES
        mend = f"ulimit -n {files}, or --workers {math.ceil(f['streams'] / max(room, 1))}"
        yield "open files", f"room for {room:,} connections in each process", f"{each:,}", mend
    if known.get(FILES, [math.inf])[0] < each + OWN_FILES:
        most = f"at most {known[FILES][0]:,} files a process"
        yield FILES, most, f"{each + OWN_FILES:,}", _sysctl(FILES, str(each + OWN_FILES))


def _ports(f: Facts, known: dict[str, list[int]]) -> Iterator[tuple[str, str, str, str]]:
    n, sources = f["streams"], max(len(f["source_addresses"]), 1)
    low, high = known.get(PORTS, (1, math.inf))
    ports = (high - low + 1) * sources
    if ports < n:
        found = f"{ports:,} ports for connections to the endpoint"
        wanted = math.ceil(n / PORTS_MAX)
        more = f", and --source-address with {wanted} addresses" if wanted > sources else ""
        yield PORTS, found, f"{n:,}", _sysctl(PORTS, "1024 65535") + more
    elif ports < 2 * n and known.get(REUSE, [1])[0] not in ((1, 2) if f["here"] else (1,)):
        found = f"a closed connection keeps one of {ports:,} ports for 60 s"
        yield REUSE, found, f"{2 * n:,} if all are opened anew", _sysctl(REUSE, "1")
    queue = known.get(QUEUE, [QUEUE_MIN])[0]
    if f["here"] and queue < min(n, QUEUE_MIN):
        found = f"a server here holds {queue:,} connections that it has not accepted"
        yield QUEUE, found, f"{min(n, QUEUE_MIN):,}", _sysctl(QUEUE, str(QUEUE_MIN))


def _memory(f: Facts, known: dict[str, list[int]]) -> Iterator[tuple[str, str, str, str]]:
    """Yield what limits buffers; a stream with something to read takes a page at each end here."""
    pages = f["streams"] * (2 if f["here"] else 1)
    found = known.get(PAGES, [pages] * 3)
    if found[1] < pages:
        wanted = f"{pages * 3 // 4} {pages} {pages * 3 // 2}"  # the kernel's own proportions
        yield PAGES, f"pressure from {found[1]:,} pages on", f"{pages:,}", _sysctl(PAGES, wanted)
    least, usual, most = known.get(BUFFER, [0, 0, BUFFER_MIN])
    if most < BUFFER_MIN:
        mend = _sysctl(BUFFER, f"{least} {usual} {BUFFER_MIN}")
        yield BUFFER, f"at most {most:,} bytes a connection", f"{BUFFER_MIN:,}", mend


def _sysctl(name: str, value: str) -> str:
    return f'sysctl -w {name}="{value}"' if " " in value else f"sysctl -w {name}={value}"
