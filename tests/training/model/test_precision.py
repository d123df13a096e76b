"""Mixed precision and activation checkpointing: the same results for any cut, but for one rounding at each."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from oobleck.training.model.forward_passes import Precision
from oobleck.training.model.models import StageModel
from oobleck.training.model.structure import ModelStructure
from tests.training.zoo import KEY, gradients_of, random_batch, run_pipeline, state_of, structure_of, whole_stage


def _stages(structure: ModelStructure, cuts: list[int], dtype: str, *, forgetful: bool = False) -> list[StageModel]:
    precision = Precision.of(dtype)
    state = state_of(whole_stage(structure, dtype=precision.parameters))
    stages = []
    for first, stop in pairwise([0, *cuts, structure.num_layers]):
        stage = StageModel(
            structure,
            dtype=precision.parameters,
            device="cpu",
            autocast=precision.autocast,
            recompute="all" if forgetful else "none",
        )
        stage.adopt(first, stop, {name: tensor.clone() for name, tensor in state.items()})
        stages.append(stage)
    return stages


def _rounded(
    dtype: torch.dtype, _module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a module is called with, its hidden states as they are after they were sent."""
    if args:
        return (args[0].to(dtype).to(args[0].dtype), *args[1:]), kwargs
    name = next(iter(kwargs))
    return (), {**kwargs, name: kwargs[name].to(dtype).to(kwargs[name].dtype)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["gpt2-dropout", "llama-tied"])
def test_a_cut_rounds_hidden_states_and_their_gradients_once_and_changes_nothing_else(name: str, dtype: str):
    """The same bits as the whole model that rounds in the same places; gradients of weights are float32."""
    structure, batch = structure_of(name), random_batch(1)
    exact = run_pipeline(_stages(structure, [], "float32"), batch)
    uncut = run_pipeline(_stages(structure, [], dtype), batch)
    assert uncut.dtype == torch.float32
    assert uncut != exact, "something is computed in the short type"
    torch.testing.assert_close(uncut, exact, rtol=2e-2, atol=0)
    for cuts in ([1], [2, 3], [1, 2, 3, 4, 5]):
        whole = _stages(structure, [], dtype)
        for cut in cuts:
            module = whole[0].modules_of(cut)[0]
            module.register_forward_pre_hook(partial(_rounded, getattr(torch, dtype)), with_kwargs=True)
        loss = run_pipeline(whole, batch)
        expected = gradients_of(whole)
        torch.testing.assert_close(loss, uncut, rtol=1e-2, atol=0)
        stages = _stages(structure, cuts, dtype)
        assert {stage.hidden_dtype for stage in stages} == {getattr(torch, dtype)}
        assert torch.equal(run_pipeline(stages, batch), loss)
        gradients = gradients_of(stages)
        assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
        # A tied weight's two gradients are each rounded before they are added; all others are the same bits.
        tied = {n for n in gradients if len(structure.layers_with(n)) > 1}
        assert [n for n in gradients if n not in tied and not torch.equal(gradients[n], expected[n])] == []
        for n in tied:
            torch.testing.assert_close(gradients[n], expected[n], rtol=2e-2, atol=1e-3)


def test_a_scaled_loss_scales_every_gradient_and_not_the_loss():
    structure, batch = structure_of("llama"), random_batch(1)
    plain, scaled = _stages(structure, [2], "float32"), _stages(structure, [2], "float32")
    for stage in scaled:
        stage.loss_scale = 1024.0
    assert torch.equal(run_pipeline(scaled, batch), run_pipeline(plain, batch))
    gradients = gradients_of(plain)
    for name, gradient in gradients_of(scaled).items():
        assert torch.equal(gradient, gradients[name] * 1024), "a power of two costs no digit"


@pytest.mark.usefixtures("backward_on")
@pytest.mark.parametrize("name", ["gpt2-dropout", "gemma3", "bloom"])
def test_activations_that_are_computed_again_change_no_bit(name: str):
    structure, batch = structure_of(name), random_batch(1)
    plain, forgetful = _stages(structure, [2], "float32"), _stages(structure, [2], "float32", forgetful=True)
    assert torch.equal(run_pipeline(forgetful, batch), run_pipeline(plain, batch))
    expected = gradients_of(plain)
    for parameter, gradient in gradients_of(forgetful).items():
        assert torch.equal(gradient, expected[parameter]), parameter


def test_activations_that_are_computed_again_are_not_kept():
    structure, batch = structure_of("gpt2"), random_batch(1, batch_size=8)

    def kept_bytes(*, forgetful: bool) -> int:
        (stage,) = _stages(structure, [], "float32", forgetful=forgetful)
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            stage.forward(batch, None, num_items=1, key=KEY)
        return sum(kept.values())

    assert kept_bytes(forgetful=True) < kept_bytes(forgetful=False) / 3
