"""Processes that are forked from one with their imports already loaded, and the reports of how they end.

    agent ── asks ──> fork server ── forks ──> supervisor ── forks ──> a worker or a rank
      ^                                            │
      └───────────── its end, by a pipe ───────────┘   (if the supervisor is gone, the fork server reports it)

Nothing here loads torch.
"""

from __future__ import annotations

from .fork_server import ForkServer, serve, tell_failure
from .imports import FORKABLE, has_cuda_driver, quick_imports
from .process_names import set_command_line, set_name
from .supervisor import ENDS, NUM_DESCRIPTORS, SpareSupervisor, adopt_orphans, is_stopped, leave_ends_to_agents

__all__ = [
    "ENDS",
    "FORKABLE",
    "NUM_DESCRIPTORS",
    "ForkServer",
    "SpareSupervisor",
    "adopt_orphans",
    "has_cuda_driver",
    "is_stopped",
    "leave_ends_to_agents",
    "quick_imports",
    "serve",
    "set_command_line",
    "set_name",
    "tell_failure",
]
