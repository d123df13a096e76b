"""Oobleck: resilient distributed training of large models.

The package root loads nothing heavy: `import oobleck` and `import oobleck.planner` work without torch and trio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .host.script import Job

if TYPE_CHECKING:
    from .cli.launch import Event, Run, launch
    from .training.attempts import Attempt, Interrupted, attempts, resilient

__all__ = ["Attempt", "Event", "Interrupted", "Job", "Run", "__version__", "attempts", "launch", "resilient"]

__version__ = "0.2.0"


def __getattr__(name: str) -> object:
    """Import the launcher of runs, and attempts, on first use: workers and planners never need them."""
    if name in ("Attempt", "Interrupted", "attempts", "resilient"):
        from .training import attempts

        return getattr(attempts, name)
    if name not in ("Event", "Run", "launch"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .cli import launch as door

    return getattr(door, name)
