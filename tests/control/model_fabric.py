"""The model's data plane: what process groups do, without tensors, as far as the commit protocol can tell.

Deliberately unkind where the real one may be: a message that was sent may be lost with its sender or survive it,
and an all-reduce that all have posted may complete on some members and fail on others.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from oobleck.planner import Place

__all__ = ["Fabric", "GroupKey", "Violation", "Wait"]


class Violation(AssertionError):
    """A promise of the protocol was broken."""


@dataclass(frozen=True, slots=True, order=True)
class GroupKey:
    """What the members of a group agree on without talking (as `training.groups` has it)."""

    purpose: str
    generation: int
    members: tuple[Place, ...]

    @property
    def name(self) -> str:
        return f"{self.generation}/{self.purpose}/{','.join(map(str, self.members))}"


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Wait:
    """What a training thread is waiting for; a plain preemption point is ready at once."""

    what: str
    ready: Callable[[], bool]
    interrupted: Callable[[], bool] = _never
    can_fail: Callable[[], bool] = _never
    """A peer that it needs is gone: the environment may end the wait with an error at any time."""
    touches_network: bool = False
    """The environment may end it with an error although nobody is gone."""


class Fabric:
    """Mail between the stages of pipelines and between holders of layers, and all-reduces."""

    def __init__(self) -> None:
        self._ended: dict[Place, int] = {}
        """The newest generation in which an ended worker of a place may have been in a group."""
        self._mail: defaultdict[tuple[GroupKey, Place, Place, int], deque[object]] = defaultdict(deque)
        self._reductions: defaultdict[tuple[GroupKey, int], dict[Place, object]] = defaultdict(dict)

    def lacks_a_member(self, key: GroupKey) -> bool:
        return any(self._ended.get(member, 0) >= key.generation for member in key.members)

    def end(self, place: Place, generation: int) -> None:
        """The worker of a place is no more; one that comes after it is in groups of newer generations."""
        self._ended[place] = generation

    def send(self, key: GroupKey, source: Place, target: Place, tag: int, value: object) -> None:
        self._mail[key, source, target, tag].append(value)

    def has_mail(self, key: GroupKey, source: Place, target: Place, tag: int) -> bool:
        return bool(self._mail[key, source, target, tag])

    def receive(self, key: GroupKey, source: Place, target: Place, tag: int) -> object:
        return self._mail[key, source, target, tag].popleft()

    def post(self, key: GroupKey, sequence: int, place: Place, value: object) -> None:
        """Contribute to the group's all-reduce number `sequence`."""
        contributions = self._reductions[key, sequence]
        if place in contributions:
            raise Violation(f"{place} posts all-reduce {sequence} of {key.name} twice")
        contributions[place] = value

    def is_complete(self, key: GroupKey, sequence: int) -> bool:
        return len(self._reductions[key, sequence]) == len(key.members)

    def contributions(self, key: GroupKey, sequence: int) -> list[object]:
        found = self._reductions[key, sequence]
        return [found[place] for place in key.members]
