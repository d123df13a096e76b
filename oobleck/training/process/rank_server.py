"""A process that forks the ranks of a script: at first from nothing, later from all that the first ones have imported.

`python -P -m oobleck.training.process.rank_server IMPORTS WARMTH SOCKET`: two files of the job's directory (see
`import_log`), and the descriptor of the inherited listening socket. It never makes a CUDA context, and never runs a
line of the script.
"""

from __future__ import annotations

import functools
import socket
import sys
from pathlib import Path

from oobleck.training.process.fork_server import serve
from oobleck.training.process.import_log import Learner
from oobleck.training.process.rank import run_rank

__all__ = ["main"]


def main() -> None:
    """Serve until the last agent has left."""
    imports, warmth, descriptor = sys.argv[1:]
    learner = Learner(Path(imports), Path(warmth))
    learner.learn_all()
    serve(socket.socket(fileno=int(descriptor)), functools.partial(run_rank, imports=imports), between=learner)


if __name__ == "__main__":
    main()
