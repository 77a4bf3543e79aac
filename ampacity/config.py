"""Build the validated description of an experiment from its settings, wherever they come from."""

import dataclasses
import difflib
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ampacity import values as v
from ampacity.analysis.slo import parse_slos
from ampacity.loadgen.net.proxy import proxy_secrets
from ampacity.loadgen.send.endpoint import Endpoint, Tls, parse_endpoint, secrets_in
from ampacity.loadgen.send.keys import Keys
from ampacity.settings import FIELDS, SETTINGS, TLS_OPTIONS, Settings, read_settings
from ampacity.values import ConfigError
from ampacity.workloads.arrivals.processes import arrivals_text, check_stage, shaped
from ampacity.workloads.lengths.empirical import Points
from ampacity.workloads.lengths.parse import Lengths
from ampacity.workloads.profile import Workload, load_workload
from ampacity.workloads.prompts.files import load_prompts
from ampacity.workloads.prompts.tokenizers import load_tokenizer
from ampacity.workloads.schedule_file import workload_of

DEFAULT_WORKLOAD = "chat"
KEY_SOURCES = ("api_key_env", "api_key_file", "api_key_command")
FLEET_OPTIONS = {"peak_rps": "peak_rps", "safety_factor": "safety", "gpu_hour_usd": "gpu_hour"}
"""The option of each of the ``fleet_inputs`` of run.json, which is its default later."""
GPU_FACTS = ("tensor_parallel", "hardware")  # facts of --lock that state the GPUs of an instance


def make_settings(raw: dict[str, Any]) -> Settings:
    """Return the Settings of ``raw``, which has the names of the options (``input_tokens``, ...).

    Values are text, as from the command line, or lists and numbers, as from a run file.
    Raises a ValueError of one line.
    """
    raw = {name: value for name, value in raw.items() if value not in (None, [], (), {})}
    _check_names(raw)
    given = read_settings(raw)
    endpoint, *replicas = _endpoints(raw["url"], given)
    workload = _workload(given)
    defaults = {"tp": gpus_named(*map(given.get("lock", {}).get, GPU_FACTS)) or 1}
    if "trace" in given:  # a trace records what happened, its beginning included
        defaults["warmup"] = 0
    of_classes = [f"{kind.name}:{text}" for kind in workload.classes for text in kind.slos]
    settings = Settings(
        endpoint=endpoint,
        replicas=tuple(replicas),
        workload=workload,
        slos=tuple(parse_slos([*map(str, given.get("slo", ())), *of_classes])),
        **{FIELDS[name]: value for name, value in {**defaults, **given}.items()},
    )
    _check_together(settings, raw)
    for rate, length_s in settings.loads if settings.rates else ():  # before a server is loaded
        for clock in settings.workload.clocks:
            check_stage(clock, rate, length_s)
    return settings


def _check_names(raw: dict[str, Any]) -> None:
    known = {"url", *SETTINGS}
    for name in raw:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            all_known = f"known are: {', '.join(sorted(known))}"
            hint = f"did you mean {near[0]!r}?" if near else all_known
            raise ConfigError(f"unknown setting {name!r}; {hint}")
    if "url" not in raw:
        raise ConfigError("give the endpoint's base URL, as http://127.0.0.1:8000/v1")


def gpus_named(*texts: object) -> int | None:
    """Return the GPUs of an instance by the first text that states them.

    ``4``, ``4xH100`` and ``llama3-70b@4xh100`` state 4.
    """
    matches = (
        re.search(r"(?:^|[-@ ])([1-9]\d{0,3}) ?x ?[A-Za-z]|^([1-9]\d{0,3})$", str(text or ""))
        for text in texts
    )
    return next((int(match[1] or match[2]) for match in matches if match), None)


def fleet_inputs(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``fleet_inputs`` of run.json from settings that were read; null: not given."""
    found = {name: given.get(option) for name, option in FLEET_OPTIONS.items()}
    return {**found, "tensor_parallel": given.get("tp", 1)}


def _workload(given: dict[str, Any]) -> Workload:
    """Return the workload of ``--workload``, with the lengths, prompts and arrivals given."""
    fixed = [name for name in ("input_tokens", "output_tokens") if name in given]
    if len(fixed) == 1 and "workload" not in given and "prompts" not in given:
        other = "--output-tokens" if fixed == ["input_tokens"] else "--input-tokens"
        raise ConfigError(
            f"{v.option(fixed[0])} alone is half a workload: give {other} too, or a --workload"
        )
    if len(fixed) == 2 and "workload" in given:
        raise ConfigError(
            "--workload and --input-tokens with --output-tokens exclude each other: "
            "give one of them"
        )
    if len(fixed) == 2:
        lengths = given["input_tokens"], given["output_tokens"]
        workload = Workload("custom", *lengths, source="given by the user")
    else:
        of_schedule = workload_of(given["trace"]) if "trace" in given else None
        workload = of_schedule or load_workload(given.get("workload", DEFAULT_WORKLOAD))
        for side in fixed:
            workload = workload.with_lengths(side, given[side])
    if "prompts" in given:
        workload = _with_prompts(workload, given)
    if "arrivals" in given:
        workload = workload.with_arrivals(arrivals_text(given["arrivals"]))
    return workload


def _with_prompts(workload: Workload, given: dict[str, Any]) -> Workload:
    """Return the workload with the texts of the file, and described by them."""
    if "input_tokens" in given:
        raise ConfigError("--prompts brings its own texts: drop --input-tokens")
    sessions, of_clients = workload.sessions, any(kind.clients for kind in workload.classes)
    has_own = sessions and (sessions.steps or sessions.limit_tokens)
    if workload.prefixes or has_own or of_clients or len(workload.kinds) > 1:
        raise ConfigError(
            "--prompts brings its own texts: use a workload of one class, without clients, "
            "prefixes, steps and limit_tokens"
        )
    tokenizer = load_tokenizer(given.get("tokenizer", Settings.tokenizer))
    skip_bad_rows = given.get("skip_bad_rows", False)
    prompts = load_prompts(given["prompts"], tokenizer, skip_bad_rows=skip_bad_rows)
    tokens = prompts.new_tokens
    workload = workload.with_lengths("input_tokens", _seen([turns[0] for turns in tokens]))
    if sessions:
        said = [n for turns in tokens for n in turns[1:]]
        turns, said_tokens = _seen([len(turns) for turns in tokens]), _seen(said) if said else None
        sessions = dataclasses.replace(sessions, turns=turns, user_tokens=said_tokens, joint=None)
    return dataclasses.replace(workload, sessions=sessions, prompts=prompts)


def _seen(lengths: list[int]) -> Lengths:
    """Return how often each length of a prompt file comes."""
    counts = Counter(lengths)
    return Points(tuple(sorted(counts)), tuple(float(counts[n]) for n in sorted(counts)))


def _check_together(settings: Settings, raw: dict[str, Any]) -> None:
    """Raise ConfigError for contradicting settings, and for settings without any effect."""
    for name in SETTINGS:
        needs = SETTINGS[name].needs
        needed = re.findall(r"--([\w-]+)", needs.partition(":")[0])
        if name in raw and needed and not raw.keys() & set(needed):
            raise ConfigError(f"{v.option(name)} goes with {needs}")
    for wrong, message in (*_of_load(settings, raw), *_of_client(settings, raw)):
        if wrong:
            raise ConfigError(message)
    names = [kind.name for kind in settings.workload.classes] or ["default"]
    for slo in settings.slos if settings.trace is None else ():  # a trace names its own classes
        if slo.class_ not in (None, *names):
            raise ConfigError(
                f"--slo {slo.text}: the workload has no class {slo.class_!r}; "
                f"it has {', '.join(names)}"
            )


def _of_load(settings: Settings, raw: dict[str, Any]) -> list[tuple[Any, str]]:
    """Return (whether it is so, message) of each contradiction in what is sent, and when."""
    workload = settings.workload
    loads = settings.concurrency or settings.rates or ()
    of_trace = {"workload", "input_tokens", "output_tokens", "arrivals", "duration"}
    return [
        (
            settings.rates and settings.concurrency,
            "--rates (open loop) and --concurrency (closed loop) exclude each other: give one",
        ),
        (
            settings.trace and of_trace & raw.keys(),
            "--trace brings its own lengths and times: drop --workload, --input-tokens, "
            "--output-tokens, --arrivals and --duration",
        ),
        (
            len(settings.durations_s) not in (1, len(loads)),
            f"--duration names {len(settings.durations_s)} lengths for {len(loads)} loads "
            "(--rates or --concurrency): give one length, or one for each load",
        ),
        (
            settings.lengths and (workload.sessions or workload.prompts or settings.trace),
            "--lengths needs single requests with random lengths: it excludes sessions, "
            "--prompts and --trace",
        ),
        (
            settings.api == "embeddings" and (workload.sessions or workload.images),
            "--api embeddings has no conversation: use a workload without sessions and images",
        ),
        (
            workload.images and settings.api != "chat",
            f"--api {settings.api}: images are sent in chat messages: use --api chat",
        ),
        (
            workload.prompts and settings.trace,
            "--trace brings its own lengths, --prompts its own texts: give one of them",
        ),
        (
            "arrivals" in raw and settings.concurrency,
            "--arrivals goes with an open loop: with --concurrency each request follows the "
            "answer before it",
        ),
    ]


def _of_client(settings: Settings, raw: dict[str, Any]) -> list[tuple[Any, str]]:
    """Return the same of limits, processes and connections."""
    most_users = max(settings.concurrency or (0,))
    urls = (settings.endpoint.url, *settings.metrics_urls)
    return [
        *(
            (
                limit and most_users > limit,
                f"{option} {limit}: --concurrency {most_users} would never be in flight: raise it, "
                "or give fewer users",
            )
            for option, limit in (
                ("--max-requests", settings.max_requests),
                ("--max-in-flight", settings.max_in_flight),
            )
        ),
        (
            settings.in_one_process and ((settings.workers or 1) > 1 or settings.ray),
            f"{settings.in_one_process} is kept in one process: drop --workers",
        ),
        (
            settings.ray
            and (settings.cpus or settings.sources or settings.keep_answers_bytes is not None),
            "--cpus, --source-address and --keep-answers are of this machine: drop them, or --ray",
        ),
        (
            any(name in raw for name in TLS_OPTIONS)
            and not any(url.startswith("https:") for url in urls),
            "--cacert, --cert and --insecure go with an https:// URL",
        ),
        (
            settings.sticky and not settings.replicas,
            "--sticky goes with several URLs, comma-separated",
        ),
    ]


def check_steady(workload: Workload, command: str) -> None:
    """Raise ConfigError if the rate changes within a stage: no single rate would describe it."""
    for clock in workload.clocks:
        if shaped(clock):
            raise ConfigError(
                f"arrivals {clock:.60}: {command} looks for one steady rate; give it "
                "--arrivals poisson (or gamma:cv=...), or use 'ampacity run' for a rate that "
                "changes"
            )


def _endpoints(url: Any, given: dict[str, Any]) -> tuple[Endpoint, ...]:
    """Return the endpoints of a list or of comma-separated URLs; they share key and headers."""
    for item in v.items(url):
        if "@" in v.text(item, "url"):  # before the split: a password may contain a comma
            parse_endpoint(item)
    urls = [part.strip() for item in v.items(url) for part in str(item).split(",")]
    sources = [name for name in KEY_SOURCES if name in given]
    if len(sources) > 1:
        raise ConfigError(f"give one of {' and '.join(map(v.option, sources))}")
    shared: dict[str, Any] = {
        "keys": Keys(sources[0], given[sources[0]]) if sources else None,
        "key_header": given.get("api_key_header"),
        "route": given.get("path"),
        "headers": given.get("header", ()),
        "hidden": (*secrets_in(given.get("extra_body")), *proxy_secrets()),
        "tls": Tls(**{name: given[name] for name in TLS_OPTIONS if name in given}),
        "sources": given.get("source_address", ()),
    }
    if shared["tls"] != Tls():
        shared["tls"].context()  # a file that cannot be used
    found = tuple(parse_endpoint(part, **shared) for part in urls if part)
    if not found or len({endpoint.url for endpoint in found}) < len(found):
        raise ConfigError(
            f"url {url}: give base URLs that differ, as http://a:8000/v1,http://b:8000/v1"
        )
    return found
