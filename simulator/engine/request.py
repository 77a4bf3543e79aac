"""What an engine is asked for and what one of its steps did."""

import copy
import math
from collections.abc import Hashable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, Self

NOT_JOINED = -2


@dataclass(slots=True, eq=False)
class Request:
    """One request. The engine fills the times, the tokens taken from its prefix cache, and the counts."""

    prompt_tokens: int
    output_tokens: int
    _: KW_ONLY
    # Names of the leading full blocks of prompt and answer; equal: the same.
    block_hashes: Sequence[Hashable] = ()
    session: Hashable = None  # for sticky routing
    adapter: str | None = None  # a LoRA's name
    deadline_s: float = math.inf  # instant, for the policy "deadline"
    ready_tokens: int = (
        0  # leading prompt tokens whose KV entries come with it, from a prefill engine
    )
    arrival_s: float = 0.0
    first_token_s: float | None = None
    finish_s: float | None = None
    cached_tokens: int = 0  # of the prompt, found in the prefix cache at first admission
    first_step: int = -1  # number of the step that gave the first token
    # Ticks count the steps in which decoding requests advance (all steps, under the policy fcfs).
    first_tick: int = -1
    last_tick: int = -1  # while decoding: the tick that will give the last token
    generated_tokens: int = 0  # up to the last prefill; decode steps since then are not counted in
    preemptions: int = 0
    # If preempted: for each stretch the time of its first token, and its (first, last) ticks.
    segments: list[tuple[float, int, int]] | None = None
    token_s: list[float] | None = None  # under speculative decoding: the time of each token
    aborted: bool = False
    place: int = -1  # number of the engine that it was given to
    # Where prefill is apart from decoding: what an engine has of this request now; and of which it is a part.
    part: Self | None = None
    whole: Self | None = None
    _join_tick: int = NOT_JOINED
    _join_kv_tokens: int = 0
    _join_s: float = 0.0
    _held_blocks: list[Hashable] | None = None
    _registered_blocks: int = 0

    def split(self, prompt_tokens: int, output_tokens: int, ready_tokens: int = 0) -> Self:
        """The part of this request, which no engine has, that one engine gets now."""
        part = copy.copy(self)
        part.prompt_tokens, part.output_tokens, part.ready_tokens = (
            prompt_tokens,
            output_tokens,
            ready_tokens,
        )
        part.first_token_s, part.place, part.part, part.whole = None, -1, None, self
        if ready_tokens:
            part.block_hashes = ()
        self.part = part
        return part


class StepResult(NamedTuple):
    """One planned iteration; its tokens are there at `end_s`."""

    number: int
    start_s: float
    end_s: float
    decoding: int  # requests that get tokens by decoding
    prefill_tokens: int
    prompts: list[Request]  # their prefill ended here: they get a token too
    finished: list[Request]
    advanced: bool = True  # False: prompts alone were computed, decoding requests waited
