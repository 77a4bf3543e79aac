"""Lengths of prompts for a vocabulary that nobody knows, and tokenizers without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from odd_tokenizer import TEMPLATE_TOKENS, OddTokenizer, tokens_of
from stage_driving import on_loop

from loadgen.endpoint import EndpointError, parse_endpoint
from loadgen.pages import Pages
from loadgen.probe import Calibration
from loadgen.token_census import by_vocabulary, census_by_tokenize
from simulator.launch import start_in_process
from simulator.protocol import CHAT_OVERHEAD_TOKENS
from workloads.prompts import built_in_words
from workloads.tokenizers import load_tokenizer

COMMAND = [sys.executable, "-c", "from ampacity.cli import main; main()"]
TRUE_TOKENS_PER_WORD = sum(map(tokens_of, built_in_words())) / len(built_in_words())


def counted(url: str, model: str) -> Calibration:
    async def main() -> Calibration:
        async with Pages() as pages:
            return await census_by_tokenize(pages, parse_endpoint(url), model, Calibration())

    return on_loop("uvloop", main())


def test_realised_lengths_match_the_plan_within_two_percent(tmp_path: Path) -> None:
    with OddTokenizer() as server:
        done = subprocess.run(
            [*COMMAND, "run", server.url, "--input-tokens", "lognormal:p50=300,p99=900", "--output-tokens", "2", "--rates", "60",
             "--duration", "1s", "--max-requests", "50", "--out", str(tmp_path / "run")],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        by_tokenize = counted(server.url, "odd")
    assert done.returncode == 0, done.stderr
    table = pq.read_table(tmp_path / "run" / "requests.parquet")
    planned = np.array(table["input_tokens_planned"].to_pylist())
    realised = np.array(table["input_tokens"].to_pylist())
    assert len(planned) > 30
    assert np.median(realised / planned) == pytest.approx(1, abs=0.02)
    found = json.loads((tmp_path / "run" / "run.json").read_text())["workload"]["tokenizer"]
    assert found["overhead_tokens"] == TEMPLATE_TOKENS
    assert found["tokens_per_word"] == pytest.approx(TRUE_TOKENS_PER_WORD, rel=1e-9)
    assert by_tokenize == Calibration(TRUE_TOKENS_PER_WORD, TEMPLATE_TOKENS, measured=True)


def test_the_simulators_tokenize_counts_its_template() -> None:
    with start_in_process("demo") as server:
        found = counted(server.url, "demo")
    assert found == Calibration(1.0, CHAT_OVERHEAD_TOKENS, measured=True)


def test_a_server_without_tokenize_is_named() -> None:
    with (
        OddTokenizer(tokenize=False) as server,
        pytest.raises(EndpointError, match="use the tokenizer words") as caught,
    ):
        counted(server.url, "odd")
    assert len(str(caught.value).splitlines()) == 1


def test_the_carried_vocabulary_needs_no_network(tmp_path: Path) -> None:
    """An empty cache, and a proxy that nobody answers on: the file comes out of the extra ``offline``."""
    program = "from workloads.tokenizers import load_tokenizer; t = load_tokenizer('cl100k_base'); print(t.count('hello world'))"
    dead = "http://127.0.0.1:9"
    environment = {
        **os.environ,
        "TIKTOKEN_CACHE_DIR": str(tmp_path / "new"),
        "HTTPS_PROXY": dead,
        "https_proxy": dead,
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )
    assert done.stdout.strip() == "2", done.stderr
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["9b5ad71b2ce5302211f9c61530b329a4922fc6a4"]


def test_a_vocabulary_that_is_not_the_servers_is_corrected_and_named() -> None:
    """Prompts five times as long as planned would be the result of trusting it."""
    assert by_vocabulary(Calibration(1.01, 5, True), "cl100k_base") == (Calibration(1.0, 5, True), [])
    assert by_vocabulary(Calibration(), "cl100k_base") == (Calibration(), [])
    found, notes = by_vocabulary(Calibration(5.0, 5, True), "cl100k_base")
    assert found.tokens_per_word == 5
    assert "5.00 tokens for each of cl100k_base" in notes[0]


def test_none_and_server_count_words() -> None:
    assert load_tokenizer("none").count("a b c") == load_tokenizer("server").count("a b c") == 3
