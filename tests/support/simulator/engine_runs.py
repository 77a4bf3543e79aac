"""What the tests of the simulated engine run it with: a closed loop, steps without a clock, names
of shared blocks, a tiny engine.
"""

from collections.abc import Hashable, Sequence

from ampacity.simulator.engine.deployment import Deployment, Run
from ampacity.simulator.engine.engine import Engine, EngineConfig, Request
from ampacity.simulator.engine.outcome import outcome_of
from ampacity.simulator.engine.steptime import Roofline
from benchmarks.servers.truth import Measured, measured

# Memory 1 ms a step; a computed token 1 ms: a step of n > 1 tokens takes n ms.
PER_TOKEN = Roofline(1.0, 0.0, 1.0, 0.0, 1e3, 1e3)


def tiny(**changes: object) -> EngineConfig:
    values: dict[str, object] = {
        "name": "tiny",
        "step_time": PER_TOKEN,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "kv_blocks": 16,
        "block_tokens": 4,
    }
    return EngineConfig(**(values | changes))


def prefix_hashes(prefix: Hashable, tokens: int, block_tokens: int = 16) -> list[Hashable]:
    """Names of the full blocks of a prefix that several requests share; longer ones continue
    shorter ones."""
    return [(prefix, number) for number in range(tokens // block_tokens)]


def run_dry(engine: Engine, now_s: float = 0.0) -> list[Request]:
    """Step until nothing is left to do; the requests in the order in which they finished."""
    finished = []
    while (result := engine.step(now_s)) is not None:
        finished += result.finished
        now_s = result.end_s
    return finished


def simulate_closed(
    config: EngineConfig, clients: int, requests: Sequence[Request], think_s: float = 0.0
) -> Measured:
    """Each of ``clients`` sends its next request ``think_s`` after the last token of the one
    before, in the order given."""
    coming = iter(requests)

    def send(at_s: float) -> None:
        request = next(coming, None)
        if request is not None:
            run.arrive(request, at_s)

    run = Run(Deployment(config), on_finish=lambda _, at_s: send(at_s + think_s))
    for _ in range(clients):
        send(0.0)
    run.advance()
    return measured(outcome_of(run, requests))
