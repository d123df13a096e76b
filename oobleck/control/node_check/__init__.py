"""Node checks: what to measure next, and which node or link is at fault by the results."""

from __future__ import annotations

from .gpus import (
    ClockLimit,
    GpuFacts,
    GpuReading,
    NvmlState,
    fault_of,
    findings_about,
    sentences_of,
    slowed_by,
)
from .messages import (
    MeasureAlone,
    MeasurePair,
    NodeFacts,
    PairDone,
    PairValue,
    ProbeAnswer,
    ProbeFailed,
    ProbeRequest,
    SoloDone,
)
from .report import CheckedNode, CheckReport, misfit, warnings_about
from .rounds import CheckRound, Health, NodeCheck, NodeVerdict, PairResult, SoloResult

__all__ = [
    "CheckReport",
    "CheckRound",
    "CheckedNode",
    "ClockLimit",
    "GpuFacts",
    "GpuReading",
    "Health",
    "MeasureAlone",
    "MeasurePair",
    "NodeCheck",
    "NodeFacts",
    "NodeVerdict",
    "NvmlState",
    "PairDone",
    "PairResult",
    "PairValue",
    "ProbeAnswer",
    "ProbeFailed",
    "ProbeRequest",
    "SoloDone",
    "SoloResult",
    "fault_of",
    "findings_about",
    "misfit",
    "sentences_of",
    "slowed_by",
    "warnings_about",
]
