"""`oobleck verify`: a job's first steps on virtual nodes, and by the script itself in one process, compared."""

from __future__ import annotations

from .command import verify, verify_first

__all__ = ["verify", "verify_first"]
