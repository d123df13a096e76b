"""Relays as agents know them: the shape of the tree, what a relay merges, and when agents leave a silent one.

The tree follows from positions alone. With a fan-out of F, positions 0 to F - 1 send to the master itself, and position
p is the relay of F(p + 1) to F(p + 1) + F - 1. So no message lists who is below whom, and three levels have 33,824
positions for F = 32.

A relay passes equal messages on as one, for which messages wait a few milliseconds. Of reports of a committed step it
passes on the first, and heartbeats become one message for all. The messages of an agent keep their order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from oobleck.control import protocol

PATIENCE = 0.4
"""After this share of a lease, agents leave a silent relay, and reach the master directly before the lease lapses."""
_GATHER_S = 0.005
_NEWS_KEPT = 8
# Ages are rounded up to multiples of it, so that agents heard at about the same time share a message.
_AGE_MS = 10


def parent_of(position: int, fanout: int) -> int | None:
    """Return the position of its relay; None if it sends to the master directly."""
    return None if position < fanout else position // fanout - 1


def children_of(position: int, fanout: int) -> range:
    first = fanout * (position + 1)
    return range(first, first + fanout)


def child_towards(position: int, target: int, fanout: int) -> int | None:
    """Return the child of `position` that is `target` or leads to it; None if it is not below. O(depth)."""
    at: int | None = target
    # A relay's position is smaller than those of its children, so the way up ends at or before this one.
    while at is not None and at > position:
        above = parent_of(at, fanout)
        if above == position:
            return at
        at = above
    return None


class _Said(NamedTuple):
    """A message that some agents, or their workers, have sent alike."""

    positions: tuple[int, ...]
    devices: tuple[int, ...]
    frame: bytes
    news: str


class Gathering:
    """The messages since `take` was last called, and which agents were heard."""

    def __init__(self, encode: Callable[[protocol.AgentMessage], bytes], *, passes_s: float) -> None:
        """`passes_s` is the interval in seconds at which to pass on which agents were heard."""
        self._encode = encode
        self._passes_s = passes_s
        self._heard_s: dict[int, float] = {}
        self._said: list[_Said] = []
        self._passed: dict[str, int] = {}
        """The names of news that were passed on, with the child that sent them."""
        self.due_s = math.inf
        """When to call `take`; infinity for never."""

    def hear(self, position: int, message: protocol.AgentMessage, now_s: float) -> bool:
        """Take an agent's message; return whether it is to be passed on."""
        # A heartbeat that wants no answer shows only that its agent lives. Its age travels with it, so that leases are
        # as exact as without relays.
        if isinstance(message, protocol.Heartbeat) and message.sequence is None:
            self._note_heard((position,), now_s, now_s)
        elif isinstance(message, protocol.FromWorker):
            news = protocol.news_in(message)
            if not self._is_new(position, news):
                return False
            # Without their devices, equal messages of different workers are equal bytes.
            frame = self._encode(replace(message, device=0))
            self._add(_Said((position,), (message.device,), frame, news), now_s)
        else:
            self._add(_Said((position,), (), self._encode(message), ""), now_s)
        return True

    def pass_on(self, child: int, message: protocol.RelaySaid | protocol.RelayHeard, now_s: float) -> bool:
        """Take another relay's message; return whether it is to be passed on."""
        match message:
            case protocol.RelaySaid(by=by, devices=devices, message=said, news=news):
                if not self._is_new(child, news):
                    return False
                self._add(_Said(tuple(protocol.numbers_in(by)), devices, said, news), now_s)
            case protocol.RelayHeard(heard=heard):
                for age_ms, by in heard:
                    self._note_heard(protocol.numbers_in(by), now_s - age_ms / 1000, now_s)
        return True

    def source_of(self, news: str) -> int | None:
        """Return which child sent this news first; None if that is forgotten."""
        return self._passed.get(news)

    def take(self, now_s: float) -> list[protocol.RelaySaid | protocol.RelayHeard]:
        """Return what to pass on now; nothing before it is due."""
        if now_s < self.due_s:
            return []
        said = list(_merged(self._said))
        heard, self._heard_s, self._said, self.due_s = self._heard_s, {}, [], math.inf
        return [*said, *([protocol.RelayHeard(heard=tuple(_by_age(heard, now_s)))] if heard else [])]

    def forget(self) -> None:
        """Pass news on again that may be lost."""
        self._passed.clear()

    def _is_new(self, child: int, news: str) -> bool:
        if news in self._passed:  # the master needs one report of a committed step
            return False
        if news:
            self._passed[news] = child
            if len(self._passed) > _NEWS_KEPT:
                del self._passed[next(iter(self._passed))]
        return True

    def _add(self, said: _Said, now_s: float) -> None:
        self._said.append(said)
        self.due_s = min(self.due_s, now_s + _GATHER_S)

    def _note_heard(self, positions: Iterable[int], heard_s: float, now_s: float) -> None:
        for position in positions:
            # The report of a relay below may be older than what was heard since.
            self._heard_s[position] = max(heard_s, self._heard_s.get(position, -math.inf))
        self.due_s = min(self.due_s, now_s + self._passes_s)


def _merged(said: Iterable[_Said]) -> Iterator[protocol.RelaySaid]:
    """Merge equal messages; O(messages)."""
    for together in _rounds(said):
        devices_of: defaultdict[tuple[bytes, str], defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for each in together:
            for position in each.positions:
                devices_of[each.frame, each.news][position] += each.devices
        for (frame, news), found in devices_of.items():
            # A merged message has one list of devices for all its nodes.
            alike: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
            for position, speakers in found.items():
                alike[tuple(sorted(speakers))].append(position)
            for devices, by in alike.items():
                yield protocol.RelaySaid(by=protocol.runs_of(sorted(by)), devices=devices, message=frame, news=news)


def _rounds(said: Iterable[_Said]) -> list[list[_Said]]:
    """Divide messages into rounds, in each of which an agent sends one message, perhaps by several of its workers."""
    # Merging within a round, and only there, keeps the order of each agent's messages.
    rounds: list[list[_Said]] = []
    # The round of the newest message of each position, that message, and the devices that sent it.
    latest: dict[int, tuple[int, bytes, tuple[int, ...]]] = {}
    for each in said:
        known = [latest[position] for position in each.positions if position in latest]
        at = max([_first_round(each, *newest) for newest in known], default=0)
        for position in each.positions:
            number, _, speakers = latest.get(position, (-1, b"", ()))
            latest[position] = (at, each.frame, each.devices + (speakers if number == at else ()))
        if at == len(rounds):
            rounds.append([])
        rounds[at].append(each)
    return rounds


def _first_round(said: _Said, number: int, frame: bytes, speakers: tuple[int, ...]) -> int:
    """Return the first round for a message of an agent whose newest is in round `number`."""
    is_more_of_it = frame == said.frame and said.devices and not set(speakers).intersection(said.devices)
    return number if is_more_of_it else number + 1


def _by_age(heard_s: dict[int, float], now_s: float) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
    found: defaultdict[int, list[int]] = defaultdict(list)
    for position in sorted(heard_s):
        age_ms = max(0.0, now_s - heard_s[position]) * 1000
        # Never rounded down: a node must not appear to have been heard later than it was.
        found[_AGE_MS * math.ceil(age_ms / _AGE_MS)].append(position)
    for age_ms, positions in sorted(found.items()):
        yield age_ms, protocol.runs_of(positions)
