"""What the tests of the simulated engine run it with: a closed loop, and names of shared blocks."""

from collections.abc import Hashable, Sequence

from simulator.deployment import Deployment, Run
from simulator.engine import EngineConfig, Request
from simulator.outcome import Outcome, outcome_of


def prefix_hashes(prefix: Hashable, tokens: int, block_tokens: int = 16) -> list[Hashable]:
    """Names of the full blocks of a prefix that several requests share; longer ones continue shorter ones."""
    return [(prefix, number) for number in range(tokens // block_tokens)]


def simulate_closed(
    config: EngineConfig, clients: int, requests: Sequence[Request], think_s: float = 0.0
) -> Outcome:
    """Each of ``clients`` sends its next request ``think_s`` after the last token of the one before, in the order given."""
    coming = iter(requests)

    def send(at_s: float) -> None:
        request = next(coming, None)
        if request is not None:
            run.arrive(request, at_s)

    run = Run(Deployment(config), on_finish=lambda _, at_s: send(at_s + think_s))
    for _ in range(clients):
        send(0.0)
    run.advance()
    return outcome_of(run, requests)
