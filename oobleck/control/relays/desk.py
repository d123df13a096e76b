"""The master's side of the tree of agents: what it says finds its way, and what comes through relays becomes
events.

The coordinator knows nothing of relays. It is given the same events as without them, though fewer: many answers
that are equal are one, and so is that many nodes were heard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import assert_never

from oobleck.control.events import BatchReceived, Event, MessageReceived, NodesHeard, Send, SendAll, SendOrders
from oobleck.control.protocol import (
    AgentMessage,
    FromWorker,
    MasterMessage,
    Pace,
    RelayHeard,
    RelayJoined,
    RelayLeft,
    RelayOpen,
    RelayReport,
    RelaySaid,
    Resumed,
    Status,
    numbers_in,
)
from oobleck.job import ControlSpec
from oobleck.planner import WorkerId

from .mail import RelayMail
from .tree import RelayTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What follows from a report."""

    events: tuple[Event, ...] = ()
    """For the coordinator."""
    sends: tuple[Send, ...] = ()
    is_lost: tuple[str, ...] = ()
    """Nodes to which something was said that cannot be said again: their conversations begin again."""


class RelayDesk:
    """Gives reports about relays to the tree, and messages to the mail. It has no clock and no socket."""

    def __init__(
        self,
        control: ControlSpec,
        *,
        encode: Callable[[MasterMessage], bytes],
        decode: Callable[[bytes], AgentMessage],
    ) -> None:
        """`encode` makes the frame of a message; `decode` reads one, and raises PeerError for nonsense."""
        self._tree = RelayTree(control)
        self._mail = RelayMail(control, self._tree, encode)
        self._decode = decode

    @property
    def due_s(self) -> float:
        """When `handle_deadline` wants to be called; infinity for never."""
        return self._tree.due_s

    def handle_deadline(self, now_s: float) -> list[Send]:
        """Look after the relays; early calls do nothing."""
        return self._tree.handle_deadline(now_s)

    def is_direct(self, node: str) -> bool:
        """Return whether a node's agent has no relay."""
        return self._tree.is_direct(node)

    def route(self, command: Send | SendAll | SendOrders, now_s: float) -> Iterable[Send]:
        """Return what is to be sent to agents directly."""
        if not self._tree.is_needed:
            return (command,) if isinstance(command, Send) else command.each()
        return self._mail.route(command, now_s)

    def come(self, node: str, now_s: float, *, takes_calls: bool = True) -> list[Send]:
        """An agent has said hello. One that `takes_calls` has a place in the tree; another one speaks directly."""
        self._mail.come(node)
        return self._tree.come(node, now_s) if takes_calls else self._tree.go(node, now_s)

    def go(self, node: str, now_s: float) -> list[Send]:
        """A node's connection is given up."""
        self._mail.go(node)
        return self._tree.go(node, now_s)

    def hear(self, node: str, now_s: float) -> None:
        """An agent has said something directly."""
        self._tree.hear(node, now_s)

    def report(self, node: str, report: RelayReport, now_s: float) -> Heard:
        """Take in what an agent says about relays, or what others say through it. Raises PeerError."""
        self._tree.hear(node, now_s)
        spoke = NodesHeard(heard=((node, now_s),))
        match report:
            case RelayOpen():
                self._tree.open(node, report, now_s)
                return Heard(events=(spoke,))
            case RelayJoined(attempt=attempt):
                return Heard(events=(spoke,), sends=tuple(self._tree.join(node, attempt, self._mail.number)))
            case RelayLeft():
                return self._left(node, report, now_s)
            case RelayHeard(heard=heard):
                return Heard(events=(spoke, NodesHeard(heard=tuple(self._heard(node, heard, now_s)))))
            case RelaySaid():
                return Heard(events=tuple(self._said(node, report, now_s)))
            case _:
                assert_never(report)

    def _left(self, node: str, left: RelayLeft, now_s: float) -> Heard:
        was_direct = self._tree.is_direct(node)
        self._tree.leave(node, left, now_s)
        spoke = NodesHeard(heard=((node, now_s),))
        if was_direct:
            return Heard(events=(spoke,))
        again = self._mail.say_again(node, left.heard)
        if again is None:
            return Heard(events=(spoke,), is_lost=tuple(self._tree.below(node)))
        return Heard(events=(spoke,), sends=tuple(again))

    def _heard(
        self, through: str, heard: Iterable[tuple[int, tuple[tuple[int, int], ...]]], now_s: float
    ) -> Iterator[tuple[str, float]]:
        for age_ms, by in heard:
            heard_s = now_s - age_ms / 1000
            for position in numbers_in(by):
                node = self._tree.speaker(position, through=through)
                if node is not None:
                    self._tree.hear(node, heard_s)
                    yield node, heard_s

    def _said(self, through: str, said: RelaySaid, now_s: float) -> Iterator[Event]:
        message = self._decode(said.message)
        nodes = [
            node
            for position in numbers_in(said.by)
            if (node := self._tree.speaker(position, through=through)) is not None
        ]
        for node in nodes:
            self._tree.hear(node, now_s)
        if isinstance(message, Status | Resumed | Pace):
            worker_ids = tuple(WorkerId(node=node, device=device) for node in nodes for device in said.devices)
            yield BatchReceived(worker_ids=worker_ids, message=message)
        elif isinstance(message, FromWorker):
            for device in said.devices:
                own = replace(message, device=device)
                yield from (MessageReceived(node=node, message=own) for node in nodes)
        else:
            yield from (MessageReceived(node=node, message=message) for node in nodes)
