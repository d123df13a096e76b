"""Weight gradients that are put off are the same as those that are not."""

from __future__ import annotations

import pytest
import torch

from oobleck.training.model.models import StageModel
from oobleck.training.randomness import MicrobatchKey
from oobleck.training.weight_gradients import WeightGradients
from tests.training.zoo import random_batch, structure_of, whole_stage

pytestmark = pytest.mark.usefixtures("backward_on")
FAMILIES = ("gpt2-dropout", "llama-tied", "bert")


def gradients(stage: StageModel, put_off: WeightGradients | None) -> dict[str, torch.Tensor]:
    """Of three microbatches; with `put_off`, all weights come after all inputs."""
    batches = [random_batch(seed, is_causal=stage.structure.task == "causal_lm") for seed in range(3)]
    for index, batch in enumerate(batches):
        loss = stage.forward(batch, None, num_items=100, key=MicrobatchKey(seed=0, step=1, microbatch=index))
        if put_off is not None:
            put_off.begin(index)
        loss.backward()
    for index in range(3):
        if put_off is not None:
            put_off.finish(index)
    return {name: parameter.grad for name, parameter in stage.parameters.items() if parameter.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_an_undivided_backward_pass(family: str) -> None:
    structure = structure_of(family)
    expected = gradients(whole_stage(structure, dtype=torch.float64), None)
    stage = whole_stage(structure, dtype=torch.float64)
    put_off = WeightGradients()
    for layer in stage.layers:
        for module in stage.modules_of(layer):
            put_off.put_off(module)
    put_off.engage(is_on=True)
    found = gradients(stage, put_off)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-13)


def test_weights_of_linear_layers_wait_and_others_do_not() -> None:
    stage = whole_stage(structure_of("gpt2"))
    put_off = WeightGradients()
    for layer in stage.layers:
        for module in stage.modules_of(layer):
            put_off.put_off(module)
    put_off.engage(is_on=True)
    loss = stage.forward(random_batch(0), None, num_items=100, key=MicrobatchKey(seed=0, step=1, microbatch=0))
    put_off.begin(0)
    loss.backward()
    waiting = {name for name, parameter in stage.parameters.items() if parameter.grad is None}
    assert "transformer.h.0.mlp.c_fc.weight" in waiting
    assert "transformer.h.0.ln_1.weight" not in waiting
    put_off.finish(0)
    assert all(parameter.grad is not None for parameter in stage.parameters.values())


def test_under_autocast_gradients_have_the_type_of_their_weights() -> None:
    layer = torch.nn.Linear(8, 4)
    put_off = WeightGradients()
    put_off.put_off(layer)
    put_off.engage(is_on=True)
    inputs = torch.randn(5, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(inputs)
    put_off.begin(0)
    output.float().square().sum().backward()
    put_off.finish(0)
    assert inputs.grad is not None
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == inputs.grad.dtype == torch.float32
    expected = 2 * output.float().t() @ inputs
    torch.testing.assert_close(layer.weight.grad, expected.detach(), rtol=0.05, atol=0.05)


def test_turned_off_layers_are_as_they_were() -> None:
    stage = whole_stage(structure_of("gpt2"), dtype=torch.float64)
    expected = gradients(whole_stage(structure_of("gpt2"), dtype=torch.float64), None)
    put_off = WeightGradients()
    for layer in stage.layers:
        for module in stage.modules_of(layer):
            put_off.put_off(module)
    for is_on in (True, True, False, False):
        put_off.engage(is_on=is_on)
    leaves = [module for module in stage.modules_of(1)[0].modules() if not list(module.children())]
    assert not any("forward" in vars(module) for module in leaves)
    found = gradients(stage, None)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
