"""Checkpoints: when to save, what has been saved, and which state to go back to."""

from __future__ import annotations

from .restoring import Candidate, Restoring
from .saving import KnownCheckpoint, Saving
from .shares import saving_shares

__all__ = ["Candidate", "KnownCheckpoint", "Restoring", "Saving", "saving_shares"]
