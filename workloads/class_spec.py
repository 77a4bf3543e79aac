"""Parse the classes of a workload file."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ampacity.workloads.archetypes import ARCHETYPES
from ampacity.workloads.arrivals.processes import arrivals_text
from ampacity.workloads.classes import Cancel, Client, RequestClass, zipf_weights
from ampacity.workloads.errors import WorkloadError, check_keys, did_you_mean
from ampacity.workloads.lengths.parse import number, parse_lengths, whole

# keys of a class; at the top level of a file they are defaults for all classes
CLASS_KEYS = (
    *("like", "input_tokens", "output_tokens", "correlation", "clients", "model", "models"),
    *("adapters", "extra_body", "headers", "priority", "slo", "cancel"),
)
RESERVED_FIELDS = (  # of a request's body: the load generator sets them
    *("messages", "prompt", "input", "stream", "model"),
    *("max_tokens", "max_completion_tokens", "max_output_tokens"),
)
RESERVED_HEADERS = frozenset(  # headers that frame a request, or tell it from others
    {"host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer"}
    | {"expect", "x-request-id"}
)
MANY = 10_000  # clients or adapters of a class


def parse_class(name: str, spec: object, defaults: Mapping[str, Any], where: str) -> RequestClass:
    """Parse one class. Raises WorkloadError with one line that begins with ``where``."""
    given = check_keys(spec, (*CLASS_KEYS, "weight", "arrivals"), where)
    given = with_archetype(defaults, where) | with_archetype(given, where)
    for key in ("input_tokens", "output_tokens"):
        if given.get(key) is None:
            raise WorkloadError(f"{where}: key {key} is missing; write for example '{key}: 512'")
    readers: dict[str, Callable[[Any], Any]] = {
        "extra_body": _extra_body,
        "headers": _headers,
        "priority": _priority,
        "cancel": _cancel,
    }
    try:
        models, weights = _models(given)
        own = _client("", given)
        return RequestClass(
            name=name,
            weight=own.weight,
            input_tokens=own.input_tokens,
            output_tokens=own.output_tokens,
            correlation=number("correlation", given.get("correlation", 0)),
            arrivals=own.arrivals,
            clients=_clients(given["clients"], own) if given.get("clients") is not None else (),
            models=models,
            model_weights=weights,
            slos=_slos(given.get("slo")),
            **{
                key: read(given[key]) for key, read in readers.items() if given.get(key) is not None
            },
        )
    except WorkloadError as error:
        raise WorkloadError(f"{where}: {error}") from None


def with_archetype(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the mapping with the lengths of the archetype that it is ``like``."""
    name = given.get("like")
    if name is None:
        return dict(given)
    if not isinstance(name, str) or name not in ARCHETYPES:
        hint = did_you_mean(name, ARCHETYPES)
        raise WorkloadError(
            f"{where}: like: {name!r:.40} is not known{hint}: use one of {', '.join(ARCHETYPES)}"
        )
    lengths = {key: ARCHETYPES[name][key] for key in ("input_tokens", "output_tokens")}
    return lengths | {key: value for key, value in given.items() if key != "like"}


def _positive(name: str, value: object) -> float:
    found = number(name, value)
    if not 1e-9 <= found <= 1e9:
        raise WorkloadError(f"{name} is {found:g}: give a number above 0")
    return found


def _count(name: str, value: object) -> int:
    found = whole(name, value)
    if not 1 <= found <= MANY:
        raise WorkloadError(f"{name} is {found}: give a whole number from 1 to {MANY}")
    return found


def _zipf(given: Mapping[str, Any], n: int) -> tuple[float, ...]:
    exponent = number("zipf", given.get("zipf", 1))
    if not 0 <= exponent <= 10:
        raise WorkloadError(f"zipf is {exponent:g}: give an exponent from 0 (all alike) to 10")
    return zipf_weights(n, exponent)


def _clients(spec: object, own: Client) -> tuple[Client, ...]:
    if isinstance(spec, list | tuple) and spec:
        known = ("weight", "arrivals", "input_tokens", "output_tokens")
        return tuple(_client("clients: ", check_keys(item, known, "clients"), own) for item in spec)
    given = check_keys(spec, ("count", "zipf", "arrivals"), "clients")
    if "count" not in given:
        raise WorkloadError(
            "clients: key count is missing; write {count: 50, zipf: 1.2, arrivals: 'gamma:cv=3'}"
        )
    count = _count("clients: count", given["count"])
    one = _client("clients: ", {"arrivals": given.get("arrivals")}, own)
    return tuple(replace(one, weight=weight) for weight in _zipf(given, count))


def _client(what: str, given: Mapping[str, Any], own: Client | None = None) -> Client:
    """Parse a class, or a client that inherits from its class ``own``."""
    weight = _positive(f"{what}weight", given.get("weight", 1))
    sides = [key for key in ("input_tokens", "output_tokens") if given.get(key) is not None]
    told: dict[str, Any] = {key: parse_lengths(given[key], key) for key in sides}
    if given.get("arrivals") is not None:
        told["arrivals"] = arrivals_text(given["arrivals"])
    return replace(own, weight=weight, **told) if own else Client(weight, **told)


def _models(given: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[float, ...]]:
    named = [key for key in ("model", "models", "adapters") if given.get(key) is not None]
    if len(named) > 1:
        raise WorkloadError(f"{named[0]} and {named[1]} exclude each other: give one")
    if not named:
        return (), ()
    key, spec = named[0], given[named[0]]
    if key == "adapters":
        keys = check_keys(spec, ("name", "count", "zipf"), "adapters")
        pattern = keys.get("name", "adapter-{}")
        if "count" not in keys or not isinstance(pattern, str) or pattern.count("{}") != 1:
            raise WorkloadError(
                "adapters: write {name: 'lora-{}', count: 20, zipf: 1}; {} is the number from 0"
            )
        n = _count("adapters: count", keys["count"])
        return tuple(pattern.replace("{}", str(i)) for i in range(n)), _zipf(keys, n)
    table = (
        spec
        if isinstance(spec, Mapping)
        else dict.fromkeys(spec if isinstance(spec, list) else [spec], 1)
    )
    if not table or not all(
        isinstance(name, str) and name and name.isprintable() for name in table
    ):
        raise WorkloadError(f"{key}: {spec!r:.60}: give names of models, as {{base: 3, lora-a: 1}}")
    return tuple(table), tuple(
        _positive(f"{key}: {name}", weight) for name, weight in table.items()
    )


_CHOICES = (
    "n",
    "best_of",
    "num_return_sequences",
    "num_beams",
    "beam_width",
    "candidate_count",
    "candidateCount",
)
_HOLDERS = (
    "sampling_params",
    "parameters",
    "options",
    "generation_config",
    "generationConfig",
    "extra_body",
)


def _several_choices(body: Mapping[str, Any]) -> str | None:
    """Return the field that asks for several answers, with its value; None if there is none."""
    for name, value in body.items():
        if name == "use_beam_search" and value not in (None, False, 0, "false"):
            return f"{name} = {json.dumps(value)}"
        if name in _CHOICES and _is_over_one(value):
            return f"{name} = {json.dumps(value)}"
        if name in _HOLDERS and isinstance(value, Mapping) and (inner := _several_choices(value)):
            return f"{name}: {inner}"
    return None


def _is_over_one(value: object) -> bool:
    try:
        return float(value) > 1  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False


def refuse_several_choices(body: Mapping[str, Any], where: str) -> None:
    """Raise WorkloadError for a body that asks for several answers, whose latencies would mix."""
    if asked := _several_choices(body):
        raise WorkloadError(
            f"{where} asks for several choices ({asked}): their tokens come mixed in one stream, "
            "and no latency of any of them can be told: drop it, and send as many requests more"
        )


def _extra_body(spec: object) -> dict[str, Any]:
    if not isinstance(spec, Mapping) or not all(isinstance(key, str) for key in spec):
        raise WorkloadError("extra_body: give request fields, as {temperature: 0.7}")
    for key in spec:
        if key in (*RESERVED_FIELDS, "priority"):
            raise WorkloadError(
                f"extra_body sets {key!r}, which the workload decides by a key of its own: drop it"
            )
    try:
        json.dumps(spec, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise WorkloadError(f"extra_body cannot be sent as JSON: {error}") from None
    refuse_several_choices(spec, "extra_body")
    return dict(spec)


def _headers(spec: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(spec, Mapping):
        raise WorkloadError("headers: give names and values, as {X-Tenant: gold}")
    found = []
    for name, value in spec.items():
        plain = (
            isinstance(name, str)
            and name.isascii()
            and name.replace("-", "").replace("_", "").isalnum()
        )
        text = str(value)
        if (
            not plain
            or isinstance(value, Mapping | list)
            or not text.isprintable()
            or not text.isascii()
        ):
            raise WorkloadError(
                f"headers: {name!r:.40} or its value cannot stand in a header: use plain ASCII"
            )
        if name.lower() in RESERVED_HEADERS:
            raise WorkloadError(f"headers: {name} is set by the load generator: drop it")
        found.append((name, text))
    return tuple(found)


def _priority(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise WorkloadError(f"priority is {value!r:.40}: give a whole number")
    return value


def _slos(spec: object) -> tuple[str, ...]:
    items = spec if isinstance(spec, list) else [] if spec is None else [spec]
    if not all(isinstance(item, str) for item in items):
        raise WorkloadError(f"slo: {spec!r:.60}: write [ttft_p99=2s, itl_p99=50ms]")
    return tuple(items)


def _cancel(spec: object) -> Cancel:
    given = check_keys(spec, ("share", "after_ms", "after_tokens"), "cancel")
    share = number("cancel: share", given.get("share"))
    if not 0 <= share <= 1:
        raise WorkloadError(f"cancel: share is {share:g}: give a number from 0 to 1")
    kinds = [key for key in ("after_ms", "after_tokens") if given.get(key) is not None]
    if len(kinds) != 1:
        raise WorkloadError(
            "cancel: give one of after_ms and after_tokens, as {share: 0.05, after_ms: 3000}"
        )
    unit = " of ms" if kinds[0] == "after_ms" else " of tokens"
    return Cancel(share, **{kinds[0]: parse_lengths(given[kinds[0]], f"cancel: {kinds[0]}", unit)})
