"""Sections of a step over the virtual fabric: carries out the effects of `control.steps.PartialCommit`."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

from oobleck.control.protocol import SectionRecord, Subject, Tally, Topic, Totals
from oobleck.control.steps import CommitState, Committee, GroupKey, SectionTotals

from .agreements import VirtualAgreements
from .fabric import Contribution, Fabric, Violation, Wait
from .groups import Bucket, GroupTable
from .layers import HeldLayers
from .ports import Moves, pause


@dataclass(slots=True)
class _Posted:
    number: int
    step: int
    mine: tuple[int, ...]
    """This worker's microbatches."""
    sums: list[tuple[GroupKey, tuple[int, ...], int]]
    """Groups, their layers, and the sequence numbers of their all-reduces."""
    summed: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The microbatches in each layer's sum, once all are complete."""
    agrees: bool = False
    """Whether this worker has posted its part of the agreement."""

    @property
    def subject(self) -> Subject:
        return Subject(Topic.SECTION, self.step, self.number)


class SectionSums:
    """The sums of the section that is being committed, if there is one, and the agreement on it."""

    def __init__(
        self,
        commit_state: CommitState,
        fabric: Fabric,
        groups: GroupTable,
        agreements: VirtualAgreements,
        layers: HeldLayers,
        *,
        num_lanes: int,
    ) -> None:
        """`num_lanes` as in `JobSpec`."""
        self._num_lanes = num_lanes
        self._commit_state, self._fabric, self._groups = commit_state, fabric, groups
        self._agreements, self._layers = agreements, layers
        self._buckets: tuple[Bucket, ...] = ()
        self._committee: Committee | None = None
        self._tells = False
        self._posted: _Posted | None = None

    def adopt(self, buckets: tuple[Bucket, ...], committee: Committee, *, tells: bool) -> None:
        """Adopt a plan; `tells` if this worker's stage has the losses."""
        self._buckets, self._committee, self._tells = buckets, committee, tells

    def post(self, number: int, step: int, mine: tuple[int, ...]) -> None:
        sums = [
            (key, layers, self._groups.post(key, Contribution(step, mine, self._layers.digests(layers))))
            for key, layers in self._buckets
        ]
        self._posted = _Posted(number, step, mine, sums)

    def take_sums(self) -> Generator[Wait, None, bool]:
        """Take the sums, if they are complete. Raises PeerLost."""
        posted = self._section
        if not all(self._fabric.is_complete(key, at) for key, _, at in posted.sums):
            return False
        # The training thread may be preempted here, or find that the network has failed it.
        lacks = self._fabric.lacks_a_member
        yield Wait(
            "sums of a section are here", lambda: True, can_fail=lambda: any(lacks(key) for key, _, _ in posted.sums)
        )
        for key, layers, at in posted.sums:
            posted.summed.update(dict.fromkeys(layers, self._fabric.total(key, at, posted.step)))
        return True

    def post_totals(self) -> Moves:
        """Post this worker's part of the agreement. Raises PeerLost."""
        posted = self._section
        yield from pause("about to commit")
        mine = Tally.of(posted.mine if self._tells else (), num_lanes=self._num_lanes)
        self._agreements.bring(self._everyone, posted.subject, Totals((float(mine.count),), mine))
        posted.agrees = True

    def take_totals(self) -> Generator[Wait, None, SectionTotals | None]:
        """Take the total of the agreement, if it is here. Raises PeerLost."""
        posted, everyone = self._section, self._everyone
        if not self._agreements.is_here(everyone, posted.subject):
            return None
        yield from pause("agreed to commit")
        agreed = self._agreements.take(everyone, posted.subject)
        if any(Tally.of(summed, num_lanes=self._num_lanes) != agreed.counted for summed in posted.summed.values()):
            raise Violation(f"section {posted.number} of step {posted.step} sums {posted.summed}, not {agreed}")
        return SectionTotals(agreed.numbers[0], agreed.counted)

    def fold(self, record: SectionRecord) -> None:
        posted = self._section
        if not posted.summed:
            raise Violation(f"section {record.number} of step {record.step} is claimed to be reduced")
        self._layers.fold(posted.summed, record)
        self._posted = None

    def give_back(self) -> tuple[int, ...]:
        """Abandon the section, and return its microbatches."""
        posted, self._posted = self._section, None
        return posted.mine

    def arrival(self) -> Wait:
        posted = self._section
        if posted.agrees:
            return self._agreements.arrival(self._everyone, posted.subject)
        awaited = [(key, at) for key, _, at in posted.sums]
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
    def _everyone(self) -> Committee:
        assert self._committee is not None
        return self._committee
