"""Plans for nodes that are all alike: pipelines of several sizes, any devices a stage, and the moves between them."""

from __future__ import annotations

from .catalog import OneKindCatalog
from .moves import propose_moves

__all__ = ["OneKindCatalog", "propose_moves"]
