"""How often does the gate cry wolf, leave equal runs open, and find a change? In virtual time.

    python -m benchmarks.studies.gate_rates --server pieces --load 0.85 --pairs 600

Every pair has its own seed: a baseline of --baseline-runs runs, an equal candidate, one with all
steps 10 % longer, and one whose every TTFT is 25 % longer with nothing else changed. "same"
candidates send the same requests at the same times as their baseline, "other" ones are held against
the baseline of the pair before. While the answer is inconclusive the same candidate is measured
again, as ``ampacity gate --max-samples`` does: a sequence of --looks looks, with fresh noise in
each sample (and in "other" fresh requests). ``first`` is the answer of one look alone (no
--max-samples; of equal runs), ``answers`` that of the whole sequence. Each run is faster or slower
as a whole by --run-noise, each step by --jitter. ``--server``: those of
benchmarks/servers/steps.py, which are not our simulator, or "preset", which is.
"""

import argparse
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ampacity.analysis.change.judged import CompareError, Judged, prepare
from ampacity.analysis.gate.baseline import make_baseline
from ampacity.analysis.gate.baseline_file import write_baseline
from ampacity.analysis.gate.gate import judge_gate
from ampacity.loadgen.rundir.files import Run
from ampacity.loadgen.rundir.records import SCHEMA
from ampacity.simulator.engine.outcome import simulate as simulate_engine
from ampacity.simulator.engine.steptime import Roofline, StepTime
from ampacity.simulator.models.hardware import find_config
from ampacity.workloads.profile import load_workload
from ampacity.workloads.schedule import open_schedule
from benchmarks.options import parser
from benchmarks.servers.steps import STEP_SERVERS, step_run

KINDS = ("equal", "steps", "ttft")
ORIGIN_NS = 1_000_000_000


class Unsteady:
    """A step time with noise of its own; ``speed`` 1.1 makes every step 10 % longer."""

    def __init__(self, inner: StepTime, speed: float, jitter: float, seed: int) -> None:
        self._inner, self._speed, self._jitter, self._random = (
            inner,
            speed,
            jitter,
            random.Random(seed),
        )

    def seconds(
        self, sequences: int, tokens: int, kv_tokens: int, attended_pairs: float, prompts: int
    ) -> float:
        factor = self._speed * math.exp(self._random.gauss(0.0, self._jitter))
        return factor * self._inner.seconds(sequences, tokens, kv_tokens, attended_pairs, prompts)


def simulate(
    options: argparse.Namespace, seed: int, noise_seed: int, slower: str | None = None
) -> Judged:
    """Return one run; ``slower``: "steps" (all by 10 %) or "prefill" (10 % less compute)."""
    config = find_config(options.preset)
    step = config.step_time
    if slower == "prefill":
        assert isinstance(step, Roofline)
        step = replace(step, compute_flops=step.compute_flops / (1 + options.change))
    speed = math.exp(random.Random(noise_seed + 10**6).gauss(0.0, options.run_noise))
    speed *= 1 + options.change if slower == "steps" else 1.0
    config = replace(config, step_time=Unsteady(step, speed, options.jitter, noise_seed))
    duration_s = options.requests / options.rate
    workload = load_workload(options.workload)
    schedule = open_schedule(
        workload, rate_rps=options.rate, duration_s=duration_s, seed=seed, stage=0
    )
    outputs = np.minimum(schedule.output_tokens, config.max_model_len // 2)
    inputs = np.minimum(schedule.input_tokens, config.max_model_len - outputs)
    tokens = simulate_engine(
        replace(config, seed=noise_seed), schedule.scheduled_s, inputs, outputs
    )
    stage = {
        "index": 0,
        "kind": "open",
        "offered_rps": options.rate,
        "concurrency": None,
        "start_ns": ORIGIN_NS,
        "end_ns": ORIGIN_NS + int(duration_s * 1e9),
        "scheduled_requests": len(schedule),
        "drained_ns": int(_ns(tokens.finish_s).max()),
        "ended_early": None,
        "audit": None,
    }
    meta = {
        "run_id": f"{seed}-{noise_seed}",
        "started_utc": "",
        "status": "complete",
        "predicted": True,
        "seed": seed,
        "stages": [stage],
        "slos": [],
        "workload": workload.describe(),
        "warmup_requests": None,
    }
    return prepare(Run(Path(meta["run_id"]), meta, _table(tokens, inputs), None, True))


def _ns(seconds: Any) -> Any:
    return ORIGIN_NS + np.round(seconds * 1e9).astype(np.int64)


def _table(tokens: Any, inputs: Any) -> pa.Table:
    """Return the records of a predicted stage, one token a chunk."""
    n = len(tokens.arrival_s)
    due, first, last = _ns(tokens.arrival_s), _ns(tokens.first_token_s), _ns(tokens.finish_s)
    times = [tokens.token_times_s(i) for i in range(n)]
    offsets = np.concatenate([[0], np.cumsum([len(t) for t in times])])
    at_us = (_ns(np.concatenate(times)) - np.repeat(due, np.diff(offsets))) // 1000
    known: dict[str, Any] = {
        "request_id": np.arange(n),
        "stage": np.zeros(n, int),
        "attempt": np.zeros(n, int),
        "scheduled_ns": due,
        "dispatched_ns": due,
        "started_ns": due,
        "first_token_ns": first,
        "first_answer_ns": first,
        "last_token_ns": last,
        "ended_ns": last,
        "status": ["ok"] * n,
        "finish_reason": ["length"] * n,
        "token_source": ["usage"] * n,
        "input_tokens_planned": inputs,
        "input_tokens": inputs,
        "cached_tokens": tokens.cached_tokens,
        "output_tokens_planned": tokens.output_tokens,
        "output_tokens": tokens.output_tokens,
        "chunk_at_us": pa.ListArray.from_arrays(
            pa.array(offsets, pa.int32()), pa.array(at_us, pa.uint32())
        ),
    }
    columns = [
        (
            known[f.name]
            if isinstance(known[f.name], pa.Array)
            else pa.array(known[f.name]).cast(f.type)
        )
        if f.name in known
        else pa.nulls(n, f.type)
        for f in SCHEMA
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def later_first_token(run: Run, share: float) -> Run:
    """Return the run with every TTFT longer by this share; later gaps stay."""
    table = run.requests
    started, first = (table[c].to_numpy() for c in ("started_ns", "first_token_ns"))
    later = np.round(share * (first - started) / 1000).astype(np.int64)  # us
    for name in ("first_token_ns", "first_answer_ns", "last_token_ns", "ended_ns"):
        moved = pa.array(table[name].to_numpy() + 1000 * later)
        table = table.set_column(table.column_names.index(name), table.schema.field(name), moved)
    at = table["chunk_at_us"].combine_chunks()
    moved_us = at.values.to_numpy().astype(np.int64) + np.repeat(
        later, np.diff(at.offsets.to_numpy())
    )
    lists = pa.ListArray.from_arrays(at.offsets, pa.array(moved_us.astype(np.uint32)))
    index = table.column_names.index("chunk_at_us")
    table = table.set_column(index, table.schema.field("chunk_at_us"), lists)
    stage = run.meta["stages"][0]
    stages = [stage | {"drained_ns": stage["drained_ns"] + 1000 * int(later.max())}]
    return replace(run, requests=table, meta={**run.meta, "stages": stages})


def measure(options: argparse.Namespace, seed: int, noise_seed: int, kind: str = "equal") -> Run:
    """Return a run of one kind: "equal", "steps" or "ttft"."""
    if options.server == "preset":
        run = simulate(options, seed, noise_seed, "steps" if kind == "steps" else None).run
    else:
        speed = math.exp(random.Random(noise_seed + 10**6).gauss(0.0, options.run_noise))
        speed *= 1 + options.change if kind == "steps" else 1.0
        server = STEP_SERVERS[options.server]
        rate = options.load * server.most_rps
        run = step_run(
            server, rate, options.requests, seed, noise_seed, jitter=options.jitter, speed=speed
        )
    return later_first_token(run, options.ttft_change) if kind == "ttft" else run


@dataclass
class Cell:
    """What came out of the pairs of one kind."""

    first: Counter[str] = field(default_factory=Counter)  # of one look alone
    answers: Counter[str] = field(default_factory=Counter)  # of the whole sequence
    samples: Counter[int] = field(default_factory=Counter)
    by_check: Counter[str] = field(default_factory=Counter)
    tracked: int = 0

    def add(
        self, base: dict[str, Any], sample: Callable[[int], Judged], looks: int, single: bool
    ) -> None:
        """Return the verdicts on one candidate, with further samples as they are asked for."""
        runs: list[Judged] = []
        try:
            for look in range(1, looks + 1):
                runs.append(sample(look))
                found = judge_gate(base, runs, {}, look=look, looks=looks)
                if look == 1 and single:
                    alone = judge_gate(base, runs, {})
                    self.first[alone.verdict] += 1
                    self.tracked += sum(c.kind == "change" for c in alone.checks)
                if found.verdict != "inconclusive":
                    break
        except CompareError as error:
            self.answers["refused"] += 1
            self.by_check[str(error).partition(" ")[2][:60]] += 1
            return
        self.answers[found.verdict] += 1
        self.samples[len(runs)] += 1
        self.by_check.update(f"{c.name} {c.verdict}" for c in found.checks if c.verdict != "pass")

    def as_dict(self) -> dict[str, Any]:
        n, alone = sum(self.answers.values()), max(sum(self.first.values()), 1)
        return {
            "n": n,
            "first": dict(sorted(self.first.items())),
            "answers": dict(sorted(self.answers.items())),
            "samples": dict(sorted(self.samples.items())),
            "tracked": round(self.tracked / alone, 1),
            "not_passed": dict(self.by_check.most_common(8)),
        }


class Candidate:
    """The samples of one candidate, the first of which is measured once."""

    def __init__(self, options: argparse.Namespace, seed: int, kind: str) -> None:
        self._options, self._seed, self._kind = options, seed, kind
        self._first = self._measured(1, seed)

    def same(self, look: int) -> Judged:
        """Return the requests of its seed again, with other noise."""
        return self._first if look == 1 else self._measured(look, self._seed)

    def other(self, look: int) -> Judged:
        """Return other requests in each sample."""
        return self._first if look == 1 else self._measured(look, self._seed + 10**7 * (look - 1))

    def _measured(self, look: int, drawn: int) -> Judged:
        noise = 1000 * self._seed + 100 * look + KINDS.index(self._kind)
        return prepare(measure(self._options, drawn, noise, self._kind))


def study(options: argparse.Namespace) -> dict[str, Cell]:
    """Return the verdicts on every kind of pair."""
    cells: dict[str, Cell] = {}
    last: dict[str, Any] | None = None
    for pair in range(options.pairs + 1):
        seed = options.first_seed + pair
        runs = [measure(options, seed, 1000 * seed + k) for k in range(options.baseline_runs)]
        try:
            base = json.loads(write_baseline(make_baseline([prepare(run) for run in runs])))
        except CompareError as error:
            cells.setdefault("no baseline", Cell()).answers[str(error)[-60:]] += 1
            continue
        for kind in KINDS:
            if kind != "equal" and pair % options.changed_every:
                continue
            candidate, single = Candidate(options, seed, kind), kind == "equal"
            cells.setdefault(f"{kind}, same seed", Cell()).add(
                base, candidate.same, options.looks, single
            )
            if last is not None:
                other = cells.setdefault(f"{kind}, other seed", Cell())
                other.add(last, candidate.other, options.looks, single)
        last = base
        if (pair + 1) % 100 == 0:
            print({k: dict(c.answers) for k, c in cells.items()}, file=sys.stderr, flush=True)
    return cells


def main() -> None:
    given = parser(
        __doc__,
        pairs=600,
        requests=2000,
        baseline_runs=1,
        jitter=0.03,
        run_noise=0.005,
        change=0.1,
        ttft_change=0.25,
        first_seed=1,
    )
    given.add_argument("--server", default="pieces", choices=(*STEP_SERVERS, "preset"))
    given.add_argument("--load", type=float, default=0.6, help="share of the saturation rate")
    given.add_argument(
        "--rate", type=float, default=3.16, help="requests/s of the preset, in place of --load"
    )
    given.add_argument("--looks", type=int, default=3, help="samples of a candidate at most")
    given.add_argument(
        "--changed-every",
        type=int,
        default=1,
        help="pairs for each that has a changed candidate too",
    )
    options = given.parse_args()
    options.preset, options.workload = "llama3-8b-a100", "chat"
    found = {kind: cell.as_dict() for kind, cell in study(options).items()}
    print(json.dumps({"options": vars(options), "cells": found}, indent=1))


if __name__ == "__main__":
    main()
