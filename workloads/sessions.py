"""Sessions: requests that wait for the answers of others. Multi-turn chat, and chains of an agent's calls.

A session arrives in open loop; each further request is due a pause after the last answer that it waits for.
What is drawn here is columns of a schedule; the pauses, lengths and branches are fixed before the run.
"""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.errors import WorkloadError, check_keys, number_between, whole_between
from ampacity.workloads.lengths.parse import MAX_TOKENS, Lengths, parse_lengths
from ampacity.workloads.prompts.prefixes import Prefixes, in_time_order

Stream = Callable[[int], np.random.Generator]
Ints = NDArray[np.int64]
T = TypeVar("T")

# Spawn keys of the random streams, apart from those of lone requests.
(
    _TURNS,
    _STEPS,
    _BRANCHES,
    _FIRST,
    _USER,
    _RESULT,
    _OUTPUT,
    _THINK,
    _DELAY,
    _PREFIX,
    _BRANCH,
    _SUMMARY,
    _JOINT,
) = range(32, 45)
REQUESTS_MAX = 20_000_000  # of all sessions of a stage: more is refused before it eats the memory
JOINT_MAX = 1000  # recorded sessions in a workload file
_MESSAGES_PER_TURN = 2  # the answer before, and what the user or the tool says to it


@dataclass(frozen=True)
class Branches:
    """A ``share`` of an agent's steps call ``width`` further agents at once, and go on when all have answered.

    Each begins a conversation of its own with ``task_tokens`` of text.
    """

    share: float
    width: Lengths
    task_tokens: Lengths


@dataclass(frozen=True)
class Steps:
    """What an agent does between a user's message and its answer: ``calls`` of tools, one after the other.

    ``delay_ms`` is the time that a tool takes, ``result_tokens`` what it says.
    """

    calls: Lengths
    result_tokens: Lengths
    delay_ms: Lengths | None = None
    branches: Branches | None = None


@dataclass(frozen=True)
class Joint:
    """Recorded sessions, of which each session is like one: (turns, tokens of the first message, of the second
    one, mean tokens of the later ones)."""

    rows: tuple[tuple[int, ...], ...]

    def describe(self) -> dict[str, Any]:
        """JSON-able description."""
        text = f"turns, first, second and mean later message together, as in one of {len(self.rows)} recorded sessions"
        return {"kind": "joint", "sessions": len(self.rows), "text": text}

    def draw(self, n: int, rng: np.random.Generator) -> Ints:
        """int64[n, 4]: the rows of n sessions; each row comes equally often, but for a part of one round."""
        size = len(self.rows)
        rounds = [rng.permutation(size) for _ in range(-(-n // size))]
        order = np.concatenate(rounds)[:n] if n else np.empty(0, dtype=np.int64)
        return np.asarray(self.rows, dtype=np.int64).reshape(-1, 4)[order]


@dataclass(frozen=True)
class Sessions:
    """How requests form sessions. The workload's own lengths are those of the first message and of each answer."""

    turns: Lengths  # messages of the user in a session
    user_tokens: Lengths | None = None  # of each message after the first; None: as the first
    think_ms: Lengths | None = None  # between an answer and the user's next message; None: no pause
    # "answers": what the server really said; "planned": text of the planned length
    history: str = "answers"
    keep_reasoning: bool = False  # whether reasoning stays in the history
    on_failed_turn: str = "end"  # or "continue"
    # a longer conversation is compacted: it begins anew with a summary
    limit_tokens: int | None = None
    summary_tokens: Lengths | None = None
    # that the template adds to each message but the first; None: 0
    message_tokens: int | None = None
    finish_s: float = 60.0  # how long after the stage sessions are played on
    steps: Steps | None = None
    # in place of turns and two messages; later ones are scaled to its mean
    joint: Joint | None = None

    def mean_requests(self) -> float:
        """Requests in a session, on average."""
        per_turn = 1.0
        if self.steps is not None:
            branches = self.steps.branches
            width = branches.share * branches.width.mean() if branches else 0.0
            per_turn += self.steps.calls.mean() * (1.0 + width)
        return self.turns.mean() * per_turn

    def describe(self) -> dict[str, Any]:
        """JSON-able description, ``workload.sessions`` in run.json: every field by its name."""
        return {**_told(self), "mean_requests": self.mean_requests()}


def _told(value: Any) -> Any:
    if isinstance(value, Sessions | Steps | Branches):
        return {f.name: _told(getattr(value, f.name)) for f in fields(value)}
    return value.describe() if hasattr(value, "describe") else value


@dataclass
class _Plan:
    """The requests of all sessions while they are laid out, a list for each column, in the order of sessions."""

    session: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    user: list[int] = field(
        default_factory=list
    )  # which of the drawn user messages it says; -1: none
    result: list[int] = field(default_factory=list)  # which tool result
    task: list[int] = field(default_factory=list)  # which task of a further agent
    delayed: list[bool] = field(default_factory=list)  # waits for a tool, not for a person
    continues: list[int] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)

    def add(
        self,
        session: int,
        continues: int,
        after: list[int],
        *,
        user: int = -1,
        result: int = -1,
        task: int = -1,
        delayed: bool = False,
    ) -> int:
        index = len(self.session)
        self.turn.append(self.turn[-1] + 1 if self.session and self.session[-1] == session else 0)
        self.session.append(session)
        for column, value in ((self.user, user), (self.result, result), (self.task, task)):
            column.append(value)
        self.delayed.append(delayed)
        self.continues.append(continues)
        self.after.append(after)
        return index


def _lay_out(sessions: Sessions, turns: Ints, stream: Stream) -> _Plan:
    """Who waits for whom in sessions of so many ``turns``, int64[n]."""
    plan, n = _Plan(), len(turns)
    total = _checked(int(turns.sum()), n)
    calls = np.zeros(total, dtype=np.int64)
    steps = sessions.steps
    if steps is not None:
        calls = steps.calls.sample(stream(_STEPS), total)
    n_calls = _checked(int(calls.sum()), n)
    width = np.zeros(n_calls, dtype=np.int64)
    if steps is not None and steps.branches is not None:
        rng = stream(_BRANCHES)
        branched = rng.random(n_calls) < steps.branches.share
        width = np.where(branched, steps.branches.width.sample(rng, n_calls), 0)
    _checked(total + n_calls + int(width.sum()), n)
    user = call = task = 0
    for session, count in enumerate(turns.tolist()):
        last = -1
        for _ in range(count):
            last = plan.add(session, last, [last] if last >= 0 else [], user=user)
            for _ in range(int(calls[user])):
                parts = range(task, task + int(width[call]))
                task += len(parts)
                waited = [plan.add(session, -1, [last], task=part, delayed=True) for part in parts]
                # what its helpers answered is what the agent is told; else a tool's result
                result = -1 if waited else call
                last = plan.add(session, last, waited or [last], result=result, delayed=not waited)
                call += 1
            user += 1
    return plan


def _checked(requests: int, sessions: int) -> int:
    if requests > REQUESTS_MAX:
        raise WorkloadError(
            f"sessions: {sessions} sessions have {requests} requests, more than {REQUESTS_MAX}: give fewer turns, calls or helpers"
        )
    return requests


def _drawn(lengths: Lengths | None, which: list[int], rng: np.random.Generator) -> Ints:
    """The draw of each request, 0 where it has none (-1)."""
    index = np.asarray(which, dtype=np.int64)
    if lengths is None or not len(index) or index.max() < 0:
        return np.zeros(len(index), dtype=np.int64)
    return np.where(index >= 0, lengths.sample(rng, int(index.max()) + 1)[index], 0)


def draw_sessions(
    sessions: Sessions,
    arrivals_s: NDArray[np.float64],
    first_tokens: Lengths,
    output_tokens: Lengths,
    prefixes: Prefixes | None,
    stage: int,
    stream: Stream,
) -> dict[str, Any]:
    """Columns of a schedule in which session k begins at ``arrivals_s[k]`` (sorted).

    ``stream(key)`` is the random stream of that name. Requests stand in the order of their earliest possible times;
    ``input_tokens`` is the whole prompt, history included.
    """
    joint = sessions.joint.draw(len(arrivals_s), stream(_JOINT)) if sessions.joint else None
    turns = sessions.turns.sample(stream(_TURNS), len(arrivals_s)) if joint is None else joint[:, 0]
    plan = _lay_out(sessions, turns, stream)
    n, steps = len(plan.session), sessions.steps
    turn, user = np.asarray(plan.turn, dtype=np.int32), np.asarray(plan.user, dtype=np.int64)
    first = _drawn(first_tokens, plan.user, stream(_FIRST))
    later = (
        _drawn(sessions.user_tokens, plan.user, stream(_USER)) if sessions.user_tokens else first
    )
    new = np.where(turn == 0, first, later)
    if joint is not None:
        rows, mean = (
            joint[np.asarray(plan.session, dtype=np.int64)],
            (sessions.user_tokens or first_tokens).mean(),
        )
        new = _like_recorded(rows, turn.astype(np.int64), later, mean)
    if steps is not None:
        new = new + _drawn(steps.result_tokens, plan.result, stream(_RESULT))
        if steps.branches is not None:
            new = new + _drawn(steps.branches.task_tokens, plan.task, stream(_BRANCH))
    outputs = output_tokens.sample(stream(_OUTPUT), n)
    think_ms = _drawn(sessions.think_ms, np.where(turn > 0, user, -1).tolist(), stream(_THINK))
    if steps is not None and steps.delay_ms is not None:
        think_ms = think_ms + np.where(plan.delayed, steps.delay_ms.sample(stream(_DELAY), n), 0)
    summaries = (
        sessions.summary_tokens.sample(stream(_SUMMARY), n) if sessions.summary_tokens else None
    )
    shared = None
    if prefixes is not None:  # a session keeps its system prompt, its helpers have it too
        of_sessions = prefixes.first_turns(len(arrivals_s), stage, stream(_PREFIX))
        shared = of_sessions.take(np.asarray(plan.session, dtype=np.int64))
    system = np.zeros(n, dtype=np.int64) if shared is None else shared.totals()
    inputs, continues, new = _histories(sessions, plan, new, outputs, system, summaries)
    due_s = _earliest(plan, arrivals_s, think_ms / 1e3)
    columns = {
        "scheduled_s": due_s,
        "input_tokens": inputs,
        "output_tokens": outputs,
        "new_tokens": new,
        "session": np.asarray(plan.session, dtype=np.int64),
        "turn": turn,
        "think_s": think_ms / 1e3,
    }
    return in_time_order(columns, continues, plan.after, shared)


def _like_recorded(rows: Ints, turn: Ints, later: Ints, mean: float) -> Ints:
    """What each request says, of sessions like ``rows`` (int64[n, 4]): from the third turn on ``later``, whose mean is ``mean``."""
    scaled = np.maximum(np.rint(later * rows[:, 3] / mean), 1)
    said = np.where(turn < 2, np.where(turn == 0, rows[:, 1], rows[:, 2]), scaled)
    return np.where(later > 0, said, 0).astype(np.int64)  # 0: of a tool or a helper


def _histories(
    sessions: Sessions, plan: _Plan, new: Ints, outputs: Ints, system: Ints, summaries: Ints | None
) -> tuple[Ints, Ints, Ints]:
    """(whole prompts, what each continues after compaction, what each says that is new), all int64[n]."""
    extra = sessions.message_tokens or 0
    inputs, continues, said = [0] * len(new), list(plan.continues), new.tolist()
    fresh, answers = system.tolist(), outputs.tolist()
    for i, before in enumerate(continues):
        if (
            plan.user[i] < 0 and plan.result[i] < 0 and plan.task[i] < 0
        ):  # the answers of its helpers
            said[i] = sum(answers[k] + extra for k in plan.after[i]) - extra
        if before < 0:
            inputs[i] = fresh[i] + said[i]
            continue
        inputs[i] = inputs[before] + answers[before] + said[i] + _MESSAGES_PER_TURN * extra
        if (
            sessions.limit_tokens is not None
            and inputs[i] > sessions.limit_tokens
            and summaries is not None
        ):
            continues[i] = -1
            said[i] += int(summaries[i])
            inputs[i] = fresh[i] + said[i]
    if max(inputs, default=0) > MAX_TOKENS:
        raise WorkloadError(
            f"sessions: a conversation grows to {max(inputs)} tokens, more than {MAX_TOKENS}: give limit_tokens or less to say"
        )
    return (
        np.asarray(inputs, dtype=np.int64),
        np.asarray(continues, dtype=np.int64),
        np.asarray(said, dtype=np.int64),
    )


def _earliest(
    plan: _Plan, arrivals_s: NDArray[np.float64], think_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """When each request would be due if every answer came at once."""
    due, pause, arrival = [0.0] * len(think_s), think_s.tolist(), arrivals_s.tolist()
    for i, (session, after) in enumerate(zip(plan.session, plan.after, strict=True)):
        due[i] = max(due[k] for k in after) + pause[i] if after else arrival[session]
    return np.asarray(due, dtype=np.float64)


def parse_sessions(value: object, where: str) -> Sessions:
    """The ``sessions`` of a workload file. Raises WorkloadError with one line."""
    found = _read(value, where, Sessions)
    if (found.limit_tokens is None) != (found.summary_tokens is None):
        raise WorkloadError(
            f"{where}: limit_tokens and summary_tokens go together: a conversation above the limit begins anew with a summary"
        )
    return found


def _read(value: object, where: str, kind: type[T]) -> T:
    """A dataclass from the mapping of its fields; those without a default must be there."""
    known = fields(kind)  # type: ignore[arg-type]  # T is one of the three dataclasses
    given = check_keys(value, tuple(f.name for f in known), where)
    for f in known:
        if f.default is MISSING and given.get(f.name) is None:
            raise WorkloadError(
                f"{where}: key {f.name} is missing; write for example '{f.name}: 5'"
            )
    told = [f.name for f in known if given.get(f.name) is not None]
    return kind(**{name: _READ[name](given[name], f"{where}: {name}") for name in told})


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
                f"{what}: give up to {JOINT_MAX} sessions as [turns, first tokens, second ones, mean of later ones], as [[5, 900, 300, 120]]"
            )
        found.append(
            tuple(
                whole_between(n, what, low, MAX_TOKENS)
                for n, low in zip(row, (1, 1, 0, 0), strict=True)
            )
        )
    return Joint(tuple(found))


# How the value of a key is read: reader(value, where it stands).
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
