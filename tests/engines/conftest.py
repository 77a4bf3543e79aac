"""One engine for all tests of this folder, and the trace that is replayed against it."""

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.engine import MEAN_LENGTH_TOKENS, Engine, need, serve_llamacpp


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file whose natural answers have a mean of MEAN_LENGTH_TOKENS tokens."""
    need("tokenizers", "gguf")
    from tests.engines.tiny_gguf import make_tiny_model, write_gguf

    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(make_tiny_model(MEAN_LENGTH_TOKENS), path)
    return path


@pytest.fixture(scope="session")
def llamacpp(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One llama.cpp server for all tests."""
    need("xllamacpp")
    with serve_llamacpp(tiny_model, tmp_path_factory.mktemp("llamacpp") / "log") as engine:
        yield engine


@pytest.fixture(scope="session")
def azure_rows() -> list[tuple[str, int, int]]:
    """The first 300 rows of the Azure LLM inference trace 2023, conversation: (time, input, output
    tokens)."""
    path = Path(__file__).parents[1] / "data" / "traces" / "azure_llm_2023_conv.csv.gz"
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()[1:301]
    rows = [line.strip().split(",") for line in lines]
    return [(when, int(context), int(generated)) for when, context, generated in rows]
