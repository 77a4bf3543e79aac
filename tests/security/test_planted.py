"""Keys and HTML that are planted wherever a user or a server can put them are in no artefact."""

import asyncio
import html
import json
import os
import re
import socket
import subprocess
import urllib.request
import xml.etree.ElementTree as ET
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.args import COMMAND
from tests.support.processes.command_lines import run_all
from tests.support.repeats import LONG
from tests.support.servers.fault_server import FaultServer
from tests.support.servers.faults import Call, delta, ending, event, role

PLACES = (
    *("file", "env", "command", "header", "workload", "body", "environment"),
    *("user info", "query", "metrics query", "refused body", "otlp query", "proxy user info"),
)
SECRETS = {  # characters that JSON, URLs, HTML and Base64 write differently; two are in URLs
    place: f'sk-{i}PLANTED{i}/x"y\\z+w={i}' if "q" not in place and " " not in place
    else f"sk-{i}PLANTED{i}xyzw{i}"
    for i, place in enumerate(PLACES)
}  # fmt: skip
MARKUP = "</script><img src=x onerror=alert(1)>"


def within(secret: str) -> Iterator[str]:
    """Yield the Base64 of a secret at any place of a longer text, without the edges."""
    for encode in (b64encode, urlsafe_b64encode):
        for before in range(3):
            text = encode(b"?" * before + secret.encode() + b"??").decode()
            yield text[4 if before else 0 : 4 * ((before + len(secret)) // 3)]


def forms(secret: str) -> set[str]:
    """Return what must not be found: the secret in every encoding, and more than half of it."""
    escaped = json.dumps(secret)[1:-1]
    found = {secret, quote(secret, safe=""), quote(secret), escaped, json.dumps(escaped)[1:-1]}
    found |= {secret.encode().hex(), html.escape(secret), secret[: len(secret) // 2 + 2]}
    return {form.lower() for form in found | set(within(secret))}


class Echo(FaultServer):
    """Sends everything that it was sent back, in every encoding, in every part of an answer."""

    pid = port_of_page = looks = 0
    fails = True  # some of the requests
    seen: str = ""  # command lines of the process and its children, its page, its posts

    def _said(self, call: Call) -> list[str]:
        headers = call.request.headers
        said = [headers.get(name, "") for name in ("authorization", "x-tenant", "x-class")]
        return [text for text in (*said, str(call.request.body.get("api_token", ""))) if text]

    async def _answer(self, call: Call) -> bool:
        path, said = call.request.path, self._said(call)
        if path.startswith("/otlp"):
            self.seen += json.dumps(call.request.body)
        if call.request.method == "GET" or path.startswith("/otlp"):
            return await self._page(call, " ".join(said))
        if "probe" in call.request.headers.get("x-request-id", ""):
            return await self._echo(call, 1, "nothing")
        if self.looks < 5:
            self.looks += 1
            self.seen += await asyncio.to_thread(self._look)
        return await self._echo(call, len(self.requests), " and ".join(said))

    async def _page(self, call: Call, said: str) -> bool:
        label = json.dumps(said)
        pages = {
            "/v1/models": json.dumps({"data": [{"id": MARKUP, "owned_by": f"{said} {MARKUP}"}]}),
            "/version": json.dumps({"version": said + MARKUP}),
            "/metrics": f"vllm:num_requests_running{{model_name={label}}} 1\n",
        }
        head = f"Server: {said}{MARKUP}\r\nContent-Type: application/json\r\n"
        await call.answer("200 OK", pages.get(path_of(call), "{}").encode(), head)
        return True

    async def _echo(self, call: Call, number: int, said: str) -> bool:
        texts = [
            said,
            quote(said, safe=""),
            b64encode(said.encode()).decode(),
            json.dumps(json.dumps(said)),
            said.encode().hex(),
            html.escape(said),
        ]
        text = MARKUP + texts[number // 9 % len(texts)]
        if self.fails and number % 36 == 9:
            body = json.dumps({"error": {"message": text}}).encode()
            await call.send(b"HTTP/1.1 500 No\r\nContent-Length: %d\r\n\r\n" % len(body))
            for half in (body[: len(body) // 2], body[len(body) // 2 :]):
                await call.send(half)
                await asyncio.sleep(0.01)
            return True
        await call.head(f"Transfer-Encoding: chunked\r\nX-Request-Id: {said}{MARKUP}\r\n")
        await call.chunk(role())
        for half in (text[: len(text) // 2], text[len(text) // 2 :]):
            await call.chunk(event(delta(half)))
        if self.fails and number % 36 == 18:
            await call.chunk(event({"error": {"message": text}}))
        elif self.fails and number % 36 == 27:
            await call.chunk(event(delta(finish=text)))
        await call.chunk(ending(2))
        await call.send(b"0\r\n\r\n")
        return True

    def _look(self) -> str:
        """Return what other users of the machine can see, and what it exports."""
        mine = [self.pid, *children(self.pid)] if self.pid else []
        found = [Path(f"/proc/{pid}/cmdline").read_text() for pid in mine]
        if self.port_of_page:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port_of_page}/metrics") as page:
                found.append(page.read().decode())
        return "\n".join(found)


def path_of(call: Call) -> str:
    return call.request.path.partition("?")[0]


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in task.read_text().split()]
    return found + [grandchild for child in found for grandchild in children(child)]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


WRITTEN = (".html", ".md", ".csv", ".json", ".xml")  # by commands that read a run
SHORT = "--rates 60 --slo error_rate=50% --slo ttft_p50=20s --yes".split()  # no lateness counts
WORKLOAD = """
name: {name}
input_tokens: 5
output_tokens: 2
classes: {{ {name}: {{weight: 1, headers: {{X-Class: {secret}}}}} }}
"""


def lines_of_run(url: str, folder: Path) -> dict[str, list[str]]:
    """Return the command lines that load the endpoint, each with its own kind of key."""
    root = url.removesuffix("/v1")
    key = folder / "key"
    key.write_text(SECRETS["file"])
    key.chmod(0o600)
    (folder / "printed").write_text(SECRETS["command"])
    workload = folder / "w.yaml"
    names = {"name": json.dumps(MARKUP), "secret": json.dumps(SECRETS["workload"])}
    workload.write_text(WORKLOAD.format(**names))
    tokens = ["--input-tokens", "5", "--output-tokens", "2", "--model", MARKUP]
    lines = {
        "run": [
            *("run", url, *SHORT, "--duration", "6s", "--workload", str(workload)),
            *("--api-key-file", str(key), "--header", f"X-Tenant: {SECRETS['header']}"),
            *("--extra-body", json.dumps({"api_token": SECRETS["body"]}), "--model", MARKUP),
            *("--metrics-url", f"{root}/metrics?t={SECRETS['metrics query']}", "--workers", "2"),
            *("--keep-answers", "1", "--lock", f"fact={MARKUP}", "--otlp"),
            f"{root}/otlp?t={SECRETS['otlp query']}",
        ],
        "check": [
            *("check", url, *SHORT, *tokens, "--api-key-env", "PLANTED"),
            *("--junit", "j.xml", "--max-duration", "2s"),
        ],
        "sweep": [
            *("sweep", url, *SHORT, *tokens, "--duration", "2.5s"),
            *("--api-key-command", f"cat {folder / 'printed'} # {SECRETS['command']}"),
        ],
    }
    if LONG:
        keyed = [*tokens, "--api-key-file", str(key), "--yes"]
        rest = {
            "search": f"search {url} --max-duration 10s --slo ttft_p50=20s",
            "burst": f"burst {url} --base-rps 20 --base-duration 2s --burst-duration 1s "
            "--recovery-duration 2s --slo ttft_p50=20s",
            "soak": f"soak {url} --rps 20 --duration 4s --window 2s --slo ttft_p50=20s",
            "ab": f"ab {url} {url} --rates 20 --duration 1s --rounds 2",
        }
        lines |= {name: [*line.split(), *keyed] for name, line in rest.items()}
    return {name: [*words, "--out", str(folder / name)] for name, words in lines.items()}


def lines_after(folder: Path, url: str) -> dict[str, list[str]]:
    """Return command lines that read the runs and write something."""
    run, sweep = folder / "run", folder / "sweep"
    lines = {
        "report": f"report {run} --json",
        "doctor": f"doctor {url} --api-key-file {folder / 'key'} --model m",
        "plan": f"plan {run} --peak-rps 5 --json",
        "compare": f"compare {run} {sweep} --force --html c.html --markdown c.md --csv c.csv",
        "baseline": f"baseline {sweep} -o base.json",
        "gate": f"gate {sweep} --baseline base.json --html g.html --junit g.xml --markdown g.md",
        "export": f"export {run} --csv -o exported",
        "size": f"size {run} --gpu h100 --peak-rps 5 --model-config llama3-8b --html s.html",
        "user info": f"run http://u:{SECRETS['user info']}@127.0.0.1:9/v1 --rates 1",
        "query": f"run http://127.0.0.1:9/v1?x={SECRETS['query']} --rates 1",
        "refused body": f"run http://127.0.0.1:9/v1 --rates 1 --extra-body {SECRETS['refused body']}",
    }
    return {
        name: [
            str(folder / word) if "." in word and "/" not in word else word
            for word in line.replace("exported", str(folder / "exported")).split()
        ]
        for name, line in lines.items()
    }


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return every artefact as text, by name: files, streams, pages, posts, command lines."""
    folder = tmp_path_factory.mktemp("planted")
    found: dict[str, str] = {}
    proxy = f"http://u:{SECRETS['proxy user info']}@127.0.0.1:9"
    planted = {"PLANTED": SECRETS["env"], "OPENAI_API_KEY": SECRETS["environment"]}
    planted |= {"HTTPS_PROXY": proxy, "https_proxy": proxy}
    with Echo() as server:
        for name, words in lines_of_run(server.url, folder).items():
            server.port_of_page = 0 if name == "ab" else free_port()
            page = ["--prometheus", str(server.port_of_page)] if name != "ab" else []
            with subprocess.Popen(
                [*COMMAND, *words, *page],  # the pages of lines_after have pictures
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=folder,
                env={**os.environ, **planted, "PYTHONPATH": str(Path(__file__).parents[2])},
            ) as running:
                server.pid, server.looks = running.pid, 0
                server.fails = name != "sweep"  # a baseline refuses failures
                out, err = running.communicate(timeout=60)
            assert "Traceback" not in err
            assert [*(folder / name).rglob("report.html")], err
            found[f"streams of {name}"] = out + err
            server.pid = server.port_of_page = 0
        after = run_all(lines_after(folder, server.url), folder / "lines")
        found["command lines, Prometheus page, OTLP"] = server.seen
    for name in ("run", "check", "sweep"):
        found[f"mode of {name}"] = f"{(folder / name).stat().st_mode & 0o777:04o}"
    for name, ended in after.items():
        found[f"status of {name}"] = str(ended.status)
        found[f"streams of {name}"] = ended.out + ended.err
    for path in folder.rglob("*"):
        if path.suffix == ".parquet":
            found[str(path)] = repr(pq.read_table(path).to_pylist())
        elif path.suffix == ".arrows":
            found[str(path)] = repr(pa.ipc.open_stream(path).read_all().to_pylist())
        elif path.is_file() and (path.parent != folder or path.suffix in WRITTEN):
            found[str(path)] = path.read_text(errors="replace")
    return found


def test_the_server_sent_everything_back(artefacts: dict[str, str]) -> None:
    """Else the absence of a key says nothing: what was hidden is shown as ***."""
    written = next(
        text for name, text in artefacts.items() if name.endswith("run/requests.parquet")
    )
    assert len(re.findall(r"'error': '[^']*\*\*\*", written)) >= 3
    assert len(artefacts) > 30
    read = ("report", "plan", "doctor", "compare", "export", "size", "baseline")
    ended = {name: artefacts[f"status of {name}"] for name in read}
    assert ended == dict.fromkeys(read, "0"), [
        artefacts[f"streams of {name}"][-300:] for name in read if ended[name] != "0"
    ]
    assert artefacts["status of gate"] in ("0", "3")  # so few requests may decide nothing
    assert any(name.endswith("g.html") for name in artefacts)
    for part in ("ampacity_requests_sent", "\0run\0http:", "resourceMetrics", "worker"):
        assert part in artefacts["command lines, Prometheus page, OTLP"]


@pytest.mark.parametrize("place", PLACES)
def test_a_planted_key_is_in_no_artefact(place: str, artefacts: dict[str, str]) -> None:
    for name, text in artefacts.items():
        for form in forms(SECRETS[place]):
            at = text.lower().find(form)
            assert at < 0, f"{name}: {text[max(at - 100, 0) : at + 100]}"


def test_a_run_with_prompts_and_answers_is_its_owners(artefacts: dict[str, str]) -> None:
    assert artefacts["mode of run"] == "0700"
    assert artefacts["mode of sweep"] != "0700"
    kept = [text for name, text in artefacts.items() if "answers-" in name]
    assert any('"prompt"' in text or '"answer"' in text for text in kept)


def test_planted_html_is_text_in_every_page(artefacts: dict[str, str]) -> None:
    pages = {n: t for n, t in artefacts.items() if n.endswith((".html", ".md"))}
    assert len(pages) >= 6
    for name, page in pages.items():
        assert not re.search(r"(?<!\\)<img src=x", page), name  # Markdown escapes by a backslash
    junit = [text for name, text in artefacts.items() if name.endswith(".xml")]
    assert all(ET.fromstring(text).tag for text in junit)
