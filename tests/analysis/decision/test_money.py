"""Prices, prompt caches and the cost of a fleet: worked values."""

from pathlib import Path

import pytest
from msgspec import structs

from ampacity.analysis.capacity.fleet_figures import fleet_figures
from ampacity.analysis.decision import money
from ampacity.analysis.decision.model import DecisionError
from tests.analysis.capacity.hand_made import FLEET


@pytest.mark.parametrize(
    ("prices", "exact", "cautious", "calls"),
    [
        # (write - read) / (input - read) and write / (input - read)
        pytest.param(money.Prices(1, 5, 0.1, 1.25), 1.15 / 0.9, 1.25 / 0.9, (2, 2), id="5-minutes"),
        pytest.param(money.Prices(1, 5, 0.1, 2.0), 1.9 / 0.9, 2.0 / 0.9, (3, 3), id="1-hour"),
        pytest.param(money.Prices(1, 4, 0.5), 1.0, 2.0, (1, 2), id="free-write"),
    ],
)
def test_when_a_prompt_cache_pays(
    prices: money.Prices, exact: float, cautious: float, calls: tuple[int, int]
) -> None:
    found = money.cache_break_even(prices)
    assert found.exact == pytest.approx(exact)
    assert found.cautious == pytest.approx(cautious)
    assert (found.exact_calls, found.cautious_calls) == calls


def test_a_cache_that_costs_as_much_as_sending_again_never_pays() -> None:
    assert money.cache_break_even(money.Prices(1, 5)) is None


def test_a_prefix_of_4000_tokens_called_10_000_times_a_day() -> None:
    """4 k x 10 k x $3 = $120; one write at $3.75 and 9,999 reads at $0.30: $12.01."""
    without, with_cache = money.prefix_usd_per_day(money.Prices(3, 15, 0.30, 3.75), 4000, 10_000, 1)
    assert without == pytest.approx(120)
    assert with_cache == pytest.approx(12.01, abs=0.005)


def test_the_share_of_the_output_in_a_request_with_retrieval() -> None:
    """3,000 + 5,500 x 0.1 + 250 x 5 = 4,800 input prices: 1,250 of them are 26 %."""
    expected = pytest.approx(0.26, abs=0.001)
    assert money.output_share(money.Prices(1, 5, 0.1), money.Request(8500, 250, 5500)) == expected


def test_a_hosted_api_against_a_fleet() -> None:
    """600 x $0.5 + 400 x $0.05 + 250 x $2 per million = $0.00082 a request, $0.0005 of it output.

    All that the fleet carries is 561,600 requests an hour, hosted $460.51 against $104. 62.4/s cost
    $184.20 hosted: as much as 52 GPUs at $3.54. 400 tokens, 5,391,360 calls a day: $1,078.27, or
    one write ($0.625 a million) and the rest read."""
    prices = {"small": money.Prices(0.5, 2, 0.05, 0.625), "free": money.Prices(0, 0)}
    small, free = money.against_hosted(FLEET, fleet_figures(FLEET), prices)
    assert small.cost_per_thousand_requests == pytest.approx(0.82)
    assert small.output_share == pytest.approx(500 / 820)
    assert small.crossover_utilisation == pytest.approx(104 / (561_600 * 0.00082))
    assert small.crossover_rps == pytest.approx(156 * 104 / (561_600 * 0.00082))
    assert small.crossover_gpu_hour_usd == pytest.approx(224_640 * 0.00082 / 52)
    assert small.break_even is not None
    assert small.prefix.usd_per_day_without_cache == pytest.approx(400 * 5_391_360 * 0.5e-6)
    assert small.prefix.usd_per_day_with_cache == pytest.approx(107.827, abs=0.01)
    assert (free.crossover_utilisation, free.output_share, free.prefix) == (None, 0.0, None)
    uncounted = structs.replace(FLEET, output_tokens=None)
    assert money.against_hosted(uncounted, fleet_figures(uncounted), prices) == []


def test_the_input_that_moves_the_answer_most_comes_first() -> None:
    """13 instances, $911,040 a year. Capacity 9.6: 13 x 1.3 = 17; 14.4: 9 x 1.3 = 12. Peak 96:
    8 x 1.3 = 11; 144: 12 x 1.3 = 16. Safety 1.04: 11; 1.56: 16. Price: 20 % each way."""
    moved = money.sensitivities(FLEET)
    found = {one.input: one for one in moved}
    assert {name: one.instances for name, one in found.items()} == {
        "capacity": (17, 12),
        "peak load": (11, 16),
        "safety factor": (11, 16),
        "GPU price": (13, 13),
        "utilisation": (13, 13),
    }
    assert moved[0].input == "capacity"
    assert [one.input for one in moved][-2:] == ["GPU price", "utilisation"]
    assert found["capacity"].cost_per_year == (17 / 13 * 911_040, 12 / 13 * 911_040)
    # 1,000 x 104 / 224,640 of a dollar, at 32 and 48 % of use
    assert found["utilisation"].cost_per_thousand == pytest.approx((0.578704, 0.385802), rel=1e-5)


def test_shares_and_loads_stay_possible() -> None:
    """Nothing is accepted above 100 %, no load is above its peak; without a price, instances."""
    given = structs.replace(FLEET, accepted=0.9, gpu_hour_usd=None, utilisation=None, mean_rps=115)
    found = {one.input: one for one in money.sensitivities(given)}
    assert "GPU price" not in found
    assert found["capacity"].cost_per_year is found["capacity"].cost_per_thousand is None
    priced = structs.replace(given, gpu_hour_usd=2.0)
    moved = {one.input: one for one in money.sensitivities(priced)}
    hourly = 104 / 3.6
    expected = pytest.approx((hourly / (115 * 0.72), hourly / 115))
    assert moved["accepted share"].cost_per_thousand == expected
    # 138/s would be above the peak of 120; and of a peak of 96 the mean is at most 96
    expected = pytest.approx((hourly / (92 * 0.9), hourly / (120 * 0.9)))
    assert moved["mean load"].cost_per_thousand == expected


@pytest.mark.parametrize(
    ("size", "link", "seconds"), [(500e6, 25e9, 0.160), (320e6, 400e9, 0.0064)]
)
def test_transfer_of_a_cache(size: float, link: float, seconds: float) -> None:
    assert money.transfer_s(size, link) == pytest.approx(seconds)


def test_a_price_file(tmp_path: Path) -> None:
    path = tmp_path / "prices.csv"
    path.write_text("# as of 2026-11\nmodel,input,cached,output\nbig,3,0.30,15\nsmall,0.5,,2\n")
    assert money.read_prices(path) == {
        "big": money.Prices(3, 15, 0.30),
        "small": money.Prices(0.5, 2),
    }


def test_a_price_file_of_a_spreadsheet(tmp_path: Path) -> None:
    """A byte order mark, semicolons, capitals, blanks and CRLF."""
    path = tmp_path / "prices.csv"
    for text in (
        "\ufeffModel; Input; Output\r\nbig;3;15\r\n",
        '"Model","Input","Output"\nbig,3,15',
    ):
        path.write_bytes(text.encode())
        assert money.read_prices(path) == {"big": money.Prices(3, 15)}


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
        pytest.param("model,input,output\nbig,1,50,2\n", "more values than", id="decimal-comma"),
        pytest.param("#" * 2_000_000, "more than 1 MiB", id="endless"),
        pytest.param("input,output,model\n1,2\n", "a row has no model", id="short"),
        pytest.param("model,input,output,input\nb,1,2,3\n", "two columns", id="column-twice"),
        pytest.param("model,input,output\nbig,,1\n", "input and output need a price", id="blank"),
    ],
)
def test_a_price_file_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prices.csv"
    path.write_text(text)
    with pytest.raises(DecisionError, match=r"prices\.csv") as refused:
        money.read_prices(path)
    assert message in str(refused.value)
