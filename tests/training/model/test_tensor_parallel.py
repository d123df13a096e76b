"""Devices that share a stage compute what one device computes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest
import torch

from oobleck.errors import ConfigError
from oobleck.job import ModelSpec, Recompute
from oobleck.planner import MAX_LOGITS
from oobleck.training.data.batches import IGNORED_LABEL, Batch
from oobleck.training.model.models import StageModel
from oobleck.training.model.structure import ModelStructure
from oobleck.training.model.tensor_parallel import Share, initialize_share, install, share_of
from oobleck.training.randomness import MicrobatchKey
from tests.training.model.test_chunked_loss import LargestTensor
from tests.training.zoo import VOCAB_SIZE, random_batch, structure_of, whole_stage

DEGREE = 2
FAMILIES = ("llama", "llama-tied", "qwen3", "gpt_neox", "olmo2")


class Sums:
    """Collectives among threads of this process, each of which is a device."""

    def __init__(self, degree: int) -> None:
        self._parts: dict[int, torch.Tensor] = {}
        self._barrier = threading.Barrier(degree)

    def of(self, rank: int) -> DeviceSums:
        return DeviceSums(self, rank)

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return what all devices give, in their order."""
        self._parts[rank] = tensor.clone()
        self._barrier.wait(60)
        parts = [self._parts[each] for each in sorted(self._parts)]
        self._barrier.wait(60)
        return parts


class DeviceSums:
    """A device's."""

    def __init__(self, sums: Sums, rank: int) -> None:
        self._sums, self._rank = sums, rank

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        # As the libraries do: -0.0 stays what it is.
        return tensor.copy_(reduce(torch.add, self._sums.exchange(self._rank, tensor)))

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._sums.exchange(self._rank, own))

    def scatter(self, parts: torch.Tensor) -> torch.Tensor:
        return reduce(torch.add, self._sums.exchange(self._rank, parts))[self._rank]

    def exchange(self, rows: torch.Tensor, counts: Sequence[Sequence[int]]) -> torch.Tensor:
        sent = self._sums.exchange(self._rank, rows)
        return torch.cat([each.split(list(of))[self._rank] for each, of in zip(sent, counts, strict=True)])

    def read(self, tensor: torch.Tensor) -> Any:
        return tensor.tolist()


def gradients(stage: StageModel, batch: Batch | None = None) -> tuple[float, dict[str, torch.Tensor]]:
    batch = batch or random_batch(3)
    loss = stage.forward(batch, None, num_items=batch.num_items, key=MicrobatchKey(seed=0, step=1, microbatch=0))
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in stage.parameters.items() if p.grad is not None}


def shared_stage(
    family: str | ModelStructure, rank: int, sums: Sums, *, max_logits: int = MAX_LOGITS
) -> tuple[Share, StageModel]:
    whole = structure_of(family) if isinstance(family, str) else family
    share = share_of(whole, rank=rank, degree=DEGREE)
    stage = StageModel(share.structure, dtype=torch.float64, device="cpu", max_logits=max_logits)
    install(stage, share, sums.of(rank))
    stage.adopt(0, whole.num_layers, {})
    initialize_share(stage, share, stage.parameters, range(whole.num_layers), seed=0)
    return share, stage


def assert_alike(
    family: str | ModelStructure,
    batch: Batch | None,
    loss: float,
    expected: Mapping[str, torch.Tensor],
    *,
    max_logits: int = MAX_LOGITS,
) -> Share:
    """Have all devices of a stage compute what one has computed; return the first one's share."""
    sums = Sums(DEGREE)
    ranks = [shared_stage(family, rank, sums, max_logits=max_logits) for rank in range(DEGREE)]
    with ThreadPoolExecutor(DEGREE) as pool:
        results = list(pool.map(lambda rank: gradients(rank[1], batch), ranks))
    shares = [share for share, _ in ranks]
    assert_are_shares(shares, results, loss, expected)
    return shares[0]


def assert_are_shares(
    shares: Sequence[Share],
    results: Sequence[tuple[float, dict[str, torch.Tensor]]],
    loss: float,
    expected: Mapping[str, torch.Tensor],
) -> None:
    for share, (own_loss, found) in zip(shares, results, strict=True):
        assert own_loss == pytest.approx(loss, rel=1e-12)
        assert found.keys() == expected.keys()
        for name in found.keys() - share.summed:
            torch.testing.assert_close(found[name], share.part_of(name, expected[name]), rtol=1e-9, atol=1e-12)
    for name in shares[0].summed & expected.keys():
        total = sum(found[name] for _, found in results)
        torch.testing.assert_close(total, expected[name], rtol=1e-9, atol=1e-12)


def padded_batch() -> Batch:
    whole = random_batch(3)
    mask = torch.ones_like(whole.input_ids)
    mask[:, :5] = 0
    return replace(whole, labels=whole.labels.masked_fill(mask == 0, IGNORED_LABEL), others={"attention_mask": mask})


def test_masks_are_those_of_all_devices_that_share_a_stage() -> None:
    loss, expected = gradients(whole_stage(structure_of("llama"), dtype=torch.float64), padded_batch())
    assert loss != gradients(whole_stage(structure_of("llama"), dtype=torch.float64))[0]
    assert_alike("llama", padded_batch(), loss, expected)


@pytest.mark.usefixtures("backward_on")
@pytest.mark.parametrize("family", FAMILIES)
def test_shares_of_gradients_are_those_of_the_whole_model(family: str) -> None:
    loss, expected = gradients(whole_stage(structure_of(family), dtype=torch.float64))
    share = assert_alike(family, None, loss, expected)
    assert share.cut_dimensions, "something is shared"


WORDS = {
    "llama": {"model.embed_tokens.weight", "lm_head.weight"},
    "llama-tied": {"model.embed_tokens.weight"},
    "gpt_neox": {"gpt_neox.embed_in.weight", "lm_head.weight"},
}


@pytest.mark.parametrize("family", WORDS)
def test_embedding_and_head_are_cut_by_words(family: str) -> None:
    whole = structure_of(family)
    share = share_of(whole, rank=1, degree=DEGREE)
    for name in WORDS[family]:
        assert share.cut_dimensions[name] == 0
        assert share.structure.shapes[name][0] == whole.shapes[name][0] // DEGREE


def test_a_vocabulary_that_devices_cannot_divide_stays_whole() -> None:
    spec = ModelSpec(type="llama", config={"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1})
    structure = ModelStructure.from_spec(spec, vocab_size=37, sequence_length=8)
    assert not WORDS["llama"] & share_of(structure, rank=0, degree=DEGREE).cut_dimensions.keys()


def losses_of(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A script's own, which sees the logits of all words."""
    of_words = outputs.logits.logsumexp(-1) - 0.5 * outputs.logits[..., 0]
    return (of_words * (labels != IGNORED_LABEL)).sum() / num_items_in_batch


@pytest.mark.parametrize("takes_logits", [False, True])
@pytest.mark.parametrize("trains_head", [True, False])
def test_whoever_takes_logits_the_numbers_are_those_of_one_device(*, takes_logits: bool, trains_head: bool) -> None:
    """Ignored labels, several chunks of the loss, and a head that is not trained."""
    whole = structure_of("llama")
    if takes_logits:
        whole = replace(whole, compute_loss=losses_of, has_tried_loss=True)
    if not trains_head:
        whole = replace(whole, frozen=whole.frozen | {"lm_head.weight"})
    labels = random_batch(3).labels.clone()
    labels[:, :7] = IGNORED_LABEL
    batch = replace(random_batch(3), labels=labels)
    loss, expected = gradients(whole_stage(whole, dtype=torch.float64), batch)
    assert_alike(whole, batch, loss, expected, max_logits=200)


def test_no_device_has_the_logits_of_all_words() -> None:
    whole = structure_of("llama")
    num_logits = random_batch(3).labels.numel() * VOCAB_SIZE
    sums = Sums(DEGREE)
    ranks = [shared_stage(whole, rank, sums) for rank in range(DEGREE)]

    def largest(rank: int) -> int:
        with LargestTensor() as seen:
            gradients(ranks[rank][1])
        return seen.num_elements

    with ThreadPoolExecutor(DEGREE) as pool:
        assert max(pool.map(largest, range(DEGREE))) < num_logits


def test_a_model_without_a_plan_says_so() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel: gpt2"):
        share_of(structure_of("gpt2"), rank=0, degree=2)


def test_heads_are_not_cut() -> None:
    with pytest.raises(ConfigError, match="llama"):
        share_of(structure_of("llama"), rank=0, degree=4)


class Counted:
    """Stands for a group of devices that all have the same; keeps what was asked of it, with types and sizes."""

    def __init__(self) -> None:
        self.done: list[tuple[str, torch.dtype, int]] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        self.done.append(("sum", tensor.dtype, tensor.numel()))
        return tensor

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        self.done.append(("gather", own.dtype, DEGREE * own.numel()))
        return torch.stack([own] * DEGREE)

    def scatter(self, parts: torch.Tensor) -> torch.Tensor:
        self.done.append(("scatter", parts.dtype, parts.numel()))
        return parts[0].clone()


def counted_stage(share: Share, **options: Any) -> tuple[Counted, StageModel]:
    """All layers of a model in mixed precision, on the first of the devices."""
    sums = Counted()
    stage = StageModel(share.structure, dtype=torch.float32, device="cpu", autocast=torch.bfloat16, **options)
    install(stage, share, sums)
    stage.adopt(0, share.whole.num_layers, {})
    initialize_share(stage, share, stage.parameters, range(share.whole.num_layers), seed=0)
    return sums, stage


@pytest.mark.usefixtures("backward_on")
@pytest.mark.parametrize("recompute", ["none", "selective", "all"])
def test_a_block_moves_what_two_sums_forward_and_two_backward_do_in_the_type_it_computes_in(
    recompute: Recompute,
) -> None:
    """As Megatron does: a gather and a sum into shares are a sum. One for each module that is cut by columns made five
    of them backward, in float32."""
    whole = structure_of("llama")
    sums, stage = counted_stage(share_of(whole, rank=0, degree=DEGREE), recompute=recompute)
    batch = random_batch(3)
    loss = stage.forward(batch, None, num_items=batch.num_items, key=MicrobatchKey(seed=0, step=1, microbatch=0))
    tokens = batch.labels.numel()
    hidden = tokens * whole.hidden_size
    gather, scatter = ("gather", torch.bfloat16, hidden), ("scatter", torch.bfloat16, hidden)
    looked_up, at_the_head = ("sum", torch.float32, hidden), ("gather", torch.float32, hidden)
    # Of logits, what the loss takes of them; then the gradient of the head's input.
    of_loss = [("sum", torch.float32, tokens * (DEGREE + 1)), ("sum", torch.bfloat16, hidden)]
    block = [gather, scatter] * 2
    assert sums.done == [looked_up, *block * whole.num_blocks, at_the_head, *of_loss]
    sums.done.clear()
    loss.backward()
    # Torch stops when it has what is needed, before a block's last one.
    again = block[:3] if recompute != "none" else []
    one = [gather, *again, *block[1:]]
    assert sums.done == [*one * whole.num_blocks, ("gather", torch.float32, hidden)]
