"""A script's ranks on one node, for its agent: their environment, their shown output, and their signs of life."""

from __future__ import annotations

from .rank_setup import OWN_VARIABLES, RankSetup, is_shown, rank_environment, shown_text
from .signs import NodeSigns

__all__ = ["OWN_VARIABLES", "NodeSigns", "RankSetup", "is_shown", "rank_environment", "shown_text"]
