"""How the server shows its answers: what a gateway or another engine in front of it would change."""

import math
from typing import Literal, TypeVar

import msgspec

from simulator import SimulatorError

T = TypeVar("T")


class Face(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the HTTP face; the defaults are vLLM's."""

    adapters: tuple[str, ...] = ()  # names that are served as models beside the base model
    natural_tokens: float | None = None  # mean length at which answers end by themselves; None: at the limit
    chunk_tokens: int = 1  # the first token comes alone, then so many in one chunk (vLLM's stream_interval)
    flush_s: float = (
        0.0  # chunks are held back and written at multiples of this, as a gateway does; 0: at once
    )
    early_role: bool = False  # the role chunk comes before the prefill, not with the first token
    reasoning_share: float = 0.0  # of a chat's tokens, ahead of the answer
    reasoning_field: Literal["reasoning", "reasoning_content"] = "reasoning"
    usage: Literal["full", "end", "none"] = "full"  # end: no continuous_usage_stats; none: never in a stream
    done: bool = True  # whether a stream ends with [DONE]
    prompt_details: bool = False  # usage has prompt_tokens_details (vLLM: --enable-prompt-tokens-details)
    control: bool = False  # whether /control/faults is there

    def __post_init__(self) -> None:
        if self.natural_tokens is not None and not 1 <= self.natural_tokens < math.inf:
            raise SimulatorError(f"natural_tokens must be at least 1, got {self.natural_tokens}")
        if self.chunk_tokens < 1:
            raise SimulatorError(f"chunk_tokens must be at least 1, got {self.chunk_tokens}")
        if not 0 <= self.flush_s <= 60:
            raise SimulatorError(f"flush_s must be in [0, 60], got {self.flush_s}")
        if not 0 <= self.reasoning_share <= 1:
            raise SimulatorError(f"reasoning_share must be in [0, 1], got {self.reasoning_share}")
        if len(set(self.adapters)) < len(self.adapters) or not all(self.adapters):
            raise SimulatorError(f"adapters must have different names, got {', '.join(self.adapters)}")


def read_options(text: bytes, kind: type[T], name: str) -> T:
    """A struct of options from JSON. Raises SimulatorError with the place and what is wrong there."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        raise cause if isinstance(cause, SimulatorError) else SimulatorError(f"{name}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SimulatorError(f"{name}: not JSON: {error}") from error
