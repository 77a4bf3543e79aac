"""``ampacity simulate --calibrate RUN``: the effective figures of an engine come back out of a run
of it.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ampacity.cli import main
from ampacity.experiments.virtual.calibrate import calibrate_to_run
from ampacity.simulator.engine.deployment import Deployment
from ampacity.simulator.engine.steptime import Roofline
from ampacity.simulator.models.hardware import find_config
from ampacity.values import ConfigError
from tests.support.args import args_of


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed-loop run of an engine that differs from its preset, in virtual time."""
    run = tmp_path_factory.mktemp("calibrate") / "run"
    with pytest.MonkeyPatch.context() as patch:
        slower = truth()
        patch.setattr(
            "ampacity.simulator.models.hardware.find_deployment", lambda name: Deployment(slower)
        )
        patch.setattr(
            sys,
            "argv",
            [
                *args_of(
                    "ampacity predict --preset any --input-tokens lognormal:p50=300,p99=900 "
                    "--output-tokens lognormal:p50=150,p99=600 --concurrency 1,2,3,4,6,8,12,16,24 "
                    "--duration 5m --out"
                ),
                str(run),
            ],
        )
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 0
    return run


def truth() -> "object":
    config = find_config("llama3-8b-a100")
    assert isinstance(config.step_time, Roofline)
    step_time = replace(
        config.step_time,
        bandwidth_bytes_s=config.step_time.bandwidth_bytes_s * 0.8,
        compute_flops=config.step_time.compute_flops * 0.7,
        overhead_s=config.step_time.overhead_s + 0.002,
    )
    return replace(config, step_time=step_time)


def test_the_factors_come_back(measured: Path) -> None:
    fitted, lines = calibrate_to_run(measured, find_config("llama3-8b-a100"))
    expected = truth().step_time
    assert isinstance(fitted.step_time, Roofline)
    assert fitted.step_time.bandwidth_bytes_s == pytest.approx(expected.bandwidth_bytes_s, rel=0.12)
    assert fitted.step_time.compute_flops == pytest.approx(expected.compute_flops, rel=0.08)
    assert fitted.step_time.overhead_s == pytest.approx(expected.overhead_s, rel=0.4)
    assert "R²" in lines[-1]


def test_a_run_with_too_few_levels_is_refused(measured: Path) -> None:
    small = replace(find_config("llama3-8b-a100"), max_num_seqs=2)
    with pytest.raises(ConfigError, match="3 are needed"):
        calibrate_to_run(measured, small)
    with pytest.raises(ConfigError, match="roofline"):
        calibrate_to_run(measured, find_config("linear:0.01,0.001"))
