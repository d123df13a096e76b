"""One probe of a node check, reached over SSH. A node's faults are answers, never exceptions."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Final

import trio

from oobleck.control.node_check import GpuFacts, NodeFacts, PairValue, ProbeAnswer, ProbeFailed, ProbeRequest
from oobleck.errors import NodeUnreachable, PeerError
from oobleck.job import NodeSpec
from oobleck.roles.channel import MessageChannel
from oobleck.runtime.connections import NodeConnections
from oobleck.runtime.python_process import MODULE, why_it_ended
from oobleck.runtime.ssh import SSHCommandStream, SSHConnection
from oobleck.wire import FrameDecoder

_START_TIMEOUT_S: Final = 90.0
_OPEN_TIMEOUT_S: Final = 30.0
_CLOSE_TIMEOUT_S: Final = 2.0


class RemoteProbe:
    """A probe on a node, from the master's side."""

    def __init__(self, spec: NodeSpec, pass_on: Callable[[str, PairValue], Awaitable[None]]) -> None:
        """`pass_on(node, value)` sends a value of this node to the other one of its pair."""
        self.spec = spec
        self.facts: NodeFacts | None = None
        self.clock_offset_s: float | None = None
        self.seconds: dict[str, float] = {}
        """The best time of each measurement."""
        self.gpus: tuple[GpuFacts, ...] = ()
        self.failure = ""
        """Why the probe is useless; empty while it works."""
        self._pass_on = pass_on
        self._python = ""
        self._connection: SSHConnection | None = None
        self._stream: SSHCommandStream | None = None
        self._channel: MessageChannel[ProbeRequest, ProbeAnswer] | None = None
        self._note_answer, self._answers = trio.open_memory_channel[ProbeAnswer](math.inf)

    @property
    def machine(self) -> str:
        """The identity of the machine, which nodes may share."""
        return (self.facts.machine or self.facts.hostname) if self.facts is not None else self.spec.host

    @property
    def address(self) -> str:
        assert self._connection is not None
        return self.spec.address or self._connection.peer_address

    async def start(
        self, connections: NodeConnections, nursery: trio.Nursery, *, python: str, directory: PurePosixPath
    ) -> None:
        """Connect, start the probe, and receive the node's facts; sets `failure` if that fails."""
        self._python = python
        command = (
            f"exec {shlex.quote(python)} {MODULE} oobleck.training.process.node_probe "
            f"--node {shlex.quote(self.spec.name)} --directory {shlex.quote(str(directory))}"
        )
        command, first_line = connections.with_environment(command)
        try:
            self._connection = await connections.to(self.spec)
            self._stream = await self._connection.open_command(command)
            await self._stream.send_all(first_line)
        except NodeUnreachable as error:
            self.failure = error.reason
            return
        except trio.BrokenResourceError as error:
            self.failure = str(error)
            return
        self._channel = MessageChannel(self._stream, FrameDecoder(ProbeAnswer))
        nursery.start_soon(self._listen)
        facts = await self.receive(_START_TIMEOUT_S)
        if isinstance(facts, NodeFacts):
            self.facts = facts
            self.clock_offset_s = facts.clock_s - time.time()
            await self._check_channels(self._connection, facts.socket)
        elif not self.failure:
            self.failure = f"its probe was not ready within {_START_TIMEOUT_S:g} s"

    async def _check_channels(self, connection: SSHConnection, socket: str) -> None:
        """Open a second command and a UNIX socket, as a run does."""
        # sshd's settings may forbid either, although they allow the probe's own command.
        try:
            await connection.run("true", timeout_s=_OPEN_TIMEOUT_S)
            with trio.fail_after(_OPEN_TIMEOUT_S):
                stream = await connection.open_unix(socket)
                await stream.aclose()
        except trio.BrokenResourceError as error:
            self.failure = str(error).removeprefix(f"{self.spec.name}: ")
        except trio.TooSlowError:
            self.failure = f"a command or a connection to a socket there took more than {_OPEN_TIMEOUT_S:g} s"

    async def ask(self, request: ProbeRequest) -> None:
        """Send a request, unless the probe has exited."""
        if self._channel is not None and not self.failure:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self._channel.send([request])

    async def receive(self, timeout_s: float) -> ProbeAnswer | None:
        """Return the next answer; None if there is none in time, or the probe is gone."""
        with trio.move_on_after(timeout_s), suppress(trio.EndOfChannel):
            return await self._answers.receive()
        return None

    async def aclose(self) -> None:
        with trio.CancelScope(shield=True), trio.move_on_after(_CLOSE_TIMEOUT_S):
            if self._stream is not None:
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    # The probe ends with its input.
                    await self._stream.send_eof()
                await self._stream.aclose()

    async def _listen(self) -> None:
        assert self._channel is not None
        try:
            while True:
                message = await self._channel.receive()
                if isinstance(message, PairValue):
                    await self._pass_on(self.spec.name, message)
                elif isinstance(message, ProbeFailed):
                    self.failure = message.reason
                    return
                else:
                    self._note_answer.send_nowait(message)
        except trio.EndOfChannel:
            self.failure = self.failure or self._why_it_ended()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            # A command that has exited breaks the channel too, and its last words tell more.
            has_ended = self._stream is not None and self._stream.exit_status is not None
            self.failure = self.failure or (self._why_it_ended() if has_ended else "its connection was lost")
        except PeerError as error:
            self.failure = self._why_it_ended() if not self.facts else f"its probe sent nonsense: {error}"
        finally:
            self._note_answer.close()

    def _why_it_ended(self) -> str:
        assert self._stream is not None
        why = why_it_ended(self._python, self._stream.errors, self._stream.exit_status)
        has_begun = self._stream.preamble.has_ended
        end = f"its probe ended: {why}" if has_begun else f"its login shell runs no command ({why})"
        return f"{end}{self._stream.preamble.as_cause()}"
