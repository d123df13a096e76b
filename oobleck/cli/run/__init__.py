"""A run on real nodes, wired together: master, cluster, journal, control socket, and what a person sees."""

from __future__ import annotations

from .run_job import Run, run_job

__all__ = ["Run", "run_job"]
