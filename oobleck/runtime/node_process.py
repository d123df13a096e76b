"""The process of a node that dials in: `oobleck node`, in the foreground, started by the node's scheduler.

It connects to the master, serves the master's commands over that connection, and looks for the next master when this
one is gone. The agents that it starts become its children, so a scheduler that ends its process tree ends them too. Its
SIGTERM is their notice: they hand over their state, and it ends once they have left.
"""

from __future__ import annotations

import ctypes
import os
import random
import secrets
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import trio

from oobleck.errors import ConfigError, ExitCode, NodeUnreachable, UsageError

from .agent import AGENT_MODULE
from .descriptors import raise_descriptor_limit
from .files import stat_fields
from .launchers import INTRODUCTION, Introduction, read_pass
from .patient_clock import PatientClock
from .ssh import CommandProcesses, Farewell, dial_in, open_ssh_loop

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 2.0
_LEAST_SHARE = 0.5  # of a wait, which is random so that the nodes of a lost master do not all call at the same time
_POLL_S = 0.1
_REAP_S = 1.0
_AGENT = AGENT_MODULE.encode()
_SET_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2): orphans among our descendants become our children


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCall:
    file: Path
    """The keys and the master's address; read for each call, because the next master may have another address."""
    line: str
    origin: str = ""
    grant: str = ""
    master: str | None = None


def run_node(call: NodeCall, *, tell: Callable[[str], None]) -> int:
    """Dial in until the run releases the node or it is taken away; returns the exit code. Raises UserError."""
    raise_descriptor_limit()  # agents and workers inherit it
    # A file that cannot be used fails here, before anything is started; each call reads it again.
    read_pass(call.file)
    # Agents leave their session and parent, and this process must still find, signal and reap them.
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        trio.run(_run, call, tell, clock=PatientClock())
        return ExitCode.DONE
    finally:
        for pid in _agents():  # they would continue to train for a master that cannot reach them
            _signal(pid, signal.SIGKILL)


async def _run(call: NodeCall, tell: Callable[[str], None]) -> None:
    async with open_ssh_loop(), trio.open_nursery() as nursery:
        processes = CommandProcesses()
        caller = _Caller(call, nursery, processes, tell)
        nursery.start_soon(_reap_orphans, processes)
        nursery.start_soon(_leave_on_notice, nursery.cancel_scope, tell)
        await caller.run()
        nursery.cancel_scope.cancel()


class _Caller:
    def __init__(
        self, call: NodeCall, commands: trio.Nursery, processes: CommandProcesses, tell: Callable[[str], None]
    ) -> None:
        self._call = call
        self._commands = commands
        self._processes = processes
        self._tell = tell
        self._told = ""
        # The master starts agents by `python3`, which must be this process's interpreter.
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
        introduction = Introduction(process=secrets.token_hex(8), line=call.line, origin=call.origin, grant=call.grant)
        self._environment = {INTRODUCTION: str(introduction), "PATH": path}

    async def run(self) -> None:
        """Return once the run releases this node. Raises UsageError if the master refuses it."""
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                if await self._is_released():
                    return
                wait_s = _FIRST_WAIT_S
            except (NodeUnreachable, ConfigError) as error:
                self._tell_once(f"{error}; it is tried again until there is a master")
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            await trio.sleep(wait_s * random.uniform(_LEAST_SHARE, 1))

    async def _is_released(self) -> bool:
        """Serve one master until its connection ends."""
        known = read_pass(self._call.file)
        place = self._call.master or known.master
        host, port = parse_place(place)
        try:
            wait_for_end = await dial_in(
                host, port, known, environment=self._environment, nursery=self._commands, processes=self._processes
            )
        except ValueError as error:
            raise ConfigError(f"{self._call.file}: not the keys of a run ({error})") from error
        self._tell_once(f"serves the master at {place}")
        ended = await wait_for_end()
        if ended is None:
            self._tell_once(f"the master at {place} is gone; the next one is looked for")
            return False
        farewell, reason = ended
        if farewell is not Farewell.RELEASED:
            raise UsageError(f"the master at {place} has turned this node away: {reason}")
        self._tell(reason)
        return True

    def _tell_once(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._tell(text)


def parse_place(text: str) -> tuple[str, int]:
    """Parse HOST:PORT, with brackets around an IPv6 address. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{text!r} is not HOST:PORT, as in master.cluster:7077")
    return host.removeprefix("[").removesuffix("]"), int(port)


async def _reap_orphans(processes: CommandProcesses) -> None:
    # Agents, and workers whose fork server has ended, become children of this process.
    while True:
        await trio.sleep(_REAP_S)
        processes.reap_orphans()


async def _leave_on_notice(scope: trio.CancelScope, tell: Callable[[str], None]) -> None:
    """End after the agents have left, which SIGTERM or Ctrl-C asks them to do; a second signal ends all at once."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        number = await anext(signals)
        agents = _agents()
        for pid in agents:
            _signal(pid, signal.SIGTERM)
        if agents:
            tell(f"{signal.Signals(number).name}: the run is asked to let this node go")
            async with trio.open_nursery() as waiting:
                waiting.start_soon(_wait_for_agents, waiting.cancel_scope)
                await anext(signals)
                waiting.cancel_scope.cancel()
    scope.cancel()


async def _wait_for_agents(scope: trio.CancelScope) -> None:
    while _agents():  # noqa: ASYNC110  trio does not know these children
        await trio.sleep(_POLL_S)
    scope.cancel()


def _agents() -> list[int]:
    agents = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        if stat_fields(pid)[1:2] == [str(os.getpid())]:
            with suppress(OSError):
                if _AGENT in Path(f"/proc/{pid}/cmdline").read_bytes():
                    agents.append(pid)
    return agents


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
