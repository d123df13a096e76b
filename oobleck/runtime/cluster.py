"""The cluster over SSH: starts, reaches, kills and cleans up agents through one connection per node."""

from __future__ import annotations

import json
import logging
import math
import shlex
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath

import trio

from oobleck import __version__
from oobleck.control.node_check import Health
from oobleck.control.nodes import starting_s
from oobleck.control.protocol import FromAgent, MasterMessage
from oobleck.errors import AgentGone, FaultyNode, NodeUnreachable
from oobleck.job import NodeSpec
from oobleck.roles.channel import MessageChannel
from oobleck.roles.master_ports import LinkLost
from oobleck.wire import FrameDecoder

from .agent import AGENT_MODULE
from .connections import NodeConnections
from .files import AgentCommands, NodeLogs, agent_log, parse_list
from .node_check import check_nodes
from .python_process import MODULE, why_it_ended
from .ssh import CompletedCommand, SSHConnection
from .workdir import Workdir

_log = logging.getLogger("oobleck.cluster")

_START_TIMEOUT_S = 30.0
_START_SHARE = 0.25  # the part of a node's time limit that its agent may take, if that is longer
_COMMAND_TIMEOUT_S = 10.0
_TRIES = 2
_AT_ONCE = 32  # thousands of commands at once would keep this process busy for longer than any of them may take
_NO_AGENT = 76  # a shell's exit status if the agent to attach to does not live
_TOO_LONG = "a command took too long; is the machine overloaded?"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePaths:
    """Paths on the nodes, where `~` is the home directory there."""

    python: str
    base_dir: PurePosixPath
    cache_dir: PurePosixPath


class _Tunnel(MessageChannel[MasterMessage, FromAgent]):
    def __init__(
        self, connection: SSHConnection, stream: trio.abc.Stream, *, has_node_ended: Callable[[], Awaitable[bool]]
    ) -> None:
        super().__init__(stream, FrameDecoder(FromAgent))
        self.address = connection.peer_address
        self.takes_calls = connection.takes_calls
        self.rest = connection.keepalive.rest
        self._connection = connection
        self._has_node_ended = has_node_ended

    async def receive(self) -> FromAgent:
        try:
            return await super().receive()
        except trio.BrokenResourceError as error:
            # If only this channel was closed, the agent closed it.
            if self._connection.is_lost and not await self._has_node_ended():
                raise LinkLost(str(error)) from error
            raise


class SSHCluster:
    """The nodes of a job, reached by SSH; implements `roles.master_ports.Cluster`."""

    def __init__(
        self,
        tag: str,
        nodes: Sequence[NodeSpec],
        *,
        run_id: str,
        connections: NodeConnections,
        paths: RemotePaths,
        start_timeout_s: float = 0.0,
        checks_returning: bool = False,
        runs_ranks: bool = False,
        workdir: Workdir | None = None,
    ) -> None:
        """`nodes` are those known at the start; others may join. `start_timeout_s` limits a node's start.

        With `runs_ranks`, agents run a script's ranks instead of workers. With `checks_returning`, a node that the run
        released is checked before its agent is started again. Processes run in `workdir`, which nodes get first.
        """
        self._workdir = workdir
        self._tag = tag
        self._run_id = run_id
        self._names = {spec.name for spec in nodes}
        self._connections = connections
        self._paths = paths
        self._agent_timeout_s = max(_START_TIMEOUT_S, _START_SHARE * start_timeout_s)
        self._checks_returning = checks_returning
        self._runs_ranks = runs_ranks
        self._let_go: set[str] = set()
        self._released: set[str] = set()
        self._turns = trio.CapacityLimiter(_AT_ONCE)
        # A node may be added again during its cleanup, so an agent is started or cleaned up only with its node's lock.
        self._tending: defaultdict[str, trio.Lock] = defaultdict(trio.Lock)

    async def reach(self, node: NodeSpec, *, attach: bool) -> _Tunnel:
        """Start the node's agent and connect to it. Raises NodeUnreachable.

        `attach` connects to the agent that a killed master has left, or raises AgentGone; else that agent is ended.
        """
        limit_s = starting_s(self._agent_timeout_s, len(self._names))  # this process may reach all nodes at once
        async with self._tending[node.name]:
            connection = await self._connections.to(node)
            try:
                if attach:
                    # Another exit status would not tell a missing agent from a shell that fails.
                    command, stdin = f"({self._commands(node).answer()}) || exit {_NO_AGENT}", b""
                else:
                    # An agent that was left would continue the earlier run's work.
                    async with self._turns:
                        await connection.run(self._commands(node).end(), timeout_s=limit_s)
                    await self._check_if_returning(node)
                    if self._workdir is not None:
                        async with self._turns:
                            await self._workdir.send(node.name, connection, self._paths.base_dir / self._tag)
                    command, stdin = self._connections.with_environment(self._agent_command(node))
                completed = await connection.run(command, stdin=stdin, timeout_s=limit_s)
                socket = self._understand(node, completed)
                stream = await connection.open_unix(socket)
                return _Tunnel(connection, stream, has_node_ended=partial(self._connections.launcher.has_ended, node))
            except trio.BrokenResourceError as error:
                raise NodeUnreachable(node.name, f"its agent could not be started: {error}") from error
            except trio.TooSlowError as error:
                raise NodeUnreachable(node.name, f"its agent could not be started: {_TOO_LONG}") from error

    async def _check_if_returning(self, node: NodeSpec) -> None:
        """Check a node that the run let go. Raises FaultyNode."""
        if not self._checks_returning or node.name not in self._let_go:
            return
        report = await check_nodes(
            [node], self._connections, python=self._paths.python, directory=self._paths.base_dir, slow_factor=math.inf
        )
        verdict = report.nodes[0].verdict
        if verdict.health is Health.FAULTY:
            raise FaultyNode(node.name, verdict.reason)
        self._let_go.discard(node.name)

    async def is_alive(self, node: NodeSpec) -> bool:
        try:
            await self._connections.to(node)
        except NodeUnreachable:
            return False
        # A run that counts as dead is started from its newest state, so one broken connection must not decide that.
        for _ in range(_TRIES):
            with suppress(NodeUnreachable):
                return await self._run(node, self._commands(node).is_alive()) == 0
        return False

    async def kill(self, node: NodeSpec) -> bool:
        return await self._run(node, self._commands(node).kill()) == 0

    async def signal(self, node: NodeSpec, signal: str, processes: str) -> bool:
        return await self._run(node, self._commands(node).signal(signal, processes=processes)) == 0

    async def slow(self, node: NodeSpec, factor: float) -> bool:
        return await self._run(node, self._commands(node).slow(factor)) == 0

    async def clean(self, node: NodeSpec) -> None:
        self._let_go.add(node.name)
        try:
            async with self._tending[node.name]:
                await self._run(node, self._commands(node).clean())
        except NodeUnreachable as error:
            _log.info("%s is not cleaned up: %s", node.name, error.reason)
        # A launcher may end the node's connection, so the cleanup comes first.
        if node.name in self._released:
            self._released.discard(node.name)
            await self._connections.launcher.release(node)

    def release(self, node: NodeSpec) -> None:
        self._released.add(node.name)

    async def forget(self, node: NodeSpec, *, keeps_only_copy: bool = False) -> None:
        command = self._commands(node).forget(keeps_only_copy=keeps_only_copy)
        try:
            await self._run(node, command)
        except NodeUnreachable as error:
            _log.info("%s keeps its memory: %s", node.name, error.reason)

    async def aclose(self) -> None:
        await self._connections.aclose()

    async def list_logs(self, node: NodeSpec) -> dict[str, int]:
        return parse_list((await self._complete(node, self._logs(node).list())).stdout)

    async def read_log(self, node: NodeSpec, name: str, offset: int) -> bytes:
        return (await self._complete(node, self._logs(node).read(name, offset))).stdout

    def _logs(self, node: NodeSpec) -> NodeLogs:
        return NodeLogs(self._paths.base_dir / self._tag, node.name)

    async def _run(self, node: NodeSpec, command: str) -> int:
        return (await self._complete(node, command)).exit_status

    async def _complete(self, node: NodeSpec, command: str) -> CompletedCommand:
        connection = await self._connections.to(node)
        try:
            async with self._turns:
                return await connection.run(command, timeout_s=_COMMAND_TIMEOUT_S)
        except trio.BrokenResourceError as error:
            # The connection may hang as well, so the next command gets a new one.
            await self._connections.drop(node)
            raise NodeUnreachable(node.name, f"a command failed: {error}") from error
        except trio.TooSlowError as error:
            await self._connections.drop(node)
            raise NodeUnreachable(node.name, _TOO_LONG) from error

    def _commands(self, node: NodeSpec) -> AgentCommands:
        return AgentCommands(self._run_id, node.name)

    def _agent_command(self, node: NodeSpec) -> str:
        self._names.add(node.name)
        log = self._paths.base_dir / self._tag / agent_log(node.name)
        arguments = {
            "--tag": self._tag,
            "--run": self._run_id,
            "--node": node.name,
            "--log": log,
            "--cache": self._paths.cache_dir,
        }
        options = " ".join(f"{name} {shlex.quote(str(value))}" for name, value in arguments.items())
        ranks = " --ranks" if self._runs_ranks else ""
        command = f"exec {shlex.quote(self._paths.python)} {MODULE} {AGENT_MODULE} {options}{ranks}"
        if self._workdir is None:
            return command
        enter = self._workdir.enter(self._paths.base_dir / self._tag)
        return f"exec /bin/sh -c {shlex.quote(f'{enter} && {command}')}"

    def _understand(self, node: NodeSpec, completed: CompletedCommand) -> str:
        if completed.exit_status == _NO_AGENT:
            raise AgentGone(node.name, "its agent is gone")
        try:
            answer = json.loads(completed.stdout)
            version, socket = str(answer["version"]), str(answer["socket"])
        except (ValueError, KeyError, TypeError) as error:
            errors = completed.stderr.decode(errors="replace")
            why = why_it_ended(self._paths.python, errors, completed.exit_status)
            raise NodeUnreachable(node.name, f"its agent did not start: {why}{completed.cause}") from error
        if version != __version__:
            raise NodeUnreachable(
                node.name, f"oobleck {version} is installed there, {__version__} here; install the same version"
            )
        return socket
