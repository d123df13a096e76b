from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from oobleck.errors import ConfigError
from oobleck.job import JobSpec, OptimizerSpec, Scalar
from oobleck.training.assembly import check_optimizer
from oobleck.training.optim.optimizer import Optimizer

SPEC = OptimizerSpec(learning_rate=0.01, warmup_steps=2, lr_scheduler_type="linear")
SHAPES = {"a.weight": (7, 5), "a.bias": (5,), "b.weight": (3, 4, 2), "b.norm": (11,)}


def _parameters(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for name, shape in SHAPES.items()}


def _gradients(step: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


def _optimizer(parameters: dict[str, nn.Parameter]) -> Optimizer:
    optimizer = Optimizer(SPEC, max_steps=20)
    optimizer.adopt(parameters)
    return optimizer


def layer_state(optimizer: Optimizer, names: Sequence[str]) -> torch.Tensor:
    """A copy of all that the optimizer holds of these parameters."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in optimizer.layer_tensors(names)])


def load_layer_state(optimizer: Optimizer, names: Sequence[str], flat: torch.Tensor) -> None:
    tensors = optimizer.layer_tensors(names)
    for tensor, part in zip(tensors, flat.split([each.numel() for each in tensors]), strict=True):
        tensor.detach().copy_(part.view(tensor.shape))


def test_it_is_adamw_with_the_schedule_and_no_decay_of_vectors():
    parameters = _parameters()
    optimizer = _optimizer(parameters)
    expected = _parameters()
    groups = [
        {"params": [p for p in expected.values() if p.ndim > 1], "weight_decay": SPEC.weight_decay},
        {"params": [p for p in expected.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, betas=(SPEC.adam_beta1, SPEC.adam_beta2), eps=SPEC.adam_epsilon)
    for step in range(1, 8):
        gradients = _gradients(step)
        optimizer.step(step, gradients, 0.5)
        for group in reference.param_groups:
            group["lr"] = optimizer.learning_rate(step)
        for name, parameter in expected.items():
            parameter.grad = _gradients(step)[name] * 0.5
        reference.step()
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-12, atol=1e-14)


def test_gradients_are_scaled_where_they_are():
    optimizer = _optimizer(_parameters())
    gradients = _gradients(1)
    optimizer.step(1, gradients, 0.25)
    assert all(torch.equal(gradients[name], tensor * 0.25) for name, tensor in _gradients(1).items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_layer_that_moves_goes_on_as_if_it_had_stayed(dtype: torch.dtype):
    stayed, moved = _parameters(dtype), _parameters(dtype)
    home, source = _optimizer(stayed), _optimizer(moved)
    for step in (1, 2, 3):
        home.step(step, _gradients(step, dtype))
        source.step(step, _gradients(step, dtype))

    names = ["b.weight", "b.norm"]
    flat = layer_state(source, names)
    # The parameter, two moments, and the number of missed steps.
    assert flat.shape == (3 * sum(moved[name].numel() for name in names) + len(names),)
    assert flat.dtype == dtype
    target_parameters = {name: nn.Parameter(torch.full_like(moved[name], torch.nan)) for name in names}
    target = Optimizer(SPEC, max_steps=20)
    target.adopt(target_parameters)
    load_layer_state(target, names, flat)
    for step in (4, 5):
        home.step(step, _gradients(step, dtype))
        target.step(step, {name: _gradients(step, dtype)[name] for name in names})
    for name in names:
        assert torch.equal(stayed[name], target_parameters[name])
    assert torch.equal(layer_state(home, names), layer_state(target, names))


@pytest.mark.parametrize("name", ["adamw", "adamw_torch_fused", "adamax", "sgd"])
def test_a_parameter_without_a_gradient_misses_the_step_as_in_torch_and_takes_its_count_along(name: str):
    spec = OptimizerSpec(
        optim=name,
        optim_args={"momentum": 0.9} if name == "sgd" else {},
        learning_rate=0.01,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.5,
    )
    found, expected = _parameters(), _parameters()
    kind = {kind.lower(): kind for kind in vars(torch.optim)}[name.removesuffix("_torch_fused")]
    groups = [
        {"params": [p for p in expected.values() if p.ndim > 1], "weight_decay": 0.5},
        {"params": [p for p in expected.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    takes = inspect.signature(getattr(torch.optim, kind)).parameters
    adam: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8} if "betas" in takes else {}
    reference = getattr(torch.optim, kind)(groups, lr=0.01, **(adam or spec.optim_args))
    optimizer = Optimizer(spec, max_steps=20)
    optimizer.adopt(found)
    # The first never has one, the second has none in steps 1 and 4, and the third none in step 3.
    without = {1: {"b.norm", "a.bias"}, 3: {"b.norm", "b.weight"}, 4: {"b.norm", "a.bias"}}
    names = list(SHAPES)
    for step in range(1, 8):
        if step == 5:  # all layers change hands
            tensors = [each.clone() for each in optimizer.layer_tensors(names)]
            other = Optimizer(spec, max_steps=20)
            split = other.split_layer(names, tensors)
            found = {each: nn.Parameter(split[each][0]) for each in names}
            other.adopt(found, split)
            optimizer = other
        if step == 6:  # and are saved and read
            state = {key: value.clone() for key, value in optimizer.named_state(names).items()}
            shapes = {each: torch.Size(shape) for each, shape in SHAPES.items()}
            other = Optimizer(spec, max_steps=20)
            flat = other.flat_state(names, state, shapes=shapes, dtype=torch.float64)
            empty = other.empty_layer(shapes, dtype=torch.float64, device=torch.device("cpu"))
            assert flat.numel() == sum(each.numel() for each in empty)
            parts = flat.split([each.numel() for each in empty])
            filled = [part.view(each.shape) for part, each in zip(parts, empty, strict=True)]
            split = other.split_layer(names, filled)
            found = {each: nn.Parameter(split[each][0]) for each in names}
            other.adopt(found, split)
            optimizer = other
        missing = without.get(step, {"b.norm"})
        optimizer.step(step, {each: value for each, value in _gradients(step).items() if each not in missing})
        for each, parameter in expected.items():
            parameter.grad = None if each in missing else _gradients(step)[each]
        reference.step()
        for each in names:
            torch.testing.assert_close(found[each], expected[each], rtol=1e-12, atol=1e-14)
    assert torch.equal(found["b.norm"], _parameters()["b.norm"])
    missed = {key: int(value) for key, value in optimizer.named_state(names).items() if ".missed." in key}
    assert missed == (
        {}
        if name == "sgd"
        else {"optimizer.missed.a.bias": 2, "optimizer.missed.b.weight": 1, "optimizer.missed.b.norm": 7}
    )


def test_no_file_tells_of_missed_steps_where_there_are_none():
    optimizer = _optimizer(_parameters())
    optimizer.step(1, _gradients(1))
    assert not [key for key in optimizer.named_state(list(SHAPES)) if "missed" in key]


def test_exported_state_is_a_copy():
    parameters = _parameters()
    optimizer = _optimizer(parameters)
    flat = layer_state(optimizer, ["a.bias"])
    optimizer.step(1, _gradients(1))
    assert torch.equal(flat[:5], _parameters()["a.bias"])
    assert not flat[5:].any()


def test_parameters_come_and_go_and_those_that_stay_keep_their_moments():
    parameters = _parameters()
    optimizer = _optimizer(parameters)
    optimizer.step(1, _gradients(1))
    before = layer_state(optimizer, ["a.weight"])
    fewer = {name: parameters[name] for name in ("a.weight", "a.bias")}
    optimizer.adopt(fewer)
    assert torch.equal(layer_state(optimizer, ["a.weight"]), before)
    optimizer.adopt(parameters)
    size = parameters["b.weight"].numel()
    assert not layer_state(optimizer, ["b.weight"])[size:].any(), "moments of a parameter that comes back are not kept"
    assert torch.equal(layer_state(optimizer, ["a.weight"]), before)


def test_a_new_object_under_a_known_name_gets_no_old_moments():
    optimizer = _optimizer(_parameters())
    optimizer.step(1, _gradients(1))
    optimizer.adopt(_parameters())
    assert not layer_state(optimizer, ["a.bias"])[5:].any()


ELEMENTWISE = [
    "adam",
    "adamw",
    "adamw_torch_fused",
    "adagrad",
    "rmsprop",
    "adamax",
    "adadelta",
    "nadam",
    "radam",
    "sgd",
]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_any_optimizer_is_torchs_own_and_its_layers_move_without_a_trace(name: str):
    arguments: dict[str, Scalar] = {"momentum": 0.9} if name in ("sgd", "rmsprop") else {}
    spec = OptimizerSpec(optim=name, optim_args=arguments, learning_rate=0.01, lr_scheduler_type="constant_with_warmup")
    stayed, moved, expected = _parameters(), _parameters(), _parameters()
    home, source = Optimizer(spec, max_steps=20), Optimizer(spec, max_steps=20)
    home.adopt(stayed)
    source.adopt(moved)
    kind = {kind.lower(): kind for kind in vars(torch.optim)}[name.removesuffix("_torch_fused")]
    takes = inspect.signature(getattr(torch.optim, kind)).parameters
    adam = {"betas": (spec.adam_beta1, spec.adam_beta2), "eps": spec.adam_epsilon} if "betas" in takes else {}
    groups = [
        {"params": [p for p in expected.values() if p.ndim > 1], "weight_decay": spec.weight_decay},
        {"params": [p for p in expected.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    reference = getattr(torch.optim, kind)(groups, **adam, **arguments)

    names = list(SHAPES)
    for step in range(1, 6):
        if step == 4:  # all layers change hands
            flat = layer_state(source, names)
            layout = source.layout()
            assert flat.numel() == sum(layout.size(moved[each].numel()) for each in names)
            moved = {each: nn.Parameter(torch.full_like(moved[each], torch.nan)) for each in names}
            source = Optimizer(spec, max_steps=20)
            source.adopt(moved)
            load_layer_state(source, names, flat)
        home.step(step, _gradients(step))
        source.step(step, _gradients(step))
        for group in reference.param_groups:
            group["lr"] = home.learning_rate(step)
        for each, parameter in expected.items():
            parameter.grad = _gradients(step)[each]
        reference.step()
    for each in names:
        assert torch.equal(stayed[each], moved[each])
        torch.testing.assert_close(stayed[each], expected[each], rtol=1e-12, atol=1e-14)


def test_state_that_never_stepped_moves_as_well():
    for name in ELEMENTWISE:
        spec = OptimizerSpec(optim=name, warmup_steps=0)
        stayed, moved = _parameters(), _parameters()
        home, target = Optimizer(spec, max_steps=9), Optimizer(spec, max_steps=9)
        home.adopt(stayed)
        target.adopt(moved)
        load_layer_state(target, list(SHAPES), layer_state(home, list(SHAPES)))
        home.step(1, _gradients(1))
        target.step(1, _gradients(1))
        assert all(torch.equal(stayed[each], moved[each]) for each in SHAPES), name


def test_skipped_steps_do_not_count_for_the_optimizer():
    spec = OptimizerSpec(learning_rate=0.01, lr_scheduler_type="constant", warmup_steps=0)
    skipping, plain = _parameters(), _parameters()
    one, other = Optimizer(spec, max_steps=9), Optimizer(spec, max_steps=9)
    one.adopt(skipping)
    other.adopt(plain)
    one.step(3, _gradients(1), num_skipped=2)
    other.step(1, _gradients(1))
    assert all(torch.equal(skipping[each], plain[each]) for each in SHAPES)


def test_a_factory_and_a_schedule_of_ones_own():
    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.5)

    parameters, before = _parameters(), _parameters()
    optimizer = Optimizer(OptimizerSpec(weight_decay=0), max_steps=9, factory=make, schedule=lambda step: 1 / step)
    optimizer.adopt(parameters)
    assert optimizer.learning_rate(4) == 0.125
    optimizer.step(4, _gradients(1))
    for each, parameter in parameters.items():
        torch.testing.assert_close(parameter, before[each] - 0.125 * _gradients(1)[each], rtol=1e-12, atol=0)


class Clipping(torch.optim.SGD):
    """Clips the norm of all gradients that it has."""

    limit = 0.5

    def step(self, closure: Any = None) -> Any:
        given = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        nn.utils.clip_grad_norm_(given, self.limit)
        return super().step(closure)


class ClippingRarely(Clipping):
    limit = 100.0


class ClippingEach(torch.optim.SGD):
    """Clips the norm of each parameter's gradient."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                nn.utils.clip_grad_norm_([each], 0.5)
        return super().step(closure)


class Measuring(torch.optim.SGD):
    """Makes updates smaller by the norm of all parameters."""

    def step(self, closure: Any = None) -> Any:
        given = [each for group in self.param_groups for each in group["params"]]
        norm = torch.cat([each.detach().flatten() for each in given]).norm()
        for each in given:
            if each.grad is not None:
                each.grad /= norm
        return super().step(closure)


def _norm(optimizer: torch.optim.Optimizer) -> float:
    given = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    return float(torch.stack([each.norm() for each in given]).norm())


class SkippingSmall(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return None if _norm(self) < 0.3 else super().step(closure)


class SkippingSpikes(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return None if _norm(self) > 1e3 else super().step(closure)


class WithNoise(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                each.grad.add_(0.01 * torch.randn_like(each.grad))
        return super().step(closure)


def test_an_optimizer_that_draws_is_refused_as_one_that_draws():
    with pytest.raises(ConfigError, match=r"optimizer.optim: WithNoise draws random numbers in a step"):
        _layout_with(WithNoise, lr=0.01)


def _layout_with(kind: Any, **arguments: Any) -> Any:
    return Optimizer(SPEC, max_steps=9, factory=lambda groups: kind(groups, **arguments)).layout()


@pytest.mark.parametrize("kind", [Clipping, ClippingRarely, Measuring, SkippingSmall, SkippingSpikes])
def test_an_optimizer_whose_parameters_depend_on_each_other_is_refused_by_name(kind: Any):
    with pytest.raises(ConfigError, match=rf"optimizer.optim: {kind.__name__} updates a parameter differently"):
        _layout_with(kind, lr=0.3)


def test_an_optimizer_that_clips_each_parameter_alone_is_fine():
    assert not _layout_with(ClippingEach, lr=0.3).entries


class Counting(torch.optim.SGD):
    """Counts its steps, and has them smaller from one to the next."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            for each in group["params"]:
                each.grad /= self.count
        return super().step(closure)


class CountingForLater(torch.optim.SGD):
    """Counts its steps, for something that no trial waits for."""

    counts: dict[str, int]

    def step(self, closure: Any = None) -> Any:
        self.counts = {"steps": getattr(self, "counts", {"steps": 0})["steps"] + 1}
        if self.counts["steps"] == 1000:
            raise AssertionError
        return super().step(closure)


class CountingInGroups(torch.optim.SGD):
    """Has a schedule of its own for its weight decay."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["weight_decay"] = 0.9 * group["weight_decay"]
        return super().step(closure)


class CountingForAll(torch.optim.SGD):
    """Keeps one count for all parameters."""

    def step(self, closure: Any = None) -> Any:
        of_all: Any = self.state["all"]  # type: ignore[index]  # torch takes any key
        of_all["count"] = of_all.get("count", 0) + 1
        return super().step(closure)


class SkippingTheFirst(torch.optim.SGD):
    has_begun = False

    def step(self, closure: Any = None) -> Any:
        if self.has_begun:
            return super().step(closure)
        self.has_begun = True
        return None


class CountingInAClosure(torch.optim.SGD):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        counts = itertools.count(1)
        self.count = lambda: next(counts)

    def step(self, closure: Any = None) -> Any:
        number = self.count()
        for group in self.param_groups:
            for each in group["params"]:
                each.grad /= number
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (Counting, "self.count"),
        (CountingForLater, "self.counts"),
        (CountingInGroups, "param_groups[…]['weight_decay']"),
        (CountingForAll, "state['all']"),
        (SkippingTheFirst, "something"),
        (CountingInAClosure, "something"),
    ],
)
def test_an_optimizer_that_keeps_something_outside_of_its_state_is_refused_by_name(kind: Any, what: str):
    with pytest.raises(
        ConfigError, match=rf"optimizer.optim: {kind.__name__} goes by {re.escape(what)}, which it keeps"
    ):
        _layout_with(kind, lr=0.3)


STEPS: list[float] = []


class Logging(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        STEPS.append(0.5)
        return super().step(closure)


class StoppingByTheLog(Logging):
    def step(self, closure: Any = None) -> Any:
        return None if len(STEPS) > 500 else super().step(closure)


class StoppingByItsClass(torch.optim.SGD):
    steps = itertools.count()

    def step(self, closure: Any = None) -> Any:
        return None if next(self.steps) > 500 else super().step(closure)


@pytest.mark.parametrize(
    ("kind", "what"), [(StoppingByTheLog, "the global STEPS"), (StoppingByItsClass, "StoppingByItsClass.steps")]
)
def test_an_optimizer_that_goes_later_by_what_all_have_is_refused_by_name(kind: Any, what: str):
    with pytest.raises(ConfigError, match=rf"{kind.__name__} goes by {re.escape(what)}, which changes with every step"):
        _layout_with(kind, lr=0.3)
    assert not _layout_with(Logging, lr=0.3).entries


class Averaging(torch.optim.Optimizer):
    """Keeps an average of gradients in its state, beside what follows from its parameters and its first step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.all_of_them = [each for group in self.param_groups for each in group["params"]]
        self.cache: dict[str, int] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.cache.setdefault("size", sum(each.numel() for each in self.all_of_them))
        for each in self.all_of_them:
            state = self.state[each]
            state.setdefault("step", torch.zeros(()))
            state.setdefault("average", torch.zeros_like(each))
            state["step"] += 1
            state["average"].lerp_(each.grad, 0.1)
            each.sub_(state["average"] / (1 - 0.9 ** state["step"]), alpha=self.param_groups[0]["lr"])


def test_an_optimizer_that_keeps_all_in_its_state_is_fine_whatever_it_refers_to():
    assert [entry.name for entry in _layout_with(Averaging, lr=0.3).entries] == ["average"]


class Keeping(torch.optim.Optimizer):
    """SGD that goes back to something at some step, which it keeps since a step before."""

    created, used = 1, 5

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def kept(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                state.setdefault("step", torch.zeros(())).add_(1)
                if state["step"] >= self.created and "kept" not in state:
                    state["kept"] = self.kept(each)
                each.sub_(each.grad, alpha=group["lr"])
                if state["step"] == self.used:
                    each.lerp_(state["kept"], 0.5)


class KeepingForLater(Keeping):
    used = 1000


class KeepingSizes(KeepingForLater):
    def kept(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.abs()


class KeepingTheGradient(KeepingForLater):
    def kept(self, parameter: torch.Tensor) -> torch.Tensor:
        assert parameter.grad is not None
        return parameter.grad.clone()


class KeepingTheNorm(KeepingForLater):
    def kept(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.norm()


class KeepingZeros(KeepingForLater):
    def kept(self, parameter: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(parameter)


class KeepingFromStepEight(Keeping):
    created, used = 8, 9


class KeepingFromStepTwenty(Keeping):
    created, used = 20, 25


@pytest.mark.parametrize("kind", [Keeping, KeepingForLater])
def test_state_that_starts_from_the_parameter_does_so_wherever_the_layer_is(kind: Any):
    assert [entry.initial for entry in _layout_with(kind, lr=0.3).entries] == [None]
    assert [entry.initial for entry in _layout_with(KeepingZeros, lr=0.3).entries] == [0.0]
    found, expected = _parameters(), _parameters()
    spec = OptimizerSpec(lr_scheduler_type="constant", warmup_steps=0)

    def made() -> Optimizer:
        return Optimizer(spec, max_steps=9, factory=lambda groups: kind(groups, lr=0.3))

    names = list(SHAPES)
    optimizer, reference = made(), kind(list(expected.values()), lr=0.3)
    optimizer.adopt(found)
    for step in range(1, 7):
        if step in (1, 4):  # before the first step too
            split = made().split_layer(names, [each.clone() for each in optimizer.layer_tensors(names)])
            found = {each: nn.Parameter(split[each][0]) for each in names}
            optimizer = made()
            optimizer.adopt(found, split)
        optimizer.step(step, _gradients(step))
        for each, parameter in expected.items():
            parameter.grad = _gradients(step)[each]
        reference.step()
    for each in names:
        torch.testing.assert_close(found[each], expected[each], rtol=1e-12, atol=1e-14)
    # A checkpoint without this state, such as of weights alone, has the values to start from.
    shapes = {each: torch.Size(shape) for each, shape in SHAPES.items()}
    flat = made().flat_state(["a.bias"], {"a.bias": expected["a.bias"]}, shapes=shapes, dtype=torch.float64)
    assert torch.equal(flat[:10], torch.cat([expected["a.bias"].detach()] * 2))


@pytest.mark.parametrize("kind", [KeepingSizes, KeepingTheGradient, KeepingTheNorm])
def test_state_that_starts_from_anything_else_is_refused_by_name_although_no_trial_waits_for_its_use(kind: Any):
    with pytest.raises(ConfigError, match=rf"{kind.__name__} keeps kept, which starts from other values than one"):
        _layout_with(kind, lr=0.3)


def test_state_that_is_created_later_than_in_the_first_step_is_refused_by_name():
    with pytest.raises(ConfigError, match="KeepingFromStepEight creates kept in a later step than its first"):
        _layout_with(KeepingFromStepEight, lr=0.3)
    optimizer = Optimizer(SPEC, max_steps=30, factory=lambda groups: KeepingFromStepTwenty(groups, lr=0.3))
    optimizer.adopt(_parameters())
    for step in range(1, 20):
        optimizer.step(step, _gradients(step))
    with pytest.raises(ConfigError, match="KeepingFromStepTwenty creates kept in a later step than its first"):
        optimizer.step(20, _gradients(20))


def test_a_worker_does_not_try_again_what_was_tried_before_the_run():
    """It would in every recovery: a step of a script's optimizer may take its time."""
    steps: list[int] = []

    class Counted(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            steps.append(1)
            super().step(closure)

    for is_tried in (False, True):
        steps.clear()
        Optimizer(
            OptimizerSpec(), max_steps=9, factory=lambda groups: Counted(groups, lr=0.1), is_tried=is_tried
        ).layout()
        assert (len(steps) == 1) == is_tried


def test_a_schedule_that_counts_by_itself_is_refused():
    counts = itertools.count(1)
    Optimizer(SPEC, max_steps=9, schedule=lambda step: 1 / step).require_pure_schedule(max_steps=9)
    with pytest.raises(ConfigError, match=r"lr_lambda: it returns 0.\d+ for step 9, and 0.1 when it is called again"):
        Optimizer(SPEC, max_steps=9, schedule=lambda step: 1 / next(counts)).require_pure_schedule(max_steps=9)


class Decaying:
    """A schedule that goes by something else than the step, after some calls or since some step."""

    def __init__(self, calls: int = 1 << 30, step: int = 1 << 30) -> None:
        self.left, self.step, self.is_late = calls, step, False
        self.rates: list[float] = []
        self.known: dict[int, float] = {}

    def by_calls(self, _step: int) -> float:
        self.left -= 1
        return 1.0 if self.left >= 0 else 0.1

    def by_what_was(self, step: int) -> float:
        self.is_late = self.is_late or step >= self.step
        return 0.1 if self.is_late else 1.0

    def noting(self, step: int) -> float:
        self.rates.append(1 / step)
        return self.rates[-1]

    def remembering(self, step: int) -> float:
        return self.known.setdefault(step, 1 / step)


RATES = Decaying(5000)


def by_a_global(step: int) -> float:
    return RATES.by_calls(step)


def of_a_table(step: int) -> float:
    return (1.0, 0.9, 0.5)[step // 8]


def _try_schedule(schedule: Any, max_steps: int = 1000) -> None:
    Optimizer(SPEC, max_steps=max_steps, schedule=schedule).require_pure_schedule(max_steps=max_steps)


@pytest.mark.parametrize(
    ("schedule", "what"),
    [
        (Decaying(36).by_calls, "lr_lambda: it returns 1.0 for step "),
        (Decaying(5000).by_calls, "as it goes by lr_lambda.left, which changes with every call"),
        (by_a_global, "as it goes by the global RATES.left, which changes with every call"),
        (Decaying(step=500).by_what_was, "lr_lambda: it returns 1.0 for step 49[0-9], and 0.1 when it is called again"),
    ],
)
def test_a_schedule_with_a_memory_is_refused_by_name_however_late_it_matters(schedule: Any, what: str):
    with pytest.raises(ConfigError, match=what):
        _try_schedule(schedule)


@pytest.mark.parametrize(
    "schedule", [Decaying().noting, Decaying().remembering, of_a_table, lambda step: 0.1 if step > 500 else 1.0]
)
def test_a_schedule_that_only_notes_its_calls_is_fine(schedule: Any):
    _try_schedule(schedule)


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_torchs_optimizers_fit_in_whichever_way_they_are_computed(kind: Any, options: dict[str, bool]):
    _layout_with(kind, lr=0.3, weight_decay=0.1, **options)


def test_unfit_optimizers_are_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"'lion' .*adamw.*sgd"):
        Optimizer(OptimizerSpec(optim="lion"), max_steps=9)
    with pytest.raises(ConfigError, match="Adafactor keeps row_var"):
        Optimizer(OptimizerSpec(optim="adafactor"), max_steps=9).layout()
    with pytest.raises(ConfigError, match=r"optim_args\.momentum: AdamW"):
        Optimizer(OptimizerSpec(optim_args={"momentum": 0.9}), max_steps=9)
    with pytest.raises(ConfigError, match=r"SGD .*momentum"):
        Optimizer(OptimizerSpec(optim="sgd", optim_args={"momentum": -1.0}), max_steps=9).layout()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (OptimizerSpec(optim="nonsense"), "optimizer.optim: 'nonsense' is not known"),
        (OptimizerSpec(optim_args={"momentum": 2}), "optimizer.optim_args.momentum: AdamW"),
        (OptimizerSpec(optim="sgd", optim_args={"momentum": -1}), "optimizer: SGD refuses its arguments"),
        (OptimizerSpec(lr_scheduler_kwargs={"num_cycles": -1}), "num_cycles: -1 is not possible; it must be from 0"),
        (OptimizerSpec(lr_scheduler_kwargs={"num_cycles": 1e300}), "num_cycles: 1e[+]300 is not possible"),
        (OptimizerSpec(lr_scheduler_kwargs={"num_cycles": float("nan")}), "num_cycles: nan is not possible"),
        (OptimizerSpec(lr_scheduler_kwargs={"nonsense": 1}), "lr_scheduler_kwargs.nonsense: cosine takes"),
    ],
)
def test_an_optimizer_that_cannot_be_is_told_before_anything_is_trained(spec: OptimizerSpec, words: str) -> None:
    check_optimizer(JobSpec())
    with pytest.raises(ConfigError, match=words):
        check_optimizer(JobSpec(optimizer=spec))


@pytest.mark.parametrize("rate", [1e30, math.inf])
def test_a_rate_that_makes_numbers_none_is_left_to_the_run_which_reports_its_loss(rate: float):
    _layout_with(torch.optim.AdamW, lr=rate)
    _layout_with(torch.optim.SGD, lr=rate, momentum=0.9)
    Optimizer(OptimizerSpec(learning_rate=1e200), max_steps=9).layout()


def test_an_optimizer_that_goes_by_all_of_a_parameter_is_refused_where_devices_have_some_rows() -> None:
    class Trusting(torch.optim.SGD):
        """As in LARS, each parameter's rate goes by the norm of its gradient."""

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.div_(1.0 + parameter.grad.norm())
            super().step(closure)

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return Trusting(groups, lr=0.1)

    Optimizer(OptimizerSpec(), max_steps=10, factory=make).layout()
    with pytest.raises(ConfigError, match=r"optimizer.optim: Trusting goes by all of a parameter"):
        Optimizer(OptimizerSpec(), max_steps=10, factory=make, is_sharded=True).layout()
    with pytest.raises(ConfigError, match=r"optimizer.optim: Muon goes by all of a parameter"):
        check_optimizer(JobSpec(optimizer=OptimizerSpec(optim="muon"), sharding="optimizer", sharding_devices=2))
    for kind in ("adamw", "sgd", "adagrad", "rmsprop"):
        Optimizer(OptimizerSpec(optim=kind), max_steps=10, is_sharded=True).layout()
