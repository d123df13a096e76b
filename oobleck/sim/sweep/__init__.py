"""Sweep mode: a failure trace straight into the real coordinator, from one event to the next."""

from __future__ import annotations

from .settings import SweepSettings, most_steps
from .sweep import sweep

__all__ = ["SweepSettings", "most_steps", "sweep"]
