from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_outputs import BaseModelOutput

from oobleck.training.data.batches import Batch
from oobleck.training.model.stage_modules import trace_forward
from oobleck.training.model.structure import ModelStructure
from tests.training.zoo import (
    KEY,
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

_TOKENS = [torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64)]


class _Block(nn.Module):
    def forward(self, hidden: torch.Tensor, _mask: Any = None, **_others: Any) -> tuple[torch.Tensor]:
        return (hidden + 1,)


class _HidingTrunk(LlamaModel):
    """Its masks depend on the tokens."""

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids=input_ids, **{**options, "attention_mask": input_ids != 0})


class _HidingHead(LlamaForCausalLM):
    """Its head says which tokens are hidden."""

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids=input_ids, attention_mask=input_ids != 0, **options)


_CONFIG = LlamaConfig(
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=64,
    vocab_size=VOCAB_SIZE,
)


def _hiding_in_its_trunk() -> LlamaForCausalLM:
    model = LlamaForCausalLM(_CONFIG)
    model.model = _HidingTrunk(_CONFIG)
    return model


def _structure(factory: Callable[[], LlamaForCausalLM]) -> ModelStructure:
    return ModelStructure.from_factory(factory, vocab_size=VOCAB_SIZE, sequence_length=SEQUENCE_LENGTH)


def _find(run: Any, probes: list[nn.Module]) -> Any:
    return trace_forward(probes, run, _TOKENS)


@pytest.mark.parametrize("name", ["gpt2-dropout", "llama", "gemma3", "mixtral", "opt", "bert"])
def test_stages_after_the_first_have_masks_and_tables_made_once(name: str):
    structure = structure_of(name)
    stages = stages_of(structure, [2, 3], state_of(whole_stage(structure)), dtype=torch.float32)
    batches = [random_batch(seed, is_causal=structure.task == "causal_lm") for seed in (1, 2)]
    run_pipeline(stages, batches[0])
    calls: list[str] = []
    for number, stage in enumerate(stages):
        for root in structure.anatomy.prelude:
            module = stage.model.get_submodule(root)
            module.register_forward_hook(lambda *_, root=root, number=number: calls.append(f"{number}:{root}"))
    run_pipeline(stages, batches[1])
    # OPT's head calls the decoder past the model without a head, so its last stage goes the long way.
    expected = {"0", "2"} if name == "opt" else {"0"}
    assert {call.partition(":")[0] for call in calls} == expected


def test_where_masks_depend_on_tokens_they_are_made_for_each_microbatch():
    structure = _structure(_hiding_in_its_trunk)
    whole = whole_stage(structure)
    stages = stages_of(structure, [2], state_of(whole), dtype=torch.float32)
    for seed in (1, 2, 3):
        batch = random_batch(seed)
        batch.input_ids[:, seed] = 0
        assert torch.equal(run_pipeline(stages, batch), run_pipeline([whole], batch))
    expected = gradients_of([whole])
    assert [name for name, value in gradients_of(stages).items() if not torch.equal(value, expected[name])] == []


def test_what_a_head_says_of_the_tokens_is_heard():
    structure = _structure(lambda: _HidingHead(_CONFIG))
    last = stages_of(structure, [2], state_of(whole_stage(structure)), dtype=torch.float32)[1]
    batch = random_batch(1)
    hidden = torch.randn(2, SEQUENCE_LENGTH, 32, generator=torch.Generator().manual_seed(0))

    def loss(ids: torch.Tensor) -> float:
        return float(last.forward(Batch(input_ids=ids, labels=batch.labels), hidden, num_items=1, key=KEY).detach())

    hiding = batch.input_ids.clone()
    hiding[:, 3] = 0
    losses = [loss(ids) for ids in (batch.input_ids, hiding, batch.input_ids, hiding)]
    assert losses[0] == losses[2] != losses[1] == losses[3]


def test_a_way_is_followed_with_what_was_handed_over():
    probes: list[nn.Module] = [_Block(), _Block()]

    def run(_ids: torch.Tensor) -> BaseModelOutput:
        hidden = probes[0](torch.zeros(1), torch.ones(2), name="x")[0]
        return BaseModelOutput(last_hidden_state=probes[1](hidden=hidden, mask=(None, 2.0))[0])

    way = _find(run, probes)
    assert [call.hidden_name for call in way.calls] == [None, "hidden"]
    assert torch.equal(way.calls[0].arguments[0], torch.ones(2))
    assert way.calls[1].keywords == {"mask": (None, 2.0)}
    output = way.follow(probes, torch.full((1,), 5.0))
    assert isinstance(output, BaseModelOutput)
    assert torch.equal(output.last_hidden_state, torch.full((1,), 7.0))


@pytest.mark.parametrize(
    "handed_over",
    [
        lambda ids: ids,
        lambda ids: [{"length": int(ids.sum())}],
        lambda _ids: object(),
        lambda _ids: torch.ones(1, requires_grad=True),
    ],
    ids=["a tensor of the tokens", "a number of the tokens", "something else", "a gradient"],
)
def test_what_may_change_is_not_remembered(handed_over: Any):
    block = _Block()

    def run(ids: torch.Tensor) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=block(torch.zeros(1), handed_over(ids))[0])

    assert _find(run, [block]) is None


def test_there_is_no_way_through_modules_that_are_not_called_in_turn_or_give_out_more():
    probes: list[nn.Module] = [_Block(), _Block()]
    hidden = torch.zeros(1)

    def run(order: list[int], **others: Any) -> Any:
        for index in order:
            probes[index](hidden)
        return BaseModelOutput(last_hidden_state=hidden, **others)

    assert _find(lambda _: run([0, 1]), probes) is not None
    assert _find(lambda _: run([1, 0]), probes) is None
    assert _find(lambda _: run([0, 1, 1]), probes) is None
    assert _find(lambda _: run([0, 1], attentions=(hidden,)), probes) is None
    assert _find(lambda _: run([0, 1]) and SimpleNamespace(last_hidden_state=hidden), probes) is None
