"""Node checks: what to measure next, and which node or link the results name."""

from __future__ import annotations

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
    "Health",
    "MeasureAlone",
    "MeasurePair",
    "NodeCheck",
    "NodeFacts",
    "NodeVerdict",
    "PairDone",
    "PairResult",
    "PairValue",
    "ProbeAnswer",
    "ProbeFailed",
    "ProbeRequest",
    "SoloDone",
    "SoloResult",
    "misfit",
    "warnings_about",
]
