"""What agents know of relays: the shape of the tree, what a relay merges, and when one that is silent is left."""

from __future__ import annotations

from .gathering import Gathering
from .positions import child_towards, children_of, parent_of
from .silence import PATIENCE

__all__ = ["PATIENCE", "Gathering", "child_towards", "children_of", "parent_of"]
