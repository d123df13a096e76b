"""Devices that share out a stage: whole weights come from their shares, and their shares of gradients from all."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import nn

from oobleck.control.steps import Interrupted
from oobleck.control.steps.groups import Committee
from oobleck.job import JobSpec, LoraSpec, OptimizerSpec, Recompute, Sharding
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
from oobleck.planner.tensor_parallel import grouped, with_shares
from oobleck.training.comm import Reduction
from oobleck.training.data.batches import Batch
from oobleck.training.model.forward_passes import Precision
from oobleck.training.model.models import StageModel
from oobleck.training.model.structure import ModelStructure
from oobleck.training.model.tensor_parallel import install, sharded
from oobleck.training.optim import Optimizer
from oobleck.training.randomness import MicrobatchKey
from oobleck.training.step.layer_store import LayerStore
from oobleck.training.step.node_sums import NodeSums
from oobleck.training.step.reduction import make_buckets
from oobleck.training.step.stage_state import StageState
from tests.training.model.test_adapters import adapted
from tests.training.model.test_frozen import frozen_structure
from tests.training.model.test_tensor_parallel import DeviceSums, Sums
from tests.training.step.test_step import RECORD
from tests.training.zoo import random_batch, structure_of, whole_stage

DEGREE = 3
"""No parameter here has a number of rows that three divide: the last device has fewer, and of short ones none."""
FAMILIES = ("gpt2", "llama", "mixtral")
LEVELS: tuple[Sharding, ...] = ("optimizer", "gradients", "all")
KEY = MicrobatchKey(seed=0, step=1, microbatch=0)
EXACT, SHORT = Precision.of("float64"), Precision.of("bfloat16")


class Together:
    """Collectives among threads of this process, each of which is a device."""

    def __init__(self, sums: DeviceSums, rank: int) -> None:
        self.sums: Callable[[torch.Tensor], torch.Tensor] = sums
        self.rank = rank
        self.gather, self.scatter, self.exchange, self.read = sums.gather, sums.scatter, sums.exchange, sums.read
        self.posted: list[tuple[str, int]] = []
        self.under_way: list[torch.Tensor] = []
        self.fails_at: int | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.sums(tensor)

    def post_sum(self, tensor: torch.Tensor, what: str = "sum") -> Reduction:
        self.posted.append((what, tensor.numel()))
        if len(self.posted) == self.fails_at:
            raise Interrupted
        self.under_way.append(tensor)
        return cast("Reduction", tensor)

    def post_gather(self, rows: torch.Tensor, own: torch.Tensor) -> Reduction:
        rows.fill_(-0.0)[self.rank] = own
        return self.post_sum(rows, "gather")

    def join(self, posted: Reduction) -> None:
        assert posted is self.under_way.pop(0), "joined in the order of posts"
        self.sums(cast("torch.Tensor", posted))


class Device:
    """One of the devices of a stage, each on a thread of its own."""

    def __init__(
        self,
        structure: ModelStructure,
        rank: int,
        sums: Sums,
        *,
        sharding: Sharding = "optimizer",
        precision: Precision = EXACT,
        max_elements: int = 5000,
        degree: int = DEGREE,
        expert_parallel: bool = False,
        context_parallel: int = 1,
        recompute: Recompute = "none",
    ) -> None:
        share = sharded(
            structure,
            rank=rank,
            degree=degree,
            sharding=sharding,
            expert_parallel=expert_parallel,
            context_parallel=context_parallel,
        )
        model = StageModel(
            share.computed,
            dtype=precision.parameters,
            autocast=precision.autocast,
            device="cpu",
            cached=share.cached,
            casts_cached=share.sums_in_passes,
            recompute=recompute,
        )
        self.state = StageState(model, share)
        self.collectives = Together(sums.of(rank), rank)
        install(model, share, self.collectives)
        self.node_sums = NodeSums(self.state, self.collectives, max_elements=max_elements)
        self.optimizer = Optimizer(OptimizerSpec(), max_steps=10, frozen=structure.frozen, is_sharded=True)
        self.store = LayerStore(JobSpec(), WorkerId("a", rank), state=self.state, optimizer=self.optimizer)
        self.store.take((range(structure.num_layers),), keep=(), is_initial=True, sums=None)

    def held(self) -> dict[str, torch.Tensor]:
        """The whole weights that have memory."""
        wholes = self.state.model.parameters
        return {name: each for name, each in wholes.items() if each.untyped_storage().nbytes()}

    def compute(self, batch: Batch, *, num_items: int | None = None) -> float:
        """Compute a microbatch forward and back; returns its loss. By default, as many count for each device."""
        model = self.state.model
        num_items = num_items or self.state.share.degree * batch.num_items
        with self.node_sums.forward(0):
            loss = model.forward(batch, None, num_items=num_items, key=KEY)
        with self.node_sums.backward(0):
            loss.backward()
        return float(loss.detach())


def devices_of(structure: ModelStructure, *, degree: int = DEGREE, **options: Any) -> list[Device]:
    sums = Sums(degree)
    return [Device(structure, rank, sums, degree=degree, **options) for rank in range(degree)]


def on_all(devices: list[Device], work: Callable[[Device], object]) -> None:
    with ThreadPoolExecutor(len(devices)) as pool:
        list(pool.map(work, devices))


def structure_for(family: str) -> ModelStructure:
    if family == "lora":
        return adapted("llama", LoraSpec(r=4))
    return (
        frozen_structure("gpt2", lambda name: "h.1" in name or "wte" in name)
        if family == "frozen"
        else structure_of(family)
    )


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
    on_all(devices, lambda device: device.node_sums.begin())
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
        on_all(devices, lambda device: device.node_sums.conclude())
    for device in devices:
        assert all(parameter.grad is None for parameter in device.state.model.parameters.values())
        for name, share in device.state.parameters.items():
            if name == never:
                assert share.grad is None or not share.numel()
                continue
            rows = device.state.share.part_of(name, totals[name])
            assert share.grad is not None
            torch.testing.assert_close(share.grad, rows, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sharding", LEVELS)
@pytest.mark.parametrize("family", ["gpt2", "llama", "llama-tied", "lora", "frozen"])
def test_devices_compute_what_one_does_with_all_of_their_microbatches(family: str, sharding: Sharding) -> None:
    """Twice, as two microbatches of each device add up; with a tied head, adapters, and frozen layers."""
    structure = structure_for(family)
    devices = devices_of(structure, sharding=sharding)
    alone = whole_stage(structure, dtype=torch.float64)
    batches = [random_batch(seed) for seed in range(2 * DEGREE)]
    expected = 0.0
    for batch in batches:
        loss = alone.forward(batch, None, num_items=DEGREE * batch.num_items, key=KEY)
        loss.backward()
        expected += float(loss.detach())
    losses = [0.0] * DEGREE

    def run(device: Device) -> None:
        rank = device.state.share.rank
        device.node_sums.begin()
        losses[rank] += device.compute(batches[rank])
        losses[rank] += device.compute(batches[DEGREE + rank])
        device.node_sums.conclude()

    on_all(devices, run)
    assert sum(losses) == pytest.approx(expected, rel=1e-12)
    assert len({tuple(device.collectives.posted) for device in devices}) == 1
    for device in devices:
        assert all(parameter.grad is None for parameter in device.state.wholes.values())
        for name, share in device.state.parameters.items():
            gradient = alone.parameters[name].grad
            if not share.numel():
                continue
            assert (share.grad is None) == (gradient is None), name
            if gradient is not None and share.grad is not None:
                rows = device.state.share.part_of(name, gradient)
                torch.testing.assert_close(share.grad, rows, rtol=1e-9, atol=1e-12)


def test_a_pass_goes_through_the_layers_that_autograd_does_not_come_to() -> None:
    """What comes before the first trained layer has no gradients; its weights are dropped as those of other layers."""
    structure = frozen_structure("gpt2", lambda name: "ln_f" not in name)
    devices = devices_of(structure, sharding="all")

    def run(device: Device) -> None:
        device.node_sums.begin()
        device.compute(random_batch(device.state.share.rank))

    on_all(devices, run)
    for device in devices:
        layers_of = device.state.share.whole.layers_with
        assert device.held()
        assert [name for name in device.held() if 0 not in layers_of(name)] == []


@pytest.mark.parametrize("sharding", LEVELS)
def test_gradients_of_short_types_are_summed_in_float32(sharding: Sharding) -> None:
    """Autocast's casts are made for each pass, or not at all, where passes end with sums: none comes after its sum."""
    structure = structure_of("llama")
    devices = devices_of(structure, sharding=sharding, precision=SHORT)
    alone = StageModel(structure, dtype=torch.float32, autocast=torch.bfloat16, device="cpu")
    alone.adopt(0, structure.num_layers, {})
    alone.initialize(range(structure.num_layers), seed=0)
    batches = [random_batch(seed) for seed in range(2 * DEGREE)]
    with alone.casting_once():
        for batch in batches:
            alone.forward(batch, None, num_items=DEGREE * batch.num_items, key=KEY).backward()

    def run(device: Device) -> None:
        device.node_sums.begin()
        with device.node_sums.casting():
            for batch in batches[device.state.share.rank :: DEGREE]:
                device.compute(batch)
        device.node_sums.conclude()

    on_all(devices, run)
    for device in devices:
        types = {whole.dtype for whole in device.state.wholes.values()}
        assert types == ({torch.float32} if sharding == "optimizer" else {torch.float32, torch.bfloat16})
        for name, share in device.state.parameters.items():
            if share.numel():
                assert share.grad is not None, name
                expected = device.state.share.part_of(name, alone.parameters[name].grad)
                # Each pass has the same bits, and sums another order.
                torch.testing.assert_close(share.grad, expected, rtol=1e-5, atol=1e-6)


def test_gradients_and_weights_of_a_layer_or_two_are_there_at_once() -> None:
    structure = structure_of("llama-tied")
    most: dict[Sharding, tuple[int, int]] = {}
    for sharding in LEVELS:
        devices = devices_of(structure, sharding=sharding)
        weights, gradients = [0], [0]

        def watch(
            _parameter: nn.Parameter, first: Device = devices[0], seen: tuple[list[int], ...] = (weights, gradients)
        ) -> None:
            wholes = first.state.model.parameters
            seen[0].append(sum(each.numel() for each in first.held().values()))
            seen[1].append(sum(each.numel() for each in wholes.values() if each.grad is not None))

        for parameter in devices[0].state.wholes.values():
            parameter.register_post_accumulate_grad_hook(watch)  # type: ignore[no-untyped-call]

        def run(device: Device) -> None:
            device.node_sums.begin()
            for _ in range(2):
                device.compute(random_batch(2))
            device.node_sums.conclude()

        on_all(devices, run)
        most[sharding] = max(weights), max(gradients)
    tied, block = (
        sum(structure.shapes[name].numel() for name in structure.layer_parameters(layer)) for layer in (0, 1)
    )
    whole = structure.num_parameters
    # A tied weight is of use from the first layer to the last.
    assert most == {"optimizer": (whole, whole), "gradients": (whole, block), "all": (tied + block, block)}


@pytest.mark.parametrize("sharding", LEVELS)
@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 0.99])
def test_what_a_device_posts_does_not_depend_on_where_it_was_interrupted(part: float, sharding: Sharding) -> None:
    """One has filled some of its weights, or all, and the other nothing: both post the same after that."""
    devices = devices_of(structure_of("gpt2"), sharding=sharding)

    def run(device: Device) -> None:
        device.collectives.posted = []
        device.node_sums.begin()
        device.compute(random_batch(2))
        device.node_sums.conclude()

    on_all(devices, run)
    once = devices[0].collectives.posted
    devices[0].collectives.fails_at = 1 + int(part * len(once))
    # The others' parts do not matter here: what this one has by then is of no use to it.
    sums, devices[0].collectives.sums = devices[0].collectives.sums, lambda tensor: tensor
    with pytest.raises(Interrupted):
        run(devices[0])
    devices[0].collectives.sums, devices[0].collectives.fails_at = sums, None
    devices[0].collectives.under_way.clear()
    for device in devices:
        device.state.forget_gradients()
    on_all(devices, run)
    assert all(device.collectives.posted == once for device in devices)


def test_a_step_is_applied_without_a_word_to_other_devices() -> None:
    structure = structure_of("gpt2")
    devices = devices_of(structure)
    for device in devices:
        before = {name: share.detach().clone() for name, share in device.state.parameters.items()}
        device.store.apply(RECORD, {name: torch.ones_like(share) for name, share in before.items()})
        assert not device.collectives.posted
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
        share = sharded(structure, rank=worker_id.device, degree=DEGREE, sharding="optimizer")
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


@pytest.mark.parametrize("sharding", LEVELS)
def test_only_trained_parameters_are_shared_out_unless_all_weights_are(sharding: Sharding) -> None:
    structure = frozen_structure("gpt2", lambda name: "h.0" in name)
    shape = torch.Size([])
    structure = replace(structure, shapes={**structure.shapes, "scale": shape})
    share = sharded(structure, rank=1, degree=2, sharding=sharding)
    assert share.summed == {"scale"}
    assert "scale" not in share.cut_dimensions
    assert (structure.frozen <= share.cut_dimensions.keys()) == (sharding == "all")
    assert bool(structure.frozen & share.cut_dimensions.keys()) == (sharding == "all")


@pytest.mark.parametrize("sharding", LEVELS)
@pytest.mark.parametrize(("family", "degree"), [("llama", DEGREE), ("mixtral", 2)])
def test_planned_bytes_are_those_that_devices_hold(family: str, degree: int, sharding: Sharding) -> None:
    """Weights, gradients and state, at their most in a backward pass; experts stay on their devices."""
    structure, has_experts = structure_of(family), family == "mixtral"
    devices = devices_of(structure, degree=degree, sharding=sharding, max_elements=1 << 30, expert_parallel=has_experts)
    most = [0] * degree

    def watch(device: Device) -> None:
        shares, rank = device.state.parameters.values(), device.state.share.rank
        gradients = [each.grad.nbytes for each in (*device.state.wholes.values(), *shares) if each.grad is not None]
        rows = sum(each.nbytes for each in device.collectives.under_way)
        # The device's own experts are its shares.
        weights = sum(each.nbytes for name, each in device.held().items() if name in device.state.wholes)
        most[rank] = max(most[rank], weights + rows + sum(gradients) + sum(each.nbytes for each in shares))

    def run(device: Device) -> None:
        for parameter in device.state.wholes.values():
            parameter.register_post_accumulate_grad_hook(lambda _: watch(device))  # type: ignore[no-untyped-call]
        for _ in range(2):
            device.node_sums.begin()
            device.compute(random_batch(2))
            device.node_sums.conclude()

    on_all(devices, run)
    held = sum(most)
    for device in devices:
        for layer in range(structure.num_layers):
            state = device.store.named_state(layer)
            held += sum(each.nbytes for name, each in state.items() if name.startswith("optimizer.") and each.ndim)
    layers = []
    for layer in range(structure.num_layers):
        sizes = {name: 8 * structure.shapes[name].numel() for name in structure.layer_parameters(layer)}
        size = sum(sizes.values())
        of_experts = sum(bytes_ for name, bytes_ in sizes.items() if has_experts and "experts" in name)
        layers.append(
            LayerProfile(
                name=str(layer), forward_s={1: 1.0}, backward_s={1: 2.0}, param_bytes=size, optimizer_bytes=2 * size,
                activation_bytes=1, output_bytes=1, expert_bytes=of_experts,
            )
        )  # fmt: skip
    network = NetworkProfile(
        inter_node_bytes_per_s=1e9, inter_node_latency_s=0.0, intra_node_bytes_per_s=1e9, intra_node_latency_s=0.0
    )
    device_profile = DeviceProfile(name="x", memory_bytes=1 << 30)
    profile = Profile(
        model="m", microbatch_size=1, sequence_length=8, layers=tuple(layers), device=device_profile, network=network
    )
    settings = PlannerSettings(num_microbatches=1, devices_per_node=degree)
    planned, _ = grouped(with_shares(profile, degree, sharding), settings, degree)
    found = footprint(planned, 0, structure.num_layers, num_devices=1)
    state = found.weight_bytes + found.gradient_bytes + found.optimizer_bytes + found.copy_bytes
    assert state + found.transient_bytes == pytest.approx(held, rel=0.05)
