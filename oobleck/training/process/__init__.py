"""The processes that load torch: workers, the server that forks them, the profiler, probes and script hosts.

The room itself loads nothing: a fork server accepts connections before it imports torch, and a script host may never
import it.
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
