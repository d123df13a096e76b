"""What a virtual worker banks of a step while its program runs on, as `training.banking` does.

nothing ── begin ──> reducing ── all sums are here ──> committing ── all have theirs ──> banked: nothing again
                        └──────── a fence or a failure: given back, and nothing is banked any more ────┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from oobleck.control.messages import Banked, BankRecord
from oobleck.control.recovery import NOTHING_BANKED
from oobleck.control.standing import Interrupted, PeerLost, Standing

from .fabric import Contribution, Fabric, GroupKey, Violation, Wait
from .groups import GroupTable
from .lane import Reduction
from .layers import HeldLayers
from .moves import Moves

__all__ = ["Bank"]


@dataclass(slots=True)
class _Pending:
    """A section whose gradients are on their way."""

    number: int
    step: int
    mine: tuple[int, ...]
    """The microbatches that this worker put into it."""
    posted: list[tuple[GroupKey, tuple[int, ...], int]]
    summed: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By layer, once all sums are here: the microbatches in them."""
    commit: int | None = None
    """The sequence number of the commit's all-reduce, once that is posted."""
    has_failed: bool = False


class Bank:
    """Mutable: what is banked of the step in flight, and the section that is about to be."""

    def __init__(
        self,
        standing: Standing,
        fabric: Fabric,
        groups: GroupTable,
        layers: HeldLayers,
        *,
        on_failed: Callable[[int, PeerLost], None],
    ) -> None:
        """`layers` get the sums of what is banked. `on_failed` is called with the plan's generation."""
        self._standing = standing
        self._fabric = fabric
        self._groups = groups
        self._layers = layers
        self._on_failed = on_failed
        self._reduction: Reduction | None = None
        """Of the plan in force; None for a spare."""
        self._is_last = False
        self._pending: _Pending | None = None
        self._generation = 0
        self._number = 0
        self._before = NOTHING_BANKED
        """What was banked of the step in flight before the plan in force."""
        self.loss = 0.0
        """Of what is banked: one for each microbatch."""

    def adopt(self, generation: int, before: Banked, reduction: Reduction | None, *, is_last: bool) -> None:
        """A plan comes into force, with this banked of the step in flight; the last stage knows of losses."""
        self._reduction, self._is_last = reduction, is_last
        self._generation, self._number, self.loss = generation, 0, before.loss
        self._before = before.generation, before.number
        self._pending = None

    def is_at(self, banked: Banked) -> bool:
        """Tell whether just this is banked here."""
        here = (self._generation, self._number) if self._number else self._before
        return here == (banked.generation, banked.number)

    def end_step(self) -> None:
        """The step is applied: nothing is banked of the next."""
        self._number, self.loss = 0, 0.0
        self._before = NOTHING_BANKED

    def begin(self, step: int, mine: tuple[int, ...]) -> None:
        """Post the gradients of a section's microbatches."""
        assert self._pending is None
        assert self._reduction is not None
        posted = [
            (key, layers, self._groups.post(key, Contribution(step, mine, self._layers.digests(layers))))
            for key, layers in self._reduction.buckets
        ]
        self._pending = _Pending(self._number + 1, step, mine, posted)

    @property
    def is_busy(self) -> bool:
        """A section is on its way, and may still arrive."""
        return self._pending is not None and not self._pending.has_failed

    @property
    def has_failed(self) -> bool:
        return self._pending is not None and self._pending.has_failed

    def look(self) -> Moves:
        """Move on as far as the others let us. Nothing is raised."""
        pending = self._pending
        if pending is None or pending.has_failed or self._standing.is_fenced():
            return
        commit_key = self._commit_key
        try:
            if pending.commit is None and all(self._fabric.is_complete(key, at) for key, _, at in pending.posted):
                yield self._pause("sums of a section are here", [key for key, _, _ in pending.posted])
                for key, layers, at in pending.posted:
                    pending.summed.update(dict.fromkeys(layers, self._fabric.total(key, at, pending.step)))
                self._standing.note_bank_reduced(pending.number)
                yield self._pause("about to bank", [commit_key])
                mine = pending.mine if self._is_last else ()
                pending.commit = self._groups.post(commit_key, Contribution(pending.step, mine))
            if pending.commit is not None and self._fabric.is_complete(commit_key, pending.commit):
                yield self._pause("agreed to bank", [commit_key])
                agreed = self._fabric.total(commit_key, pending.commit, pending.step)
                if any(summed != agreed for summed in pending.summed.values()):
                    what = f"section {pending.number} of step {pending.step}"
                    raise Violation(f"{what} sums {pending.summed}, not {agreed}")
                record = BankRecord(
                    step=pending.step,
                    generation=self._generation,
                    number=pending.number,
                    loss=self.loss + len(agreed),
                )
                self._standing.bank(record)
                self._fold(pending, record)
        except PeerLost as error:
            pending.has_failed = True
            self._on_failed(self._generation, error)
        except Interrupted:
            pass  # a fence came first: whoever ordered it decides what becomes of the section

    @property
    def _commit_key(self) -> GroupKey:
        assert self._reduction is not None
        return self._reduction.commit_key

    def settle(self) -> Moves:
        """Wait for the section on its way. Raises Interrupted or PeerLost."""
        while self._pending is not None and not self._pending.has_failed:
            try:
                yield self._arrival(self._commit_key)
            except PeerLost:
                self._pending.has_failed = True
                raise
            if self._standing.is_fenced():
                raise Interrupted
            yield from self.look()
        if self.has_failed:
            raise PeerLost("a section's sums")

    def _arrival(self, commit_key: GroupKey) -> Wait:
        """The wait for what the section on its way needs next."""
        pending = self._pending
        assert pending is not None
        posted = (
            [(key, at) for key, _, at in pending.posted] if pending.commit is None else [(commit_key, pending.commit)]
        )
        return Wait(
            f"section {pending.number} of step {pending.step}",
            lambda: all(self._fabric.is_complete(key, at) for key, at in posted),
            self._standing.is_fenced,
            lambda: any(self._fabric.lacks_a_member(key) for key, _ in posted),
            touches_network=any(len(key.members) > 1 for key, _ in posted),
        )

    def catch_up(self, record: BankRecord) -> None:
        """Bank by order what is reduced."""
        if self._standing.catch_up_bank(record):
            assert self._pending is not None
            if not self._pending.summed:
                raise Violation(f"section {record.number} of step {record.step} is claimed to be reduced")
            self._fold(self._pending, record)

    def give_back(self) -> tuple[int, ...]:
        """Give up the section on its way; return the microbatches that were put into it."""
        pending, self._pending = self._pending, None
        return () if pending is None else pending.mine

    def _fold(self, pending: _Pending, record: BankRecord) -> None:
        self._layers.fold(pending.summed, record)
        self._pending = None
        self._number, self.loss = pending.number, record.loss

    def _pause(self, what: str, keys: Sequence[GroupKey]) -> Wait:
        """A point where the training thread may be preempted, or finds that the network has failed it."""
        return Wait(what, lambda: True, can_fail=lambda: any(map(self._fabric.lacks_a_member, keys)))
