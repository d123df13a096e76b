"""The follower, driven by hand: what it asks for in which order, and what it answers wherever it is interrupted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.plans.sections import committed_after, shares_of
from oobleck.control.protocol import (
    NOTHING,
    CommitRecord,
    DataPosition,
    EvaluationDone,
    Fence,
    PartialStep,
    PeerFailed,
    PlanUpdate,
    RecordsFailed,
    Restore,
    RestoreFailed,
    SectionRecord,
    Segment,
    Status,
    StepCommitted,
    StepsOver,
    Tally,
)
from oobleck.control.steps.commit_state import CommitState, Interrupted, PeerLost
from oobleck.control.steps.follower import Follower
from oobleck.control.steps.partial_commit import PartialCommit
from oobleck.control.steps.worker_effects import (
    Adopt,
    Agree,
    Agreed,
    Apply,
    AwaitGroups,
    AwaitPlanUpdate,
    AwaitSection,
    AwaitStep,
    BeginStep,
    Compute,
    EffectOutcome,
    EndTransfers,
    Evaluate,
    Evaluation,
    Exchange,
    Fold,
    ForgetStep,
    FormGroups,
    GiveBack,
    GroupKey,
    PostSection,
    PostTotals,
    ReadCheckpoint,
    Reduce,
    ReportFinished,
    Say,
    SectionTotals,
    ShareLossScale,
    TakeSums,
    TakeTotals,
    WorkerEffect,
    WorkerEffects,
    drive,
)
from oobleck.errors import CorruptCheckpoint, ShardUnreadable
from oobleck.job import CheckpointSpec, JobSpec
from oobleck.planner import ExecutionPlan, LayerTransfer, WorkerId
from oobleck.schedule import ScheduleKind, section_stops
from tests.control.journals import plan
from tests.examples import examples

A, B, C, D = (WorkerId(node=node, device=0) for node in "abcd")
MICROBATCHES = 8
PAIRS = plan(("a", "b"), ("c", "d"))
ROW = plan(("a", "b", "c", "d"))
MAY_WAIT = (AwaitStep, Reduce, Agree, Evaluate, FormGroups, AwaitGroups, Exchange, ShareLossScale, AwaitSection)
"""What a fence may end."""
MAY_FAIL = (*MAY_WAIT[1:], Compute, TakeSums, PostTotals, TakeTotals)
"""What may fail with a peer."""


def job(**fields) -> JobSpec:
    usual = {"max_steps": 3, "global_batch_size": MICROBATCHES, "microbatch_size": 1}
    return JobSpec(**(usual | {"checkpoint": CheckpointSpec(compare_steps=0)} | fields))


def update(generation: int, layout: ExecutionPlan = PAIRS, **fields) -> PlanUpdate:
    count = len(layout.pipelines)
    usual = {
        "plan": layout,
        "pipeline_generations": (generation,) * count,
        "schedules": (ScheduleKind.ONE_F_ONE_B,) * count,
        "boundary": 0,
        "moving": tuple(sorted({item.layer for item in fields.get("transfers", ())})),
    }
    return PlanUpdate(generation=generation, **(usual | fields))


def record(step: int, generation: int = 1) -> CommitRecord:
    return CommitRecord(
        step=step,
        generation=generation,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=1.0,
        num_samples=MICROBATCHES,
        samples_repeated=0,
        samples_missing=0,
        duration_s=1.0,
    )


class RendezvousTable:
    """What is told of records: the first `told` steps' are."""

    def __init__(self, told: int, *, over: StepsOver | None = None, last: int | None = None) -> None:
        self.told = told
        self.over = over
        self.last = last

    def is_told(self, step: int) -> bool:
        return step <= self.told

    def over_after(self, step: int) -> StepsOver | None:
        return self.over if self.over is not None and self.over.step == step else None

    def is_last(self, step: int) -> bool:
        return step == self.last


@dataclass(slots=True)
class Driver:
    """A worker without tensors, whose peers do all that is expected of them unless `upset` says otherwise.

    `upset` sees each effect before it is carried out. What it raises is thrown in, if the effect can fail so.
    """

    worker_id: WorkerId = A
    job: JobSpec = field(default_factory=job)
    records: RendezvousTable | None = None
    evaluates: bool = False
    upset: Callable[[WorkerEffect], None] = lambda _effect: None
    log: list[WorkerEffect] = field(default_factory=list)
    commit_state: CommitState = field(init=False)
    follower: Follower = field(init=False)
    updates: list[PlanUpdate] = field(default_factory=list)
    """The one in force is the last that was adopted."""
    adopted: Adopt | None = None
    applied: int = 0
    layers: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    done: list[int] | None = None
    """Microbatches of the step in flight; None where none is."""
    is_failed: bool = False
    """Half a program is in what is done."""
    reduced: int | None = None
    section: list[int] | None = None
    has_section_sums: bool = False
    folded: list[SectionRecord] = field(default_factory=list)
    """Sections of the step in flight under the plan in force."""
    save: bool = False
    """All agree to save."""
    counted: tuple[int, ...] | None = None
    """What goes into a step's sum, where it is not each microbatch once."""
    slow_sections: bool = False
    """Its sums are not here when a section is first looked after."""
    slow_totals: bool = False
    """Others have not all taken their sums when a section is first looked after."""
    lost: tuple[str, ...] = ()
    """Nodes of the plan in force, as far as orders have told."""
    has_groups: bool = False
    """All groups are there, whatever the plan."""
    is_forming: bool = False
    """Groups for sums are being formed."""
    _effects: WorkerEffects | None = None

    def __post_init__(self) -> None:
        self.commit_state = CommitState(self.worker_id, lambda: None, lock=nullcontext())
        self.follower = Follower(self.job, self.commit_state, board=self.records, evaluates=self.evaluates)

    def follow(self, *updates: PlanUpdate) -> list[WorkerEffect]:
        """Give orders, one after the other; returns all that was asked for up to the wait for another."""
        before = len(self.log)
        for each in updates:
            self.updates.append(each)
            self.commit_state.give_update(each)
            with suppress(_Rest):
                drive(self._run(), self._carry_out)
        return self.log[before:]

    def fence(self, generation: int, lost: tuple[str, ...] = ()) -> Status:
        return self.commit_state.answer(Fence(device=0, generation=generation, lost=lost))

    def _run(self) -> WorkerEffects:
        """The follower's effects, from where it waits for an order."""
        if self._effects is None:
            self._effects = self.follower.run()
            assert isinstance(next(self._effects), AwaitPlanUpdate)
        effects = self._effects
        given = self.commit_state.take_update()
        assert given is not None
        return _resumed(effects, given)

    def _carry_out(self, effect: WorkerEffect) -> EffectOutcome:
        if isinstance(effect, AwaitPlanUpdate):
            self.is_forming = False
            raise _Rest
        self.log.append(effect)
        self._upset(effect)
        return self._do(effect)

    def _upset(self, effect: WorkerEffect) -> None:
        try:
            self.upset(effect)
        except Interrupted:
            if isinstance(effect, MAY_WAIT):
                raise
        except PeerLost:
            if isinstance(effect, MAY_FAIL):
                raise
        if isinstance(effect, BeginStep | Compute) and self.commit_state.is_pipeline_stopped():
            raise Interrupted

    def _do(self, effect: WorkerEffect) -> EffectOutcome:
        match effect:
            case Agree(step=step, committee=committee):
                assert self.reduced == step
                own = record(step, committee.generation)
                counted = Tally.of(self.counted or set(range(MICROBATCHES)).difference(self._partial))
                return Agreed(own, counted, stop=effect.stop, save=self.save)
            case FormGroups(committee=committee):
                self.is_forming = self.is_forming or not (committee is None or self.has_groups)
                return committee is not None and self.is_forming
            case AwaitGroups():
                assert self.is_forming
                self.is_forming = False
            case Reduce(step=step):
                assert not self.is_forming
                self._check_work(effect)
                self.reduced = step
            case Apply(record=applied):
                assert (self.reduced, self.applied) == (applied.step, applied.step - 1)
                self.applied, self.kept, self.folded = applied.step, (), []
            case ForgetStep():
                self.done, self.reduced, self.is_failed = None, None, False
            case BeginStep():
                assert self.done is None
                self.done = []
            case Compute():
                self._compute(effect)
            case Evaluate():
                assert not self.folded
                return Evaluation(loss=0.5, num_samples=4, duration_s=0.1)
            case Adopt(update=given):
                assert self.section is None
                self.adopted, self.applied, self.folded = effect, given.boundary, []
                self.layers, self.kept, self.lost = tuple(effect.layers), effect.keep, ()
            case _:
                return self._move_section(effect)
        return None

    def _compute(self, program: Compute) -> None:
        assert self.done is not None
        stops = section_stops(len(program.microbatches), program.num_sections)
        done = 0
        for stop in stops:
            self.done += program.microbatches[done:stop]
            self.commit_state.note_microbatch(stop - done)
            done = stop
            if stop != len(program.microbatches) and program.ends_under_plan:
                drive(self.follower.partial_commit.begin(program.step), self._carry_out)
                drive(self.follower.partial_commit.look(), self._carry_out)

    def _move_section(self, effect: WorkerEffect) -> EffectOutcome:
        match effect:
            case PostSection():
                assert not self.is_forming
                assert self.section is None
                assert self.done is not None
                self.section, self.done, self.has_section_sums = self.done, [], False
            case TakeSums():
                assert not self.has_section_sums
                self.has_section_sums = not self.slow_sections
                return self.has_section_sums
            case TakeTotals(number=number):
                assert self.has_section_sums
                if self.slow_totals:
                    return None
                partial = self._partial
                after = committed_after(self.update.plan, self.before, self.update.num_sections, number)
                return SectionTotals(0.25, Tally.of(set(after).difference(partial)))
            case AwaitSection():
                if self.has_section_sums:
                    self.slow_totals = False
                self.slow_sections = False
            case Fold(record=partial):
                assert self.has_section_sums
                assert partial.number == len(self.folded) + 1
                self.section, self.kept, self.has_section_sums = None, (), False
                self.folded.append(partial)
            case GiveBack():
                assert self.section is not None
                assert self.done is not None
                self.done, self.section, self.has_section_sums = [*self.section, *self.done], None, False
        return None

    @property
    def num_pipelines(self) -> int:
        return 0 if self.adopted is None else len(self.adopted.update.plan.pipelines)

    @property
    def update(self) -> PlanUpdate:
        assert self.adopted is not None
        return self.adopted.update

    @property
    def before(self) -> tuple[int, ...]:
        is_first = self.applied == self.update.boundary
        return self.update.partial.microbatches if is_first else ()

    @property
    def _partial(self) -> tuple[int, ...]:
        return committed_after(self.update.plan, self.before, self.update.num_sections, len(self.folded))

    @property
    def partial(self) -> PartialStep:
        """What an order says to be committed that comes into force now."""
        if not self.folded:
            return self.update.partial if self.applied == self.update.boundary else NOTHING
        newest = self.folded[-1]
        return PartialStep(
            microbatches=self._partial, loss=newest.loss, generation=newest.generation, number=newest.number
        )

    def _check_work(self, effect: Reduce) -> None:
        """Hold a reduction to what this worker owes it: a microbatch that is done twice is summed twice."""
        assert self.adopted is not None
        assert self.done is not None
        seat, committee = self.adopted.seat, effect.committee
        assert seat is not None
        owed: list[int] = []
        if not set(committee.lost).intersection(seat.pipeline.nodes):
            share = shares_of(committee.plan, self.before)[seat.index]
            owed = [microbatch for microbatch in share if microbatch not in self._partial]
            if committee.generation != self.update.generation:
                extra = [each for each in self.updates[-1].segments if each.pipeline == seat.index]
                owed += [microbatch for segment in extra for microbatch in segment.microbatches]
        assert sorted(self.done) == sorted(owed)

    def check(self, status: Status) -> None:
        """Hold an answer to what this worker really has."""
        assert status.applied == self.applied
        assert status.adopted == (0 if self.adopted is None else self.update.generation)
        assert status.layers == tuple(sorted({*self.layers, *self.kept}))
        assert status.reduced in (None, self.reduced)
        assert status.partial == (self.folded[-1] if self.folded else None)
        assert status.section_reduced is None or self.has_section_sums
        assert status.broken == self.is_failed
        assert self.done is not None or not status.microbatches_done


class _Rest(Exception):
    """There is no order."""


def _resumed(effects: WorkerEffects, given: PlanUpdate) -> WorkerEffects:
    outcome: EffectOutcome = given
    failure: BaseException | None = None
    while True:
        effect = effects.send(outcome) if failure is None else effects.throw(failure)
        outcome, failure = None, None
        try:
            outcome = yield effect
        except (Interrupted, PeerLost, ShardUnreadable, CorruptCheckpoint) as error:
            failure = error


def names(effects: Sequence[WorkerEffect]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def failing(kind: type[WorkerEffect], error: Exception, *, nth: int = 0) -> Callable[[WorkerEffect], None]:
    """Have the nth effect of a kind fail."""
    numbers = count()

    def upset(effect: WorkerEffect) -> None:
        if isinstance(effect, kind) and next(numbers) == nth:
            raise error

    return upset


def fenced(driver: Driver, kind: type[WorkerEffect], *, nth: int = 0, lost: tuple[str, ...] = ()) -> list[Status]:
    """Have a fence come with the nth effect of a kind, which ends its wait; returns where its answer will be."""
    numbers = count()
    answers: list[Status] = []

    def upset(effect: WorkerEffect) -> None:
        if isinstance(effect, kind) and next(numbers) == nth:
            answers.append(driver.fence(driver.updates[-1].generation + 1, lost))
            raise Interrupted

    driver.upset = upset
    return answers


STEP = ["ForgetStep", "BeginStep", "Compute", "Reduce", "Agree", "Apply", "ForgetStep", "Say", "PrepareToSave"]
FIRST_STEP = ["ForgetStep", "BeginStep", "ReportResumed", "Compute", "AwaitGroups", *STEP[3:]]
ADOPT = ["FormGroups", "Exchange", "ShareLossScale", "Adopt", "KeepGroups"]


# --- what comes after what -----------------------------------------------------------------------------------


def test_a_first_order_is_adopted_and_all_steps_are_run():
    driver = Driver()
    asked = driver.follow(update(1))
    last = [*STEP[:-1], "Save"]
    assert names(asked) == ["ForgetStep", *ADOPT, *FIRST_STEP, "EndTransfers", *STEP, *last, "ReportFinished"]
    assert driver.applied == 3
    said = [effect.message for effect in asked if isinstance(effect, Say)]
    assert said == [StepCommitted(device=0, record=record(step)) for step in (1, 2, 3)]


def test_a_spare_adopts_and_waits():
    driver = Driver(worker_id=WorkerId(node="s", device=0))
    assert names(driver.follow(update(1))) == ["ForgetStep", *ADOPT]
    # A later plan finishes a step without it, and then takes it in.
    asked = driver.follow(update(2, finish=1, boundary=1, lost=("d",)))
    assert names(asked) == ADOPT


def test_a_worker_in_the_middle_of_a_pipeline_says_nothing_of_commits():
    driver = Driver(worker_id=B)
    assert not [effect for effect in driver.follow(update(1, ROW)) if isinstance(effect, Say)]


def test_the_wish_to_stop_goes_into_the_commit_and_ends_training():
    driver = Driver()
    driver.commit_state.want_stop()
    asked = driver.follow(update(1))
    assert names(asked)[-3:] == ["Save", "EndTransfers", "ReportFinished"]
    assert driver.applied == 1


def test_all_save_where_the_commit_says_so_and_replicas_are_compared_when_they_are_due():
    driver = Driver(job=job(checkpoint=CheckpointSpec(compare_steps=2)), save=True)
    asked = names(driver.follow(update(1)))
    assert asked.count("Save") == 3
    assert asked.count("CompareReplicas") == 1


def test_who_has_not_applied_a_step_that_others_have_catches_up_first():
    driver = Driver()
    answers = fenced(driver, Agree)
    driver.follow(update(1))
    assert (answers[0].applied, answers[0].reduced) == (0, 1)
    asked = driver.follow(update(2, catch_up=record(1), boundary=1))
    assert names(asked)[:5] == ["Apply", "ForgetStep", "Say", "ForgetStep", "FormGroups"]
    assert driver.applied == 3


def test_a_whole_pipeline_finishes_its_share_and_the_segments_dealt_to_it_once():
    driver = Driver()
    fenced(driver, Reduce, lost=("d",))
    driver.follow(update(1))
    segments = (
        Segment(segment=1, pipeline=0, microbatches=(4, 5, 6, 7)),
        Segment(segment=2, pipeline=1, microbatches=(0,)),
    )
    given = update(2, plan(("a", "b")), finish=1, boundary=1, lost=("c", "d"), segments=segments)
    fenced(driver, AwaitGroups)
    asked = driver.follow(given)
    assert names(asked)[:3] == ["FormGroups", "Compute", "AwaitGroups"], "they are formed beside the extra work"
    assert [effect.microbatches for effect in asked if isinstance(effect, Compute)] == [(4, 5, 6, 7)]
    driver.upset = lambda _effect: None
    asked = driver.follow(replace(given, generation=3, pipeline_generations=(3,)))
    assert names(asked)[:4] == ["FormGroups", "AwaitGroups", "Reduce", "Agree"], "both are done already"
    assert driver.applied == 3


def test_the_survivors_of_a_broken_pipeline_reduce_with_zeros():
    driver = Driver()
    fenced(driver, Compute, lost=("b",))
    driver.follow(update(1))
    asked = driver.follow(update(2, plan(("c", "d", "a")), finish=1, boundary=1, lost=("b",)))
    assert names(asked)[:6] == ["FormGroups", "ForgetStep", "BeginStep", "AwaitGroups", "Reduce", "Agree"]
    assert "PrepareToSave" not in names(asked)[:12], "the plan that it is for ends with the step"
    assert driver.applied == 3


def test_groups_that_are_formed_beside_the_first_step_are_not_kept_before_its_sums_are_posted():
    driver = Driver()
    answers = fenced(driver, Compute)
    driver.follow(update(1))
    assert answers[0].has_open_groups, "they may not be formed yet"
    assert not driver.fence(2).reduced
    fenced(driver, Compute, nth=1)
    driver.follow(update(3))
    assert not driver.fence(5).has_open_groups, "the first step has summed in them"


def test_groups_that_are_there_are_not_waited_for():
    driver = Driver(has_groups=True)
    answers = fenced(driver, Compute)
    assert "AwaitGroups" not in names(driver.follow(update(1)))
    assert not answers[0].has_open_groups


def test_a_section_waits_for_the_groups_of_its_sums_and_says_so_if_they_cannot_be_formed():
    driver = with_sections()
    asked = names(driver.follow(update(1, num_sections=2)))
    assert asked.index("Compute") < asked.index("AwaitGroups") < asked.index("PostSection")
    assert asked.count("AwaitGroups") == 1
    failed = with_sections()
    failed.upset = failing(AwaitGroups, PeerLost("nobody came"))
    asked = failed.follow(update(1, num_sections=2))
    told = Say(PeerFailed(device=0, generation=1, detail="nobody came"))
    assert asked.count(told) == 2, "once at the section, and once at the end of the step"
    assert "PostSection" not in names(asked)
    assert not failed.follower.partial_commit.begin_step_sums(), "no sums are posted in them"


def test_sums_are_not_posted_early_in_groups_that_are_still_formed():
    state = CommitState(A, lambda: None, lock=nullcontext())
    partial_commit = PartialCommit(state)
    state.begin_forming()
    assert not partial_commit.begin_step_sums()
    state.note_formed()
    assert partial_commit.begin_step_sums()


def test_a_step_that_is_applied_already_is_not_finished_again():
    driver = Driver()
    fenced(driver, Agree, nth=1)
    driver.follow(update(1))
    driver.upset = lambda _effect: None
    asked = driver.follow(update(2, catch_up=record(2), finish=2, boundary=2))
    assert names(asked)[:4] == ["Apply", "ForgetStep", "Say", "FormGroups"]


def test_an_order_to_forget_the_step_has_it_run_from_its_beginning():
    driver = Driver()
    fenced(driver, Reduce)
    driver.follow(update(1))
    asked = driver.follow(update(2))
    assert names(asked)[:6] == ["ForgetStep", *ADOPT]
    assert driver.applied == 3


def test_a_program_that_failed_half_way_is_not_continued():
    driver = Driver()
    driver.upset = failing(Compute, PeerLost("reset"))
    asked = driver.follow(update(1))
    assert asked[-1] == Say(PeerFailed(device=0, generation=1, detail="reset"))
    assert driver.fence(2).broken
    asked = driver.follow(update(2, finish=1, boundary=1))
    failed = PeerFailed(device=0, generation=2, detail="a program of this step failed half-way before")
    assert (names(asked), asked[-1]) == (["FormGroups", "Say"], Say(failed))
    driver.follow(update(3))
    assert driver.applied == 3


@pytest.mark.parametrize("counted", [(0, *range(MICROBATCHES)), tuple(range(1, MICROBATCHES))])
def test_a_microbatch_that_is_counted_twice_or_never_stops_the_worker(counted: tuple[int, ...]):
    driver = Driver(counted=counted)
    with pytest.raises(AssertionError, match=r"^step 1: "):
        driver.follow(update(1))
    assert (driver.applied, driver.commit_state.applied) == (0, 0)


# --- evaluations, records, checkpoints -----------------------------------------------------------------------


def test_the_model_is_evaluated_when_it_is_due_and_not_once_training_is_stopped():
    driver = Driver(job=job(eval_steps=1), evaluates=True)
    asked = driver.follow(update(1))
    assert names(asked).count("Evaluate") == 3
    said = [effect.message for effect in asked if isinstance(effect, Say)]
    assert EvaluationDone(device=0, step=2, loss=0.5, num_samples=4, duration_s=0.1) in said
    stopped = Driver(job=job(eval_steps=1), evaluates=True)
    stopped.commit_state.want_stop()
    assert "Evaluate" not in names(stopped.follow(update(1)))


def test_the_last_step_is_evaluated_whenever_it_comes():
    asked = Driver(job=job(eval_steps=2), evaluates=True).follow(update(1))
    assert [effect.step for effect in asked if isinstance(effect, Evaluate)] == [2, 3]


def test_a_plan_begins_with_the_evaluation_that_is_due_before_its_first_step():
    driver = Driver(worker_id=B, job=job(eval_steps=1), evaluates=True)
    fenced(driver, Evaluate)
    driver.follow(update(1, ROW))
    driver.upset = lambda _effect: None
    asked = driver.follow(update(2, ROW, boundary=1))
    assert names(asked)[:9] == ["ForgetStep", *ADOPT, "ReportResumed", "FormGroups", "Evaluate"]
    assert not [effect for effect in asked if isinstance(effect, Say)], "a stage in the middle has nothing to tell"


def test_records_that_are_not_told_are_waited_for_and_training_ends_where_none_come():
    board = RendezvousTable(1)
    driver = Driver(records=board)

    def tell(effect: WorkerEffect) -> None:
        if isinstance(effect, AwaitStep) and effect.step == 2:
            board.told = 2
        elif isinstance(effect, AwaitStep):
            board.over = over(2, save=True)

    driver.upset = tell
    asked = driver.follow(update(1))
    assert driver.applied == 2
    assert names(asked)[-4:] == ["PrepareToSave", "AwaitStep", "SaveEnd", "ReportFinished"]


def over(step: int, *, save: bool) -> StepsOver:
    return StepsOver(device=0, assignment_version=0, step=step, generation=1, position=DataPosition(), save=save)


def test_what_is_saved_already_is_not_saved_at_the_end_of_the_data():
    driver = Driver(records=RendezvousTable(2, over=over(2, save=False)))
    assert names(driver.follow(update(1)))[-3:] == ["PrepareToSave", "AwaitStep", "ReportFinished"]


def test_a_step_that_is_told_to_be_the_last_ends_training():
    driver = Driver(records=RendezvousTable(3, last=2))
    assert names(driver.follow(update(1)))[-2:] == ["Save", "ReportFinished"]
    assert driver.applied == 2


def test_a_plan_waits_for_records_before_it_is_said_to_compute_only_where_they_are_not_told():
    driver = Driver(records=RendezvousTable(0, over=over(0, save=False)))
    assert names(driver.follow(update(1)))[-3:] == ["ReportResumed", "AwaitStep", "ReportFinished"]


def test_a_shard_that_cannot_be_read_is_told_of():
    driver = Driver(records=RendezvousTable(3))
    driver.upset = failing(Compute, ShardUnreadable("gone", shard=2, position=7))
    (said,) = [effect for effect in driver.follow(update(1)) if isinstance(effect, Say)]
    assert said.message == RecordsFailed(device=0, generation=1, shard=2, position=7, problem="gone")
    assert driver.fence(2).broken


RESTORE = Restore(name="s", directory=None)


def test_a_checkpoint_is_read_before_layers_are_exchanged():
    driver = Driver()
    transfers = (LayerTransfer(layer=5, source=A, target=C),)
    asked = driver.follow(update(1, boundary=2, restore=RESTORE, transfers=transfers))
    assert names(asked)[:4] == ["ForgetStep", "FormGroups", "ReadCheckpoint", "Exchange"]
    assert driver.applied == 3


def test_what_was_read_to_be_sent_is_kept_where_this_worker_stands_at_the_boundary():
    driver = Driver()
    transfers = (LayerTransfer(layer=5, source=A, target=C), LayerTransfer(layer=6, source=B, target=C))
    (adopted,) = [
        effect for effect in driver.follow(update(1, restore=RESTORE, transfers=transfers)) if isinstance(effect, Adopt)
    ]
    assert adopted.keep == (5,)


def test_a_checkpoint_that_cannot_be_read_is_told_of():
    driver = Driver()
    driver.upset = failing(ReadCheckpoint, CorruptCheckpoint("cut off"))
    asked = driver.follow(update(1, boundary=2, restore=RESTORE))
    assert asked[-1] == Say(RestoreFailed(device=0, generation=1, name="s", problem="cut off"))


# --- layers --------------------------------------------------------------------------------------------------


def moved(*layers: int, source: WorkerId = A, target: WorkerId = C) -> tuple[LayerTransfer, ...]:
    return tuple(LayerTransfer(layer=layer, source=source, target=target) for layer in layers)


def test_layers_that_change_hands_are_kept_until_the_next_commit():
    driver = Driver()
    fenced(driver, Reduce)
    driver.follow(update(1))
    answers = fenced(driver, Agree)
    driver.follow(update(2, ROW, transfers=moved(2, 3)))
    assert driver.layers == (0, 1)
    assert answers[0].layers == (0, 1, 2, 3)
    driver.upset = lambda _effect: None
    driver.follow(update(3, ROW, catch_up=record(1, 2), boundary=1))
    assert driver.fence(4).layers == (0, 1)


def test_a_worker_that_missed_a_step_keeps_nothing():
    driver = Driver()
    fenced(driver, Reduce)
    driver.follow(update(1))
    asked = driver.follow(update(2, ROW, boundary=1, transfers=moved(2, 3)))
    assert next(effect.keep for effect in asked if isinstance(effect, Adopt)) == ()


def test_groups_in_which_layers_moved_end_with_the_first_commit_under_their_plan():
    """Not before it: another worker may still be receiving."""
    driver = Driver()
    fenced(driver, Reduce)
    driver.follow(update(1, transfers=moved(2)))
    driver.upset = lambda _effect: None
    driver.follow(update(2, ROW, transfers=moved(3)))
    assert [effect for effect in driver.log if isinstance(effect, EndTransfers)] == [
        EndTransfers((GroupKey("transfer", 2, (A, C)),))
    ]
    whole = names(driver.log)
    assert whole.index("Apply") < whole.index("EndTransfers") < len(whole) - 1 - whole[::-1].index("Apply")


def test_a_layer_moves_in_a_group_of_two_in_which_others_have_no_part():
    driver = Driver(worker_id=D)
    asked = driver.follow(update(1, transfers=moved(1, source=A, target=B)))
    asked += driver.follow(update(2, transfers=(*moved(1, source=A, target=B), *moved(2, source=A, target=D))))
    formed = [key for effect in asked if isinstance(effect, FormGroups) for key in effect.keys]
    moving = [key for key in formed if key.purpose == "transfer"]
    assert moving == [GroupKey("transfer", 2, (A, D))]


# --- sections ------------------------------------------------------------------------------------------------


def with_sections(**fields) -> Driver:
    return Driver(job=job(max_steps=1), **fields)


def test_sections_are_committed_in_turn_before_the_step_is_reduced():
    driver = with_sections(slow_sections=True)
    asked = [name for name in names(driver.follow(update(1, num_sections=3))) if "S" in name or name == "Fold"]
    one = ["TakeSums", "PostTotals", "TakeTotals", "Fold"]
    steps = ["PostSection", "TakeSums", "AwaitSection", *one, "PostSection", *one]
    assert "".join(steps) in "".join(names(driver.log)), asked
    assert driver.applied == 1


def test_a_section_waits_for_the_sums_of_others_when_its_own_are_here():
    driver = with_sections(slow_sections=True, slow_totals=True)
    asked = "".join(names(driver.follow(update(1, num_sections=2))))
    assert "PostSectionTakeSumsAwaitSectionTakeSumsPostTotalsTakeTotalsAwaitSectionTakeTotalsFold" in asked
    assert driver.applied == 1


def test_a_section_is_given_back_before_the_step_is_finished():
    driver = with_sections(slow_sections=True)
    fenced(driver, AwaitSection, nth=0, lost=("d",))
    driver.follow(update(1, num_sections=2))
    assert driver.section is not None
    driver.upset = lambda _effect: None
    segment = Segment(segment=1, pipeline=0, microbatches=(4, 5, 6, 7))
    asked = driver.follow(update(2, plan(("a", "b")), finish=1, boundary=1, lost=("c", "d"), segments=(segment,)))
    assert names(asked)[:3] == ["GiveBack", "FormGroups", "Compute"]
    assert driver.applied == 1


def test_who_begins_a_step_when_a_node_is_lost_runs_the_program_of_those_that_began_before():
    early, late = Driver(job=job(max_steps=2)), Driver(job=job(max_steps=2))
    begun = [effect for effect in early.follow(update(1, num_sections=2)) if isinstance(effect, Compute)]
    fenced(late, Agree)
    late.follow(update(1, num_sections=2))
    late.upset = lambda _effect: None
    order = update(2, plan(("a", "b")), catch_up=record(1), finish=2, boundary=2, lost=("c", "d"), num_sections=2)
    asked = late.follow(order)
    (finished,) = (effect for effect in asked if isinstance(effect, Compute))
    assert finished == replace(begun[1], ends_under_plan=False)
    assert finished.num_sections == 2
    assert "PostSection" not in names(asked), "those of the old plan sum nothing together any more"
    assert late.applied == 2


def test_a_section_that_others_have_committed_is_committed_by_order_once():
    driver = with_sections()
    answers = fenced(driver, TakeTotals)
    driver.follow(update(1, num_sections=2))
    assert (answers[0].partial, answers[0].section_reduced) == (None, 1)
    driver.upset = lambda _effect: None
    partial = SectionRecord(step=1, generation=1, number=1, loss=0.25)
    after = PartialStep(microbatches=(0, 1, 4, 5), loss=0.25, generation=1, number=1)
    given = update(2, catch_up_section=partial, partial=after, num_sections=2)
    fenced(driver, Exchange)
    assert names(driver.follow(given))[:2] == ["Fold", "ForgetStep"]
    driver.upset = lambda _effect: None
    asked = driver.follow(replace(given, generation=3))
    assert "Fold" not in names(asked[:4])
    assert [effect.microbatches for effect in asked if isinstance(effect, Compute)] == [(2, 3)]
    assert driver.applied == 1


def test_a_plan_in_the_middle_of_a_step_is_not_evaluated_before_it():
    driver = Driver(job=job(eval_steps=1), evaluates=True)
    after = PartialStep(microbatches=(0, 1, 4, 5), loss=0.25, generation=1, number=1)
    driver.commit_state.give_update(update(2, boundary=1, partial=after, num_sections=2))
    asked = driver.follow(update(2, boundary=1, partial=after, num_sections=2))
    assert names(asked).index("Compute") < names(asked).index("Evaluate")


@pytest.mark.parametrize("kind", [TakeSums, PostTotals, TakeTotals, AwaitSection])
def test_a_section_that_fails_is_told_at_once_and_no_other_is_begun(kind: type[WorkerEffect]):
    driver = with_sections(slow_sections=kind is AwaitSection)
    driver.upset = failing(kind, PeerLost("reset"))
    asked = driver.follow(update(1, num_sections=4))
    assert names(asked).count("PostSection") == 1
    failed = Say(PeerFailed(device=0, generation=1, detail="reset"))
    assert [effect for effect in asked if isinstance(effect, Say)] == [failed, failed]
    assert "Reduce" not in names(asked)


@pytest.mark.parametrize("lost", [(), ("b",)])
def test_a_fence_in_a_section_stops_a_pipeline_that_lost_a_node_and_no_other(lost: tuple[str, ...]):
    driver = with_sections(slow_sections=True)
    fenced(driver, AwaitSection, lost=lost)
    driver.follow(update(1, num_sections=4))
    assert driver.done is not None
    assert driver.section is not None
    assert len(driver.done) == (1 if lost else 3), "what is done since the section was begun"


def test_a_fence_between_two_sections_keeps_the_next_from_being_begun():
    driver = with_sections()
    fenced(driver, Compute, nth=0)
    asked = driver.follow(update(1, num_sections=4))
    assert "PostSection" not in names(asked)
    assert "Reduce" not in names(asked), "others wait for the section in the same groups"


def test_a_section_that_sums_a_microbatch_twice_is_not_committed():
    driver = with_sections()
    driver.follow(update(1, num_sections=2))
    partial_commit = driver.follower.partial_commit
    partial_commit.adopt(update(2, num_sections=2), is_spare=False)
    effects = partial_commit.begin(1)
    assert isinstance(next(effects), PostSection)
    look = partial_commit.look()
    assert isinstance(next(look), TakeSums)
    assert isinstance(look.send(True), PostTotals)
    assert isinstance(look.send(None), TakeTotals)
    with pytest.raises(AssertionError, match=r"^section 1 of step 1: "):
        look.send(SectionTotals(0.0, Tally.of((0, 0, 1, 4, 5))))


def test_a_worker_that_missed_a_section_keeps_nothing():
    driver = with_sections()
    fenced(driver, Reduce)
    driver.follow(update(1, num_sections=2))
    assert driver.partial.number == 1
    driver.upset = lambda _effect: None
    missed = PartialStep(microbatches=(0, 1, 2, 4, 5, 6), loss=0.5, generation=1, number=2)
    asked = driver.follow(update(2, ROW, partial=missed, transfers=moved(2, 3), num_sections=2))
    assert next(effect.keep for effect in asked if isinstance(effect, Adopt)) == ()


def test_nothing_is_done_for_a_section_that_is_not_there():
    driver = with_sections()
    driver.follow(update(1, num_sections=2))
    assert list(driver.follower.partial_commit.look()) == []


def test_a_spare_has_nothing_committed():
    driver = Driver(worker_id=WorkerId(node="s", device=0))
    driver.follow(update(1))
    partial_commit = driver.follower.partial_commit
    assert (partial_commit.num_sections, partial_commit.microbatches, partial_commit.is_at(NOTHING)) == (1, (), True)
    assert partial_commit.begin_step_sums()


# --- interruptions wherever they may come ----------------------------------------------------------------------

FENCE, STALL, FAILURE = "a fence comes", "a fence comes, and nobody waits any more", "a peer is gone"


@dataclass(frozen=True, slots=True)
class Upset:
    """What goes wrong with which effect since the last order, and what the next order makes of it."""

    at: int
    kind: str
    lost: tuple[str, ...] = ()
    catches_up: bool = True
    finishes: bool = True
    moves: bool = False


upsets = st.builds(
    Upset,
    at=st.integers(0, 24),
    kind=st.sampled_from([FENCE, STALL, FAILURE]),
    lost=st.sampled_from([(), ("b",), ("d",)]),
    catches_up=st.booleans(),
    finishes=st.booleans(),
    moves=st.booleans(),
)


def strike(driver: Driver, upset: Upset, generation: int) -> list[Status]:
    """Have something go wrong while the next order is followed; returns where the answer to a fence will be."""
    numbers = count()
    is_over = False
    answers: list[Status] = []

    def carry(effect: WorkerEffect) -> None:
        nonlocal is_over
        if next(numbers) == upset.at:
            if upset.kind == FAILURE:
                driver.is_failed = isinstance(effect, Compute)
                raise PeerLost("reset")
            answers.append(driver.fence(generation, upset.lost))
            is_over = upset.kind == STALL
        if is_over:
            raise Interrupted

    driver.upset = carry
    return answers


def moments(status: Status) -> tuple[object, ...]:
    """What of an answer stays true until the next order; programs of whole pipelines go on."""
    return (
        status.applied,
        status.last_record,
        status.reduced,
        status.adopted,
        status.layers,
        status.partial,
        status.section_reduced,
    )


def next_update(driver: Driver, status: Status, upset: Upset, generation: int) -> PlanUpdate:
    """What a coordinator might order after this answer: it knows no more than that."""
    layout = ROW if upset.moves else PAIRS
    fields: dict = {"transfers": moved(2, 3) if upset.moves else ()}
    driver.lost = lost = tuple(sorted({*driver.lost, *upset.lost}))
    if status.reduced is not None and upset.catches_up:
        applied = status.applied + 1
        return update(generation, layout, num_sections=3, catch_up=record(applied), boundary=applied, **fields)
    partial = driver.partial if driver.adopted is not None else NOTHING
    if status.section_reduced is not None and upset.catches_up:
        newest = SectionRecord(
            step=status.applied + 1, generation=status.adopted, number=status.section_reduced, loss=0.5
        )
        after = after_next(driver)
        partial = PartialStep(microbatches=after, loss=0.5, generation=newest.generation, number=newest.number)
        fields["catch_up_section"] = newest
    forgot = max((each.generation for each in driver.updates if each.finish is None), default=0)
    is_whole = lost != ("b", "d") and (not lost or driver.num_pipelines == 2)
    may_finish = status.adopted >= forgot and not status.broken and status.applied < driver.job.max_steps
    if upset.finishes and may_finish and is_whole:
        next_step, last = status.applied + 1, driver.updates[-1]
        segments = last.segments if last.finish == next_step else ()
        if "d" in lost and not segments:
            left = set(shares_of(driver.update.plan, driver.before)[1]).difference(partial.microbatches)
            segments = (Segment(segment=generation, pipeline=0, microbatches=tuple(sorted(left))),)
        fields |= {"finish": next_step, "lost": lost, "segments": segments, "boundary": next_step}
    else:
        fields |= {"partial": partial, "boundary": status.applied}
    return update(generation, layout, num_sections=3, **fields)


def after_next(driver: Driver) -> tuple[int, ...]:
    given = driver.update
    return committed_after(given.plan, driver.before, given.num_sections, len(driver.folded) + 1)


@given(
    first=st.sampled_from([PAIRS, ROW]),
    upsets=st.lists(upsets, min_size=1, max_size=4),
    slow=st.sets(st.sampled_from(["slow_sections", "slow_totals"])),
)
@examples(400)
def test_an_answer_stays_true_wherever_the_worker_is_interrupted(
    first: ExecutionPlan, upsets: list[Upset], slow: set[str]
):
    driver = Driver(job=job(eval_steps=2), evaluates=True, **dict.fromkeys(sorted(slow), True))
    given = update(1, first, num_sections=3)
    for generation, upset in enumerate(upsets, 2):
        answers = strike(driver, upset, generation)
        driver.follow(given)
        driver.upset = lambda _effect: None
        status = driver.fence(generation, upset.lost)
        driver.check(status)
        assert all(moments(answer) == moments(status) for answer in answers)
        given = next_update(driver, status, upset, generation)
    driver.follow(given)
    assert driver.applied == driver.job.max_steps
    assert isinstance(driver.log[-1], ReportFinished)
