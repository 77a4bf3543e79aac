"""TTFT, ITL, ICL, TPOT and E2E of hand-made streams, to the microsecond."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ampacity.analysis.metrics.chunks import tpot_s
from ampacity.analysis.metrics.cohort import Cohort
from ampacity.analysis.metrics.gaps import GapSeries
from ampacity.analysis.metrics.percentiles import percentiles
from ampacity.analysis.metrics.requests import RecordsError, e2e_s, read_requests, ttft_s
from ampacity.loadgen.rundir.records import SCHEMA, to_batch
from tests.support.synthetic import ORIGIN_NS, at_ns, cohort, request

US = 1e-6


def gaps_s(c: Cohort, *, per_token: bool) -> list[float]:
    values, times = GapSeries(c.chunks, np.ones(len(c.requests), bool), per_token).distinct()
    return np.repeat(values, times.astype(int)).tolist()


def itl(c: Cohort) -> list[float]:
    """ITL samples, each as often as its weight says."""
    return gaps_s(c, per_token=True)


def test_known_gaps_one_token_a_chunk() -> None:
    c = cohort(
        request(0, 1.0, ttft_s=0.25, gaps_s=[0.010, 0.020, 0.0305], start_delay_s=0.002, tail_s=0.3)
    )
    r = c.requests
    assert ttft_s(r, from_schedule=False) == pytest.approx([0.25], abs=US)
    assert ttft_s(r, from_schedule=True) == pytest.approx([0.252], abs=US)
    assert e2e_s(r, from_schedule=False) == pytest.approx([0.3105], abs=US)
    assert e2e_s(r, from_schedule=True) == pytest.approx([0.3125], abs=US)
    assert itl(c) == pytest.approx([0.010, 0.020, 0.0305], abs=US)
    assert gaps_s(c, per_token=False) == pytest.approx([0.010, 0.020, 0.0305], abs=US)
    assert tpot_s(r, c.chunks)[0] == pytest.approx([0.0605 / 3], abs=US)


def test_fault_8_usage_and_done_after_the_last_token_do_not_count() -> None:
    c = cohort(request(0, 0.0, ttft_s=0.1, gaps_s=[0.01], tail_s=0.3))
    assert e2e_s(c.requests, from_schedule=False) == pytest.approx([0.11], abs=US)


def test_fault_24_tokens_of_the_first_chunk_are_not_decoded() -> None:
    c = cohort(request(0, 0.0, ttft_s=0.5, gaps_s=[0.01] * 20, chunk_tokens=[20] + [1] * 20))
    # 100 tokens/s, not 200
    assert tpot_s(c.requests, c.chunks)[0] == pytest.approx([0.010], abs=US)


def test_fault_25_ttft_is_no_gap() -> None:
    c = cohort(request(0, 0.0, ttft_s=1.0, gaps_s=[0.01] * 9))
    assert len(itl(c)) == 9
    assert max(itl(c)) == pytest.approx(0.01, abs=US)


def test_fault_26_itl_and_tpot_equal_the_hand_calculation() -> None:
    c = cohort(
        request(0, 0.0, ttft_s=0.1, gaps_s=[0.01, 0.03], chunk_tokens=[1, 1, 2]),
        request(1, 1.0, ttft_s=0.1, gaps_s=[0.05], chunk_tokens=[1, 1]),
    )
    # per token: 10, 15, 15 and 50 ms; per request: 40/3 and 50 ms
    assert itl(c) == pytest.approx([0.01, 0.015, 0.015, 0.05], abs=US)
    assert c.itl.mean() == pytest.approx(0.0225, abs=US)
    assert tpot_s(c.requests, c.chunks)[0] == pytest.approx([0.04 / 3, 0.05], abs=US)
    assert c.itl.n == 4
    assert c.tpot.n == 2


def test_fault_27_three_tokens_a_chunk() -> None:
    c = cohort(request(0, 0.0, ttft_s=0.1, gaps_s=[0.03] * 4, chunk_tokens=[3] * 5))
    assert gaps_s(c, per_token=False) == pytest.approx([0.03] * 4, abs=US)
    assert itl(c) == pytest.approx([0.01] * 12, abs=US)
    assert tpot_s(c.requests, c.chunks)[0] == pytest.approx([0.01], abs=US)


def test_fault_28_no_per_token_tail_when_chunks_are_not_tokens() -> None:
    c = cohort(
        *(request(i, i, ttft_s=0.1, gaps_s=[0.02] * 9, output_tokens=20) for i in range(400))
    )
    figures = percentiles(c.itl)
    assert figures.p99 is None
    assert "tokens per chunk unknown in 400 of 400 answers" in figures.reason
    assert percentiles(c.icl).p99 == pytest.approx(0.02, abs=US)
    # the first chunk is taken as the mean of two tokens: 180 ms for 18 tokens
    assert percentiles(c.tpot).p50 == pytest.approx(0.01, abs=US)
    assert "400 answers" in percentiles(c.tpot).assumption


def test_as_many_chunks_as_tokens_is_known_and_a_textless_stop_token_too() -> None:
    assert bool(cohort(request(0, 0.0, gaps_s=[0.01] * 4, output_tokens=5)).chunks.known[0])
    stop: dict[str, Any] = {"output_tokens": 6, "finish_reason": "stop"}
    assert bool(cohort(request(0, 0.0, gaps_s=[0.01] * 4, **stop)).chunks.known[0])
    assert not cohort(request(0, 0.0, gaps_s=[0.01] * 4, output_tokens=6)).chunks.known[0]


def test_known_and_unknown_requests_do_not_mix_up_their_chunks() -> None:
    c = cohort(
        request(0, 0.0, gaps_s=[0.03], chunk_tokens=[1, 3]),
        request(1, 1.0, gaps_s=[0.05, 0.05], output_tokens=9),  # unknown
        request(2, 2.0, gaps_s=[0.01, 0.02]),  # one each
        request(3, 3.0, ttft_s=None, status="http_error"),
    )
    assert itl(c) == pytest.approx([0.01] * 3 + [0.01, 0.02], abs=US)
    assert c.chunks.count.tolist() == [2, 3, 3, 0]


def test_a_chunk_without_tokens_hands_its_time_on() -> None:
    c = cohort(request(0, 0.0, gaps_s=[0.01, 0.02], chunk_tokens=[1, 0, 2]))
    assert itl(c) == pytest.approx([0.015, 0.015], abs=US)


def test_tpot_is_undefined_without_a_divisor() -> None:
    c = cohort(request(0, 0.0), request(1, 1.0, gaps_s=[], chunk_tokens=[7]))
    assert np.isnan(tpot_s(c.requests, c.chunks)[0]).all()


def test_fault_14_hidden_reasoning_is_not_divided_by() -> None:
    c = cohort(
        request(
            0, 0.0, ttft_s=5.0, gaps_s=[2.0 / 99] * 99, output_tokens=2000, reasoning_tokens=1900
        )
    )
    assert tpot_s(c.requests, c.chunks)[0] == pytest.approx([2.0 / 99], abs=US)


def test_first_answer_leaves_reasoning_out() -> None:
    c = cohort(
        request(
            0, 0.0, ttft_s=0.1, gaps_s=[0.1] * 3, first_answer_ns=at_ns(0.3), reasoning_tokens=2
        )
    )
    assert c.first_answer(from_schedule=False).values == pytest.approx([0.3], abs=US)
    # its tokens were in the stream
    assert tpot_s(c.requests, c.chunks)[0] == pytest.approx([0.1], abs=US)


def test_fault_30_what_did_not_happen_is_missing_not_zero() -> None:
    records = [request(i, i * 0.1, ttft_s=0.1 + i * 1e-3) for i in range(70)]
    records += [request(100 + i, 7.0 + i, ttft_s=None, status="connect_error") for i in range(30)]
    ttft = cohort(*records).ttft(from_schedule=False)
    assert ttft.rank_bounds(5)[0] == pytest.approx(0.104, abs=US)
    assert (ttft.n, ttft.n_infinite) == (100, 30)


def test_rows_are_read_in_scheduled_order_and_far_from_zero() -> None:
    c = cohort(request(1, 7.0, ttft_s=0.123456), request(0, 3.0, ttft_s=0.654321))
    assert ttft_s(c.requests, from_schedule=True) == pytest.approx([0.654321, 0.123456], abs=1e-9)


def test_an_unknown_status_is_named() -> None:
    table = pa.Table.from_batches([to_batch([request(0, 0.0, status="vanished")])], schema=SCHEMA)
    with pytest.raises(RecordsError, match="holds 'vanished'"):
        read_requests(table, ORIGIN_NS)
