"""Devices that share a stage compute what one device computes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce

import pytest
import torch

from oobleck.errors import ConfigError
from oobleck.training.data.batches import IGNORED_LABEL, Batch
from oobleck.training.model.models import StageModel
from oobleck.training.model.tensor_parallel import Share, initialize_share, install, share_of
from oobleck.training.randomness import MicrobatchKey
from tests.training.zoo import random_batch, structure_of, whole_stage

DEGREE = 2
FAMILIES = ("llama", "llama-tied", "qwen3", "gpt_neox", "olmo2")


class Sums:
    """Sums among threads of this process, each of which is a device."""

    def __init__(self, degree: int) -> None:
        self._parts: list[torch.Tensor] = []
        self._barrier = threading.Barrier(degree)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        self._parts.append(tensor.clone())
        self._barrier.wait(60)
        total = reduce(torch.add, self._parts)  # as the libraries do: -0.0 stays what it is
        if self._barrier.wait(60) == 0:
            self._parts.clear()
        self._barrier.wait(60)
        return tensor.copy_(total)


def gradients(stage: StageModel, batch: Batch | None = None) -> tuple[float, dict[str, torch.Tensor]]:
    batch = batch or random_batch(3)
    loss = stage.forward(batch, None, num_items=batch.num_items, key=MicrobatchKey(seed=0, step=1, microbatch=0))
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in stage.parameters.items() if p.grad is not None}


def shared_stage(family: str, rank: int, sums: Sums) -> tuple[Share, StageModel]:
    whole = structure_of(family)
    share = share_of(whole, rank=rank, degree=DEGREE)
    stage = StageModel(share.structure, dtype=torch.float64, device="cpu")
    install(stage, share, sums)
    stage.adopt(0, whole.num_layers, {})
    initialize_share(stage, share, whole, range(whole.num_layers), seed=0)
    return share, stage


def padded_batch() -> Batch:
    whole = random_batch(3)
    mask = torch.ones_like(whole.input_ids)
    mask[:, :5] = 0
    return replace(whole, labels=whole.labels.masked_fill(mask == 0, IGNORED_LABEL), others={"attention_mask": mask})


def test_masks_are_those_of_all_devices_that_share_a_stage() -> None:
    loss, expected = gradients(whole_stage(structure_of("llama"), dtype=torch.float64), padded_batch())
    assert loss != gradients(whole_stage(structure_of("llama"), dtype=torch.float64))[0]
    sums = Sums(DEGREE)
    ranks = [shared_stage("llama", rank, sums) for rank in range(DEGREE)]
    with ThreadPoolExecutor(DEGREE) as pool:
        results = list(pool.map(lambda rank: gradients(rank[1], padded_batch()), ranks))
    for (share, _), (own_loss, found) in zip(ranks, results, strict=True):
        assert own_loss == pytest.approx(loss, rel=1e-12)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, share.part_of(name, expected[name]), rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("backward_on")
@pytest.mark.parametrize("family", FAMILIES)
def test_shares_of_gradients_are_those_of_the_whole_model(family: str) -> None:
    loss, expected = gradients(whole_stage(structure_of(family), dtype=torch.float64))
    sums = Sums(DEGREE)
    ranks = [shared_stage(family, rank, sums) for rank in range(DEGREE)]
    assert all(share.cut_dimensions for share, _ in ranks), "something is shared"
    with ThreadPoolExecutor(DEGREE) as pool:
        results = list(pool.map(lambda rank: gradients(rank[1]), ranks))
    for (share, _), (own_loss, found) in zip(ranks, results, strict=True):
        assert own_loss == pytest.approx(loss, rel=1e-12)
        for name, gradient in found.items():
            if name in share.summed:
                continue
            torch.testing.assert_close(gradient, share.part_of(name, expected[name]), rtol=1e-9, atol=1e-12)
    for name in ranks[0][0].summed:
        total = sum(found[name] for _, found in results)
        torch.testing.assert_close(total, expected[name], rtol=1e-9, atol=1e-12)


def test_a_model_without_a_plan_says_so() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel: gpt2"):
        share_of(structure_of("gpt2"), rank=0, degree=2)


def test_heads_are_not_cut() -> None:
    with pytest.raises(ConfigError, match="llama"):
        share_of(structure_of("llama"), rank=0, degree=4)


class _Counted:
    """Stands for a group of one device; keeps what was summed."""

    def __init__(self) -> None:
        self.dtypes: list[torch.dtype] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        self.dtypes.append(tensor.dtype)
        return tensor


@pytest.mark.usefixtures("backward_on")
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_block_sums_twice_forward_and_twice_backward_in_the_type_it_computes_in(recomputes: bool) -> None:
    """As Megatron does. A sum for each module that is cut by columns made five of them backward, in float32."""
    whole = structure_of("llama")
    share, sums = share_of(whole, rank=0, degree=DEGREE), _Counted()
    stage = StageModel(
        share.structure,
        dtype=torch.float32,
        device="cpu",
        autocast=torch.bfloat16,
        activation_checkpointing=recomputes,
    )
    install(stage, share, sums)
    stage.adopt(0, whole.num_layers, {})
    initialize_share(stage, share, whole, range(whole.num_layers), seed=0)
    batch = random_batch(3)
    loss = stage.forward(batch, None, num_items=batch.num_items, key=MicrobatchKey(seed=0, step=1, microbatch=0))
    assert sums.dtypes == [torch.bfloat16] * 2 * whole.num_blocks
    loss.backward()
    again = whole.num_blocks if recomputes else 0  # torch stops when it has what is needed, before a block's last sum
    assert sums.dtypes == [torch.bfloat16] * (4 * whole.num_blocks + again)
