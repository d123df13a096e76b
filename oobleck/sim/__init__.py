"""The simulator: failure traces, two modes of simulated runs, and models of other systems.

`simulate` and `repeat` are the whole of it in one call; they are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .experiments import Mean, Repeated, repeat, simulate

__all__ = ["Mean", "Repeated", "repeat", "simulate"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from . import experiments

        return getattr(experiments, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
