"""A batching server that works step by step, with the time of every token; not our simulator.

Requests wait in one line for a free slot. In each step every running request gets one token, and what is left of
``chunk`` tokens is spent on prompts in their order. A step takes (alpha + beta running + gamma prompt tokens) s, times a
log-normal factor of its own, times the speed of the run.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ampacity.loadgen.rundir.files import Run
from ampacity.loadgen.rundir.records import SCHEMA

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
ORIGIN_NS = 1_000_000_000


@dataclass(frozen=True)
class StepServer:
    """Times in s. ``prompt_slower`` multiplies gamma and what a prompt costs beside it: a regression of TTFT alone."""

    slots: int
    chunk: int  # tokens of prompts in one step
    alpha_s: float
    beta_s: float
    gamma_s: float
    first_s: float  # before a request joins the line, as a tokenizer or a gateway; stops nobody
    prompt: tuple[float, float]  # median and sigma of the log-normal lengths, in tokens
    answer: tuple[float, float]

    def lengths(self, n: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        drawn = (rng.lognormal(math.log(m), s, n) for m, s in (self.prompt, self.answer))
        prompts, answers = (
            np.clip(np.round(x), 2, 20 * m)
            for x, (m, _) in zip(drawn, (self.prompt, self.answer), strict=True)
        )
        return prompts.astype(np.int64), answers.astype(np.int64)

    @cached_property
    def most_rps(self) -> float:
        """Saturation: all slots busy, and the prompts' tokens beside them."""
        prompts, answers = self.lengths(200_000, np.random.default_rng(1))
        decode_s = float(answers.mean() - 1) * (self.alpha_s / self.slots + self.beta_s)
        return 1 / (decode_s + self.gamma_s * float(prompts.mean()))

    def serve(
        self,
        arrival_s: Floats,
        prompts: Ints,
        answers: Ints,
        rng: np.random.Generator,
        jitter: float,
    ) -> tuple[Floats, Ints]:
        """(end of each step in s, step in which each request gets its first token)."""
        joins = (arrival_s + self.first_s).tolist()
        left, tokens = prompts.tolist(), answers.tolist()
        first = [0] * len(left)
        ends: list[float] = []
        now, n, head, tail, running = 0.0, len(left), 0, 0, 0
        done: list[int] = []  # steps after which a running request has all its tokens
        factors = np.exp(jitter * rng.standard_normal(1 << 15)).tolist()  # in turns
        alpha, beta, gamma, slots = self.alpha_s, self.beta_s, self.gamma_s, self.slots
        while head < n or done:
            if not running and head == tail and (tail >= n or joins[tail] > now):
                now = joins[tail]
            # requests head ... tail - 1 are in a slot and have some of their prompt left
            while tail < n and joins[tail] <= now and running + tail - head < slots:
                tail += 1
            room, begun = self.chunk, head
            while head < tail and room:
                used = min(room, left[head])
                left[head] -= used
                room -= used
                if left[head]:
                    break
                head += 1
            step = len(ends)
            now += (alpha + beta * running + gamma * (self.chunk - room)) * factors[step & 0x7FFF]
            ends.append(now)
            while done and done[0] <= step:
                heapq.heappop(done)
                running -= 1
            for i in range(begun, head):
                first[i] = step
                if tokens[i] > 1:
                    heapq.heappush(done, step + tokens[i] - 1)
                    running += 1
        return np.array(ends), np.array(first)


STEP_SERVERS = {
    # prompts in pieces beside the answers; 32 slots
    "pieces": StepServer(32, 512, 0.010, 0.0005, 0.00005, 0.010, (400, 0.8), (50, 0.7)),
    # whole prompts that stop the answers; 64 slots, longer tails
    "whole": StepServer(64, 8192, 0.012, 0.0002, 0.00008, 0.005, (250, 1.1), (60, 1.0)),
    # few slots: the line is for slots
    "slots": StepServer(12, 2048, 0.015, 0.0010, 0.00002, 0.020, (300, 0.6), (80, 0.8)),
}


def step_run(
    server: StepServer,
    rate_rps: float,
    n: int,
    seed: int,
    noise_seed: int,
    *,
    jitter: float,
    speed: float = 1.0,
) -> Run:
    """One stage of n Poisson requests on an idle server, without a disk. ``seed`` fixes what is sent and when."""
    rng = np.random.default_rng([seed, 17])
    duration_s = n / rate_rps
    arrival = np.sort(rng.uniform(0, duration_s, n))
    prompts, answers = server.lengths(n, rng)
    faster = {k: getattr(server, k) * speed for k in ("alpha_s", "beta_s", "gamma_s", "first_s")}
    quick = replace(server, **faster)
    ends, first = quick.serve(
        arrival, prompts, answers, np.random.default_rng([noise_seed, 23]), jitter
    )
    offsets = np.concatenate([[0], np.cumsum(answers)])
    steps = np.arange(offsets[-1]) - np.repeat(offsets[:-1], answers) + np.repeat(first, answers)
    due, at = _ns(arrival), _ns(ends)[steps]
    last = at[offsets[1:] - 1]
    known: dict[str, Any] = {
        "request_id": np.arange(n),
        "stage": np.zeros(n, int),
        "attempt": np.zeros(n, int),
        "scheduled_ns": due,
        "dispatched_ns": due,
        "started_ns": due,
        "first_token_ns": at[offsets[:-1]],
        "first_answer_ns": at[offsets[:-1]],
        "last_token_ns": last,
        "ended_ns": last,
        "status": ["ok"] * n,
        "finish_reason": ["length"] * n,
        "token_source": ["usage"] * n,
        "input_tokens_planned": prompts,
        "input_tokens": prompts,
        "output_tokens_planned": answers,
        "output_tokens": answers,
        "chunk_at_us": pa.ListArray.from_arrays(
            pa.array(offsets, pa.int32()),
            pa.array((at - np.repeat(due, answers)) // 1000, pa.uint32()),
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
    stage = {
        "index": 0,
        "kind": "open",
        "offered_rps": rate_rps,
        "concurrency": None,
        "start_ns": ORIGIN_NS,
        "end_ns": ORIGIN_NS + int(duration_s * 1e9),
        "scheduled_requests": n,
        "drained_ns": int(last.max()),
        "ended_early": None,
        "audit": None,
    }
    meta = {
        "run_id": f"{seed}-{noise_seed}",
        "started_utc": "",
        "status": "complete",
        "seed": seed,
        "stages": [stage],
        "slos": [],
        "workload": {"name": "study", "arrivals": "poisson", "prompts": "unique"},
        "warmup_requests": None,
    }
    return Run(
        Path(str(meta["run_id"])), meta, pa.Table.from_arrays(columns, schema=SCHEMA), None, True
    )


def _ns(seconds: Floats) -> Ints:
    return ORIGIN_NS + np.round(seconds * 1e9).astype(np.int64)
