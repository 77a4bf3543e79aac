"""What an engine is asked for and what one of its steps did."""

import copy
import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple, Self

NOT_JOINED = -2


class Request:
    """One request. The engine fills the times, the tokens taken from its prefix cache, and the counts."""

    __slots__ = (
        "_held_blocks",
        "_join_kv_tokens",
        "_join_s",
        "_join_tick",
        "_registered_blocks",
        "aborted",
        "adapter",
        "arrival_s",
        "block_hashes",
        "cached_tokens",
        "deadline_s",
        "finish_s",
        "first_step",
        "first_tick",
        "first_token_s",
        "generated_tokens",
        "last_tick",
        "output_tokens",
        "part",
        "place",
        "preemptions",
        "prompt_tokens",
        "ready_tokens",
        "segments",
        "session",
        "token_s",
        "whole",
    )

    def __init__(
        self,
        prompt_tokens: int,
        output_tokens: int,
        *,
        block_hashes: Sequence[Hashable] = (),
        session: Hashable = None,
        adapter: str | None = None,
        deadline_s: float = math.inf,
        ready_tokens: int = 0,
    ) -> None:
        """block_hashes: names of the leading full blocks of prompt and answer; equal names, equal contents.

        deadline_s: instant for the policy "deadline"; ready_tokens: leading prompt tokens whose KV entries
        come with the request (from a prefill engine); session: for sticky routing; adapter: a LoRA's name.
        """
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.block_hashes = block_hashes
        self.session = session
        self.adapter = adapter
        self.deadline_s = deadline_s
        self.ready_tokens = ready_tokens
        self.arrival_s = 0.0
        self.first_token_s: float | None = None
        self.finish_s: float | None = None
        self.cached_tokens = 0  # of the prompt, found in the prefix cache at first admission
        self.first_step = -1  # number of the step that gave the first token
        # Ticks count the steps in which decoding requests advance (all steps, under the policy fcfs).
        self.first_tick = -1
        self.last_tick = -1  # while decoding: the tick that will give the last token
        self.generated_tokens = 0  # up to the last prefill; decode steps since then are not counted in
        self.preemptions = 0
        # If preempted: for each stretch the time of its first token, and its (first, last) ticks.
        self.segments: list[tuple[float, int, int]] | None = None
        self.token_s: list[float] | None = None  # under speculative decoding: the time of each token
        self.aborted = False
        self.place = -1  # number of the engine that it was given to
        # Where prefill is apart from decoding: what an engine has of this request now; and of which it is a part.
        self.part: Self | None = None
        self.whole: Self | None = None
        self._join_tick = NOT_JOINED
        self._join_kv_tokens = 0
        self._join_s = 0.0
        self._held_blocks: list[Hashable] | None = None
        self._registered_blocks = 0

    def split(self, prompt_tokens: int, output_tokens: int, ready_tokens: int = 0) -> Self:
        """The part of this request, which no engine has, that one engine gets now."""
        part = copy.copy(self)
        part.prompt_tokens, part.output_tokens, part.ready_tokens = prompt_tokens, output_tokens, ready_tokens
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
    preempted: list[Request]
    advanced: bool = True  # False: prompts alone were computed, decoding requests waited
