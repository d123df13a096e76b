"""Devices that share each sample's tokens: together they compute what one device computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from oobleck.errors import ConfigError
from oobleck.job import LoraSpec, ModelSpec, Recompute, Scalar, Sharding
from oobleck.schedule import ScheduleKind
from oobleck.training.data.batches import IGNORED_LABEL, Batch
from oobleck.training.model.structure import ModelStructure
from oobleck.training.model.tensor_parallel import sharded
from oobleck.training.step.step_work import PipelineRank
from tests.training.model.test_adapters import adapted
from tests.training.step.test_experts import mixture
from tests.training.step.test_node_sums import KEY, LEVELS, SHORT, Device, devices_of, on_all
from tests.training.zoo import VOCAB_SIZE, structure_of, whole_stage

LENGTH = 16
_SIZES: dict[str, Scalar] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
FAMILIES: dict[str, dict[str, Scalar]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "llama": _SIZES,
    "mistral": {**_SIZES, "sliding_window": 5},
    "qwen3": {**_SIZES, "head_dim": 8},
    "gemma": {**_SIZES, "num_key_value_heads": 1, "head_dim": 8},
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "is_decoder": True},
}


def of_length(structure: ModelStructure, length: int = LENGTH) -> ModelStructure:
    return replace(structure, sequence_length=length, drops=False)


def structure_for(family: str) -> ModelStructure:
    if family == "lora":
        return of_length(adapted("llama", LoraSpec(r=4)))
    if family in ("mixtral", "deepseek_v3"):
        return of_length(mixture(family))
    return made_of(family, FAMILIES[family])


def made_of(family: str, sizes: dict[str, Scalar]) -> ModelStructure:
    spec = ModelSpec(type=family, task="causal_lm", config=sizes)
    return of_length(ModelStructure.from_spec(spec, vocab_size=VOCAB_SIZE, sequence_length=LENGTH))


def batch_of(seed: int) -> Batch:
    """Some labels do not count, among them the first of the second half."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB_SIZE, (2, LENGTH), generator=generator)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, IGNORED_LABEL)
    labels[0, LENGTH // 2] = IGNORED_LABEL
    return Batch(input_ids=ids, labels=labels)


def step(devices: list[Device], seeds: range, num_items: int) -> float:
    """The devices of each lane compute its microbatches together; returns the sum of all losses."""
    losses = [0.0] * len(devices)

    def run(device: Device) -> None:
        share = device.state.share
        lane, num_lanes = share.lane
        device.node_sums.begin()
        with device.node_sums.casting():
            for seed in seeds[lane::num_lanes]:
                own = batch_of(seed).part(*share.part)
                losses[share.rank] += device.compute(own, num_items=num_items)
        device.node_sums.conclude()

    on_all(devices, run)
    return sum(losses)


def alone(structure: ModelStructure, seeds: range, num_items: int) -> tuple[float, dict[str, nn.Parameter]]:
    stage = whole_stage(structure, dtype=torch.float64)
    losses = [stage.forward(batch_of(seed), None, num_items=num_items, key=KEY) for seed in seeds]
    loss: Any = torch.stack(losses).sum()
    loss.backward()
    return float(loss.detach()), stage.parameters


def assert_gradients(devices: list[Device], parameters: dict[str, nn.Parameter]) -> None:
    for device in devices:
        for name, share in device.state.parameters.items():
            gradient = parameters[name].grad
            assert (share.grad is None) == (gradient is None), name
            if gradient is not None:
                rows = device.state.share.part_of(name, gradient)
                torch.testing.assert_close(share.grad, rows, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("sharding", LEVELS)
@pytest.mark.parametrize("family", [*FAMILIES, "lora", "mixtral", "deepseek_v3"])
def test_devices_that_share_samples_compute_what_one_device_computes(family: str, sharding: Sharding) -> None:
    """Two lanes of two devices; of mixtures, experts stay on their devices."""
    structure, seeds = structure_for(family), range(4)
    num_items = sum(batch_of(seed).num_items for seed in seeds)
    experts = family in ("mixtral", "deepseek_v3")
    devices = devices_of(structure, degree=4, sharding=sharding, context_parallel=2, expert_parallel=experts)
    expected, parameters = alone(structure, seeds, num_items)
    assert step(devices, seeds, num_items) == pytest.approx(expected, rel=1e-6 if family == "gemma" else 1e-9)
    assert_gradients(devices, parameters)
    assert len({tuple(device.collectives.posted) for device in devices}) == 1


@pytest.mark.parametrize("recompute", ["selective", "all"])
def test_blocks_that_are_computed_again_exchange_their_heads_again(recompute: Recompute) -> None:
    """Four devices share each sample, and two heads of keys."""
    structure, seeds = structure_for("llama"), range(2)
    num_items = sum(batch_of(seed).num_items for seed in seeds)
    devices = devices_of(structure, degree=4, sharding="all", context_parallel=4, recompute=recompute)
    expected, parameters = alone(structure, seeds, num_items)
    assert step(devices, seeds, num_items) == pytest.approx(expected, rel=1e-9)
    assert_gradients(devices, parameters)


def test_in_short_types_devices_that_share_samples_compute_about_the_same() -> None:
    structure, seeds = structure_for("llama"), range(2)
    num_items = sum(batch_of(seed).num_items for seed in seeds)
    devices = devices_of(structure, degree=2, sharding="gradients", context_parallel=2, precision=SHORT)
    expected, _ = alone(structure, seeds, num_items)
    assert step(devices, seeds, num_items) == pytest.approx(expected, rel=0.01)


def test_parts_have_all_labels_that_count_once_and_positions_of_the_whole() -> None:
    batch = batch_of(3)
    parts = [batch.part(index, 4) for index in range(4)]
    assert sum(part.num_items for part in parts) == batch.num_items
    assert torch.equal(torch.cat([part.input_ids for part in parts], 1), batch.input_ids)
    assert torch.equal(torch.cat([part.labels[:, 1:] for part in parts], 1)[:, :-1], batch.labels[:, 1:])
    assert torch.equal(
        torch.cat([part.others["position_ids"] for part in parts], 1), torch.arange(LENGTH).expand(2, -1)
    )


@pytest.mark.parametrize(
    "others",
    [
        {"position_ids": torch.arange(LENGTH).expand(2, -1)},
        {"attention_mask": (torch.arange(LENGTH) < 12).expand(2, -1).long()},
    ],
    ids=["positions", "padding"],
)
def test_columns_that_say_what_is_so_anyway_are_taken(others: dict[str, torch.Tensor]) -> None:
    ids = batch_of(0).input_ids
    labels = ids.masked_fill(torch.arange(LENGTH) >= 12, IGNORED_LABEL)
    whole = Batch(input_ids=ids, labels=labels)
    stage = whole_stage(structure_for("llama"), dtype=torch.float64)
    loss = stage.forward(replace(whole, others=others), None, num_items=10, key=KEY)
    torch.testing.assert_close(stage.forward(whole, None, num_items=10, key=KEY), loss)
    assert list(replace(whole, others=others).part(1, 2).others) == ["position_ids"]


@pytest.mark.parametrize(
    ("others", "name"),
    [
        ({"position_ids": (torch.arange(LENGTH) % 8).expand(2, -1)}, "position_ids"),
        ({"attention_mask": (torch.arange(LENGTH) >= 4).expand(2, -1).long()}, "attention_mask"),
        ({"attention_mask": (torch.arange(LENGTH) < 12).expand(2, -1).long()}, "attention_mask"),
        ({"token_type_ids": torch.zeros((2, LENGTH), dtype=torch.int64)}, "token_type_ids"),
    ],
    ids=["documents", "padding-first", "labels-of-padding", "types"],
)
def test_samples_whose_tokens_do_not_see_all_before_them_are_refused(
    others: dict[str, torch.Tensor], name: str
) -> None:
    ids = batch_of(0).input_ids
    with pytest.raises(ConfigError, match=f"context_parallel: samples with {name}"):
        Batch(input_ids=ids, labels=ids, others=others).part(0, 2)


class Looking(nn.Module):
    """A part of a block in which tokens see those before them."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + 0.5 * torch.roll(hidden, 1, dims=1)


def with_made(structure: ModelStructure, change: Any) -> ModelStructure:
    def make(dtype: torch.dtype) -> Any:
        model = structure.make(dtype)
        change(model)
        return model

    return replace(structure, make=make)


def looks_back(model: Any) -> None:
    block = model.model.layers[0]
    block.post_attention_layernorm.register_forward_hook(lambda _module, _args, output: Looking()(output))


@pytest.mark.parametrize(
    ("make", "degree", "words"),
    [
        (
            lambda: replace(structure_for("gpt2"), drops=True),
            2,
            "it has dropout, which would depend on the devices; set `dropout: false`",
        ),
        (lambda: of_length(structure_of("bert")), 2, "its loss is not the standard one"),
        (lambda: structure_for("llama"), 3, "data.sequence_length: 16 is no multiple of 3"),
        (lambda: of_length(structure_for("llama"), 24), 8, "8 devices cannot share its 4 heads of queries"),
        (lambda: of_length(mixture("gpt_oss")), 2, "its attention is not computed by sdpa"),
        (
            lambda: made_of("falcon", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}),
            2,
            "its attention can be computed by nothing but its own code",
        ),
        # It counts positions from the number after that of its padding.
        (lambda: made_of("roberta", FAMILIES["bert"]), 2, "what embedding computes of a token depends on positions"),
        (lambda: with_made(structure_for("llama"), looks_back), 2, "depends on others, beside attention"),
    ],
    ids=["dropout", "masked", "length", "heads", "sinks", "own-attention", "positions", "looks-back"],
)
def test_models_whose_samples_cannot_be_shared_are_refused_by_name(make: Any, degree: int, words: str) -> None:
    with pytest.raises(ConfigError, match=f"context_parallel: .*{words}"):
        sharded(make(), rank=0, degree=degree, sharding="all", context_parallel=degree)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_positions_that_depend_on_the_length_are_refused(kind: str) -> None:
    structure = structure_for("llama")
    structure.config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ConfigError, match="its rotary positions depend on the length of a sample"):
        sharded(structure, rank=0, degree=2, sharding="all", context_parallel=2)


def test_one_of_the_devices_that_share_a_microbatch_counts_it() -> None:
    structure = structure_for("llama")
    shares = [sharded(structure, rank=rank, degree=4, sharding="all", context_parallel=2) for rank in range(4)]
    alone: dict[str, Any] = {
        "stage": 0,
        "num_stages": 1,
        "group": None,
        "schedule": ScheduleKind.ONE_F_ONE_B,
        "is_sharded": True,
    }
    ranks = [PipelineRank(rank=each.rank, degree=each.degree, part=each.part, **alone) for each in shares]
    assert [share.lane for share in shares] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [(rank.reports, rank.counts) for rank in ranks] == [(True, True), (True, False)] * 2
