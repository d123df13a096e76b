"""Reconfiguration: the weighing of moves that make a plan whole again, for the fewest bytes."""

from __future__ import annotations

from .domains import Domains
from .living_nodes import Changes, LivingNodes
from .placing import Move, lacking
from .reconfigure import Propose, reconfigure
from .wording import UNCHANGED, lack_of_domains, pipelines_named

__all__ = [
    "UNCHANGED",
    "Changes",
    "Domains",
    "LivingNodes",
    "Move",
    "Propose",
    "lack_of_domains",
    "lacking",
    "pipelines_named",
    "reconfigure",
]
