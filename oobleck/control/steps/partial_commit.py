"""The committed part of a step: sums of its sections' gradients, which all owners have and no failure can take.

A section is summed and agreed on in the background of the computation, which does not stop for it:

    nothing ── begin ──> reducing ── all sums are here ──> committing ── all have theirs ──> committed: nothing again
                            └──────── a fence or a failure: given back, and nothing is committed any more ────┘

Like the follower, of which this is a part, it knows the sequence alone: its methods are generators of effects, which a
driver carries out while a program runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from oobleck.control.plans import committed_after, num_sections_of
from oobleck.control.protocol import NOTHING, PartialStep, PeerFailed, PlanUpdate, SectionRecord, Tally

from . import worker_effects
from .commit_state import CommitState, Interrupted, PeerLost


@dataclass(slots=True)
class Section:
    """A section whose gradients are being summed."""

    number: int
    step: int
    has_sums: bool = False
    failure: PeerLost | None = None


class PartialCommit:
    """The committed part of the step in flight, and the section on its way."""

    def __init__(self, commit_state: CommitState, *, num_lanes: int = 1) -> None:
        """`num_lanes` as in `JobSpec`."""
        self._commit_state = commit_state
        self._num_lanes = num_lanes
        self._update: PlanUpdate | None = None
        """The update of the plan in force; None for a spare."""
        self._before = NOTHING
        self._number = 0
        self.section: Section | None = None
        self._unformed: PeerLost | None = None
        """Why the groups for sums could not be formed."""
        self.loss = 0.0
        """The committed part of the step's loss, as in `SectionRecord`."""
        self.num_items = 0
        """The tokens that count in it."""

    # --- what is committed ------------------------------------------------------------------------------------

    @property
    def before(self) -> tuple[int, ...]:
        """The microbatches of the step in flight that were committed before the plan in force."""
        return self._before.microbatches

    @property
    def microbatches(self) -> tuple[int, ...]:
        """All committed microbatches of the step in flight."""
        return self._microbatches_after(self._number)

    @property
    def num_sections(self) -> int:
        """The number of sections of the step in flight under the plan in force."""
        update = self._update
        return 1 if update is None else num_sections_of(update.plan, self.before, update.num_sections)

    def is_at(self, partial: PartialStep) -> bool:
        """Whether exactly this is committed here."""
        generation = 0 if self._update is None else self._update.generation
        here = (generation, self._number) if self._number else (self._before.generation, self._before.number)
        return here == (partial.generation, partial.number)

    def adopt(self, update: PlanUpdate, *, is_spare: bool) -> None:
        """Take over what the update says is committed of the step in flight."""
        assert self.section is None, "the section on its way is given back before"
        self._update = None if is_spare else update
        self._before = NOTHING if is_spare else update.partial
        self._number, self.loss, self.num_items = 0, self._before.loss, self._before.num_items

    def end_step(self) -> None:
        self._before, self._number, self.loss, self.num_items = NOTHING, 0, 0.0, 0

    # --- a section -----------------------------------------------------------------------------------------

    def begin_step_sums(self) -> bool:
        """Open the step's own sums if they may be posted, and return whether they may."""
        return self.section is None and not self._commit_state.is_forming and self._begin_sums()

    @property
    def is_busy(self) -> bool:
        """Whether a section is on its way and may still arrive."""
        return self.section is not None and self.section.failure is None and not self._commit_state.is_fenced()

    def begin(self, step: int) -> worker_effects.WorkerEffects:
        """Have the work on a step so far committed in the background; do nothing once a section failed or was fenced.

        Waits for the groups of its sums, and for the section before. Raises Interrupted if the pipeline is stopped.
        """
        try:
            yield from self._be_ready()
        except PeerLost:
            return  # The failure is reported, and the pipeline's own work is sound.
        except Interrupted:
            if self._commit_state.is_pipeline_stopped():
                raise
            return
        if not self._begin_sums():
            return
        self.section = Section(self._number + 1, step)
        yield worker_effects.PostSection(step, self.section.number)

    def look(self) -> worker_effects.WorkerEffects:
        """Advance the section as far as the others allow. Never waits, raises nothing."""
        section = self.section
        if section is None or not self.is_busy:
            return
        try:
            yield from self._move(section)
        except PeerLost as error:
            yield from self._fail(section, error)
        except Interrupted:
            pass  # A fence came first, and its sender decides what becomes of the section.

    def settle(self) -> worker_effects.WorkerEffects:
        """Wait until the section on its way is committed. Raises Interrupted or PeerLost, and keeps it then."""
        while (section := self.section) is not None:
            if section.failure is not None:
                raise section.failure
            try:
                yield worker_effects.AwaitSection(section.number)
            except PeerLost as error:
                yield from self._fail(section, error)
                continue
            if self._commit_state.is_fenced():
                raise Interrupted
            yield from self.look()

    def await_groups(self) -> worker_effects.WorkerEffects:
        """Wait until the groups are formed in which sums are posted next. Raises Interrupted or PeerLost."""
        if not self._commit_state.is_forming:
            return
        # After a failure or a fence this fails up to the next order: the driver has given these groups up.
        if self._unformed is not None:
            raise self._unformed
        if self._commit_state.is_fenced():
            raise Interrupted
        try:
            yield worker_effects.AwaitGroups()
        except PeerLost as error:
            self._unformed = error
            raise
        self._commit_state.note_formed()

    def catch_up(self, record: SectionRecord) -> worker_effects.WorkerEffects:
        """Commit the reduced section, as the plan update says, if it is not committed yet."""
        if self._commit_state.catch_up_section(record):
            yield from self._fold(record)

    def give_back(self) -> worker_effects.WorkerEffects:
        """Give up the section on its way: its work counts as done of the step, but not as committed."""
        self._unformed = None
        section, self.section = self.section, None
        if section is not None:
            self._commit_state.give_back_section()
            yield worker_effects.GiveBack(section.number)

    # --- how it moves --------------------------------------------------------------------------------------

    def _be_ready(self) -> worker_effects.WorkerEffects:
        """Wait until a section can begin. Raises Interrupted, or PeerLost once that is reported."""
        is_reported = self._unformed is not None
        try:
            yield from self.await_groups()
        except PeerLost as error:
            if not is_reported:
                yield self._report_of(error)
            raise
        # A section begins only after the one before it, so all members of a group post its sums in one order.
        yield from self.settle()

    def _move(self, section: Section) -> worker_effects.WorkerEffects:
        if not section.has_sums:
            if not (yield worker_effects.TakeSums(section.number)):
                return
            section.has_sums = True
            # This precedes the worker's part in the agreement: a total means that all have passed this moment.
            self._commit_state.note_section_reduced(section.number)
            yield worker_effects.PostTotals(section.number)
        totals = yield worker_effects.TakeTotals(section.number)
        if totals is None:
            return
        assert isinstance(totals, worker_effects.SectionTotals)
        self._check(section, totals.counted)
        assert self._update is not None
        record = SectionRecord(
            step=section.step,
            generation=self._update.generation,
            number=section.number,
            loss=self.loss + totals.loss,
            num_items=self.num_items + totals.num_items,
        )
        self._commit_state.commit_section(record)
        yield from self._fold(record)

    def _check(self, section: Section, counted: Tally) -> None:
        """Check that a section sums what it should. Raises AssertionError: a wrong sum is never committed."""
        fresh = set(self._microbatches_after(section.number)).difference(self.microbatches)
        what = f"section {section.number} of step {section.step}: {counted.count} microbatches were counted"
        assert counted == Tally.of(fresh, num_lanes=self._num_lanes), (
            f"{what}; they are not those of the section, each once"
        )

    def _fold(self, record: SectionRecord) -> worker_effects.WorkerEffects:
        # The section is committed, so nothing can interrupt this.
        assert self.section is not None
        assert self.section.has_sums, f"section {record.number} of step {record.step} is claimed to be reduced"
        yield worker_effects.Fold(record)
        self.section = None
        self._number, self.loss, self.num_items = record.number, record.loss, record.num_items

    def _fail(self, section: Section, error: PeerLost) -> worker_effects.WorkerEffects:
        # At once: others wait for the section, and this pipeline's own work continues.
        section.failure = error
        yield self._report_of(error)

    def _report_of(self, error: PeerLost) -> worker_effects.Say:
        assert self._update is not None
        device = self._commit_state.worker_id.device
        return worker_effects.Say(PeerFailed(device=device, generation=self._update.generation, detail=str(error)))

    def _begin_sums(self) -> bool:
        try:
            self._commit_state.begin_sums()
        except Interrupted:
            return False
        return True

    def _microbatches_after(self, number: int) -> tuple[int, ...]:
        update = self._update
        if update is None or not number:
            return self.before
        return committed_after(update.plan, self.before, update.num_sections, number)
