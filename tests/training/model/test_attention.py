"""A job's implementation of attention is used, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from oobleck.errors import ConfigError
from oobleck.job import JobSpec
from oobleck.training.model.forward_passes import check_attention
from oobleck.training.model.models import StageModel
from tests.training.zoo import KEY, random_batch, state_of, structure_of, whole_stage


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_a_stage_computes_attention_as_it_is_told(name: str):
    structure = structure_of("llama")
    whole = whole_stage(structure)
    stage = StageModel(structure, dtype=torch.float32, device="cpu", attention=name)
    stage.adopt(0, structure.num_layers, state_of(whole))
    used: list[str] = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is kernel:
                used.append("sdpa")
            return func(*args, **(kwargs or {}))

    batch = random_batch(1)
    with Seen():
        loss = stage.forward(batch, None, num_items=batch.num_items, key=KEY)
    assert len(used) == (structure.num_blocks if name == "sdpa" else 0)
    expected = whole.forward(batch, None, num_items=batch.num_items, key=KEY)
    torch.testing.assert_close(loss, expected)


def test_what_a_model_or_a_node_does_not_have_is_refused_by_name():
    with pytest.raises(
        ConfigError, match=r"attn_implementation: \w+ForCausalLM cannot use flash_attention_2 here: .*installed"
    ):
        StageModel(structure_of("llama"), dtype=torch.float32, device="cpu", attention="flash_attention_2")


def test_what_transformers_would_replace_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(PreTrainedModel, "set_attn_implementation", lambda *_: None)  # as where it only warns
    with pytest.raises(ConfigError, match="cannot use eager here: transformers would take sdpa"):
        StageModel(structure_of("llama"), dtype=torch.float32, device="cpu", attention="eager")


def test_flash_attention_needs_a_gpu_and_a_short_type():
    JobSpec(attn_implementation="flash_attention_2", device="cuda", dtype="bfloat16")
    for others in ({}, {"device": "cuda"}, {"dtype": "bfloat16"}):
        with pytest.raises(ConfigError, match=r"attn_implementation.*eager or sdpa"):
            JobSpec(attn_implementation="flash_attention_2", **others)  # type: ignore[arg-type]


def test_masks_that_flash_attention_would_ignore_are_refused():
    """Tokens would attend to other documents."""
    batch = random_batch(1)
    positions = torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids)
    packed = replace(batch, others={"position_ids": positions})
    masked = replace(batch, others={"attention_mask": torch.ones(len(positions), 1, 4, 4)})
    for name in (None, "sdpa"):
        check_attention(name, packed)
        check_attention(name, masked)
    check_attention("flash_attention_2", batch)
    with pytest.raises(ConfigError, match="microbatch_size of 1"):
        check_attention("flash_attention_2", packed)
    with pytest.raises(ConfigError, match="attention_mask of 4 dimensions"):
        check_attention("flash_attention_2", masked)
