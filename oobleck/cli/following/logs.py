"""`oobleck logs`: the logs of a run's nodes, which the run's master reads on them, or this machine's files."""

from __future__ import annotations

import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Protocol

import typer

from oobleck.cli.common_options import BaseDirOption, TagOption, base_dir_of
from oobleck.cli.control import NODE_HELP, complete_nodes
from oobleck.cli.inputs import whole
from oobleck.control.journal import RunView
from oobleck.errors import ExitCode, OobleckError, PeerError, UsageError
from oobleck.runtime import control_client
from oobleck.runtime.files import NodeLogs, RunDirectory, agent_log, parse_list
from oobleck.runtime.journals import find_journal, read_journal

_POLL_S = 1.0
_READ_TIMEOUT_S = 30.0
_MOST_LINES = 10_000_000


class _Source(Protocol):
    """Where logs are read."""

    def list(self, node: str) -> dict[str, int]: ...

    def read(self, node: str, name: str, offset: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class _Master:
    """An active run, whose master asks the nodes."""

    run: RunDirectory

    def list(self, node: str) -> dict[str, int]:
        answer = self._ask(control_client.ListLogsRequest(node=node))
        match answer:
            case {"logs": dict(sizes)}:
                return {str(name): int(size) for name, size in sizes.items()}
        raise PeerError(f"run {self.run.tag} lists no logs")

    def read(self, node: str, name: str, offset: int) -> bytes:
        answer = self._ask(control_client.ReadLogRequest(node=node, name=name, offset=offset))
        return str(answer["text"]).encode("latin-1")

    def _ask(self, asked: control_client.ControlRequest) -> dict[str, object]:
        return control_client.request(self.run.control_socket, asked, timeout_s=_READ_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class _Files:
    """A run without a master: only what this machine has can be read."""

    run: RunDirectory

    def list(self, node: str) -> dict[str, int]:
        logs = NodeLogs(PurePosixPath(self.run.path), node)
        sizes = parse_list(_run(logs.list()))
        if not sizes:
            raise UsageError(
                f"no master of run {self.run.tag} is active that could read the log of {node}; it is on that node, as "
                f"~/.oobleck/{self.run.tag}/{agent_log(node)}"
            )
        return sizes

    def read(self, node: str, name: str, offset: int) -> bytes:
        return _run(NodeLogs(PurePosixPath(self.run.path), node).read(name, offset))


def _run(command: str) -> bytes:
    return subprocess.run(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, check=False).stdout


@dataclass(slots=True)
class _Log:
    """One file, read up to `offset`."""

    node: str
    name: str
    prefix: str
    offset: int = 0
    _rest: bytes = b""

    def lines(self, source: _Source, size: int, *, is_whole: bool) -> Iterator[str]:
        """Yield the lines up to `size` that are new, the last one without its end only if the log is whole."""
        if size < self.offset:  # another run of this tag has begun it again
            self.offset, self._rest = 0, b""
        while self.offset < size:
            data = source.read(self.node, self.name, self.offset)
            if not data:
                break
            self.offset += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            yield from (self._shown(line) for line in lines)
        if is_whole and self._rest:
            yield self._shown(self._rest)
            self._rest = b""

    def _shown(self, line: bytes) -> str:
        return self.prefix + line.decode(errors="replace")


def logs(
    node: Annotated[
        str | None,
        typer.Argument(help=f"{NODE_HELP} Without it, all.", show_default=False, autocompletion=complete_nodes),
    ] = None,
    *,
    tag: TagOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the logs until the run ends.")] = False,
    lines: Annotated[
        int | None,
        typer.Option(
            "--lines", "-n", metavar="N", help="Only the last N lines of each log.", parser=whole(0, _MOST_LINES)
        ),
    ] = None,
    base_dir: BaseDirOption = None,
) -> None:
    """Show what agents and workers, or a script's ranks, have written on the nodes of a run, active or ended.

    Lines of several logs begin with the node, and with a rank's number on it.
    """
    run, source = _find(tag, base_dir_of(base_dir))
    nodes = _nodes(run)
    if node is not None and node not in nodes:
        raise UsageError(f"there is no node {node!r}; the nodes are {', '.join(nodes)}")
    chosen = nodes if node is None else [node]
    reader = _Reader(source, chosen, most_lines=lines)
    reader.read(is_whole=not follow)
    while follow and isinstance(source, _Master):
        time.sleep(_POLL_S)
        try:
            reader.read(is_whole=False)
        except control_client.NoActiveRun:  # its files tell the end, where this machine has them
            reader.source = source = _Files(run)
            reader.read(is_whole=True)
    if reader.failed and len(reader.failed) == len(chosen):
        raise SystemExit(ExitCode.FAILED)


class _Reader:
    def __init__(self, source: _Source, nodes: Sequence[str], *, most_lines: int | None) -> None:
        self.source = source
        self.failed: dict[str, str] = {}
        """Nodes whose logs could not be read, and why."""
        self._nodes = nodes
        self._most_lines = most_lines
        self._logs: dict[tuple[str, str], _Log] = {}

    def read(self, *, is_whole: bool) -> None:
        """Print what is new. Raises NoActiveRun once the run has ended."""
        for node in self._nodes:
            try:
                self._read(node, is_whole=is_whole)
                self.failed.pop(node, None)
            except control_client.NoActiveRun:
                raise
            except OobleckError as error:
                if self.failed.get(node) != str(error):  # once, and not with each look
                    typer.echo(f"oobleck: {error}", err=True)
                self.failed[node] = str(error)

    def _read(self, node: str, *, is_whole: bool) -> None:
        sizes = self.source.list(node)
        has_one = len(self._nodes) == 1 and len(sizes) == 1
        for name, size in sizes.items():
            known = self._logs.get((node, name))
            log = known or _Log(node, name, "" if has_one else _prefix(node, name))
            self._logs[node, name] = log
            found = log.lines(self.source, size, is_whole=is_whole)
            if known is None and self._most_lines is not None:
                found = iter(deque(found, maxlen=self._most_lines))
            for line in found:
                typer.echo(line)


def _prefix(node: str, name: str) -> str:
    parts = PurePosixPath(name).parts
    return (
        f"{node} | " if len(parts) == 1 else f"{node} local rank {parts[-2]}{' !' if 'stderr' in parts[-1] else ''} | "
    )


def _find(tag: str | None, base_dir: Path) -> tuple[RunDirectory, _Source]:
    """Return the run of this tag, or the only active one, or else the newest."""
    try:
        run = control_client.find_run(base_dir, tag)
    except control_client.NoActiveRun:
        run = RunDirectory(base_dir=base_dir, tag=find_journal(base_dir, tag).parent.name)
        return run, _Files(run)
    return run, _Master(run)


def _nodes(run: RunDirectory) -> list[str]:
    view = RunView()
    for entry in read_journal(run.journal):
        view.apply(entry)
    return [node.name for node in view.at(0.0).nodes]
