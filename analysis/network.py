"""The network's round trip as a share of TTFT: shown, never subtracted."""

from collections.abc import Mapping, Sequence
from typing import Any

from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.contract.summary import Network


def network_share(endpoint: Mapping[str, Any], stages: Sequence[Stage]) -> Network:
    """Return the probe's round trips in seconds and their share of TTFT.

    ``share``: of the lowest TTFT p50 of a stage, which has the least queueing. Null with a reason
    where either is unknown, and where the smallest request took longer than a first token: then
    the server's own work is most of it.
    """
    request_s, share, reason = endpoint.get("request_s"), None, None
    ttft_s = min((p50 for s in stages if (p50 := s.ttft_s.p50)), default=None)
    if request_s is None:
        reason = "the probe measured no round trip"
    elif ttft_s is None:
        reason = "no stage has a TTFT"
    elif request_s > ttft_s:
        reason = (
            "the smallest request, for the list of models, takes longer than a first token: the "
            "server's work is in it"
        )
    else:
        share = request_s / ttft_s
    return Network(
        connect_s=endpoint.get("connect_s"),
        request_s=request_s,
        ttft_p50_s=ttft_s,
        share=share,
        share_reason=reason,
    )
