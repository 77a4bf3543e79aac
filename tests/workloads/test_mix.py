"""Classes and clients: shares, superposition, models, cancellation, and what a workload file may
say.
"""

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from ampacity.config import make_settings
from ampacity.loadgen.drive.stage import StagePlan
from ampacity.loadgen.workers.pool import deal
from ampacity.values import ConfigError
from ampacity.workloads.classes import zipf_weights
from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.lengths.parse import Clipped, LogNormal, Mixture
from ampacity.workloads.profile import Workload, load_workload
from ampacity.workloads.schedule import Schedule, closed_schedule, open_schedule

TENANTS = """
name: tenants
extra_body: {temperature: 0.7}
classes:
  chat:
    weight: 7
    like: chat-short
    slo: [ttft_p99=2s, itl_p99=50ms]
    cancel: {share: 0.05, after_ms: 'lognormal:p50=300,p99=2000'}
  code:
    weight: 2
    input_tokens: {lognormal: {p50: 1469, p99: 7436}, max: 4096}
    output_tokens: 0.66*lognormal:p50=11,p99=26 + 0.34*lognormal:p50=37,p99=300
    correlation: 0.3
    adapters: {name: 'lora-{}', count: 8, zipf: 1.2}
    priority: 1
    cancel: {share: 0.2, after_tokens: 'uniform:min=1,max=5'}
  batch:
    input_tokens: gamma:mean=400,cv=0.5
    output_tokens: uniform:min=10,max=50
    extra_body: {temperature: 0, seed: 7}
    priority: 10
    headers: {X-Tenant: nightly}
    models: {big: 3, small: 1}
"""
CLIENTS = """
input_tokens: 100
output_tokens: 20
classes:
  busy: {weight: 3, clients: {count: 40, zipf: 1.1, arrivals: 'gamma:cv=3'}}
  even: {weight: 1, arrivals: constant}
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def written(text: str) -> str:
        path = tmp_path / "mix.yaml"
        path.write_text(text)
        return str(path)

    return written


def stage(
    workload: Workload, rate_rps: float = 100, duration_s: float = 400, seed: int = 1
) -> Schedule:
    return open_schedule(workload, rate_rps=rate_rps, duration_s=duration_s, seed=seed, stage=0)


def columns(plan: Schedule) -> list[bytes]:
    names = tuple(
        (
            "scheduled_s input_tokens output_tokens class_index model_index cancel_after_s "
            "cancel_after_tokens"
        ).split()
    )
    return [
        np.asarray(getattr(plan, name)).tobytes()
        for name in names
        if getattr(plan, name) is not None
    ]


def test_classes_get_their_shares_within_two_percent(write: Any) -> None:
    plan = stage(load_workload(write(TENANTS)))
    assert plan.class_names == ("chat", "code", "batch")
    assert plan.class_index is not None
    shares = np.bincount(plan.class_index) / len(plan)
    # fault: only one model or adapter per run
    assert shares == pytest.approx([0.7, 0.2, 0.1], abs=0.01)
    for index, kind in enumerate(load_workload(write(TENANTS)).classes):
        mine = plan.class_index == index
        times = plan.scheduled_s[mine]
        gaps = np.diff(times, prepend=0.0)  # a thinned Poisson process is one
        assert stats.kstest(gaps, "expon", args=(0, 1 / (100 * shares[index]))).pvalue > 0.001
        assert plan.input_tokens[mine].mean() == pytest.approx(kind.input_tokens.mean(), rel=0.03)
        assert plan.output_tokens[mine].mean() == pytest.approx(kind.output_tokens.mean(), rel=0.04)
    code = plan.class_index == 1
    expected = pytest.approx(0.3, abs=0.05)
    assert stats.spearmanr(plan.input_tokens[code], plan.output_tokens[code]).statistic == expected


def test_models_and_adapters_are_drawn_by_their_popularity(write: Any) -> None:
    plan = stage(load_workload(write(TENANTS)), duration_s=1000)
    assert plan.model_names == (*(f"lora-{k}" for k in range(8)), "big", "small")
    assert plan.class_index is not None
    # chat asks for the run's model
    assert set(plan.model_index[plan.class_index == 0].tolist()) == {-1}
    counts = np.bincount(plan.model_index[plan.class_index == 1])
    law = np.arange(1, 9) ** -1.2
    assert stats.chisquare(counts, counts.sum() * law / law.sum()).pvalue > 0.001
    batch = plan.model_index[plan.class_index == 2]
    assert np.mean(batch == 8) == pytest.approx(0.75, abs=0.02)
    assert zipf_weights(3, 1) == pytest.approx([6 / 11, 3 / 11, 2 / 11])


def test_a_share_of_the_requests_is_given_up_as_told(write: Any) -> None:
    plan = stage(load_workload(write(TENANTS)), duration_s=1000)
    assert plan.class_index is not None
    assert plan.cancel_after_tokens is not None
    chat, code, batch = (plan.class_index == k for k in range(3))
    leaves = np.isfinite(plan.cancel_after_s)
    assert not leaves[code | batch].any()
    assert np.mean(leaves[chat]) == pytest.approx(
        0.05, abs=4.5 * math.sqrt(0.05 * 0.95 / chat.sum())
    )
    smooth = np.log(plan.cancel_after_s[leaves])
    sigma = math.log(2000 / 300) / stats.norm.ppf(0.99)
    assert stats.kstest(smooth, "norm", args=(math.log(0.3), sigma)).pvalue > 0.001
    tokens = plan.cancel_after_tokens
    assert not tokens[chat | batch].any()
    assert np.mean(tokens[code] > 0) == pytest.approx(0.2, abs=0.015)
    assert stats.chisquare(np.bincount(tokens[code])[1:]).pvalue > 0.001


def test_superposed_clients_keep_their_rates_and_their_burstiness(write: Any) -> None:
    workload = load_workload(write(CLIENTS))
    counts = np.array([len(stage(workload, 20, 50, seed)) for seed in range(120)])
    assert counts.mean() == pytest.approx(1000, abs=4.5 * counts.std() / math.sqrt(120))
    plan = stage(workload, 20, 5000)
    assert plan.class_index is not None
    assert (np.diff(plan.scheduled_s) >= 0).all()
    assert np.bincount(plan.class_index) / 5000 == pytest.approx([15, 5], rel=0.03)
    even = np.diff(plan.scheduled_s[plan.class_index == 1])
    assert even == pytest.approx(np.full(len(even), 0.2), rel=1e-6)
    windows = np.histogram(plan.scheduled_s[plan.class_index == 0], np.arange(0, 5001, 100))[0]
    assert windows.var() / windows.mean() == pytest.approx(9, rel=0.6)  # CV^2 of each client, not 1


def test_clients_have_weights_lengths_and_arrivals_of_their_own(write: Any) -> None:
    workload = load_workload(
        write("""
input_tokens: 100
output_tokens: 20
clients:
  - {weight: 3, arrivals: constant}
  - {weight: 1, input_tokens: 900, output_tokens: 'uniform:min=1,max=3'}
""")
    )
    plan = stage(workload, 40, 1000)
    large = plan.input_tokens == 900
    assert np.count_nonzero(~large) == 30_000
    assert np.count_nonzero(large) == pytest.approx(10_000, abs=450)
    assert set(plan.output_tokens[large].tolist()) == {1, 2, 3}
    assert workload.input_tokens.mean() == 300  # what announcements and time limits go by
    assert workload.describe()["arrivals"] == "superposed: 2 clients, constant and poisson"


def test_many_poisson_clients_together_are_poisson(write: Any) -> None:
    text = "input_tokens: 9\noutput_tokens: 9\nclients: {count: 50, zipf: 1.2}\n"
    plan = stage(load_workload(write(text)), 7.3, 4000)
    gaps = np.diff(plan.scheduled_s, prepend=0.0)
    assert stats.kstest(gaps, "expon", args=(0, 1 / 7.3)).pvalue > 0.001


@pytest.mark.parametrize("text", [TENANTS, CLIENTS], ids=["classes", "clients"])
def test_one_seed_gives_byte_identical_columns(write: Any, text: str) -> None:
    workload = load_workload(write(text))
    again = load_workload(write(text))
    assert columns(stage(workload)) == columns(stage(again))
    assert columns(stage(workload)) != columns(stage(workload, seed=2))


@pytest.mark.parametrize("text", [TENANTS, CLIENTS], ids=["classes", "clients"])
def test_what_the_kth_request_is_does_not_depend_on_the_rate(write: Any, text: str) -> None:
    workload = load_workload(write(text))
    slow, fast = stage(workload, 20, 100), stage(workload, 80, 25)
    assert fast.scheduled_s * 4 == pytest.approx(slow.scheduled_s, rel=1e-9)
    assert columns(fast)[1:] == columns(slow)[1:]


def test_the_classes_streams_are_apart(write: Any) -> None:
    """Another length, model or cancellation of one class leaves times, classes and the other
    classes as they were."""
    plan = stage(load_workload(write(TENANTS)))
    changed = TENANTS.replace("gamma:mean=400,cv=0.5", "77").replace("share: 0.05", "share: 0.5")
    other = stage(load_workload(write(changed)))
    assert columns(other)[0] == columns(plan)[0]
    assert columns(other)[3:5] == columns(plan)[3:5]
    assert plan.class_index is not None
    rest = plan.class_index != 2
    assert other.input_tokens[rest].tolist() == plan.input_tokens[rest].tolist()


def test_a_closed_loop_draws_the_same_classes(write: Any) -> None:
    workload = load_workload(write(TENANTS))
    plan = closed_schedule(workload, requests=2000, seed=1, stage=0)
    opened = stage(workload)
    assert columns(plan)[3] == columns(opened)[3][: len(columns(plan)[3])]
    assert plan.output_tokens.tolist() == opened.output_tokens[:2000].tolist()
    shares = np.bincount(
        closed_schedule(load_workload(write(CLIENTS)), requests=20_000, seed=1, stage=0).class_index
    )
    assert shares / 20_000 == pytest.approx([0.75, 0.25], abs=0.015)


def test_what_a_class_puts_on_the_wire(write: Any) -> None:
    chat, code, batch = load_workload(write(TENANTS)).classes
    assert chat.body() == {"temperature": 0.7}
    assert code.body() == {"temperature": 0.7, "priority": 1}
    assert batch.body() == {"temperature": 0, "seed": 7, "priority": 10}
    assert batch.headers == (("X-Tenant", "nightly"),)
    assert chat.slos == ("ttft_p99=2s", "itl_p99=50ms")


def test_the_description_holds_every_class_and_no_header_value(write: Any) -> None:
    workload = load_workload(write(TENANTS))
    text = json.dumps(workload.describe(), allow_nan=False)
    described = json.loads(text)
    assert [kind["name"] for kind in described["classes"]] == ["chat", "code", "batch"]
    assert described["classes"][0]["slos"] == ["ttft_p99=2s", "itl_p99=50ms"]
    assert described["classes"][1]["models"] == [f"lora-{k}" for k in range(8)]
    assert described["classes"][2]["headers"] == ["X-Tenant"]
    assert "nightly" not in text + repr(workload)
    assert isinstance(workload.input_tokens, Mixture)
    assert workload.input_tokens.weights == (7, 2, 1)
    assert "classes" not in load_workload("chat").describe()


def test_top_keys_hold_for_all_classes_and_a_class_may_say_otherwise(write: Any) -> None:
    workload = load_workload(
        write("""
like: chat-short
cancel: {share: 0.5, after_tokens: 3}
classes:
  a: {}
  b: {input_tokens: 9, cancel: {share: 0, after_tokens: 1}}
""")
    )
    a, b = workload.classes
    assert (a.input_tokens, a.output_tokens) == (LogNormal(128, 512), LogNormal(32, 128))
    assert (b.input_tokens.mean(), b.output_tokens) == (9, LogNormal(32, 128))
    assert (a.cancel.share, b.cancel.share) == (0.5, 0)


@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        ("classes: 5\n", "classes: give names"),
        ("classes: {}\n", "classes: give names"),
        ("classes: {5: {}}\n", "classes: 5 is no name"),
        ("classes: {a: 5}\n", "class a: this is no mapping"),
        ("classes: {a: {}}\n", "class a: key input_tokens is missing"),
        (
            "classes:\n  a: {like: chat}\n  a: {like: rag}\n",
            "mix.yaml:3: this is no YAML: 'a' stands there twice",
        ),
        ("like: chat\nwheight: 3\n", "key 'wheight' is not known"),
        ("like: chat\ncorelation: 0.1\n", "(did you mean correlation?)"),
        (
            "classes: {a: {like: chat, wieght: 1}}\n",
            "class a: key 'wieght' is not known (did you mean weight?)",
        ),
        ("like: chatt\n", "like: 'chatt' is not known (did you mean chat?)"),
        ("classes: {a: {like: chat, weight: 0}}\n", "class a: weight is 0"),
        (
            "classes: {a: {like: chat, arrivals: 'gama:cv=3'}}\n",
            "class a: arrivals 'gama:cv=3' are not known",
        ),
        ("like: chat\ncorrelation: 2\n", "correlation is 2"),
        ("like: chat\ninput_tokens: 5\ncorrelation: 0.5\n", "out of reach"),
        (
            "like: chat\nmodel: a\nadapters: {count: 3}\n",
            "model and adapters exclude each other: give one",
        ),
        ("like: chat\nadapters: {name: lora, count: 3}\n", "adapters: write"),
        ("like: chat\nadapters: {count: 3, zipf: -1}\n", "zipf is -1"),
        ("like: chat\nadapters: {count: 0}\n", "adapters: count is 0"),
        ("like: chat\nmodels: {a: -1}\n", "models: a is -1"),
        ("like: chat\nmodels: {}\n", "give names of models"),
        (
            "like: chat\nextra_body: {stream: false}\n",
            "extra_body sets 'stream', which the workload decides",
        ),
        ("like: chat\nextra_body: {n: 3}\n", "extra_body asks for several choices (n = 3)"),
        ("like: chat\nextra_body: {x: .nan}\n", "extra_body cannot be sent as JSON"),
        ("like: chat\nextra_body: 5\n", "extra_body: give request fields"),
        (
            "like: chat\nheaders: {'X: y': 5}\n",
            "headers: 'X: y' or its value cannot stand in a header",
        ),
        ('like: chat\nheaders: {X: "a\\nb"}\n', "cannot stand in a header"),
        (
            "like: chat\nheaders: {Content-Length: 5}\n",
            "headers: Content-Length is set by the load generator",
        ),
        (
            "like: chat\nheaders: {X-Request-ID: 5}\n",
            "headers: X-Request-ID is set by the load generator",
        ),
        ("like: chat\npriority: high\n", "priority is 'high'"),
        ("like: chat\nslo: {a: 1}\n", "slo: {'a': 1}: write"),
        ("like: chat\ncancel: {share: 2, after_ms: 5}\n", "cancel: share is 2"),
        ("like: chat\ncancel: {after_ms: 5}\n", "cancel: share is None"),
        ("like: chat\ncancel: {share: 0.1}\n", "cancel: give one of after_ms and after_tokens"),
        (
            "like: chat\ncancel: {share: 0.1, after_ms: 0}\n",
            "cancel: after_ms: 0: give a whole number of ms",
        ),
        ("like: chat\nclients: {zipf: 1}\n", "clients: key count is missing"),
        ("like: chat\nclients: {count: 5, cuont: 5}\n", "(did you mean count?)"),
        ("like: chat\nclients: [{rate: 5}]\n", "clients: key 'rate' is not known"),
        ("like: chat\nclients: [{weight: -1}]\n", "clients: weight is -1"),
        ("like: chat\nclients: {count: 5}\nsessions: {turns: 3}\n", "sessions do not go with"),
    ],
)
def test_a_bad_workload_file_is_one_line_that_names_file_and_key(
    write: Any, text: str, culprit: str
) -> None:
    path = write(text)
    with pytest.raises(WorkloadError) as caught:
        load_workload(path)
    message = str(caught.value)
    assert message.startswith(path)
    assert culprit in message
    assert "\n" not in message


def settings_of(path: str, **more: Any) -> Any:
    return make_settings({"url": "http://127.0.0.1:9/v1", "workload": path, **more})


def test_flags_replace_what_a_file_says_where_that_has_one_meaning(write: Any) -> None:
    workload = settings_of(write(TENANTS), arrivals="gamma:cv=3").workload
    assert workload.arrivals == "gamma:cv=3"
    assert not workload.own_clocks
    single = settings_of(
        write("like: chat-short\npriority: 3\n"), input_tokens="77", arrivals="constant"
    ).workload
    assert (single.input_tokens.mean(), single.classes[0].input_tokens.mean()) == (77, 77)
    assert single.classes[0].priority == 3


@pytest.mark.parametrize(
    ("text", "flags", "culprit"),
    [
        (
            TENANTS,
            {"input_tokens": "5"},
            "workload tenants has classes or clients with lengths of their own: drop --input-tokens",
        ),
        (
            CLIENTS,
            {"arrivals": "poisson"},
            "superposes clients with arrivals of their own: drop --arrivals",
        ),
        ("like: chat\n", {"arrivals": "gamma"}, "gamma lacks cv: write gamma:cv=3"),
        ("like: chat\nslo: ttft_p99=fast\n", {}, "ttft_p99=fast"),
        (
            "like: chat\n",
            {"arrivals": "gamma:cv=3", "concurrency": "4"},
            "--arrivals goes with an open loop",
        ),
    ],
)
def test_conflicting_options_are_refused_with_one_line(
    write: Any, text: str, flags: dict[str, str], culprit: str
) -> None:
    with pytest.raises((ConfigError, ValueError)) as caught:
        settings_of(write(text), **flags)
    assert culprit in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_million_requests_are_planned_in_a_gigabyte() -> None:
    """The bar is 15 s and 1 GB; measured in benchmarks/README.md. Time is left to the run's own
    limit."""
    tracemalloc.start()
    try:
        plan = stage(load_workload("chat"), 1000, 1000)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(plan) == pytest.approx(1_000_000, abs=4500)
    assert peak_bytes < 2**30


def test_max_keys_reach_the_class(write: Any) -> None:
    kind = load_workload(
        write("like: rag\noutput_tokens: {gamma: {mean: 90, cv: 1}, max: 50}\npriority: 1\n")
    ).classes[0]
    assert isinstance(kind.output_tokens, Clipped)
    assert kind.output_tokens.describe()["truncated_share"] == pytest.approx(math.exp(-50 / 90))


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_any_number_of_workers_sends_the_same_requests(write: Any, workers: int) -> None:
    plan = stage(load_workload(write(TENANTS)), 20, 100)

    def rows(part: Schedule) -> list[tuple[Any, ...]]:
        numbers = np.arange(len(part)) if part.numbers is None else part.numbers
        figures = (
            part.scheduled_s,
            part.input_tokens,
            part.output_tokens,
            np.nan_to_num(part.cancel_after_s, nan=-1),
        )
        return [
            (
                part.first_request_id + int(k),
                part.class_name(i),
                part.model_name(i),
                *(float(f[i]) for f in figures),
            )
            for i, k in enumerate(numbers)
        ]

    shares = deal(
        StagePlan(index=0, kind="open", schedule=plan, duration_s=100.0, offered_rps=20.0), workers
    )
    assert len(shares) == workers
    assert sorted(row for share in shares for row in rows(share.schedule)) == rows(plan)
