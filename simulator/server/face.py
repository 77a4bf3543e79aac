"""How the server shows its answers: what a gateway or another engine in front of it would change."""

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from ampacity.simulator import SimulatorError

T = TypeVar("T")


class Face(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the HTTP face; the defaults are vLLM's. Ranges are checked where it is read from JSON."""

    adapters: Annotated[
        tuple[str, ...], Meta(description="LoRA adapters, served as models of these names.")
    ] = ()
    natural_tokens: Annotated[
        Annotated[float, Meta(ge=1)] | None,
        Meta(
            description="Mean length at which answers end by themselves (geometric). Default: they run to max_tokens."
        ),
    ] = None
    chunk_tokens: Annotated[
        int,
        Meta(ge=1, description="Tokens in one chunk, after the first (vLLM's stream_interval)."),
    ] = 1
    flush_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=60_000,
            description="Hold chunks back and write them at multiples of this, as a gateway.",
        ),
    ] = 0.0
    early_role: Annotated[
        bool, Meta(description="Send the role chunk before the prefill, not with the first token.")
    ] = False
    reasoning_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Share of a chat's tokens that are reasoning, ahead of the answer.",
        ),
    ] = 0.0
    reasoning_field: Annotated[
        Literal["reasoning", "reasoning_content"], Meta(description="Where reasoning stands.")
    ] = "reasoning"
    usage: Annotated[
        Literal["full", "end", "none"],
        Meta(
            description="In streams: full as asked for; end without continuous_usage_stats; none."
        ),
    ] = "full"
    done: Annotated[bool, Meta(description="End streams with [DONE].")] = True
    prompt_tokens_details: Annotated[bool, Meta(description="Say cached_tokens in the usage.")] = (
        False
    )
    control: Annotated[
        bool, Meta(description="Let POST /control/faults change the plan of faults while it runs.")
    ] = False

    def __post_init__(self) -> None:
        if len(set(self.adapters)) < len(self.adapters) or not all(self.adapters):
            raise SimulatorError(
                f"adapters must have different names, got {', '.join(self.adapters)}"
            )


def read_options(text: bytes, kind: type[T], name: str) -> T:
    """A struct of options from JSON. Raises SimulatorError with the place and what is wrong there."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        raise (
            cause if isinstance(cause, SimulatorError) else SimulatorError(f"{name}: {error}")
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SimulatorError(f"{name}: not JSON: {error}") from error
