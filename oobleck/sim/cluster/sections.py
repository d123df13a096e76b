"""Sections of a step over the virtual fabric: carries out the effects of `control.commit.partial_commit`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from oobleck.control.commit import CommitState, GroupKey, Totals
from oobleck.control.protocol import SectionRecord

from .buckets import Bucket
from .fabric import Contribution, Fabric, Violation, Wait
from .groups import GroupTable
from .layers import HeldLayers
from .moves import Moves

__all__ = ["SectionSums"]


@dataclass(slots=True)
class _Posted:
    """A section whose gradients are on their way."""

    number: int
    step: int
    mine: tuple[int, ...]
    """The microbatches that this worker put into it."""
    sums: list[tuple[GroupKey, tuple[int, ...], int]]
    """Groups, their layers, and the sequence numbers of their all-reduces."""
    summed: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By layer, once all sums are here: the microbatches in them."""
    totals: int | None = None
    """The sequence number of the all-reduce over everybody, once that is posted."""


class SectionSums:
    """Mutable: the all-reduces of the section on its way, if there is one."""

    def __init__(self, commit_state: CommitState, fabric: Fabric, groups: GroupTable, layers: HeldLayers) -> None:
        """`layers` get the sums of what is committed."""
        self._commit_state = commit_state
        self._fabric = fabric
        self._groups = groups
        self._layers = layers
        self._buckets: tuple[Bucket, ...] = ()
        self._everyone: GroupKey | None = None
        self._tells = False
        self._posted: _Posted | None = None

    def adopt(self, buckets: tuple[Bucket, ...], everyone: GroupKey | None, *, tells: bool) -> None:
        """A plan comes into force; `tells` if this worker's stage knows of losses."""
        self._buckets, self._everyone, self._tells = buckets, everyone, tells

    def post(self, number: int, step: int, mine: tuple[int, ...]) -> None:
        """Post the gradients of a section's microbatches."""
        sums = [
            (key, layers, self._groups.post(key, Contribution(step, mine, self._layers.digests(layers))))
            for key, layers in self._buckets
        ]
        self._posted = _Posted(number, step, mine, sums)

    def take_sums(self) -> Generator[Wait, None, bool]:
        """Take the sums, if they are here. Raises PeerLost."""
        posted = self._section
        if not all(self._fabric.is_complete(key, at) for key, _, at in posted.sums):
            return False
        yield self._pause("sums of a section are here", [key for key, _, _ in posted.sums])
        for key, layers, at in posted.sums:
            posted.summed.update(dict.fromkeys(layers, self._fabric.total(key, at, posted.step)))
        return True

    def post_totals(self) -> Moves:
        """Take part in the all-reduce over everybody. Raises PeerLost."""
        posted = self._section
        yield self._pause("about to commit", [self._commit_key])
        mine = posted.mine if self._tells else ()
        posted.totals = self._groups.post(self._commit_key, Contribution(posted.step, mine))

    def take_totals(self) -> Generator[Wait, None, Totals | None]:
        """Take what all brought to it, if it is here. Raises PeerLost."""
        posted, key = self._section, self._commit_key
        assert posted.totals is not None
        if not self._fabric.is_complete(key, posted.totals):
            return None
        yield self._pause("agreed to commit", [key])
        agreed = self._fabric.total(key, posted.totals, posted.step)
        if any(summed != agreed for summed in posted.summed.values()):
            raise Violation(f"section {posted.number} of step {posted.step} sums {posted.summed}, not {agreed}")
        return Totals(loss=len(agreed), counted=agreed)

    def fold(self, record: SectionRecord) -> None:
        """Put the sums to those that are committed."""
        posted = self._section
        if not posted.summed:
            raise Violation(f"section {record.number} of step {record.step} is claimed to be reduced")
        self._layers.fold(posted.summed, record)
        self._posted = None

    def give_back(self) -> tuple[int, ...]:
        """Give the section up; return the microbatches that were put into it."""
        posted, self._posted = self._section, None
        return posted.mine

    def arrival(self) -> Wait:
        """The wait for what the section needs next."""
        posted = self._section
        awaited = (
            [(key, at) for key, _, at in posted.sums] if posted.totals is None else [(self._commit_key, posted.totals)]
        )
        return Wait(
            f"section {posted.number} of step {posted.step}",
            lambda: all(self._fabric.is_complete(key, at) for key, at in awaited),
            self._commit_state.is_fenced,
            lambda: any(self._fabric.lacks_a_member(key) for key, _ in awaited),
            touches_network=any(len(key.members) > 1 for key, _ in awaited),
        )

    @property
    def _section(self) -> _Posted:
        assert self._posted is not None
        return self._posted

    @property
    def _commit_key(self) -> GroupKey:
        assert self._everyone is not None
        return self._everyone

    def _pause(self, what: str, keys: Sequence[GroupKey]) -> Wait:
        """A point where the training thread may be preempted, or finds that the network has failed it."""
        return Wait(what, lambda: True, can_fail=lambda: any(map(self._fabric.lacks_a_member, keys)))
