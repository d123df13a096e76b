"""Cluster mode: the real master and agents on virtual nodes, links and workers, in virtual time."""

from __future__ import annotations

from .determinism import VirtualTime
from .gate import Gate
from .run import ClusterRun, run_cluster, run_scripts
from .tempo import Delays, Tempo
from .workers import VirtualWorkerHost, WorkerProcess
from .world import World

__all__ = [
    "ClusterRun",
    "Delays",
    "Gate",
    "Tempo",
    "VirtualTime",
    "VirtualWorkerHost",
    "WorkerProcess",
    "World",
    "run_cluster",
    "run_scripts",
]
