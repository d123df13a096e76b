"""Checkpoints: when to save, which saves are complete, and which state to go back to."""

from __future__ import annotations

from .restoring import Candidate, KnownCheckpoint, Restoring
from .saves import saving_shares
from .saving import Saving

__all__ = ["Candidate", "KnownCheckpoint", "Restoring", "Saving", "saving_shares"]
