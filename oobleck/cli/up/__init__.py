"""A run on real nodes, wired together: master, cluster, journal, control socket, and what a person sees.

What a run of a script's ranks (`cli/run`) has of this is given out as well.
"""

from __future__ import annotations

from .launching import open_launcher
from .lifeline import end_with_stdin
from .log_output import background_logging
from .node_memory import ENDS_WELL, give_memory_back
from .places import check_first, open_nodes, remote_paths
from .run_job import Run, run_job
from .session import Session

__all__ = [
    "ENDS_WELL",
    "Run",
    "Session",
    "background_logging",
    "check_first",
    "end_with_stdin",
    "give_memory_back",
    "open_launcher",
    "open_nodes",
    "remote_paths",
    "run_job",
]
