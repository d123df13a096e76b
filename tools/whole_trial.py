"""Tries a class of transformers that computes its own loss: its inputs, and the same model in plain torch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oobleck.training.data import WholeBatch
from oobleck.training.flow import prove_cuts, trace_flow
from oobleck.training.model import LiveModel, ModelStructure
from oobleck.training.randomness import drawing_alike
from tools.tiny_models import NUM_PLAIN_TOKENS

__all__ = ["batch_of", "plain_steps", "structure_with_loss", "suitable_inputs"]

_ROWS, _LENGTH, _SAMPLES, _FRAMES = 2, 24, 4000, 64

Inputs = dict[str, torch.Tensor]
Trained = tuple[list[float], dict[str, torch.Tensor]]
"""The loss of each step, and the weights after the last."""


def suitable_inputs(model: Any) -> Inputs:
    """Return the first inputs of those imaginable that a model returns a loss for. Raises as the first attempt does."""
    problem: Exception | None = None
    for inputs in _imaginable(model):
        try:
            with drawing_alike(0):
                loss = _loss(model, inputs)
            if bool(loss.isfinite()):
                return inputs
            problem = problem or ValueError(f"its loss is {float(loss.detach())}")
        # What a model raises is its author's choice.
        except Exception as error:  # noqa: BLE001
            problem = problem or error
    raise problem or ValueError("it takes neither tokens, pixels nor sound")


def _imaginable(model: Any) -> Iterator[Inputs]:
    takes, config = inspect.signature(model.forward).parameters, model.config
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, NUM_PLAIN_TOKENS, (_ROWS, _LENGTH), generator=generator)
    text, kinds = getattr(config, "get_text_config", lambda: config)(), config.num_labels or 1
    one = torch.arange(_ROWS) % kinds
    inputs: list[Inputs] = []
    if "input_ids" in takes:
        inputs += [{"input_ids": ids % text.vocab_size}] if hasattr(text, "vocab_size") else [{"input_ids": ids}]
    if type(model).__name__.endswith("ForMultipleChoice"):
        inputs = [{"input_ids": ids.view(_ROWS, 3, -1)}]
        one = torch.arange(_ROWS)
    if "pixel_values" in takes and "input_ids" not in takes:
        channels = getattr(config, "num_channels", 3)
        for size in (_side_of(config), 32, 64, 224):
            inputs.append({"pixel_values": torch.randn(_ROWS, channels, size, size, generator=generator)})
    if "input_values" in takes:
        inputs.append({"input_values": torch.randn(_ROWS, _SAMPLES, generator=generator)})
        for frames in (_FRAMES, getattr(config, "max_length", _FRAMES)):
            mels = getattr(config, "num_mel_bins", 16)
            inputs.append({"input_values": torch.randn(_ROWS, frames, mels, generator=generator)})
    if "input_features" in takes:
        inputs += _sounds(config, generator)
    for given in inputs:
        if "start_positions" in takes:
            yield {**given, "start_positions": torch.tensor([1, 5]), "end_positions": torch.tensor([3, 9])}
        if "labels" not in takes:
            continue
        length = given["input_ids"].shape[-1] if "input_ids" in given else 6
        tokens = given["input_ids"] if "input_ids" in given else ids[:, :length]
        for labels in (tokens, one, ids % kinds, one.float(), nn.functional.one_hot(one, kinds).float()):
            yield {**given, "labels": labels}


def _side_of(config: Any) -> int:
    size = getattr(config, "image_size", 32)
    return int(size[0] if isinstance(size, list | tuple) else size)


def _sounds(config: Any, generator: torch.Generator) -> Iterator[Inputs]:
    encoder = getattr(config, "encoder_config", getattr(config, "audio_config", config))
    mels = next(
        (int(value) for name in ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_dim")
         if isinstance(value := getattr(encoder, name, None), int)),
        80,
    )  # fmt: skip
    positions = getattr(encoder, "max_source_positions", _FRAMES)
    for frames in (2 * positions, _FRAMES, 200):
        yield {"input_features": torch.randn(_ROWS, mels, frames, generator=generator)}
        yield {"input_features": torch.randn(_ROWS, frames, mels, generator=generator)}


def _loss(model: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    outputs = model(**inputs)
    loss: torch.Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    if loss is None or loss.numel() != 1:
        raise ValueError("it returns no loss")
    return loss


def plain_steps(model: Any, inputs: Inputs, *, num_steps: int, rate: float) -> Trained:
    """Train a model by SGD."""
    losses = []
    for step in range(num_steps):
        with drawing_alike(step):
            loss = _loss(model, inputs)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        losses.append(float(loss.detach()))
        _apply(model.parameters(), rate)
    return losses, {name: each.detach() for name, each in model.named_parameters()}


def structure_with_loss(model: Any, inputs: Inputs, directory: Path, *, cuts: bool) -> ModelStructure:
    """Take a model as nodes do, in layers or whole; takes its memory. Raises ConfigError where no node can."""

    def loss_of(whole: nn.Module, given: Any, _num_items: int, *, step: int) -> torch.Tensor:
        with drawing_alike(step - 1):
            return _loss(whole, given)

    flow = None
    if cuts:
        flow = trace_flow(model, lambda: loss_of(model, inputs, 1, step=1))
        prove_cuts(model, flow, [lambda: loss_of(model, inputs, 1, step=1)] * 2)
    live = LiveModel.taken_apart(model, directory, is_whole=True)
    return ModelStructure.with_its_loss(live, loss_of, sequence_length=_LENGTH, flow=flow)


def batch_of(inputs: Inputs) -> WholeBatch:
    """Return a microbatch that is a whole step."""
    return WholeBatch(inputs=inputs, weight=1.0, divides_by=1, counted=0)


@torch.no_grad()
def _apply(parameters: Any, rate: float) -> None:
    for each in parameters:
        if each.grad is not None:
            each.sub_(each.grad, alpha=rate)
            each.grad = None
