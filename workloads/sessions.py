"""Sessions: multi-turn chats and chains of an agent's calls, as a workload file describes them.

A session arrives in open loop; each further request is due a pause after the last answer it needs.
"""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.errors import WorkloadError, check_keys, number_between, whole_between
from ampacity.workloads.lengths.parse import MAX_TOKENS, Lengths, parse_lengths

Ints = NDArray[np.int64]
T = TypeVar("T")
JOINT_MAX = 1000  # recorded sessions in a workload file


@dataclass(frozen=True)
class Branches:
    """A ``share`` of an agent's steps call ``width`` helpers at once and wait for all of them.

    Each helper starts a conversation of its own with ``task_tokens`` of text.
    """

    share: float
    width: Lengths
    task_tokens: Lengths


@dataclass(frozen=True)
class Steps:
    """An agent's sequential tool ``calls`` between a user's message and the final answer.

    ``delay_ms`` is the tool's latency, ``result_tokens`` the length of its result.
    """

    calls: Lengths
    result_tokens: Lengths
    delay_ms: Lengths | None = None
    branches: Branches | None = None


@dataclass(frozen=True)
class Joint:
    """Recorded sessions to draw from: rows of (turns, tokens of the first message, of the second,
    mean tokens of the later ones)."""

    rows: tuple[tuple[int, ...], ...]

    def describe(self) -> dict[str, Any]:
        """Return a JSON-able description."""
        n = len(self.rows)
        text = f"turns, first, second and mean later message jointly, from {n} recorded sessions"
        return {"kind": "joint", "sessions": n, "text": text}

    def draw(self, n: int, rng: np.random.Generator) -> Ints:
        """Return int64[n, 4], the rows of n sessions; every full round uses each row once."""
        size = len(self.rows)
        rounds = [rng.permutation(size) for _ in range(-(-n // size))]
        order = np.concatenate(rounds)[:n] if n else np.empty(0, dtype=np.int64)
        return np.asarray(self.rows, dtype=np.int64).reshape(-1, 4)[order]


@dataclass(frozen=True)
class Sessions:
    """The way requests form sessions. The workload's lengths are of first messages and of answers."""

    turns: Lengths  # user messages per session
    user_tokens: Lengths | None = None  # of each later message; None: as the first
    think_ms: Lengths | None = None  # between an answer and the next message; None: no pause
    history: str = "answers"  # the server's real answers, or "planned": text of planned length
    keep_reasoning: bool = False  # in the history
    on_failed_turn: str = "end"  # or "continue"
    limit_tokens: int | None = None  # a longer conversation restarts with a summary
    summary_tokens: Lengths | None = None
    message_tokens: int | None = None  # template overhead per message but the first; None: 0
    finish_s: float = 60.0  # how long after the stage sessions continue
    steps: Steps | None = None
    joint: Joint | None = None  # replaces turns and the first two messages, scales later ones

    def mean_requests(self) -> float:
        """Return the mean number of requests in a session."""
        per_turn = 1.0
        if self.steps is not None:
            branches = self.steps.branches
            width = branches.share * branches.width.mean() if branches else 0.0
            per_turn += self.steps.calls.mean() * (1.0 + width)
        return self.turns.mean() * per_turn

    def describe(self) -> dict[str, Any]:
        """Return ``workload.sessions`` of run.json: every field by its name."""
        return {**_described(self), "mean_requests": self.mean_requests()}


def _described(value: Any) -> Any:
    if isinstance(value, Sessions | Steps | Branches):
        return {f.name: _described(getattr(value, f.name)) for f in fields(value)}
    return value.describe() if hasattr(value, "describe") else value


def parse_sessions(value: object, where: str) -> Sessions:
    """Parse the ``sessions`` of a workload file. Raises WorkloadError with one line."""
    found = _read(value, where, Sessions)
    if (found.limit_tokens is None) != (found.summary_tokens is None):
        raise WorkloadError(
            f"{where}: limit_tokens and summary_tokens go together: "
            "a conversation above the limit begins anew with a summary"
        )
    return found


def _read(value: object, where: str, kind: type[T]) -> T:
    """Parse a mapping into a dataclass; fields without a default are required."""
    known = fields(kind)  # type: ignore[arg-type]  # T is one of the three dataclasses
    given = check_keys(value, tuple(f.name for f in known), where)
    for f in known:
        if f.default is MISSING and given.get(f.name) is None:
            raise WorkloadError(
                f"{where}: key {f.name} is missing; write for example '{f.name}: 5'"
            )
    names = [f.name for f in known if given.get(f.name) is not None]
    return kind(**{name: _READ[name](given[name], f"{where}: {name}") for name in names})


def _pause(value: object, where: str) -> Lengths | None:
    return None if value == 0 else parse_lengths(value, where, " of ms")


def _whole(value: object, what: str) -> int:
    return whole_between(value, what, 0, MAX_TOKENS)


def _one_of(value: object, what: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise WorkloadError(f"{what} is {value!r}: choose one of {', '.join(allowed)}")
    return str(value)


def _flag(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise WorkloadError(f"{what} is {value!r}: give true or false")
    return value


def _joint(value: object, what: str) -> Joint:
    found = []
    for row in value if isinstance(value, list) and 0 < len(value) <= JOINT_MAX else [None]:
        if not isinstance(row, list) or len(row) != 4:
            raise WorkloadError(
                f"{what}: give up to {JOINT_MAX} sessions as [turns, first tokens, second ones, "
                "mean of later ones], as [[5, 900, 300, 120]]"
            )
        least = (1, 1, 0, 0)
        pairs = zip(row, least, strict=True)
        found.append(tuple(whole_between(n, what, low, MAX_TOKENS) for n, low in pairs))
    return Joint(tuple(found))


# Parsers by key: parser(value, place for messages).
_READ: dict[str, Callable[[object, str], Any]] = {
    "turns": partial(parse_lengths, unit=" of turns"),
    "calls": partial(parse_lengths, unit=" of calls"),
    "width": partial(parse_lengths, unit=" of helpers"),
    **dict.fromkeys(
        ("user_tokens", "summary_tokens", "result_tokens", "task_tokens"), parse_lengths
    ),
    **dict.fromkeys(("think_ms", "delay_ms"), _pause),
    **dict.fromkeys(("limit_tokens", "message_tokens"), _whole),
    "finish_s": lambda value, what: float(_whole(value, what)),
    "history": partial(_one_of, allowed=("answers", "planned")),
    "on_failed_turn": partial(_one_of, allowed=("end", "continue")),
    "keep_reasoning": _flag,
    "share": partial(number_between, least=0, most=1),
    "steps": partial(_read, kind=Steps),
    "branches": partial(_read, kind=Branches),
    "joint": _joint,
}
