"""Reconfiguration: the moves that make a plan whole again, and the fewest bytes that they cost."""

from __future__ import annotations

from .changes import Changes
from .living_nodes import LivingNodes, look_at
from .matching import Position, match_nodes
from .outcome import Outcome, beats, decision_of
from .reconfigure import reconfigure
from .wording import UNCHANGED, detail_of

__all__ = [
    "UNCHANGED",
    "Changes",
    "LivingNodes",
    "Outcome",
    "Position",
    "beats",
    "decision_of",
    "detail_of",
    "look_at",
    "match_nodes",
    "reconfigure",
]
