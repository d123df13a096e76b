"""Checkpoints: when to save, what has been saved, and which state to go back to."""

from __future__ import annotations

from .restoring import Candidate, Restoring
from .saving import KnownCheckpoint, Saving
from .shares import shares_of

__all__ = ["Candidate", "KnownCheckpoint", "Restoring", "Saving", "shares_of"]
