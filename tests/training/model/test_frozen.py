"""Frozen parameters: part of every forward pass, moved and saved with their layers, without what training costs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from oobleck.control.protocol import PlanUpdate
from oobleck.control.steps.groups import Committee, transfer_key, transfer_keys
from oobleck.errors import ConfigError
from oobleck.job import JobSpec, OptimizerSpec
from oobleck.planner import ExecutionPlan, LayerTransfer, Pipeline, PipelineTemplate, StageTemplate, WorkerId
from oobleck.planner.costs import footprint
from oobleck.schedule import ScheduleKind
from oobleck.training.model.models import StageModel
from oobleck.training.model.structure import ModelStructure
from oobleck.training.model.tensor_parallel import share_of
from oobleck.training.optim.optimizer import Optimizer
from oobleck.training.process.profiler import measure_profile
from oobleck.training.step.layer_store import LayerStore
from oobleck.training.step.reduction import make_buckets
from oobleck.training.step.stage_state import StageState
from oobleck.training.weight_gradients import WeightGradients
from tests.training.table import LinkedTable, acquaint
from tests.training.zoo import (
    KEY,
    NUM_BLOCKS,
    SEQUENCE_LENGTH,
    VOCAB_SIZE,
    gradients_of,
    random_batch,
    run_pipeline,
    stages_of,
    state_of,
    structure_of,
    whole_stage,
)

A, B = (WorkerId(node=node, device=0) for node in "ab")


def is_early(name: str) -> bool:
    """Of the embedding and the first blocks."""
    return any(part in name for part in ("embed_tokens", "wte", "wpe", "layers.0.", "layers.1.", "h.0.", "h.1."))


def is_matrix(name: str) -> bool:
    return name.endswith("weight") and not any(part in name for part in ("norm", "ln_"))


def frozen_structure(family: str, is_frozen: Callable[[str], bool]) -> ModelStructure:
    config = structure_of(family).config

    def make() -> torch.nn.Module:
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.get_default_dtype())
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not is_frozen(name))
        return model

    return ModelStructure.from_factory(make, vocab_size=VOCAB_SIZE, sequence_length=SEQUENCE_LENGTH)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("is_frozen", [is_early, is_matrix])
@pytest.mark.parametrize("puts_off", [False, True])
def test_whatever_the_cut_the_others_have_the_gradients_that_they_always_have(
    family: str, is_frozen: Callable[[str], bool], puts_off: bool
):
    structure = frozen_structure(family, is_frozen)
    assert structure.frozen == {name for name in structure.shapes if is_frozen(name)} != set()
    state = state_of(whole_stage(structure_of(family), dtype=torch.float64))
    batch = random_batch(3)
    one = stages_of(structure_of(family), [], state, dtype=torch.float64)
    loss = run_pipeline(one, batch)
    expected = {name: each for name, each in gradients_of(one).items() if name not in structure.frozen}
    [stage] = stages_of(structure, [], state, dtype=torch.float64)
    put_off = WeightGradients()
    for layer in stage.layers:
        for module in stage.modules_of(layer):
            put_off.put_off(module)
    put_off.engage(is_on=puts_off)
    put_off.begin(0)
    torch.testing.assert_close(run_pipeline([stage], batch), loss, rtol=1e-12, atol=0)
    put_off.finish(0)
    torch.testing.assert_close(gradients_of([stage]), expected, rtol=1e-10, atol=1e-13)


def test_a_model_is_cut_as_if_all_of_it_was_trained():
    """What every block takes of its embeddings carries no gradient where these are frozen; it is needed anyhow."""
    config = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}

    def make() -> torch.nn.Module:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma4_text", **config))
        return model.requires_grad_(False).get_submodule("lm_head").requires_grad_() and model

    with pytest.raises(ConfigError, match=r"block 0 .*argument 1"):
        ModelStructure.from_factory(make, vocab_size=VOCAB_SIZE, sequence_length=SEQUENCE_LENGTH)


def test_stages_before_all_that_is_trained_take_part():
    structure = frozen_structure("llama", is_early)
    stages = stages_of(structure, [3], state_of(whole_stage(structure)), dtype=torch.float32)
    run_pipeline(stages, random_batch(1))
    assert structure.anatomy == structure_of("llama").anatomy
    assert set(gradients_of(stages)) == set(structure.shapes) - structure.frozen


def test_one_that_trains_nothing_is_refused():
    with pytest.raises(ConfigError, match="none of its parameters is to be trained"):
        frozen_structure("llama", lambda _name: True)


def plan_of_two(num_layers: int) -> ExecutionPlan:
    """Two pipelines, each cut behind the embedding and the first block."""
    stages = tuple(
        StageTemplate(first_layer=first, stop_layer=stop, node_index=index)
        for index, (first, stop) in enumerate([(0, 2), (2, num_layers)])
    )
    template = PipelineTemplate(stages=stages)
    return ExecutionPlan(
        pipelines=tuple(Pipeline(template=template, nodes=tuple(nodes), num_microbatches=2) for nodes in ("ab", "cd"))
    )


def test_only_what_is_trained_is_reduced():
    structure = frozen_structure("gpt2", is_early)
    plan = plan_of_two(structure.num_layers)
    committee, share = Committee(plan, 1), share_of(structure, rank=0, degree=1)
    buckets = {each: make_buckets(plan, each, share, key_of=committee.key_of) for each in plan.worker_ids}
    assert not buckets[A], "its embedding is used by the head as well, and frozen there"
    names = {name for each in buckets.values() for bucket in each for name in bucket.parameters}
    assert names == {name for layer in range(2, structure.num_layers) for name in structure.trained_parameters(layer)}


class Holder:
    """A worker that may hold all layers of a model."""

    def __init__(self, structure: ModelStructure, worker_id: WorkerId = A) -> None:
        self.worker_id = worker_id
        self.table = LinkedTable(worker_id)
        self.layers = range(structure.num_layers)
        self.model = StageModel(structure, dtype=torch.float64, device="cpu")
        job = JobSpec(optimizer=OptimizerSpec(weight_decay=0.5, warmup_steps=0), dtype="float64")
        self.optimizer = Optimizer(job.optimizer, max_steps=10, frozen=structure.frozen)
        share = share_of(structure, rank=0, degree=1)
        self.store = LayerStore(job, worker_id, state=StageState(self.model, share), optimizer=self.optimizer)

    def begin(self) -> None:
        self.store.take((self.layers,), keep=(), is_initial=True, sums=None)

    def filled(self, value: float) -> dict[str, torch.Tensor]:
        """For each trained parameter a tensor of its shape."""
        return {name: torch.full_like(each, value).detach() for name, each in self.model.trained_parameters.items()}

    def exchange(self, sums: dict[str, torch.Tensor] | None) -> int:
        """Take part in handing all layers from A to B; returns the bytes received."""
        transfers = tuple(LayerTransfer(layer=layer, source=A, target=B) for layer in self.layers)
        self.table.groups.form(transfer_keys(transfers, 1, self.worker_id), lambda: False, generation=1)
        update = PlanUpdate(
            generation=1, plan=plan_of_two(self.layers.stop), pipeline_generations=(1,),
            schedules=(ScheduleKind.ONE_F_ONE_B,), boundary=0, transfers=transfers,
        )  # fmt: skip
        return self.store.exchange(
            update,
            lambda item: self.table.groups[transfer_key(item, 1)],
            self.table.waiter,
            sums=sums,
            interrupted=lambda: False,
            on_progress=lambda *_: None,
        )


@pytest.mark.parametrize("has_partial", [False, True])
def test_layers_move_with_what_is_frozen_in_them_and_no_state_for_it(has_partial: bool):
    structure = frozen_structure("gpt2", lambda name: is_early(name) or name.endswith("c_fc.weight"))
    source, target = Holder(structure), Holder(structure, B)
    source.begin()
    before = state_of(source.model)
    source.optimizer.step(1, source.filled(1.0))
    after = state_of(source.model)
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert moved == set(structure.shapes) - structure.frozen, "nothing that is frozen decays"

    sums = source.filled(3.0)
    acquaint([source.table, target.table])
    with ThreadPoolExecutor(2) as pool:
        sending = pool.submit(source.exchange, sums if has_partial else None)
        received_bytes = pool.submit(target.exchange, {} if has_partial else None).result(60)
        sending.result(60)
    found = target.store.take((target.layers,), keep=(), is_initial=False, sums={} if has_partial else None)
    torch.testing.assert_close(state_of(target.model), after, rtol=0, atol=0)
    torch.testing.assert_close(dict(found), sums if has_partial else {}, rtol=0, atol=0)
    expected_bytes = 0
    for layer in target.layers:
        names = structure.layer_parameters(layer)
        state = source.optimizer.named_state(names)
        torch.testing.assert_close(target.optimizer.named_state(names), state, rtol=0, atol=0)
        assert {name for name in names if f"optimizer.exp_avg.{name}" not in state} == structure.frozen & set(names)
        expected_bytes += sum(tensor.nbytes for tensor in state.values())
        # The number of missed steps, which files have only where it is not 0.
        num_trained = len(structure.trained_parameters(layer))
        expected_bytes += num_trained * next(iter(state.values())).itemsize
        expected_bytes += has_partial * sum(sums[name].nbytes for name in structure.trained_parameters(layer))
    assert received_bytes == expected_bytes


def test_a_checkpoint_in_which_all_was_trained_is_read_where_some_is_frozen():
    everything = structure_of("gpt2")
    source = Holder(everything)
    source.begin()
    structure = frozen_structure("gpt2", is_early)
    reader = Optimizer(OptimizerSpec(), max_steps=10, frozen=structure.frozen)
    names = structure.layer_parameters(0)
    flat = reader.flat_state(names, source.optimizer.named_state(names), shapes=structure.shapes, dtype=torch.float64)
    assert flat.numel() == sum(structure.shapes[name].numel() for name in names)


def test_the_planner_counts_no_gradients_and_no_optimizer_state_for_it():
    structure = frozen_structure("gpt2", is_early)
    profile = measure_profile(
        structure, microbatch_size=2, dtype=torch.float32, device="cpu", device_memory_bytes=1 << 30
    )
    for index, layer in enumerate(profile.layers):
        frozen = sum(structure.shapes[name].numel() for name in structure.layer_parameters(index)
                     if name in structure.frozen)  # fmt: skip
        assert layer.frozen_bytes == 4 * frozen
        assert layer.optimizer_bytes == 2 * (layer.param_bytes - layer.frozen_bytes)
    kept = footprint(profile, 0, 2, num_devices=1)
    assert kept.gradient_bytes == kept.optimizer_bytes == 0
    assert kept.weight_bytes == profile.layers[0].param_bytes + profile.layers[1].param_bytes > 0
    assert profile.layers[2].backward_s[1] > 0
    assert footprint(profile, NUM_BLOCKS, NUM_BLOCKS + 1, num_devices=1).gradient_bytes > 0


def test_a_first_stage_that_trains_nothing_has_nothing_to_take_back():
    structure = frozen_structure("llama", is_early)
    stage = StageModel(structure, dtype=torch.float32, device="cpu")
    stage.adopt(0, 2, {})
    stage.initialize(range(2), seed=0)
    batch = random_batch(1)
    assert not stage.forward(batch, None, num_items=batch.num_items, key=KEY).requires_grad
