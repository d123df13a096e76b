"""What ends a step that takes long: stuck workers do, a clock does not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.events import Command, Record, SendAll, Turn
from oobleck.control.journal import JobEnded, PlanCause, RecoveryStarted, StepRunsLong
from oobleck.control.protocol import Activity, AskActivity, ProcessorUse
from oobleck.control.recovery.states import BeginRecovery
from oobleck.control.steps import HANG_FLOOR_S, Progress
from oobleck.control.training.hang_watch import HangWatch
from oobleck.job import ControlSpec
from oobleck.planner import WorkerId
from tests.control.bench import Bench
from tests.control.model import Shape
from tests.examples import examples

SINGLES = Shape(num_nodes=3, layers_per_device=4, num_layers=4, max_steps=3)
NODES = ("n0", "n1", "n2")
CONTROL = ControlSpec()
LIMIT_S = 120.0


def worker(node: str) -> WorkerId:
    return WorkerId(node=node, device=0)


ALL = tuple(map(worker, NODES))


def activity(inquiry: int, *waits_for: str, done: int = 0, has_come_on: bool = False) -> Activity:
    return Activity(
        device=0,
        inquiry=inquiry,
        microbatches_done=done,
        waits_for=tuple(map(worker, waits_for)),
        has_come_on=has_come_on,
    )


def use(inquiry: int, used_s: float, within_s: float = 1.5) -> ProcessorUse:
    return ProcessorUse(device=0, inquiry=inquiry, used_s=used_s, within_s=within_s)


class Watched:
    """A watch over a first step, whose limit of two minutes begins now."""

    def __init__(self) -> None:
        self.progress = Progress(SINGLES.job)
        self.progress.expect(LIMIT_S, 0.0)
        self.watch = HangWatch(CONTROL, self.progress)
        self.inquiry = 0

    def look(self, now_s: float, asked: Sequence[WorkerId] = ALL) -> tuple[BeginRecovery | None, list[Command]]:
        turn = Turn(now_s)
        return self.watch.handle_deadline(turn, asked), turn.commands

    def ask(self) -> float:
        """Let the watch ask when it wants to; returns when that is."""
        now_s = self.watch.due_s
        begun, (sent,) = self.look(now_s)
        assert begun is None
        assert isinstance(sent, SendAll)
        assert isinstance(sent.message, AskActivity)
        self.inquiry = sent.message.inquiry
        return now_s

    def judge(self) -> BeginRecovery | StepRunsLong:
        match self.look(self.watch.due_s):
            case (BeginRecovery() as begun, []):
                return begun
            case (None, [Record(entry=StepRunsLong() as entry)]):
                return entry
            case other:
                raise AssertionError(other)

    def answer(self, **answers: Activity | ProcessorUse) -> None:
        for node, message in answers.items():
            self.watch.answered(worker(node), message)


def test_all_are_asked_a_lease_before_it_would_be_a_hang_and_have_half_of_that_to_come_on():
    watched = Watched()
    assert watched.look(LIMIT_S - CONTROL.lease_s - 0.1) == (None, [])
    assert watched.ask() == LIMIT_S - CONTROL.lease_s
    assert watched.watch.due_s == LIMIT_S


def test_nothing_is_asked_while_no_step_can_be_committed():
    watched = Watched()
    watched.progress.allow(math.inf)
    assert watched.watch.due_s == math.inf


def test_a_watch_that_is_called_late_asks_before_it_judges():
    watched = Watched()
    begun, (sent,) = watched.look(LIMIT_S + 50.0)
    assert begun is None
    assert isinstance(sent, SendAll)
    assert watched.progress.hangs_s == LIMIT_S + 50.0 + CONTROL.lease_s


def test_where_nobody_can_be_asked_it_is_a_hang():
    watched = Watched()
    begun, _ = watched.look(LIMIT_S, ())
    assert isinstance(begun, BeginRecovery)


def test_a_committed_step_makes_answers_stale():
    watched = Watched()
    watched.ask()
    watched.progress.expect(LIMIT_S, 119.0)
    assert watched.watch.due_s == 119.0 + LIMIT_S - CONTROL.lease_s


def test_who_waits_for_one_that_uses_the_processor_hangs_in_nothing():
    watched = Watched()
    watched.ask()
    watched.answer(n0=activity(1, "n2"), n1=activity(1, "n2"), n2=activity(1))
    watched.answer(n2=use(1, 1.4))
    found = watched.judge()
    assert isinstance(found, StepRunsLong)
    assert (found.step, found.computing, found.microbatch) == (1, (worker("n2"),), 0)
    assert found.sentence == "still running step 1 after 2 min: n2's worker computes microbatch 0"


def test_who_cannot_answer_but_uses_the_processor_computes():
    """A compiler or a kernel may hold the interpreter for minutes."""
    watched = Watched()
    watched.ask()
    watched.answer(n0=activity(1, "n2"), n1=activity(1, "n2"), n2=use(1, 1.4))
    found = watched.judge()
    assert isinstance(found, StepRunsLong)
    assert (found.computing, found.microbatch) == ((worker("n2"),), None)


def test_one_that_sleeps_and_is_waited_for_is_stuck_although_others_compute():
    watched = Watched()
    watched.ask()
    watched.answer(n0=activity(1, "n2"), n2=activity(1), n1=activity(1, has_come_on=True))
    watched.answer(n0=use(1, 0.01), n1=use(1, 1.5), n2=use(1, 0.01))
    found = watched.judge()
    assert isinstance(found, BeginRecovery)
    assert (found.cause, found.detect_s, found.busy) == (PlanCause.HANG, LIMIT_S, (worker("n1"),))


@pytest.mark.parametrize("waiting", [("n1", "n0"), ("n1", "n2")], ids=["each-other", "one-that-does-not-answer"])
def test_where_nobody_computes_it_is_a_hang(waiting: tuple[str, str]):
    """What those use who wait says nothing: a wait may look again and again."""
    watched = Watched()
    watched.ask()
    watched.answer(n0=activity(1, waiting[0]), n1=activity(1, waiting[1]))
    watched.answer(n0=use(1, 1.5), n1=use(1, 1.5), n2=use(1, 0.0, within_s=0.0))
    assert isinstance(watched.judge(), BeginRecovery)


def test_those_that_exchange_layers_come_on():
    watched = Watched()
    watched.ask()
    watched.answer(n0=activity(1, "n1"), n1=activity(1, "n0", has_come_on=True))
    found = watched.judge()
    assert isinstance(found, StepRunsLong)
    assert found.computing == ()
    assert found.sentence.endswith("its workers exchange data")


def test_answers_to_an_older_inquiry_are_dropped():
    watched = Watched()
    watched.ask()
    watched.answer(n0=use(1, 1.5))
    assert isinstance(watched.judge(), StepRunsLong)
    watched.ask()
    watched.answer(n0=use(1, 1.5), n1=activity(1, has_come_on=True))
    assert isinstance(watched.judge(), BeginRecovery)


@examples(20)
@given(num_looks=st.integers(1, 40))
def test_the_limit_doubles_while_workers_come_on_up_to_ten_minutes(num_looks: int):
    watched, looks_s = Watched(), []
    for _ in range(num_looks):
        watched.ask()
        watched.answer(n0=use(watched.inquiry, 1.5))
        looks_s.append(watched.watch.due_s)
        found = watched.judge()
        assert isinstance(found, StepRunsLong)
    assert looks_s[:3] == [LIMIT_S, 2 * LIMIT_S, 4 * LIMIT_S][:num_looks]
    assert all(later - look <= 600.0 for look, later in pairwise(looks_s))


def test_the_sentence_counts_those_that_compute_besides():
    entry = StepRunsLong(t_s=1.0, step=7, running_s=45.0, computing=ALL, microbatch=3)
    assert entry.sentence.endswith("n0's worker computes microbatch 3, and 2 more compute")
    assert entry.sentence.startswith("still running step 7 after 45 s: ")
    assert replace(entry, microbatch=None).sentence.endswith("n0's worker computes, and 2 more compute")
    of_two = replace(entry, computing=(WorkerId(node="n0", device=1),))
    assert of_two.sentence.endswith("n0's worker 1 computes microbatch 3")


# --- in a run ------------------------------------------------------------------------------------------------


def test_a_first_step_of_an_hour_is_neither_regrouped_nor_ended():
    bench = Bench(SINGLES)
    bench.prepare()
    while bench.now_s < 3600.0:
        bench.say_all(*NODES)
        asked = {said.inquiry for said in bench.messages(bench.wait(1.0)) if isinstance(said, AskActivity)}
        for inquiry in asked:
            for node in ("n0", "n1"):
                bench.say(node, activity(inquiry, "n2"), use(inquiry, 0.0))
            bench.say("n2", activity(inquiry), use(inquiry, 1.5))
    assert not bench.journal(RecoveryStarted)
    assert not bench.journal(JobEnded)
    assert 5 < len(bench.journal(StepRunsLong)) < 20
    bench.commit("n0", 1)
    assert bench.coordinator.next_deadline() <= 3600.0 + HANG_FLOOR_S


def test_a_busy_worker_is_not_taken_for_stuck_where_another_one_is():
    """All are asked once more when they are fenced; those that compute may not come on within that time."""
    bench = Bench(SINGLES)
    bench.prepare()
    limit_s = bench.job.control.start_timeout_s
    bench.beat_until(limit_s - 2.9, *NODES)
    inquiry = next(message.inquiry for message in bench.messages(bench.commands) if isinstance(message, AskActivity))
    bench.say("n0", activity(inquiry, "n1", "n2"))
    bench.say("n1", activity(inquiry), use(inquiry, 0.0))
    bench.say("n2", activity(inquiry), use(inquiry, 1.5))
    bench.beat_until(limit_s + 0.5, *NODES)
    bench.answer("n0", waits_for=(worker("n1"), worker("n2")))
    bench.answer("n1")
    bench.answer("n2")
    killed = [
        command.node for command in bench.commands if type(getattr(command, "message", None)).__name__ == "KillWorker"
    ]
    assert killed == ["n1"]
