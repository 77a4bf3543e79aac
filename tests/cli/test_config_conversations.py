"""Settings of sessions, prompts, images and several endpoints: what goes together, and one line
where it does not.
"""

from pathlib import Path
from typing import Any

import pytest

from ampacity.config import make_settings

URL = "http://127.0.0.1:8000/v1"
CHAT = "input_tokens: 50\noutput_tokens: 5\n"


def settings(tmp_path: Path, workload: str = "", **raw: Any) -> Any:
    if workload:
        (tmp_path / "w.yaml").write_text(CHAT + workload)
        raw["workload"] = str(tmp_path / "w.yaml")
    return make_settings({"url": URL, "rates": "5", "duration": "4s", **raw})


def test_several_urls_become_endpoints_that_share_their_headers(tmp_path: Path) -> None:
    both = f"{URL}, http://127.0.0.1:8001/v1"
    for url in (both, [URL, "http://127.0.0.1:8001/v1"]):
        found = settings(tmp_path, url=url, header=["X-A: 1"], sticky=True)
        assert found.endpoint.port == 8000
        assert [e.port for e in found.replicas] == [8001]
        assert found.replicas[0].headers == (("X-A", "1"),)
        assert found.sticky


def test_a_workload_file_may_have_everything(tmp_path: Path) -> None:
    found = settings(
        tmp_path,
        "sessions: {turns: 3, think_ms: 0}\nprefixes: [{tokens: 40}]\nimages: {sizes: 8x8}\n",
        salt="fixed",
    ).workload
    assert found.sessions.think_ms is None
    assert found.prefixes.pools[0].tokens.mean() == 40
    assert found.images.sizes == ((8, 8),)
    told = found.describe()
    assert told["sessions"]["mean_requests"] == 3
    assert {"prefixes", "images"} <= told.keys()


@pytest.mark.parametrize(
    ("workload", "raw", "complaint"),
    [
        ("", {"url": f"{URL},{URL}"}, "give base URLs that differ"),
        ("", {"url": ","}, "give base URLs that differ"),
        ("", {"sticky": True}, "--sticky goes with several URLs"),
        ("sessions: {turns: 2}", {"api": "embeddings"}, "--api embeddings has no conversation"),
        ("images: {sizes: 8x8}", {"api": "responses"}, "images are sent in chat messages"),
        ("prefixes: [{tokens: 9}]", {"prompts": "p.txt"}, "--prompts brings its own texts"),
        ("", {"prompts": "p.txt", "input_tokens": "50"}, "its own texts: drop --input-tokens"),
        (
            "classes: {a: {weight: 1}, b: {weight: 1}}",
            {"prompts": "p.txt"},
            "--prompts brings its own texts: use a workload of one class",
        ),
        (
            "sessions: {turns: 2, limit_tokens: 900, summary_tokens: 9}",
            {"prompts": "p.txt"},
            "--prompts brings its own texts: use a workload of one class",
        ),
        ("", {"prompts": "/no/such"}, "prompts /no/such cannot be read"),
        (
            "prefixes: {cached_share: 0.4}\nsessions: {turns: 2}",
            {},
            "cached_share is for lone requests",
        ),
        (
            "arrivals: 'burst:factor=5,length=1h'",
            {"rates": "2"},
            "leave no change of rate in a stage of 4 s",
        ),
        ("", {"rates": "1e12"}, "is more than 50000000 requests"),
        ("sessions: {turns: 2, finish_s: 1.5}", {}, "finish_s is 1.5: give a whole number"),
        (
            "sessions: {turns: 2, steps: {calls: 0, result_tokens: 5}}",
            {},
            "w.yaml: sessions: steps: calls",
        ),
    ],
)
def test_what_does_not_go_together_is_one_line(
    tmp_path: Path, workload: str, raw: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError) as caught:
        settings(tmp_path, workload, **raw)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_prompt_file_is_described_by_what_it_holds(tmp_path: Path) -> None:
    """Four characters a token: messages of 1, 2 and 3 tokens, the last two of one conversation."""
    path, workload = tmp_path / "p.jsonl", "sessions: {turns: 9, user_tokens: 77, think_ms: 5}"
    path.write_text(
        '{"messages": [{"role": "user", "content": "abcd"}]}\n'
        '{"messages": [{"role": "user", "content": "abcdefgh"},'
        ' {"role": "assistant", "content": "yes"}, {"role": "user", "content": "abcdefghijkl"}]}\n'
    )
    told = settings(tmp_path, workload, prompts=str(path)).workload.describe()
    assert (told["input_tokens"]["mean"], told["input_tokens"]["p99"]) == (1.5, 2)
    assert (told["sessions"]["turns"]["mean"], told["sessions"]["user_tokens"]["mean"]) == (1.5, 3)
    assert told["sessions"]["think_ms"]["mean"] == 5
    lone = settings(tmp_path, "", prompts=str(path)).workload.describe()
    assert (lone["input_tokens"]["mean"], "sessions" in lone) == (1.5, False)
