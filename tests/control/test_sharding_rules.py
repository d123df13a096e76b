"""What the coordinator does about shards, question by question: late answers, going back, another list of shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from oobleck.control.data.sharding import STEPS_AHEAD, Sharding, ShardRemains
from oobleck.control.events import Record, Send, SendAll, Turn
from oobleck.control.journal import DataPlaced, Notice, RecordsDealt, ShardQuarantined, ShardsKnown
from oobleck.control.journal.view import DataView
from oobleck.control.protocol import (
    CommitRecord,
    DataPosition,
    OpenShard,
    PlanUpdate,
    RecordsFailed,
    Restore,
    ScanAnswer,
    ScanRequest,
    ScanResult,
    StepRecords,
    StepsOver,
    digest_of_shards,
)
from oobleck.control.steps.progress import Progress
from oobleck.errors import ExitCode, PeerError
from oobleck.job import DataSpec, JobSpec
from oobleck.planner import ExecutionPlan, WorkerId

PLACES = (WorkerId(node="a", device=0), WorkerId(node="b", device=0))
NAMES = ("first.bin", "second.bin")


class Bench:
    """A Sharding with its surroundings, and workers that a test speaks for."""

    def __init__(self, *, max_steps: int = 500, **data: object) -> None:
        self.job = JobSpec(
            data=DataSpec(shards=NAMES, **data), max_steps=max_steps, global_batch_size=4, microbatch_size=2
        )
        self.progress = Progress(self.job)
        self.sharding = Sharding(self.job, self.progress, worker_ids=lambda: PLACES)
        self.entries: list[object] = []

    def begin(self, *, generation: int = 1, boundary: int = 0, position: DataPosition | None = None) -> int:
        self.carry_out(lambda turn: self.sharding.know(turn, NAMES))
        return self.update(generation=generation, boundary=boundary, position=position)

    def update(self, *, generation: int, boundary: int, position: DataPosition | None = None) -> int:
        update = PlanUpdate(
            generation=generation,
            plan=ExecutionPlan(pipelines=()),
            pipeline_generations=(),
            schedules=(),
            boundary=boundary,
            restore=Restore(name="step", directory=None) if position else None,
        )
        if position:
            self.progress.go_back(boundary, generation=generation)
        self.carry_out(lambda turn: self.sharding.follow(turn, update, position=position))
        return self.sharding.assignment_version

    def go_on(self, *, now_s: float = 0.0) -> list[object]:
        """Let it go on; returns what it says to workers."""
        return self.carry_out(lambda turn: self.sharding.go_on(turn, 1, save=False), now_s)

    def carry_out(self, call: Callable[[Turn], None], now_s: float = 0.0) -> list[object]:
        """Do what the coordinator does with the effects of a call; returns what is sent to workers."""
        said: list[object] = []
        turn = Turn(now_s)
        call(turn)
        for effect in turn.commands:
            match effect:
                case Record(entry=entry):
                    self.entries.append(entry)
                case Send() | SendAll():
                    said.append(effect.message)
        return said

    def survey(self, said: Sequence[object]) -> ScanRequest:
        (survey,) = [each for each in said if isinstance(each, ScanRequest)]
        return survey

    def answer(
        self, survey: ScanRequest, worker_id: WorkerId, lengths: Sequence[int] = (10, 10), *, grows: bool = False
    ) -> None:
        found = tuple(
            ScanResult(
                shard=want.shard,
                bounds=tuple(range(want.start, min(want.start + want.limit, lengths[want.shard]) + 1)),
                items=(),
                is_end=not grows and want.start + want.limit >= lengths[want.shard],
            )
            for want in survey.wants
        )
        answer = ScanAnswer(device=0, request=survey.request, found=found)
        self.carry_out(lambda turn: self.sharding.surveyed(turn, worker_id, answer))

    def commit(self, step: int) -> None:
        record = CommitRecord(
            step=step,
            generation=1,
            loss=1.0,
            grad_norm=1.0,
            learning_rate=1.0,
            num_samples=4,
            samples_repeated=0,
            samples_missing=0,
            duration_s=0.1,
        )
        assert self.progress.commit(Turn(0.0), record)
        self.sharding.committed(step)

    def asked(self, survey: ScanRequest) -> WorkerId:
        return PLACES[survey.request % len(PLACES)]


def steps(said: Sequence[object]) -> list[int]:
    return [each.step for each in said if isinstance(each, StepRecords)]


def test_records_are_told_ahead_and_no_further():
    bench = Bench()
    bench.begin()
    survey = bench.survey(bench.go_on())
    bench.answer(survey, bench.asked(survey), (1000, 1000))
    assert steps(bench.go_on()) == list(range(1, STEPS_AHEAD + 1))
    bench.commit(1)
    assert steps(bench.go_on()) == []
    (asked,) = [each for each in bench.entries if isinstance(each, ShardsKnown)]
    assert asked.names == NAMES


def test_an_answer_that_comes_late_is_counted_and_not_applied():
    bench = Bench()
    bench.begin()
    survey = bench.survey(bench.go_on())
    other = PLACES[1 - PLACES.index(bench.asked(survey))]
    bench.answer(survey, other)
    assert bench.sharding.num_late == 1
    assert steps(bench.go_on()) == []
    bench.answer(survey, bench.asked(survey))
    bench.answer(survey, bench.asked(survey))
    assert bench.sharding.num_late == 2
    assert steps(bench.go_on()) == [1, 2, 3, 4, 5]
    assert "2 in all" in [each.text for each in bench.entries if isinstance(each, Notice)][-1]


def test_whoever_does_not_answer_in_time_is_not_waited_for():
    bench = Bench()
    bench.begin()
    first = bench.survey(bench.go_on())
    assert bench.go_on(now_s=29.0) == []
    second = bench.survey(bench.go_on(now_s=30.0))
    assert (second.wants, bench.asked(second)) == (first.wants, PLACES[1 - PLACES.index(bench.asked(first))])
    assert bench.sharding.takes_regrouping(30.0), "it may be stuck, and where no step is begun nobody else would notice"


def test_what_a_lost_node_was_asked_another_one_is():
    bench = Bench()
    bench.begin()
    first = bench.survey(bench.go_on())
    bench.sharding.lost(bench.asked(first).node)
    assert bench.survey(bench.go_on()).wants == first.wants


def test_a_failure_of_an_older_generation_changes_nothing():
    bench = Bench()
    bench.begin(generation=5)
    failed = RecordsFailed(device=0, generation=4, shard=0, position=0, problem="broken")
    bench.sharding.failed(Turn(0.0), 5, failed)
    assert bench.sharding.num_late == 1
    assert not bench.sharding.takes_regrouping(0.0)


def test_the_third_failure_puts_a_shard_in_quarantine_and_deals_anew_without_it():
    bench = Bench()
    assert bench.begin() == 1
    survey = bench.survey(bench.go_on())
    bench.answer(survey, bench.asked(survey))
    told = [each for each in bench.go_on() if isinstance(each, StepRecords)]
    shard = told[1].runs[0].shard
    bench.commit(1)
    for attempt, wait_s in ((1, 1.0), (2, 2.0), (3, 0.0)):
        now_s = 10.0 * attempt
        failed = RecordsFailed(device=0, generation=attempt, shard=shard, position=4, problem="broken")
        bench.carry_out(partial(bench.sharding.failed, generation=attempt, message=failed), now_s)
        assert bench.sharding.takes_regrouping(now_s) is (wait_s == 0.0)
        assert bench.sharding.takes_regrouping(now_s + wait_s) is (wait_s != 0.0)
        is_same = bench.sharding.can_finish(2, generation=attempt)
        assert is_same is (attempt < 3)
        assert bench.update(generation=attempt + 1, boundary=1) == (1 if attempt < 3 else 2)
    assert not bench.sharding.can_finish(2, generation=3), "its records were taken back"
    said = bench.go_on()
    bench.answer(bench.survey(said), bench.asked(bench.survey(said)))
    anew = [each for each in [*said, *bench.go_on()] if isinstance(each, StepRecords)]
    assert {run.shard for each in anew for run in each.runs} == {1 - shard}
    assert (anew[0].step, anew[0].assignment_version) == (2, 2)
    (entry,) = [each for each in bench.entries if isinstance(each, ShardQuarantined)]
    assert (entry.shard, entry.problem) == (NAMES[shard], "broken")
    over = bench.sharding.outcome("9 steps are committed", can_resume=True)
    assert over is not None
    assert (over.exit_code, NAMES[shard] in over.reason) == (75, True)


def test_going_back_to_a_checkpoint_goes_back_in_the_data():
    bench = Bench()
    bench.begin()
    survey = bench.survey(bench.go_on())
    bench.answer(survey, bench.asked(survey))
    first = [each for each in bench.go_on() if isinstance(each, StepRecords)]
    for step in (1, 2, 3):
        bench.commit(step)
    assert bench.update(generation=2, boundary=2, position=first[1].after) == 2
    survey = bench.survey(bench.go_on())
    bench.answer(survey, bench.asked(survey))
    again = [each for each in bench.go_on() if isinstance(each, StepRecords)]
    assert [(each.step, each.runs, each.after) for each in again] == [
        (each.step, each.runs, each.after) for each in first[2:]
    ]


def test_a_new_master_deals_on_where_the_one_before_has_stopped():
    bench, whole = Bench(), Bench()
    for each in (bench, whole):
        each.begin()
        survey = each.survey(each.go_on())
        each.answer(survey, each.asked(survey), (6, 6) if each is bench else (10, 10))
    expected = [each for each in whole.go_on() if isinstance(each, StepRecords)]
    said = [each for each in bench.go_on() if isinstance(each, StepRecords)]
    replayed = ShardRemains()
    journal = [each for each in bench.entries if isinstance(each, ShardsKnown | DataPlaced | RecordsDealt)]
    for entry in journal[: len(journal) - 1]:  # the last one was never written
        replayed.note(entry)
    successor = Bench()
    successor.sharding.restore(replayed)
    told = successor.carry_out(lambda turn: successor.sharding.send_again(turn, PLACES[:1]))
    assert steps(told) == steps(said[:-1])
    survey = successor.survey(successor.go_on())
    successor.answer(survey, successor.asked(survey), (6, 6))
    rest = [each for each in successor.go_on() if isinstance(each, StepRecords)]
    assert rest == said[-1:]
    assert expected[0] == said[0]


def test_after_the_last_step_all_are_waited_for_and_where_records_are_missing_nobody_is():
    """Else a worker that never tells of its end, or has told a master that is gone, would be waited for for ever."""
    for max_steps, is_expected in ((2, True), (3, False)):
        bench = Bench(max_steps=max_steps, follow=True)
        bench.begin()
        survey = bench.survey(bench.go_on())
        bench.answer(survey, bench.asked(survey), (8, 0), grows=True)
        bench.go_on()
        for step in (1, 2):
            bench.progress.expect(10.0, 0.0)
            bench.commit(step)
            bench.go_on()
        assert (bench.progress.hangs_s < math.inf) is is_expected


def test_the_end_is_told_where_no_step_could_tell_it():
    bench = Bench()
    bench.begin()
    survey = bench.survey(bench.go_on())
    bench.answer(survey, bench.asked(survey), (4, 0))
    bench.go_on()
    bench.commit(1)
    said = bench.go_on()
    over = [each for each in said if isinstance(each, StepsOver)]
    told = [entry.records for entry in bench.entries if isinstance(entry, RecordsDealt)]
    assert told[-1].is_last or [each.step for each in over] == [1]
    ended = bench.sharding.outcome("1 steps are committed", can_resume=False)
    assert ended is not None
    assert ended.exit_code == ExitCode.DONE


@pytest.mark.parametrize(
    "found",
    [
        ScanResult(shard=2, bounds=(0, 1), items=(), is_end=False),
        ScanResult(shard=0, bounds=(), items=(), is_end=False),
        ScanResult(shard=0, bounds=(0, 2, 1), items=(), is_end=False),
        ScanResult(shard=0, bounds=(0, 1), items=(1, 2), is_end=False),
    ],
)
def test_answers_that_make_no_sense_break_the_protocol(found):
    bench = Bench()
    bench.begin()
    survey = bench.survey(bench.go_on())
    with pytest.raises(PeerError):
        bench.sharding.surveyed(
            Turn(0.0), bench.asked(survey), ScanAnswer(device=0, request=survey.request, found=(found,))
        )


def test_a_place_in_other_shards_is_no_place_in_these():
    bench = Bench()
    bench.sharding.know(Turn(0.0), NAMES)
    assert bench.sharding.misfit(DataPosition(shards=digest_of_shards(NAMES))) is None
    assert "other shards" in (bench.sharding.misfit(DataPosition(shards=digest_of_shards(NAMES[::-1]))) or "")


def test_a_run_that_has_read_all_is_told_from_one_that_has_not():
    bench = Bench(epochs=2)
    bench.sharding.know(Turn(0.0), NAMES)
    assert bench.sharding.has_read_all(DataPosition(opened=4))
    assert not bench.sharding.has_read_all(DataPosition(opened=2))
    assert not bench.sharding.has_read_all(DataPosition(opened=4, open=(OpenShard(visit=3, next=1),)))


def test_the_line_for_people_tells_what_is_read_and_waited_for():
    view = DataView()
    assert view.text(has_ended=False) is None
    bench = Bench(follow=True)
    bench.begin()
    survey = bench.survey(bench.go_on())
    bench.answer(survey, bench.asked(survey), (5, 3))
    bench.go_on()
    for entry in bench.entries:
        if isinstance(entry, ShardsKnown | DataPlaced | RecordsDealt):
            view.apply(entry)
    assert view.text(has_ended=False) == "0 records; 0 shards of 2 read to the end"
    view.commit(1)
    assert view.text(has_ended=False) == "4 records; 0 shards of 2 read to the end"
    view.apply(ShardQuarantined(t_s=0.0, shard="x.bin", position=1, problem="broken"))
    view.commit(2)
    said = view.text(has_ended=False)
    assert said is not None
    assert said.startswith("8 records; ")
    assert "1 in quarantine: x.bin" in said
