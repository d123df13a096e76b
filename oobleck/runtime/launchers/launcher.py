"""The one seam between a run and the place where its nodes live.

Whatever lists nodes and connects to them is a launcher: a hostfile with SSH, a command that prints one, a port that
nodes dial in to. Nothing else of a run knows which it is.

A launcher never says that a node is lost. Schedulers learn of a death after seconds; connections and leases say so in
milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import trio

from oobleck.job import NodeSpec
from oobleck.runtime.ssh import SSHConnection


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A node is there that was not, or that left or was lost before: it may join."""

    node: NodeSpec
    by_itself: bool = False
    """Nobody has asked for it just now: a process on it may be started again whenever it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A node is not listed any more, or will be taken away: drain it, if it is still there."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """Something that people should read; it changes nothing."""

    level: str
    """`info` or `warning`."""
    text: str


NodeChange = Arrived | Leaving | Reported


class Launcher(Protocol):
    """Where the nodes of a run come from, and how they are reached."""

    @property
    def are_virtual(self) -> bool:
        """Whether all nodes are this machine, and share its directories and its faults."""

    @property
    def python(self) -> str:
        """The interpreter to be used on nodes, unless the user names another one."""

    @property
    def nodes(self) -> tuple[NodeSpec, ...]:
        """The nodes that are known now; some of them need not be in the run."""

    async def begin(self, *, waits: bool = True) -> tuple[NodeSpec, ...]:
        """Wait until there are enough nodes to begin with, and return them; or those of now, unless it `waits`."""

    async def connect(self, node: NodeSpec) -> SSHConnection:
        """Connect to a node. Raises NodeUnreachable. The caller closes the connection."""

    async def has_ended(self, node: NodeSpec) -> bool:
        """Whether a node whose connection has just been lost is gone for sure, with all that ran there.

        False where it may live, and be reached again. Takes a moment at most.
        """

    async def follow(self, changes: trio.MemorySendChannel[NodeChange]) -> None:
        """Report what changes after `begin`, until cancelled."""

    async def release(self, node: NodeSpec) -> None:
        """Give a node back that has left the run for good; best effort, raises nothing."""

    def named(self, text: str) -> NodeSpec:
        """The node that a user who adds one means by `text`. Raises UserError."""
