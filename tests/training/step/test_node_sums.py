"""Devices that share out a stage: whole weights come from their shares, and their shares of gradients from all."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import cast

import pytest
import torch

from oobleck.control.steps import Interrupted
from oobleck.control.steps.groups import Committee
from oobleck.job import JobSpec, OptimizerSpec
from oobleck.planner import (
    DeviceProfile,
    ExecutionPlan,
    LayerProfile,
    NetworkProfile,
    Pipeline,
    PipelineTemplate,
    PlannerSettings,
    Profile,
    StageTemplate,
    WorkerId,
)
from oobleck.planner.costs import footprint
from oobleck.planner.tensor_parallel import grouped, with_sharded_state
from oobleck.training.model.models import StageModel
from oobleck.training.model.structure import ModelStructure
from oobleck.training.model.tensor_parallel import sharded
from oobleck.training.optim import Optimizer
from oobleck.training.step.layer_store import LayerStore
from oobleck.training.step.node_sums import NodeSums
from oobleck.training.step.reduction import make_buckets
from oobleck.training.step.stage_state import StageState
from tests.training.model.test_frozen import frozen_structure
from tests.training.model.test_tensor_parallel import Sums
from tests.training.step.test_step import RECORD
from tests.training.zoo import structure_of, whole_stage

DEGREE = 3
"""No parameter here has a number of rows that three divide: the last device has fewer, and of short ones none."""
FAMILIES = ("gpt2", "llama", "mixtral")


class Device:
    """One of the devices of a stage, each on a thread of its own."""

    def __init__(self, structure: ModelStructure, rank: int, sums: Sums, *, max_elements: int = 5000) -> None:
        share = sharded(structure, rank=rank, degree=DEGREE)
        model = StageModel(structure, dtype=torch.float64, device="cpu")
        self.state = StageState(model, share)
        self.sums = sums
        self.calls = 0
        self.fails_at: int | None = None
        self.node_sums = NodeSums(self.state, self._sum_up, max_elements=max_elements)
        self.optimizer = Optimizer(OptimizerSpec(), max_steps=10, frozen=structure.frozen, is_sharded=True)
        self.store = LayerStore(JobSpec(), WorkerId("a", rank), state=self.state, optimizer=self.optimizer)
        self.store.take((range(structure.num_layers),), keep=(), is_initial=True, sums=None)

    def _sum_up(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.fails_at:
            raise Interrupted
        return self.sums(tensor)


def devices_of(structure: ModelStructure, *, max_elements: int = 5000) -> list[Device]:
    sums = Sums(DEGREE)
    return [Device(structure, rank, sums, max_elements=max_elements) for rank in range(DEGREE)]


def on_all(devices: list[Device], work: Callable[[Device], object]) -> None:
    with ThreadPoolExecutor(len(devices)) as pool:
        list(pool.map(work, devices))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.int64)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_elements", [1, 1 << 30])
def test_whole_weights_are_those_of_all_shares_to_the_last_bit(family: str, max_elements: int) -> None:
    structure = structure_of(family)
    devices = devices_of(structure, max_elements=max_elements)
    expected = whole_stage(structure, dtype=torch.float64).parameters
    for device in devices:
        with torch.no_grad():
            for name, share in device.state.parameters.items():
                share.copy_(device.state.share.part_of(name, expected[name])).view(-1)[:1] = -0.0
                device.state.model.parameters[name].fill_(torch.nan)
    on_all(devices, lambda device: device.node_sums.gather())
    for device in devices:
        for name, found in device.state.model.parameters.items():
            shares = [each.state.parameters[name] for each in devices]
            assert torch.equal(bits(found), bits(torch.cat(shares))), name
            assert found.shape == structure.shapes[name]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_share_has_its_rows_of_the_sum_of_all_gradients(family: str) -> None:
    """Summed twice, as in two sections of a step; of some parameters no device, or only one, has a gradient."""
    structure = structure_of(family)
    devices = devices_of(structure)
    never, *some = list(structure.shapes)[-3:]
    totals = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in structure.shapes.items()}
    for turn in range(2):
        for number, device in enumerate(devices):
            for name, parameter in device.state.model.parameters.items():
                if name != never and (name not in some or number == turn):
                    parameter.grad = torch.randn_like(parameter)
                    totals[name] += parameter.grad
        on_all(devices, lambda device: device.node_sums.scatter())
    for device in devices:
        assert all(parameter.grad is None for parameter in device.state.model.parameters.values())
        for name, share in device.state.parameters.items():
            if name == never:
                assert share.grad is None or not share.numel()
                continue
            rows = device.state.share.part_of(name, totals[name])
            assert share.grad is not None
            torch.testing.assert_close(share.grad, rows, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("what", ["gather", "scatter"])
@pytest.mark.parametrize("fails_at", [1, 3])
def test_what_a_device_posts_does_not_depend_on_where_it_was_interrupted(what: str, fails_at: int) -> None:
    """One has filled some of its weights, or all, and the other nothing: both post the same after that."""
    devices = devices_of(structure_of("gpt2"))
    on_all(devices, lambda device: device.node_sums.gather())
    once = devices[0].calls
    devices[0].calls, devices[0].fails_at = 0, fails_at
    # The others' parts do not matter here: what this one has by then is of no use to it.
    devices[0].sums = cast("Sums", lambda tensor: tensor)
    with pytest.raises(Interrupted):
        getattr(devices[0].node_sums, what)()
    sums = Sums(DEGREE)
    for device in devices:
        device.state.forget_gradients()
        device.calls, device.fails_at, device.sums = 0, None, sums
    on_all(devices, lambda device: getattr(device.node_sums, what)())
    assert {device.calls for device in devices} == {once}


def test_a_step_is_applied_without_a_word_to_other_devices() -> None:
    structure = structure_of("gpt2")
    devices = devices_of(structure)
    for device in devices:
        device.calls, before = 0, {name: share.detach().clone() for name, share in device.state.parameters.items()}
        device.store.apply(RECORD, {name: torch.ones_like(share) for name, share in before.items()})
        assert device.calls == 0
        changed = [name for name, share in device.state.parameters.items() if not torch.equal(share, before[name])]
        assert changed == [name for name, share in before.items() if share.numel()]


def test_shares_are_summed_with_those_of_the_same_rank_alone() -> None:
    structure = structure_of("gpt2")
    stage = StageTemplate(first_layer=0, stop_layer=structure.num_layers, node_index=0, num_devices=DEGREE)
    pipelines = tuple(
        Pipeline(template=PipelineTemplate(stages=(stage,)), nodes=(node,), num_microbatches=1) for node in ("a", "b")
    )
    committee = Committee(ExecutionPlan(pipelines=pipelines), 1)
    for worker_id in committee.plan.worker_ids:
        share = sharded(structure, rank=worker_id.device, degree=DEGREE)
        buckets = make_buckets(committee.plan, worker_id, share, key_of=committee.key_of)
        assert {name for bucket in buckets for name in bucket.parameters} == set(structure.shapes)
        for bucket in buckets:
            assert bucket.key.members == tuple(WorkerId(node, worker_id.device) for node in ("a", "b"))
            assert bucket.is_counted, "each rank's part of the norm counts"


def test_shares_that_a_new_plan_leaves_here_stay_with_their_state() -> None:
    structure = structure_of("llama-tied")
    device = devices_of(structure)[0]
    device.store.apply(RECORD, {name: torch.ones_like(each) for name, each in device.state.parameters.items()})
    before = {layer: device.store.named_state(layer) for layer in range(2)}
    for chunks in ((range(2),), (range(4),), (range(2),)):
        device.store.take(chunks, keep=(), is_initial=False, sums=None)
    for layer, state in before.items():
        for name, tensor in device.store.named_state(layer).items():
            assert torch.equal(tensor, state[name]), name


def test_only_trained_parameters_are_shared_out() -> None:
    structure = frozen_structure("gpt2", lambda name: "h.0" in name)
    shape = torch.Size([])
    share = sharded(replace(structure, shapes={**structure.shapes, "scale": shape}), rank=1, degree=2)
    assert share.summed == {"scale"}
    assert not share.cut_dimensions.keys() & {*structure.frozen, "scale"}
    assert all(share.structure.shapes[name] == structure.shapes[name] for name in structure.frozen)


def test_planned_bytes_are_those_that_devices_hold() -> None:
    """Weights, gradients and state after a program's last sums in the node, as they are summed with other nodes."""
    structure = structure_of("llama")
    devices = devices_of(structure)
    held = 0
    for device in devices:
        wholes, shares = device.state.model.parameters.values(), device.state.parameters.values()
        # At their most: whole gradients are being summed, and earlier ones are shares already.
        held += sum(2 * each.nbytes for each in wholes) + sum(2 * each.nbytes for each in shares)
        for layer in range(structure.num_layers):
            state = device.store.named_state(layer)
            held += sum(each.nbytes for name, each in state.items() if name.startswith("optimizer.") and each.ndim)
    sizes = [
        sum(8 * structure.shapes[name].numel() for name in structure.layer_parameters(layer))
        for layer in range(structure.num_layers)
    ]
    layers = tuple(
        LayerProfile(
            name=str(layer), forward_s={1: 1.0}, backward_s={1: 2.0}, param_bytes=size, optimizer_bytes=2 * size,
            activation_bytes=1, output_bytes=1,
        )
        for layer, size in enumerate(sizes)
    )  # fmt: skip
    network = NetworkProfile(
        inter_node_bytes_per_s=1e9, inter_node_latency_s=0.0, intra_node_bytes_per_s=1e9, intra_node_latency_s=0.0
    )
    device_profile = DeviceProfile(name="x", memory_bytes=1 << 30)
    profile = Profile(
        model="m", microbatch_size=1, sequence_length=8, layers=layers, device=device_profile, network=network
    )
    settings = PlannerSettings(num_microbatches=1, devices_per_node=DEGREE)
    planned, _ = grouped(with_sharded_state(profile, DEGREE), settings, DEGREE)
    found = footprint(planned, 0, structure.num_layers, num_devices=1)
    state = found.weight_bytes + found.gradient_bytes + found.optimizer_bytes + found.copy_bytes
    assert state == pytest.approx(held, rel=0.02)
