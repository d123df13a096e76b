"""Programs of stages that NCCL links, with its fake: what they compute, and what they leave when they are stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import cast

import pytest
import torch

from oobleck.control.protocol import Fence
from oobleck.control.steps import Compute, GroupKey, Interrupted
from oobleck.planner import WorkerId
from oobleck.schedule import ScheduleKind
from oobleck.training.comm.group import Group
from oobleck.training.comm.nccl import NcclGroup
from oobleck.training.model.models import StageModel
from oobleck.training.model.tensor_parallel import initialize_share, install, share_of
from oobleck.training.step.reduction import GradientReducer
from oobleck.training.step.step_work import PipelineRank
from tests.training.comm.fake_nccl import FakeNccl, FakeNcclWork
from tests.training.comm.test_edges import Pipeline as LinkedPipeline
from tests.training.fake_cuda import FakeCuda
from tests.training.model.test_tensor_parallel import Counted
from tests.training.step.test_step import ME, Device, OneWorker, Wire
from tests.training.zoo import gradients_of, run_pipeline, state_of, structure_of, whole_stage

pytestmark = pytest.mark.usefixtures("backward_on")


class _Aborted(Wire):
    num_aborts = 0

    def abort(self) -> None:
        self.num_aborts += 1


def test_a_program_that_is_stopped_half_way_ends_what_its_pipeline_has_on_its_way():
    """The worker may wait long for its next plan, and what spins on the GPU until then would hold it up."""
    worker = OneWorker(None)
    worker.commit_state.answer(Fence(device=0, generation=2, lost=("a",)))
    wire = _Aborted(worker.waiter)
    group, schedule = cast("Group", wire), ScheduleKind.ONE_F_ONE_B
    rank = PipelineRank(stage=0, num_stages=2, group=group, rank=0, degree=1, schedule=schedule)
    with pytest.raises(Interrupted):
        worker.step.execute(rank, Compute(1, (0, 1)), cast("GradientReducer", None))
    assert wire.num_aborts == 1


def test_a_backward_pass_whose_sum_between_devices_is_interrupted_ends_the_program():
    """Wherever it runs: what a sum raises reaches the training thread, as what it is."""
    whole = structure_of("llama")
    share = share_of(whole, rank=0, degree=2)
    model = StageModel(share.structure, dtype=torch.float32, device="cpu")
    num_forward = 1 + 4 * whole.num_blocks  # the words that were looked up, and four a block

    class Stopping(Counted):
        def gather(self, own: torch.Tensor) -> torch.Tensor:
            if len(self.done) == num_forward:
                raise Interrupted
            return super().gather(own)

    sums = Stopping()
    install(model, share, sums)
    model.adopt(0, whole.num_layers - 1, {})
    initialize_share(model, share, model.parameters, range(whole.num_layers - 1), seed=0)
    worker = OneWorker(None, model)
    wire = _Aborted(worker.waiter)
    group, schedule = cast("Group", wire), ScheduleKind.ONE_F_ONE_B
    rank = PipelineRank(stage=0, num_stages=2, group=group, rank=0, degree=1, schedule=schedule)
    with pytest.raises(Interrupted):
        worker.step.execute(rank, Compute(1, (0,)), cast("GradientReducer", None))
    assert len(sums.done) == num_forward
    assert wire.num_aborts == 1


class _InOrder(FakeNccl):
    """The host is its own device: what comes after a sum in a stream's order begins when the sum is there."""

    num_polls = 0

    def _work(self, kind: str, tensor: torch.Tensor) -> FakeNcclWork:
        return _InOrderWork(self, kind, tensor)


class _InOrderWork(FakeNcclWork):
    _group: _InOrder

    def is_completed(self) -> bool:
        self._group.num_polls += 1
        return super().is_completed()

    def block_current_stream(self) -> None:
        with self._group.world.changed:
            assert self._group.world.changed.wait_for(lambda: self.has_ended, 20)


class _Ending(Device):
    """Something happens once all has been launched."""

    def __init__(self) -> None:
        super().__init__()
        self.on_mark: Callable[[], None] = lambda: None

    def mark(self) -> Callable[[], None]:
        self.on_mark()
        return super().mark()


@pytest.mark.parametrize("ends", ["well", "aborted", "aborted at last"])
def test_the_host_waits_for_no_sum_of_a_stage_in_a_step(ends: str) -> None:
    """It polls none, in forward and backward passes. If one is aborted, the step is not computed, whenever that was."""
    degree, whole = 2, structure_of("llama")
    members = tuple(WorkerId(node="a", device=device) for device in range(degree))
    key, fakes = GroupKey("stage", 1, members), _InOrder.join(degree)
    alone = OneWorker(None, whole_stage(whole))
    alone.run()
    drawing = threading.Lock()  # initial values come from one generator a process

    def computed(rank: int) -> OneWorker:
        share = share_of(whole, rank=rank, degree=degree)
        model = StageModel(share.structure, dtype=torch.float32, device="cpu")
        device = _Ending() if ends == "aborted at last" else None
        worker = OneWorker(device, model)
        group = Group(key, members[rank], None, None, worker.waiter)  # type: ignore[arg-type]
        group.use_nccl(NcclGroup(key.name, members[rank], model.device, fakes[rank], None), 10.0)  # type: ignore[arg-type]
        install(model, share, worker.step.stage_sums)
        worker.step.stage_sums.adopt(group)
        model.adopt(0, whole.num_layers, {})
        with drawing:
            initialize_share(model, share, model.parameters, range(whole.num_layers), seed=0)
        fakes[rank].num_polls = 0
        rank_in = PipelineRank(
            stage=0, num_stages=1, group=None, rank=rank, degree=degree, schedule=ScheduleKind.ONE_F_ONE_B
        )
        if ends == "aborted":
            # While the last pass runs, as a fence does that stops the pipeline.
            first = next(iter(model.parameters.values()))
            first.register_post_accumulate_grad_hook(lambda _: group.abort())  # type: ignore[no-untyped-call]
        if device is not None:
            device.on_mark = group.abort
        worker.step.execute(rank_in, Compute(1, (0, 1)), cast("GradientReducer", None))
        return worker

    with ThreadPoolExecutor(degree) as pool:
        running = [pool.submit(computed, rank) for rank in range(degree)]
        if ends != "well":
            for each in running:
                with pytest.raises(Interrupted):
                    each.result(60)
            return
        workers = [each.result(60) for each in running]
    # Of two microbatches: four a block, forward and backward; five of words, loss, and all tokens.
    num_sums = 2 * (8 * whole.num_blocks + 5)
    for worker, fake in zip(workers, fakes, strict=True):
        assert worker.waiter.mark.begun == 0
        assert fake.num_polls == 0
        assert len(fake.works) == 6 + num_sums, "after those that connect"
    reported = [worker.step.work.loss_and(None)[0] for worker in workers]  # by the first device of a stage alone
    assert reported == pytest.approx([alone.step.work.loss_and(None)[0], 0.0], rel=1e-5)


ENDS = {1: (0, 3), 2: (0, 1, 3, 4)}
"""Where the chunks begin, by how many each of two stages has."""


@pytest.mark.parametrize(
    ("schedule", "num_chunks"),
    [(ScheduleKind.ONE_F_ONE_B, 1), (ScheduleKind.ZERO_BUBBLE, 1), (ScheduleKind.INTERLEAVED, 2)],
)
def test_two_stages_that_nccl_links_compute_what_they_compute_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, schedule: ScheduleKind, num_chunks: int
) -> None:
    """The same bits: through real programs, in mixed precision, with hidden states in the type that is computed in."""
    FakeCuda(monkeypatch)
    structure = structure_of("gpt2")
    state = state_of(whole_stage(structure))

    chunks = [range(*ends) for ends in pairwise((*ENDS[num_chunks], structure.num_layers))]

    def stages(held: Sequence[Sequence[range]]) -> list[StageModel]:
        made = []
        for each in held:
            stage = StageModel(structure, dtype=torch.float32, device="cpu", autocast=torch.bfloat16)
            stage.adopt_chunks(each, {name: tensor.clone() for name, tensor in state.items()})
            made.append(stage)
        return made

    expected, models = stages([[chunk] for chunk in chunks]), stages([chunks[::2], chunks[1::2]])
    pipeline = LinkedPipeline([ME, WorkerId(node="b", device=0)])
    workers = [OneWorker(None, model) for model in models]

    def run(stage: int) -> None:
        group = pipeline.groups[stage]
        rank = PipelineRank(
            stage=stage, num_stages=2, num_chunks=num_chunks, group=group, rank=0, degree=1, schedule=schedule
        )
        workers[stage].step.execute(rank, Compute(1, (0, 1)), cast("GradientReducer", None))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    batch = workers[0].step.batch
    losses = [
        run_pipeline(expected, batch.load(number), key=batch.key(number), num_items=batch.divisor)
        for number in range(2)
    ]
    assert workers[1].step.work.loss_and(None)[0] == pytest.approx(float(sum(losses)), rel=1e-6)
    found, wanted = gradients_of(models), gradients_of(expected)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    assert len(pipeline.libraries[0].joined) == 2
    pipeline.close()
