"""The findings of the probe."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ampacity.loadgen.probe.diagnosis import Finding
from ampacity.loadgen.probe.network import RoundTrip
from ampacity.loadgen.receive.thinking import InlineThinking
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send.protocols import RequestShape
from ampacity.workloads.prompts.synthetic import PromptMaker
from ampacity.workloads.prompts.tokenizers import Tokenizer

UNKNOWN_TOKENS = 32  # of a chat template that was not measured


@dataclass(frozen=True)
class Served:
    """The server's own metadata, without a generating request."""

    models: tuple[str, ...] = ()
    engine: str | None = None
    engine_version: str | None = None
    server: str | None = None
    max_model_len: int | None = None
    listed: bool = True  # whether /models exists
    trouble: str | None = None  # the answer of a /models that failed
    gateway: str | None = None  # in front of the engine


@dataclass(frozen=True)
class Calibration:
    """The way the server counts prompts: tokens = overhead + own tokens × tokens_per_word."""

    tokens_per_word: float = 1.0
    overhead_tokens: float = 0.0
    measured: bool = False
    method: Literal["tokenize", "usage"] | None = None  # None: not measured
    overhead_error_tokens: float | None = None  # standard error; None: unknown
    # standard deviation of the server's tokens per own token; None: unknown
    word_sd_tokens: float | None = None
    # the words that prompts are made of; None: all
    words: tuple[str, ...] | None = field(default=None, repr=False)

    def prompts(self, tokenizer: Tokenizer, salt: str) -> PromptMaker:
        """Return a maker of prompts of planned lengths as this server counts them."""
        return PromptMaker(
            tokenizer,
            salt,
            tokens_per_word=self.tokens_per_word,
            overhead_tokens=self.overhead_tokens,
            words=self.words,
        )

    def margin_tokens(self, input_tokens: Any) -> Any:
        """Return by how many tokens prompts of planned lengths (number or array) may be longer.

        Three standard errors plus the rounding to whole words; without a measurement, also a chat
        template of UNKNOWN_TOKENS.
        """
        words = np.maximum(input_tokens - self.overhead_tokens, 0.0) / self.tokens_per_word
        sd = self.word_sd_tokens if self.word_sd_tokens is not None else 0.5
        overhead = self.overhead_error_tokens if self.overhead_error_tokens is not None else 2.0
        found = self.tokens_per_word / 2 + 3 * np.hypot(overhead, sd * np.sqrt(words))
        return found if self.measured else found + UNKNOWN_TOKENS

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of run.json: of the words only their number."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return found | {"words": None if self.words is None else len(self.words)}


@dataclass(frozen=True)
class ProbeResult:
    """The findings of the probe."""

    served: Served
    shape: RequestShape
    calibration: Calibration
    record: RequestRecord  # of the last probing request, unloaded
    notes: tuple[str, ...] = field(default=())
    diagnosis: tuple[Finding, ...] = ()  # what an answer of the planned lengths showed
    thinks: InlineThinking | None = None  # in the text of the answer
    keeps_alive: bool | None = None  # its connections; None: not seen
    network: RoundTrip = field(default_factory=RoundTrip)
