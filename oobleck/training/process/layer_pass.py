"""One pass of a microbatch through a layer that is alone on its stage: how long it takes, and how much memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from oobleck.training import flow as flows
from oobleck.training.data import Batch
from oobleck.training.model import MicrobatchKey, StageModel

from .allocated import Allocated

Carried = flows.Carried

KEY = MicrobatchKey(seed=0, step=1, microbatch=0)


def run_pass(stage: StageModel, batch: Batch, received: Carried | None) -> tuple[float, float]:
    """Return the seconds of one forward and of one backward pass."""
    leaf = None if received is None else flows.leaf_of(received)
    with _timed_layer(stage) as forward_s:
        output = stage.carry(batch, leaf, num_items=max(1, batch.num_items), key=KEY)
    # What the stage after would send back.
    given = None if stage.is_last else [torch.full_like(each, 1 / each.numel()) for each in _carrying(output)]
    start_s = now_s(stage.device)
    flows.run_backward(output, given)
    return forward_s(), now_s(stage.device) - start_s


def _carrying(output: Carried) -> tuple[torch.Tensor, ...]:
    return (output,) if isinstance(output, torch.Tensor) else output.carrying


@contextmanager
def _timed_layer(stage: StageModel) -> Iterator[Callable[[], float]]:
    """Time the forward pass of the stage's only layer."""
    times: list[float] = []

    def note(*_: Any) -> None:
        times.append(now_s(stage.device))

    (layer,) = stage.layers
    is_block = not stage.is_first and not stage.is_last and stage.structure.flow is None
    handles = []
    # A block is timed from its call to its return: the model prepares masks and rotary tables once a stage, not once a
    # block. Embedding and head are charged with that.
    if is_block:
        (module,) = stage.modules_of(layer)
        # The hook precedes the stage's own, which is a part of running the layer.
        handles = [module.register_forward_pre_hook(note, prepend=True), module.register_forward_hook(note)]
    else:
        note()
    try:
        yield lambda: times[-1] - times[0]
        if not is_block:
            note()
    finally:
        for handle in handles:
            handle.remove()


def now_s(device: torch.device) -> float:
    """Return the time once the device has computed all that it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def memory_of_pass(
    stage: StageModel, batch: Batch, received: Carried | None, *, compiles: bool
) -> tuple[int, int, int]:
    """Return the bytes of a microbatch's activations, of weights that autocast casts once, and of transient memory."""
    received_bytes = batch.input_ids.numel() * stage.structure.hidden_size * stage.dtype.itemsize
    if isinstance(received, flows.Parcel):
        received_bytes = flows.num_bytes(received.tensors)
    with stage.casting_once():
        # Compiled code casts weights itself, for each microbatch.
        cast = {} if compiles else _cast_weights(stage, batch, received)
        kept = _kept(stage, batch, received)
        kept_bytes = sum(each.untyped_storage().nbytes() for address, each in kept.items() if address not in cast)
        # Autograd shows nothing of a block that recomputes, which keeps the hidden states it received.
        activation_bytes = max(kept_bytes, 0 if stage.is_first else received_bytes)
        if stage.recomputation(stage.layers[0]) == "selective":
            created_bytes = _created_bytes(stage, batch, received)
            is_copied = isinstance(received, torch.Tensor) and received.dtype != stage.dtype
            activation_bytes = created_bytes if is_copied else activation_bytes + created_bytes
        cast_bytes = sum(each.untyped_storage().nbytes() for each in cast.values())
        # Only a GPU's allocator knows its peak.
        on_gpu = stage.device.type == "cuda"
        peak = partial(_transient_bytes, stage, batch, received)
        return activation_bytes, cast_bytes, peak(activation_bytes) if on_gpu else 0


def _cast_weights(stage: StageModel, batch: Batch, received: Carried | None) -> dict[int, torch.Tensor]:
    """Return the copies of weights that autocast makes once, which two microbatches in flight share, by address."""
    if stage.autocast is None:
        return {}
    # One sample shows as much as many.
    sample = batch
    if stage.structure.whole_loss is None:
        sample = replace(
            batch,
            input_ids=batch.input_ids[:1],
            labels=batch.labels[:1],
            others={name: value[:1] for name, value in batch.others.items()},
        )
        received = received[:1] if isinstance(received, torch.Tensor) else None
    # Activation checkpointing hides the copies, and is off in evaluation.
    with stage.evaluating():
        first, second = _kept(stage, sample, received), _kept(stage, sample, received)
    return {address: each for address, each in first.items() if address in second and each.dtype == stage.autocast}


def _kept(stage: StageModel, batch: Batch, received: Carried | None) -> dict[int, torch.Tensor]:
    """Return what autograd keeps of one microbatch except parameters, by address: one tensor for all views."""
    known = {parameter.untyped_storage().data_ptr() for parameter in stage.parameters.values()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (address := tensor.untyped_storage().data_ptr()) not in known:
            kept[address] = tensor.detach()  # holds the memory, so that no later tensor gets the same address
        return tensor

    leaf = None if received is None else flows.leaf_of(received)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        stage.carry(batch, leaf, num_items=max(1, batch.num_items), key=KEY)
    return kept


def _created_bytes(stage: StageModel, batch: Batch, received: Carried | None) -> int:
    """Return the bytes that a forward pass leaves in use, except for its output."""
    leaf = None if received is None else flows.leaf_of(received)
    created = Allocated()
    with created:
        output = stage.carry(batch, leaf, num_items=max(1, batch.num_items), key=KEY)
    output_bytes = sum(each.untyped_storage().nbytes() for each in _carrying(output))
    return created.num_bytes - output_bytes


def _transient_bytes(stage: StageModel, batch: Batch, received: Carried | None, activation_bytes: int) -> int:
    """Return the GPU memory that the passes of one microbatch take at their peak, on top of its activations."""
    run_pass(stage, batch, received)  # allocates gradients, copies of weights and the libraries' workspaces, which stay
    before = torch.cuda.memory_allocated(stage.device)
    torch.cuda.reset_peak_memory_stats(stage.device)
    run_pass(stage, batch, received)
    return max(0, torch.cuda.max_memory_allocated(stage.device) - before - activation_bytes)
