"""Rendezvous keys on their way to those who wait for them: many to a message.

A group of n workers is formed of n keys, each of which n - 1 nodes want. One by one these were n² messages, each with
its frame, its packet and its turns on both ends.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

from oobleck.control.protocol import StoreKeys

from .inputs import PassOn, Send

__all__ = ["KeyGathering", "bundle_keys"]

_BUNDLE_BYTES = 1 << 20
"""A message holds no more than this, but for its first key: frames have a limit."""


_FEW_NODES = 16
_GATHER_S = 0.005
"""A key that more than a few nodes want waits for so long at most, for others to go along with."""


class KeyGathering:
    """Keys that wait for others."""

    def __init__(self) -> None:
        self._waiting: list[PassOn] = []
        self.due_s = math.inf
        """When `take_in` wants to be called, at the latest; infinity for never."""

    def take_in(self, now_s: float, keys: Iterable[PassOn]) -> list[Send]:
        """Take keys in, if there are any; return what is to be sent now."""
        hurried: list[PassOn] = []
        for key in keys:
            (self._waiting if len(key.nodes) > _FEW_NODES else hurried).append(key)
        if self._waiting and self.due_s == math.inf:
            self.due_s = now_s + _GATHER_S
        elif now_s >= self.due_s:
            hurried += self._waiting
            self._waiting, self.due_s = [], math.inf
        return list(bundle_keys(hurried))


def bundle_keys(commands: Iterable[PassOn]) -> Iterator[Send]:
    """Put keys together by the node that they go to, in their order; O(keys · nodes)."""
    waiting: defaultdict[str, list[tuple[str, bytes]]] = defaultdict(list)
    for command in commands:
        item = (command.key, command.value)
        for node in command.nodes:
            waiting[node].append(item)
    for node, keys in waiting.items():
        for bundle in _split(keys):
            yield Send(node=node, message=StoreKeys(keys=bundle))


def _split(keys: list[tuple[str, bytes]]) -> Iterator[tuple[tuple[str, bytes], ...]]:
    first, size_bytes = 0, 0
    for index, (key, value) in enumerate(keys):
        size_bytes += len(key) + len(value)
        if size_bytes > _BUNDLE_BYTES and index > first:
            yield tuple(keys[first:index])
            first, size_bytes = index, len(key) + len(value)
    yield tuple(keys[first:])
