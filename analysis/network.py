"""The network's round trip beside the TTFT that holds it: shown, never taken out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def network_share(
    endpoint: Mapping[str, Any], stages: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return ``network`` of summary.json.

    The round trips of the probe (seconds) and what part of TTFT they are. ``share``: of the lowest
    TTFT p50 of a stage, in which the least queues. Null with a reason where either is unknown.
    """
    found: dict[str, Any] = {name: endpoint.get(name) for name in ("connect_s", "request_s")}
    ttfts_s = [ttft for s in stages if (ttft := (s.get("ttft_s") or {}).get("p50"))]
    found |= {"ttft_p50_s": min(ttfts_s, default=None), "share": None, "share_reason": None}
    if found["request_s"] is None:
        return found | {"share_reason": "the probe measured no round trip"}
    if not ttfts_s:
        return found | {"share_reason": "no stage has a TTFT"}
    return found | {"share": min(found["request_s"] / min(ttfts_s), 1.0)}
