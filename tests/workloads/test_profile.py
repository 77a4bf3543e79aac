"""Workloads by name and by file."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from ampacity.workloads.archetypes import ARCHETYPES
from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.lengths.parse import Fixed, LogNormal
from ampacity.workloads.profile import Workload, load_workload, read_yaml
from ampacity.workloads.schedule import closed_schedule

DATA = Path(__file__).parents[1] / "data" / "traces"


@pytest.mark.parametrize("name", ["chat", "rag", "code"])
def test_archetypes_are_heavy_tailed(name: str) -> None:
    lengths = load_workload(name).input_tokens
    ratio = lengths.quantile(0.99) / lengths.quantile(0.5)
    assert 3 <= ratio <= 5.1  # 3 to 5 times; the code trace as measured has 5.06


def test_archetypes_hold_the_published_quantiles() -> None:
    chat, code, short = load_workload("chat"), load_workload("code"), load_workload("chat-short")
    levels = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1)
    assert [chat.input_tokens.quantile(q) for q in levels] == json.loads("""[29, 181, 207, 396,
        1020, 1189, 2734, 4083, 4142, 6179, 14050]""")
    assert [chat.output_tokens.quantile(q) for q in levels] == json.loads("""[16, 41, 54, 85, 129,
        395, 424, 451, 601, 954, 1000]""")
    assert [code.input_tokens.quantile(q) for q in levels] == json.loads("""[17, 75, 147, 578,
        1469, 2744, 5188, 7303, 7436, 7437, 7437]""")
    assert [code.output_tokens.quantile(q) for q in levels] == json.loads("""[6, 6, 7, 9, 13, 24,
        55, 90, 251, 825, 1899]""")
    assert (short.input_tokens, short.output_tokens) == (LogNormal(128, 512), LogNormal(32, 128))


@pytest.mark.parametrize(("name", "trace"), [("chat", "conv"), ("code", "code")])
def test_measured_archetypes_agree_with_their_trace(name: str, trace: str) -> None:
    path = DATA / f"azure_llm_2023_{trace}.csv.gz"
    table = np.loadtxt(path, delimiter=",", skiprows=1, usecols=(1, 2), dtype=np.int64)
    workload = load_workload(name)
    for lengths, column in (
        (workload.input_tokens, table[:, 0]),
        (workload.output_tokens, table[:, 1]),
    ):
        assert lengths.mean() == pytest.approx(column.mean(), rel=0.04)
        for q in (0.5, 0.9, 0.95, 0.99):
            assert lengths.quantile(q) == pytest.approx(np.quantile(column, q), abs=0.5)


def test_the_other_measured_archetypes_agree_with_their_trace() -> None:
    files = ("mooncake_conversation.jsonl.gz", "vidur_arxiv_summarization_lengths.csv.gz")
    with gzip.open(DATA / files[0], "rt") as text:
        rows = [json.loads(line) for line in text]
    mooncake = np.array([[row["input_length"], row["output_length"]] for row in rows])
    arxiv = np.loadtxt(DATA / files[1], delimiter=",", skiprows=1, usecols=(0, 1))
    for name, table in (("mooncake-conversation", mooncake), ("arxiv-summarisation", arxiv)):
        workload = load_workload(name)
        for lengths, column in zip(
            (workload.input_tokens, workload.output_tokens), table.T, strict=True
        ):
            assert lengths.mean() == pytest.approx(column.mean(), rel=0.02)
            for q in (0.5, 0.9, 0.95, 0.99):
                assert lengths.quantile(q) == pytest.approx(np.quantile(column, q), abs=0.5)
        plan = closed_schedule(workload, requests=20_000, seed=1, stage=0)
        drawn = stats.spearmanr(plan.input_tokens, plan.output_tokens).statistic
        assert drawn == pytest.approx(stats.spearmanr(*table.T).statistic, abs=0.05)


def test_reasoning_is_as_published() -> None:
    workload = load_workload("servegen-reasoning")
    levels = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1)
    assert [workload.output_tokens.quantile(q) for q in levels] == json.loads("""[141, 225, 287, 427,
        792, 1499, 3432, 5701, 12607, 20833, 32768]""")
    assert workload.input_tokens.mean() == pytest.approx(1268, rel=0.07)
    assert workload.output_tokens.mean() == pytest.approx(1527, rel=0.07)


def test_an_agent_codes_in_sessions_as_long_as_those_measured() -> None:
    workload = load_workload("agentic-coding")
    assert workload.sessions.mean_requests() == pytest.approx(69, abs=1)
    plan = closed_schedule(workload, requests=10_000, seed=1, stage=0)
    assert plan.input_tokens.mean() == pytest.approx(122_379, rel=0.2)  # the trace's mean prompt
    assert plan.output_tokens.mean() == pytest.approx(440, rel=0.05)


@pytest.mark.parametrize("name", sorted(ARCHETYPES))
def test_every_archetype_names_its_source_and_samples_as_described(name: str) -> None:
    workload = load_workload(name)
    described = json.loads(json.dumps(workload.describe(), allow_nan=False))
    assert described["name"] == name
    assert described["source"]
    assert described["arrivals"] == ("constant" if name == "batch" else "poisson")
    sample = workload.input_tokens.sample(np.random.default_rng(1), 50_000)
    assert np.quantile(sample, 0.5) == pytest.approx(described["input_tokens"]["p50"], rel=0.03)
    assert sample.mean() == pytest.approx(described["input_tokens"]["mean"], rel=0.03)


def test_workload_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "input_tokens: {lognormal: {p50: 200, p99: 800}}\noutput_tokens: 64\narrivals: constant\nsource: our logs\n"
    )
    assert load_workload(str(path)) == Workload(
        "mine", LogNormal(200, 800), Fixed(64), "constant", "our logs"
    )
    path.write_text("name: theirs\ninput_tokens: '512'\noutput_tokens: lognormal:p50=5,p99=20\n")
    assert load_workload(str(path)) == Workload("theirs", Fixed(512), LogNormal(5, 20))


def test_a_built_in_archetype_written_to_a_file_is_the_same_workload(tmp_path: Path) -> None:
    import yaml

    path = tmp_path / "copy.yaml"
    path.write_text(yaml.safe_dump({"name": "chat", **ARCHETYPES["chat"]}))
    assert load_workload(str(path)) == load_workload("chat")


@pytest.mark.parametrize(
    ("content", "culprit"),
    [
        (
            "input_token: 5\noutput_tokens: 5\n",
            "'input_token' is not known (did you mean input_tokens?)",
        ),
        ("input_tokens: 5\n", "output_tokens is missing"),
        ("input_tokens: 5\noutput_tokens:\n", "output_tokens is missing"),
        ("input_tokens: 5\noutput_tokens: 0\n", "output_tokens: tokens is 0"),
        ("input_tokens: 5\noutput_tokens: 5\narrivals: often\n", "arrivals 'often' are not known"),
        ("input_tokens: [\n", "mine.yaml:2: this is no YAML"),
        ("input_tokens: 2024-99-99\n", "this is no YAML"),
        (
            "input_tokens: 5\noutput_tokens: 010\n",
            "mine.yaml:2: this is no YAML: 010 is 8 in YAML 1.1",
        ),
        ("input_tokens: 1:30\n", "mine.yaml:1: this is no YAML: 1:30 is 90 in YAML 1.1"),
        ("input_tokens: {p50: [-0_17]}\n", "-0_17 is -15 in YAML 1.1"),
        ("arrivals: 1:30.5\n", "1:30.5 is 90.5 in YAML 1.1"),
        ("- 1\n", "this is no mapping"),
        ("", "this is no mapping"),
        ("\x00", "this is no YAML"),
        ("[" * 5000, "this is no YAML"),
    ],
)
def test_a_bad_file_is_one_line_that_names_file_and_key(
    tmp_path: Path, content: str, culprit: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(WorkloadError) as caught:
        load_workload(str(path))
    message = str(caught.value)
    assert message.startswith(str(path))
    assert culprit in message
    assert "\n" not in message


def test_unreadable_files_and_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="cannot be read: No such file"):
        load_workload(str(tmp_path / "none.yaml"))
    with pytest.raises(WorkloadError, match="cannot be read: Is a directory"):
        load_workload(str(tmp_path))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WorkloadError, match="no YAML"):
        load_workload(str(tmp_path / "bytes.yaml"))
    with pytest.raises(
        WorkloadError, match=r"did you mean chat\?\): use one of chat, chat-short, code, rea"
    ):
        load_workload("chatt")


def test_numbers_that_are_what_they_look_like_and_texts_in_quotes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("[0, 0x10, 1_000, 0.5, -7, 00.5, '010', \"1:30\", 127.0.0.1:80, 3e+2]")
    assert read_yaml(path) == [0, 16, 1000, 0.5, -7, 0.5, "010", "1:30", "127.0.0.1:80", "3e+2"]
