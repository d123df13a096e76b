"""The master's side of the tree of agents: finds the way of its messages, and makes events of what relays pass on.

The coordinator knows nothing of relays. It gets the same events as without them, but fewer: one for many equal answers,
and one for many nodes that were heard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple, assert_never

from oobleck.control import events as control_events
from oobleck.control import protocol
from oobleck.job import ControlSpec
from oobleck.planner import WorkerId

from .mail import RelayMail
from .tree import RelayTree


class Heard(NamedTuple):
    """What follows from a report."""

    events: tuple[control_events.Event, ...] = ()
    sends: tuple[control_events.Send, ...] = ()
    is_lost: tuple[str, ...] = ()
    """Nodes that may have missed a message that is not kept any more: their conversations begin again."""


class RelayDesk:
    """Passes reports about relays to the tree, and messages to the mail. It has no clock and no socket."""

    def __init__(
        self,
        control: ControlSpec,
        *,
        encode: Callable[[protocol.MasterMessage], bytes],
        decode: Callable[[bytes], protocol.AgentMessage],
    ) -> None:
        """`encode` makes the frame of a message; `decode` reads one, and raises PeerError for nonsense."""
        self._tree = RelayTree(control)
        self._mail = RelayMail(control, self._tree, encode)
        self._decode = decode

    @property
    def due_s(self) -> float:
        """When to call `handle_deadline`; infinity for never."""
        return self._tree.due_s

    def handle_deadline(self, now_s: float) -> list[control_events.Send]:
        return self._tree.handle_deadline(now_s)

    def is_direct(self, node: str) -> bool:
        return self._tree.is_direct(node)

    def route(
        self, command: control_events.Send | control_events.SendAll | control_events.SendOrders, now_s: float
    ) -> Iterable[control_events.Send]:
        """Return what the master sends to agents directly."""
        if not self._tree.is_needed:
            return (command,) if isinstance(command, control_events.Send) else command.each()
        return self._mail.route(command, now_s)

    def add(self, node: str, now_s: float, *, takes_calls: bool = True) -> list[control_events.Send]:
        """An agent has said hello. It has a place in the tree if it `takes_calls`, and else always speaks directly."""
        self._mail.add(node)
        return self._tree.add(node, now_s) if takes_calls else self._tree.remove(node, now_s)

    def remove(self, node: str, now_s: float) -> list[control_events.Send]:
        self._mail.remove(node)
        return self._tree.remove(node, now_s)

    def note_heard(self, node: str, now_s: float) -> None:
        self._tree.note_heard(node, now_s)

    def report(self, node: str, report: protocol.RelayReport, now_s: float) -> Heard:
        """Take in what an agent reports about relays, or what others send through it. Raises PeerError."""
        self._tree.note_heard(node, now_s)
        spoke = control_events.NodesHeard(heard=((node, now_s),))
        match report:
            case protocol.RelayOpen():
                self._tree.open(node, report, now_s)
                return Heard(events=(spoke,))
            case protocol.RelayJoined(attempt=attempt):
                return Heard(events=(spoke,), sends=tuple(self._tree.join(node, attempt, self._mail.number)))
            case protocol.RelayLeft():
                was_direct = self._tree.is_direct(node)
                self._tree.leave(node, report, now_s)
                # An agent that is direct already was sent nothing through a relay.
                again = [] if was_direct else self._mail.say_again(node, report.heard)
                if again is None:
                    return Heard(events=(spoke,), is_lost=tuple(self._tree.below(node)))
                return Heard(events=(spoke,), sends=tuple(again))
            case protocol.RelayHeard(heard=heard):
                return Heard(events=(spoke, control_events.NodesHeard(heard=tuple(self._heard(node, heard, now_s)))))
            case protocol.RelaySaid():
                return Heard(events=tuple(self._events_of(node, report, now_s)))
            case _:
                assert_never(report)

    def _heard(
        self, through: str, heard: Iterable[tuple[int, protocol.Runs]], now_s: float
    ) -> Iterator[tuple[str, float]]:
        for age_ms, by in heard:
            heard_s = now_s - age_ms / 1000
            for node in self._speakers(through, by):
                self._tree.note_heard(node, heard_s)
                yield node, heard_s

    def _speakers(self, through: str, by: protocol.Runs) -> list[str]:
        speakers = (self._tree.speaker(position, through=through) for position in protocol.numbers_in(by))
        return [node for node in speakers if node is not None]

    def _events_of(self, through: str, said: protocol.RelaySaid, now_s: float) -> Iterator[control_events.Event]:
        message = self._decode(said.message)
        nodes = self._speakers(through, said.by)
        for node in nodes:
            self._tree.note_heard(node, now_s)
        # Every worker sends one of these, and the coordinator takes in equal ones of thousands as one event.
        if isinstance(message, protocol.Status | protocol.Resumed | protocol.Pace):
            worker_ids = tuple(WorkerId(node=node, device=device) for node in nodes for device in said.devices)
            yield control_events.BatchReceived(worker_ids=worker_ids, message=message)
        elif isinstance(message, protocol.FromWorker):
            for device in said.devices:
                own = replace(message, device=device)
                yield from (control_events.MessageReceived(node=node, message=own) for node in nodes)
        else:
            yield from (control_events.MessageReceived(node=node, message=message) for node in nodes)
