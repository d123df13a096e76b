"""What the master sends to agents through others: one message for all that are sent the same.

Each message is numbered, and kept for a while. An agent that loses its relay reports the greatest number that it has
received; the master sends what followed again, to the agent and to all that speak through it. An agent drops, by their
numbers, messages that it has had before. So no message is lost with a relay, and none is taken twice.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

from oobleck.control.events import Send, SendAll, SendOrders
from oobleck.control.protocol import ForWorker, MasterMessage, PlanOrder, Relayed, StopAgent, runs_of
from oobleck.job import ControlSpec
from oobleck.planner import WorkerId

from .tree import RelayTree

# Messages are kept for this many leases: a relay that delays one for longer has been left before.
_KEPT = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A message that was sent through relays."""

    number: int
    said_s: float
    nodes: tuple[str, ...]
    devices: tuple[int, ...]
    message: bytes


class RelayMail:
    """Finds the way of each message. It changes no tree."""

    def __init__(self, control: ControlSpec, tree: RelayTree, encode: Callable[[MasterMessage], bytes]) -> None:
        self._tree = tree
        self._encode = encode
        self._keeps_s = _KEPT * control.lease_s
        self._kept: deque[_Kept] = deque()
        self._since: dict[str, int] = {}
        """The number after which anything can have been sent to each node through relays."""
        self._forgotten: dict[str, int] = {}
        """The greatest number of a message to each node that is not kept any more."""
        self.number = 0

    def add(self, node: str) -> None:
        """A node's agent has begun a conversation: it has received nothing through relays."""
        self._since[node] = self.number
        self._forgotten.pop(node, None)

    def remove(self, node: str) -> None:
        self._since.pop(node, None)
        self._forgotten.pop(node, None)

    def route(self, command: Send | SendAll | SendOrders, now_s: float) -> Iterator[Send]:
        """Return what the master sends for a command of the coordinator. O(receivers)."""
        tree = self._tree
        match command:
            case Send(node=node, message=message):
                if tree.is_direct(node) or isinstance(message, StopAgent):
                    yield command  # a relay that ends passes nothing on to agents that are to end as well
                elif isinstance(message, ForWorker):
                    yield from self._say({(message.device,): [node]}, replace(message, device=0), now_s)
                else:
                    yield from self._say({(): [node]}, message, now_s)
            case SendAll(worker_ids=worker_ids, message=message):
                direct = tuple(each for each in worker_ids if tree.is_direct(each.node))
                yield from replace(command, worker_ids=direct).each()
                others = [each for each in worker_ids if not tree.is_direct(each.node)]
                if others:
                    yield from self._say(_by_devices(others), replace(message, device=0), now_s)
            case SendOrders():
                yield from self._route_orders(command, now_s)

    def say_again(self, node: str, heard: int) -> list[Send] | None:
        """Return what a node that is direct again, and those below it, may have missed; None if that is not kept."""
        below = set(self._tree.below(node))
        if any(self._forgotten.get(each, 0) > heard for each in below):
            return None
        sends: list[Send] = []
        for kept in reversed(self._kept):
            if kept.number <= heard:
                break
            # What was sent before a node's conversation began was for its predecessor.
            missed = [each for each in kept.nodes if each in below and kept.number > self._since.get(each, 0)]
            if missed:
                sends.append(Send(node=node, message=self._relayed(kept, missed)))
        return sends[::-1]

    def _route_orders(self, command: SendOrders, now_s: float) -> Iterator[Send]:
        alike: dict[tuple[object, ...], tuple[PlanOrder, list[WorkerId]]] = {}
        for send in command.each():
            message = send.message
            if self._tree.is_direct(send.node) or not isinstance(message, PlanOrder):
                yield send
            else:
                worker_id = WorkerId(node=send.node, device=message.device)
                alike.setdefault(_likeness(message), (message, []))[1].append(worker_id)
        for message, worker_ids in alike.values():
            yield from self._say(_by_devices(worker_ids), replace(message, device=0), now_s)

    def _say(
        self, nodes_by_devices: Mapping[tuple[int, ...], Iterable[str]], message: MasterMessage, now_s: float
    ) -> Iterator[Send]:
        frame = self._encode(message)
        self._forget(now_s - self._keeps_s)
        for devices, nodes in nodes_by_devices.items():
            self.number += 1  # all messages share one order, so that agents drop what they have had by another way
            kept = _Kept(number=self.number, said_s=now_s, nodes=tuple(nodes), devices=devices, message=frame)
            self._kept.append(kept)
            by_root: defaultdict[str, list[str]] = defaultdict(list)
            for node in kept.nodes:
                root = self._tree.root_of(node)
                if root is not None:  # else `say_again` sends it once the node has left its relay
                    by_root[root].append(node)
            for root, found in by_root.items():
                yield Send(node=root, message=self._relayed(kept, found))

    def _relayed(self, kept: _Kept, nodes: Iterable[str]) -> Relayed:
        positions = runs_of(sorted(map(self._tree.position_of, nodes)))
        return Relayed(number=kept.number, to=positions, devices=kept.devices, message=kept.message)

    def _forget(self, before_s: float) -> None:
        while self._kept and self._kept[0].said_s < before_s:
            kept = self._kept.popleft()
            for node in kept.nodes:
                if node in self._since and kept.number > self._since[node]:
                    self._forgotten[node] = kept.number


def _by_devices(worker_ids: Iterable[WorkerId]) -> Mapping[tuple[int, ...], list[str]]:
    devices: defaultdict[str, list[int]] = defaultdict(list)
    for worker_id in worker_ids:
        devices[worker_id.node].append(worker_id.device)
    nodes: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
    for node, found in devices.items():
        nodes[tuple(sorted(found))].append(node)
    return nodes


def _likeness(message: ForWorker) -> tuple[object, ...]:
    """Equal for messages that differ in their devices only."""
    values = [getattr(message, part.name) for part in fields(message) if part.name != "device"]
    # A value that is encoded once is the same object in all of them, and too long to be compared.
    return (type(message), *(id(value) if getattr(value, "is_encoded_once", False) else value for value in values))
