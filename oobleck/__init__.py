"""Oobleck: resilient distributed training of large models.

The package root loads nothing heavy: `import oobleck` and `import oobleck.planner` work without torch and trio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .host.script import Job

if TYPE_CHECKING:
    from .cli.launch import Event, Run, launch

__all__ = ["Event", "Job", "Run", "__version__", "launch"]

__version__ = "0.2.0"


def __getattr__(name: str) -> object:
    """Import the launcher of runs on first use, as workers and planners never need it."""
    if name not in ("Event", "Run", "launch"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .cli import launch as door

    return getattr(door, name)
