"""Every family computes on a device that is not the host's: nothing in a pass is made on the host, or asked back."""

from __future__ import annotations

import pytest
import torch
from transformers import masking_utils

from oobleck.training.model.models import StageModel
from tests.training.zoo import KEY, SPECS, random_batch, structure_of

META = torch.device("meta")
"""Its tensors have no values. As with CUDA's, an operation on one of them and one of the host's is an error."""


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("family", SPECS)
def test_a_pass_makes_nothing_on_the_host_and_asks_the_device_nothing(
    family: str, recomputes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The one question that transformers itself asks, whether samples are packed; docs/gpu.md names it.
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda _: None)
    structure = structure_of(family)
    stage = StageModel(structure, dtype=torch.bfloat16, device=META, recompute="all" if recomputes else "none")
    stage.adopt(0, structure.num_layers, {})
    batch = random_batch(1, is_causal=structure.task == "causal_lm")
    loss = stage.forward(batch.to(META), None, num_items=batch.num_items, key=KEY)
    assert loss.device == META
    loss.backward()  # type: ignore[no-untyped-call]
    assert {parameter.grad.device for parameter in stage.parameters.values() if parameter.grad is not None} == {META}
