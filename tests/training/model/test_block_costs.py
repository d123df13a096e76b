"""What a block costs a device, counted on a CPU: the kernels that it launches, the bytes that they move, and the bytes
that it keeps for its backward pass, which the planner's estimates must know."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oobleck.job import ModelSpec, Recompute
from oobleck.planner import device_sheet, estimate_profile, shape_from_config
from oobleck.training.data import Batch
from oobleck.training.model import MicrobatchKey, ModelStructure, StageModel
from oobleck.training.process.allocated import Allocated

BATCH, LENGTH, VOCABULARY = 2, 128, 500
NUM_BLOCKS = 2
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 64,
        "intermediate_size": 224,
        "num_hidden_layers": NUM_BLOCKS,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
    },
    "gpt2": {
        "n_embd": 64,
        "n_layer": NUM_BLOCKS,
        "n_head": 4,
        "n_positions": 1024,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}


def blocks(model: str, autocast: torch.dtype | None, *, recompute: Recompute = "none", **config: Any) -> StageModel:
    """A stage of all blocks of a model, without its embedding and head."""
    spec = ModelSpec(type=model, config={**CONFIGS[model], **config})
    structure = ModelStructure.from_spec(spec, vocab_size=VOCABULARY, sequence_length=LENGTH)
    stage = StageModel(structure, dtype=torch.float32, device="cpu", autocast=autocast, recompute=recompute)
    stage.adopt(1, 1 + NUM_BLOCKS, {})
    stage.initialize(range(1, 1 + NUM_BLOCKS), seed=0)
    return stage


@dataclass(frozen=True)
class Pass:
    """One microbatch through a stage."""

    stage: StageModel
    number: int
    hidden: torch.Tensor
    batch: Batch

    @classmethod
    def of(cls, stage: StageModel, number: int) -> Pass:
        generator = torch.Generator().manual_seed(number)
        hidden = torch.randn(BATCH, LENGTH, 64, generator=generator).requires_grad_()
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
        return cls(stage, number, hidden, Batch(input_ids=tokens, labels=tokens))

    def forward(self) -> torch.Tensor:
        key = MicrobatchKey(seed=0, step=1, microbatch=self.number)
        return self.stage.forward(self.batch, self.hidden, num_items=1, key=key)


@dataclass
class Kernels(TorchDispatchMode):
    """Counts what is launched while it is entered: operations that compute, and the bytes that they read and write."""

    names: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    weight_casts: int = 0
    weights: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if op.is_view or op.overloadpacket.__name__ in ("_unsafe_view", "empty", "empty_like", "empty_strided"):
            return out
        tensors = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, torch.Tensor)]
        self.names[op.overloadpacket.__name__] += 1
        self.num_bytes += sum(each.numel() * each.element_size() for each in tensors)
        if op.overloadpacket.__name__ == "_to_copy":
            self.weight_casts += any(each.untyped_storage().data_ptr() in self.weights for each in tensors)
        return out

    @property
    def a_block(self) -> tuple[float, float]:
        """Kernels, and bytes for each token and hidden unit."""
        return self.names.total() / NUM_BLOCKS, self.num_bytes / NUM_BLOCKS / (BATCH * LENGTH * 64)


BF16 = torch.bfloat16
COSTS = {
    # model, autocast, recomputed: kernels a block, and bytes for each token and hidden unit, forward and backward
    ("llama", BF16, False): (41.5, 244, 95.5, 597),
    ("llama", BF16, True): (41.5, 244, 134.5, 817),
    ("llama", None, False): (34, 307, 75, 705),
    ("gpt2", BF16, False): (25.5, 270, 55.5, 489),
    ("gpt2", BF16, True): (25.5, 270, 78.5, 740),
    ("gpt2", None, False): (23, 477, 43, 802),
}


@pytest.mark.parametrize(("model", "autocast", "recomputed"), COSTS)
def test_a_block_launches_no_more_kernels_and_moves_no_more_bytes_than_it_did(
    model: str, autocast: torch.dtype | None, recomputed: bool
) -> None:
    """Whoever makes it launch fewer changes the numbers here; more is a regression."""
    stage = blocks(model, autocast, recompute="all" if recomputed else "none")
    weights = frozenset(each.untyped_storage().data_ptr() for each in stage.parameters.values())
    with stage.casting_once():
        first, second = Pass.of(stage, 0), Pass.of(stage, 1)
        with Kernels(weights=weights) as casting:
            output = first.forward()
        output.sum().backward()
        with Kernels(weights=weights) as forward:
            output = second.forward()
        gradient = torch.ones_like(output)
        with Kernels(weights=weights) as backward:
            output.backward(gradient)
    assert (casting.weight_casts > 0) == (autocast is not None)
    assert forward.weight_casts == backward.weight_casts == 0, "weights are cast once for all microbatches"
    kernels, num_bytes, backward_kernels, backward_bytes = COSTS[model, autocast, recomputed]
    assert forward.a_block[0] <= kernels, forward.names
    assert backward.a_block[0] <= backward_kernels, backward.names
    assert forward.a_block[1] <= num_bytes
    assert backward.a_block[1] <= backward_bytes


@pytest.mark.parametrize("autocast", [BF16, None])
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_estimates_know_what_a_block_moves_and_keeps_where_it_recomputes_some(
    model: str, autocast: torch.dtype | None
) -> None:
    stage, moved = blocks(model, autocast, recompute="auto"), {}
    for level in ("none", "selective"):
        for layer in stage.layers:
            stage.set_recomputation(layer, level)
        with stage.casting_once():
            Pass.of(stage, 0).forward().sum().backward()
            with Allocated() as allocated:
                output = Pass.of(stage, 1).forward()
            kept = allocated.num_bytes - output.nbytes
            with Kernels() as backward:
                output.backward(torch.ones_like(output))
        moved[level] = backward.a_block[1]
    shape = shape_from_config({"model_type": model, "vocab_size": VOCABULARY, **CONFIGS[model]})
    precision = "float32" if autocast is None else "bfloat16"
    sheet = device_sheet("H100")
    block = estimate_profile(
        shape,
        sheet,
        microbatch_size=BATCH,
        sequence_length=LENGTH,
        precision=precision,
        recompute="auto",
    ).layers[1].recomputed["selective"]  # fmt: skip
    repeated = block.more_s[1] * sheet.memory_bytes_per_s / (BATCH * LENGTH * 64)
    assert repeated == pytest.approx(moved["selective"] - moved["none"], rel=0.1)
    assert block.activation_bytes == pytest.approx(kept / NUM_BLOCKS, rel=0.1)


def kept_bytes(stage: StageModel) -> float:
    """Bytes that a block keeps of one microbatch until its backward pass, without weights, cast or not."""

    def saved(run: Pass) -> dict[int, torch.Tensor]:
        storages: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run.forward()
        return storages

    with stage.casting_once():
        # All that two microbatches keep in the same place belongs to neither.
        first, second = saved(Pass.of(stage, 0)), saved(Pass.of(stage, 1))
    return sum(each.untyped_storage().nbytes() for at, each in second.items() if at not in first) / NUM_BLOCKS


@pytest.mark.parametrize("autocast", [BF16, None])
@pytest.mark.parametrize(("model", "dropout"), [("llama", 0.0), ("gpt2", 0.0), ("gpt2", 0.1)])
def test_estimates_know_what_a_block_keeps(model: str, dropout: float, autocast: torch.dtype | None) -> None:
    """Attention keeps no scores, so twice the length keeps twice as much; but with dropout on a CPU it does."""
    config = {} if model == "llama" else {"resid_pdrop": dropout, "attn_pdrop": dropout}
    shape = shape_from_config(
        {"model_type": model, "vocab_size": VOCABULARY, "max_position_embeddings": 1024, **CONFIGS[model]}
    )
    block = estimate_profile(
        shape,
        device_sheet("CPU" if dropout else "H100"),
        microbatch_size=BATCH,
        sequence_length=LENGTH,
        precision="float32" if autocast is None else "bfloat16",
    ).layers[1]
    masks = 0 if dropout or model == "llama" else 2 * BATCH * LENGTH * 64
    assert block.activation_bytes - masks == pytest.approx(kept_bytes(blocks(model, autocast, **config)), rel=0.05)
