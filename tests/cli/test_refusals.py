"""What is refused leaves no run directory: not where the settings say so, nor where only the
endpoint or the engine does.
"""

import asyncio
import contextlib
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from ampacity.cli.stub import left_at_once, no_stub
from ampacity.config import make_settings
from ampacity.experiments.stages.conduct import interruptible, run_event_loop
from ampacity.progress import Progress
from ampacity.values import ConfigError
from tests.support.args import Command, args_of
from tests.support.servers.fault_server import FaultServer

SLO = ("--slo", "ttft_p99=2s")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder of its own, in which a command without --out would make ``runs``."""
    monkeypatch.chdir(tmp_path)


def test_a_search_without_an_slo_is_refused_before_anything_is_asked(
    command: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with FaultServer() as server:
        command("search", server.url, "--workload chat-short", status=2)
        assert not server.requests
    assert "give an SLO, as --slo ttft_p99=2s" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("out", [(), ("--out", "new/er"), ("--out", "empty")])
def test_what_only_the_endpoint_says_is_refused_and_leaves_nothing(
    command: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path, out: tuple[str, ...]
) -> None:
    """Ten requests of 1 ms at least take more than 1 ms. A folder that stood there empty stays."""
    if "empty" in out:
        (tmp_path / "empty").mkdir()
    with FaultServer() as server:
        command("search", server.url, *SLO, "--max-duration 1ms", *out, status=2)
        assert server.requests
    assert "not even one stage fits" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == (["empty"] if "empty" in out else [])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--search",), "give an SLO"),
        (("--search", *SLO, "--rates", "3"), "drop --rates"),
        (
            tuple(args_of("--preset llama3-8b@h100,max_model_len=64 --workload agentic")),
            "fits the context of 64 tokens",
        ),
    ],
)
def test_a_prediction_that_is_refused_leaves_nothing(
    command: Command,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: tuple[str, ...],
    said: str,
) -> None:
    command("predict", *arguments, status=2)
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_arm_that_cannot_be_reached_takes_the_other_ones_directory_with_it(
    command: Command, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with FaultServer() as server:
        command("ab", server.url, "http://127.0.0.1:9/v1 --rates 2 --out x", status=2)
    assert "127.0.0.1:9" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_was_measured_or_is_not_ours_stays(tmp_path: Path) -> None:
    """With a stage a run directory is kept; without one a file of the user is, and what was there
    before is not touched."""

    def made(name: str, stages: list[int], *files: str) -> Path:
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).touch()
        (tmp_path / name / "run.json").write_text(json.dumps({"stages": stages}))
        return tmp_path / name

    def refuse() -> None:
        before = made("before", [], "requests.arrows")
        with no_stub(before, tmp_path / "measured", tmp_path / "notes", tmp_path / "stub"):
            made("measured", [0], "requests.arrows")
            made("notes", [], "requests.arrows", "precious")
            made("stub", [], "requests.arrows", "requests-1.arrows", "answers-0.jsonl")
            raise ConfigError("no")

    with pytest.raises(ConfigError):
        refuse()
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*")}
    kept = tuple(
        (
            "before/run.json before/requests.arrows measured/run.json measured/requests.arrows "
            "notes/precious"
        ).split()
    )
    assert left == set(kept)
    assert not (tmp_path / "stub").exists()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["run.json"], "left at once, without the report: 'ampacity report run' writes it"),
        ([], "interrupted before the first request"),
    ],
)
def test_a_signal_while_the_report_is_made_names_the_command_that_makes_it(
    files: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a job's time limit or a closed terminal sends it; the handlers of before are back."""
    Path("run").mkdir()
    for name in files:
        Path("run", name).touch()
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    for number in (signal.SIGTERM, signal.SIGHUP):
        with pytest.raises(KeyboardInterrupt), left_at_once(Path("run")):
            _load_and_report(number)
        assert capsys.readouterr().err == f"ampacity: {said}\n"
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


def _load_and_report(number: signal.Signals) -> None:
    run_event_loop(_ended_by(number))  # ends the load only
    signal.raise_signal(number)


async def _ended_by(number: signal.Signals) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(number, ended.set)
    signal.raise_signal(number)
    await ended.wait()
    loop.remove_signal_handler(number)


class _Stopped:
    """A generator as far as a signal needs one."""

    stopped = ""

    def stop(self, why: str) -> None:
        self.stopped = why


@pytest.mark.parametrize("later_s", [0.0, 0.5])
def test_a_signal_that_comes_twice_at_once_is_one(
    later_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``timeout -s INT`` sends it to the command and to its group; a second Ctrl-C comes later."""
    generator: Any = _Stopped()

    async def signalled() -> None:
        with interruptible(generator, Progress(quiet=True)):
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(later_s)
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0.05)

    leaves = pytest.raises(KeyboardInterrupt) if later_s else contextlib.nullcontext()
    with leaves:
        run_event_loop(signalled())
    assert generator.stopped == "interrupted by Ctrl-C"


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ({"n": 3}, "n = 3"),
        ({"best_of": 2, "n": 1}, "best_of = 2"),
        ({"use_beam_search": True, "n": 1}, "use_beam_search = true"),
        ({"n": "2"}, 'n = "2"'),  # vLLM takes that for a number
        ({"sampling_params": {"n": 4}}, "sampling_params: n = 4"),  # SGLang's own
        (
            {"generationConfig": {"candidateCount": 2}},
            "generationConfig: candidateCount = 2",
        ),  # Gemini
        ({"extra_body": {"num_return_sequences": 2}}, "extra_body: num_return_sequences = 2"),
        ({"parameters": {"use_beam_search": 1}}, "parameters: use_beam_search = 1"),  # TGI
    ],
)
def test_several_choices_are_refused(body: dict[str, object], asked: str) -> None:
    """Three choices every 10 ms in one stream: merged, their ITL would be 0 and 10 ms, and their
    TPOT 3.3 ms."""
    with pytest.raises(
        ValueError, match=re.escape(f"--extra-body asks for several choices ({asked}): ")
    ) as found:
        make_settings({"url": "http://127.0.0.1:9/v1", "extra_body": json.dumps(body)})
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("field", "decides"),
    [
        ("messages", "the workload"),
        ("input", "the workload"),
        ("stream", "the workload"),
        ("model", "--model"),
        ("max_tokens", "the workload (--output-tokens)"),
        ("max_completion_tokens", "the workload (--output-tokens)"),
    ],
)
def test_what_is_decided_elsewhere_is_no_extra_field(field: str, decides: str) -> None:
    """``input`` is the prompt of Responses and embeddings; a second model would be in no report."""
    refusal = re.escape(f"--extra-body sets '{field}', which {decides} decides")
    with pytest.raises(ValueError, match=refusal):
        make_settings({"url": "http://127.0.0.1:9/v1", "extra_body": json.dumps({field: "x"})})


@pytest.mark.parametrize(
    "body",
    json.loads("""[{"n": 1}, {"n": null}, {"best_of": 1, "use_beam_search": false},
        {"temperature": 2.0},
        {"response_format": {"json_schema": {"schema": {"properties": {"n": {"type": "integer"},
        "best_of": {"default": 5}}}}}}, {"tools": [{"function": {"parameters": {"n": 5}}}]}]"""),
)
def test_one_choice_is_none_of_several(body: dict[str, object]) -> None:
    assert (
        make_settings({"url": "http://127.0.0.1:9/v1", "extra_body": json.dumps(body)}).extra_body
        == body
    )
