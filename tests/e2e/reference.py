"""The same job in one process, without a pipeline, a plan or a message: transformers and torch as they come.

An independent statement of what `oobleck up` computes: the samples, the initial weights and the dropout's keys are
ours, everything else is torch's own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from oobleck.job import JobSpec
from oobleck.training.assembly import assemble, structure_of_job
from oobleck.training.data.batches import IGNORED_LABEL, Batch
from oobleck.training.data.data import Dataset
from oobleck.training.data.sampling import samples_of_step
from oobleck.training.model.models import StageModel
from oobleck.training.model.structure import ModelStructure
from oobleck.training.randomness import MicrobatchKey

__all__ = ["each_reference_loss", "losses_of_rows", "reference_losses"]


def reference_losses(
    job: JobSpec,
    cache_dir: Path,
    *,
    dropped: Collection[tuple[int, int]] = (),
    doubled: Collection[tuple[int, int]] = (),
) -> list[float]:
    """Losses of all steps. `dropped` and `doubled` name (step, microbatch) that are left out or counted twice."""
    return list(each_reference_loss(job, cache_dir, dropped=dropped, doubled=doubled))


def each_reference_loss(
    job: JobSpec,
    cache_dir: Path,
    *,
    dropped: Collection[tuple[int, int]] = (),
    doubled: Collection[tuple[int, int]] = (),
    evaluations: list[float] | None = None,
) -> Iterator[float]:
    """The same, step by step as they are asked for: for runs that are stopped before their last step.

    `evaluations` receives the losses on the samples that are kept for evaluation.
    """
    torch.set_num_threads(1)  # two wait for each other, where others use the machine as well: ten times as slow
    assembly = assemble(job, cache_dir=cache_dir)
    dataset, structure = assembly.train, assembly.structure
    model, optimizer = _startup(job, structure)
    for step in range(1, job.max_steps + 1):
        samples = samples_of_step(job.seed, step, job.global_batch_size, dataset.num_samples)
        num_items = len(samples) * dataset.items_per_sample
        total = 0.0
        for microbatch in range(job.num_microbatches):
            first = microbatch * job.microbatch_size
            batch = dataset.batch(samples[first : first + job.microbatch_size], step=step)
            weight = 1 - ((step, microbatch) in dropped) + ((step, microbatch) in doubled)
            loss = weight * model.forward(
                batch, None, num_items=num_items, key=MicrobatchKey(seed=job.seed, step=step, microbatch=microbatch)
            )
            loss.backward()
            total += float(loss.detach())
        _apply(job, model, optimizer, step)
        if evaluations is not None and job.is_evaluated(step):
            assert assembly.validation is not None
            evaluations.append(_evaluated(model, assembly.validation, job))
        yield total


def _startup(job: JobSpec, structure: ModelStructure) -> tuple[StageModel, torch.optim.Optimizer]:
    """The whole model with its initial values, and its optimizer."""
    model = StageModel(structure, dtype=getattr(torch, job.dtype), device="cpu")
    model.adopt(0, structure.num_layers, {})
    model.initialize(range(structure.num_layers), seed=job.seed)
    optimizer = torch.optim.AdamW(
        _parameter_groups(model.parameters, job.optimizer.weight_decay),
        betas=(job.optimizer.adam_beta1, job.optimizer.adam_beta2),
        eps=job.optimizer.adam_epsilon,
    )
    return model, optimizer


def _apply(job: JobSpec, model: StageModel, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters.values(), job.optimizer.max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = _learning_rate(job, step)
    optimizer.step()
    optimizer.zero_grad()


def losses_of_rows(job: JobSpec, batches: Sequence[torch.Tensor]) -> list[float]:
    """Losses of steps that take these samples, [samples, length] each; the last may have fewer than others."""
    torch.set_num_threads(1)
    structure = structure_of_job(job)
    model, optimizer = _startup(job, structure)
    losses = []
    for step, rows in enumerate(batches, 1):
        num_items = rows.shape[0] * (rows.shape[1] - 1)
        total = 0.0
        for microbatch, some in enumerate(rows.split(job.microbatch_size)):
            key = MicrobatchKey(seed=job.seed, step=step, microbatch=microbatch)
            rest = job.microbatch_size - len(some)  # dropout is drawn for whole microbatches
            nothing = torch.zeros(rest, rows.shape[1], dtype=torch.int64)
            batch = Batch(
                input_ids=torch.cat([some, nothing]), labels=torch.cat([some, torch.full_like(nothing, IGNORED_LABEL)])
            )
            loss = model.forward(batch, None, num_items=num_items, key=key)
            loss.backward()
            total += float(loss.detach())
        _apply(job, model, optimizer, step)
        losses.append(total)
    return losses


def _evaluated(model: StageModel, validation: Dataset, job: JobSpec) -> float:
    """The loss of all samples kept for evaluation, all at once."""
    count = min(validation.num_samples, job.max_eval_samples or validation.num_samples)
    count -= count % job.microbatch_size
    batch = validation.batch(range(count))
    with torch.no_grad(), model.evaluating():
        key = MicrobatchKey(seed=0, step=0, microbatch=0)
        return float(model.forward(batch, None, num_items=batch.num_items, key=key))


def _parameter_groups(parameters: Mapping[str, torch.nn.Parameter], weight_decay: float) -> list[dict[str, object]]:
    decayed = [parameter for parameter in parameters.values() if parameter.ndim > 1]
    others = [parameter for parameter in parameters.values() if parameter.ndim <= 1]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def _learning_rate(job: JobSpec, step: int) -> float:
    """Linear warm-up, then half a cosine that would reach zero one step after the last."""
    spec = job.optimizer
    assert spec.lr_scheduler_type == "cosine"
    if step <= spec.warmup_steps:
        return spec.learning_rate * step / spec.warmup_steps
    progress = (step - 1 - spec.warmup_steps) / (job.max_steps - spec.warmup_steps)
    return spec.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
