"""SSH: connections to nodes, the keys that are trusted, and a server for virtual nodes."""

from __future__ import annotations

from .asyncssh_adapter import SSHCommandStream
from .client import CompletedCommand, SSHConnection, SSHOptions, connect, open_ssh_loop
from .local_ssh import serve_local_nodes

__all__ = [
    "CompletedCommand",
    "SSHCommandStream",
    "SSHConnection",
    "SSHOptions",
    "connect",
    "open_ssh_loop",
    "serve_local_nodes",
]
