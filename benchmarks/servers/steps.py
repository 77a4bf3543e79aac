"""A batching server that works step by step, with the time of every token; not our simulator.

Requests wait in one queue for a free slot. In each step every running request gets one token, and
up to ``chunk`` tokens of prompts are processed in order. A step takes (alpha + beta running + gamma
prompt tokens) s, times a log-normal factor of its own, times the speed of the run.
"""

import heapq
import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ampacity.loadgen.rundir.files import Run
from benchmarks.servers.runs import META, requests_table, stage_meta

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
ORIGIN_NS = 1_000_000_000


@dataclass(frozen=True)
class StepServer:
    """A server's slots, costs in s, and lengths."""

    slots: int
    chunk: int  # tokens of prompts in one step
    alpha_s: float
    beta_s: float
    gamma_s: float
    first_s: float  # before a request joins the queue (tokenizer, gateway); delays no other
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
        """Return the saturation rate: all slots busy, and the prompts' tokens processed beside."""
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
        """Return (end of each step in s, step in which each request gets its first token)."""
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
    """Return one stage of n Poisson requests on an idle server; ``seed`` fixes the requests."""
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
    known = {
        "request_id": np.arange(n),
        "stage": 0,
        **dict.fromkeys(("scheduled_ns", "dispatched_ns", "started_ns"), due),
        **dict.fromkeys(("first_token_ns", "first_answer_ns"), at[offsets[:-1]]),
        **dict.fromkeys(("last_token_ns", "ended_ns"), last),
        **dict.fromkeys(("input_tokens_planned", "input_tokens"), prompts),
        **dict.fromkeys(("output_tokens_planned", "output_tokens"), answers),
        "chunk_at_us": pa.ListArray.from_arrays(
            pa.array(offsets, pa.int32()),
            pa.array((at - np.repeat(due, answers)) // 1000, pa.uint32()),
        ),
    }
    times_ns = (ORIGIN_NS, ORIGIN_NS + int(duration_s * 1e9), int(last.max()))
    meta = {
        "run_id": f"{seed}-{noise_seed}",
        "started_utc": "",
        "status": "complete",
        "seed": seed,
        "stages": [{**stage_meta(0, rate_rps, n, *times_ns), "audit": None}],
        "slos": [],
        "workload": META["workload"],
        "warmup_requests": None,
    }
    return Run(Path(str(meta["run_id"])), meta, requests_table(n, known), None, True)


def _ns(seconds: Floats) -> Ints:
    return ORIGIN_NS + np.round(seconds * 1e9).astype(np.int64)
