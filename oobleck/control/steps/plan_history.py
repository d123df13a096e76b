"""The generations of a run: the plan that was ordered in each, and the reassigned and committed parts of a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from oobleck.control import protocol
from oobleck.control.journal import PlanAdopted
from oobleck.control.plans import committed_after, shares_of
from oobleck.planner import Decision, ExecutionPlan, WorkerId
from oobleck.schedule import ScheduleKind

from .judgement import NO_SECTION, SectionId, Verdict, broken_pipelines, reassign_microbatches, rests_of


class PlanHistory:
    """The plan that was ordered in each generation, and the segments of the step in flight."""

    def __init__(self, *, max_steps: int) -> None:
        self.current = 0
        """The newest generation, ordered or only fenced; 0 before the first."""
        self.ordered: dict[int, protocol.OrderedPlan] = {}
        """The plans that survivors may have, by generation."""
        self._max_steps = max_steps
        self._forgot = 0
        """The newest generation whose update has workers forget the step in flight."""
        self._segments_for = (0, 0)
        """(generation in force, step)"""
        self._segments: tuple[protocol.Segment, ...] = ()
        self._next_segment = 0

    def begin(self) -> None:
        """Begin a new generation: nothing of older ones is committed from now on."""
        self.current += 1

    def restore(self, entry: PlanAdopted) -> None:
        """Note a plan that an earlier master ordered."""
        self.current = entry.generation
        self.forget_before(entry.oldest)
        self.ordered[entry.generation] = protocol.OrderedPlan(
            generation=entry.generation,
            plan=entry.plan,
            pipeline_generations=entry.pipeline_generations,
            schedules=entry.schedules,
            boundary=entry.boundary,
            partial=entry.partial,
            num_sections=entry.num_sections,
        )
        if entry.finish is None or entry.finished_under is None:
            self._forgot = entry.generation
        else:
            self._segments_for, self._segments = (entry.finished_under, entry.finish), entry.segments
            self._next_segment = max([self._next_segment, *(segment.segment + 1 for segment in entry.segments)])

    def forget_before(self, generation: int) -> None:
        """Forget the plans that no living worker has in force any more."""
        kept = {number: ordered for number, ordered in self.ordered.items() if number >= generation}
        self.ordered = kept or self.ordered

    @property
    def oldest(self) -> int:
        """The oldest generation whose plan a living worker may have in force."""
        return min(self.ordered)

    @property
    def newest(self) -> int:
        """The newest generation with an ordered plan."""
        return max(self.ordered)

    @property
    def plan(self) -> ExecutionPlan:
        return self.ordered[self.newest].plan

    @property
    def is_begun(self) -> bool:
        return bool(self.ordered)

    @property
    def plans(self) -> Mapping[int, ExecutionPlan]:
        return {generation: ordered.plan for generation, ordered in self.ordered.items()}

    def in_force(self, verdict: Verdict) -> int:
        """Return the generation whose plan survivors have adopted, or the newest ordered if they differ."""
        return self.newest if verdict.adopted is None else verdict.adopted

    def boundary(self, generation: int) -> int:
        """Return the steps applied when a generation's plan takes effect; 0 if that is forgotten."""
        return self.ordered[generation].boundary if generation in self.ordered else 0

    def section_of(self, generation: int, step: int, number: int) -> SectionId:
        """Return what is committed of a step after `number` of its sections under a generation's plan."""
        if number:
            return generation, number
        before = self.ordered[generation].partial_before(step) if generation in self.ordered else protocol.NOTHING
        return before.generation, before.number

    def partial(self, verdict: Verdict) -> protocol.PartialStep:
        """Return what a verdict finds committed of the step in flight."""
        generation, number = verdict.section
        if verdict.section == NO_SECTION:
            return protocol.NOTHING
        for ordered in self.ordered.values():
            if (ordered.partial.generation, ordered.partial.number) == verdict.section:
                return ordered.partial
        assert verdict.partial is not None
        ordered = self.ordered[generation]
        before = ordered.partial_before(verdict.applied + 1).microbatches
        return protocol.PartialStep(
            microbatches=committed_after(ordered.plan, before, ordered.num_sections, number),
            loss=verdict.partial.loss,
            num_items=verdict.partial.num_items,
            generation=generation,
            number=number,
        )

    def shares(self, generation: int, step: int) -> tuple[Sequence[int], ...]:
        """Return the microbatches of a step that each pipeline takes under a generation's plan."""
        ordered = self.ordered[generation]
        return shares_of(ordered.plan, ordered.partial_before(step).microbatches)

    def step_to_finish(
        self, verdict: Verdict, statuses: Mapping[WorkerId, protocol.Status], lost: Collection[str]
    ) -> int | None:
        """Assign the broken pipelines' microbatches of the step in flight to the others, if it can be finished at all.

        `lost` are the nodes that have no part any more in the plan in force. Returns the step; None if it is to be
        forgotten and run again.
        """
        # A worker that was ordered to forget the step may have done so, even if it has not adopted that order's plan.
        if verdict.adopted is None or verdict.adopted < self._forgot or verdict.applied >= self._max_steps:
            return None
        # Shares and segments mean something under one plan only: with two plans in force, a microbatch could be counted
        # by both or by none. And a pipeline that failed half-way has sums with unknown contents. Rejected: finding that
        # out microbatch by microbatch. Such failures are rare, and a step costs less than a rule for each of them.
        plan = self.ordered[verdict.adopted].plan
        broken = broken_pipelines(plan, lost)
        failed = {plan.pipeline_of.get(worker_id.node) for worker_id, status in statuses.items() if status.broken}
        if not failed <= {None, *broken}:
            return None
        step = verdict.applied + 1
        # Segments of an earlier recovery of the same step stay: they may be done already.
        if self._segments_for != (verdict.adopted, step):
            self._segments_for, self._segments = (verdict.adopted, step), ()
        dealt = reassign_microbatches(
            plan,
            lost,
            self._segments,
            next_segment=self._next_segment,
            shares=self.shares(verdict.adopted, step),
            partial=self.partial(verdict).microbatches,
        )
        if dealt is None:  # No pipeline is whole.
            return None
        self._segments = dealt
        # Workers remember by these numbers which segments they have done, so none is given twice.
        self._next_segment = max([self._next_segment, *(segment.segment + 1 for segment in dealt)])
        return step

    def rests(
        self, generation: int, statuses: Mapping[WorkerId, protocol.Status], lost: Collection[str]
    ) -> dict[int, tuple[int, int]]:
        """Return what the whole pipelines have left of the step that `step_to_finish` chose last; see `rests_of`."""
        _, step = self._segments_for
        shares = self.shares(generation, step)
        return rests_of(self.ordered[generation].plan, lost, self._segments, statuses, step=step, shares=shares)

    def plan_update(
        self,
        decision: Decision,
        verdict: Verdict,
        *,
        schedules: tuple[ScheduleKind, ...],
        finish: int | None,
        lost: Collection[str],
        restore: protocol.Restore | None,
        is_from_scratch: bool,
        num_sections: int,
    ) -> protocol.PlanUpdate:
        """Note the current generation's plan; return its update.

        `lost` are the nodes without a part any more in the plan under which the step is finished; `restore` is the
        checkpoint of the verdict's applied step. A run that `is_from_scratch` began with the model's initial values.
        Steps are cut into `num_sections` under the plan.
        """
        old = self.ordered.get(verdict.adopted) if verdict.adopted is not None and finish is not None else None
        gone = frozenset(lost)
        absent = tuple(node for node in old.plan.nodes if node in gone) if old is not None else ()
        initial = verdict.applied == 0 and verdict.section == NO_SECTION and finish is None and is_from_scratch
        partial = self.partial(verdict)
        # Each worker makes the initial values of its layers itself.
        transfers = () if initial else decision.transfers
        if finish is None:
            self._forgot = self.current
        update = protocol.PlanUpdate(
            generation=self.current,
            catch_up=verdict.catch_up,
            catch_up_section=_record(verdict, partial) if verdict.is_section_behind else None,
            finish=finish,
            segments=() if finish is None else self._segments,
            lost=absent,
            plan=decision.plan,
            pipeline_generations=self._pipeline_generations(decision.plan, old, gone),
            boundary=verdict.applied if finish is None else finish,
            partial=partial if finish is None else protocol.NOTHING,
            num_sections=num_sections,
            schedules=schedules,
            initial=initial,
            restore=restore,
            transfers=transfers,
            moving=tuple(sorted({item.layer for item in transfers})),
        )
        self.ordered[self.current] = update.ordered
        return update

    def _pipeline_generations(
        self, plan: ExecutionPlan, old: protocol.OrderedPlan | None, lost: frozenset[str]
    ) -> tuple[int, ...]:
        """Keep the groups of pipelines that lost no node and were not stopped half-way; form the others again."""
        kept = {}
        if old is not None:
            # The first worker is the key, which spares looking at the others of thousands.
            kept = {
                pipeline.worker_ids[0]: (pipeline.worker_ids, generation)
                for pipeline, generation in zip(old.plan.pipelines, old.pipeline_generations, strict=True)
                if lost.isdisjoint(pipeline.nodes)
            }
        found = ((each.worker_ids, kept.get(each.worker_ids[0])) for each in plan.pipelines)
        return tuple(known[1] if known is not None and known[0] == ids else self.current for ids, known in found)


def _record(verdict: Verdict, partial: protocol.PartialStep) -> protocol.SectionRecord:
    return protocol.SectionRecord(
        step=verdict.applied + 1,
        generation=partial.generation,
        number=partial.number,
        loss=partial.loss,
        num_items=partial.num_items,
    )
