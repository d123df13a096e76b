"""Reconfiguration: the moves that make a plan whole again, and the fewest bytes that they cost."""

from __future__ import annotations

from .reconfigure import reconfigure

__all__ = ["reconfigure"]
