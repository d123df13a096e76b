"""Plans for nodes of several kinds: pipelines over kinds, exactly, and how many of each."""

from __future__ import annotations

from .choice import Chooser
from .kinds import KindCosts, MixedTemplate
from .planner import MixedPlanner
from .search import MixedSearch

__all__ = ["Chooser", "KindCosts", "MixedPlanner", "MixedSearch", "MixedTemplate"]
