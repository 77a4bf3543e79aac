"""Recorded load as files, and what is read of it."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.traces.read import read_trace
from ampacity.workloads.traces.trace import Trace

HEADER = "timestamp,input_tokens,output_tokens\n"


def written(path: Path, content: str | bytes) -> Path:
    """Write a file, compressed where its name says so."""
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def lines(path: Path, *items: Any) -> Path:
    """Write JSON lines; a text is a line as it stands."""
    text = (item if isinstance(item, str) else json.dumps(item) for item in items)
    return written(path, "".join(line + "\n" for line in text))


def rows(trace: Trace) -> list[tuple[float, int, int]]:
    """Return the arrival in s, the input tokens and the output tokens of each request."""
    held = (trace.arrival_s, trace.input_tokens, trace.output_tokens)
    return list(zip(*(column.tolist() for column in held), strict=True))


def refusal(path: Path, **options: Any) -> str:
    """Return the one line with which a file is refused: it names the file."""
    with pytest.raises(WorkloadError) as caught:
        read_trace(path, **options)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert str(path) in message
    return message
