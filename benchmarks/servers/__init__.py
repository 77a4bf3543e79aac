"""Servers of the studies, and runs of them as the analysis reads them."""

from benchmarks.servers.laws import SERVERS, Floats, Server, batch_server, limit_at, truth_at
from benchmarks.servers.runs import ORIGIN_NS, Sent, run_of, stage_of, table_of

__all__ = [
    "ORIGIN_NS",
    "SERVERS",
    "Floats",
    "Sent",
    "Server",
    "batch_server",
    "limit_at",
    "run_of",
    "stage_of",
    "table_of",
    "truth_at",
]
