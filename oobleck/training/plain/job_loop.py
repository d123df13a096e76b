"""Trains a job by an ordinary loop: the uncut model, a whole batch, one backward pass, torch's optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oobleck.control.verification import PlainAccount, PlainJob, tolerance_of
from oobleck.errors import ConfigError
from oobleck.job import JobSpec
from oobleck.training.assembly import Assembly, assemble, made_by_script
from oobleck.training.data import IGNORED_LABEL, Batch
from oobleck.training.dropout import turn_off_dropout
from oobleck.training.model import Precision, check_attention

from .recorder import Recorder, gradient_norm
from .uncut_model import ListedLayers, uncut_model

_CHUNK_TOKENS = 16_384  # a larger batch is computed in chunks


def train_job(asked: PlainJob) -> tuple[PlainAccount, Recorder]:
    """Train a job's first steps. Raises ConfigError for an invalid job, or if its samples are numbered in a run."""
    job = asked.job
    assembly = assemble(job, cache_dir=Path(asked.directory) / "cache")
    if assembly.train.records is not None:
        raise ConfigError("data: samples of shards and streams get their numbers in a run, so nothing can be compared")
    made = made_by_script(job)
    model = uncut_model(job, assembly, made)
    # A run draws other random numbers for dropout than one process does.
    dropped = turn_off_dropout(model)
    model.to(torch.device(job.device))
    recorder = Recorder(model, num_steps=asked.num_steps, tolerance=tolerance_of(job.dtype))
    optimizer, rates = _optimizer(job, assembly, made, model)
    for step in range(1, asked.num_steps + 1):
        numbers = assembly.train.samples_of_step(job.seed, step, job.global_batch_size)
        chunk = max(1, _CHUNK_TOKENS // assembly.train.sequence_length)
        batches = [
            assembly.train.batch(numbers[first : first + chunk], step=step) for first in range(0, len(numbers), chunk)
        ]
        loss = _backward(job, model, batches, made.get("loss"))
        # Before clipping, as in a run's records.
        norm = gradient_norm(model.parameters())
        recorder.note_gradients()
        if job.optimizer.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.optimizer.max_grad_norm)
        rate = rates(step)
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("peak", group["lr"]) * rate
        optimizer.step()
        optimizer.zero_grad()
        first_rate = optimizer.param_groups[0]["lr"]
        recorder.step_done(loss=loss, grad_norm=norm, learning_rate=first_rate, samples=numbers)
    return PlainAccount(steps=tuple(recorder.steps), dropped=dropped), recorder


def _backward(job: JobSpec, model: nn.Module, batches: list[Batch], loss_function: Any) -> float:
    """Accumulate the gradients of the mean loss of a whole batch; returns that loss."""
    num_items = sum(batch.num_items for batch in batches)
    device, precision = torch.device(job.device), Precision.of(job.dtype)
    total = 0.0
    for batch in (batch.to(device) for batch in batches):
        check_attention(job.attn_implementation, batch)
        computing = (
            nullcontext() if precision.autocast is None else torch.autocast(device.type, dtype=precision.autocast)
        )
        with computing:
            if isinstance(model, ListedLayers):
                loss = _loss_of_layers(model, batch, loss_function, num_items)
            else:
                mean = model(input_ids=batch.input_ids, labels=batch.labels, use_cache=False, **batch.others).loss
                # The model's loss is the mean over a chunk, and the step's that over all chunks.
                loss = mean * (batch.num_items / num_items)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        total += float(loss.detach())
    return total


def _loss_of_layers(model: ListedLayers, batch: Batch, loss_function: Any, num_items: int) -> torch.Tensor:
    value: Any = batch.input_ids
    for layer in model.layers:
        taken = list(inspect.signature(layer.forward).parameters)[1:]
        value = layer(value, **{name: batch.others[name] for name in taken if name in batch.others})
    if loss_function is not None:
        loss: torch.Tensor = loss_function(value, batch.labels, num_items)
        return loss
    logits, labels = value[:, :-1], batch.labels[:, 1:]
    summed = nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    return summed / num_items


def _optimizer(
    job: JobSpec, assembly: Assembly, made: Mapping[str, Callable[..., Any]], model: nn.Module
) -> tuple[torch.optim.Optimizer, Callable[[int], float]]:
    """Return torch's optimizer of a job, and the function from a step to its fraction of the peak rate."""
    spec = job.optimizer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trained if parameter.ndim > 1]
    others = [parameter for parameter in trained if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": spec.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    optimizer: torch.optim.Optimizer
    if "optimizer" in made:
        optimizer = made["optimizer"](groups)
    else:
        name = spec.optim.removesuffix("_fused").removesuffix("_torch")
        classes = [each for each in vars(torch.optim).values() if inspect.isclass(each)]
        kind: Any = next(
            each for each in classes if issubclass(each, torch.optim.Optimizer) and each.__name__.lower() == name
        )
        takes = inspect.signature(kind).parameters
        arguments: dict[str, Any] = {"lr": spec.learning_rate, **spec.optim_args}
        if "betas" in takes:
            arguments = {"betas": (spec.adam_beta1, spec.adam_beta2), "eps": spec.adam_epsilon, **arguments}
        optimizer = kind(groups, **arguments)
    # `learning_rate` needs the peak that this finds.
    assembly.optimizer.layout()
    peak = optimizer.param_groups[0]["lr"]
    return optimizer, lambda step: assembly.optimizer.learning_rate(step) / peak
