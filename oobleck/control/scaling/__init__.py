"""On how many nodes a run trains: the policy, and what holds its decisions steady."""

from __future__ import annotations

from .scaling import Scaling, first_target

__all__ = ["Scaling", "first_target"]
