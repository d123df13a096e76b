"""A plain loop's model is compared with what a run has saved: by values, by names, by shapes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from oobleck.control.verification import TensorDifference, tolerance_of
from oobleck.training.plain import Recorder, gradient_norm

MOVEMENT = 0.25


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=True)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("passing", torch.zeros(2), persistent=False)


def recorded(model: nn.Module, *, num_steps: int = 1) -> Recorder:
    """Note steps in each of which all parameters move by the same."""
    recorder = Recorder(model, num_steps=num_steps, tolerance=tolerance_of("float32"))
    for _ in range(num_steps):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(MOVEMENT)
        recorder.step_done(loss=1.0, grad_norm=2.0, learning_rate=0.1, samples=range(2))
    return recorder


def compared(recorder: Recorder, weights: Mapping[str, torch.Tensor], *, step: int = 1) -> dict[str, TensorDifference]:
    found = recorder.compare(lambda after: weights if after == step else None)
    return {each.name: each for each in found}


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a run would have saved: a tied parameter once."""
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    weights.pop("head.weight", None)
    return weights


def test_equal_weights_differ_by_nothing_and_the_movement_is_that_of_training() -> None:
    model = Tied()
    found = compared(recorded(model), weights_of(model))
    assert found.keys() == {"embedding.weight", "head.bias", "count"}
    assert {each.difference for each in found.values()} == {0.0}
    assert found["head.bias"].moved == pytest.approx(2 * MOVEMENT, rel=1e-6), "float32 rounds each of the four values"
    assert [each.name for each in found.values() if each.is_buffer] == ["count"]


def test_another_value_is_seen_in_its_parameter_alone() -> None:
    model = Tied()
    recorder, weights = recorded(model), weights_of(model)
    weights["head.bias"][1] += 0.5
    found = compared(recorder, weights)
    assert (found["head.bias"].difference, found["head.bias"].largest) == pytest.approx((0.5, 0.5))
    assert found["embedding.weight"].difference == 0


def test_what_is_not_a_number_in_both_is_no_difference_and_in_one_it_is() -> None:
    model = Tied()
    with torch.no_grad():
        model.head.bias[1] = float("nan")
    recorder, weights = recorded(model), weights_of(model)
    alike = compared(recorder, weights)["head.bias"]
    assert alike.difference == 0.0
    assert alike.moved == pytest.approx(3**0.5 * MOVEMENT, rel=1e-6)
    weights["head.bias"][2] = float("nan")
    assert not compared(recorder, weights)["head.bias"].difference <= 1e9
    weights["head.bias"] = torch.ones(4)
    assert not compared(recorder, weights)["head.bias"].difference <= 1e9


def test_what_a_run_lacks_or_has_besides_is_named_and_so_is_another_shape() -> None:
    model = Tied()
    recorder, weights = recorded(model), weights_of(model)
    del weights["count"]
    weights["extra"] = torch.zeros(1)
    weights["head.bias"] = torch.zeros(5)
    problems = {name: each.problem for name, each in compared(recorder, weights).items() if each.problem}
    assert problems == {
        "count": "is not in what the run has saved",
        "extra": "is in what the run has saved, and not in the script's model",
        "head.bias": "has the shape (5,) on the nodes, and (4,) by itself",
    }


def test_a_head_that_is_untied_must_be_saved_by_itself() -> None:
    model = Tied()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    assert compared(recorded(model), weights_of(model))["head.weight"].problem == "is not in what the run has saved"


def test_models_are_compared_after_the_first_step_and_after_the_last() -> None:
    model = Tied()
    recorder = recorded(model, num_steps=3)
    steps: list[int] = []
    list(recorder.compare(lambda step: steps.append(step)))
    assert steps == [1, 3]
    assert [each.step for each in recorder.steps] == [1, 2, 3]


def test_gradients_that_are_rounding_errors_are_told_from_those_that_are_zero() -> None:
    model = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in ("trained", "noise", "masked")})
    for name, value in (("trained", 1.0), ("noise", 1e-9), ("masked", 0.0)):
        model[name].weight.grad = torch.full((1, 1), value)
    recorder = Recorder(model, num_steps=1, tolerance=tolerance_of("float32"))
    recorder.note_gradients()
    recorder.step_done(loss=1.0, grad_norm=1.0, learning_rate=0.1, samples=None)
    found = compared(recorder, model.state_dict())
    assert [name for name, each in found.items() if each.is_noise] == ["noise.weight"]


def test_the_norm_of_gradients_is_that_of_torchs_clipping() -> None:
    model = nn.Linear(8, 8)
    model(torch.ones(1, 8)).square().sum().backward()
    norm = gradient_norm(model.parameters())
    assert norm == float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
