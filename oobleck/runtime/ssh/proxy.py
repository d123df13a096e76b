"""The command that an ssh config names to reach a host: its standard input and output are the connection.

asyncssh could run it, as a process of asyncio: one that ends just when its connection is closed is then waited for
twice, and the wait that comes too late ends the loop with all of its connections.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress


class ProxyCommand:
    """A proxy command that runs; `socket` is our end of its connection."""

    def __init__(self, command: Sequence[str]) -> None:
        """Raises OSError where it cannot be started."""
        self.socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError:
                self.socket.close()
                raise

    def end(self) -> None:
        """Kill it, with what it has started. Whoever was given the socket closes it."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
