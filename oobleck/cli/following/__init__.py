"""Follows a run from outside: its dashboard or lines, and the logs of its nodes."""

from __future__ import annotations

from .watch import watch

__all__ = ["watch"]
