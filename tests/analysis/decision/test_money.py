"""Prices, prompt caches and the cost of a fleet: worked values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ampacity.analysis.decision.model import DecisionError
from ampacity.analysis.decision.money import (
    FleetCost,
    Prices,
    Request,
    cache_break_even,
    output_share,
    prefix_usd_per_day,
    read_prices,
    sensitivities,
    transfer_s,
)

FLEET = FleetCost(
    gpus=52, gpu_hour_usd=2.0, carried_rps=156, utilisation=0.4, request=Request(1000, 250)
)


@pytest.mark.parametrize(
    ("prices", "exact", "cautious", "calls"),
    [
        # (write - read) / (input - read) and write / (input - read)
        pytest.param(Prices(1, 5, 0.1, 1.25), 1.15 / 0.9, 1.25 / 0.9, (2, 2), id="5-minutes"),
        pytest.param(Prices(1, 5, 0.1, 2.0), 1.9 / 0.9, 2.0 / 0.9, (3, 3), id="1-hour"),
        pytest.param(Prices(1, 4, 0.5), 1.0, 2.0, (1, 2), id="free-write"),
    ],
)
def test_when_a_prompt_cache_pays(
    prices: Prices, exact: float, cautious: float, calls: tuple[int, int]
) -> None:
    found = cache_break_even(prices)
    assert found is not None
    assert found.exact == pytest.approx(exact)
    assert found.cautious == pytest.approx(cautious)
    assert found.calls == calls


def test_a_cache_that_costs_as_much_as_sending_again_never_pays() -> None:
    assert cache_break_even(Prices(1, 5)) is None


def test_a_prefix_of_4000_tokens_called_10_000_times_a_day() -> None:
    """4 k x 10 k x $3 = $120; one write at $3.75 and 9,999 reads at $0.30: $12.01."""
    without, with_cache = prefix_usd_per_day(Prices(3, 15, 0.30, 3.75), 4000, 10_000, 1)
    assert without == pytest.approx(120)
    assert with_cache == pytest.approx(12.01, abs=0.005)


def test_the_share_of_the_output_in_a_request_with_retrieval() -> None:
    """3,000 + 5,500 x 0.1 + 250 x 5 = 4,800 input prices: 1,250 of them are 26 %."""
    assert output_share(Prices(1, 5, 0.1), Request(8500, 250, 5500)) == pytest.approx(
        0.26, abs=0.001
    )


def test_the_cost_of_a_fleet_by_hand() -> None:
    """52 GPUs at $2: $104 an hour for 0.4 x 156 x 3,600 = 224,640 requests."""
    assert FLEET.usd_per_hour == 104
    assert FLEET.usd_per_year == 911_040
    assert FLEET.usd_per_request == pytest.approx(104 / 224_640)
    assert FLEET.usd_per_million_output == pytest.approx(104 / 224_640 / 250 * 1e6)
    assert replace(FLEET, accepted=0.5).usd_per_request == pytest.approx(2 * 104 / 224_640)


@pytest.mark.parametrize(("utilisation", "divided_by"), [(0.8, 2.0), (0.7, 1.75)])
def test_cost_falls_with_utilisation(utilisation: float, divided_by: float) -> None:
    fuller = replace(FLEET, utilisation=utilisation)
    assert FLEET.usd_per_request / fuller.usd_per_request == pytest.approx(divided_by)


def test_crossover_with_a_hosted_api() -> None:
    """Hosted: 1,000 x $0.5 + 250 x $2 per million = $0.001 a request. Full fleet: 561,600 an
    hour, $561.60 hosted against $104: cheaper from 18.5 % of use on."""
    hosted = Prices(0.5, 2)
    assert hosted.request_usd(FLEET.request) == pytest.approx(0.001)
    assert FLEET.crossover(hosted) == pytest.approx(104 / 561.6)
    at_crossover = replace(FLEET, utilisation=FLEET.crossover(hosted))
    assert at_crossover.usd_per_request == pytest.approx(0.001)


def test_the_input_that_moves_a_cost_most_comes_first() -> None:
    """A rate 20 % lower costs 25 % more, one 20 % higher 16.7 % less; a price moves by 20 %.
    Nothing can be accepted above 100 %."""
    found = {one.name: one for one in sensitivities(FLEET)}
    assert found["carried_rps"].lower == pytest.approx(0.25)
    assert found["carried_rps"].higher == pytest.approx(-1 / 6)
    assert found["gpu_hour_usd"].lower == pytest.approx(-0.2)
    assert found["accepted"].higher == 0
    assert next(iter(found)) in ("carried_rps", "utilisation", "accepted")
    assert list(found)[-1] == "gpu_hour_usd"


@pytest.mark.parametrize(
    ("size", "link", "seconds"), [(500e6, 25e9, 0.160), (320e6, 400e9, 0.0064)]
)
def test_transfer_of_a_cache(size: float, link: float, seconds: float) -> None:
    assert transfer_s(size, link) == pytest.approx(seconds)


def test_a_price_file(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text("# as of 2026-11\nmodel,input,cached,output\nbig,3,0.30,15\nsmall,0.5,,2\n")
    assert read_prices(path) == {"big": Prices(3, 15, 0.30), "small": Prices(0.5, 2)}


def test_a_price_file_of_a_spreadsheet(tmp_path: Path) -> None:
    """A byte order mark, semicolons, capitals, blanks and CRLF."""
    path = tmp_path / "prices.csv"
    path.write_bytes("\ufeffModel; Input; Output\r\nbig;3;15\r\n".encode())
    assert read_prices(path) == {"big": Prices(3, 15)}


def test_a_free_hosted_api_is_never_dearer() -> None:
    assert FLEET.crossover(Prices(0, 0)) == float("inf")
    assert output_share(Prices(0, 0), FLEET.request) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("model,input,output\na,1,2\na,3,4\n", "'a' stands twice", id="twice"),
        pytest.param("model,input,output\n,1,2\n", "a row has no model", id="no-name"),
        pytest.param("model,input\nbig,3\n", "no column output", id="column"),
        pytest.param("", "no column input, model, output", id="empty"),
        pytest.param("model,input,output\n", "it holds no price", id="no-row"),
        pytest.param("model,input,output\nbig,x,1\n", "'big': input is 'x'", id="text"),
        pytest.param("model,input,output\nbig,-1,1\n", "it must be 0 or more", id="negative"),
        pytest.param("model,input,output\nbig,nan,1\n", "it must be 0 or more", id="nan"),
        pytest.param("model,input,output\nbig,,1\n", "input and output need a price", id="blank"),
    ],
)
def test_a_price_file_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(text)
    with pytest.raises(DecisionError, match=r"prices\.csv") as refused:
        read_prices(path)
    assert message in str(refused.value)
