"""Models of every shape, traced and cut: what travels, and gradients equal to those of the uncut model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from oobleck.errors import ConfigError, UncutModel
from oobleck.training.data import WholeBatch
from oobleck.training.flow import Flow, packed, prove_cuts, size_of, trace_flow, unpacked
from oobleck.training.model import LiveModel, MicrobatchKey, ModelStructure, StageModel
from tests.traced import through

SIZE = 4
KEY = MicrobatchKey(seed=0, step=1, microbatch=0)


class Stack(nn.Module):
    """Blocks one after the other, in the way of a subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.blocks = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(4))
        self.scale = nn.Parameter(torch.full((SIZE,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden).tanh()
        return hidden.square().mean()


class Skipping(Stack):
    """The last block reads what the first module has made, and the loss what every block has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = hidden = self.first(x)
        penalty = x.new_zeros(())
        for number, block in enumerate(self.blocks):
            hidden = block(hidden + (early if number == 3 else 0.0)).tanh()
            penalty = penalty + hidden.mean()
        return hidden.square().mean() + penalty


class ReadingWeights(Stack):
    """Its head is the weight of its first module, and a parameter of its own scales what two blocks are given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden * self.scale if number in (1, 3) else hidden).tanh()
        return (hidden @ self.first.weight.T).square().mean()


class ReadingTiedWeights(Stack):
    """Its head is a module that never runs, and whose weight is that of its first module."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(SIZE, SIZE, bias=False)
        self.head.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden).tanh()
        return (hidden @ self.head.weight.T).square().mean()


class InPlace(Stack):
    """Changes what a block has returned, in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
            hidden += 1.0
        return hidden.square().mean()


class Deciding(Stack):
    """Goes by values that it has computed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        sign = 1.0 if float(hidden.detach().sum()) > 0 else -1.0
        for block in self.blocks:
            hidden = block(hidden).tanh()
        return sign * hidden[hidden > 0].mean()


class Again(Stack):
    """Calls its first block three times."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for number in (0, 0, 1, 2, 0):
            hidden = self.blocks[number](hidden).tanh()
        return hidden.square().mean()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)

    def forward(self, hidden: torch.Tensor, *, mask: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        return self.inner(hidden * mask), {"mask": mask, "mean": hidden.mean(-1, keepdim=True)}


class Pairs(Stack):
    """Blocks that hand on containers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, mask = self.first(x), x > 0
        for block in self.blocks:
            hidden, others = block(hidden, mask=mask)
            hidden, mask = hidden + others["mean"], others["mask"]
        return hidden.square().mean()


HEARD: list[torch.Tensor] = []
"""Of all models, as the collectors of transformers' own hooks."""


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.inner = nn.Linear(SIZE, 2), nn.Linear(SIZE, SIZE)
        self.router.register_forward_hook(lambda _module, _args, output: HEARD.append(output))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden) * self.router(hidden).softmax(-1)[..., :1]


class Hearing(Stack):
    """Its loss reads what hooks hear of the routers within its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Routed() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        HEARD.clear()
        loss = super().forward(x)
        return loss + torch.stack(HEARD).square().mean()


def data() -> torch.Tensor:
    return torch.randn(3, SIZE, generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, inputs: Any, _num_items: int = 1, *, step: int = 1) -> torch.Tensor:
    loss: torch.Tensor = model(**inputs)
    return loss


def traced(model: nn.Module) -> Flow:
    flow = trace_flow(model, lambda: loss_of(model, {"x": data()}))
    prove_cuts(model, flow, [lambda: loss_of(model, {"x": data()})])
    return flow


def cut(model: nn.Module, flow: Flow, directory: Path) -> Callable[..., list[StageModel]]:
    live = LiveModel.taken_apart(model, directory, is_whole=True)
    structure = ModelStructure.with_its_loss(live, loss_of, sequence_length=2, flow=flow)

    def stages(*cuts: int) -> list[StageModel]:
        made = []
        for first, stop in pairwise((0, *cuts, structure.num_layers)):
            stage = StageModel(structure, dtype=torch.float32, device="cpu")
            stage.adopt(first, stop, {})
            stage.initialize(range(first, stop), seed=0)
            made.append(stage)
        return made

    return stages


@pytest.mark.parametrize(
    "kind", [Stack, Skipping, ReadingWeights, InPlace, Deciding, Again, Pairs, Hearing, ReadingTiedWeights]
)
def test_every_cut_has_the_gradients_of_the_uncut_model(kind: type[Stack], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = kind()
    loss = loss_of(model, {"x": data()})
    loss.backward()
    expected = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    flow = traced(model)
    stages_of = cut(model, flow, tmp_path)
    every = tuple(range(1, flow.num_layers))
    assert len(every) > 2
    batch = WholeBatch(inputs={"x": data()}, weight=1.0, divides_by=1, counted=0)
    for cuts in ((), every, (flow.num_layers // 2,), *((each,) for each in every)):
        stages = stages_of(*cuts)
        found = through(stages, batch, partial(StageModel.carry, num_items=1, key=KEY))
        assert found == pytest.approx(float(loss.detach()), rel=1e-6)
        sums: dict[str, torch.Tensor] = {}
        for stage in stages:
            for name, each in stage.parameters.items():
                if each.grad is not None:
                    sums[name] = sums.get(name, torch.zeros_like(each)) + each.grad
        assert sums.keys() >= expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(sums[name], gradient)


def test_only_what_is_read_later_travels() -> None:
    chain, skipping = traced(Stack()), traced(Skipping())
    assert {len(each) for each in chain.travelling[1:]} == {1}
    # The first module's result goes as far as the block that reads it; every block's, to the loss.
    assert [len(each) for each in skipping.travelling] == [0, 1, 2, 3, 4]
    names = {skipping.values[number].name for number in skipping.travelling[-1]}
    assert names == {"first:0", *(f"blocks.{number}:0" for number in range(3))}


def test_a_parameter_belongs_to_every_layer_that_the_models_own_code_reads_it_for(tmp_path: Path) -> None:
    model = ReadingWeights()
    flow = traced(model)
    (first, *_) = cut(model, flow, tmp_path)()
    readers = {name: first.structure.layers_with(name) for name in ("scale", "first.weight")}
    assert readers == {"scale": (2, 4), "first.weight": (0, 4)}


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.kept = self.inner(hidden) * 2
        return self.kept.tanh()


class Reading(Stack):
    """Reads within a block, past what that returns."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Keeping()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        return loss + self.blocks[1].kept.mean()


def test_what_passes_the_results_of_blocks_by_is_named() -> None:
    with pytest.raises(UncutModel, match=r"reads within blocks\.1, past what it returns"):
        traced(Reading())


class Sometimes(Stack):
    """Leaves a block out for some samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for number, block in enumerate(self.blocks):
            if number != 2 or bool(x[0, 0] > 0) or float(x.sum()) < 100:
                hidden = block(hidden).tanh()
        return hidden.square().mean()


def test_samples_that_take_another_way_are_refused_by_the_block(tmp_path: Path) -> None:
    model = Sometimes()
    inputs = {"x": data().abs()}
    flow = trace_flow(model, lambda: loss_of(model, inputs))
    other = {"x": -data().abs() + 1000 * torch.tensor([[0.0, 1, 1, 1]])}
    with pytest.raises(UncutModel, match=r"it does not run in pieces .*calls blocks\.3"):
        prove_cuts(model, flow, [lambda: loss_of(model, other)])
    (stage,) = cut(model, flow, tmp_path)()
    batch = WholeBatch(inputs=other, weight=1.0, divides_by=1, counted=0)
    with pytest.raises(ConfigError, match=r"forward pass calls blocks\.3.*set num_stages to 1"):
        stage.carry(batch, None, num_items=1, key=KEY)


def test_a_message_has_tensors_of_all_types() -> None:
    tensors = [
        torch.randn(3, 5), torch.tensor(True), torch.arange(7), torch.randn(2, 3).bfloat16(), torch.zeros(0, 4),
        torch.randn(4, 3).T,
    ]  # fmt: skip
    for some in (tensors, tensors[:1], tensors[-1:], []):
        found = unpacked(packed(some, device=torch.device("cpu")), [size_of(each) for each in some])
        assert len(found) == len(some)
        for one, other in zip(some, found, strict=True):
            assert torch.equal(one, other)
            assert one.dtype == other.dtype
