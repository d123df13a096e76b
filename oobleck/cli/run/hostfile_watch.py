"""A hostfile that is edited during its run: new lines join, lines that are gone are drained.

Only differences between two versions of the file count: nodes that were added or drained by commands stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path

import trio

from oobleck.cli.inputs import parse_hostfile
from oobleck.errors import ConfigError, UserError
from oobleck.job import NodeSpec
from oobleck.runtime.files import read_input

from .session import Session

__all__ = ["HostfileChanges", "hostfile_changes", "watch_hostfile"]

_PATIENCE_S = 1.0
_ANEW = "for it to count, delete the line, and write it again once the node has left"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostfileChanges:
    """What an edit means."""

    joining: tuple[NodeSpec, ...] = ()
    leaving: tuple[str, ...] = ()
    altered: tuple[str, ...] = ()
    """Nodes that are reached in another way now, or have other devices."""
    nodes: tuple[NodeSpec, ...] = ()
    """All nodes of the file, by the names that they have in the run."""


def hostfile_changes(before: Sequence[NodeSpec], after: Sequence[NodeSpec]) -> HostfileChanges:
    """Compare two versions of a hostfile; O(nodes). `before` has the names that the nodes have in the run.

    A host's second line is the node host#2, and the first once the line before it is deleted. So nodes are told apart
    by machine and devices, and keep their names.
    """
    known = {_identity(spec): spec for spec in before}
    kept = known.keys() & {_identity(spec) for spec in after}
    gone = {spec.name for identity, spec in known.items() if identity not in kept}
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
        elif spec.name in gone:
            node = spec
            gone.discard(node.name)
            altered.append(node.name)
        else:
            node = replace(spec, name=_free_name(spec, names))
            names.add(node.name)
            joining.append(node)
        nodes.append(node)
    leaving = tuple(spec.name for spec in before if spec.name in gone)
    return HostfileChanges(joining=tuple(joining), leaving=leaving, altered=tuple(altered), nodes=tuple(nodes))


def _identity(spec: NodeSpec) -> tuple[str, int | None, tuple[int, ...]]:
    return spec.host.lower(), spec.port, spec.devices


def _free_name(spec: NodeSpec, names: Collection[str]) -> str:
    more = (f"{spec.host}#{number}" for number in count(2))
    return next(name for name in chain([spec.name], more) if name not in names)


async def watch_hostfile(path: Path, nodes: Sequence[NodeSpec], session: Session, *, interval_s: float = 1.0) -> None:
    """Follow the file until cancelled; `nodes` are those that it named when the run began.

    An edit counts once the file has been the same for an interval: editors write in pieces. One that cannot be read is
    reported, and changes nothing.
    """
    said = seen = await _read(path)
    while True:
        await trio.sleep(interval_s)
        before, seen = seen, await _read(path)
        if seen != before or seen == said:
            continue
        said = seen
        try:
            nodes = _follow(path, seen, nodes, session)
        except ConfigError as error:
            session.remark("warning", f"the hostfile's edit is not followed: {error}")


def _follow(path: Path, text: str | None, nodes: Sequence[NodeSpec], session: Session) -> Sequence[NodeSpec]:
    """Carry out what an edit means; returns the nodes of the file. Raises ConfigError."""
    changes = hostfile_changes(nodes, _parse(path, text))
    for spec in changes.joining:
        session.take_in(spec)
    for name in changes.leaving:
        session.let_go(name)
    for name in changes.altered:
        session.remark("warning", f"the hostfile's line for {name} has changed; {_ANEW}")
    if not changes.joining and not changes.leaving and not changes.altered:
        session.remark("info", "the hostfile was edited; it names the same nodes")
    return changes.nodes


def _parse(path: Path, text: str | None) -> tuple[NodeSpec, ...]:
    if text is None:
        raise ConfigError(f"{path} cannot be read as text")
    nodes = parse_hostfile(text, source=str(path))
    if not nodes:
        raise ConfigError(f"{path}: names no node; to end the run, use `oobleck stop`")
    return nodes


async def _read(path: Path) -> str | None:
    """The file's text; None where there is none."""
    try:
        # A short patience: a pipe in its place must not hold up the run.
        return await trio.to_thread.run_sync(partial(read_input, path, "hostfile", patience_s=_PATIENCE_S))
    except UserError:
        return None
