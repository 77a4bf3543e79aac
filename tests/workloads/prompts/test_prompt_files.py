"""Real prompts from files, images as data URLs, shared text, and no prompt twice."""

import base64
import gzip
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.lengths.parse import Fixed
from ampacity.workloads.profile import Workload
from ampacity.workloads.prompts.files import load_prompts, read_prompts
from ampacity.workloads.prompts.images import Images, parse_images, png
from ampacity.workloads.prompts.prefixes import infinite_cache
from ampacity.workloads.prompts.synthetic import PromptMaker
from ampacity.workloads.prompts.tokenizers import WORDS
from ampacity.workloads.schedule import open_schedule
from tests.support.repeats import often

SHAREGPT = json.loads("""{"id": "1", "conversations": [{"from": "gpt",
    "value": "an answer that nobody asked for"}, {"from": "human",
    "value": "one two three"}, {"from": "gpt", "value": "four five"}, {"from": "human",
    "value": "six"}, {"from": "gpt", "value": "seven eight nine"}, {"from": "human",
    "value": "ten eleven"}]}""")
BATCH = json.loads("""{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
    "body": {"model": "m", "max_tokens": 77, "messages": [{"role": "system",
    "content": "be brief"}, {"role": "user", "content": [{"type": "text",
    "text": "hello there"}]}]}}""")


class Words:
    """Counts words, as a vocabulary would count its tokens."""

    name = "vocabulary"

    def count(self, text: str) -> int:
        return len(text.split())


def write(path: Path, *lines: Any) -> Path:
    path.write_text(
        "".join(json.dumps(line, ensure_ascii=False) + "\r\n" for line in lines), encoding="utf-8"
    )
    return path


def test_every_form_is_read_with_all_its_turns(tmp_path: Path) -> None:
    file = read_prompts(
        write(
            tmp_path / "p.jsonl",
            SHAREGPT,
            BATCH,
            {"prompt": "plain"},
            "bare\u2028text",
            {"messages": [{"role": "user", "content": "x"}]},
        )
    )
    assert [len(entry.turns) for entry in file.entries] == [3, 1, 1, 1, 1]
    assert [[m["content"] for m in turn] for turn in file.entries[0].turns] == [
        ["one two three"],
        ["six"],
        ["ten eleven"],
    ]
    assert file.entries[0].answers == ("four five", "seven eight nine", None)
    assert [m["role"] for m in file.turn(1, 0)] == ["system", "user"]
    assert file.entries[1].limit_tokens == 77
    assert file.turn(3, 0)[0]["content"] == "bare\u2028text"
    assert file.describe() == {"file": "p.jsonl", "prompts": 5, "turns": 7}
    assert file.notes == (
        "p.jsonl: 1 answers without a message of a user before them are left out",
        "p.jsonl: fields that are not sent: id (1 rows), custom_id (1 rows), method (1 rows), url (1 rows), model (1 rows)",
    )


def test_plain_text_and_a_json_array(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("first\n\nsecond", encoding="utf-8")
    assert [e.turns[0][0]["content"] for e in read_prompts(tmp_path / "p.txt").entries] == [
        "first",
        "second",
    ]
    (tmp_path / "s.json").write_text(json.dumps([SHAREGPT, SHAREGPT]), encoding="utf-8")
    assert len(read_prompts(tmp_path / "s.json").entries) == 2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "there is no prompt in it"),
        ('{"foo": []}\n', "p.jsonl:1: none of messages, "),
        ('{"prompt": "x"}\nnot json\n', "p.jsonl:2: a line that is no JSON"),
        (
            '{"messages": [{"role": "robot", "content": "x"}]}',
            "p.jsonl:1: the unknown role 'robot' of a message",
        ),
        (
            '{"messages": [{"role": "user", "content": 5}]}',
            "p.jsonl:1: a content of a message that is neither",
        ),
        (
            '{"messages": [{"role": "user", "content": [5]}]}',
            "p.jsonl:1: a content of a message that is neither",
        ),
        ('{"messages": 5}', "p.jsonl:1: a field messages that is not a list of messages"),
        ('{"messages": "oops"}', "p.jsonl:1: a field messages that is not a list of messages"),
        (
            '{"conversations": "oops"}',
            "p.jsonl:1: a field conversations that is not a list of messages",
        ),
        (
            '{"messages": {"role": "user", "content": "oops"}}',
            "p.jsonl:1: a field messages that is not a",
        ),
        (
            '{"body": {"messages": "oops"}}',
            "p.jsonl:1: a field messages that is not a list of messages",
        ),
        (
            '{"prompt": {"text": "x"}}',
            "p.jsonl:1: a field prompt that is neither a text nor a list of",
        ),
        (
            '{"prompt": 5}',
            "p.jsonl:1: a field prompt that is neither a text nor a list of messages",
        ),
        ('{"prompt": [1, 2]}', "p.jsonl:1: a message that is no object"),
        (
            '{"text": [{"role": "user", "content": "oops"}]}',
            "p.jsonl:1: a field text that is not a text",
        ),
        ('{"instruction": 5, "input": "x"}', "p.jsonl:1: a field instruction that is not a text"),
        (
            '{"messages": [{"role": "user", "content": [{"text": "x"}]}]}',
            "p.jsonl:1: a content of a message that is neither",
        ),
        (
            '{"messages": [{"role": "user", "content": [{"type": "text", "text": null}]}]}',
            "p.jsonl:1: a content of a message that is neither",
        ),
        (
            '{"prompt": "y", "max_tokens": "9"}',
            "p.jsonl:1: a limit on the answer that is no whole number",
        ),
        (
            '{"prompt": "y", "max_tokens": 9.5}',
            "p.jsonl:1: a limit on the answer that is no whole number",
        ),
        *(
            (
                f'{{"prompt": "y", "max_tokens": {tokens}}}',
                "p.jsonl:1: a limit on the answer of more than 2147483647 tokens",
            )
            for tokens in (2**31, 10**12, 10**19)
        ),
        ('{"messages": [5]}', "p.jsonl:1: a message that is no object"),
        ("17", "p.jsonl:1: a value that is neither an object nor a text"),
        (b'{"prompt": "x"}\n{"prompt": "caf\xe9"}', "p.jsonl:2: a byte that is no UTF-8"),
    ],
)
def test_a_damaged_row_is_one_line_with_its_place_and_can_be_skipped(
    tmp_path: Path, text: str | bytes, complaint: str
) -> None:
    data = text.encode() if isinstance(text, str) else text
    path = tmp_path / "p.jsonl"
    path.write_bytes(data)
    with pytest.raises(WorkloadError) as caught:
        read_prompts(path)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
    if text:
        assert str(caught.value).endswith("; mend or remove the row, or give --skip-bad-rows")
        path.write_bytes(b'"one good row"\n' + data)
        file = read_prompts(path, skip_bad_rows=True)
        reason = complaint.partition(": ")[2]
        (note,) = file.notes
        good = 1 + data.count(b'"x"}\n')
        assert len(file.entries) == good
        assert note.startswith(f"p.jsonl: 1 bad rows of {good + 1} are left out: 1 with {reason}")


def human(text: object) -> dict[str, object]:
    return {"from": "human", "value": text}


def gpt(text: object) -> dict[str, object]:
    return {"from": "gpt", "value": text}


GOOD = {"conversations": [human("one"), gpt("two")]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"conversations": []}, "no turns"),
        ({"messages": None}, "no turns"),
        ({"conversations": [gpt("an answer")]}, "no message of a user"),
        ({"conversations": [{"from": "system", "value": "be brief"}]}, "no message of a user"),
        ({"conversations": [human(""), gpt("an answer")]}, "empty messages only"),
        ({"conversations": [human(" \n"), gpt("an answer"), human(None)]}, "empty messages only"),
        ({"messages": [{"role": "user", "content": None}]}, "empty messages only"),
        ({"messages": [{"role": "user", "content": []}]}, "empty messages only"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": " "}]}]},
            "empty messages only",
        ),
        ({"prompt": ""}, "no text"),
        ({"prompt": "  "}, "no text"),  # as an empty one: another field may hold the text
        ({"prompt": "\u200b\ufeff"}, "no text"),
        ({"conversations": [human("\x00\u00ad"), gpt("an answer")]}, "empty messages only"),
        ({"body": {"messages": []}}, "no turns"),
        ("", "empty messages only"),
    ],
)
def test_a_row_without_a_prompt_is_left_out_and_counted(
    tmp_path: Path, row: object, reason: str
) -> None:
    """What a set of a hundred thousand conversations holds a few of: never an empty prompt, never
    in silence."""
    file = read_prompts(write(tmp_path / "p.jsonl", GOOD, row, GOOD, row))
    assert len(file.entries) == 2
    assert file.notes == (f"p.jsonl: 2 rows without a prompt of 4 are left out: 2 with {reason}",)
    with pytest.raises(
        WorkloadError,
        match=f"there is no prompt in it; p.jsonl: 1 rows without a prompt of 1 .* {reason}",
    ):
        read_prompts(write(tmp_path / "p.jsonl", row))


def test_parts_of_a_conversation_that_are_not_sent_are_counted(tmp_path: Path) -> None:
    rows = [
        {
            "id": "a",
            "conversations": [gpt("hello, who asked?"), human("one"), gpt("two"), gpt("three")],
        },
        {
            "id": "b",
            "conversations": [
                human("one"),
                gpt("two"),
                human(""),
                gpt("to nothing"),
                human("five"),
                gpt("six"),
            ],
        },
        json.loads("""{"messages": [{"role": "user", "content": "what is it worth?",
            "name": "Ann"}, {"role": "assistant", "content": null,
            "tool_calls": [{"id": "1"}]}, {"role": "tool", "tool_call_id": "1",
            "content": "42"}, {"role": "assistant", "content": "forty-two"}],
            "temperature": 0.5, "max_tokens": 9}"""),
    ]
    file = read_prompts(write(tmp_path / "p.jsonl", *rows))
    texts = [[[m["content"] for m in turn] for turn in entry.turns] for entry in file.entries]
    assert texts == [[["one"]], [["one"], ["five"]], [["what is it worth?"], ["42"]]]
    assert [entry.answers for entry in file.entries] == [
        ("two",),
        ("two", "six"),
        (None, "forty-two"),
    ]
    assert file.entries[2].limit_tokens == 9
    assert (
        file.notes
        == (
            "p.jsonl: 3 answers without a message of a user before them are left out",  # hello; three; to nothing
            "p.jsonl: 1 empty messages are left out",
            "p.jsonl: 1 recorded answers have no text: their lengths are drawn",
            "p.jsonl: 1 results of tools are sent as messages of a user",
            "p.jsonl: fields that are not sent: id (2 rows), temperature (1 rows), name of a message (1 rows), "
            "tool_calls of a message (1 rows), tool_call_id of a message (1 rows)",
        )
    )


def test_rows_of_json_in_a_text_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text('{"prompt": "a"}\n{"messages": []}\n{"a": "prompt"}\nplain: {"prompt": "a"}\n')
    notes = read_prompts(path).notes
    expected = ("p.txt: 2 texts are JSON objects, sent as they stand: are they rows of a .jsonl?",)
    assert notes == expected


def test_messages_behind_the_last_of_a_user_are_counted(tmp_path: Path) -> None:
    system = {"from": "system", "value": "be brief"}
    rows = [
        {"conversations": [human("one"), gpt("two"), system]},
        {"conversations": [human("one"), gpt("two"), system, gpt("three"), system]},
        {"conversations": [human("one"), gpt("two"), system, human("three")]},
    ]
    file = read_prompts(write(tmp_path / "p.jsonl", *rows))
    assert [len(entry.turns) for entry in file.entries] == [1, 1, 2]
    said = "2 conversations end with messages of the system: they are left out"
    assert f"p.jsonl: {said}" in file.notes


def test_an_instruction_and_its_input_are_one_prompt(tmp_path: Path) -> None:
    """Alpaca's rows: with ``input`` alone the question would be lost."""
    file = read_prompts(
        write(
            tmp_path / "p.jsonl",
            {"instruction": "Translate.", "input": "Haus", "output": "house"},
            {"instruction": "Name a colour.", "input": "", "output": "red"},
        )
    )
    assert [e.turns[0][0]["content"] for e in file.entries] == [
        "Translate.\n\nHaus",
        "Name a colour.",
    ]
    assert file.notes[0].startswith("p.jsonl: fields that are not sent: output (2 rows)")


def test_a_blank_field_gives_way_to_one_with_a_text(tmp_path: Path) -> None:
    rows = [{"input": " ", "instruction": "Name a colour."}, {"messages": [], "prompt": "one"}]
    file = read_prompts(write(tmp_path / "p.jsonl", *rows))
    assert [e.turns[0][0]["content"] for e in file.entries] == ["Name a colour.", "one"]


def test_a_key_that_stands_twice_is_said(tmp_path: Path) -> None:
    for name, text in (
        ("p.jsonl", '{"prompt": "a", "prompt": "b"}\n'),
        ("p.json", '[{"prompt": "a", "prompt": "b"}]'),
    ):
        (tmp_path / name).write_text(text)
        file = read_prompts(tmp_path / name)
        assert file.entries[0].turns[0][0]["content"] == "b"
        assert file.notes == (
            f"{name}: the key prompt stands twice in an object, 1 times: the last one is taken",
        )


def test_a_limit_below_one_is_not_used_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "max_tokens": limit} for limit in (0, -1, 9)]
    file = read_prompts(write(tmp_path / "p.jsonl", *rows, {"prompt": "b", "max_tokens": None}))
    assert [entry.limit_tokens for entry in file.entries] == [None, None, 9, None]
    assert file.notes == ("p.jsonl: 2 limits on the answer are below 1: they are not used",)


def test_half_a_character_is_sent_as_a_replacement(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    # a half, and both halves
    path.write_text('{"prompt": "a\\ud83d"}\n{"prompt": "\\ud83d\\ude00"}\n')
    file = read_prompts(path)
    assert [e.turns[0][0]["content"] for e in file.entries] == ["a\ufffd", "\U0001f600"]
    assert file.notes == (
        "p.jsonl: 1 messages hold half of a character (a lone surrogate): U+FFFD is sent for it",
    )


def test_a_gzipped_file_is_read_and_other_formats_are_named(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(data := gzip.compress(b'{"prompt": "x"}\n'))
    assert read_prompts(path).entries[0].turns == (({"role": "user", "content": "x"},),)
    path.write_bytes(data[:-9])
    with pytest.raises(WorkloadError, match="cannot be read: the gzip data are broken"):
        read_prompts(path)
    for name in ("p.csv", "p.parquet"):
        (tmp_path / name).write_bytes(b"prompt\nx\n")
        with pytest.raises(WorkloadError, match=r"prompts are read from \.jsonl, \.json and"):
            read_prompts(tmp_path / name)


def test_utf16_and_a_json_document(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes('{"prompt": "größe"}\n"b"\n'.encode("utf-16"))
    assert [e.turns[0][0]["content"] for e in read_prompts(tmp_path / "p.jsonl").entries] == [
        "größe",
        "b",
    ]
    (tmp_path / "p.json").write_text(json.dumps(GOOD, indent=1))
    assert len(read_prompts(tmp_path / "p.json").entries) == 1
    (tmp_path / "bad.json").write_bytes(b'["good", "caf\\xe9"]'.replace(b"\\xe9", b"\xe9"))
    with pytest.raises(WorkloadError, match=r"bad\.json: item 2: a byte that is no UTF-8"):
        read_prompts(tmp_path / "bad.json")
    assert len(read_prompts(tmp_path / "bad.json", skip_bad_rows=True).entries) == 1
    (tmp_path / "lines.json").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert len(read_prompts(tmp_path / "lines.json").entries) == 2


rows_of_any_shape = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda v: (
        st.lists(v, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                "messages role content body from value prompt text type max_tokens".split()
            ),
            v,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=often(50, 200), deadline=None)
@given(st.lists(rows_of_any_shape, max_size=4))
def test_whatever_the_rows_hold_each_is_sent_or_counted(
    tmp_path_factory: pytest.TempPathFactory, rows: list[object]
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "any.jsonl", "good", *rows)
    file = read_prompts(path, skip_bad_rows=True)
    left_out = sum(int(n.split()[1]) for n in file.notes if "are left out: " in n)
    assert len(file.entries) + left_out == 1 + len(rows)
    for entry in file.entries:
        assert all(any(m["role"] == "user" for m in turn) for turn in entry.turns)
        assert len(json.dumps([m["content"] for turn in entry.turns for m in turn]).encode()) > 0
    try:
        strict = read_prompts(path)
    except WorkloadError as error:
        assert "\n" not in str(error)  # noqa: PT017 - whether it raises is up to the rows
        assert any(" bad rows of " in n for n in file.notes)
    else:
        assert strict == file


def test_conversations_become_sessions_with_growing_prompts(tmp_path: Path) -> None:
    prompts = load_prompts(write(tmp_path / "p.jsonl", SHAREGPT), Words())
    schedule = open_schedule(
        Workload("w", Fixed(5), Fixed(50), arrivals="constant", prompts=prompts),
        rate_rps=3,
        duration_s=2,
        seed=1,
        stage=0,
    )
    # 3 words; 3 + 2 answered + 1; 6 + 3 + 2; the last answer is not in the file
    assert schedule.session is not None
    one = schedule.take(np.flatnonzero(schedule.session == 0))
    assert one.input_tokens.tolist() == [3, 6, 11]
    assert one.output_tokens.tolist() == [2, 3, 50]
    assert one.continues.tolist() == [-1, 0, 1]
    assert len(schedule) == 6  # 3 requests/s for 2 s: two conversations


def test_a_set_that_wraps_says_how_often(tmp_path: Path) -> None:
    lines = [{"prompt": f"prompt number {i}"} for i in range(10)]
    prompts = load_prompts(write(tmp_path / "p.jsonl", *lines), Words())
    schedule = open_schedule(
        Workload("w", Fixed(5), Fixed(5), arrivals="constant", prompts=prompts),
        rate_rps=100,
        duration_s=1,
        seed=1,
        stage=0,
    )
    # each ten times, and each once before any comes again
    assert np.bincount(schedule.entry).tolist() == [10] * 10
    assert sorted(schedule.entry[:10]) == list(range(10))
    assert prompts.file.reuse_factor(100) == 10.0
    assert schedule.planned_cached_tokens().sum() == 0  # 3 tokens each: no whole block
    # all but the last token
    assert infinite_cache(schedule.input_tokens, schedule.shared, block_tokens=1).sum() == 90 * 2
    assert prompts.file.reuse_factor(4) == 1.0
    assert load_prompts(tmp_path / "p.jsonl", WORDS).new_tokens[0] == (4,)  # 15 characters


# --- images ---


def decode_png(data: bytes) -> np.ndarray[Any, Any]:
    """The pixels of an 8-bit RGB image without filters, its checksums verified."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(
            kind + body
        )
        chunks[kind], at = body, at + 12 + length
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), dtype=np.uint8).reshape(
        height, 1 + 3 * width
    )
    assert (rows[:, 0] == 0).all()
    return rows[:, 1:].reshape(height, width, 3)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (33, 64), (640, 50)])
def test_generated_images_have_their_size_and_are_all_different(width: int, height: int) -> None:
    assert decode_png(png(width, height, 1)).shape == (height, width, 3)
    assert png(width, height, 1) == png(width, height, 1)
    assert len({png(width, height, seed) for seed in range(50)}) == 50


def test_image_parts_are_data_urls(tmp_path: Path) -> None:
    images = parse_images({"count": 2, "sizes": ["8x4", "16x16"]}, "images")
    parts = images.parts(3)
    assert [p["type"] for p in parts] == ["image_url"] * 2
    shapes = [
        decode_png(base64.b64decode(p["image_url"]["url"].split(",")[1])).shape for p in parts
    ]
    assert shapes == [(4, 8, 3), (16, 16, 3)]
    assert images.parts(3) != images.parts(4)
    (tmp_path / "a.png").write_bytes(png(2, 2, 1))
    (tmp_path / "b.JPG").write_bytes(b"\xff\xd8\xff")
    (tmp_path / "c.txt").write_text("no image")
    folder = parse_images({"folder": str(tmp_path)}, "images")
    assert len(folder.files) == 2
    assert folder.parts(1)[0]["image_url"]["url"] == "data:image/jpeg;base64,/9j/"
    assert isinstance(folder, Images)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({}, "write 'sizes"),
        ({"sizes": ["512"]}, "write WIDTHxHEIGHT"),
        ({"sizes": ["0x5"]}, "write WIDTHxHEIGHT"),
        ({"sizes": "8x8", "count": 0}, "count is 0"),
        ({"folder": "/no/such"}, "folder /no/such cannot be read"),
        ({"sizes": "8x8", "size": 1}, "key 'size' is not known"),
    ],
)
def test_wrong_images_are_one_line(value: object, complaint: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        parse_images(value, "w.yaml: images")
    assert complaint in str(caught.value)


# --- shared text ---


def test_shared_text_is_the_same_and_the_rest_is_not() -> None:
    maker = PromptMaker(WORDS, "salt", overhead_tokens=10)
    first, second = (maker.parts(i, 300, [(7, 100), (8, 50)]) for i in (1, 2))
    assert first[0] == second[0]
    assert len(first[0].split()) == 150
    assert [len(own.split()) for _, own in (first, second)] == [140, 140]
    assert first[1].split()[:4] != second[1].split()[:4]
    longer, _ = maker.parts(3, 300, [(7, 120)])
    assert longer.split()[:100] == first[0].split()[:100]  # a beginning of the same endless text
    # the segment fills the prompt, as a trace's blocks may
    assert maker.parts(1, 60, [(7, 100)])[1] == ""
    assert PromptMaker(WORDS, "other").parts(1, 300, [(7, 100)])[0] != first[0]


def test_a_new_segment_drives_an_old_one_out_but_not_its_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ampacity.workloads.prompts.synthetic.SEGMENT_CACHE_CHARS", 5000)
    maker = PromptMaker(WORDS, "salt")
    before = maker.parts(1, 300, [(7, 200)])[0]
    for segment in range(100, 140):
        maker.parts(1, 300, [(segment, 200)])
    assert len(maker._segments) <= 6
    assert maker.parts(1, 300, [(7, 200)])[0] == before
