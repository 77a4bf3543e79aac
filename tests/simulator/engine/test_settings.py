"""Settings of engines and servers that mean nothing are refused, each with its own name in the one line."""

import math

import pytest

from ampacity.cli.engine_options import make_face
from ampacity.simulator import SimulatorError
from ampacity.simulator.models.hardware import find_deployment
from ampacity.simulator.server.server import Start, serve


@pytest.mark.parametrize(
    ("preset", "said"),
    [
        ("linear:nan,0", "linear:ALPHA_S"),
        ("linear:inf,0", "linear:ALPHA_S"),
        ("llama3-8b@h100,compute_factor=nan", "compute_factor"),
        ("llama3-8b@h100,bandwidth_factor=inf", "bandwidth_factor"),
        ("llama3-8b@h100,overhead_s=nan", "overhead_s"),
        ("demo,speculation=4:0.5:nan", "speculation"),
        ("demo,max_loras=2,adapter_load_s=nan", "adapter_load_s"),
        ("demo,max_loras=2,adapter_load_s=-1", "adapter_load_s"),
        ("demo,adapter_load_s=1", "max_loras"),  # it would cost nothing
        ("demo,transfer_gbs=25", "prefill_replicas"),  # nothing would be transferred
        ("demo,prefill_replicas=1,transfer_gbs=inf", "transfer_gbs"),
        ("llama3-70b@3xh100", "64 attention heads"),  # as vLLM: heads are split evenly
        ("qwen2.5-1.5b@8xl4", "12 attention heads"),
    ],
)
def test_a_setting_without_a_meaning_is_refused(preset: str, said: str) -> None:
    with pytest.raises(SimulatorError, match=said):
        find_deployment(preset)


def test_zero_is_a_time_to_load_an_adapter() -> None:
    assert find_deployment("demo,adapter_load_s=0").config.adapter_load_s == 0
    assert find_deployment("qwen2.5-1.5b@6xl4").engines == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_options_of_the_face_are_finite(value: float) -> None:
    with pytest.raises(SimulatorError, match=r"--natural-tokens (nan|inf)"):
        make_face({"natural_tokens": value})


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 65536), ("127.0.0.1", -1), ("", 0)])
def test_an_address_that_is_none_is_refused_and_not_folded_into_another(
    host: str, port: int
) -> None:
    with pytest.raises(SimulatorError, match="from 0 to 65535"):
        serve(Start(host=host, port=port))
