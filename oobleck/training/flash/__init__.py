"""`oobleck.checkpoint.load` and `save`, for scripts that torchrun can start, under any launcher.

Under `oobleck run`, a save is a copy into shared memory that outlives the rank; the agent writes it to disk later.
Elsewhere each save is written to disk before it returns.
"""

from __future__ import annotations

from .interface import load, save

__all__ = ["load", "save"]
