"""An SSH server for virtual nodes on this machine, in place of sshd.

Everything else is the same as with real hosts: connections, agents and sockets. The keys exist for one run and in
memory only. The server listens on loopback, on one port per virtual node.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial

import asyncssh
import trio

from oobleck.job import NodeSpec
from oobleck.runtime.descriptors import raise_descriptor_limit

from .asyncssh_adapter import run_on
from .client import SSHOptions
from .login_gate import LoginGate
from .node_server import node_server_options

_HOST = "127.0.0.1"
_LOGINS_A_NODE = 8  # as many as `Logins` lets begin at one server
_OTHER_LOGINS = 24


@asynccontextmanager
async def serve_local_nodes(
    count: int, *, environment: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[tuple[NodeSpec, ...], SSHOptions]]:
    """Serve `count` virtual nodes named node0, node1, …; yields them and how to reach them.

    Commands inherit this process's environment and `environment`. Enter it within `open_ssh_loop`. Background processes
    outlive it, as with sshd.
    """
    host_key = asyncssh.generate_private_key("ssh-ed25519")
    client_key = asyncssh.generate_private_key("ssh-ed25519")
    async with trio.open_nursery() as commands:
        options = await node_server_options(
            host_key=host_key, client_key=client_key, environment=environment or {}, nursery=commands
        )
        let_in = partial(run_on, asyncssh.run_server, config=None, options=options)
        listeners = [listener for _ in range(count) for listener in await trio.open_tcp_listeners(0, host=_HOST)]
        limit = raise_descriptor_limit() // 3
        gate = LoginGate(let_in, max_logins=min(limit, _OTHER_LOGINS + _LOGINS_A_NODE * count))
        for listener in listeners:
            commands.start_soon(gate.serve, listener)
        nodes = tuple(
            NodeSpec(name=f"node{index}", host=_HOST, port=listener.socket.getsockname()[1], user="oobleck")
            for index, listener in enumerate(listeners)
        )
        reached_by = SSHOptions(
            client_keys=(client_key,), host_keys=(host_key.convert_to_public(),), use_defaults=False
        )
        try:
            yield nodes, reached_by
        finally:
            commands.cancel_scope.cancel()
