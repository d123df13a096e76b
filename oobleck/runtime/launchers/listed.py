"""Nodes that a text lists and SSH reaches: nodes on new lines join, nodes on deleted lines are drained.

The text is a hostfile or the output of a command. Only differences between two versions count, so nodes that a user
added or drained by a command stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Protocol

import trio

from oobleck.errors import ConfigError, UsageError, UserError
from oobleck.job import NodeSpec
from oobleck.runtime.files import read_input
from oobleck.runtime.ssh import SSHConnection, SSHOptions, connect

from .command import HostsCommand
from .launcher import Arrived, Leaving, NodeChange, Reported

_PATIENCE_S = 1.0
_AGAIN = "for it to count, delete the line, and write it again once the node has left"


class Parser(Protocol):
    """Parses the nodes of a text; `source` names the text in errors. Raises ConfigError."""

    def __call__(self, text: str, *, source: str) -> tuple[NodeSpec, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostfile:
    """A hostfile, which may be edited during the run."""

    path: Path
    name: str = "the hostfile"
    interval_s: float = 1.0

    @property
    def source(self) -> str:
        return str(self.path)

    async def read(self) -> str:
        """Raises ConfigError if the file cannot be read as text."""
        try:
            # A pipe in its place must not hold up the run, nor its network disk the run's end.
            read = partial(read_input, self.path, "hostfile", patience_s=_PATIENCE_S)
            return await trio.to_thread.run_sync(read, abandon_on_cancel=True)
        except UserError as error:
            raise ConfigError(f"{self.path} cannot be read as text ({error})") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedChanges:
    """How a new version of a list differs from the one before."""

    joining: tuple[NodeSpec, ...] = ()
    leaving: tuple[str, ...] = ()
    altered: tuple[str, ...] = ()
    """Nodes whose lines now say something else."""
    nodes: tuple[NodeSpec, ...] = ()
    """All nodes of the list, with their names in the run."""

    def __bool__(self) -> bool:
        return bool(self.joining or self.leaving or self.altered)


def listed_changes(before: Sequence[NodeSpec], after: Sequence[NodeSpec]) -> ListedChanges:
    """Compare two versions of a list; O(nodes). `before` has the nodes' names in the run."""
    # A host's second line names the node host#2, and the first once the line above it is deleted. So machine and
    # devices identify a node, which keeps its name.
    known = {_identity(spec): spec for spec in before}
    kept = known.keys() & {_identity(spec) for spec in after}
    removed = {spec.name for identity, spec in known.items() if identity not in kept}
    names = {spec.name for spec in before}
    nodes: list[NodeSpec] = []
    joining: list[NodeSpec] = []
    altered: list[str] = []
    for spec in after:
        identity = _identity(spec)
        if identity in kept:
            node = replace(spec, name=known[identity].name)
            if node != known[identity]:
                altered.append(node.name)
        elif spec.name in removed:
            node = spec
            removed.discard(node.name)
            altered.append(node.name)
        else:
            candidates = chain([spec.name], (f"{spec.host}#{number}" for number in count(2)))
            node = replace(spec, name=next(name for name in candidates if name not in names))
            names.add(node.name)
            joining.append(node)
        nodes.append(node)
    leaving = tuple(spec.name for spec in before if spec.name in removed)
    return ListedChanges(joining=tuple(joining), leaving=leaving, altered=tuple(altered), nodes=tuple(nodes))


def _identity(spec: NodeSpec) -> tuple[str, int | None, tuple[int, ...]]:
    return spec.host.lower(), spec.port, spec.devices


class _NodesBySSH:
    """The common part of launchers whose nodes this machine reaches by SSH."""

    python = sys.executable
    nodes: tuple[NodeSpec, ...]
    _options: SSHOptions

    async def found_again(self, nodes: Sequence[NodeSpec], asked: Set[str]) -> Sequence[NodeSpec]:
        return [node for node in nodes if node.name not in asked]

    async def connect(self, node: NodeSpec) -> SSHConnection:
        return await connect(node, self._options)

    async def has_ended(self, node: NodeSpec) -> bool:
        # An agent outlives its SSH connection, so a lost connection proves nothing.
        return False

    async def release(self, node: NodeSpec) -> None:
        """Do nothing: the machine belongs to the user, and a virtual node may be added again."""


class ListedNodes(_NodesBySSH):
    """Launcher: the nodes of a list, reached by SSH."""

    are_virtual = False

    def __init__(self, listed: Hostfile | HostsCommand, text: str, *, parse: Parser, options: SSHOptions) -> None:
        """`text` is the list's first version. Raises ConfigError if it cannot be parsed."""
        self._list = listed
        self._text = text
        self._parse = parse
        self._options = options
        self.nodes = parse(text, source=listed.source)

    async def begin(self, *, waits: bool = True) -> tuple[NodeSpec, ...]:
        return self.nodes

    async def follow(self, changes: trio.MemorySendChannel[NodeChange]) -> None:
        """Read the list at every interval, until cancelled; report a version that cannot be used."""
        current = seen = _version(self._text)
        while True:
            await trio.sleep(self._list.interval_s)
            before, text = seen, None
            try:
                text = await self._list.read()
                seen = _version(text)
            except UserError as error:
                seen = str(error)
            # A version counts once it was the same for an interval: editors write in pieces, and a service may omit
            # machines for a moment.
            if seen == before and seen != current:
                current = seen
                for change in self._changes(text, str(seen)):
                    await changes.send(change)

    def named(self, text: str) -> NodeSpec:
        """Return a node of the list by its name, or a new one from a line of a hostfile. Raises UserError."""
        known = {spec.name: spec for spec in self.nodes}
        if text in known:
            return known[text]
        specs = self._parse(text, source="the line to add")
        if len(specs) != 1:
            raise UsageError(f"{text!r} must name one host that is not in the run yet")
        return specs[0]

    def _changes(self, text: str | None, problem: str) -> list[NodeChange]:
        """Compare a new version with the last one; None could not be read because of `problem`."""
        try:
            if text is None:
                raise ConfigError(problem)
            listed = self._parse(text, source=self._list.source)
            if not listed:
                raise ConfigError(f"{self._list.source}: names no node; to end the run, use `oobleck stop`")
            changes = listed_changes(self.nodes, listed)
        except ConfigError as error:
            return [Reported(level="warning", text=f"{self._list.name} is not followed: {error}")]
        self.nodes = changes.nodes
        if not changes:
            return [Reported(level="info", text=f"{self._list.name} has changed; it names the same nodes")]
        return [
            *(Arrived(node=spec) for spec in changes.joining),
            *(Leaving(node=name) for name in changes.leaving),
            *(
                Reported(level="warning", text=f"{self._list.name} has another line for {name}; {_AGAIN}")
                for name in changes.altered
            ),
        ]


def _version(text: str) -> tuple[str, ...] | str:
    """Return a form of the text in which versions that differ only in the order of lines are equal."""
    return tuple(sorted(text.splitlines()))


class VirtualNodes(_NodesBySSH):
    """Launcher: nodes on this machine, behind our own SSH server; a run begins with the first `num_first`."""

    are_virtual = True

    def __init__(self, nodes: Sequence[NodeSpec], options: SSHOptions, *, num_first: int) -> None:
        self.nodes = tuple(nodes)
        self._options = options
        self._num_first = num_first

    async def begin(self, *, waits: bool = True) -> tuple[NodeSpec, ...]:
        return self.nodes[: self._num_first]

    async def follow(self, changes: trio.MemorySendChannel[NodeChange]) -> None:
        await trio.sleep_forever()

    def named(self, text: str) -> NodeSpec:
        """Raises UsageError."""
        known = {spec.name: spec for spec in self.nodes}
        if text not in known:
            raise UsageError(f"this machine has no virtual node {text!r}; there are {', '.join(known)}")
        return known[text]
