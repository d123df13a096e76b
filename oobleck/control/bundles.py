"""Rendezvous keys on their way to those who wait for them: many to a message.

A group of n workers is formed of n keys, each of which n - 1 nodes want. One by one these were n² messages, each with
its frame, its packet and its turns on both ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from .events import PassOn, Send
from .messages import StoreKeys

__all__ = ["bundle_keys"]

_BUNDLE_BYTES = 1 << 20
"""A message holds no more than this, but for its first key: frames have a limit."""


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
