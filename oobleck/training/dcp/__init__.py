"""torch's distributed checkpoints (DCP) in the memory of `oobleck.checkpoint`: any mesh is loaded on any other.

Each rank's part describes itself, so no coordinator's metadata can be lost with a node: a reader puts the metadata
together from all parts.
"""

from __future__ import annotations

from .reader import Reader
from .writer import Writer

__all__ = ["Reader", "Writer"]
