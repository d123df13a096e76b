"""Failure traces played on real processes."""

from __future__ import annotations

from .play import Player, name_nodes, not_played
from .targets import LocalRun, RunningRun

__all__ = ["LocalRun", "Player", "RunningRun", "name_nodes", "not_played"]
