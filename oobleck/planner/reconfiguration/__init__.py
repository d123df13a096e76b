"""Reconfiguration: the weighing of moves that make a plan whole again, for the fewest bytes."""

from __future__ import annotations

from .living_nodes import Changes, LivingNodes
from .reconfigure import Move, Propose, reconfigure
from .wording import UNCHANGED, pipelines_named

__all__ = ["UNCHANGED", "Changes", "LivingNodes", "Move", "Propose", "pipelines_named", "reconfigure"]
