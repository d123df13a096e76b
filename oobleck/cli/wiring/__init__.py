"""Parts from which runs on real nodes are wired together: launchers, journals, signals and output.

`cli/up` wires runs that train, `cli/run` those of a script's ranks.
"""

from __future__ import annotations

from .launching import open_launcher
from .log_output import background_logging
from .past import end_left, is_any_alive, keep_image, make_master, read_past, refuse_to_end
from .places import ENDS_WELL, RunNodes, complain, give_memory_back, open_nodes
from .run_dir_watch import watch_run_directory
from .session import MasterLeaves, Session

__all__ = [
    "ENDS_WELL",
    "MasterLeaves",
    "RunNodes",
    "Session",
    "background_logging",
    "complain",
    "end_left",
    "give_memory_back",
    "is_any_alive",
    "keep_image",
    "make_master",
    "open_launcher",
    "open_nodes",
    "read_past",
    "refuse_to_end",
    "watch_run_directory",
]
