"""A step's programs on a device that computes beside the host."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oobleck.control.protocol import CommitRecord, Fence, PlanUpdate
from oobleck.control.steps import CommitState, Compute, GroupKey, Interrupted
from oobleck.job import JobSpec, OptimizerSpec
from oobleck.planner import ExecutionPlan, Pipeline, PipelineTemplate, StageTemplate, WorkerId
from oobleck.schedule import ScheduleKind
from oobleck.training.comm.devices import DeviceWork
from oobleck.training.comm.group import Group
from oobleck.training.comm.inbox import Inbox
from oobleck.training.comm.stage_sums import StageSums
from oobleck.training.comm.staging import Pending
from oobleck.training.comm.waiter import Waiter
from oobleck.training.data.data import Dataset
from oobleck.training.data.samples import ModelInputs
from oobleck.training.data.script_data import ScriptSamples
from oobleck.training.model.models import StageModel
from oobleck.training.model.tensor_parallel import share_of
from oobleck.training.optim.optimizer import Optimizer
from oobleck.training.step.evaluation import Evaluator
from oobleck.training.step.layer_store import LayerStore
from oobleck.training.step.reduction import Bucket, GradientReducer, squared_norm
from oobleck.training.step.sections import SectionSums
from oobleck.training.step.stage_state import StageState
from oobleck.training.step.step import StepInFlight
from oobleck.training.step.step_timer import StepTimer
from oobleck.training.step.step_work import PipelineRank, item_share_of
from tests.training.fake_cuda import FakeCuda
from tests.training.zoo import (
    KEY,
    SEQUENCE_LENGTH,
    VOCAB_SIZE,
    state_of,
    structure_of,
    transformers_model,
    whole_stage,
)

ME = WorkerId(node="a", device=0)
RECORD = CommitRecord(
    step=1,
    generation=1,
    loss=1.0,
    grad_norm=1.0,
    learning_rate=1.0,
    num_samples=2,
    samples_repeated=0,
    samples_missing=0,
    duration_s=1.0,
)


class Rows:
    digest = ""
    vocab_size = VOCAB_SIZE
    mask_id = None
    num_samples = 8
    sequence_length = SEQUENCE_LENGTH

    def rows(self, indices: Sequence[int]) -> npt.NDArray[np.int64]:
        return np.arange(len(indices) * SEQUENCE_LENGTH).reshape(len(indices), -1) % VOCAB_SIZE


class Device(DeviceWork):
    """Stands for a GPU: it is done when it is told to be, and took a nanosecond for each piece."""

    def __init__(self, *, is_stuck: bool = False) -> None:
        super().__init__(torch.device("cuda", 0))
        self.can_end = threading.Event()
        if not is_stuck:
            self.can_end.set()
        self.num_pieces = 0
        self.is_marked = threading.Event()

    def begin(self) -> None:
        self.num_pieces = 0

    @contextmanager
    def piece(self) -> Iterator[None]:
        yield
        self.num_pieces += 1

    def mark(self) -> Callable[[], None]:
        self.is_marked.set()
        return lambda: cast("None", self.can_end.wait(20))

    def seconds(self) -> float:
        return 1e-9 * self.num_pieces


class Timer(StepTimer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(0)
        self.told: list[tuple[float, float]] = []

    def add(self, began_s: float, ended_s: float, *, waited_s: float, **others: object) -> None:
        self.told.append((ended_s - began_s, waited_s))
        super().add(began_s, ended_s, waited_s=waited_s, **others)  # type: ignore[arg-type]


class OneWorker:
    """A worker that is all there is."""

    def __init__(
        self, device: DeviceWork | None, model: StageModel | None = None, *, dataset: Dataset | None = None
    ) -> None:
        structure = structure_of("gpt2") if model is None else model.structure
        job = JobSpec(global_batch_size=2)
        self.waiter = Waiter()
        self.commit_state = CommitState(ME, self.waiter.announce, lock=threading.Lock())
        stage = StageTemplate(first_layer=0, stop_layer=structure.num_layers, node_index=0)
        pipeline = Pipeline(template=PipelineTemplate(stages=(stage,)), nodes=("a",), num_microbatches=2)
        update = PlanUpdate(
            generation=1,
            plan=ExecutionPlan(pipelines=(pipeline,)),
            pipeline_generations=(1,),
            schedules=(ScheduleKind.ONE_F_ONE_B,),
            boundary=0,
        )
        self.commit_state.give_update(update)
        self.commit_state.take_update()
        self.commit_state.adopt(update, tuple(range(structure.num_layers)))
        self.timer = Timer()
        self.step = StepInFlight(
            job,
            dataset or Dataset(Rows()),
            StageState(model or whole_stage(structure), share_of(structure, rank=0, degree=1)),
            node_sums=None,
            sections=cast("SectionSums", None),
            commit_state=self.commit_state,
            waiter=self.waiter,
            step_timer=self.timer,
            device_work=device,
            stage_sums=StageSums(self.commit_state.is_pipeline_stopped),
        )
        self.step.begin(1, scale=1.0)

    def run(self) -> None:
        """Run two microbatches of a pipeline of one stage."""
        alone = PipelineRank(stage=0, num_stages=1, group=None, rank=0, degree=1, schedule=ScheduleKind.ONE_F_ONE_B)
        self.step.execute(alone, Compute(1, (0, 1)), cast("GradientReducer", None))


def test_a_device_that_does_not_end_is_waited_for_until_the_pipeline_is_stopped(monkeypatch: pytest.MonkeyPatch):
    """While a peer is lost, NCCL's kernels spin on other streams, and a wait for the whole device does not end."""

    def wait_for_ever(*_: object) -> None:
        raise AssertionError("the training thread waits for the whole device")

    monkeypatch.setattr(torch.cuda, "synchronize", wait_for_ever)
    device = Device(is_stuck=True)
    worker = OneWorker(device)

    def fence() -> None:
        assert device.is_marked.wait(20)
        worker.commit_state.answer(Fence(device=0, generation=2, lost=("a",)))

    fencing = threading.Thread(target=fence)
    fencing.start()
    with pytest.raises(Interrupted):
        worker.run()
    fencing.join()
    device.can_end.set()


def test_what_a_device_took_is_told_by_its_own_clock():
    """The host has launched everything long before; what it waited for meanwhile is no time of the device's."""
    device = Device()
    worker = OneWorker(device)
    worker.run()
    (whole_s, waited_s), *others = worker.timer.told
    assert not others
    assert device.num_pieces == 4, "two forward and two backward passes"
    assert waited_s < whole_s
    assert whole_s - waited_s < 0.5 * whole_s, "the device says nanoseconds"


def test_where_the_host_computes_nothing_is_waited_for():
    worker = OneWorker(None)
    worker.run()
    ((whole_s, waited_s),) = worker.timer.told
    assert waited_s == 0.0 < whole_s


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_cast_once_a_step_for_all_microbatches_in_flight(dtype: torch.dtype):
    """A copy of all weights for each of them would take more memory than what they keep of their own."""
    structure = structure_of("gpt2")
    model = StageModel(structure, dtype=torch.float32, device="cpu", autocast=dtype)
    model.adopt(0, structure.num_layers, {})
    model.initialize(range(structure.num_layers), seed=0)
    size = model.parameters["transformer.h.0.mlp.c_fc.weight"].numel()
    casts: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == dtype and tensor.untyped_storage().nbytes() == 2 * size:
            casts[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    worker = OneWorker(None, model)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        worker.run()
    assert len(casts) == 2 * structure.num_blocks, "c_fc and c_proj of each block, for two microbatches"


class Casts(TorchDispatchMode):
    """Counts how often each weight is cast."""

    def __init__(self, model: StageModel) -> None:
        super().__init__()
        self._names = {parameter.data_ptr(): name for name, parameter in model.parameters.items()}
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and (name := self._names.get(args[0].data_ptr())) is not None:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("backward_on")
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_weight_is_cast_once_a_step_wherever_backward_passes_run(recomputes: bool):
    """Where they recompute activations, the end of their autocast must not drop the casts of the forward passes."""
    structure = structure_of("llama")
    model = StageModel(
        structure,
        dtype=torch.float32,
        device="cpu",
        autocast=torch.bfloat16,
        recompute="all" if recomputes else "none",
    )
    model.adopt(0, structure.num_layers, {})
    model.initialize(range(structure.num_layers), seed=0)
    worker = OneWorker(None, model)
    for _ in range(2):  # whatever is remembered of the first step
        with Casts(model) as casts:
            worker.run()
        matrices = {name for name in model.parameters if "proj" in name}
        assert {name: count for name, count in casts.counts.items() if name in matrices} == dict.fromkeys(matrices, 1)


def test_casting_once_changes_no_bit():
    gradients = []
    for autocast in (contextlib.nullcontext, None):
        structure = structure_of("gpt2")
        model = StageModel(structure, dtype=torch.float32, device="cpu", autocast=torch.bfloat16)
        model.adopt(0, structure.num_layers, {})
        model.initialize(range(structure.num_layers), seed=0)
        if autocast is not None:
            model.casting_once = autocast  # type: ignore[method-assign]  # as it was before
        OneWorker(None, model).run()
        gradients.append({name: parameter.grad for name, parameter in model.parameters.items()})
    once, each = gradients
    assert all(torch.equal(once[name], each[name]) for name in once)


class Wire:
    """Stands for the group of a pipeline whose other stage answers at once, and that keeps itself what it sends."""

    def __init__(self, waiter: Waiter) -> None:
        self._waiter = waiter
        self.sent: list[weakref.ref[torch.Tensor]] = []

    def send_off(self, tensor: torch.Tensor, _target: int, _tag: int) -> None:
        self.sent.append(weakref.ref(tensor))

    def inbox(self, _source: int) -> Inbox:
        return Inbox(WorkerId(node="b", device=0), self._waiter)

    def post_receive_ahead(
        self, shape: tuple[int, ...], dtype: torch.dtype, _device: torch.device, _source: int, _tag: int
    ) -> tuple[Pending, torch.Tensor]:
        return Arrived(), torch.ones(shape, dtype=dtype)


class Arrived:
    def wait(self) -> object:
        return True


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_step_keeps_nothing_of_what_its_group_keeps_while_it_is_sent(autocast: torch.dtype | None):
    """With many microbatches, what was sent of each would add up on the GPU until the step ends."""
    structure = structure_of("gpt2")
    model = StageModel(structure, dtype=torch.float32, device="cpu", autocast=autocast)
    model.adopt(0, structure.num_layers - 1, {})
    model.initialize(range(structure.num_layers - 1), seed=0)
    worker = OneWorker(None, model)
    wire = Wire(worker.waiter)
    first = PipelineRank(
        stage=0,
        num_stages=2,
        group=cast("Group", wire),
        rank=0,
        degree=1,
        schedule=ScheduleKind.ONE_F_ONE_B,
    )
    worker.step.execute(first, Compute(1, (0, 1)), cast("GradientReducer", None))
    assert len(wire.sent) == 2
    assert worker.step.work.sends == []
    assert [ref() for ref in wire.sent] == [None, None]


def test_the_host_waits_for_the_device_once_in_a_step(monkeypatch: pytest.MonkeyPatch):
    """For the loss and the norm of the gradients, which are agreed on: all else is launched, and looked at."""
    structure = structure_of("llama")
    model = StageModel(structure, dtype=torch.float32, device="cpu")
    model.adopt(1, structure.num_layers, {})
    model.initialize(range(1, structure.num_layers), seed=0)
    fake = FakeCuda(monkeypatch)
    worker = OneWorker(DeviceWork(torch.device("cuda", 0)), model)
    last = PipelineRank(
        stage=1,
        num_stages=2,
        group=cast("Group", Wire(worker.waiter)),
        rank=0,
        degree=1,
        schedule=ScheduleKind.ONE_F_ONE_B,
    )
    worker.step.execute(last, Compute(1, (0, 1)), cast("GradientReducer", None))  # what is looked at once only
    worker.step.forget()
    worker.step.begin(2, scale=1.0)
    fake.reads.clear()
    worker.step.execute(last, Compute(2, (0, 1)), cast("GradientReducer", None))
    of_samples = {"__bool__ by batch", "__int__ by num_items"}  # as they are loaded, in the host's memory
    assert set(fake.reads) <= of_samples
    fake.reads.clear()
    bucket = Bucket(key=GroupKey("reduce", 1, (ME,)), parameters=tuple(model.parameters))
    gradients = {name: parameter.grad for name, parameter in model.parameters.items() if parameter.grad is not None}
    loss, norm = worker.step.work.loss_and(squared_norm([bucket], gradients, ME))
    assert fake.reads == ["tolist by loss_and"]
    assert loss == sum(float(each) for each in worker.step.work.losses)
    assert norm == pytest.approx(sum(float(each.double().square().sum()) for each in gradients.values()), rel=1e-5)
    assert not [line for line in fake.log if line.startswith(f"{threading.current_thread().name} waits")]
    whole_s, waited_s = worker.timer.told[-1]
    assert whole_s - waited_s == pytest.approx(min(whole_s, 4e-3)), "what the device's events say of four passes"


def ragged_dataset() -> Dataset:
    """Two samples, of which many and few tokens count."""
    ids = list(range(SEQUENCE_LENGTH))
    samples = [
        {"input_ids": ids, "labels": [-100] * 4 + ids[4:]},
        {"input_ids": ids[:9], "labels": [-100] * 7 + ids[7:9]},
    ]
    inputs = ModelInputs(names=frozenset({"attention_mask"}))
    source = ScriptSamples(lambda: samples, sequence_length=SEQUENCE_LENGTH, vocab_size=VOCAB_SIZE)
    return Dataset(source).with_inputs(inputs)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_steps_loss_and_gradients_are_means_over_the_tokens_that_count(name: str):
    """However they fall on microbatches: here 20 on one and 2 on the other."""
    structure, dataset = structure_of(name), ragged_dataset()
    model = whole_stage(structure, dtype=torch.float64)
    worker = OneWorker(None, model, dataset=dataset)
    worker.run()
    work = worker.step.work
    assert work.num_items == 22
    share = item_share_of(work.num_items, divisor=worker.step.batch.divisor)

    whole = transformers_model(structure, state_of(model))
    batch = dataset.batch([0, 1])
    logits = whole(input_ids=batch.input_ids, **batch.others).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB_SIZE), batch.labels[:, 1:].reshape(-1))
    loss.backward()
    assert work.loss_and(None)[0] / share == pytest.approx(float(loss.detach()), abs=1e-6)
    for parameter, expected in whole.named_parameters():
        if expected.grad is not None:
            found = model.parameters[parameter].grad
            assert found is not None
            torch.testing.assert_close(found / share, expected.grad, rtol=1e-4, atol=1e-7)


def test_where_all_tokens_count_nothing_is_corrected():
    worker = OneWorker(None)
    worker.run()
    assert item_share_of(worker.step.work.num_items, divisor=worker.step.batch.divisor) == 1.0
    assert item_share_of(0, divisor=7) == 1.0, "where none does, all sums are zero"


def test_gradients_are_applied_as_means_over_the_tokens_that_count():
    """What was divided by twice as many tokens as count does as much as if it had been divided by those that do."""
    applied = []
    for item_share in (1.0, 0.5):
        structure = structure_of("gpt2")
        job = JobSpec(optimizer=OptimizerSpec(optim="sgd", max_grad_norm=0.0))
        model = StageModel(structure, dtype=torch.float32, device="cpu")
        optimizer = Optimizer(job.optimizer, max_steps=10)
        share = share_of(structure, rank=0, degree=1)
        store = LayerStore(job, ME, state=StageState(model, share), optimizer=optimizer)
        store.take((range(structure.num_layers),), keep=(), is_initial=True, sums=None)
        gradients = {name: torch.full_like(value, item_share) for name, value in model.parameters.items()}
        store.apply(replace(RECORD, item_share=item_share), {name: value.detach() for name, value in gradients.items()})
        applied.append(state_of(model))
    one, other = applied
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("norm", [0.5, 2.0, float("inf"), float("nan")])
def test_gradients_are_clipped_as_torch_clips_them_whatever_their_norm_is(norm: float):
    structure = structure_of("gpt2")
    job = JobSpec(optimizer=OptimizerSpec(optim="sgd", lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0))
    model = StageModel(structure, dtype=torch.float32, device="cpu")
    share = share_of(structure, rank=0, degree=1)
    optimizer = Optimizer(job.optimizer, max_steps=10)
    store = LayerStore(job, ME, state=StageState(model, share), optimizer=optimizer)
    store.take((range(structure.num_layers),), keep=(), is_initial=True, sums=None)
    plain = {name: torch.nn.Parameter(value) for name, value in state_of(model).items()}
    some = next(iter(plain))
    for name, parameter in plain.items():
        parameter.grad = torch.zeros_like(parameter)
        if name == some:
            parameter.grad.view(-1)[0] = norm
    gradients = {name: parameter.grad.clone() for name, parameter in plain.items() if parameter.grad is not None}
    torch.nn.utils.clip_grad_norm_(plain.values(), job.optimizer.max_grad_norm)
    torch.optim.SGD(plain.values(), lr=optimizer.learning_rate(1)).step()
    store.apply(replace(RECORD, grad_norm=norm), gradients)
    for name, value in state_of(model).items():
        torch.testing.assert_close(value, plain[name].detach(), rtol=1e-6, atol=0, equal_nan=True)


def test_a_parameter_that_no_worker_has_a_gradient_of_is_not_decayed():
    structure = structure_of("gpt2")
    job = JobSpec(optimizer=OptimizerSpec(warmup_steps=0, weight_decay=0.5))
    model = StageModel(structure, dtype=torch.float32, device="cpu")
    share = share_of(structure, rank=0, degree=1)
    optimizer = Optimizer(job.optimizer, max_steps=10)
    store = LayerStore(job, ME, state=StageState(model, share), optimizer=optimizer)
    store.take((range(structure.num_layers),), keep=(), is_initial=True, sums=None)
    before = {name: value.clone() for name, value in state_of(model).items()}
    never, zero, elsewhere = [name for name in model.parameters if name.endswith("c_fc.weight")][:3]
    sums = {name: torch.zeros_like(value) for name, value in before.items()}
    sums[never].fill_(-0.0)
    # This worker has had a gradient of it, whose numbers are the same.
    sums[zero].fill_(-0.0)
    model.parameters[zero].grad = torch.full_like(before[zero], -0.0)
    store.apply(RECORD, sums)
    after = state_of(model)
    assert torch.equal(after[never], before[never])
    for name in (zero, elsewhere):
        assert not torch.equal(after[name], before[name])


def test_an_evaluation_is_the_mean_over_the_tokens_that_count():
    structure, dataset = structure_of("gpt2"), ragged_dataset()
    model = whole_stage(structure, dtype=torch.float64)
    job = JobSpec(microbatch_size=1)
    alone = PipelineRank(stage=0, num_stages=1, group=None, rank=0, degree=1, schedule=ScheduleKind.ONE_F_ONE_B)
    evaluator = Evaluator(
        job, dataset, model, Waiter(), node_sums=None, interrupted=lambda: False, on_progress=lambda _: None
    )
    found = evaluator.run(1, alone, share=(0, 1), sum_up=lambda numbers: numbers)
    batch = dataset.batch([0, 1])
    with torch.no_grad(), model.evaluating():
        expected = model.forward(batch, None, num_items=batch.num_items, key=KEY)
    assert found.loss == pytest.approx(float(expected), rel=1e-12)
