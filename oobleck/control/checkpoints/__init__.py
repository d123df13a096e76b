"""Checkpoints: when to save, what has been saved, and which state to go back to."""

from __future__ import annotations

from .candidate import Candidate, KnownCheckpoint
from .restoring import Restoring
from .saving import Saving
from .shares import saving_shares

__all__ = ["Candidate", "KnownCheckpoint", "Restoring", "Saving", "saving_shares"]
