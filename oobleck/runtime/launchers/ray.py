"""Nodes of a Ray cluster: an actor on each runs `oobleck node`, and they dial in.

A separate process talks to Ray (`processes/ray_process.py`). Ray lists the nodes but does not report deaths, which it
learns after seconds.
"""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

import trio

from oobleck.errors import ConfigError, UsageError
from oobleck.runtime.python_process import module_command
from oobleck.wire import encode_json

from .command import printed_by
from .dial_in import DialedInNodes, read_pass

_PROCESS = module_command("oobleck.runtime.processes.ray_process")
_JOIN_S = 60.0
_AGAIN_S = 10.0
_END_S = 15.0
_END_SILENT_S = 3.0
_SILENT_S = 15.0  # its process looks at each node within ten seconds
_READ_BYTES = 1 << 16


async def ray_nodes() -> tuple[str, ...]:
    """Return the names of the cluster's nodes. Raises UserError."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError("--ray: Ray is not installed here; pip install ray, in the cluster's version")
    listed = await printed_by(shlex.join((*_PROCESS, "--list")), named="Ray", timeout_s=_JOIN_S)
    if not listed.split():
        raise ConfigError("the Ray cluster has no node with a CPU for work; see `ray status`")
    return tuple(listed.split())


@dataclass(eq=False, kw_only=True)
class RayActors:
    """Keeps an `oobleck node` on every node of the cluster."""

    run_id: str
    file: Path
    """The nodes' keys."""
    is_place_named: bool
    """Whether the user chose the master's address in `file`; else nodes dial in where Ray knows this machine."""
    log: Path
    callers: DialedInNodes
    silent_s: float = _SILENT_S
    again_s: float = _AGAIN_S
    _is_unanswered: bool = field(default=False, init=False)
    _process: trio.Process | None = field(default=None, init=False)

    async def run(self) -> None:
        """Keep the actors, until cancelled. They stay for the next master, unless `end` was called."""
        while True:
            try:
                await self._keep()
                self._note(f"the process that talks to it has ended; see {self.log}")
            except OSError as error:
                self._note(error.strerror or str(error))
            await trio.sleep(self.again_s)

    def _note(self, problem: str) -> None:
        if not self._is_unanswered:
            self._is_unanswered = True
            self.callers.report(
                f"Ray cannot be asked: {problem}. The run continues with the nodes that it has, and no others are "
                "looked for until Ray answers again"
            )

    async def end(self) -> None:
        """End the actors, so that Ray has its nodes back. Takes some seconds at most, and raises nothing."""
        for node in self.callers.nodes:
            # A node that is released here ends even if Ray does not answer.
            await self.callers.release(node)
        process = self._process
        if process is None or process.stdin is None:
            return
        with trio.move_on_after(_END_SILENT_S if self._is_unanswered else _END_S):
            try:
                await process.stdin.send_all(b"end\n")
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return
            await process.wait()

    def _take(self, lines: list[str]) -> None:
        """Handle lines of its process: an empty one means that Ray answered, others are for people."""
        if "" in lines and self._is_unanswered:
            self._is_unanswered = False
            self.callers.report("Ray answers again", level="info")
        for line in filter(None, lines):
            self.callers.report("".join(each if each.isprintable() else "?" for each in line))

    async def _keep(self) -> None:
        """Run one process that keeps the actors, until it ends."""
        known = read_pass(self.file)
        if not self.is_place_named:
            # The process fills in the address at which Ray knows this machine.
            known = replace(known, master=f"{{ip}}:{known.master.rpartition(':')[2]}")
        try:
            log = self.log.open("ab")
        except OSError as error:
            self.callers.report(f"nodes of Ray cannot be kept: {self.log}: {error.strerror}")
            return
        with log:
            process = await trio.lowlevel.open_process(
                [*_PROCESS, "--run", self.run_id],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C must reach only the master
            )
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        try:
            await process.stdin.send_all(encode_json(known))
            # The first answer takes as long as joining the cluster.
            rest, patience_s = b"", _JOIN_S
            while True:
                with trio.move_on_after(patience_s) as waiting:
                    data = await process.stdout.receive_some(_READ_BYTES)
                if waiting.cancelled_caught:
                    self._note(f"it has not answered for {patience_s:g} s; see {self.log}")
                    continue
                if not data:
                    break
                patience_s = self.silent_s
                *lines, rest = (rest + bytes(data)).split(b"\n")
                self._take([line.decode(errors="replace").strip() for line in lines])
        except trio.BrokenResourceError:
            pass  # its end is reported by `run`
        finally:
            self._process = None
            # The actors are detached, so this ends none of them.
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
            for stream in (process.stdin, process.stdout):
                await trio.aclose_forcefully(stream)
