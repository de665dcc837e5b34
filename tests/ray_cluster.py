"""A Ray cluster of several nodes on this machine, by Ray's own utility for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def ray_cluster(*cpus: int) -> Iterator[tuple[Any, list[Any]]]:
    """Start a head without CPUs and a node for each of `cpus`; yields the cluster and the nodes."""
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        for left in (2, 1, 0):  # Ray gives a node 30 s to start, which a busy machine may not do
            cluster = Cluster()
            try:
                cluster.add_node(num_cpus=0, include_dashboard=False)
                nodes = [cluster.add_node(num_cpus=count) for count in cpus]
                break
            except Exception:
                cluster.shutdown()
                if not left:
                    raise
        try:
            yield cluster, nodes
        finally:
            ray.shutdown()
            cluster.shutdown()
