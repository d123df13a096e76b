"""A process that forks the ranks of a script: at first itself, then by a process that has imported what they import.

`python -P -m oobleck.training.process.rank_server WARMTH ROOM SOCKET`: a file of the job's directory that exists while
ranks start warm, blanks whose place in memory takes the command lines that processes show, and the descriptor of the
inherited listening socket. It imports nothing of the script's, so it answers whatever that does.
"""

from __future__ import annotations

import functools
import socket
import sys
from pathlib import Path

from oobleck.training.forking import leave_ends_to_agents, serve, set_command_line
from oobleck.training.process.import_log import make_log
from oobleck.training.process.rank import run_rank
from oobleck.training.process.warmer import Warmer


def main() -> None:
    """Serve until the last agent has left."""
    warmth, _, descriptor = sys.argv[1:]
    set_command_line([sys.executable, "-P", "-m", __spec__.name, warmth])
    leave_ends_to_agents()
    log = make_log()
    work = functools.partial(run_rank, imports=log)
    serve(socket.socket(fileno=int(descriptor)), work, forker=lambda server: Warmer(log, Path(warmth), work, server))


if __name__ == "__main__":
    main()
