"""Failure traces: generation, conversion, files, and changes of size."""

from __future__ import annotations

from .convert import FORMATS, UNITS, convert, detect_format
from .events import (
    AgentCrashed,
    AgentFrozen,
    ForkServerCrashed,
    Frozen,
    Gone,
    Healed,
    Joined,
    Lost,
    MasterCrashed,
    MasterFrozen,
    NodeEvent,
    Noticed,
    Partitioned,
    Slowed,
    Thawed,
    TraceEvent,
    WorkerCrashed,
)
from .facts import facts_of
from .generate import PRESETS, FailSlow, FailureModel, generate
from .redraw import model_of
from .resize import of_nodes, with_kinds, with_nodes, with_spares
from .state import ClusterState
from .trace import Trace
from .trace_file import trace_from_json, trace_to_json

__all__ = [
    "FORMATS",
    "PRESETS",
    "UNITS",
    "AgentCrashed",
    "AgentFrozen",
    "ClusterState",
    "FailSlow",
    "FailureModel",
    "ForkServerCrashed",
    "Frozen",
    "Gone",
    "Healed",
    "Joined",
    "Lost",
    "MasterCrashed",
    "MasterFrozen",
    "NodeEvent",
    "Noticed",
    "Partitioned",
    "Slowed",
    "Thawed",
    "Trace",
    "TraceEvent",
    "WorkerCrashed",
    "convert",
    "detect_format",
    "facts_of",
    "generate",
    "model_of",
    "of_nodes",
    "trace_from_json",
    "trace_to_json",
    "with_kinds",
    "with_nodes",
    "with_spares",
]
