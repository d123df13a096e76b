"""Steps wait for a script: none begins before the script has heard of those before it, and none waits forever.

A script that follows the journal and the master's part are one against the other here, without workers; `test_commit`
has both among workers and their faults.
"""

from __future__ import annotations

import math
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.events import ScriptAnswered, SendAll, Turn
from oobleck.control.journal import Action, Answers, Evaluated, JournalEntry, PlanAdopted, StepDone
from oobleck.control.protocol import CommitRecord, EvaluationDone, StepsAllowed, StepsOver
from oobleck.control.steps.progress import Progress
from oobleck.control.training.consent import Consent
from oobleck.job import ControlSpec, JobSpec
from oobleck.planner import ExecutionPlan, WorkerId
from tests.examples import examples

WORKERS = (WorkerId(node="a", device=0), WorkerId(node="b", device=0))
MAX_STEPS = 12


class Bench:
    """The master's part, a script that answers after every so many steps, and workers that do what they are told."""

    def __init__(self, *, every: int = 1, eval_steps: int | None = None, waits: bool = True) -> None:
        self.job = JobSpec(
            max_steps=MAX_STEPS, eval_steps=eval_steps, control=ControlSpec(waits_for_script=waits, start_timeout_s=60)
        )
        self.progress = Progress(self.job)
        self.saved_through = math.inf
        """The last step that may begin for what is saved."""
        self.consent = Consent(
            self.job, self.progress, worker_ids=lambda: WORKERS, let_begin=lambda: self.saved_through
        )
        self.every = every
        self.generation = 0
        self.allowed = 0
        """The last step that workers may begin."""
        self.over: int | None = None
        self.asked: deque[tuple[int, int]] = deque()
        self.heard: set[int] = set()
        """The steps of which the script has heard, and answered, since the run last went back before them."""
        self.said = 0
        self._restart_script()

    def _restart_script(self) -> None:
        self.answers = Answers(is_asked=lambda step: step % self.every == 0, is_evaluated=self.job.is_evaluated)
        self.asked.clear()

    def plan(self, *, back_to: int | None = None) -> None:
        self.generation += 1
        if back_to is not None:
            self.progress.go_back(back_to, generation=self.generation)
            self.consent.go_back(back_to)
            self.heard = {step for step in self.heard if step <= back_to}
        self.allowed = 0
        self.tell(
            PlanAdopted(
                t_s=0.0, generation=self.generation, plan=ExecutionPlan(pipelines=()), action=Action.REBUILD, reason="",
                predicted_step_s=1.0, num_layers=1, redundant=True, pipeline_generations=(),
                boundary=self.progress.last_step, restored_step=back_to, oldest=1,
            )
        )  # fmt: skip
        self.go_on()

    def tell(self, entry: JournalEntry) -> None:
        self.answers.note(entry)
        if (answer := self.answers.take()) is not None:
            self.asked.append(answer)

    def answer(self) -> None:
        step, through = self.asked.popleft()
        self.heard.add(step)
        self.consent.answered(ScriptAnswered(step=step, through=through))
        self.go_on()

    def step(self) -> None:
        """Commit the next step, and evaluate if that is due."""
        step = self.progress.last_step + 1
        assert step <= self.allowed
        newest = step - 1 - (step - 1) % self.every
        assert newest == 0 or newest in self.heard or self.said, f"step {step} begins, and {newest} is not heard of"
        turn = Turn(0.0)
        self.progress.commit(
            turn,
            CommitRecord(
                step=step, generation=self.generation, loss=1.0, grad_norm=1.0, learning_rate=1.0, num_samples=4,
                samples_repeated=0, samples_missing=0, duration_s=0.1,
            ),
        )  # fmt: skip
        if self.progress.owes_evaluation(step):
            done = EvaluationDone(device=0, step=step, loss=1.0, num_samples=1, duration_s=0.1)
            self.progress.evaluate(turn, done)
        for command in turn.commands:
            self.tell(command.entry)
        self.go_on()

    def take_over(self) -> None:
        self.consent = Consent(
            self.job, self.progress, worker_ids=lambda: WORKERS, let_begin=lambda: self.saved_through
        )
        self.consent.take_over()
        self.said += 1  # the steps up to now may have been heard of
        self._restart_script()
        self.go_on()

    def go_on(self) -> None:
        turn = Turn(0.0)
        self.consent.go_on(turn, self.generation, save=False)
        for command in turn.commands:
            assert isinstance(command, SendAll)
            match command.message:
                case StepsAllowed(generation=generation, through=through):
                    assert generation == self.generation
                    self.allowed = max(self.allowed, through)
                case StepsOver(step=step):
                    self.over = step


MOVES = st.lists(st.sampled_from(("step", "step", "answer", "answer", "plan", "back", "take over")), max_size=60)


@examples(200)
@given(moves=MOVES, every=st.integers(1, 4), eval_steps=st.sampled_from((None, 2, 3)), far=st.integers(0, 5))
def test_no_step_begins_unheard_and_none_waits_forever(moves: list[str], every: int, eval_steps: int | None, far: int):
    bench = Bench(every=every, eval_steps=eval_steps)
    bench.plan()
    for move in moves:
        last = bench.progress.last_step
        if move == "step" and last < min(bench.allowed, MAX_STEPS):
            bench.step()
        elif move == "answer" and bench.asked:
            bench.answer()
        elif move == "plan":
            bench.plan()
        elif move == "back":
            bench.plan(back_to=max(0, last - far))
        elif move == "take over":
            bench.take_over()
    while bench.progress.last_step < MAX_STEPS:
        assert bench.asked or bench.progress.last_step < bench.allowed, "all wait"
        if bench.asked:
            bench.answer()
        else:
            bench.step()


def test_workers_are_told_once_and_those_of_a_new_plan_again():
    bench = Bench(every=4)
    bench.plan()
    assert bench.allowed == 0
    bench.answer()
    assert bench.allowed == 4
    turn = Turn(0.0)
    bench.consent.go_on(turn, 1, save=False)
    assert turn.commands == []
    bench.plan()
    assert bench.allowed == 4


def test_a_wait_is_no_hang_and_a_step_that_may_begin_can_be_one():
    bench = Bench()
    bench.plan()
    assert math.isinf(bench.progress.hangs_s)
    bench.answer()
    assert bench.progress.hangs_s == 60.0, "it may be the first step of its plan"
    bench.step()
    assert math.isinf(bench.progress.hangs_s)
    bench.answer()
    assert bench.progress.hangs_s == 10.0


def test_a_stop_ends_training_where_it_waits():
    bench = Bench()
    bench.plan()
    bench.answer()
    bench.step()
    bench.consent.stop()
    bench.answer()
    assert (bench.over, bench.allowed) == (1, 1)


def test_a_step_begins_once_both_the_script_and_the_saves_let_it():
    bench = Bench(every=4)
    bench.saved_through = 2
    bench.plan()
    bench.answer()
    assert bench.allowed == 2
    bench.step()
    bench.step()
    assert math.isinf(bench.progress.hangs_s), "the disk may take long"
    bench.saved_through = 6
    bench.go_on()
    assert bench.allowed == 4
    bench.saved_through = 3
    bench.go_on()
    assert bench.allowed == 4, "within a plan"
    bench.plan()
    assert bench.allowed == 3, "no worker of the new plan has begun more"


def test_an_evaluation_that_is_due_may_hang_while_the_script_waits_for_it():
    bench = Bench(eval_steps=1)
    bench.plan()
    bench.answer()
    bench.progress.expect(10.0, 0.0)
    turn = Turn(0.0)
    record = CommitRecord(
        step=1, generation=1, loss=1.0, grad_norm=1.0, learning_rate=1.0, num_samples=4, samples_repeated=0,
        samples_missing=0, duration_s=0.1,
    )  # fmt: skip
    bench.progress.commit(turn, record)
    bench.tell(StepDone(t_s=0.0, record=record, tokens=1))
    bench.go_on()
    assert math.isfinite(bench.progress.hangs_s)
    assert not bench.asked
    bench.tell(Evaluated(t_s=0.0, step=1, loss=1.0, num_samples=1, duration_s=0.1))
    assert list(bench.asked) == [(1, 2)]


def test_no_step_waits_for_a_script_that_has_ended_or_was_never_asked():
    ended = Bench()
    ended.plan()
    ended.consent.end_asking()
    ended.go_on()
    assert ended.allowed == MAX_STEPS
    never = Bench(waits=False)
    never.plan()
    assert (never.allowed, never.consent.can_finish(5)) == (0, True)
