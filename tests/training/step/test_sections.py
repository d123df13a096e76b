"""Sections of a step: what is committed is what one reduction would have summed, whoever is slow, fenced or gone."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from oobleck.control.plans.sections import shares_of
from oobleck.control.protocol import Fence, PeerFailed, PlanUpdate, SectionRecord
from oobleck.control.steps import GroupKey
from oobleck.control.steps.commit_state import CommitState, Interrupted, PeerLost
from oobleck.control.steps.groups import Committee
from oobleck.control.steps.partial_commit import PartialCommit
from oobleck.control.steps.worker_effects import EffectOutcome, Fold, Say, WorkerEffect, WorkerEffects, drive
from oobleck.planner import ExecutionPlan, Pipeline, PipelineTemplate, StageTemplate, WorkerId
from oobleck.schedule import ScheduleKind, section_stops
from oobleck.training.comm.agreements import PeerAgreements
from oobleck.training.step.reduction import Bucket, GradientReducer, PlanReducer, are_absent
from oobleck.training.step.sections import SectionSums
from oobleck.training.step.step_work import StepWork
from tests.training.table import LinkedTable, acquaint

A, B, C = (WorkerId(node=node, device=0) for node in "abc")
MICROBATCHES = 24
SHAPES = {"both": (7, 5), "all": (3,), "alone": (4, 2), "last": (11,)}


def plan_of(worker_ids: Sequence[WorkerId]) -> ExecutionPlan:
    """Pipelines of one node each, with as many microbatches as each other."""
    stage = StageTemplate(first_layer=0, stop_layer=1, node_index=0)
    return ExecutionPlan(
        pipelines=tuple(
            Pipeline(
                template=PipelineTemplate(stages=(stage,)),
                nodes=(worker_id.node,),
                num_microbatches=MICROBATCHES // len(worker_ids),
            )
            for worker_id in worker_ids
        )
    )


def gradient_of(name: str, microbatch: int, *, whole: bool) -> torch.Tensor:
    """What a microbatch adds to a parameter's gradient; whole numbers are summed without rounding."""
    generator = torch.Generator().manual_seed(microbatch * 100 + len(name))
    values = torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)
    return torch.round(values * 100) if whole else values


def num_items_of(microbatches: Iterable[int]) -> int:
    """How many tokens count in microbatches; in each another number."""
    return sum(1 + microbatch % 5 for microbatch in microbatches)


class Worker:
    """One of several workers in this process, whose pipeline is itself alone: no model, but gradients all the same.

    All share two parameters, the first two share another, and each has one alone.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        worker_ids: Sequence[WorkerId],
        peers: dict[WorkerId, Worker],
        *,
        num_sections: int,
        whole: bool = False,
        reducer: type[GradientReducer] = GradientReducer,
    ) -> None:
        self.worker_id = worker_id
        self.table = LinkedTable(worker_id)
        self.groups = self.table.groups
        self.agreements = PeerAgreements(
            worker_id, self.table.waiter, lambda target, message: peers[target].agreements.hear(worker_id, message)
        )
        self.commit_state = CommitState(worker_id, self.table.waiter.announce, lock=threading.Lock())
        self.plan = plan_of(worker_ids)
        self.whole = whole
        everyone = GroupKey("reduce", 1, tuple(worker_ids))
        owners = {"last": everyone, "all": everyone, "alone": GroupKey("reduce", 1, (worker_id,))}
        if worker_id in worker_ids[:2]:
            owners["both"] = GroupKey("reduce", 1, tuple(worker_ids[:2]))
        self.parameters = {
            name: nn.Parameter(torch.zeros(SHAPES[name], dtype=torch.float64)) for name in ("last", *owners)
        }
        self.buckets = tuple(Bucket(key=owners[name], parameters=(name,)) for name in self.parameters)
        self.keys = {everyone, *owners.values()}
        self.reducer = reducer(self.buckets, self.parameters, self.groups)
        self.num_partial = 0
        self.failed: list[PeerFailed] = []
        self.partial_commit = PartialCommit(self.commit_state)
        self.sections = SectionSums(
            self.partial_commit,
            self.commit_state,
            self.table.waiter,
            self.agreements,
            drive=self._drive,
        )
        self.share = shares_of(self.plan)[worker_ids.index(worker_id)]
        self.stops = section_stops(len(self.share), num_sections)
        self.work = StepWork(step=1)
        update = PlanUpdate(
            generation=1,
            plan=self.plan,
            pipeline_generations=(1,) * len(worker_ids),
            schedules=(ScheduleKind.ONE_F_ONE_B,) * len(worker_ids),
            boundary=0,
            num_sections=num_sections,
        )
        self.commit_state.give_update(update)
        self.commit_state.take_update()
        self.commit_state.adopt(update, (0,))
        self.partial_commit.adopt(update, is_spare=False)
        self.sections.adopt(PlanReducer(Committee(self.plan, 1), self.reducer), {})

    def form(self) -> None:
        self.groups.form(self.keys, lambda: False, generation=1)

    def compute(self, microbatch: int) -> None:
        """What a backward pass does: gradients, a loss, a count."""
        for name, parameter in self.parameters.items():
            gradient = gradient_of(name, microbatch, whole=self.whole)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self.work.losses.append(torch.tensor(float(microbatch), dtype=torch.float64))
        self.work.counted.append(microbatch)
        self.work.num_items += num_items_of([microbatch])

    def run_step(self, randomness: random.Random) -> dict[str, torch.Tensor]:
        """A program with sections, at a pace of its own; returns the sums of the whole step."""
        for position, microbatch in enumerate(self.share):
            self.compute(microbatch)
            time.sleep(randomness.choice([0, 0, 0.002]))
            if randomness.random() < 0.5:
                self.look()
            if position + 1 in self.stops[:-1]:
                self.begin()
        self.settle()
        return self.reducer.finish(lambda: False, plus=self.sections.sums)

    def answer_what_was_posted(self) -> None:
        """Take part in sums that others have begun and given up: a group in which one is stuck cannot be let go."""
        self.reducer.begin({})
        self.reducer.finish(lambda: False)

    def begin(self) -> None:
        self.sections.begin(self.work)

    def look(self) -> None:
        self.sections.look()

    def settle(self) -> None:
        self._drive(self.partial_commit.settle())

    def give_back(self) -> None:
        self._drive(self.partial_commit.give_back())

    def catch_up(self, record: SectionRecord) -> None:
        self._drive(self.partial_commit.catch_up(record))

    def end_step(self) -> None:
        self.partial_commit.end_step()
        self.sections.end_step()

    def _drive(self, effects: WorkerEffects) -> None:
        drive(effects, self._carry_out)

    def _carry_out(self, effect: WorkerEffect) -> EffectOutcome:
        if isinstance(effect, Say):
            assert isinstance(effect.message, PeerFailed)
            self.failed.append(effect.message)
            return None
        self.num_partial += isinstance(effect, Fold)
        return self.sections.carry_out(effect)


class Severed(GradientReducer):
    """One whose peers are lost while sums are on their way."""

    def is_done(self) -> bool:
        return True

    def finish(
        self, interrupted: Callable[[], bool], *, plus: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        raise PeerLost("connection reset by peer")


def workers_of(worker_ids: Sequence[WorkerId], *, num_sections: int, whole: bool = False) -> list[Worker]:
    peers: dict[WorkerId, Worker] = {}
    for worker_id in worker_ids:
        peers[worker_id] = Worker(worker_id, worker_ids, peers, num_sections=num_sections, whole=whole)
    workers = list(peers.values())
    acquaint([worker.table for worker in workers])
    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(Worker.form, workers))
    return workers


def run_all(workers: Sequence[Worker], seed: int) -> list[dict[str, torch.Tensor]]:
    with ThreadPoolExecutor(len(workers)) as pool:
        running = [
            pool.submit(worker.run_step, random.Random(seed * 100 + index)) for index, worker in enumerate(workers)
        ]
        return [each.result(timeout=60) for each in running]


def expected_sum(name: str, workers: Sequence[Worker], worker: Worker, *, whole: bool) -> torch.Tensor:
    owners = {"alone": [worker], "both": workers[:2]}.get(name, workers)
    microbatches = [microbatch for each in owners for microbatch in each.share]
    return torch.stack([gradient_of(name, microbatch, whole=whole) for microbatch in microbatches]).sum(0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("worker_ids", "num_sections"), [((A, B), 12), ((A, B, C), 4), ((A, B, C), 2)])
def test_sections_and_the_rest_sum_to_what_one_reduction_sums(
    worker_ids: tuple[WorkerId, ...], num_sections: int, seed: int
) -> None:
    """Whoever is ahead and whoever looks seldom; had two posted their sums in different orders, these would be mixed.

    Whole numbers are summed to the last bit.
    """
    workers = workers_of(worker_ids, num_sections=num_sections, whole=True)
    for worker, sums in zip(workers, run_all(workers, seed), strict=True):
        assert worker.num_partial == num_sections - 1
        assert sums.keys() == worker.parameters.keys()
        for name, found in sums.items():
            assert torch.equal(found, expected_sum(name, workers, worker, whole=True))
        partial = [microbatch for each in workers for microbatch in each.share[: each.stops[-2]]]
        assert worker.partial_commit.microbatches == tuple(sorted(partial))
        assert worker.partial_commit.loss == sum(partial)
        assert worker.partial_commit.num_items == num_items_of(partial)
        assert worker.work.num_items == num_items_of(worker.share[worker.stops[-2] :])
        assert sorted(worker.work.counted) == sorted(worker.share[worker.stops[-2] :])


def test_fractions_agree_within_rounding_and_all_owners_to_the_last_bit() -> None:
    workers = workers_of((A, B, C), num_sections=6)
    found = run_all(workers, 7)
    for worker, sums in zip(workers, found, strict=True):
        for name in sums:
            expected = expected_sum(name, workers, worker, whole=False)
            assert torch.allclose(sums[name], expected, rtol=0, atol=1e-12)
    assert torch.equal(found[0]["all"], found[1]["all"])
    assert torch.equal(found[0]["all"], found[2]["all"])
    assert torch.equal(found[0]["both"], found[1]["both"])


def test_all_owners_know_which_parameters_no_microbatch_of_the_step_has_reached() -> None:
    """Here none has reached "all", one in the first section "both", one after all sections "last", and all are -0.0."""
    workers = workers_of((A, B, C), num_sections=4)
    for worker in workers:
        own = worker.share
        reached = {"both": own[0], "last": own[-1]} if worker.worker_id == A else {}
        reached |= {"alone": own[1]} if worker.worker_id == B else {}

        def compute(microbatch: int, worker: Worker = worker, reached: Mapping[str, int] = reached) -> None:
            worker.work.losses.append(torch.tensor(0.0, dtype=torch.float64))
            worker.work.counted.append(microbatch)
            for name, at in reached.items():
                if at == microbatch:
                    worker.parameters[name].grad = torch.full(SHAPES[name], -0.0, dtype=torch.float64)

        worker.compute = compute  # type: ignore[method-assign]  # what a pass does is the test's own
    for worker, sums in zip(workers, run_all(workers, 3), strict=True):
        assert worker.num_partial == 3
        absent = {name for name, is_absent in zip(sums, are_absent(list(sums.values())), strict=True) if is_absent}
        assert absent == ({"all"} if worker.worker_id == B else {"all", "alone"})


def test_the_next_step_begins_with_nothing_committed() -> None:
    workers = workers_of((A, B), num_sections=3, whole=True)
    run_all(workers, 0)
    for worker in workers:
        worker.end_step()
        assert (worker.sections.sums, worker.partial_commit.microbatches, worker.partial_commit.loss) == ({}, (), 0.0)
        worker.work.losses, worker.work.counted, worker.work.num_items = [], [], 0
        for parameter in worker.parameters.values():
            parameter.grad = None
    for worker, sums in zip(workers, run_all(workers, 1), strict=True):
        assert all(torch.equal(found, expected_sum(name, workers, worker, whole=True)) for name, found in sums.items())


def test_a_section_that_is_given_up_leaves_all_gradients_losses_and_counts() -> None:
    first, other = workers_of((A, B), num_sections=3, whole=True)
    half = len(first.share) // 2
    for microbatch in first.share[:half]:
        first.compute(microbatch)
    first.begin()
    assert all(parameter.grad is None for parameter in first.parameters.values()), "nothing is copied"
    assert first.work.counted == []
    for microbatch in first.share[half:]:
        first.compute(microbatch)
    first.look()  # the other has not begun, and never will
    assert first.partial_commit.section is not None
    first.give_back()
    assert first.partial_commit.section is None
    assert first.partial_commit.microbatches == ()
    assert sorted(first.work.counted) == sorted(first.share)
    assert first.work.loss_and(None)[0] == sum(first.share)
    assert first.work.num_items == num_items_of(first.share)
    for name, parameter in first.parameters.items():
        expected = torch.stack([gradient_of(name, each, whole=True) for each in first.share]).sum(0)
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected)
    other.answer_what_was_posted()


def test_a_section_that_fails_is_told_at_once_and_the_program_goes_on() -> None:
    first = Worker(A, (A,), {}, num_sections=3, whole=True, reducer=Severed)
    first.form()
    first.compute(first.share[0])
    first.begin()
    first.look()
    (failed,) = first.failed
    assert failed.generation == 1
    first.compute(first.share[1])
    first.begin()
    assert first.work.counted == [first.share[1]]
    assert len(first.failed) == 1
    with pytest.raises(PeerLost):
        first.settle()
    first.give_back()
    assert sorted(first.work.counted) == sorted(first.share[:2])


def test_nothing_is_committed_after_a_fence_and_the_program_goes_on() -> None:
    """The pipeline is whole: it finishes its microbatches, and what is not committed stays with it."""
    first, other = workers_of((A, B), num_sections=3, whole=True)
    for worker in (first, other):
        worker.compute(worker.share[0])
    first.commit_state.answer(Fence(device=0, generation=2, lost=()))
    first.begin()
    assert first.partial_commit.section is None
    assert first.work.counted == [first.share[0]]
    other.begin()
    status = other.commit_state.answer(Fence(device=0, generation=2, lost=()))
    assert (status.partial, status.section_reduced) == (None, None)
    other.look()
    other.begin()  # does not wait for what will never come
    with pytest.raises(Interrupted):
        other.settle()
    other.give_back()
    assert other.work.counted == [other.share[0]]
    first.answer_what_was_posted()


def test_a_stopped_pipeline_does_not_wait_to_commit() -> None:
    first, other = workers_of((A, B), num_sections=3)
    first.compute(first.share[0])
    first.begin()
    first.commit_state.answer(Fence(device=0, generation=2, lost=("a",)))
    with pytest.raises(Interrupted):
        first.begin()
    other.answer_what_was_posted()


def test_whoever_holds_the_sums_commits_them_by_order() -> None:
    """Both have the sums; a fence keeps one from hearing that all have. The other has committed, so it counts."""
    first, other = workers_of((A, B), num_sections=2, whole=True)
    for worker in (first, other):
        for microbatch in worker.share[: worker.stops[0]]:
            worker.compute(microbatch)
        worker.begin()
    wait_for(
        lambda: (first.look(), first.commit_state.answer(Fence(device=0, generation=0, lost=())))[1].section_reduced
    )
    first.commit_state.answer(Fence(device=0, generation=2, lost=()))
    other.settle()
    partial = other.commit_state.answer(Fence(device=0, generation=2, lost=())).partial
    assert isinstance(partial, SectionRecord)
    first.look()
    assert first.sections.sums == {}
    first.catch_up(partial)
    assert first.partial_commit.section is None
    assert first.partial_commit.microbatches == other.partial_commit.microbatches
    assert first.partial_commit.loss == other.partial_commit.loss == sum(first.partial_commit.microbatches)
    assert first.partial_commit.num_items == num_items_of(first.partial_commit.microbatches)
    for name in ("all", "both", "last"):
        assert torch.equal(first.sections.sums[name], other.sections.sums[name])
    first.catch_up(partial)
    assert first.num_partial == 1, "once is enough"


def test_a_wait_for_something_else_does_not_hold_up_the_others_section() -> None:
    """One waits for its neighbour, the other for the section: without a look meanwhile, both would for ever."""
    first, other = workers_of((A, B), num_sections=2, whole=True)
    arrived = threading.Event()

    def wait_for_message() -> None:
        first.sections.look_until(arrived.is_set, lambda: False, [B])

    for worker in (first, other):
        for microbatch in worker.share[: worker.stops[0]]:
            worker.compute(microbatch)
        worker.begin()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for_message)
        other.settle()
        waiting.result(timeout=60)
    assert first.num_partial == other.num_partial == 1
    assert not arrived.is_set(), "with nothing to look after, the wait is the caller's own"


def test_a_microbatch_that_is_counted_twice_is_not_committed() -> None:
    first, other = workers_of((A, B), num_sections=2)
    for worker in (first, other):
        for microbatch in worker.share[: worker.stops[0]]:
            worker.compute(microbatch)
    other.work.counted.append(first.share[0])
    for worker in (first, other):
        worker.begin()
    with ThreadPoolExecutor(2) as pool:
        for settling in [pool.submit(worker.settle) for worker in (first, other)]:
            with pytest.raises(AssertionError, match=r"^section 1 of step 1: "):
                settling.result(timeout=60)
    assert first.num_partial == other.num_partial == 0


def wait_for(ready: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 30
    while not ready():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
