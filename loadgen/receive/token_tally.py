"""Token counts of one answer as the server reports them: by usage, by chunk, or not at all."""

from operator import sub
from typing import cast

from ampacity.loadgen.receive.chunks import Usage, token_count, token_detail


class TokenTally:
    """Collects the counts of one answer. ``chunk_counts`` has an entry per token-bearing chunk."""

    cumulative = False  # chunk_counts are the server's running totals
    usage: Usage | None = None  # the latest
    input_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    output: tuple[int | None, str | None] = None, None  # tokens and their source, after ``finish``

    def __init__(self) -> None:
        self.chunk_counts: list[int | None] = []
        self.totals: list[int] = []  # completion_tokens of chunks without text

    def add_usage(self, usage: Usage, *, has_text: bool) -> int | None:
        """Take the usage of one chunk; return its running total, if it is one beside text."""
        if not has_text or self.usage is None:
            self._read(usage, has_text)
        self.usage = usage  # of running totals only the latest is read in full, by ``finish``
        total = token_count(usage.completion_tokens) if has_text else None
        if total:
            self.cumulative = True
        return total or None

    def finish(self, finishes: int) -> None:
        """End the answer, which had this many finish reasons: set ``output``."""
        if self.usage is not None:
            self._read(self.usage, has_text=True)
        self.output = self._output_tokens(finishes)

    def _read(self, usage: Usage, has_text: bool) -> None:
        total = token_count(usage.completion_tokens)
        if total is not None and not has_text:
            self.totals.append(total)
        self.input_tokens = token_count(usage.prompt_tokens) or self.input_tokens
        self.cached_tokens = token_detail(
            usage.prompt_tokens_details, "cached_tokens", self.cached_tokens
        )
        reasoning = token_count(usage.reasoning_tokens)
        before = self.reasoning_tokens if reasoning is None else reasoning
        self.reasoning_tokens = token_detail(
            usage.completion_tokens_details, "reasoning_tokens", before
        )

    def tokens_so_far(self) -> int:
        """Return the server's running total, or one token for each chunk."""
        total = self.chunk_counts[-1] if self.cumulative else None
        return total or len(self.chunk_counts)

    def per_chunk(self) -> list[int] | None:
        """Return the tokens in each token-bearing chunk, or None where the server does not say."""
        if not self.chunk_counts or None in self.chunk_counts:
            return None
        counts = cast("list[int]", self.chunk_counts)
        if not self.cumulative:
            most = max(self.totals, default=0)
            return None if 0 < most < sum(counts) else counts  # usage is believed
        gains = list(map(sub, counts, [0, *counts[:-1]]))
        return gains if min(gains) >= 1 else None  # totals that do not rise are no counts

    def _output_tokens(self, finishes: int) -> tuple[int | None, str | None]:
        """Return (tokens generated, token_source). A usage of 0 beside text is not believed."""
        last = self.chunk_counts[-1] if self.chunk_counts else None
        if self.totals:
            # with n > 1 some servers send one total for each choice, others one for all; the same
            # or a growing total may also come several times for one choice
            one_per_choice = len(self.totals) == finishes and not self.cumulative
            total = sum(self.totals) if one_per_choice else self.totals[-1]
            if self.cumulative:  # a stream may break off before its last usage
                total = max(total, last or 0)
            if total >= 1 or not self.chunk_counts:
                return total, "usage_per_chunk" if self.cumulative else "usage"
        per_chunk = self.per_chunk()
        if self.cumulative and last:
            return last, "usage_per_chunk" if per_chunk and len(per_chunk) > 1 else "usage"
        if per_chunk is not None:
            return sum(per_chunk), "logprobs"
        return (len(self.chunk_counts), "chunks") if self.chunk_counts else (None, None)
