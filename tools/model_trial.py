"""Tries one class of transformers: built tiny, cut into stages, trained for three steps beside the uncut model."""

from __future__ import annotations

import copy
import math
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from oobleck.errors import ConfigError, UncutModel
from oobleck.training.data import Batch
from oobleck.training.flow import Carried, gradients_of, leaf_of, run_backward
from oobleck.training.model import (
    BatchSizes,
    LiveModel,
    MicrobatchKey,
    ModelStructure,
    StageModel,
    try_layers,
    with_tried_loss,
)
from oobleck.training.model.losses import label_loss
from tools.tiny_models import VOCAB_SIZE, tiny_configs
from tools.whole_trial import batch_of, plain_steps, structure_with_loss, suitable_inputs

__all__ = ["try_class"]

LENGTH, BATCH_SIZE, NUM_STEPS = 24, 2, 3
_RATE, _TOLERANCE = 1e-2, 1e-5
_SIZES = BatchSizes(batch=8, microbatch=2, length=LENGTH)
"""What a script's batch could be, for trials of layers and losses."""
_LONGEST_S = 20
_LARGEST = 8_000_000
"""Parameters of a model that is worth trying."""


class _Untried(Exception):
    """Plain transformers does not run it."""


def try_class(model_type: str, class_name: str) -> tuple[str, str, float]:
    """Return the outcome for a class, what there is to say of it, and the seconds until it was refused."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        return _try(model_type, class_name)
    except _Untried as error:
        return "not tried", str(error), 0.0
    # Whatever it is, it is what the sweep is looking for.
    except Exception as error:  # noqa: BLE001
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        return "fault", f"{type(error).__name__}: {_one_line(error)} ({place})", 0.0


def _try(model_type: str, class_name: str) -> tuple[str, str, float]:
    with _in_plain_transformers():
        kind: Any = getattr(transformers, class_name)
        configs = list(tiny_configs(kind.config_class or CONFIG_MAPPING[model_type]))
    problem = ""
    for config in configs:
        try:
            return _try_config(kind, config)
        except _Untried as error:
            problem = problem or str(error)
    raise _Untried(problem)


def _try_config(kind: Any, config: Any) -> tuple[str, str, float]:
    with _in_plain_transformers(), torch.device("meta"):
        outline = kind(copy.deepcopy(config))
    if (size := outline.num_parameters()) > _LARGEST:
        refused = _structure_of(outline)
        if not isinstance(refused, ModelStructure) and refused[0] == "refused":
            return refused
        raise _Untried(f"its tiny configuration has {size} parameters")
    torch.manual_seed(0)
    with _in_plain_transformers():
        model = kind(config).float().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if not isinstance(structure := _structure_of(model), ModelStructure):
        outcome, reason, seconds = structure
        return _with_its_loss(model) if outcome == "whole" else (outcome, reason, seconds)
    batches = [_batch(structure, step) for step in range(NUM_STEPS)]
    with _in_plain_transformers():
        expected = _train_whole(copy.deepcopy(model), structure, batches)
    with tempfile.TemporaryDirectory() as directory:
        live = LiveModel.taken_apart(model, Path(directory))
        return _compare(replace(structure, weights=live.weights), batches, expected)


@contextmanager
def _in_plain_transformers() -> Iterator[None]:
    """Within the block nothing of this project runs: what fails there, or takes too long, is no fault of it."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"more than {_LONGEST_S} s of a processor")

    before = signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, _LONGEST_S)
    try:
        yield
    # What a model raises is its author's choice.
    except Exception as error:
        raise _Untried(f"plain transformers: {type(error).__name__}: {_one_line(error)}") from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _with_its_loss(model: Any) -> tuple[str, str, float]:
    """Train a model that computes its own loss: traced and cut, or else as a whole."""
    with _in_plain_transformers():
        inputs = suitable_inputs(copy.deepcopy(model))
        expected = plain_steps(copy.deepcopy(model), inputs, num_steps=NUM_STEPS, rate=_RATE)
        if not all(abs(loss) < 1e6 for loss in expected[0]):
            raise ValueError(f"its losses are {expected[0]}")
    batches = [batch_of(inputs)] * NUM_STEPS
    with tempfile.TemporaryDirectory() as directory:
        try:
            structure = structure_with_loss(copy.deepcopy(model), inputs, Path(directory), cuts=True)
            return _compare(structure, batches, expected)
        except UncutModel as error:
            reason = error.reason
        except ConfigError as error:
            return "refused", _one_line(error), 0.0
        try:
            trained = _train_cut(structure_with_loss(model, inputs, Path(directory), cuts=False), (), batches)
        except ConfigError as error:
            return "refused", _one_line(error), 0.0
    if (worst := _difference(trained, expected)) > _TOLERANCE:
        return "fault", f"whole: differs by {worst:.2g} (losses {trained[0]}, not {expected[0]})", 0.0
    return "whole", reason, 0.0


def _structure_of(model: Any) -> ModelStructure | tuple[str, str, float]:
    """Return a model's layers, or whether it is kept whole or refused, why, and after how many seconds of a processor.

    The fewer of two tries, if the first is slow: it imports what the next has.
    """
    seconds: list[float] = []
    outcome, reason = "refused", ""
    while len(seconds) < 2 and (not seconds or seconds[-1] > 1.0):
        began_s = time.process_time()
        try:
            structure = ModelStructure.from_live(LiveModel.skeleton_of(model), sequence_length=LENGTH)
            try_layers(structure, _SIZES)
            return with_tried_loss(structure, _SIZES)
        except ConfigError as error:
            seconds.append(time.process_time() - began_s)
            outcome = "whole" if isinstance(error, UncutModel) else "refused"
            reason = error.reason if isinstance(error, UncutModel) else _one_line(error)
    return outcome, reason, min(seconds)


def _batch(structure: ModelStructure, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    num_labels = structure.config.num_labels or 1
    ids = torch.randint(3, VOCAB_SIZE, (BATCH_SIZE, LENGTH), generator=generator)
    match structure.task:
        case "causal_lm":
            return Batch(input_ids=ids, labels=ids)
        case "sequence_classification":
            return Batch(input_ids=ids, labels=ids[:, 0] % num_labels, is_causal=False)
        case "token_classification":
            return Batch(input_ids=ids, labels=ids % num_labels, is_causal=False)
    is_masked = torch.rand(ids.shape, generator=generator) < 0.3
    return Batch(input_ids=ids, labels=ids.masked_fill(~is_masked, -100), is_causal=False)


_Trained = tuple[list[float], dict[str, torch.Tensor]]
"""The loss of each step, and the weights after the last."""


def _train_whole(model: Any, structure: ModelStructure, batches: Sequence[Batch]) -> _Trained:
    if getattr(model, "loss_type", None) is None:
        model.loss_type = "ForCausalLM"
    parameters = dict(model.named_parameters())
    losses = []
    for batch in batches:
        if structure.task == "causal_lm":
            given = {"labels": batch.labels, "num_items_in_batch": batch.num_items}
            loss = model(input_ids=batch.input_ids, use_cache=False, **given).loss
        else:
            loss = label_loss(model(input_ids=batch.input_ids, use_cache=False).logits, batch.labels, batch.num_items)
        loss.backward()
        losses.append(float(loss.detach()))
        _apply(parameters, {name: each.grad for name, each in parameters.items() if each.grad is not None})
        model.zero_grad()
    if not all(abs(loss) < 1e6 for loss in losses):
        raise ValueError(f"its losses are {losses}")
    return losses, {name: each.detach() for name, each in parameters.items()}


def _compare(structure: ModelStructure, batches: Sequence[Batch], expected: _Trained) -> tuple[str, str, float]:
    worst = 0.0
    for cuts in sorted({(), (structure.num_layers // 2,), tuple(sorted({1, structure.num_layers - 1}))}):
        trained = _train_cut(structure, cuts, batches)
        worst = max(worst, _difference(trained, expected))
        if worst > _TOLERANCE:
            note = f"cut at {list(cuts)}: differs by {worst:.2g} (losses {trained[0]}, not {expected[0]})"
            return "fault", note, 0.0
    return "equal", "" if worst == 0.0 else f"{worst:.1g}", 0.0


def _difference(one: _Trained, other: _Trained) -> float:
    """The largest of losses, as a share of them, and of weights. Infinite where something is no number."""
    losses = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(one[0], other[0], strict=True)]
    weights = [
        float((value - other[1][name]).abs().max())
        for name, value in one[1].items()
        if name in other[1] and value.numel()
    ]
    return max(each if math.isfinite(each) else math.inf for each in (*losses, *weights))


def _train_cut(structure: ModelStructure, cuts: Sequence[int], batches: Sequence[Batch]) -> _Trained:
    stages = []
    for first, stop in pairwise((0, *cuts, structure.num_layers)):
        stage = StageModel(structure, dtype=torch.float32, device="cpu")
        stage.adopt(first, stop, {})
        stage.initialize(range(first, stop), seed=0)
        stages.append(stage)
    losses = []
    for step, batch in enumerate(batches, 1):
        losses.append(_step(stages, batch, MicrobatchKey(seed=0, step=step, microbatch=0)))
        gradients: dict[str, torch.Tensor] = {}
        for stage in reversed(stages):
            for name, each in stage.trained_parameters.items():
                if each.grad is not None:
                    gradients[name] = gradients[name] + each.grad if name in gradients else each.grad
        for stage in stages:
            _apply(stage.trained_parameters, gradients)
            for each in stage.parameters.values():
                each.grad = None
    return losses, {name: each.detach() for stage in stages for name, each in stage.trained_parameters.items()}


def _step(stages: Sequence[StageModel], batch: Batch, key: MicrobatchKey) -> float:
    """Take a microbatch through all stages and back; returns the loss."""
    num_items = batch.num_items if batch.counted is None else 1
    leaves: list[Carried] = []
    outputs: list[Carried] = []
    for stage in stages:
        outputs.append(stage.carry(batch, leaves[-1] if leaves else None, num_items=num_items, key=key))
        leaves.append(leaf_of(outputs[-1]))
    gradients: list[torch.Tensor] | None = None
    for output, leaf in zip(reversed(outputs), reversed([None, *leaves[:-1]]), strict=True):
        run_backward(output, gradients)
        gradients = None if leaf is None else gradients_of(leaf)
    assert isinstance(outputs[-1], torch.Tensor)
    return float(outputs[-1].detach())


@torch.no_grad()
def _apply(parameters: Any, gradients: dict[str, torch.Tensor]) -> None:
    for name, parameter in parameters.items():
        if name in gradients:
            parameter.sub_(gradients[name], alpha=_RATE)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]
