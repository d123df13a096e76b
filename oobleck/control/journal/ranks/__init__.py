"""The journal of a run of a script: its entries, and what is shown of them."""

from __future__ import annotations

from .entries import (
    GenerationCause,
    GenerationEnded,
    GenerationFormed,
    GenerationRuns,
    HungRank,
    NodeRanks,
    RankDown,
    RanksHung,
    ScriptStarted,
)
from .view import RanksView

__all__ = [
    "GenerationCause",
    "GenerationEnded",
    "GenerationFormed",
    "GenerationRuns",
    "HungRank",
    "NodeRanks",
    "RankDown",
    "RanksHung",
    "RanksView",
    "ScriptStarted",
]
