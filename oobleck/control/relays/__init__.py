"""The tree of agents: who speaks to the master through whom, what is said through it, and what relays merge."""

from __future__ import annotations

from .desk import RelayDesk
from .gathering import Gathering
from .mail import RelayMail
from .positions import child_towards, children_of, parent_of
from .tree import PATIENCE, RelayTree

__all__ = ["PATIENCE", "Gathering", "RelayDesk", "RelayMail", "RelayTree", "child_towards", "children_of", "parent_of"]
