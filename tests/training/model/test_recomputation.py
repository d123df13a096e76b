"""What blocks recompute changes memory and time, and no bit of what is computed."""

from __future__ import annotations

import pytest
import torch

from oobleck.errors import ConfigError
from oobleck.job import JobSpec
from oobleck.plan import StageTemplate
from oobleck.planner.costs import stage_footprint
from oobleck.training.model import StageModel
from oobleck.training.process.allocated import Allocated
from oobleck.training.process.profiler import measure_profile
from oobleck.training.weight_gradients import WeightGradients
from tests.training.zoo import KEY, gradients_of, random_batch, run_pipeline, structure_of

LEVELS = ("none", "selective", "all")


def stage_at(name: str, level: str, autocast: torch.dtype | None = None) -> StageModel:
    structure = structure_of(name)
    stage = StageModel(structure, dtype=torch.float32, device="cpu", autocast=autocast, recompute="auto")
    stage.adopt(0, structure.num_layers, {})
    stage.initialize(range(structure.num_layers), seed=0)
    for layer in range(structure.num_layers):
        stage.set_recomputation(layer, level)
    return stage


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2-dropout", "llama", "mixtral", "gemma2"])
def test_no_bit_depends_on_what_is_recomputed(name: str, autocast: torch.dtype | None) -> None:
    found = []
    for level in LEVELS:
        stage = stage_at(name, level, autocast)
        with stage.casting_once():
            losses = [run_pipeline([stage], random_batch(seed)) for seed in (1, 2)]
        found.append((losses, gradients_of([stage])))
    (losses, gradients), *others = found
    for other_losses, other_gradients in others:
        assert other_losses == losses
        assert all(torch.equal(other_gradients[key], gradients[key]) for key in gradients)


@pytest.mark.parametrize("level", LEVELS)
def test_no_pass_uses_weights_as_another_one_has_cast_them(level: str, backward_on: str) -> None:
    """Weights may change between passes, and what is cast for one pass belongs to its part of autograd's graph."""
    found = []
    for other in ("none", level):
        stage, losses = stage_at("llama", other, torch.bfloat16), list[float]()
        for step in range(3):
            batches = [random_batch(seed).to(stage.device) for seed in (2 * step, 2 * step + 1)]
            passes = [stage.forward(batch, None, num_items=batch.num_items, key=KEY) for batch in batches]
            for each in passes:
                each.backward()  # type: ignore[no-untyped-call]
            losses += [each.item() for each in passes]
            with torch.no_grad():
                for parameter in stage.parameters.values():
                    parameter.mul_(1.5)
        found.append((losses, gradients_of([stage])))
    (losses, gradients), (other_losses, other_gradients) = found
    assert other_losses == losses, backward_on
    assert all(torch.equal(other_gradients[key], gradients[key]) for key in gradients)


def test_backward_passes_in_two_parts_are_the_same_with_selective_recomputation() -> None:
    found = []
    for level in ("none", "selective"):
        stage, put_off = stage_at("llama", level), WeightGradients()
        for layer in stage.layers:
            for module in stage.modules_of(layer):
                put_off.put_off(module)
        put_off.engage(is_on=True)
        put_off.begin(0)
        run_pipeline([stage], random_batch(1))
        put_off.finish(0)
        found.append(gradients_of([stage]))
    assert all(torch.equal(found[1][key], found[0][key]) for key in found[0])


@pytest.mark.parametrize(
    "levels", [("none",) * 4, ("selective",) * 4, ("all",) * 4, ("none", "selective", "all", "all")]
)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_plan_counts_the_activations_that_a_stage_keeps(
    levels: tuple[str, ...], autocast: torch.dtype | None
) -> None:
    structure = structure_of("llama")
    profile = measure_profile(
        structure,
        microbatch_size=2,
        dtype=torch.float32,
        device="cpu",
        device_memory_bytes=1 << 30,
        autocast=autocast,
        recompute="auto",
    )
    stage = StageModel(structure, dtype=torch.float32, device="cpu", autocast=autocast, recompute="auto")
    stage.adopt(1, 5, {})
    stage.initialize(range(1, 5), seed=0)
    for layer, level in zip(stage.layers, levels, strict=True):
        stage.set_recomputation(layer, level)
    received = torch.randn((2, structure.sequence_length, structure.hidden_size)).to(autocast or torch.float32)
    with stage.casting_once():
        stage.forward(random_batch(9), received, num_items=1, key=KEY)  # makes casts and traces, which stay
        with Allocated() as allocated:
            inputs = [received.clone().requires_grad_() for _ in range(2)]
            in_flight = [
                stage.forward(random_batch(seed), each, num_items=1, key=KEY) for seed, each in enumerate(inputs)
            ]
        # Messages have memory of their own, but for those received in the type of the first block's input.
        measured = allocated.num_bytes - sum(output.nbytes for output in in_flight)
        measured -= 2 * received.nbytes * (autocast is not None)
    template = StageTemplate(
        first_layer=1,
        stop_layer=5,
        node_index=0,
        num_selective=levels.count("selective"),
        num_recomputed=levels.count("all"),
    )
    planned = 2 * stage_footprint(profile, template).activation_bytes
    assert planned == pytest.approx(measured, rel=0.1)


def test_what_cannot_be_recomputed_in_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="none or all with compile"):
        JobSpec(recompute="selective", compile=True)
    with pytest.raises(ConfigError, match="unless the schedule is 1f1b"):
        JobSpec(recompute="auto", schedule="zero-bubble")
