"""Plans for nodes of several kinds: an exact search for pipelines over kinds, and the choice among them."""

from __future__ import annotations

from .catalog import MixedCatalog
from .choice import Chooser
from .moves import propose_moves

__all__ = ["Chooser", "MixedCatalog", "propose_moves"]
