"""The thirteen steps from a workload to a validated fleet: known, decided, missing."""

from __future__ import annotations

from collections.abc import Callable

from ampacity.analysis.capacity.levels import usd
from ampacity.analysis.contract.part import Part
from ampacity.analysis.decision import roofline
from ampacity.analysis.decision.inputs import Basis, Input, is_wide
from ampacity.analysis.decision.known import Known, Physics, sequence_lengths
from ampacity.analysis.decision.memory import OVERHEAD_SHARE
from ampacity.analysis.decision.tiers import slow_replica_share

SHARED_MATTERS = 0.3  # from this cached share on, routing by prefix pays
TRIED = ("fp16", "fp8", "int4")
NODE_GPUS = 8  # of one machine: above, an instance is a pipeline over machines


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


def _measured(known: Known, name: str, value: float | None, unit: str = "") -> Input:
    """Return a figure of the run: measured, or predicted by a simulated engine."""
    basis: Basis = "predicted" if known.summary.predicted else "measured"
    return Input(name=name, value=value, unit=unit, basis=basis, source=known.run)


def _stated(name: str, value: float | None, unit: str, source: str) -> Input:
    return Input(name=name, value=value, unit=unit, basis="stated", source=source)


def _workload(known: Known, _: Physics) -> Step:
    fleet = known.summary.fleet
    inputs = (
        _measured(known, "mean input", fleet.input_tokens_mean, "tokens"),
        _measured(known, "mean output", fleet.output_tokens_mean, "tokens"),
        *(
            _measured(known, f"sequence {name}", value, "tokens")
            for name, value in sequence_lengths(known.summary).items()
        ),
    )
    if fleet.input_tokens_mean is None:
        return Step(title="Workload", gap="the run counted no tokens", known=inputs)
    lengths = f"{fleet.input_tokens_mean:,.0f} tokens in, {fleet.output_tokens_mean or 0:,.0f} out"
    gap = None if known.profile else "the lengths are those of the run: are they your traffic's?"
    command = None if known.profile else "ampacity workload fit LOG -o traffic.yaml"
    return Step(title="Workload", known=inputs, decision=lengths, gap=gap, command=command)


def _hardware(known: Known, physics: Physics) -> Step:
    instance = known.instance
    if instance is None:
        gap = physics.missing
        lacks = "--gpu h100" if "--gpu" in gap else "--model-config FILE"
        return Step(title="Hardware", gap=gap, command=_with(known, lacks))
    card, shape = instance.hardware, instance.shape
    inputs = (
        _stated("parameters", shape.parameters / 1e9, "billion", shape.name),
        _stated("of a token", shape.active_parameters / 1e9, "billion", shape.name),
        _stated("GPUs of an instance", instance.gpus, "", "--tp"),
        _stated("memory", card.memory_bytes / 2**30, "GiB", f"data sheet of {card.name}"),
        _stated("bandwidth", card.bandwidth_bytes_s / 1e12, "TB/s", f"data sheet of {card.name}"),
    )
    how = f"{instance.gpus} x {card.name} an instance"
    if physics.use is not None:
        ridge, intensity = (
            roofline.ridge_flops_per_byte(card, instance.weights),
            physics.use.intensity,
        )
        bound = "memory" if intensity < ridge else "compute"
        how += f", bound by {bound}: {intensity:.0f} of {ridge:.0f} FLOP/byte"
    return Step(title="Hardware", known=inputs, decision=how)


def _routing(known: Known, _: Physics) -> Step:
    share = known.planned_sharing
    inputs = (_measured(known, "prompt tokens that are shared", share, ""),)
    if known.summary.sessions is not None:
        how = "sessions stay on their replica (sticky), or are routed by prefix"
    elif share is not None and share >= SHARED_MATTERS:
        how = f"route by prefix: {100 * share:.0f} % of the prompt tokens are shared"
    else:
        number = known.plan.instances if known.plan else 1
        how = "by least requests"
        if number > 1:
            how += f" (round robin: a slow replica gets {100 * slow_replica_share(number):.3g} %)"
    return Step(title="Routing", known=inputs, decision=how)


def _memory(known: Known, physics: Physics) -> Step:
    fit = physics.fit
    if fit is None or known.instance is None:
        return Step(title="Memory", gap=physics.missing)
    framework = OVERHEAD_SHARE * fit.gpus * known.instance.hardware.memory_bytes
    parts: list[tuple[str, float, Basis, str]] = [
        ("weights", fit.needed.weights, "stated", "the model"),
        ("KV cache", fit.needed.kv, "assumed", "P95 in flight at C_max x P95 length"),
        ("activations", fit.needed.activations, "assumed", "20 % of the weights in 16 bits"),
        ("framework", framework, "assumed", f"{100 * OVERHEAD_SHARE:g} % of each GPU"),
        ("adapters", fit.needed.adapters, "stated", "--lora-slots"),
    ]
    inputs = tuple(
        Input(name=name, value=size / 1e9, unit="GB", basis=basis, source=why)
        for name, size, basis, why in parts
        if size
    )
    plain, *roomy = fit.floors
    if not fit.pool_bytes:
        return Step(
            title="Memory",
            known=inputs,
            gap=f"{fit.needed.total / 1e9:,.0f} GB do not fit on {fit.gpus} GPU"
            f"{'s' if fit.gpus > 1 else ''}: {plain.gpus} are needed, or a lower precision",
            command=_with(known, f"--tp {plain.tensor_parallel or plain.gpus}"),
        )
    more = ", ".join(f"{f.gpus} with {100 * f.headroom:.0f} %" for f in roomy)
    counted = f"{plain.gpus} GPU{'s' if plain.gpus > 1 else ''}"
    gap, assumed = None, " at p95 length"
    if not fit.sequences:
        gap, assumed = "without the KV cache: the run counted no tokens", ""
    elif known.summary.capacity.c_max is None:
        gap, assumed = "with the KV cache of one sequence: no C_max is known", ""
    elif fit.gpus < plain.gpus:
        gap = f"the run used {fit.gpus}: step 8 says how many sequences that holds"
    return Step(
        title="Memory",
        known=inputs,
        decision=f"{fit.needed.total / 1e9:,.0f} GB{assumed}: {counted}, {more} headroom",
        gap=gap,
    )


def _quantisation(known: Known, physics: Physics) -> Step:
    instance, use = known.instance, physics.use
    if instance is None or use is None:
        return Step(title="Quantisation", gap=physics.missing)
    floors = {
        name: roofline.decode_floor_s(
            roofline.Instance(instance.shape, instance.hardware, instance.gpus, name, instance.kv),
            use.batch,
            use.context,
        )
        for name in TRIED
    }
    inputs = tuple(
        _stated(f"decode floor, weights {name}", 1e3 * floor_s, "ms", "roofline")
        for name, floor_s in floors.items()
    )
    now = roofline.decode_floor_s(instance, use.batch, use.context)
    faster = [name for name, floor_s in floors.items() if floor_s < 0.99 * now]
    gain = f"; {faster[0]} weights allow {now / floors[faster[0]]:.2f} x at most" if faster else ""
    return Step(
        title="Quantisation",
        known=inputs,
        decision=f"weights {instance.weights}, KV {instance.kv}{gain}",
        gap="quality at a lower precision is not measured here",
        command="ampacity run URL --keep-answers 64; ampacity report RUN --checker COMMAND",
    )


def _parallelism(known: Known, physics: Physics) -> Step:
    fit = physics.fit
    if fit is None or known.instance is None:
        return Step(title="Parallelism", gap=physics.missing)
    lowest = fit.floors[0].tensor_parallel
    degrees = ", ".join(str(n) for n in fit.degrees if n <= 16)
    gpus, gap, command = known.instance.gpus, None, None
    nodes = -(-fit.floors[0].gpus // NODE_GPUS)
    idle = 100 * roofline.pipeline_bubble(nodes, nodes)
    more = (
        ""
        if nodes == 1
        else f"; {nodes} machines in a pipeline of {nodes} batches idle {idle:.0f} %"
    )
    if gpus != known.run_gpus:
        gap = f"the run was made with TP {known.run_gpus}: its rates are not those of TP {gpus}"
        command = "ampacity compare RUN RUN_WITH_OTHER_TP"
    return Step(
        title="Parallelism",
        known=(_stated("attention heads", known.instance.shape.heads, "", "the model"),),
        decision=f"TP {gpus}; lowest for that memory: {lowest} (valid: {degrees}){more}",
        gap=gap,
        command=command,
    )


def _benchmark(known: Known, _: Physics) -> Step:
    capacity = known.summary.capacity
    low, high = capacity.capacity_rps_ci or (None, None)
    inputs = (
        _measured(known, "capacity", capacity.capacity_rps, "req/s"),
        _measured(known, "C_max", capacity.c_max, "in flight"),
    )
    command = known.summary.next_command
    if capacity.capacity_rps is None:
        return Step(title="Benchmark", known=inputs, gap=capacity.reason, command=command)
    ends = f" ({low:.3g} to {high:.3g})" if low is not None and high is not None else ""
    word = "is predicted to carry" if known.summary.predicted else "carries"
    least = "at least " if capacity.crossing == "lower_bound" else ""
    verified = capacity.verified_rps
    shown = f", verified to {verified:.3g}" if verified and not least else ""
    shown += f", bound by {capacity.binding_text}" if capacity.binding_slo and not least else ""
    gap = None
    if all(stage.kind == "closed" for stage in known.summary.stages):
        gap = "users who wait for answers (closed loop) hide queues: size by a run with --rates"
    elif least:
        gap = "no load that was tried violates an SLO: run higher --rates"
    elif is_wide(capacity.capacity_rps, (low, high)):
        gap = "the interval is wide: the fleet is uncertain by as much"
    return Step(
        title="Benchmark",
        known=inputs,
        decision=f"one instance {word} {least}{capacity.capacity_rps:.3g} req/s{ends}{shown}",
        gap=gap,
        command=command if gap else None,
    )


def _kv_strategy(known: Known, physics: Physics) -> Step:
    fit, c_max = physics.fit, known.summary.capacity.c_max
    if fit is None or not fit.sequences:
        return Step(title="KV strategy", gap=physics.missing or "no lengths are known")
    inputs = tuple(
        _stated(f"sequences in the KV pool at {name}", n, "", "memory")
        for name, n in fit.sequences.items()
    )
    held = {name: n for name, n in fit.sequences.items() if name in ("p50", "p95")}
    held = held or dict(fit.sequences)
    most, least = max(held.values()), min(held.values())
    if not least:
        gap = "the weights leave no room for a long sequence"
        return Step(title="KV strategy", known=inputs, gap=gap)
    if c_max is None:
        return Step(title="KV strategy", known=inputs, gap="no C_max was measured")
    verb = "is not" if c_max <= least else "may be" if c_max <= most else "is"
    lever = "" if verb == "is not" else "; KV in FP8 holds twice as many"
    lengths = ", ".join(f"{n} of {name} length" for name, n in held.items())
    how = f"the KV cache {verb} the limit: it holds {lengths}; C_max is {c_max:.3g}{lever}"
    return Step(title="KV strategy", known=inputs, decision=how)


def _batching(known: Known, _: Physics) -> Step:
    about = ("batch_capped", "prefill_interference", "kv_pressure", "decode_bound", "prefill_bound")
    holds = [limit for limit in known.summary.limits if limit.holds and limit.rule in about]
    c_max, most = known.summary.capacity.c_max, known.rails.concurrency_limit
    if c_max is None:
        return Step(title="Batching", gap="no C_max was found (step 7)")
    decision = f"C_max {c_max:.3g}" + (f", at most {most} at once" if most else "")
    if holds:
        decision += f"; {holds[0].title[0].lower()}{holds[0].title[1:]}"
    inputs = [_measured(known, "C_max", c_max, "in flight")]
    gap = None
    if known.draft_tokens is not None:
        rates = [s.server.spec_acceptance_rate for s in known.summary.stages if s.server]
        shares = [rate for rate in rates if rate is not None]
        inputs.append(_stated("drafted", known.draft_tokens, "tokens", "--draft-tokens"))
        if shares:
            inputs.append(_measured(known, "drafted tokens accepted", min(shares)))
            decision += f"; {_speculation(known.draft_tokens, min(shares))}"
        else:
            gap = "the server reported no acceptance of drafted tokens"
    return Step(title="Batching", known=tuple(inputs), decision=decision, gap=gap)


def _speculation(draft: int, accepted: float) -> str:
    """Return the tokens of a step, and of one with twice the drafts.

    ``accepted``: share of the drafted tokens; the acceptance rate of each follows from it.
    """
    low, high = 0.0, 1.0
    for _ in range(40):  # tokens of a step grow with the rate: bisection
        rate = (low + high) / 2
        enough = roofline.speculated_tokens_per_step(draft, rate) > 1 + draft * accepted
        low, high = (low, rate) if enough else (rate, high)
    more = roofline.speculated_tokens_per_step(2 * draft, low)
    return (
        f"speculation gives {1 + draft * accepted:.2f} tokens a step, {2 * draft} drafted tokens "
        f"would give {more:.2f}"
    )


def _again(known: Known, _: Physics) -> Step:
    holds = [limit for limit in known.summary.limits if limit.holds]
    if not holds:
        return Step(title="Benchmark again", decision="nothing to change: no limit was found")
    return Step(
        title="Benchmark again",
        decision=f"change one thing first: {holds[0].lever}",
        command="ampacity ab URL_BEFORE URL_AFTER --rates R",
    )


def _fleet(known: Known, _: Physics) -> Step:
    plan = known.plan
    if plan is None:
        lacks_peak = "--peak-rps" in known.plan_missing
        command = _with(known, "--peak-rps R") if lacks_peak else known.summary.next_command
        found = lacks_peak or known.summary.capacity.capacity_rps is not None
        gap = known.plan_missing if found else "no capacity was found (step 7)"
        return Step(title="Fleet", gap=gap, command=command if found else None)
    names = ("capacity", "peak", "safety", "GPUs of an instance")
    low, high = plan.instances_ci
    ends = f" ({low} to {high})" if low is not None and high is not None and low != high else ""
    most = "at most " if low is None and high is not None else ""
    plural = "s" if plan.instances > 1 else ""
    counted = f"{plan.instances_before_safety} for the peak x {plan.safety_factor:g} = "
    counted += f"{plan.instances} instance{plural}{ends}"
    gpus = f"{plan.gpus} GPU{'s' if plan.gpus > 1 else ''}"
    return Step(
        title="Fleet",
        known=tuple(i for i in plan.inputs if i.name in names),
        decision=f"{most}{counted}, {gpus}; safety {plan.safety_reason}",
    )


def _money(known: Known, physics: Physics) -> Step:
    plan = known.plan
    if plan is None or plan.cost_per_year is None:
        if known.gpu_hour_usd is not None:
            return Step(title="TCO", gap="no fleet was sized (step 11)")
        command = _with(known, "--gpu-hour USD")
        return Step(title="TCO", gap="no price of a GPU", command=command)
    tokens = plan.fleet_cost_per_million_output_tokens
    texts = [f"{usd(plan.cost_per_year)} a year"]
    if tokens is not None:
        texts.append(f"{usd(tokens)} per million output tokens {plan.at_mean_load}")
    if physics.use is not None and known.instance is not None and plan.gpu_hour_usd:
        usd_per_s = known.instance.gpus * plan.gpu_hour_usd / 3600
        accepted = next((i.value for i in plan.inputs if i.name == "accepted results"), None)
        use, shown = physics.use, accepted or 1.0
        floor = roofline.cost_floor_per_million(use.decode_floor_s, use.batch, usd_per_s, shown)
        texts.append(f"{usd(floor)} is the hardware's floor")
    uses = [(h.model, h.crossover_utilisation) for h in plan.hosted]
    cheaper = [
        f"{model} from {100 * use:.2g} % of use on" for model, use in uses if use and use <= 1
    ]
    never = [model for model, use in uses if not use or use > 1]
    texts += [f"cheaper than {', '.join(cheaper)}"] if cheaper else []
    texts += [f"dearer than {', '.join(never)} at any load"] if never else []
    if plan.sensitivity:
        texts.append(f"{plan.sensitivity[0].input} moves it most")
    return Step(title="TCO", known=tuple(plan.inputs), decision="; ".join(texts))


def _validation(known: Known, _: Physics) -> Step:
    return Step(
        title="Validation",
        decision="after the launch, hold production against these assumptions",
        command=f"ampacity validate {known.run} --production METRICS_URL --over 5m",
    )


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
