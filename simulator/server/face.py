"""Options of the HTTP answers: differences of other engines, or of a gateway in front."""

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from ampacity.simulator import SimulatorError

T = TypeVar("T")


class Face(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the answers; the defaults are vLLM's. Ranges are checked when read from JSON."""

    adapters: Annotated[
        tuple[str, ...], Meta(description="LoRA adapters, served as models of these names.")
    ] = ()
    natural_tokens: Annotated[
        Annotated[float, Meta(ge=1)] | None,
        Meta(description="Mean answer length in tokens (geometric). Default: always max_tokens."),
    ] = None
    chunk_tokens: Annotated[
        int,
        Meta(ge=1, description="Tokens per chunk, after the first (vLLM's stream_interval)."),
    ] = 1
    flush_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=60_000,
            description="Buffer chunks and write them every so many ms, as a gateway does.",
        ),
    ] = 0.0
    early_role: Annotated[
        bool,
        Meta(description="Send the role chunk before prefill instead of with the first token."),
    ] = False
    reasoning_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Share of a chat's output tokens that are reasoning, before the answer.",
        ),
    ] = 0.0
    reasoning_field: Annotated[
        Literal["reasoning", "reasoning_content"],
        Meta(description="Field with the reasoning text."),
    ] = "reasoning"
    usage: Annotated[
        Literal["full", "end", "none"],
        Meta(description="Usage in streams: full (as requested), end (no continuous stats), none."),
    ] = "full"
    done: Annotated[bool, Meta(description="End streams with [DONE].")] = True
    prompt_tokens_details: Annotated[
        bool, Meta(description="Report cached_tokens in the usage.")
    ] = False
    control: Annotated[
        bool,
        Meta(description="Allow POST /control/faults, which replaces the fault plan at run time."),
    ] = False

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
