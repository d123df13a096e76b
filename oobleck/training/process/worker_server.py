"""A process that has imported everything that a worker needs, and forks workers in milliseconds.

`python -P -m oobleck.training.process.worker_server SOCKET`: the descriptor of the inherited listening socket.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys

from oobleck.training.forking import ENDS, leave_ends_to_agents, quick_imports, serve, tell_failure

_SANITIZER = "TORCH_CUDA_SANITIZER"


def main() -> None:
    """Serve until the last agent has left."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    # It has torch watch every operation, of which the first one makes a CUDA context, and imports make some.
    sanitizer = os.environ.pop(_SANITIZER, None)
    leave_ends_to_agents()
    # Imports only: a torch operation would start threads, and a process with threads cannot fork safely.
    try:
        with quick_imports():
            from oobleck.training.process.worker import run_worker
    except Exception as error:  # whatever a package does on import
        tell_failure(listener, f"{type(error).__name__}: {error}")
        raise
    # Forks share the pages of frozen objects, which no collection touches.
    gc.collect()
    gc.freeze()

    def be_worker(sock: socket.socket) -> None:
        if sanitizer is not None:
            from torch.cuda._sanitizer import enable_cuda_sanitizer

            os.environ[_SANITIZER] = sanitizer
            enable_cuda_sanitizer()  # type: ignore[no-untyped-call]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)  # the worker ignores them, but its own children must not
        run_worker(sock)

    serve(listener, be_worker)


if __name__ == "__main__":
    main()
