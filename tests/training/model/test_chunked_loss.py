"""The standard loss of a language model by chunks of tokens: the same numbers, without all logits at once."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oobleck.job import ModelSpec
from oobleck.planner import device_sheet, estimate_profile, shape_from_config
from oobleck.training.data import IGNORED_LABEL, Batch
from oobleck.training.model import MicrobatchKey, ModelStructure, StageModel

BATCH, LENGTH, VOCABULARY, HIDDEN = 2, 64, 500, 32
NUM_ITEMS = 100
CHUNKED = 5000  # logits, of ten tokens, which do not divide the 128
_LLAMA = {
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
_GPT2 = {"n_embd": HIDDEN, "n_layer": 1, "n_head": 2, "n_positions": LENGTH}


@dataclass
class LargestTensor(TorchDispatchMode):
    """Notes the most elements in memory of any tensor that is made."""

    num_elements: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor) and each.ndim:
                self.num_elements = max(self.num_elements, each.untyped_storage().nbytes() // each.element_size())
        return out


def stage_of(model: str, *, max_logits: int, dtype: torch.dtype = torch.float32, **options: Any) -> StageModel:
    config: dict[str, Any] = _GPT2 if model == "gpt2" else {**_LLAMA, "tie_word_embeddings": False}
    spec = ModelSpec(type=model, config=config)
    structure = ModelStructure.from_spec(spec, vocab_size=VOCABULARY, sequence_length=LENGTH)
    stage = StageModel(structure, dtype=dtype, device="cpu", max_logits=max_logits, **options)
    stage.adopt(0, structure.num_layers, {})
    stage.initialize(range(structure.num_layers), seed=0)
    return stage


def batch() -> Batch:
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, :5] = IGNORED_LABEL
    return Batch(input_ids=tokens, labels=labels)


def loss_of(stage: StageModel) -> torch.Tensor:
    key = MicrobatchKey(seed=0, step=1, microbatch=0)
    return stage.forward(batch(), None, num_items=NUM_ITEMS, key=key)


def trained(stage: StageModel) -> tuple[float, dict[str, torch.Tensor]]:
    with stage.casting_once():
        loss = loss_of(stage)
        loss.backward()
    gradients = {name: each.grad for name, each in stage.trained_parameters.items() if each.grad is not None}
    assert len(gradients) == len(stage.trained_parameters)
    return loss.item(), gradients


def logits_at_once(stage: StageModel) -> int:
    with LargestTensor() as largest:
        trained(stage)
    return largest.num_elements


@pytest.mark.parametrize(
    ("model", "dtype", "autocast", "tolerance"),
    [
        ("llama", torch.float64, None, 1e-14),
        ("llama", torch.float32, None, 1e-6),
        ("gpt2", torch.float32, None, 1e-6),
        ("mixtral", torch.float32, None, 1e-6),
        # The whole gradient of the weight is rounded to bfloat16 once, and that of each chunk here.
        ("llama", torch.float32, torch.bfloat16, 4e-3),
    ],
)
def test_chunks_give_the_loss_and_the_gradients_of_the_whole(
    model: str, dtype: torch.dtype, autocast: torch.dtype | None, tolerance: float
) -> None:
    whole, chunked = (
        trained(stage_of(model, dtype=dtype, autocast=autocast, max_logits=limit)) for limit in (1 << 27, CHUNKED)
    )
    assert chunked[0] == pytest.approx(whole[0], rel=min(tolerance, 1e-6))
    for name, gradient in whole[1].items():
        assert (chunked[1][name] - gradient).norm() <= tolerance * gradient.norm(), name


def test_no_more_logits_are_in_memory_than_those_of_a_chunk() -> None:
    of_weight = VOCABULARY * HIDDEN
    assert logits_at_once(stage_of("llama", max_logits=1 << 27)) >= BATCH * LENGTH * VOCABULARY
    assert logits_at_once(stage_of("llama", max_logits=CHUNKED)) <= of_weight


@pytest.mark.parametrize("model", ["gemma2", "granite", "cohere"])
def test_a_model_that_changes_its_logits_has_them_whole(model: str) -> None:
    """It caps or scales what its head returns."""
    whole, limited = (trained(stage_of(model, max_logits=limit)) for limit in (1 << 27, CHUNKED))
    assert limited[0] == whole[0]
    assert logits_at_once(stage_of(model, max_logits=CHUNKED)) >= BATCH * LENGTH * VOCABULARY


def test_the_loss_scale_comes_before_short_types() -> None:
    """In float16, gradients that are scaled afterwards have vanished."""
    gradients = []
    for scale in (1.0, 2.0**15):
        stage = stage_of("llama", autocast=torch.float16, max_logits=CHUNKED)
        stage.loss_scale = scale
        gradients.append(trained(stage)[1]["model.layers.0.self_attn.v_proj.weight"] / scale)
    exact = trained(stage_of("llama", max_logits=CHUNKED))[1]["model.layers.0.self_attn.v_proj.weight"]
    errors = [((each - exact).norm() / exact.norm()).item() for each in gradients]
    assert errors[1] < 3e-3
    assert errors[1] < errors[0]


def test_a_hook_on_the_weight_sees_the_gradient_once() -> None:
    stage = stage_of("llama", max_logits=CHUNKED)
    seen: list[torch.Tensor] = []
    stage.parameters["lm_head.weight"].register_hook(seen.append)
    trained(stage)
    assert len(seen) == 1


def test_an_evaluation_computes_no_gradients() -> None:
    stage = stage_of("llama", max_logits=CHUNKED)
    with torch.no_grad():
        loss = loss_of(stage)
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(loss_of(stage_of("llama", max_logits=1 << 27)).item(), rel=1e-6)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes that are made while it is entered and still in memory, and the most at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def _forget(self, at: int, size: int) -> None:
        self._known.discard(at)
        self.now -= size

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
        }
        out = op(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            storage = each.untyped_storage() if isinstance(each, torch.Tensor) else None
            if storage is None or not storage.nbytes() or storage.data_ptr() in self._known | given:
                continue
            self._known.add(storage.data_ptr())
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, storage.data_ptr(), storage.nbytes())
        return out


@pytest.mark.parametrize(
    ("model", "hidden", "autocast"),
    [("llama", 64, None), ("llama", 64, torch.bfloat16), ("llama", 16, torch.bfloat16), ("gpt2", 64, None)],
)
def test_a_head_keeps_and_takes_what_estimates_say_and_no_microbatch_leaves_anything(
    model: str, hidden: int, autocast: torch.dtype | None
) -> None:
    """The wider head takes most for its gradient, the narrower one for the logits of a chunk."""
    vocabulary, max_logits, length = 4000, 160_000, 64
    size: dict[str, Any] = {"n_embd": hidden} if model == "gpt2" else {"hidden_size": hidden}
    config = {**(_GPT2 if model == "gpt2" else _LLAMA), **size, "tie_word_embeddings": False}
    structure = ModelStructure.from_spec(
        ModelSpec(type=model, config=config), vocab_size=vocabulary, sequence_length=length
    )
    stage = StageModel(structure, dtype=torch.float32, device="cpu", autocast=autocast, max_logits=max_logits)
    head = structure.num_layers - 1
    stage.adopt(head, head + 1, {})
    stage.initialize([head], seed=0)
    tokens = torch.randint(0, vocabulary, (BATCH, length), generator=torch.Generator().manual_seed(1))
    inputs = torch.randn(BATCH, length, hidden)

    def forward(number: int) -> torch.Tensor:
        key = MicrobatchKey(seed=0, step=1, microbatch=number)
        taken = inputs.to(stage.hidden_dtype).requires_grad_()
        return stage.forward(Batch(input_ids=tokens, labels=tokens), taken, num_items=NUM_ITEMS, key=key)

    with stage.casting_once():
        forward(0).backward()
        with LiveBytes() as live:
            loss = forward(1)
            kept, peak = live.now, live.peak
            loss.backward()
            del loss
            left = live.now
            forward(2).backward()
            assert live.now <= left + 1000, "whatever a microbatch leaves is there as often as there are microbatches"
    shape = shape_from_config(
        {"model_type": model, "vocab_size": vocabulary, "max_position_embeddings": length, **config}
    )
    layer = estimate_profile(
        shape,
        device_sheet("H100"),
        microbatch_size=BATCH,
        sequence_length=length,
        precision="float32" if autocast is None else "bfloat16",
        max_logits=max_logits,
    ).layers[-1]
    assert layer.activation_bytes == pytest.approx(kept, rel=0.1)
    assert layer.transient_bytes == pytest.approx(peak - kept, rel=0.12)
