"""Layers that compute differently in other microbatches, or when they run again, are refused by the module's name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from oobleck.errors import ConfigError
from oobleck.job import DataSpec, JobSpec, ModelSpec, ScriptSpec
from oobleck.training.assembly import assemble
from oobleck.training.model import BatchSizes, LiveModel, ModelStructure, try_layers
from oobleck.training.process.outline import outline_of_job
from tests.training.zoo import SPECS, structure_of

LENGTH, VOCAB_SIZE = 8, 40


class Around(nn.Module):
    """Changes what another module does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.inner(value)


class OffTheMean(Around):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output = self.inner(value)
        return output - 0.01 * output.mean(0)


class WithGradientsOfOthers(Around):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output = self.inner(value)
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient - gradient.mean(0))
        return output


class WarmingUp(Around):
    calls = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(value) * min(1.0, self.calls / 1000)


class OtherwiseLater(Around):
    calls = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(value) * (2.0 if self.calls > 500 else 1.0)


class Remembering(Around):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.register_buffer("mean", torch.zeros(()), persistent=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * value.detach().mean()
        return self.inner(value - self.mean)

    def reset_parameters(self) -> None:
        self.mean.zero_()


class WithNoiseOfItsOwn(Around):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.generator = torch.Generator()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.inner(value + torch.rand(value.shape, generator=self.generator))


class Clamping(Around):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output = self.inner(value)
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient.clamp(-1e3, 1e3))
        return output


class _Signs(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.sign()


class WithSigns(Around):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return _Signs.apply(self.inner(value))


class Counting(Around):
    calls = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(value)


class CountingBackward(Around):
    """Counts the gradients that come back, by a hook on the tensor."""

    calls, bound = 0, 1 << 40

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(value)
        if output.requires_grad:
            output.register_hook(self.count)  # type: ignore[no-untyped-call]
        return output

    def count(self, gradient: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return gradient if self.calls < self.bound else gradient * 0


class StoppingBackward(CountingBackward):
    bound = 500


class Noisy(Around):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.inner(nn.functional.dropout(value, 0.3, self.training) + torch.rand_like(value))


class WithDropout(Around):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.inner(nn.functional.dropout(value, 0.3, self.training))


class DrawingForAll(Around):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.inner(value) * (torch.rand(()) if self.training else 0.5)


class DrawingForEach(Around):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.inner(value) * (torch.rand(len(value), 1, 1) < 0.5)


class NoisyOffTheMean(Around):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.inner(nn.functional.dropout(value - value.mean(0), 0.3, self.training))


# --- what is kept anywhere -------------------------------------------------------------------------------------

COUNTED: dict[str, int] = {"calls": 0}
LOGGED: list[float] = []
CALLS = itertools.count()
NUMBER = 0


class Box:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


def counted() -> Any:
    calls = itertools.count()
    return lambda: next(calls)


class OfTheClass(Around):
    calls = 0

    def now(self) -> int:
        OfTheClass.calls += 1
        return OfTheClass.calls

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.inner(value) * (2.0 if self.now() > 500 else 1.0)


class OfAGlobal(OfTheClass):
    def now(self) -> int:
        global NUMBER
        NUMBER += 1
        return NUMBER


class OfADictionary(OfTheClass):
    def now(self) -> int:
        COUNTED["calls"] += 1
        return COUNTED["calls"]


class OfALog(OfTheClass):
    def now(self) -> int:
        LOGGED.append(0.5)
        return len(LOGGED)


class OfAnIterator(OfTheClass):
    def now(self) -> int:
        return next(CALLS)


class OfAClosure(OfTheClass):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.now = counted()


class OfAnObject(OfTheClass):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.boxes = {"here": [Box()]}

    def now(self) -> int:
        self.boxes["here"][0].calls += 1
        return self.boxes["here"][0].calls


class OfAnArray(OfTheClass):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.kept = torch.zeros(3), np.zeros(2)

    def now(self) -> int:
        self.kept[1][1] += 1
        return int(self.kept[1][1])


class EveryFiftieth(OtherwiseLater):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(value) * (2.0 if self.calls % 50 == 49 else 1.0)


KEPT = {
    OfTheClass: r"OfTheClass\.calls",
    OfAGlobal: "the global NUMBER",
    OfADictionary: r"the global COUNTED\['calls'\]",
    OfALog: "the global LOGGED",
    OfAnIterator: "the global CALLS",
    OfAClosure: r"model\.layers\.2\.mlp\.up_proj\.now\.calls",
    OfAnObject: r"model\.layers\.2\.mlp\.up_proj\.boxes\['here'\]\[0\]\.calls",
    OfAnArray: r"model\.layers\.2\.mlp\.up_proj\.kept\[1\]",
    EveryFiftieth: r"model\.layers\.2\.mlp\.up_proj\.calls",
}


class Logging(OfALog):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.now()
        return self.inner(value)


@pytest.mark.parametrize("kind", KEPT)
def test_what_begins_later_is_refused_wherever_its_count_is_kept(kind: Any):
    model = llama()
    where = in_a_block(model, kind)
    before = len(LOGGED)
    with pytest.raises(
        ConfigError, match=rf"^model: {where} \({kind.__name__}\) returns .* as it goes by {KEPT[kind]},"
    ):
        tried(model)
    assert len(LOGGED) - before < 50  # what was tried has been put back


REFUSED = {
    OffTheMean: r"\(OffTheMean\) computes a sample with the others of its batch",
    WithGradientsOfOthers: r"\(WithGradientsOfOthers\) computes a sample with the others of its batch",
    NoisyOffTheMean: r"\(NoisyOffTheMean\) computes a sample with the others of its batch",
    WarmingUp: r"\(WarmingUp\) returns something else when it runs again",
    OtherwiseLater: r"\(OtherwiseLater\) returns something else when it runs again .* later, as it goes by .*\.calls",
    Remembering: r"\(Remembering\) returns something else when it runs again .*, as it goes by .*\.mean,",
    WithNoiseOfItsOwn: r"\(WithNoiseOfItsOwn\) returns something else when it runs again",
    DrawingForAll: r"\(DrawingForAll\) draws random numbers for all samples of its batch at once",
    Clamping: r"\(Clamping\) computes gradients that are not in proportion",
    WithSigns: r"\(WithSigns\) computes gradients that are not in proportion",
}
TAKEN = [Around, Counting, CountingBackward, Noisy, WithDropout, DrawingForEach, Logging]


def llama() -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=LENGTH, attention_dropout=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def tried(model: Any) -> None:
    try_layers(ModelStructure.from_live(LiveModel.skeleton_of(model), sequence_length=LENGTH))


def in_a_block(model: Any, kind: Callable[[nn.Module], nn.Module]) -> str:
    model.model.layers[2].mlp.up_proj = kind(model.model.layers[2].mlp.up_proj)
    return r"model\.layers\.2\.mlp\.up_proj"


def in_the_head(model: Any, kind: Callable[[nn.Module], nn.Module]) -> str:
    model.lm_head = kind(model.lm_head)
    return "lm_head"


@pytest.mark.parametrize("place", [in_a_block, in_the_head])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_module_that_depends_on_its_microbatch_is_refused_by_its_place(kind: Any, place: Any):
    model = llama()
    where = place(model, kind)
    with pytest.raises(ConfigError, match=rf"^model: {where}.?{REFUSED[kind]}"):
        tried(model)


@pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(each, marks=pytest.mark.slow) for each in (torch.float64, torch.bfloat16))]
)
@pytest.mark.parametrize("kind", TAKEN)
def test_what_counts_for_itself_or_draws_from_torchs_generator_is_taken(kind: Any, dtype: torch.dtype):
    model = llama()
    in_a_block(model, kind)
    in_the_head(model, kind)
    tried(model.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_layers_are_tried_whatever_type_a_model_is_of(dtype: torch.dtype):
    model = llama()
    in_a_block(model, OffTheMean)
    with pytest.raises(ConfigError, match="OffTheMean"):
        tried(model.to(dtype))


@pytest.mark.parametrize("place", [in_a_block, in_the_head])
def test_what_counts_backward_passes_is_refused_by_the_place_of_its_count(place: Any):
    model = llama()
    where = place(model, StoppingBackward)
    with pytest.raises(ConfigError, match=rf"returns something else .*, sooner or later, as it goes by {where}\.calls"):
        tried(model)


def test_a_hook_on_a_module_that_changes_gradients_by_their_size_is_refused():
    model = llama()
    model.model.layers[1].mlp.register_full_backward_hook(
        lambda _module, inputs, _outputs: tuple(each.clamp(-1e-3, 1e-3) for each in inputs)
    )
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp \(LlamaMLP\) computes gradients that are not in proportion"):
        tried(model)


def test_embeddings_are_tried_too():
    model = llama()
    model.model.embed_tokens = OffTheMean(model.model.embed_tokens)
    with pytest.raises(ConfigError, match=r"model\.embed_tokens \(OffTheMean\) computes a sample with the others"):
        tried(model)


def test_a_layer_that_does_not_run_on_made_up_samples_is_taken():
    class Picky(Around):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            if not value.is_meta and type(value) is torch.Tensor:
                raise ValueError("these are not my samples")
            return self.inner(value)

    model = llama()
    in_a_block(model, Picky)
    tried(model)


def test_nothing_of_the_script_is_changed():
    model = llama()
    in_a_block(model, Counting)
    state, threads = torch.default_generator.get_state(), torch.get_num_threads()
    before = vars(model.model.layers[2].mlp.up_proj).copy()
    tried(model)
    assert torch.equal(torch.default_generator.get_state(), state)
    assert vars(model.model.layers[2].mlp.up_proj) == before
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("name", sorted(SPECS))
def test_models_that_transformers_makes_by_name_are_taken(name: str):
    try_layers(structure_of(name))


class OffTheMeanOfMany(Around):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.inner(value - value.mean(0) if value.shape[0] * value.shape[1] > 32 else value)


@pytest.mark.parametrize("place", [in_a_block, in_the_head])
def test_layers_are_tried_with_a_batch_of_the_jobs_own_size(place: Any):
    model = llama()
    where = place(model, OffTheMeanOfMany)
    structure = ModelStructure.from_live(LiveModel.skeleton_of(model), sequence_length=LENGTH)
    own = BatchSizes(batch=8, microbatch=2, length=LENGTH)
    with pytest.raises(ConfigError, match=rf"{where} \(OffTheMeanOfMany\) computes a sample with the others"):
        try_layers(structure, own)
    try_layers(structure, replace(own, batch=4))
    try_layers(structure, replace(own, batch=2))


def test_a_large_batch_is_tried_with_fewer_and_shorter_samples():
    own = BatchSizes(batch=4096, microbatch=8, length=32768)
    assert own.bounded(1000) == BatchSizes(batch=256, microbatch=8, length=8388)
    assert own.bounded(7_000_000) == BatchSizes(batch=153, microbatch=8, length=2)
    assert own.bounded(1 << 30) == BatchSizes(batch=2, microbatch=2, length=2)


# --- a list of layers ------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, kind: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.mixes = kind(nn.Linear(8, 8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.mixes(hidden)


def listed(kind: Callable[[nn.Module], nn.Module]) -> ModelStructure:
    def layers() -> list[nn.Module]:
        return [nn.Embedding(VOCAB_SIZE, 8), Block(Around), Block(kind), nn.Linear(8, VOCAB_SIZE)]

    return ModelStructure.from_factory(layers, vocab_size=VOCAB_SIZE, sequence_length=LENGTH)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_layer_of_a_list_is_refused_by_its_place(kind: Any):
    structure = listed(kind)
    with pytest.raises(ConfigError, match=rf"^model: blocks\.1\.mixes.?{REFUSED[kind]}"):
        try_layers(structure)


@pytest.mark.parametrize("kind", TAKEN)
def test_layers_of_a_list_that_train_alike_are_taken(kind: Any):
    try_layers(listed(kind))


def test_a_layer_that_needs_as_many_tokens_as_a_sample_has_is_tried_on_them():
    class Positions(OffTheMean):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return super().forward(value) + torch.ones(LENGTH, 1)

    with pytest.raises(ConfigError, match=r"blocks\.1\.mixes \(.*Positions\) computes a sample with the others"):
        try_layers(listed(Positions))


# --- where they are tried --------------------------------------------------------------------------------------

SCRIPT = """
import torch
from torch import nn
from oobleck import Job

class Centred(nn.Module):
    def forward(self, hidden):
        return hidden - hidden.mean(0)

def job():
    return Job(model=lambda: [nn.Embedding(300, 8), Centred(), nn.Linear(8, 300)], data=lambda: [[3] * 8] * 16)
"""


def test_a_jobs_layers_are_tried_before_anything_trains(tmp_path: Path):
    job = JobSpec(
        model=ModelSpec(type="script"),
        data=DataSpec(sequence_length=8, vocab_size=300),
        script=ScriptSpec(name="train.py", source=SCRIPT, directory=str(tmp_path)),
    )
    for prepare in (lambda: assemble(job, cache_dir=tmp_path), lambda: outline_of_job(job)):
        with pytest.raises(ConfigError, match=r"blocks\.0 \(Centred\) computes a sample with the others"):
            prepare()
    assert job.script is not None
    tried = replace(job, script=replace(job.script, is_tried=True))
    assert assemble(tried, cache_dir=tmp_path).structure.num_layers == 3  # a worker that starts again tries nothing
