"""The processes that load torch: workers, the server that forks them, the profiler, probes and script hosts.

The room itself loads nothing: a fork server takes connections before it imports torch, and script hosts may never do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .worker import run_worker

__all__ = ["run_worker"]


def __getattr__(name: str) -> object:
    if name == "run_worker":
        from .worker import run_worker

        return run_worker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
