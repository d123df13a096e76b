"""The generations of a run: the plan that was ordered in each, and what of a step was reassigned or committed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from oobleck.control import protocol
from oobleck.control.journal import PlanAdopted
from oobleck.control.plans import committed_after, shares_of
from oobleck.planner import Decision, ExecutionPlan, WorkerId
from oobleck.schedule import ScheduleKind

from .judgement import NO_SECTION, SectionId, Verdict, broken_pipelines, reassign_microbatches, rests_of


class PlanHistory:
    """Grows by one with every `begin`, and notes what each plan update says."""

    def __init__(self, *, max_steps: int) -> None:
        self.current = 0
        """The newest generation, ordered or only fenced; 0 before the first."""
        self._max_steps = max_steps
        self._ordered: dict[int, protocol.OrderedPlan] = {}
        self._forgot = 0  # the newest generation whose plan update has workers forget the step in flight
        self._segments_for = (0, 0)  # (generation in force, step)
        self._segments: tuple[protocol.Segment, ...] = ()
        self._next_segment = 0

    def begin(self) -> None:
        """A new generation begins; nothing of older ones is committed from here on."""
        self.current += 1

    def restore(self, entry: PlanAdopted) -> None:
        """Note a plan that the journal of a master before knows to be ordered."""
        self.current = entry.generation
        self.forget_before(entry.oldest)
        self._ordered[entry.generation] = protocol.OrderedPlan(
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
        """No living worker has an older plan in force any more."""
        kept = {number: ordered for number, ordered in self._ordered.items() if number >= generation}
        self._ordered = kept or self._ordered

    @property
    def oldest(self) -> int:
        """The oldest generation whose plan a living worker may have in force."""
        return min(self._ordered)

    @property
    def newest(self) -> int:
        """The newest generation that was ordered."""
        return max(self._ordered)

    @property
    def plan(self) -> ExecutionPlan:
        """The newest plan that was ordered."""
        return self._ordered[self.newest].plan

    @property
    def is_begun(self) -> bool:
        """Whether a plan was ordered."""
        return bool(self._ordered)

    def has_plan(self, generation: int) -> bool:
        """Whether a plan was ordered in a generation, and survivors may have it."""
        return generation in self._ordered

    @property
    def plans(self) -> Mapping[int, ExecutionPlan]:
        """All plans that were ordered, by generation."""
        return {generation: ordered.plan for generation, ordered in self._ordered.items()}

    @property
    def ordered(self) -> Mapping[int, protocol.OrderedPlan]:
        """All plans that were ordered and that survivors may have, by generation."""
        return dict(self._ordered)

    def in_force(self, verdict: Verdict) -> int:
        """The generation whose plan survivors have adopted, or the newest ordered when they differ."""
        return self.newest if verdict.adopted is None else verdict.adopted

    def boundary(self, generation: int) -> int:
        """The steps applied when the plan of a generation takes effect; 0 where it is not known any more."""
        return self._ordered[generation].boundary if generation in self._ordered else 0

    def section_of(self, generation: int, step: int, number: int) -> SectionId:
        """What is committed of a step after so many of its sections under the plan of a generation."""
        if number:
            return generation, number
        before = self._ordered[generation].partial_before(step) if generation in self._ordered else protocol.NOTHING
        return before.generation, before.number

    def partial(self, verdict: Verdict) -> protocol.PartialStep:
        """What a verdict finds to be committed of the step in flight."""
        generation, number = verdict.section
        if verdict.section == NO_SECTION:
            return protocol.NOTHING
        for ordered in self._ordered.values():
            if (ordered.partial.generation, ordered.partial.number) == verdict.section:
                return ordered.partial
        assert verdict.partial is not None
        ordered = self._ordered[generation]
        before = ordered.partial_before(verdict.applied + 1).microbatches
        return protocol.PartialStep(
            microbatches=committed_after(ordered.plan, before, ordered.num_sections, number),
            loss=verdict.partial.loss,
            num_items=verdict.partial.num_items,
            generation=generation,
            number=number,
        )

    def shares(self, generation: int, step: int) -> tuple[Sequence[int], ...]:
        """The microbatches of a step that each pipeline takes under the plan of a generation."""
        ordered = self._ordered[generation]
        return shares_of(ordered.plan, ordered.partial_before(step).microbatches)

    def step_to_finish(
        self, verdict: Verdict, statuses: Mapping[WorkerId, protocol.Status], lost: Collection[str]
    ) -> int | None:
        """Deal the broken pipelines' microbatches of the step in flight, if it can be finished at all.

        It can when all survivors have the same plan in force, no worker was ordered to forget the step, at least one
        pipeline is whole, and none of the whole ones failed half-way. `lost` are the nodes that have no part in that
        plan any more. Returns the step, or None: then it is forgotten and run again.
        """
        if verdict.adopted is None or verdict.adopted < self._forgot or verdict.applied >= self._max_steps:
            return None
        # Shares and segments mean something under one plan only: of survivors with two plans in force, a microbatch
        # could be counted by both or by none. And a pipeline that failed half-way has sums with unknown
        # contents. Finding that out microbatch by microbatch was rejected: such failures are rare, and a step is
        # cheap beside a rule that would have to be right for each of them.
        plan = self._ordered[verdict.adopted].plan
        broken = broken_pipelines(plan, lost)
        failed = {plan.pipeline_of.get(worker_id.node) for worker_id, status in statuses.items() if status.broken}
        if not failed <= {None, *broken}:
            return None
        step = verdict.applied + 1
        # Segments of an earlier recovery of the same step stay as they are: they may be done already.
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
        if dealt is None:
            return None
        self._segments = dealt
        self._next_segment = max([self._next_segment, *(segment.segment + 1 for segment in dealt)])
        return step

    def rests(
        self, generation: int, statuses: Mapping[WorkerId, protocol.Status], lost: Collection[str]
    ) -> dict[int, tuple[int, int]]:
        """Return what the whole pipelines have left of the step that `step_to_finish` chose last; see `rests_of`."""
        _, step = self._segments_for
        shares = self.shares(generation, step)
        return rests_of(self._ordered[generation].plan, lost, self._segments, statuses, step=step, shares=shares)

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

        `lost` are the nodes that have no part any more in the plan under which the step is finished; `restore` is the
        checkpoint of the step that the verdict takes for applied. A run that `is_from_scratch` began with the model's
        initial values, not with a checkpoint. Steps are cut into `num_sections` under the plan.
        """
        old = self._ordered.get(verdict.adopted) if verdict.adopted is not None and finish is not None else None
        gone = frozenset(lost)
        absent = tuple(node for node in old.plan.nodes if node in gone) if old is not None else ()
        initial = verdict.applied == 0 and verdict.section == NO_SECTION and finish is None and is_from_scratch
        partial = self.partial(verdict)
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
        self._ordered[self.current] = update.ordered
        return update

    def _pipeline_generations(
        self, plan: ExecutionPlan, old: protocol.OrderedPlan | None, lost: frozenset[str]
    ) -> tuple[int, ...]:
        """Keep the groups of pipelines that lost no node and were not stopped half-way; form the others again."""
        kept = {}
        if old is not None:
            # By their first workers, which spares looking at the others of thousands.
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
