"""Load a workload by name or from a YAML file."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import yaml

from ampacity.files import MIB, read_text
from ampacity.workloads.archetypes import ARCHETYPES
from ampacity.workloads.arrivals.processes import arrivals_text, parse_arrivals
from ampacity.workloads.class_spec import CLASS_KEYS, parse_class
from ampacity.workloads.classes import RequestClass
from ampacity.workloads.errors import WorkloadError, check_keys, did_you_mean
from ampacity.workloads.lengths.parse import Fixed, Lengths, Mixture
from ampacity.workloads.prompts.files import Prompts
from ampacity.workloads.prompts.images import Images, parse_images
from ampacity.workloads.prompts.prefixes import Prefixes, parse_prefixes
from ampacity.workloads.sessions import Sessions, parse_sessions

_KEYS = (
    *("name", "source", "arrivals", "classes", "sessions", "prefixes", "images", "measured"),
    *CLASS_KEYS,
)
_SIDES = ("input_tokens", "output_tokens")
CLASSES_MAX = 1000
YAML_MAX_BYTES = 2 * MIB
NODES_MAX = 1_000_000  # of a YAML file, each repeated wherever its anchor is named
NUMBER_MAX = 100  # characters


@dataclass(frozen=True)
class Workload:
    """Lengths in tokens, arrival process and further parts of a workload. Raises WorkloadError.

    ``classes``: kinds of requests, indexed by ``Schedule.class_index``; the lengths here are those
    of all classes together. Empty: one plain kind.
    """

    name: str
    input_tokens: Lengths
    output_tokens: Lengths
    arrivals: str = "poisson"
    source: str = ""
    classes: tuple[RequestClass, ...] = ()
    # how requests form sessions; then the lengths here are of messages
    sessions: Sessions | None = None
    prefixes: Prefixes | None = None  # what prompts have in common; None: nothing
    images: Images | None = None  # that prompts have beside their text
    prompts: Prompts | None = None  # real ones from a file; then their lengths are sent

    def __post_init__(self) -> None:
        parse_arrivals(self.arrivals)
        if self.sessions and (
            len(self.classes) > 1 or any(k.clients or k.correlation for k in self.classes)
        ):
            raise WorkloadError(
                "sessions do not go with several classes, clients or a correlation: "
                "drop one of them"
            )
        if self.sessions and self.prefixes and self.prefixes.cached_share is not None:
            raise WorkloadError(
                "prefixes: cached_share is for lone requests: "
                "the turns of a session share their history; give pools"
            )

    @property
    def own_clocks(self) -> bool:
        """Return whether classes or clients have their own arrival processes."""
        return any(kind.arrivals or kind.clients for kind in self.classes)

    @property
    def kinds(self) -> tuple[RequestClass, ...]:
        """Return the classes, or the plain default class."""
        return self.classes or (RequestClass("default", 1, self.input_tokens, self.output_tokens),)

    @property
    def clocks(self) -> tuple[str, ...]:
        """Return every distinct arrival process of the workload."""
        return tuple(dict.fromkeys(clock for kind in self.kinds for clock in self._clocks_of(kind)))

    def _clocks_of(self, kind: RequestClass) -> list[str]:
        return list(
            dict.fromkeys(client.arrivals or self.arrivals for _, client in kind.senders(1.0))
        )

    def with_lengths(
        self, side: Literal["input_tokens", "output_tokens"], lengths: Lengths
    ) -> "Workload":
        """Return the workload with one side's lengths replaced. Raises WorkloadError."""
        if len(self.classes) > 1 or any(kind.clients for kind in self.classes):
            raise WorkloadError(
                f"workload {self.name} has classes or clients with lengths of their own: "
                f"drop --{side.replace('_', '-')}"
            )
        changed: dict[str, Any] = {side: lengths}
        return replace(
            self, classes=tuple(replace(kind, **changed) for kind in self.classes), **changed
        )

    def at_quantile(self, q: float) -> "Workload":
        """Return the workload with every length fixed at this quantile of its class."""
        kinds = []
        for kind in self.kinds:
            sides: dict[str, Any] = {s: Fixed(round(_all([kind], s).quantile(q))) for s in _SIDES}
            clients = tuple(replace(client, **sides) for client in kind.clients)
            kinds.append(replace(kind, correlation=0.0, clients=clients, **sides))
        both: dict[str, Any] = {side: _all(kinds, side) for side in _SIDES}
        return replace(self, classes=tuple(kinds) if self.classes else (), **both)

    def with_arrivals(self, spec: str) -> "Workload":
        """Return the workload with one arrival process. Raises WorkloadError for clients."""
        if any(kind.clients for kind in self.classes):
            raise WorkloadError(
                f"workload {self.name} superposes clients with arrivals of their own: "
                "drop --arrivals"
            )
        return replace(
            self,
            arrivals=spec,
            classes=tuple(replace(kind, arrivals=None) for kind in self.classes),
        )

    def describe(self) -> dict[str, Any]:
        """Return a JSON-able description, the first part of ``workload`` in run.json."""
        described: dict[str, Any] = {
            "name": self.name,
            "source": self.source,
            "arrivals": self._arrivals_text(),
            "input_tokens": self.input_tokens.describe(),
            "output_tokens": self.output_tokens.describe(),
        }
        for key, part in (
            ("sessions", self.sessions),
            ("prefixes", self.prefixes),
            ("images", self.images),
            ("prompt_file", self.prompts),
        ):
            if part is not None:
                described[key] = part.describe()
        return described | (
            {"classes": [kind.describe() for kind in self.classes]} if self.classes else {}
        )

    def _arrivals_text(self) -> str:
        if not self.own_clocks:
            return self.arrivals
        parts = []
        for kind in self.classes:
            own = " and ".join(self._clocks_of(kind))
            if kind.clients:
                own = f"{len(kind.clients)} clients, {own}"
            parts.append(f"{kind.name} {own}" if len(self.classes) > 1 else own)
        return "superposed: " + "; ".join(parts)


def load_workload(name_or_path: str) -> Workload:
    """Load a built-in workload, or a YAML file. Raises WorkloadError with one line."""
    if name_or_path in ARCHETYPES:
        return _from_mapping(ARCHETYPES[name_or_path], name_or_path, f"workload {name_or_path}")
    path = Path(name_or_path)
    if (
        path.suffix.lower() not in (".yaml", ".yml")
        and "/" not in name_or_path
        and not path.is_file()
    ):
        raise WorkloadError(
            f"workload {name_or_path!r} is not known{did_you_mean(name_or_path, ARCHETYPES)}: "
            f"use one of {', '.join(ARCHETYPES)}, or the path of a YAML file"
        )
    return _from_mapping(read_yaml(path), path.stem, str(path))


def workload_text(name_or_path: str) -> tuple[str, list[str]]:
    """Return (YAML text of a workload, names of its headers). Raises WorkloadError.

    Header values are left out (they may be secrets), as are the measurements of a fit.
    """
    built_in = name_or_path in ARCHETYPES
    held = dict(ARCHETYPES[name_or_path] if built_in else read_yaml(Path(name_or_path)))
    held.setdefault("name", name_or_path if built_in else Path(name_or_path).stem)
    held.pop("measured", None)
    classes = held.get("classes") or {}
    headers = [name for spec in (held, *classes.values()) for name in spec.get("headers") or {}]
    held.pop("headers", None)
    if classes:
        kept = {
            name: {k: v for k, v in spec.items() if k != "headers"}
            for name, spec in classes.items()
        }
        held["classes"] = kept
    return yaml.safe_dump(held, sort_keys=False), headers


def workload_from_text(text: str, where: str) -> Workload:
    """Parse the text of ``workload_text``. Raises WorkloadError."""
    try:
        return _from_mapping(yaml.load(text, Loader=PlainYaml), "schedule", where)
    except yaml.YAMLError:
        raise WorkloadError(f"{where}: the workload is no YAML text") from None


def _from_mapping(value: object, default_name: str, where: str) -> Workload:
    given = check_keys(value, _KEYS, where)
    try:
        arrivals = arrivals_text("poisson" if given.get("arrivals") is None else given["arrivals"])
    except WorkloadError as error:
        raise WorkloadError(f"{where}: {error}") from None
    defaults = {key: given[key] for key in CLASS_KEYS if given.get(key) is not None}
    if given.get("classes") is None:
        kinds = [parse_class("default", {}, defaults, where)]
    else:
        kinds = _classes(given["classes"], defaults, where)
    plain = RequestClass("default", 1, kinds[0].input_tokens, kinds[0].output_tokens)
    parsers: dict[str, Any] = {
        "sessions": parse_sessions,
        "prefixes": parse_prefixes,
        "images": parse_images,
    }
    try:
        parts = {k: parse(given[k], k) for k, parse in parsers.items() if given.get(k) is not None}
        return Workload(
            name=str(given.get("name") or default_name),
            input_tokens=_all(kinds, "input_tokens"),
            output_tokens=_all(kinds, "output_tokens"),
            arrivals=arrivals,
            source=str(given.get("source") or ""),
            classes=() if kinds == [plain] else tuple(kinds),
            **parts,
        )
    except WorkloadError as error:
        raise WorkloadError(f"{where}: {error}") from None


def _classes(spec: object, defaults: Mapping[str, Any], where: str) -> list[RequestClass]:
    if not isinstance(spec, Mapping) or not 1 <= len(spec) <= CLASSES_MAX:
        raise WorkloadError(
            f"{where}: classes: give names and what is in them, "
            "as {chat: {weight: 7, like: chat}, batch: {...}}"
        )
    for name in spec:
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise WorkloadError(f"{where}: classes: {name!r:.40} is no name: give printable text")
    return [
        parse_class(name, item, defaults, f"{where}: class {name}") for name, item in spec.items()
    ]


def _all(kinds: list[RequestClass], side: str) -> Lengths:
    """Return the lengths of all requests together."""
    senders = [sender for kind in kinds for sender in kind.senders(kind.weight)]
    lengths: list[Lengths] = [getattr(client, side) for _, client in senders]
    if all(one == lengths[0] for one in lengths):
        return lengths[0]
    return Mixture(tuple(lengths), tuple(weight for weight, _ in senders))


def read_yaml(path: Path) -> Any:
    """Read a YAML file without duplicate keys or ambiguous numbers. Raises WorkloadError."""
    try:
        return yaml.load(read_text(path, YAML_MAX_BYTES), Loader=PlainYaml)
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror or error}") from None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise WorkloadError(
            f"{path}{line}: this is no YAML: {error.problem or error.context}"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else "it is nested too deep"
        raise WorkloadError(f"{path}: this is no YAML text: {reason}") from None


class PlainYaml(yaml.SafeLoader):
    """YAML without duplicate keys and YAML 1.1's octal and sexagesimal numbers."""

    def compose_document(self) -> yaml.Node | None:
        """Compose the document; refuse anchors that unfold into NODES_MAX nodes or endlessly."""
        root: yaml.Node | None = super().compose_document()
        left, count = [root], 0
        while left:
            node = left.pop()
            if isinstance(node, yaml.CollectionNode):
                mapping = isinstance(node, yaml.MappingNode)
                found = list(chain.from_iterable(node.value)) if mapping else node.value
                count += len(found)
                if count > NODES_MAX:
                    problem = f"it unfolds into more than {NODES_MAX:,} values"
                    raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
                left += found
        return root

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} stands there twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        if len(node.value) > NUMBER_MAX:
            problem = f"a number of more than {NUMBER_MAX} characters"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        read = self.construct_yaml_int if node.tag.endswith("int") else self.construct_yaml_float
        value: int | float = read(node)
        if ":" in node.value or re.fullmatch(r"[-+]?0[0-7_]+", node.value):
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"{node.value} is {value:g} in YAML 1.1 and something else in 1.2: "
                "write the number that is meant, or quotes around a text",
                node.start_mark,
            )
        return value


for _kind in ("int", "float"):
    PlainYaml.add_constructor(f"tag:yaml.org,2002:{_kind}", PlainYaml.construct_number)
