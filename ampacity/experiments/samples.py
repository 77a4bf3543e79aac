"""Judge samples of a candidate against a baseline; while inconclusive, take further samples."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampacity.analysis.change.judged import CompareError, prepare
from ampacity.analysis.change.results import GateResult
from ampacity.analysis.gate import gate
from ampacity.analysis.gate.gate import twice_as_slow
from ampacity.experiments.rerun import RerunError, command_of, repeatable, rerun
from ampacity.loadgen.rundir.files import Run, RunDirError, load_run

MOST_SAMPLES = 20


@dataclass(frozen=True)
class Budget:
    """Limits on samples in all, and on seconds and tokens of further samples; None: no limit."""

    samples: int | None
    seconds: float | None
    tokens: int | None

    def looks(self, given: int, run_s: float, run_tokens: int) -> int:
        """Return how many samples there can be, of which ``given`` exist, each of this cost."""
        if (self.samples, self.seconds, self.tokens) == (None, None, None):
            return 1
        limits = [MOST_SAMPLES if self.samples is None else self.samples, MOST_SAMPLES]
        if self.seconds is not None:
            limits.append(given + int(self.seconds // max(run_s, 1e-9)))
        if self.tokens is not None:
            limits.append(given + self.tokens // max(run_tokens, 1))
        return max(min(limits), given)


def judge_samples(
    paths: list[Path],
    base: dict[str, Any],
    tolerances: dict[str, float],
    slos: list[Any],
    budget: Budget,
    self_test: bool,
) -> GateResult:
    """Return the gate's result, after as many further samples as it takes and ``budget`` allows."""
    loaded = [load_run(path) for path in paths]
    runs = [prepare(twice_as_slow(run) if self_test else run, slos) for run in loaded]
    looks = budget.looks(len(runs), *gate.cost_of(runs[0]))

    def judge() -> GateResult:
        return gate.judge_gate(base, runs, tolerances, look=min(len(runs), looks), looks=looks)

    result = judge()
    while not self_test and result.verdict == "inconclusive" and (taken := len(runs)) < looks:
        out = _free(paths[0].with_name(f"{paths[0].name}-sample-{taken + 1}"))
        try:
            command = _next_command(loaded[0], out, taken, bool(result.same_schedule))
        except RerunError as error:
            result.notes.append(
                f"Up to {looks} samples may be taken: {error}, then give both directories to "
                "ampacity gate."
            )
            break
        if not repeatable(command):
            again = shlex.join([*map(str, paths), str(out)])
            result.notes.append(
                f"Up to {looks} samples may be taken, but the value of --header or --api-key-command "
                f"is not written down. Put it in and run: {shlex.join(command)} && ampacity gate {again} "
                f"--baseline FILE --max-samples {looks}"
            )
            break
        print(f"{result.sentence} Sample {taken + 1} of at most {looks}.", file=sys.stderr)
        try:
            rerun(command)
            runs.append(prepare(load_run(out), slos))
            result = judge()
        except (RerunError, CompareError, RunDirError) as error:  # the result so far stands
            failed = f"Sample {taken + 1} of at most {looks} could not be taken: {error}"
            result.notes.append(failed)
            break
    if result.verdict == "inconclusive" and len(runs) >= looks > 1:
        result.notes.append(
            f"All {looks} samples are taken; one more would be one more chance of a false alarm. "
            "Begin anew: a longer --duration, in the baseline as well, or more runs of the baseline."
        )
    return result


def _next_command(run: Run, out: Path, taken: int, same_schedule: bool) -> list[str]:
    """Return the command of the next sample. Virtual time repeats itself without a new seed."""
    fresh = not same_schedule or run.meta.get("predicted")
    seed = int(run.meta.get("seed") or 0) + (taken if fresh else 0)
    return command_of(run.meta, out, seed)


def _free(path: Path) -> Path:
    found, number = path, 2
    while found.exists():
        found, number = path.with_name(f"{path.name}-{number}"), number + 1
    return found
