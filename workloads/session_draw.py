"""Draw the requests of sessions, and of the conversations of a prompt file.

Dependencies, lengths and pauses are all fixed before the run.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.lengths.parse import MAX_TOKENS, Lengths
from ampacity.workloads.prompts.files import Prompts
from ampacity.workloads.prompts.prefixes import Prefixes, SharedPrefixes
from ampacity.workloads.sessions import Sessions
from ampacity.workloads.timetable import Floats, Ints, Schedule

Stream = Callable[[int], np.random.Generator]

# Spawn keys of the random streams, apart from those of lone requests.
_TURNS, _STEPS, _BRANCHES, _FIRST, _USER, _RESULT, _OUTPUT = range(32, 39)
_THINK, _DELAY, _PREFIX, _BRANCH, _SUMMARY, _JOINT = range(39, 45)
REQUESTS_MAX = 20_000_000  # of all sessions of a stage; more would exhaust the memory
_MESSAGES_PER_TURN = 2  # the previous answer, and the message of the user or the tool


@dataclass
class _Plan:
    """The requests of all sessions, a list per column, in the order of sessions."""

    session: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    user: list[int] = field(default_factory=list)  # index of its drawn user message; -1: none
    result: list[int] = field(default_factory=list)  # index of its tool result
    task: list[int] = field(default_factory=list)  # index of its task as a helper
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
        """Append a request and return its index."""
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
    """Return the dependencies within sessions of ``turns`` (int64[n]) turns."""
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
                # the agent receives its helpers' answers, or else a tool's result
                result = -1 if waited else call
                last = plan.add(session, last, waited or [last], result=result, delayed=not waited)
                call += 1
            user += 1
    return plan


def _checked(requests: int, sessions: int) -> int:
    if requests > REQUESTS_MAX:
        raise WorkloadError(
            f"sessions: {sessions} sessions have {requests} requests, more than {REQUESTS_MAX}: "
            "give fewer turns, calls or helpers"
        )
    return requests


def _drawn(lengths: Lengths | None, which: Ints, rng: np.random.Generator) -> Ints:
    """Return the draw ``which`` of each request, 0 where it has none (-1)."""
    if lengths is None or not len(which) or which.max() < 0:
        return np.zeros(len(which), dtype=np.int64)
    return np.where(which >= 0, lengths.sample(rng, int(which.max()) + 1)[which], 0)


def draw_sessions(
    sessions: Sessions,
    arrivals_s: Floats,
    first_tokens: Lengths,
    output_tokens: Lengths,
    prefixes: Prefixes | None,
    stage: int,
    stream: Stream,
) -> Schedule:
    """Return the requests of sessions, of which k begins at ``arrivals_s[k]`` (sorted).

    ``stream(key)`` is the random stream of that name. Requests are in the order of their earliest
    possible times; ``input_tokens`` is the whole prompt, history included.
    """
    rows = sessions.joint.draw(len(arrivals_s), stream(_JOINT)) if sessions.joint else None
    turns = sessions.turns.sample(stream(_TURNS), len(arrivals_s)) if rows is None else rows[:, 0]
    plan = _lay_out(sessions, turns, stream)
    n = len(plan.session)
    session, turn = np.asarray(plan.session, dtype=np.int64), np.asarray(plan.turn, dtype=np.int32)
    new = _new_tokens(sessions, plan, first_tokens, rows, stream)
    outputs = output_tokens.sample(stream(_OUTPUT), n)
    think_ms = _pauses_ms(sessions, plan, stream)
    compacted = sessions.summary_tokens
    summaries = compacted.sample(stream(_SUMMARY), n) if compacted else None
    shared = None
    if prefixes is not None:  # helpers have the system prompt of their session
        of_sessions = prefixes.first_turns(len(arrivals_s), stage, stream(_PREFIX))
        shared = of_sessions.take(session)
    system = np.zeros(n, dtype=np.int64) if shared is None else shared.totals()
    inputs, continues, new = _histories(sessions, plan, new, outputs, system, summaries)
    drawn = Schedule(
        _earliest(plan, arrivals_s, think_ms / 1e3),
        inputs,
        outputs,
        new_tokens=new,
        session=session,
        turn=turn,
        think_s=think_ms / 1e3,
        continues=continues,
        shared=shared,
    )
    return drawn.in_time_order(plan.after)


def draw_conversations(
    prompts: Prompts,
    arrivals_s: Floats,
    output_tokens: Lengths,
    think_ms: Lengths | None,
    order: np.random.Generator,
    draws: np.random.Generator,
) -> Schedule:
    """Return the requests of a prompt file; prompt k of shuffled rounds begins at ``arrivals_s[k]``.

    An answer is as long as the recorded one, else as the file's own limit, else drawn from
    ``output_tokens``.
    """
    n, entries = len(arrivals_s), prompts.file.entries
    chosen = order.permutation(len(entries))[np.arange(n) % len(entries)]
    turns = np.array([len(prompts.new_tokens[e]) for e in chosen], dtype=np.int64)
    entry, session = np.repeat(chosen, turns), np.repeat(np.arange(n), turns)
    turn = np.arange(len(entry)) - np.repeat(np.cumsum(turns) - turns, turns)
    new, known = (
        np.array([t for e in chosen for t in tokens[e]], dtype=np.int64)
        for tokens in (prompts.new_tokens, prompts.answer_tokens)
    )
    limit = np.array([e.limit_tokens or 0 for e in entries], dtype=np.int64)[entry]
    drawn = output_tokens.sample(draws, len(entry))
    outputs = np.where(known > 0, known, np.where(limit > 0, limit, drawn))
    none = np.zeros(len(entry))
    pause_s = none if think_ms is None else think_ms.sample(draws, len(entry)) / 1e3
    pause_s[turn == 0] = 0.0
    inputs, due_s = new.copy(), np.repeat(np.asarray(arrivals_s, dtype=np.float64), turns)
    for i in np.flatnonzero(turn):
        inputs[i] += inputs[i - 1] + outputs[i - 1]
        due_s[i] = due_s[i - 1] + pause_s[i]
    # a prompt that comes again is known to a cache
    shared = SharedPrefixes(np.arange(len(entry) + 1), entry, new)
    found = Schedule(due_s, inputs, outputs, entry=entry, shared=shared)
    if turns.max(initial=1) == 1:
        return found
    before = np.where(turn > 0, np.arange(len(entry)) - 1, -1)
    found = replace(
        found,
        new_tokens=new,
        session=session,
        turn=turn.astype(np.int32),
        think_s=pause_s,
        continues=before,
    )
    return found.in_time_order([[b] if b >= 0 else [] for b in before.tolist()])


def _new_tokens(
    sessions: Sessions, plan: _Plan, first_tokens: Lengths, rows: Ints | None, stream: Stream
) -> Ints:
    """Return the tokens that each request adds to its conversation, except helpers' answers."""
    steps, turn = sessions.steps, np.asarray(plan.turn, dtype=np.int64)
    user = np.asarray(plan.user, dtype=np.int64)
    first = _drawn(first_tokens, user, stream(_FIRST))
    later = _drawn(sessions.user_tokens, user, stream(_USER)) if sessions.user_tokens else first
    new = np.where(turn == 0, first, later)
    if rows is not None:
        mean = (sessions.user_tokens or first_tokens).mean()
        new = _like_recorded(rows[np.asarray(plan.session, dtype=np.int64)], turn, later, mean)
    if steps is not None:
        result, task = (np.asarray(c, dtype=np.int64) for c in (plan.result, plan.task))
        new = new + _drawn(steps.result_tokens, result, stream(_RESULT))
        if steps.branches is not None:
            new = new + _drawn(steps.branches.task_tokens, task, stream(_BRANCH))
    return new


def _pauses_ms(sessions: Sessions, plan: _Plan, stream: Stream) -> Ints:
    """Return the pause before each request: a person's think time, or a tool's latency."""
    steps, turn = sessions.steps, np.asarray(plan.turn, dtype=np.int64)
    which = np.where(turn > 0, np.asarray(plan.user, dtype=np.int64), -1)
    think_ms = _drawn(sessions.think_ms, which, stream(_THINK))
    if steps is not None and steps.delay_ms is not None:
        delay_ms = steps.delay_ms.sample(stream(_DELAY), len(turn))
        think_ms = think_ms + np.where(plan.delayed, delay_ms, 0)
    return think_ms


def _like_recorded(rows: Ints, turn: Ints, later: Ints, mean: float) -> Ints:
    """Return message lengths of sessions like ``rows`` (int64[n, 4]).

    From the third turn on they are ``later``, whose mean is ``mean``, scaled to the row's mean.
    """
    scaled = np.maximum(np.rint(later * rows[:, 3] / mean), 1)
    tokens = np.where(turn < 2, np.where(turn == 0, rows[:, 1], rows[:, 2]), scaled)
    return np.where(later > 0, tokens, 0).astype(np.int64)  # 0: of a tool or a helper


def _histories(
    sessions: Sessions, plan: _Plan, new: Ints, outputs: Ints, system: Ints, summaries: Ints | None
) -> tuple[Ints, Ints, Ints]:
    """Return (whole prompts, what each continues after compaction, new tokens), int64[n] each."""
    extra = sessions.message_tokens or 0
    inputs, continues, added = [0] * len(new), list(plan.continues), new.tolist()
    fresh, answers = system.tolist(), outputs.tolist()
    for i, before in enumerate(continues):
        if plan.user[i] < 0 and plan.result[i] < 0 and plan.task[i] < 0:  # its helpers' answers
            added[i] = sum(answers[k] + extra for k in plan.after[i]) - extra
        if before < 0:
            inputs[i] = fresh[i] + added[i]
            continue
        inputs[i] = inputs[before] + answers[before] + added[i] + _MESSAGES_PER_TURN * extra
        limit = sessions.limit_tokens
        if limit is not None and summaries is not None and inputs[i] > limit:
            continues[i] = -1
            added[i] += int(summaries[i])
            inputs[i] = fresh[i] + added[i]
    if max(inputs, default=0) > MAX_TOKENS:
        raise WorkloadError(
            f"sessions: a conversation grows to {max(inputs)} tokens, more than {MAX_TOKENS}: "
            "give limit_tokens or less to say"
        )
    prompts, before_of, tokens = (np.asarray(c, np.int64) for c in (inputs, continues, added))
    return prompts, before_of, tokens


def _earliest(plan: _Plan, arrivals_s: Floats, think_s: Floats) -> Floats:
    """Return when each request would be due if every answer took no time."""
    due, pause, arrival = [0.0] * len(think_s), think_s.tolist(), arrivals_s.tolist()
    for i, (session, after) in enumerate(zip(plan.session, plan.after, strict=True)):
        due[i] = max(due[k] for k in after) + pause[i] if after else arrival[session]
    return np.asarray(due, dtype=np.float64)
