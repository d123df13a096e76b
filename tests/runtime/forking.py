"""A fork server without torch, whose workers live for as long as their agent listens: `python forking.py SOCKET`.

One that lies beside a file called `broken` ends at once, with exit code 3.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from oobleck.training.forking import serve


def _work(sock: socket.socket) -> None:
    sock.setblocking(True)
    while sock.recv(4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    listener = socket.socket(fileno=int(sys.argv[1]))
    if Path(listener.getsockname()).with_name("broken").exists():
        sys.exit(3)
    serve(listener, _work)
