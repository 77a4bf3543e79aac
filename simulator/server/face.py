"""Options of the HTTP answers: differences of other engines, or of a gateway in front."""

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from ampacity.simulator import SimulatorError

T = TypeVar("T")


HELP = {
    "adapters": "LoRA adapters, served as models of these names.",
    "natural_tokens": "Mean answer length in tokens (geometric). Default: always max_tokens.",
    "chunk_tokens": "Tokens per chunk, after the first (vLLM's stream_interval).",
    "flush_ms": "Buffer chunks and write them every so many ms, as a gateway does.",
    "early_role": "Send the role chunk before prefill instead of with the first token.",
    "reasoning_share": "Share of a chat's output tokens that are reasoning, before the answer.",
    "reasoning_field": "Field with the reasoning text.",
    "usage": "Usage in streams: full (as requested), end (no continuous stats), none.",
    "done": "End streams with [DONE].",
    "prompt_tokens_details": "Report cached_tokens in the usage.",
    "control": "Allow POST /control/faults, which replaces the fault plan at run time.",
}


class Face(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the answers; the defaults are vLLM's. Ranges are checked when read from JSON."""

    adapters: tuple[str, ...] = ()
    natural_tokens: Annotated[float, Meta(ge=1)] | None = None
    chunk_tokens: Annotated[int, Meta(ge=1)] = 1
    flush_ms: Annotated[float, Meta(ge=0, le=60_000)] = 0.0
    early_role: bool = False
    reasoning_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    reasoning_field: Literal["reasoning", "reasoning_content"] = "reasoning"
    usage: Literal["full", "end", "none"] = "full"
    done: bool = True
    prompt_tokens_details: bool = False
    control: bool = False

    def __post_init__(self) -> None:
        if len(set(self.adapters)) < len(self.adapters) or not all(self.adapters):
            raise SimulatorError(
                f"adapters must have different names, got {', '.join(self.adapters)}"
            )


def read_options(text: bytes, kind: type[T], name: str) -> T:
    """Decode a struct of options from JSON. Raises SimulatorError with the field and the cause."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        raise (
            cause if isinstance(cause, SimulatorError) else SimulatorError(f"{name}: {error}")
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SimulatorError(f"{name}: not JSON: {error}") from error
