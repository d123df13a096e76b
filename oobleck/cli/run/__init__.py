"""A run on real nodes, wired together: master, cluster, journal, control socket, and what a person sees."""

from __future__ import annotations

from .launching import open_launcher
from .lifeline import end_with_stdin
from .run_job import Run, run_job
from .run_ranks import RanksRun, run_ranks

__all__ = ["RanksRun", "Run", "end_with_stdin", "open_launcher", "run_job", "run_ranks"]
