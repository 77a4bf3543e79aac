"""The thirteen steps from a workload to a validated fleet: known, decided, missing."""

from __future__ import annotations

from collections.abc import Callable

from ampacity.analysis.contract.part import Part
from ampacity.analysis.decision.inputs import Input
from ampacity.analysis.decision.known import Known, Physics
from ampacity.analysis.decision.money import FleetCost, Request, sensitivities
from ampacity.analysis.decision.roofline import Instance, decode_floor_s

SHARED_MATTERS = 0.3  # from this cached share on, routing by prefix pays
TRIED = ("fp16", "fp8", "int4")
SENSITIVE = {
    "gpu_hour_usd": "the price of a GPU",
    "carried_rps": "the measured capacity",
    "utilisation": "the utilisation",
    "accepted": "the share of accepted results",
}


class Step(Part, frozen=True, kw_only=True):
    """One step. ``decision`` None: it cannot be taken, ``gap`` says why, ``command`` closes it."""

    title: str
    known: tuple[Input, ...] = ()
    decision: str | None = None
    gap: str | None = None
    command: str | None = None


def thirteen_steps(known: Known, physics: Physics) -> list[Step]:
    """Return all steps in their order."""
    return [step(known, physics) for step in STEPS]


def _measured(name: str, value: float | None, unit: str, source: str) -> Input:
    return Input(name=name, value=value, unit=unit, basis="measured", source=source)


def _stated(name: str, value: float | None, unit: str, source: str) -> Input:
    return Input(name=name, value=value, unit=unit, basis="stated", source=source)


def _workload(known: Known, _: Physics) -> Step:
    fleet = known.summary.fleet
    inputs = (
        _measured("mean input", fleet.input_tokens_mean, "tokens", known.run),
        _measured("mean output", fleet.output_tokens_mean, "tokens", known.run),
        *(
            _measured(f"input {name}", value, "tokens", known.run)
            for name, value in known.lengths.items()
        ),
    )
    if fleet.input_tokens_mean is None:
        return Step(title="Workload", gap="the run counted no tokens", known=inputs)
    lengths = f"{fleet.input_tokens_mean:,.0f} tokens in, {fleet.output_tokens_mean or 0:,.0f} out"
    gap = None if known.profile else "the lengths are those of the run: are they your traffic's?"
    command = None if known.profile else "ampacity workload fit LOG -o traffic.yaml"
    return Step(title="Workload", known=inputs, decision=lengths, gap=gap, command=command)


def _hardware(known: Known, _: Physics) -> Step:
    instance = known.instance
    if instance is None:
        return Step(
            title="Hardware", gap=known.instance_missing, command=_with(known, "--gpu h100")
        )
    card = instance.hardware
    inputs = (
        _stated("GPUs of an instance", instance.gpus, "", "--tp"),
        _stated("memory", card.memory_bytes / 1e9, "GB", f"data sheet of {card.name}"),
        _stated("bandwidth", card.bandwidth_bytes_s / 1e12, "TB/s", f"data sheet of {card.name}"),
    )
    return Step(
        title="Hardware", known=inputs, decision=f"{instance.gpus} x {card.name} an instance"
    )


def _routing(known: Known, _: Physics) -> Step:
    share = known.planned_sharing
    inputs = (_measured("prompt tokens that are shared", share, "", known.run),)
    if known.summary.sessions is not None:
        how = "sessions stay on their replica (sticky), or are routed by prefix"
    elif share is not None and share >= SHARED_MATTERS:
        how = f"route by prefix: {100 * share:.0f} % of the prompt tokens are shared"
    else:
        how = "by least requests: a round robin gives a slow replica its full share"
    return Step(title="Routing", known=inputs, decision=how)


def _memory(known: Known, physics: Physics) -> Step:
    fit = physics.fit
    if fit is None:
        return Step(title="Memory", gap=physics.missing, command=_with(known, "--model-config DIR"))
    gigabytes = {"weights": fit.needed.weights, "KV cache": fit.needed.kv}
    gigabytes["activations"] = fit.needed.activations
    inputs = tuple(
        Input(
            name=name,
            value=value / 1e9,
            unit="GB",
            basis="assumed" if name == "activations" else "stated",
            source=why,
        )
        for (name, value), why in zip(
            gigabytes.items(),
            ("config.json", "P95 in flight x P95 length", "20 % of the weights in 16 bits"),
            strict=True,
        )
    )
    plain, *roomy = fit.floors
    if fit.gpus < plain.gpus:
        return Step(
            title="Memory",
            known=inputs,
            gap=f"{fit.needed.total / 1e9:,.0f} GB do not fit on {fit.gpus} GPU"
            f"{'s' if fit.gpus > 1 else ''}: {plain.gpus} are needed, or a lower precision",
            command=_with(known, f"--tp {plain.tensor_parallel or plain.gpus}"),
        )
    more = ", ".join(f"{f.gpus} with {100 * f.headroom:.0f} % headroom" for f in roomy)
    counted = f"{plain.gpus} GPU{'s' if plain.gpus > 1 else ''}"
    return Step(
        title="Memory",
        known=inputs,
        decision=f"{fit.needed.total / 1e9:,.0f} GB: {counted} by memory, {more}",
    )


def _quantisation(known: Known, physics: Physics) -> Step:
    instance, use = known.instance, physics.use
    if instance is None or use is None:
        return Step(title="Quantisation", gap=physics.missing)
    floors = {
        name: decode_floor_s(
            Instance(instance.shape, instance.hardware, instance.gpus, name, instance.kv),
            use.batch,
            use.context,
        )
        for name in TRIED
    }
    inputs = tuple(
        Input(
            name=f"decode floor, weights {name}",
            value=1e3 * s,
            unit="ms",
            basis="stated",
            source="roofline",
        )
        for name, s in floors.items()
    )
    now = decode_floor_s(instance, use.batch, use.context)
    faster = [name for name, floor_s in floors.items() if floor_s < 0.99 * now]
    gain = f"; {faster[0]} weights allow {now / floors[faster[0]]:.2f} x at most" if faster else ""
    return Step(
        title="Quantisation",
        known=inputs,
        decision=f"weights {instance.weights}, KV {instance.kv}{gain}",
        gap="quality at a lower precision is not measured here",
        command="ampacity run URL --keep-answers; ampacity report RUN --checker COMMAND",
    )


def _parallelism(known: Known, physics: Physics) -> Step:
    fit = physics.fit
    if fit is None or known.instance is None:
        return Step(title="Parallelism", gap=physics.missing)
    lowest = fit.floors[0].tensor_parallel
    degrees = ", ".join(str(n) for n in fit.degrees if n <= 16)
    measured = known.instance.gpus
    return Step(
        title="Parallelism",
        known=(_stated("attention heads", known.instance.shape.heads, "", "config.json"),),
        decision=f"lowest TP that fits: {lowest}; measured: {measured}; valid: {degrees}",
        gap=None if lowest == known.instance.gpus else "requests/s per GPU of other degrees",
        command=None if lowest == known.instance.gpus else "ampacity compare RUN RUN_WITH_OTHER_TP",
    )


def _benchmark(known: Known, _: Physics) -> Step:
    capacity = known.summary.capacity
    low, high = capacity.capacity_rps_ci or (None, None)
    inputs = (
        _measured("capacity", capacity.capacity_rps, "req/s", known.run),
        _measured("C_max", capacity.c_max, "in flight", known.run),
    )
    command = known.summary.next_command
    if capacity.capacity_rps is None:
        return Step(title="Benchmark", known=inputs, gap=capacity.reason, command=command)
    ends = f" ({low:.3g} to {high:.3g})" if low is not None and high is not None else ""
    word = "is predicted to carry" if known.summary.predicted else "carries"
    least = "at least " if capacity.crossing == "lower_bound" else ""
    gap = None
    if all(stage.kind == "closed" for stage in known.summary.stages):
        gap = "users who wait for answers (closed loop) hide queues: size by a run with --rates"
    elif least:
        gap = "no load that was tried violates an SLO: run higher --rates"
    elif low is None or high is None or high - low > 0.3 * capacity.capacity_rps:
        gap = "the interval is wide: the fleet is uncertain by as much"
    return Step(
        title="Benchmark",
        known=inputs,
        decision=f"one instance {word} {least}{capacity.capacity_rps:.3g} req/s{ends}",
        gap=gap,
        command=command if gap else None,
    )


def _kv_strategy(known: Known, physics: Physics) -> Step:
    fit, c_max = physics.fit, known.summary.capacity.c_max
    if fit is None or not fit.sequences:
        return Step(title="KV strategy", gap=physics.missing or "no lengths are known")
    inputs = tuple(
        Input(name=f"sequences in the KV pool at {name}", value=n, basis="stated", source="memory")
        for name, n in fit.sequences.items()
    )
    least = min(fit.sequences.values())
    if not least:
        gap = "the weights leave no room for a long sequence"
        return Step(title="KV strategy", known=inputs, gap=gap)
    if c_max is None:
        return Step(title="KV strategy", known=inputs, gap="no C_max was measured")
    if least < c_max:
        how = (
            f"the KV cache is the limit: it holds {least} long sequences, C_max is {c_max:.3g}; "
            "KV in FP8 holds twice as many"
        )
    else:
        how = (
            f"the KV cache is not the limit: it holds {least} long sequences, C_max is {c_max:.3g}"
        )
    return Step(title="KV strategy", known=inputs, decision=how)


def _batching(known: Known, _: Physics) -> Step:
    about = ("batch_capped", "prefill_interference", "kv_pressure", "decode_bound", "prefill_bound")
    holds = [limit for limit in known.limits if limit.holds and limit.rule in about]
    rails = known.rails
    if rails.concurrency_limit is None:
        return Step(title="Batching", gap=rails.missing.get("concurrency_limit"))
    decision = f"at most {rails.concurrency_limit} in flight an instance"
    if holds:
        decision += f"; {holds[0].title[0].lower()}{holds[0].title[1:]}"
    inputs = (_measured("C_max", known.summary.capacity.c_max, "in flight", known.run),)
    return Step(title="Batching", known=inputs, decision=decision)


def _again(known: Known, _: Physics) -> Step:
    holds = [limit for limit in known.limits if limit.holds]
    if not holds:
        return Step(title="Benchmark again", decision="nothing to change: no limit was found")
    return Step(
        title="Benchmark again",
        decision=f"change one thing first: {holds[0].lever}",
        command="ampacity ab URL_BEFORE URL_AFTER --rate R",
    )


def _fleet(known: Known, _: Physics) -> Step:
    fleet = known.fleet
    if fleet is None:
        lacks_peak = "--peak-rps" in known.fleet_missing
        command = _with(known, "--peak-rps R") if lacks_peak else known.summary.next_command
        return Step(title="Fleet", gap=known.fleet_missing, command=command)
    inputs = (
        _stated("peak", fleet.peak_rps, "req/s", "--peak-rps or --profile"),
        _stated("safety", fleet.safety, "", fleet.safety_reason),
    )
    low, high = fleet.instances_ci
    ends = f" ({low} to {high})" if low is not None and high is not None and low != high else ""
    most = "at most " if low is None and high is not None else ""
    counted = f"{fleet.instances} instance{'s' if fleet.instances > 1 else ''}{ends}"
    gpus = f"{fleet.gpus} GPU{'s' if fleet.gpus > 1 else ''}"
    return Step(title="Fleet", known=inputs, decision=f"{most}{counted}, {gpus}")


def _money(known: Known, _: Physics) -> Step:
    cost = cost_of(known)
    if cost is None:
        if known.gpu_hour_usd is not None:
            return Step(title="TCO", gap=known.fleet_missing or "no tokens were counted")
        command = _with(known, "--gpu-hour USD")
        return Step(title="TCO", gap="no price of a GPU", command=command)
    inputs = (
        _stated("GPU-hour", known.gpu_hour_usd, "USD", "--gpu-hour"),
        Input(
            name="utilisation",
            value=cost.utilisation,
            basis="assumed" if known.utilisation is None else "stated",
            source="the peak all day" if known.utilisation is None else "mean load / capacity",
        ),
    )
    first = SENSITIVE[sensitivities(cost)[0].name]
    texts = [
        f"${cost.usd_per_year:,.0f} a year",
        f"${cost.usd_per_million_output:.2f} per million output tokens",
        *(_against(name, cost.crossover(price)) for name, price in known.prices.items()),
        f"{first} moves it most",
    ]
    return Step(title="TCO", known=inputs, decision="; ".join(texts))


def _validation(known: Known, _: Physics) -> Step:
    return Step(
        title="Validation",
        decision="after the launch, hold production against these assumptions",
        command=f"ampacity validate {known.run} --production METRICS_URL --over 5m",
    )


def cost_of(known: Known) -> FleetCost | None:
    """Return the cost of the fleet; None where price, fleet or tokens are not known."""
    rate, tokens = known.summary.capacity.capacity_rps, known.summary.fleet
    if known.fleet is None or known.gpu_hour_usd is None or not rate or not known.output_tokens:
        return None
    carried = known.fleet.instances * rate
    use = known.fleet.peak_rps / carried if known.utilisation is None else known.utilisation
    request = Request(tokens.input_tokens_mean or 0.0, known.output_tokens)
    return FleetCost(known.fleet.gpus, known.gpu_hour_usd, carried, use, request)


def _against(name: str, crossover: float) -> str:
    if crossover > 1:
        return f"dearer than {name} at any load that it carries"
    return f"cheaper than {name} from {100 * crossover:.0f} % utilisation"


def _with(known: Known, option: str) -> str:
    return f"{known.command or f'ampacity size {known.run}'} {option}"


STEPS: tuple[Callable[[Known, Physics], Step], ...] = (
    _workload,
    _hardware,
    _routing,
    _memory,
    _quantisation,
    _parallelism,
    _benchmark,
    _kv_strategy,
    _batching,
    _again,
    _fleet,
    _money,
    _validation,
)
