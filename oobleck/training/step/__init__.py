"""A step in execution: programs, reductions, partial commits, evaluation, and the engine that runs them."""

from __future__ import annotations

from .engine import Engine

__all__ = ["Engine"]
