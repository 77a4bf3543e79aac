"""Lengths of prompts for a vocabulary that nobody knows, and tokenizers without a network."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from ampacity.loadgen.net.http import Client
from ampacity.loadgen.net.pages import Pages
from ampacity.loadgen.probe.ask import ask
from ampacity.loadgen.probe.prompt_calibration import Counting, calibrate
from ampacity.loadgen.probe.results import Calibration
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.endpoint import EndpointError, parse_endpoint
from ampacity.loadgen.send.protocols import RequestShape
from ampacity.loadgen.send.requests import RequestMaker
from ampacity.simulator.server.launch import start_in_process
from ampacity.simulator.server.protocol import CHAT_OVERHEAD_TOKENS
from ampacity.workloads.prompts.synthetic import PromptMaker, built_in_words
from ampacity.workloads.prompts.tokenizers import load_tokenizer
from tests.support.args import Cli, args_of
from tests.support.servers.fault_server import FaultServer
from tests.support.servers.odd_tokenizer import TEMPLATE_TOKENS, OddTokenizer, tokens_of
from tests.support.stage_driving import on_loop


def true_mean(most: int = 3) -> float:
    return sum(tokens_of(word, most) for word in built_in_words()) / len(built_in_words())


def counted(
    url: str, tokenizer: str = "words", context: int | None = None, short: int | None = None
) -> tuple[Calibration, RequestRecord]:
    """What calibrate finds; ``short``: what the first request was counted as, else it is sent."""
    endpoint = parse_endpoint(url)
    shape = RequestShape("chat", "odd")

    async def main() -> tuple[Calibration, RequestRecord]:
        client = Client(endpoint, endpoint.addresses(), None)
        vocabulary = load_tokenizer(tokenizer)
        maker = RequestMaker(endpoint, PromptMaker(vocabulary, "probe"), "t")
        try:
            first = await ask(client, "chat", maker.numbered(shape, 32, 4))
            if short is not None:
                first = RequestRecord(-1, -1, 0, "ok", input_tokens=short)
            async with Pages() as pages:
                how = Counting(
                    pages, client, endpoint, shape, context, vocabulary, tokenizer, maker.saying
                )
                found, record, notes = await calibrate(how, first)
                unknown = [note for note in notes if "their real lengths are not known" in note]
                assert bool(unknown) is not found.measured
        finally:
            await client.close()
        return found, record

    return on_loop("uvloop", main())


def played(
    cli: Cli, url: str, out: Path, *options: str
) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[str, Any]]:
    """(tokens planned, tokens counted, run.json) of a run."""
    done = cli("run", url, *args_of("--output-tokens 2 --seed 3"), *options, "--out", out)
    assert done.returncode == 0, done.stderr
    table = pq.read_table(out / "requests.parquet")
    columns = (np.array(table[f"input_tokens{of}"].to_pylist()) for of in ("_planned", ""))
    planned, realised = columns
    return planned, realised, json.loads((out / "run.json").read_text())


SHORT_RUN = ("--rates", "60", "--duration", "1s", "--input-tokens", "lognormal:p50=300,p99=900")


@pytest.mark.parametrize("tokenizer", ["words", "server"])
def test_with_tokenize_every_prompt_is_as_long_as_planned(
    cli: Cli, tokenizer: str, tmp_path: Path
) -> None:
    """Of words of one to three tokens those of one are taken: there are some 340. The template is
    17 tokens."""
    with OddTokenizer(tokenize="ids") as server:
        for k in (1, 2):
            planned, realised, meta = played(
                cli, server.url, tmp_path / str(k), *SHORT_RUN, "--tokenizer", tokenizer
            )
            assert len(planned) > 30
            assert (planned == realised).all()
            ones = sum(tokens_of(word) == 1 for word in built_in_words())
            assert meta["workload"]["tokenizer"] == {
                "name": tokenizer,
                "tokens_per_word": 1.0,
                "overhead_tokens": 17.0,
                "measured": True,
                "method": "tokenize",
                "overhead_error_tokens": 0.0,
                "word_sd_tokens": 0.0,
                "words": ones,
            }


def test_words_of_two_tokens_serve_where_too_few_have_one(cli: Cli, tmp_path: Path) -> None:
    """One to four tokens a word, 256 at least of a kind: any of the four may be the one. Off by
    half a word at most."""
    by_count = Counter(tokens_of(word, 4) for word in built_in_words())
    fewest = min(n for n, words in by_count.items() if words >= 256)
    with OddTokenizer(tokenize="ids", most=4) as server:
        found, _ = counted(server.url)
        planned, realised, _ = played(cli, server.url, tmp_path / "run", *SHORT_RUN)
    assert (found.tokens_per_word, found.overhead_tokens) == (fewest, 17.0)
    assert {tokens_of(word, 4) for word in found.words or ()} == {fewest}
    assert abs(realised - planned).max() <= fewest / 2


@pytest.mark.parametrize(("context", "listed"), [(32768, True), (1500, True), (1500, False)])
def test_usage_alone_gives_the_template_and_the_mean_word(
    cli: Cli, context: int, listed: bool, tmp_path: Path
) -> None:
    """A context that not all 1,024 words fit into, known or not: the line through two prompts was
    0 to 25 tokens off."""
    with OddTokenizer(tokenize=None, context=context, listed=listed) as server:
        total = []
        for k in (1, 2):
            load = args_of("--rates 100 --duration 1s --input-tokens 1000")
            planned, realised, meta = played(cli, server.url, tmp_path / str(k), *load)
            found = meta["workload"]["tokenizer"]
            assert found["tokens_per_word"] == pytest.approx(true_mean(), rel=1e-9)
            assert (found["overhead_tokens"], found["method"]) == (17.0, "usage")
            # of one to three tokens alike: 0.82
            assert found["word_sd_tokens"] == pytest.approx(0.82, rel=0.6)
            total.append(realised.sum() / planned.sum())
    assert total == pytest.approx([1, 1], abs=0.01)
    # some 50,000 words of 2 +- 0.82 tokens, other ones in each run: 0.26 % (s.d.) between two;
    # four of them
    assert total[0] == pytest.approx(total[1], abs=0.01)


def test_a_first_word_that_counts_more_is_part_of_the_mean_overhead() -> None:
    """Two tokens more where the first word is long: with /tokenize and without, between 17 and 19."""
    for tokenize in ("ids", None):
        with OddTokenizer(tokenize=tokenize, first=2) as server:
            found, _ = counted(server.url)
            again, _ = counted(server.url)
        assert 17 < found.overhead_tokens < 19
        assert found.overhead_error_tokens is not None
        assert found == again


@pytest.mark.parametrize("tokenizer", ["words", "server"])
@pytest.mark.parametrize("most", [1, 2])
def test_a_tokenize_of_another_model_is_not_believed(
    cli: Cli, tokenizer: str, most: int, tmp_path: Path
) -> None:
    """It counts one token a word, or 1.5; the model has two: usage decides, and a note says so."""
    with OddTokenizer(tokenize="ids", tokenize_most=most) as server:
        how = (*SHORT_RUN, "--tokenizer", tokenizer)
        planned, realised, meta = played(cli, server.url, tmp_path / "run", *how)
    found = meta["workload"]["tokenizer"]
    assert (found["method"], found["overhead_tokens"]) == ("usage", 17.0)
    assert realised.sum() / planned.sum() == pytest.approx(1, abs=0.02)  # 60 requests
    assert any("it is another model's, and is not used" in note for note in meta["notes"])


@pytest.mark.parametrize("tokenize", ["ids", None])
def test_a_template_with_a_date_has_a_mean_overhead(tokenize: Any) -> None:
    """Zero to two tokens more in turn: 18 on average."""
    with OddTokenizer(tokenize=tokenize, drifts=2) as server:
        found, _ = counted(server.url)
    assert found.overhead_tokens == pytest.approx(18, abs=1)
    assert found.overhead_error_tokens < 0.6


def test_a_named_vocabulary_that_is_not_the_servers_is_corrected_and_named(
    cli: Cli, tmp_path: Path
) -> None:
    """cl100k_base has one token for each of our words, this server two on average."""
    with OddTokenizer(tokenize=None) as server:
        how = (*SHORT_RUN, "--tokenizer", "cl100k_base")
        planned, realised, meta = played(cli, server.url, tmp_path / "run", *how)
    assert meta["workload"]["tokenizer"]["tokens_per_word"] == pytest.approx(true_mean(), rel=0.01)
    assert realised.sum() / planned.sum() == pytest.approx(1, abs=0.02)  # 60 requests
    said = "tokens for each of cl100k_base: that is not its vocabulary"
    assert any(said in note for note in meta["notes"])


def test_a_slow_server_is_asked_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampacity.loadgen.probe.prompt_calibration.CENSUS_MAX_S", 0.0)
    with OddTokenizer(tokenize=None) as server:
        found, _ = counted(server.url)
        assert len(server.asked) == 2 + 2 + 1  # two lengths, two parts, and both together
    assert found.overhead_tokens == 17
    assert found.tokens_per_word == pytest.approx(true_mean(), rel=0.1)


def test_the_simulators_tokenize_counts_its_template() -> None:
    with start_in_process("demo", model_name="odd") as server:
        found, _ = counted(server.url, "server")
    assert found == Calibration(1.0, CHAT_OVERHEAD_TOKENS, True, "tokenize", 0.0, 0.0)


def test_a_server_without_tokenize_is_named() -> None:
    with (
        OddTokenizer(tokenize=None) as server,
        pytest.raises(EndpointError, match="use the tokenizer words") as caught,
    ):
        counted(server.url, "server")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("short", "long", "per_word", "overhead", "measured"),
    [
        (43, 267, 1.0, 11, True),  # 11 + 1 x 32 and 11 + 1 x 256
        # 5 + 1.5 x 32 and 5 + 1.5 x 256; what follows is counted 389 too, and left out
        (53, 389, 1.5, 5, True),
        (32, 256, 1.0, 0, True),
        (30, 254, 1.0, 0, True),  # less than nothing in front of the prompt: none
        (43, 43, 1.0, 0, False),  # the long prompt counts no more than the short one
        (43, 40, 1.0, 0, False),
        (43, None, 1.0, 0, False),
    ],
)
def test_prompts_are_measured_by_two_lengths(
    short: int, long: int | None, per_word: float, overhead: int, measured: bool
) -> None:
    usage = (
        "" if long is None else f', "usage": {{"prompt_tokens": {long}, "completion_tokens": 4}}'
    )
    page = '{"choices": [{"message": {"content": "hello"}, "finish_reason": "stop"}]' + usage + "}"
    with FaultServer(refuses={"model": ("200 OK", page)}) as server:
        found, record = counted(server.url, short=short)
    assert found.tokens_per_word == pytest.approx(per_word)
    assert (found.overhead_tokens, found.measured) == (overhead, measured)
    assert record.input_tokens == (short if long is None else long)


def test_a_context_that_is_known_is_never_exceeded_by_the_probe() -> None:
    """512 tokens: the long prompt of 256 words would have some 530."""
    with OddTokenizer(tokenize="ids", context=512) as server:
        found, _ = counted(server.url, context=512)
        assert max(tokens_of(text) for text in server.asked) + TEMPLATE_TOKENS <= 512
    assert (found.tokens_per_word, found.overhead_tokens) == (1.0, 17.0)


def test_the_carried_vocabulary_needs_no_network(tmp_path: Path) -> None:
    """An empty cache, and a proxy that nobody answers on: the file comes out of the extra
    ``offline``."""
    program = "from ampacity.workloads.prompts.tokenizers import load_tokenizer; t = load_tokenizer('cl100k_base'); print(t.count('hello world'))"
    dead = "http://127.0.0.1:9"
    environment = {**os.environ, "TIKTOKEN_CACHE_DIR": str(tmp_path / "new")}
    environment |= {"HTTPS_PROXY": dead, "https_proxy": dead}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.stdout.strip() == "2", done.stderr
    expected = ["9b5ad71b2ce5302211f9c61530b329a4922fc6a4"]
    assert [p.name for p in (tmp_path / "new").iterdir()] == expected


def test_none_and_server_count_words() -> None:
    assert load_tokenizer("none").count("a b c") == load_tokenizer("server").count("a b c") == 3
