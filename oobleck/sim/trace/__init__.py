"""Failure traces: made, converted, read, and changed."""

from __future__ import annotations

from .convert import FORMATS, convert, detect_format
from .facts import facts_of
from .generate import PRESETS, FailSlow, FailureModel, generate
from .resize import with_nodes
from .spares import with_spares
from .trace import (
    AgentCrashed,
    AgentFrozen,
    ForkServerCrashed,
    Frozen,
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
    Trace,
    TraceEvent,
    WorkerCrashed,
    event_kind,
    trace_from_json,
    trace_to_json,
)

__all__ = [
    "FORMATS",
    "PRESETS",
    "AgentCrashed",
    "AgentFrozen",
    "FailSlow",
    "FailureModel",
    "ForkServerCrashed",
    "Frozen",
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
    "event_kind",
    "facts_of",
    "generate",
    "trace_from_json",
    "trace_to_json",
    "with_nodes",
    "with_spares",
]
