"""Count the tokens of each chunk locally where the server does not report them."""

from collections.abc import Callable, Sequence

from ampacity.loadgen.receive.exchange import Exchange

ByPiece = Callable[[Sequence[str]], list[int]]
SAME_SHARE, SAME_TOKENS = 0.02, 2  # tolerance: an end token, a bare space


def count_tokens(exchange: Exchange, by_piece: ByPiece) -> None:
    """Fill ``chunk_tokens`` of an ended answer, and its total where the server gave none.

    Left alone: counts of the server, answers with a chunk without text (tool calls), and answers
    whose total by the server is another one: then it has another vocabulary.
    """
    record, pieces = exchange.record, exchange.pieces()
    if record.chunk_tokens is not None or not pieces or len(pieces) != len(record.chunk_at_us):
        return
    counts = by_piece([text for _, text in pieces])
    total = sum(counts)
    if record.token_source not in (None, "chunks"):
        if abs(total - (record.output_tokens or 0)) > max(SAME_TOKENS, SAME_SHARE * total):
            return
    else:
        record.output_tokens, record.token_source = total, "tokenizer"
        reasoned = sum(
            n for n, (kind, _) in zip(counts, pieces, strict=True) if kind == "reasoning"
        )
        record.reasoning_tokens = reasoned or record.reasoning_tokens
    record.chunk_tokens = counts
