"""The processes that load torch: workers, the server that forks them, the profiler, probes and script hosts."""

from __future__ import annotations

from .worker import run_worker

__all__ = ["run_worker"]
