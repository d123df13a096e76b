"""What a script under `oobleck run` saves of its own state in memory, and loads again: `docs/scripts.md`."""

from __future__ import annotations

from oobleck.training.flash import load, save

__all__ = ["load", "save"]
