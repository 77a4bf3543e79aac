"""Options of a stage runner for sending and reading; the same for all stages of a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ampacity.loadgen.drive.account import Account
from ampacity.loadgen.drive.in_flight import Note
from ampacity.loadgen.plan import Limits
from ampacity.loadgen.receive.completions import Answer
from ampacity.loadgen.receive.exchange import Exchange
from ampacity.loadgen.receive.token_counts import ByPiece


@dataclass(frozen=True)
class RunnerOptions:
    """Options of a StageRunner that do not change between stages."""

    limits: Limits = field(default_factory=Limits)
    targets: Sequence[str | None] = (None,)  # names of the clients, for the records
    secrets: Callable[[], tuple[str, ...]] = tuple  # removed from the records
    account: Account = field(default_factory=Account)
    worker: int = 0
    timed: bool = False  # count the requests' times in the live counters
    # twice a second, once with what is in flight; a returned reason ends the run
    flush: Callable[[Note | None], str | None] = lambda _: None
    answer: Callable[[], Answer] = Answer  # the parser of an answer
    keep: Callable[[Exchange], None] | None = None  # gets every exchange with its answer's text
    by_piece: ByPiece | None = None  # counts tokens that the server does not report
