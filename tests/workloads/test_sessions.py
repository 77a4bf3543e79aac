"""Sessions as columns of a schedule: who waits for whom, how prompts grow, and what a cache would
find.
"""

from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.lengths.parse import Fixed
from ampacity.workloads.profile import Workload
from ampacity.workloads.prompts.prefixes import (
    SharedPrefixes,
    block_sizes,
    infinite_cache,
    parse_prefixes,
    prefixes_of_blocks,
)
from ampacity.workloads.replay import replayed
from ampacity.workloads.schedule import Schedule, closed_schedule, open_schedule
from ampacity.workloads.sessions import Sessions, parse_sessions
from ampacity.workloads.trace_cuts import Replay
from ampacity.workloads.traces.read import read_trace
from tests.support.repeats import often

CHAT = "{turns: 3, think_ms: 2000, user_tokens: 20}"
AGENT = """
turns: 1
think_ms: 1000
steps:
  calls: 2
  delay_ms: 500
  result_tokens: 50
  branches: {share: 1.0, width: 2, task_tokens: 30}
"""


def workload(sessions: str, prefixes: str | None = None) -> Workload:
    return Workload(
        "w",
        Fixed(100),
        Fixed(10),
        arrivals="constant",
        sessions=parse_sessions(yaml.safe_load(sessions), "sessions"),
        prefixes=None if prefixes is None else parse_prefixes(yaml.safe_load(prefixes), "prefixes"),
    )


def first_session(schedule: Schedule) -> Schedule:
    assert schedule.session is not None
    return schedule.take(np.flatnonzero(schedule.session == 0))


def waits(schedule: Schedule, i: int) -> list[int]:
    return schedule.after[schedule.after_start[i] : schedule.after_start[i + 1]].tolist()


def test_a_chat_grows_by_answers_and_messages() -> None:
    schedule = first_session(
        open_schedule(workload(CHAT), rate_rps=6, duration_s=5, seed=1, stage=0)
    )
    # 100 asked, 10 answered, 20 asked: 130; another 10 and 20: 160
    assert schedule.input_tokens.tolist() == [100, 130, 160]
    assert schedule.new_tokens.tolist() == [100, 20, 20]
    assert schedule.continues.tolist() == [-1, 0, 1]
    assert [waits(schedule, i) for i in range(3)] == [[], [0], [1]]
    assert np.diff(schedule.scheduled_s).tolist() == pytest.approx([2.0, 2.0])


def test_the_template_tokens_of_each_message_count() -> None:
    text = "{turns: 2, user_tokens: 20, message_tokens: 4}"
    schedule = first_session(
        open_schedule(workload(text), rate_rps=6, duration_s=5, seed=1, stage=0)
    )
    assert schedule.input_tokens.tolist() == [100, 100 + 10 + 20 + 2 * 4]


def test_an_agent_fans_out_and_joins() -> None:
    whole = open_schedule(workload(AGENT), rate_rps=20, duration_s=5, seed=1, stage=0)
    schedule = first_session(whole)
    # plan; two helpers of 30 tokens at +0.5 s; the join with their two answers of 10; the same
    # again
    assert schedule.input_tokens.tolist() == [100, 30, 30, 130, 30, 30, 160]
    assert [waits(schedule, i) for i in range(7)] == [[], [0], [0], [1, 2], [3], [3], [4, 5]]
    assert schedule.continues.tolist() == [-1, -1, -1, 0, -1, -1, 3]
    start = float(schedule.scheduled_s[0])
    expected = pytest.approx([0, 0.5, 0.5, 0.5, 1.0, 1.0, 1.0])
    assert (schedule.scheduled_s - start).tolist() == expected
    assert workload(AGENT).sessions is not None
    sessions = whole.session.max() + 1
    assert len(whole) == 7 * sessions


def test_the_offered_rate_is_in_requests() -> None:
    schedule = open_schedule(workload(AGENT), rate_rps=70, duration_s=10, seed=1, stage=0)
    assert schedule.session.max() + 1 == 100  # 7 requests each
    assert len(closed_schedule(workload(CHAT), requests=300, seed=1, stage=0)) == 300


def test_a_conversation_beyond_its_limit_begins_anew() -> None:
    text = "{turns: 4, user_tokens: 20, limit_tokens: 140, summary_tokens: 15}"
    schedule = first_session(
        open_schedule(
            workload(text, "[{name: system, tokens: 40}]"),
            rate_rps=8,
            duration_s=5,
            seed=1,
            stage=0,
        )
    )
    # 40 + 100; 170 is too long: 40 + 15 + 20 = 75; 75 + 10 + 20 = 105; 135
    assert schedule.input_tokens.tolist() == [140, 75, 105, 135]
    assert schedule.continues.tolist() == [-1, -1, 1, 2]
    assert waits(schedule, 1) == [0]  # it still waits for the answer
    assert schedule.shared.totals().tolist() == [40, 40, 0, 0]
    cached = schedule.planned_cached_tokens()
    # the system prompt's 2 whole blocks of 16; then 75 + 10 = 85 -> 80; 105 + 10 = 115 -> 112
    assert cached.tolist() == [0, 32, 80, 112]
    assert schedule.planned_cached_tokens(answers_too=False).tolist() == [0, 32, 64, 96]


def test_a_limit_keeps_whole_sessions() -> None:
    schedule = open_schedule(
        workload("{turns: 5, think_ms: 100}"), rate_rps=50, duration_s=1, seed=1, stage=0
    )
    assert len(schedule) == 50
    cut, reason = schedule.capped(max_requests=23)
    assert cut.session is not None
    assert np.bincount(cut.session).tolist() == [5, 5, 5, 5]
    assert reason is not None
    assert "leaves 20 of 50 requests in whole sessions" in reason
    assert cut.shortened == ()
    part, reason = schedule.capped(max_requests=3)  # of the first at least its beginning
    assert part.session.tolist() == [0, 0, 0]
    assert part.shortened == (0,)
    assert "leaves 3 of 50 requests of one session, which is cut off" in str(reason)
    assert "leaves 5 of 50 requests (" in str(schedule.capped(max_requests=5)[1])  # no room left
    tokens, _ = schedule.capped(max_tokens=int(cut.planned_tokens()) + 1)
    assert np.array_equal(tokens.input_tokens, cut.input_tokens)
    first = schedule.input_tokens[0] + schedule.output_tokens[0]
    assert schedule.capped(max_tokens=int(first))[0].shortened == (0,)


@settings(max_examples=30)
@given(st.integers(1, 200), st.integers(0, 10**6), st.integers(1, 9))
def test_shares_of_workers_are_closed_and_complete(limit: int, seed: int, workers: int) -> None:
    schedule = open_schedule(workload(AGENT), rate_rps=35, duration_s=2, seed=seed, stage=0)
    cut, _ = schedule.capped(max_requests=limit)
    assert len(cut) <= limit
    units, seen = cut.units(), []
    for k in range(workers):
        # raises where a wait leads out of the share
        share = cut.take(np.flatnonzero(units % workers == k))
        assert (share.after >= 0).all()
        seen += [share.request_id(i) for i in range(len(share))]
    assert sorted(seen) == [cut.request_id(i) for i in range(len(cut))]


def test_what_waits_for_a_dropped_request_is_dropped() -> None:
    schedule = first_session(
        open_schedule(workload(AGENT), rate_rps=20, duration_s=5, seed=1, stage=0)
    )
    rest = schedule.without(np.arange(7) == 2)
    assert [rest.request_id(i) for i in range(len(rest))] == [
        schedule.request_id(i) for i in (0, 1)
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{}", "key turns is missing"),
        ("{turns: 3, thinktime: 5}", "key 'thinktime' is not known"),
        ("{turns: 3, history: real}", "history is 'real': choose one of answers, planned"),
        ("{turns: 3, limit_tokens: 900}", "limit_tokens and summary_tokens go together"),
        ("{turns: 3, steps: {calls: 2}}", "key result_tokens is missing"),
        (
            "{turns: 3, steps: {calls: 2, result_tokens: 5, branches: {share: 2, width: 2, task_tokens: 5}}}",
            "share is 2: give a number from 0 to 1",
        ),
        ("{turns: 0}", "turns"),
        ("{turns: 3, keep_reasoning: 1}", "keep_reasoning is 1: give true or false"),
    ],
)
def test_a_wrong_section_is_one_line(text: str, complaint: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        parse_sessions(yaml.safe_load(text), "w.yaml: sessions")
    assert complaint in str(caught.value)
    assert str(caught.value).startswith("w.yaml: sessions")
    assert "\n" not in str(caught.value)


# --- prefixes ---


def naive_cache(prompts: list[list[tuple[int, int]]]) -> list[int]:
    """Tokens of each prompt's beginning that an earlier one had, token by token."""
    seen: set[tuple[tuple[int, int], ...]] = set()
    found = []
    for prompt in prompts:
        tokens = tuple((segment, k) for segment, n in prompt for k in range(n))
        found.append(
            max((n for n in range(len(tokens) + 1) if tokens[:n] in seen or n == 0), default=0)
        )
        seen |= {tokens[:n] for n in range(len(tokens) + 1)}
    return found


@settings(max_examples=often(15, 50))
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=4),
        min_size=1,
        max_size=12,
    )
)
def test_the_infinite_cache_agrees_with_comparing_every_token(
    prompts: list[list[tuple[int, int]]],
) -> None:
    # a segment that is followed by another is whole; the last one may be a beginning of it
    whole = [[*((s, 4) for s, _ in p[:-1]), *p[-1:]] for p in prompts]
    start = np.cumsum([0, *map(len, whole)])
    flat = np.array([item for p in whole for item in p], dtype=np.int64).reshape(-1, 2)
    shared = SharedPrefixes(start.astype(np.int64), flat[:, 0], flat[:, 1])
    lengths = shared.totals() + 1
    assert infinite_cache(lengths, shared, block_tokens=1).tolist() == naive_cache(whole)


def test_hash_ids_make_the_tree_that_they_describe() -> None:
    lengths = np.array([6758, 7322, 6700])
    ids = np.array([*range(14), 0, *range(14, 28), *range(14)])
    start = np.array([0, 14, 29, 43])
    assert block_sizes(lengths, start)[0] == 512
    shared = prefixes_of_blocks(ids, start, lengths, 512)
    assert shared.totals().tolist() == [6758, 7322, 6700]
    assert shared.of(0)[-1] == (13, 6758 - 13 * 512)
    # the second has block 0 in common, the third all but the token that is always computed
    assert infinite_cache(lengths, shared).tolist() == [0, 512, 6699 // 16 * 16]
    # 100 in one block, and in two
    assert block_sizes(np.array([100, 100]), np.array([0, 1, 3])) == []


def test_the_public_conversation_trace_has_its_known_share() -> None:
    path = Path(__file__).parents[1] / "data" / "traces" / "mooncake_conversation.jsonl.gz"
    schedule = replayed(read_trace(path), Replay(as_written=True), 1).schedule
    cached = infinite_cache(schedule.input_tokens, schedule.shared, block_tokens=1)
    # 37 % by leading runs of block ids that came before, capped at the prompt's length
    assert cached.sum() / schedule.input_tokens.sum() == pytest.approx(0.37, abs=0.01)
    assert schedule.shared.totals().tolist() == schedule.input_tokens.tolist()


@pytest.mark.parametrize("target", [0.1, 0.45, 0.8])
def test_a_target_share_of_cached_tokens_is_met_by_the_schedule(target: float) -> None:
    from ampacity.workloads.lengths.parse import parse_lengths

    drawn = Workload(
        "w",
        parse_lengths("lognormal:p50=1000,p99=5000", "i"),
        Fixed(10),
        prefixes=parse_prefixes({"cached_share": target, "pool": 20, "zipf": 1.0}, "prefixes"),
    )
    schedule = open_schedule(drawn, rate_rps=50, duration_s=60, seed=3, stage=1)
    share = schedule.planned_cached_tokens().sum() / schedule.input_tokens.sum()
    assert share == pytest.approx(target, abs=0.002)


def test_a_share_that_cannot_be_reached_is_met_as_far_as_it_goes_and_said() -> None:
    prefixes = parse_prefixes({"cached_share": 0.9, "pool": 1}, "prefixes")
    shared = prefixes.draw(np.full(4, 1000), 0, np.random.default_rng(1))
    assert shared.totals().tolist() == [992] * 4  # all but the 8 tokens of their own
    # the first finds nothing, each of the others 992 tokens (62 whole blocks): 3 * 992 / 4000
    assert infinite_cache(np.full(4, 1000), shared).sum() == 3 * 992
    expected = "prefixes: 4 prompts of 1 texts can share 74.4% of their tokens at most, less than cached_share 0.9"
    assert shared.note == expected
    assert shared.take(np.array([0, 1])).note == shared.note
    within = parse_prefixes({"cached_share": 0.7, "pool": 1}, "prefixes")
    assert within.draw(np.full(4, 1000), 0, np.random.default_rng(1)).note is None


@pytest.mark.parametrize(
    ("sessions", "complaint"),
    [
        (
            "{turns: 1000000000}",
            "1 sessions have 1000000000 requests, more than 20000000: give fewer turns",
        ),
        (
            "{turns: 1, steps: {calls: 1000000000, result_tokens: 5}}",
            "1000000000 requests, more than 20000000",
        ),
        (
            "{turns: 1, steps: {calls: 1, result_tokens: 5, branches: {share: 1, width: 100000000, task_tokens: 1}}}",
            " 100000002 requests, more than 20000000",
        ),
    ],
)
def test_sessions_that_would_eat_the_memory_are_refused(sessions: str, complaint: str) -> None:
    drawn = Workload(
        "w", Fixed(10), Fixed(10), sessions=parse_sessions(yaml.safe_load(sessions), "sessions")
    )
    with pytest.raises(WorkloadError, match=complaint):
        closed_schedule(drawn, requests=1, seed=1, stage=0)


def test_a_conversation_longer_than_a_record_can_hold_is_refused() -> None:
    drawn = Workload("w", Fixed(2**30), Fixed(2**30), sessions=Sessions(turns=Fixed(2)))
    # 2^30 + 2^30 of the answer + 2^30 that is said next
    with pytest.raises(WorkloadError, match=f"grows to {3 * 2**30} tokens, more than {2**31 - 1}"):
        closed_schedule(drawn, requests=2, seed=1, stage=0)


def test_messages_name_the_unit_of_what_is_wrong() -> None:
    for given_, complaint in (
        ({"turns": 0}, "s: turns: 0: give a whole number of turns from 1"),
        ({"turns": 2, "think_ms": -1}, "s: think_ms: -1: give a whole number of ms from 1"),
    ):
        with pytest.raises(WorkloadError, match=complaint):
            parse_sessions(given_, "s")
    assert parse_sessions({"turns": 2, "finish_s": None}, "s").finish_s == 60


def test_pools_are_popular_as_zipf_says_and_stages_share_nothing() -> None:
    prefixes = parse_prefixes(
        yaml.safe_load(
            "[{name: system, tokens: 100, pool: 3, zipf: 1}, {name: doc, tokens: 64, pool: 5, share: 0.4}]"
        ),
        "prefixes",
    )
    lengths = np.full(20_000, 1000)
    shared = prefixes.draw(lengths, 0, np.random.default_rng(1))
    system = np.array([shared.of(i)[0][0] for i in range(20_000)])
    share = np.unique(system, return_counts=True)[1] / 20_000
    assert share == pytest.approx(np.array([6, 3, 2]) / 11, abs=0.012)  # 1, 1/2, 1/3
    assert np.mean(np.diff(shared.start) == 2) == pytest.approx(0.4, abs=0.012)
    assert not set(shared.ids) & set(prefixes.draw(lengths, 1, np.random.default_rng(1)).ids)
    short = prefixes.draw(np.full(10, 60), 0, np.random.default_rng(1))
    assert short.totals().tolist() == [52] * 10  # 8 tokens stay its own
    assert shared.note is None
    assert "system fits whole into 0%" in str(short.note)


def test_pools_that_do_not_fit_say_what_is_realised() -> None:
    spec = "[{name: system, tokens: 100}, {name: doc, tokens: 200}]"
    prefixes = parse_prefixes(yaml.safe_load(spec), "prefixes")
    # 8 tokens are a prompt's own: 400 has room for both, 208 for 100 of the document, 108 and 58
    # for none of it
    lengths = np.repeat([400, 208, 108, 58], [4, 3, 2, 1])
    assert prefixes.draw(lengths, 0, np.random.default_rng(1)).note == (
        "prefixes: system fits whole into 90% of the prompts that are to have it, 100.0% of all prompts have some of it (100.0% are described), "
        "p50 100 of 100 tokens; doc fits whole into 40% of the prompts that are to have it, 70.0% of all prompts have some of it "
        "(100.0% are described), p50 100 of 200 tokens: lengthen input_tokens or shorten the pools"
    )
    for cut, told in ((3, False), (4, True)):  # of 100
        note = prefixes.draw(
            np.repeat([400, 300], [100 - cut, cut]), 0, np.random.default_rng(1)
        ).note
        assert (note is not None) == told
    assert prefixes.first_turns(10, 0, np.random.default_rng(1)).note is None


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ([], "write a list of pools"),
        ([{"name": "x"}], "write a pool as"),
        ([{"tokens": 5, "pool": 0}], "pool is 0: give a number from 1"),
        ([{"tokens": 5, "pool": 1.5}], "give a whole number of texts"),
        ([{"tokens": 5, "zip": 1}], "key 'zip' is not known"),
        ({"cached_share": 1.5}, "cached_share is 1.5"),
    ],
)
def test_wrong_prefixes_are_one_line(value: object, complaint: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        parse_prefixes(value, "w.yaml: prefixes")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
