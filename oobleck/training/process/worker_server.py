"""A process that has imported everything that a worker needs, and forks workers in milliseconds.

`python -P -m oobleck.training.process.worker_server SOCKET`: the descriptor of the inherited listening socket.
"""

from __future__ import annotations

import gc
import signal
import socket
import sys

from oobleck.training.forking import ENDS, leave_ends_to_agents, quick_imports, serve


def main() -> None:
    """Serve until the last agent has left."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    leave_ends_to_agents()
    _warm_up()
    gc.collect()
    gc.freeze()
    serve(listener, _be_worker)


def _be_worker(sock: socket.socket) -> None:
    from oobleck.training.process.worker import run_worker

    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)  # they are ignored, but not by what it starts itself
    run_worker(sock)


def _warm_up() -> None:
    """Import what a worker imports, without running a torch operation."""
    with quick_imports():
        import oobleck.training.process.worker  # noqa: F401


if __name__ == "__main__":
    main()
