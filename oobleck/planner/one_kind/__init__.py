"""Plans for nodes that are all alike: pipelines of some sizes, with any devices a stage, and all moves between them."""

from __future__ import annotations

from .catalog import OneKindCatalog
from .moves import propose_moves

__all__ = ["OneKindCatalog", "propose_moves"]
