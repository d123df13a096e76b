"""Processes that are forked from one that has imported what they need, and how their ends become known.

    agent ── asks ──> fork server ── forks ──> supervisor ── forks ──> a worker or a rank
      ^                                            │
      └───────────── its end, by a pipe ───────────┘   (where the supervisor is gone: the fork server says it)

Nothing here loads torch.
"""

from __future__ import annotations

from .fork_server import ForkServerSide, serve
from .imports import quick_imports
from .process_names import set_command_line, set_name
from .supervisor import ENDS, adopt_orphans, fork_supervised, leave_ends_to_agents

__all__ = [
    "ENDS",
    "ForkServerSide",
    "adopt_orphans",
    "fork_supervised",
    "leave_ends_to_agents",
    "quick_imports",
    "serve",
    "set_command_line",
    "set_name",
]
