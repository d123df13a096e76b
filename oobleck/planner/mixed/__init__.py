"""Plans for nodes of several kinds: pipelines over kinds, exactly, and how many of each."""

from __future__ import annotations

from .catalog import MixedCatalog
from .choice import Chooser
from .moves import propose_moves
from .search import MixedSearch

__all__ = ["Chooser", "MixedCatalog", "MixedSearch", "propose_moves"]
