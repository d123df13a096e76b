"""Stages of a traced model, run one after the other in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from oobleck.training.data import Batch
from oobleck.training.flow import Carried, Parcel, gradients_of, header_length, leaf_of, packed, run_backward
from oobleck.training.model import StageModel


def through(stages: Sequence[StageModel], batch: Batch, run: Callable[..., Carried]) -> float:
    """Take a microbatch through all stages and back; returns its loss. Parcels travel as messages do."""
    leaves: list[Carried] = []
    outputs: list[Carried] = []
    for stage in stages:
        outputs.append(run(stage, batch, leaves[-1] if leaves else None))
        sent = outputs[-1]
        if isinstance(sent, Parcel):
            flow, layer = stage.structure.flow, stage.layers[-1] + 1
            assert flow is not None
            payload = packed(sent.tensors, device=stage.device)
            assert len(sent.header()) == header_length(flow, layer)
            leaves.append(leaf_of(Parcel.received(flow, layer, sent.header(), payload)))
    gradients: list[torch.Tensor] | None = None
    for output, leaf in zip(reversed(outputs), reversed([None, *leaves]), strict=True):
        run_backward(output, gradients)
        gradients = None if leaf is None else gradients_of(leaf)
    loss = outputs[-1]
    assert isinstance(loss, torch.Tensor)
    return float(loss.detach())
