"""`oobleck run`: torchrun's command line, and a run of a script's ranks, wired together."""

from __future__ import annotations

from .command import run

__all__ = ["run"]
