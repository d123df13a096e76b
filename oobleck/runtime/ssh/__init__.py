"""SSH: connections to nodes, trusted host keys, and our own servers for virtual nodes and nodes that dial in."""

from __future__ import annotations

from .asyncssh_adapter import SSHCommandStream, open_ssh_loop
from .client import CompletedCommand, SSHConnection, SSHOptions, connect
from .dial_in import DialInKeys, Farewell, NodePass, RefusedCaller, call_back, dial_in, make_keys
from .login_gate import LoginGate
from .node_server import CommandProcesses, serve_local_nodes

__all__ = [
    "CommandProcesses",
    "CompletedCommand",
    "DialInKeys",
    "Farewell",
    "LoginGate",
    "NodePass",
    "RefusedCaller",
    "SSHCommandStream",
    "SSHConnection",
    "SSHOptions",
    "call_back",
    "connect",
    "dial_in",
    "make_keys",
    "open_ssh_loop",
    "serve_local_nodes",
]
