"""Sharing by hash_ids: the size of a block, rows that do not fit it, and what is left of the
sharing.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.fit.profile import fit
from ampacity.workloads.prompts.prefixes import block_sizes, infinite_cache
from ampacity.workloads.replay import Replayed, replayed
from ampacity.workloads.trace_cuts import Replay
from ampacity.workloads.traces.read import read_trace


def lines(path: Path, prompts: list[tuple[int, object]]) -> Path:
    rows = [
        {"timestamp": 1000 * k, "input_length": n, "output_length": 5, "hash_ids": ids}
        for k, (n, ids) in enumerate(prompts)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def played(path: Path, size: int | None = None) -> Replayed:
    return replayed(read_trace(path), Replay(block_tokens=size), 1)


def cached(found: Replayed) -> list[int]:
    return found.schedule.planned_cached_tokens().tolist()


def of_blocks(found: Replayed) -> list[str]:
    return [note for note in found.notes if "hash_ids" in note]


def test_one_odd_row_is_named_and_the_rest_kept(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "m.jsonl",
        [
            (32, [1, 2]),
            (40, [1, 2, 3]),
            (48, [1, 2, 3, 4, 5]),
            (64, [1, 2, 3, 9]),
            (64, [1, 2, 3, 9]),
        ],
    )
    found = played(path)
    # 16 tokens: 32 are shared; of the odd row's three blocks the third was seen up to 8 tokens;
    # then 48, and 63
    assert cached(found) == [0, 32, 32, 48, 48]
    assert of_blocks(found) == [
        "m.jsonl: hash_ids: 1 of 5 rows have a number of ids that does not go with blocks of 16 tokens: line 3 "
        "(5 for 48 tokens); ids behind a prompt's end are left out, tokens without an id are its own"
    ]
    shared = found.schedule.shared
    assert shared.totals().tolist() == [32, 40, 48, 64, 64]


def test_a_row_with_too_few_ids_begins_with_those_it_has(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "m.jsonl",
        [(64, [1, 2, 3, 4]), (64, [1, 2]), (48, [1, 2, 7]), (64, [1, 2, 7, 8])],
    )
    found = played(path)
    assert cached(found) == [0, 32, 32, 48]
    assert "line 2 (2 for 64 tokens)" in of_blocks(found)[0]


def test_one_odd_row_among_thousands_changes_the_share_by_its_own(tmp_path: Path) -> None:
    """3,993 prompts of 40 documents; the odd row has one id too many."""
    rng = np.random.default_rng(1)
    prompts: list[tuple[int, object]] = []
    for k in range(3993):
        document, blocks = int(rng.integers(40)), int(rng.integers(2, 9))
        ids = [1000 * document + place for place in range(blocks)]
        prompts.append((512 * blocks + int(rng.integers(1, 513)), [*ids, 10**6 + k]))
    whole = sum(cached(played(lines(tmp_path / "a.jsonl", prompts))))
    n, ids = prompts[2000]
    prompts[2000] = (n, [*list(ids), 5])
    found = played(lines(tmp_path / "b.jsonl", prompts))
    assert sum(cached(found)) == whole
    assert whole / sum(n for n, _ in prompts) > 0.8
    assert "1 of 3993 rows" in of_blocks(found)[0]
    assert "line 2001 " in of_blocks(found)[0]
    measured = fit(read_trace(tmp_path / "b.jsonl"), "b")["measured"]
    assert measured["sharing"]["block_tokens"] == 512  # no size is invented
    assert any("1 of 3993 rows" in note for note in measured["notes"])


@pytest.mark.parametrize("size", [16, 64, 128, 500, 512, 1024])
@pytest.mark.parametrize("partial", [True, False])
def test_the_size_is_found_by_the_lengths(size: int, partial: bool) -> None:
    """``partial``: what is left of a prompt has an id too (Mooncake); else it has none
    (kv-cache-tester)."""
    rng = np.random.default_rng(size)
    lengths = rng.integers(3 * size, 40 * size, 400)
    counts = -(-lengths // size) if partial else lengths // size
    counts[::50] += 2  # a few odd ones
    assert block_sizes(lengths, np.concatenate([[0], np.cumsum(counts)]))[0] == size


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ((2900, 2950), "blocks of 738 tokens are taken, though sizes from 738 to 966 "),
        ((40, 41), "blocks of 11 tokens are taken, though sizes from 11 to 13 "),
        ((60, 64), ""),  # 16 to 19
    ],
)
def test_a_size_that_is_guessed_among_many_is_said(
    tmp_path: Path, lengths: tuple[int, ...], said: str
) -> None:
    """Four ids each: n / 4 to (n - 1) / 3 tokens. A single power of two is taken for the size."""
    path = lines(tmp_path / "m.jsonl", [(n, [1, 2, 3, k]) for k, n in enumerate(lengths)])
    notes = of_blocks(played(path))
    assert len(notes) == bool(said)
    assert said in "".join(notes)
    assert "though" not in "".join(of_blocks(played(path, 800)))


def test_a_size_that_is_given_counts_and_one_that_the_file_says_too(tmp_path: Path) -> None:
    path = lines(tmp_path / "m.jsonl", [(64, [1, 2]), (64, [1, 3])])
    assert cached(played(path)) == [0, 32]
    found = played(path, 16)
    assert cached(found) == [0, 16]
    assert "2 of 2 rows" in of_blocks(found)[0]
    rows = [json.loads(line) | {"block_size": 16} for line in path.read_text().splitlines()]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert cached(played(path)) == [0, 16]
    plain = tmp_path / "p.csv"
    plain.write_text("timestamp,input_tokens,output_tokens\n1,5,5\n")
    with pytest.raises(WorkloadError, match="--block-size goes with hash_ids"):
        played(plain, 16)


def test_where_no_size_fits_nothing_is_shared_and_that_is_said(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "m.jsonl", [(100, [1]), (100, [1, 2]), (1000, [1, 2]), (10, [1, 2, 3, 4])]
    )
    found = played(path)
    assert cached(found) == [0, 0, 0, 0]
    assert found.prompts == "unique"
    assert of_blocks(found) == [
        "m.jsonl: hash_ids: no size of a block fits most of the rows, so that nothing is shared; give --block-size"
    ]
    measured = fit(read_trace(path), "m")["measured"]
    assert "sharing" not in measured
    assert any("no size of a block fits" in note for note in measured["notes"])


def test_rows_without_ids_and_ids_as_text_are_read(tmp_path: Path) -> None:
    rows = json.loads(r"""["timestamp,input_tokens,output_tokens,hash_ids",
        "0,32,5,\"[1, 2]\"", "1,32,5,", "2,48,5,\"[1,2,3]\""]""")
    path = tmp_path / "t.csv"
    path.write_text("\n".join(rows))
    found = played(path)
    assert cached(found) == [0, 0, 32]
    assert "column hash_ids has no value in 1 of 3 rows" in " ".join(found.notes)


def test_cutting_keeps_the_blocks_that_lie_in_a_prompt() -> None:
    """Blocks behind a prompt's end have no tokens, in the first, a middle and the last prompt."""
    from ampacity.workloads.prompts.prefixes import prefixes_of_blocks

    ids, start = np.arange(9), np.array([0, 3, 3, 6, 9])
    shared = prefixes_of_blocks(ids, start, np.array([20, 5, 48, 16]), 16)
    assert [shared.of(i) for i in range(4)] == [
        [(0, 16), (1, 4)],
        [],
        [(3, 16), (4, 16), (5, 16)],
        [(6, 16)],
    ]
    assert infinite_cache(np.array([20, 5, 48, 16]), shared).tolist() == [0, 0, 0, 0]
