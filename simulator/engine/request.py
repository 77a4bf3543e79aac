"""A request to an engine, and the result of one of its steps."""

import copy
from collections.abc import Hashable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, Self

NOT_JOINED = -2


@dataclass(slots=True, eq=False)
class Request:
    """One request. The engine fills in times and counts."""

    prompt_tokens: int
    output_tokens: int
    _: KW_ONLY
    # Names of the full blocks of prompt and answer: equal names mean equal blocks up to there.
    block_hashes: Sequence[Hashable] = ()
    session: Hashable = None  # for sticky routing
    adapter: str | None = None  # a LoRA's name
    ready_tokens: int = 0  # prompt tokens whose KV entries were copied from a prefill engine
    arrival_s: float = 0.0
    first_token_s: float | None = None
    finish_s: float | None = None
    cached_tokens: int = 0  # of the prompt, found in the prefix cache at first admission
    first_step: int = -1  # number of the step that gave the first token
    # Ticks count the steps in which decoding requests advance (all steps, under the policy fcfs).
    first_tick: int = -1
    last_tick: int = -1  # while decoding: the tick that will give the last token
    generated_tokens: int = 0  # up to the last prefill, without decode steps since then
    preemptions: int = 0
    # If preempted: for each stretch the time of its first token, and its (first, last) ticks.
    segments: list[tuple[float, int, int]] | None = None
    token_s: list[float] | None = None  # under speculative decoding: the time of each token
    aborted: bool = False
    place: int = -1  # number of the engine that serves it
    # With prefill on other engines: the part that an engine has now, and the whole of a part.
    part: Self | None = None
    whole: Self | None = None
    _join_tick: int = NOT_JOINED
    _join_kv_tokens: int = 0
    _join_s: float = 0.0
    _held_blocks: list[Hashable] | None = None
    _registered_blocks: int = 0

    def split(self, prompt_tokens: int, output_tokens: int, ready_tokens: int = 0) -> Self:
        """Return the part of this request that one engine gets now."""
        part = copy.copy(self)
        part.prompt_tokens, part.output_tokens = prompt_tokens, output_tokens
        part.ready_tokens = ready_tokens
        part.first_token_s, part.place, part.part, part.whole = None, -1, None, self
        if ready_tokens:
            part.block_hashes = ()
        self.part = part
        return part


class StepResult(NamedTuple):
    """One step; its tokens appear at `end_s`."""

    number: int
    start_s: float
    end_s: float
    decoding: int  # requests that get tokens by decoding
    prefill_tokens: int
    prompts: list[Request]  # their prefill ends here, which gives a token too
    finished: list[Request]
    advanced: bool = True  # False: only prompts were computed
