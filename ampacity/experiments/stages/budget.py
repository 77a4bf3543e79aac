"""Estimate what a run will send and cost; print it, and ask, before the first request."""

import sys
from collections.abc import Sequence

from ampacity.analysis.decision.money import Prices, Request, read_prices
from ampacity.loadgen.drive.account import Account
from ampacity.loadgen.send.endpoint import is_loopback, is_private
from ampacity.loadgen.workers.setup import Route
from ampacity.progress import Progress
from ampacity.settings import Settings
from ampacity.values import ConfigError
from ampacity.workloads.replay import Replayed
from ampacity.workloads.schedule import open_schedule

ASSUMED = "assumed: answers as long as planned, no prompt cached, no retry, no repeated stage"


def account_of(settings: Settings) -> Account:
    """Return the account that requests are charged to. Raises ConfigError, DecisionError."""
    prices = prices_of(settings)
    dollars = (prices.input, prices.read, prices.output) if prices else None
    sent = {"requests": settings.max_requests, "tokens": settings.max_tokens}
    kept = sent if settings.retries else {}  # without, the schedules are cut to them
    return Account(settings.endpoint.keys, dollars, settings.max_cost, kept)


def prices_of(settings: Settings) -> Prices | None:
    """Return the prices of the model in --prices; of a file with one model, that one's."""
    if settings.prices is None:
        return None
    listed = read_prices(settings.prices)
    if settings.model is None and len(listed) == 1:
        return next(iter(listed.values()))
    if settings.model in listed:
        return listed[settings.model]
    wrong = "name the model with --model, as prices are read before the server is asked"
    if settings.model:
        wrong = f"no price of {settings.model}"
    raise ConfigError(f"--prices {settings.prices}: {wrong}; it has {', '.join(listed)}")


def approve(
    settings: Settings,
    trace: Replayed | None,
    routes: Sequence[Route],
    progress: Progress,
    times: int = 1,
) -> None:
    """Print what is about to be sent, and ask where that goes to a public address.

    Nothing is printed of a load without limits that stays on this machine. Raises ConfigError.
    """
    addresses = [address for route in routes for address in route.addresses]
    known = all(route.addresses for route in routes)
    if not (settings.prices or _limits(settings)) and known and is_loopback(addresses):
        return
    text = estimate(settings, trace, times * (1 + len(settings.lengths)))
    progress.note(text)
    if settings.yes or (known and is_private(addresses)):
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{text}; it is a public address: --yes confirms the load")
    if not progress.ask("Send this load to a public address?"):
        raise ConfigError("not confirmed, nothing was sent")


def estimate(settings: Settings, trace: Replayed | None, times: int = 1) -> str:
    """Return requests, tokens and, with prices, dollars of a run, with what they assume.

    ``times``: how often each load is run.
    """
    workload, prices = settings.workload, prices_of(settings)
    limits, plan = ", ".join(_limits(settings)), planned(settings, trace, times)
    if plan is None:
        mean = Request(workload.input_tokens.mean(), workload.output_tokens.mean())
        each = f"about {mean.input_tokens + mean.output_tokens:.0f} tokens a request"
        if prices:
            each += f", ${prices.request_usd(mean):.2g} ({ASSUMED})"
        return (
            f"{settings.endpoint.url}: how many requests is not known beforehand; {each}; "
            f"{limits or 'no --max-requests, --max-tokens or --max-cost is set'}"
        )
    cost = f", about ${plan['cost']:.3g}" if prices else ""
    return (
        f"{settings.endpoint.url}: about {plan['requests']:,} requests and {plan['tokens']:,} tokens"
        f"{cost} are planned ({ASSUMED}){f'; {limits}' if limits else ''}"
    )


def planned(settings: Settings, trace: Replayed | None, times: int = 1) -> dict[str, float] | None:
    """Return the requests, tokens and, with prices, dollars of a run; None where it finds its loads."""
    if trace is not None:
        schedules = [trace.schedule]
    elif not settings.rates:
        return None
    else:  # histories grow: what is drawn is counted
        schedules = [
            open_schedule(
                settings.workload, rate_rps=rate, duration_s=length_s, seed=settings.seed, stage=k
            )
            for k, (rate, length_s) in enumerate(settings.loads)
        ]
    requests, of_input, of_output = (
        times * sum(int(numbers) for numbers in of)
        for of in zip(
            *((len(s), s.input_tokens.sum(), s.output_tokens.sum()) for s in schedules), strict=True
        )
    )
    prices, found = prices_of(settings), {"requests": requests, "tokens": of_input + of_output}
    return found | ({"cost": prices.request_usd(Request(of_input, of_output))} if prices else {})


def _limits(settings: Settings) -> list[str]:
    named = ("requests", "tokens", "cost")
    values = ((name, getattr(settings, f"max_{name}")) for name in named)
    return [f"at most --max-{name} {value:,g}" for name, value in values if value]
