"""Request classes: lengths, arrivals, models and cancellation of each kind of user."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.lengths.parse import Lengths, fit_copula


@dataclass(frozen=True)
class Cancel:
    """A ``share`` of requests that the client cancels after milliseconds or output tokens."""

    share: float
    after_ms: Lengths | None = None
    after_tokens: Lengths | None = None

    def describe(self) -> dict[str, Any]:
        """Return a JSON-able description."""
        name, given = (
            ("after_ms", self.after_ms) if self.after_ms else ("after_tokens", self.after_tokens)
        )
        return {"share": self.share, name: given.describe() if given else None}


@dataclass(frozen=True)
class Client:
    """One of many clients: its ``weight`` in the traffic, its lengths and arrivals."""

    weight: float
    input_tokens: Lengths
    output_tokens: Lengths
    arrivals: str | None = None  # None: the workload's


@dataclass(frozen=True)
class RequestClass:
    """One kind of request; ``weight`` is relative to the other classes.

    ``body()`` is merged over the run's extra body, ``headers`` are sent after the run's (values are
    secrets: only names are recorded), and ``models[i]`` is the request's ``model``, drawn with
    ``model_weights`` (``Schedule.model_index``). No models: the run's.
    """

    name: str
    weight: float
    input_tokens: Lengths
    output_tokens: Lengths
    correlation: float = 0.0  # Spearman's, of input and output
    arrivals: str | None = None  # None: the workload's
    clients: tuple[Client, ...] = ()
    models: tuple[str, ...] = ()
    model_weights: tuple[float, ...] = ()
    extra_body: dict[str, Any] = field(default_factory=dict)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    priority: int | None = None  # vLLM's and SGLang's request field
    slos: tuple[str, ...] = ()  # as given, such as "ttft_p99=2s"
    cancel: Cancel | None = None

    def __post_init__(self) -> None:
        for _, client in self.senders(1.0):  # the correlation must be within reach of each
            fit_copula(client.input_tokens, client.output_tokens, self.correlation)

    def senders(self, share: float) -> list[tuple[float, Client]]:
        """Return (part of ``share``, client) of each client, or of the class as the only one."""
        clients = self.clients or (
            Client(1.0, self.input_tokens, self.output_tokens, self.arrivals),
        )
        among = sum(client.weight for client in clients)
        return [(share * client.weight / among, client) for client in clients]

    def body(self) -> dict[str, Any]:
        """Return the request fields of this class: sampling parameters and priority."""
        return self.extra_body | ({} if self.priority is None else {"priority": self.priority})

    def describe(self) -> dict[str, Any]:
        """Return an item of ``workload.classes`` in run.json."""
        return {
            "name": self.name,
            "weight": self.weight,
            "input_tokens": self.input_tokens.describe(),
            "output_tokens": self.output_tokens.describe(),
            "correlation": self.correlation,
            "arrivals": self.arrivals,
            "clients": len(self.clients),
            "models": list(self.models),
            "model_weights": list(self.model_weights),
            "extra_body": self.body(),
            "headers": [name for name, _ in self.headers],
            "slos": list(self.slos),
            "cancel": self.cancel.describe() if self.cancel else None,
        }


def zipf_weights(n: int, exponent: float) -> tuple[float, ...]:
    """Return n shares, the k-th proportional to k^-exponent, that sum to 1."""
    weights = [k**-exponent for k in range(1, n + 1)]
    total = math.fsum(weights)
    return tuple(w / total for w in weights)


def draw_index(
    weights: Sequence[float] | NDArray[np.float64], u: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Return int64[n]: the index into ``weights`` (relative) for each uniform number in ``u``."""
    edges = np.cumsum(weights)
    found: NDArray[np.int64] = np.searchsorted(edges, u * edges[-1], side="right").astype(np.int64)
    return np.minimum(found, np.int64(len(weights) - 1))
