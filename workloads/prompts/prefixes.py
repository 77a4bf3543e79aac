"""Prefix sharing by design: what prompts share, and what an infinite prefix cache would hit.

A shared prefix is a chain of segments. A segment is an endless text with an id; a prompt has the
leading tokens of each of its segments, then its own text. The same id is the same text within a
run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.classes import draw_index
from ampacity.workloads.errors import WorkloadError, check_keys, number_between
from ampacity.workloads.lengths.parse import Lengths, parse_lengths

BLOCK_TOKENS = 16  # vLLM's block: a cache finds whole ones only
OWN_TOKENS = 8  # of a prompt stay its own, so that no two are the same
POOL_MAX = 10_000_000
CUT_MAX = 0.03  # of the prompts with a text of a pool may have it cut short before it is said
_STAGE_SHIFT, _POOL_SHIFT = 48, 40  # of a segment's id: stages share nothing, nor do pools

Ints = NDArray[np.int64]


def take_lists(start: Ints, kept: Ints) -> tuple[Ints, Ints]:
    """Return (item indices, starts) of the kept lists; list i is items [start[i], start[i + 1])."""
    length = (start[1:] - start[:-1])[kept]
    new_start = np.concatenate([[0], np.cumsum(length)]).astype(np.int64)
    items = np.arange(new_start[-1]) + np.repeat(start[:-1][kept] - new_start[:-1], length)
    return items, new_start


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """Segments of n prompts, concatenated: prompt i has those at [start[i], start[i + 1])."""

    start: Ints  # int64[n + 1]
    ids: Ints
    tokens: Ints
    note: str | None = None  # where less is shared than was asked for

    def take(self, kept: Ints) -> "SharedPrefixes":
        """Return those of the prompts at these indices."""
        items, start = take_lists(self.start, kept)
        return SharedPrefixes(start, self.ids[items], self.tokens[items], self.note)

    def only(self, kept: NDArray[np.bool_]) -> "SharedPrefixes":
        """Return those of some prompts; the others share nothing."""
        length = np.diff(self.start)
        start = np.concatenate([[0], np.cumsum(np.where(kept, length, 0))]).astype(np.int64)
        there = np.repeat(kept, length)
        return SharedPrefixes(start, self.ids[there], self.tokens[there])

    @classmethod
    def joined(cls, parts: "list[SharedPrefixes]") -> "SharedPrefixes":
        """Return those of the prompts of all parts, one part after the other."""
        lengths = np.concatenate([np.diff(part.start) for part in parts])
        start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        ids, tokens = (np.concatenate([getattr(p, of) for p in parts]) for of in ("ids", "tokens"))
        return cls(start, ids, tokens, parts[0].note)

    def of(self, index: int) -> list[tuple[int, int]]:
        """Return (id, tokens) of the segments of one prompt."""
        here = slice(self.start[index], self.start[index + 1])
        return list(zip(self.ids[here].tolist(), self.tokens[here].tolist(), strict=True))

    def totals(self) -> Ints:
        """Return int64[n]: shared tokens of each prompt."""
        cumulative = np.concatenate([[0], np.cumsum(self.tokens)])
        return np.asarray(cumulative[self.start[1:]] - cumulative[self.start[:-1]], dtype=np.int64)


@dataclass(frozen=True)
class Pool:
    """``size`` texts of one kind, as system prompts, with Zipf popularity (0: uniform)."""

    name: str
    tokens: Lengths
    size: int = 1
    zipf: float = 0.0
    share: float = 1.0  # of the prompts that have one of them

    def draw(self, rng: np.random.Generator, n: int) -> Ints:
        """Return int64[n]: which text each prompt has, -1 for none."""
        weights = np.arange(1, self.size + 1, dtype=np.float64) ** -self.zipf
        chosen = draw_index(weights, rng.random(n))
        return np.asarray(np.where(rng.random(n) < self.share, chosen, -1), dtype=np.int64)


@dataclass(frozen=True)
class Prefixes:
    """Pools in the order of the prompt; with ``cached_share`` one pool, cut to meet that share."""

    pools: tuple[Pool, ...]
    cached_share: float | None = None

    def describe(self) -> dict[str, Any]:
        """Return a JSON-able description."""
        pools = [
            {
                "name": p.name,
                "tokens": p.tokens.describe(),
                "pool": p.size,
                "zipf": p.zipf,
                "share": p.share,
            }
            for p in self.pools
        ]
        return {"pools": pools, "cached_share": self.cached_share}

    def draw(self, input_tokens: Ints, stage: int, rng: np.random.Generator) -> SharedPrefixes:
        """Return the shared prefixes of prompts of these lengths, in the order of their times."""
        room = np.maximum(input_tokens - OWN_TOKENS, 0)
        if self.cached_share is not None:
            return self._meeting(self.cached_share, input_tokens, room, stage, rng)
        return self._chains(room, stage, rng)

    def first_turns(self, n: int, stage: int, rng: np.random.Generator) -> SharedPrefixes:
        """Return uncut shared prefixes of n prompts, whose own text is added to them."""
        return self._chains(np.full(n, np.iinfo(np.int64).max // 2), stage, rng)

    def _chains(self, room: Ints, stage: int, rng: np.random.Generator) -> SharedPrefixes:
        n = len(room)
        ids = np.empty((n, len(self.pools)), dtype=np.int64)
        tokens = np.zeros((n, len(self.pools)), dtype=np.int64)
        for k, pool in enumerate(self.pools):
            chosen = pool.draw(rng, n)
            length = pool.tokens.sample(rng, pool.size)  # a text is as long in every prompt
            ids[:, k] = (stage << _STAGE_SHIFT) + (k << _POOL_SHIFT) + chosen
            tokens[:, k] = np.where(chosen >= 0, length[chosen], 0)
        before = np.concatenate(
            [np.zeros((n, 1), dtype=np.int64), np.cumsum(tokens, axis=1)[:, :-1]], axis=1
        )
        wanted, tokens = tokens, np.clip(room[:, None] - before, 0, tokens)
        there = tokens > 0
        start = np.concatenate([[0], np.cumsum(there.sum(axis=1))]).astype(np.int64)
        return SharedPrefixes(start, ids[there], tokens[there], self._note(wanted, tokens))

    def _note(self, wanted: Ints, given: Ints) -> str | None:
        """Return a note on pools that do not fit; int64[n, pools] of tokens wanted and given."""
        found = []
        for k, pool in enumerate(self.pools):
            due = wanted[:, k] > 0
            if due.any() and (whole := np.mean((given == wanted)[due, k])) < 1 - CUT_MAX:
                medians = (float(np.median(tokens[due, k])) for tokens in (given, wanted))
                found.append(
                    f"{pool.name} fits whole into {whole:.0%} of the prompts that are to have it, "
                    f"{np.mean(given[:, k] > 0):.1%} of all prompts have some of it "
                    f"({pool.share:.1%} are described), "
                    f"p50 {' of '.join(f'{m:,.0f}' for m in medians)} tokens"
                )
        return (
            f"prefixes: {'; '.join(found)}: lengthen input_tokens or shorten the pools"
            if found
            else None
        )

    def _meeting(
        self, target: float, input_tokens: Ints, room: Ints, stage: int, rng: np.random.Generator
    ) -> SharedPrefixes:
        """Return prefixes of one pool's texts, cut so that a cache hits ``target`` of all tokens.

        Less where that is out of reach.
        """
        (pool,) = self.pools
        chosen = pool.draw(rng, len(room))

        def lengths(part: float) -> Ints:
            return np.asarray(np.minimum(np.rint(part * input_tokens).astype(np.int64), room))

        def found(part: float) -> float:
            return float(_longest_before(chosen, lengths(part)).sum()) / max(
                int(input_tokens.sum()), 1
            )

        low, high, note = 0.0, 1.0, None
        if len(room) and (most := found(high)) < target:
            note = (
                f"prefixes: {len(room)} prompts of {pool.size} texts can share {most:.1%} "
                f"of their tokens at most, less than cached_share {target:g}"
            )
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if found(middle) < target else (low, middle)
        tokens = lengths(high)
        start = np.concatenate([[0], np.cumsum(tokens > 0)]).astype(np.int64)
        return SharedPrefixes(
            start, ((stage << _STAGE_SHIFT) + chosen)[tokens > 0], tokens[tokens > 0], note
        )


def _longest_before(chosen: Ints, length: Ints) -> Ints:
    """Return the whole blocks of each prompt that an earlier one with the same text had."""
    order = np.argsort(chosen, kind="stable")
    group, far = chosen[order], np.int64(2**40)
    longest = np.maximum.accumulate(length[order] + group * far) - group * far
    before = np.concatenate([[0], longest[:-1]])
    before[np.concatenate([[True], group[1:] != group[:-1]])] = 0
    found = np.empty_like(length)
    found[order] = np.minimum(before, length[order])
    return found // BLOCK_TOKENS * BLOCK_TOKENS


_BLOCK_MAX = 1 << 15  # the largest block that is looked for


def block_sizes(input_tokens: Ints, start: Ints) -> list[int]:
    """Return the block sizes by which most prompts have ceil, or else floor, of n / size ids.

    [] where none fits more than half of those with ids. The first of equally good ones is the
    power of two, as engines have them, else the least.
    """
    count = np.diff(start)
    n, count = input_tokens[count > 0], count[count > 0]
    several = np.maximum(count - 1, 1)
    upper = np.where(count > 1, (n - 1) // several, _BLOCK_MAX)
    best, most = list[int](), len(n) // 2
    for low, high in ((-(-n // count), upper), (n // (count + 1) + 1, n // count)):
        fits = low <= np.minimum(high, _BLOCK_MAX)
        steps = np.bincount(low[fits], minlength=_BLOCK_MAX + 2)
        ends = np.bincount(np.minimum(high, _BLOCK_MAX)[fits] + 1, minlength=_BLOCK_MAX + 2)
        prompts = np.cumsum(steps - ends)
        prompts[0] = 0
        if prompts.max() > most:
            most = int(prompts.max())
            best = np.flatnonzero(prompts == most).tolist()
            best.sort(key=lambda size: (size & (size - 1) != 0, size))
    return best


def odd_blocks(input_tokens: Ints, start: Ints, size: int) -> Ints:
    """Return indices of prompts whose number of ids is neither floor nor ceil of tokens / size."""
    count = np.diff(start)
    odd = (count > 0) & (count != input_tokens // size) & (count != -(-input_tokens // size))
    return np.flatnonzero(odd)


def prefixes_of_blocks(ids: Ints, start: Ints, input_tokens: Ints, size: int) -> SharedPrefixes:
    """Return the shared prefixes described by Mooncake's ``hash_ids``.

    ids[start[i]:start[i + 1]] are the blocks of prompt i, of ``size`` tokens each but the last,
    which holds the rest. Blocks beyond its end are dropped, tokens without a block are its own.
    """
    count = np.diff(start)
    place = np.arange(len(ids)) - np.repeat(start[:-1], count)
    tokens = np.clip(np.repeat(input_tokens, count) - place * size, 0, size)
    there = tokens > 0
    left = np.add.reduceat(np.append(there, False).astype(np.int64), start[:-1]) * (count > 0)
    return SharedPrefixes(
        np.concatenate([[0], np.cumsum(left)]).astype(np.int64), ids[there], tokens[there]
    )


def infinite_cache(
    input_tokens: Ints,
    shared: SharedPrefixes | None,
    continues: Ints | None = None,
    output_tokens: Ints | None = None,
    block_tokens: int = BLOCK_TOKENS,
) -> Ints:
    """Return int64[n]: tokens of each prompt that an infinite prefix cache would hit, in order.

    A prompt hits the longest prefix that an earlier one had. One that continues a conversation hits
    all of it (with ``output_tokens`` the answer too). At least one token is always computed, and
    only whole blocks are hit.
    """
    n = len(input_tokens)
    found = np.zeros(n, dtype=np.int64)
    if shared is not None:
        found = _match(shared, n)
    if continues is not None:
        known = input_tokens + (0 if output_tokens is None else output_tokens)
        found = np.where(continues >= 0, known[continues], found)
    return np.minimum(found, input_tokens - 1) // block_tokens * block_tokens


def _match(shared: SharedPrefixes, n: int) -> Ints:
    # (node before, segment): [node, longest beginning of it seen]
    seen: dict[tuple[int, int], list[int]] = {}
    found = np.zeros(n, dtype=np.int64)
    start, ids, tokens = shared.start.tolist(), shared.ids.tolist(), shared.tokens.tolist()
    for i in range(n):
        node, matched, whole = 0, 0, True
        for k in range(start[i], start[i + 1]):
            entry = seen.setdefault((node, ids[k]), [len(seen) + 1, 0])
            if whole:
                matched += min(tokens[k], entry[1])
                whole = entry[1] >= tokens[k]
            entry[1] = max(entry[1], tokens[k])
            node = entry[0]
        found[i] = matched
    return found


def parse_prefixes(value: object, where: str) -> Prefixes:
    """Parse a list of pools, or a mapping with cached_share. Raises WorkloadError."""
    if isinstance(value, Mapping) and "cached_share" in value:
        check_keys(value, ("cached_share", "pool", "zipf"), where)
        share = number_between(value["cached_share"], f"{where}: cached_share", 0.0, 0.999)
        rest = {key: item for key, item in value.items() if key != "cached_share"}
        return Prefixes((_pool({"tokens": 1, "name": "documents", **rest}, where),), share)
    if not isinstance(value, list) or not value:
        raise WorkloadError(
            f"{where}: write a list of pools, as "
            "'- {name: system, tokens: 800, pool: 5, zipf: 1}', or 'cached_share: 0.4'"
        )
    return Prefixes(tuple(_pool(item, f"{where}[{k}]") for k, item in enumerate(value)))


def _pool(item: object, where: str) -> Pool:
    if not isinstance(item, Mapping) or "tokens" not in item:
        raise WorkloadError(
            f"{where}: write a pool as '{{name: system, tokens: 800, pool: 5, zipf: 1}}'"
        )
    check_keys(item, ("name", "tokens", "pool", "zipf", "share"), where)
    size = number_between(item.get("pool", 1), f"{where}: pool", 1, POOL_MAX)
    if size != int(size):
        raise WorkloadError(f"{where}: pool is {size:g}: give a whole number of texts")
    return Pool(
        name=str(item.get("name", "prefix")),
        tokens=parse_lengths(item["tokens"], f"{where}: tokens"),
        size=int(size),
        zipf=number_between(item.get("zipf", 0.0), f"{where}: zipf", 0.0, 10.0),
        share=number_between(item.get("share", 1.0), f"{where}: share", 0.0, 1.0),
    )
