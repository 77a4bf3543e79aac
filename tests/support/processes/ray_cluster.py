"""A Ray cluster of several nodes on this machine, each with processes of its own."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NODE = {"object_store_memory": 100 << 20}


@contextmanager
def ray_cluster(nodes: int, cpus: int) -> Iterator[Any]:
    """Start a head without CPUs and ``nodes`` with ``cpus`` each; ``address`` is the cluster's.

    The nodes do not find this tree by PYTHONPATH."""
    from ray.cluster_utils import Cluster

    ours = os.environ.pop("PYTHONPATH", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        head = {"num_cpus": 0, "include_dashboard": False, **NODE}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(nodes):
            add_node(cluster, cpus)
    if ours is not None:
        os.environ["PYTHONPATH"] = ours
    try:
        yield cluster
    finally:
        cluster.shutdown()


def add_node(cluster: Any, cpus: int) -> Any:
    """Add a node and return it."""
    return cluster.add_node(num_cpus=cpus, wait=True, **NODE)


def actors() -> dict[int, int]:
    """Return {pid: parent} of the worker processes that run one of our actors."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().startswith(b"ray::Actor"):
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                found[int(folder.name)] = int(stat[1])
        except OSError:
            continue
    return found
