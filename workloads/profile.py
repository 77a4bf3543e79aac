"""A workload: what is sent, as a name or a small YAML file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from workloads.archetypes import ARCHETYPES
from workloads.arrivals import check_arrivals
from workloads.classes import RequestClass
from workloads.errors import WorkloadError
from workloads.lengths import Lengths, parse_lengths
from workloads.prefixes import Prefixes, parse_prefixes
from workloads.sessions import Sessions, parse_sessions

_KEYS = ("name", "input_tokens", "output_tokens", "arrivals", "source", "sessions", "prefixes")


@dataclass(frozen=True)
class Workload:
    """Lengths in tokens of what is sent and asked for, and the arrival process. Raises WorkloadError.

    ``classes``: where requests are of several kinds, or of one that is more than its lengths; ``Schedule.class_index``
    counts in them, and the lengths here are those of all classes together. Empty: one plain kind.
    """

    name: str
    input_tokens: Lengths
    output_tokens: Lengths
    arrivals: str = "poisson"
    source: str = ""
    classes: tuple[RequestClass, ...] = ()
    sessions: Sessions | None = None  # how requests form sessions; then the lengths here are of messages
    prefixes: Prefixes | None = None  # what prompts have in common; None: nothing

    def __post_init__(self) -> None:
        check_arrivals(self.arrivals)

    def describe(self) -> dict[str, Any]:
        """JSON-able description, the first part of ``workload`` in run.json."""
        described: dict[str, Any] = {
            "name": self.name,
            "source": self.source,
            "arrivals": self.arrivals,
            "input_tokens": self.input_tokens.describe(),
            "output_tokens": self.output_tokens.describe(),
        }
        if self.sessions is not None:
            described["sessions"] = self.sessions.describe()
        if self.prefixes is not None:
            described["prefixes"] = self.prefixes.describe()
        return described | ({"classes": [c.describe() for c in self.classes]} if self.classes else {})


def load_workload(name_or_path: str) -> Workload:
    """A built-in workload by its name, or the one in a YAML file. Raises WorkloadError with one line."""
    if name_or_path in ARCHETYPES:
        return _from_mapping(ARCHETYPES[name_or_path], name_or_path, f"workload {name_or_path}")
    path = Path(name_or_path)
    if path.suffix.lower() not in (".yaml", ".yml") and "/" not in name_or_path and not path.is_file():
        raise WorkloadError(
            f"workload {name_or_path!r} is not known{_did_you_mean(name_or_path, ARCHETYPES)}: use one of "
            f"{', '.join(ARCHETYPES)}, or the path of a YAML file"
        )
    return _from_mapping(_read_yaml(path), path.stem, str(path))


def _from_mapping(value: object, default_name: str, where: str) -> Workload:
    if not isinstance(value, Mapping):
        raise WorkloadError(f"{where}: this is no mapping; write lines such as 'input_tokens: 512'")
    for key in value:
        if key not in _KEYS:
            hint = _did_you_mean(str(key), _KEYS)
            raise WorkloadError(f"{where}: key {key!r} is not known{hint}: the keys are {', '.join(_KEYS)}")
    for key in ("input_tokens", "output_tokens"):
        if value.get(key) is None:
            raise WorkloadError(f"{where}: key {key} is missing; write for example '{key}: 512'")
    texts = {"name": default_name, "arrivals": "poisson", "source": ""}
    for key in texts:
        if value.get(key) is not None:
            texts[key] = str(value[key])
    try:
        check_arrivals(texts["arrivals"])
    except WorkloadError as error:
        raise WorkloadError(f"{where}: {error}") from None
    sessions, prefixes = value.get("sessions"), value.get("prefixes")
    return Workload(
        sessions=None if sessions is None else parse_sessions(sessions, f"{where}: sessions"),
        prefixes=None if prefixes is None else parse_prefixes(prefixes, f"{where}: prefixes"),
        input_tokens=parse_lengths(value["input_tokens"], f"{where}: input_tokens"),
        output_tokens=parse_lengths(value["output_tokens"], f"{where}: output_tokens"),
        **texts,
    )


def _read_yaml(path: Path) -> object:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise WorkloadError(f"workload file {path} cannot be read: {error.strerror or error}") from None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise WorkloadError(f"{path}{line}: this is no YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else "it is nested too deep"
        raise WorkloadError(f"{path}: this is no YAML text: {reason}") from None


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = get_close_matches(word.lower(), known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
