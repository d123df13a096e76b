"""The baselines of `throughput.py` and `sharding.py`: the same training by torch alone, in a pipeline of its own, in
one process, or by fully_shard.

All are written as one would write them by hand: transformers' own GPT-2 or Llama, fused AdamW, clipping by the global
norm, losses summed over the step's tokens. Initial weights and samples are Oobleck's, so that losses can be compared.

They compute on the job's device, the first GPU if that is `cuda`, and in its `dtype`, by torch's autocast and
GradScaler where that is a short one. A pipeline's messages go through the host's memory: Gloo sends nothing else.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]  # not in torch's stubs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from oobleck.job import JobSpec
from oobleck.training.data import Dataset, prepare_dataset, samples_of_step
from oobleck.training.model import ModelStructure, Precision, StageModel
from oobleck.training.optim import rate_factor

__all__ = ["StepTimes", "train_alone", "train_pipelined", "train_sharded"]

StepTimes = list[tuple[float, float]]
"""(seconds, loss) of each step."""


class _Chunk(nn.Module):
    """Some blocks, with the embedding before the first of all, and the head after the last."""

    def __init__(self, blocks: Sequence[nn.Module], part: range, job: JobSpec) -> None:
        super().__init__()
        self.is_first, self.is_last = part.start == 0, part.stop == len(blocks)
        self.blocks = nn.ModuleList(blocks[part.start : part.stop])
        self._job = job

    @staticmethod
    def of(model: Any, part: range, job: JobSpec) -> _Chunk:
        return _LlamaChunk(model, part, job) if job.model.type == "llama" else _Gpt2Chunk(model, part, job)

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        hidden = received.to(self._job.device)
        with _autocast(self._job):
            hidden = self._run(hidden)
        return hidden if self.is_last else hidden.cpu()

    def _run(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class _Gpt2Chunk(_Chunk):
    def __init__(self, model: Any, part: range, job: JobSpec) -> None:
        super().__init__(model.transformer.h, part, job)
        if self.is_first:
            self.wte, self.wpe = model.transformer.wte, model.transformer.wpe
        if self.is_last:
            self.ln_f, self.lm_head = model.transformer.ln_f, model.lm_head

    def _run(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.is_first:
            hidden = self.wte(hidden) + self.wpe(torch.arange(hidden.shape[1]).to(hidden.device))
        for block in self.blocks:
            hidden = block(hidden)
        return self.lm_head(self.ln_f(hidden)) if self.is_last else hidden


class _LlamaChunk(_Chunk):
    def __init__(self, model: Any, part: range, job: JobSpec) -> None:
        super().__init__(model.model.layers, part, job)
        self.rotary_emb = model.model.rotary_emb
        if self.is_first:
            self.embed_tokens = model.model.embed_tokens
        if self.is_last:
            self.norm, self.lm_head = model.model.norm, model.lm_head

    def _run(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.is_first:
            hidden = self.embed_tokens(hidden)
        positions = torch.arange(hidden.shape[1]).to(hidden.device).unsqueeze(0)
        rotated = self.rotary_emb(hidden, position_ids=positions)
        for block in self.blocks:
            hidden = block(hidden, position_ids=positions, position_embeddings=rotated)
        return self.lm_head(self.norm(hidden)) if self.is_last else hidden


def train_pipelined(rank: int, job: JobSpec, cuts: Sequence[int], threads: int, directory: Path) -> StepTimes:
    """Train one of two stages, with the model cut after so many of its blocks.

    One cut makes a chunk for each stage, under Schedule1F1B; three make two each, under ScheduleInterleaved1F1B.
    """
    torch.set_num_threads(threads)
    store = FileStore(str(directory / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=100))
    dataset, model = _prepare(job, directory)
    bounds = list(pairwise((0, *cuts, int(model.config.num_hidden_layers))))
    chunks = [_Chunk.of(model, range(*each), job) for each in bounds]
    stages = [
        PipelineStage(chunks[index], index, len(bounds), torch.device("cpu")) for index in range(rank, len(bounds), 2)
    ]
    own = nn.ModuleList(chunks[rank::2])
    num_items = job.global_batch_size * dataset.items_per_sample

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        predictions, targets = logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1)
        return nn.functional.cross_entropy(predictions.float(), targets.to(logits.device), reduction="sum") / num_items

    schedule = (
        ScheduleInterleaved1F1B(list(stages), job.num_microbatches, loss_fn=loss_of, scale_grads=False)
        if len(stages) > 1
        else Schedule1F1B(stages[0], job.num_microbatches, loss_fn=loss_of, scale_grads=False)
    )

    def run_step(samples: Sequence[int], _scaler: torch.amp.GradScaler) -> float:
        batch = dataset.batch(samples)
        if rank == 0:
            schedule.step(batch.input_ids)
            return 0.0
        losses: list[torch.Tensor] = []
        schedule.step(target=batch.labels, losses=losses)
        return float(torch.stack(losses).detach().sum())

    def agree(values: torch.Tensor) -> None:
        dist.all_reduce(values)

    return _train(job, list(own.parameters()), dataset, run_step, agree)


def train_alone(job: JobSpec, threads: int, directory: Path) -> StepTimes:
    """Train the whole model in this process, microbatch by microbatch."""
    torch.set_num_threads(threads)
    dataset, model = _prepare(job, directory)
    num_items = job.global_batch_size * dataset.items_per_sample

    def run_step(samples: Sequence[int], scaler: torch.amp.GradScaler) -> float:
        losses: list[torch.Tensor] = []
        for first in range(0, len(samples), job.microbatch_size):
            batch = dataset.batch(samples[first : first + job.microbatch_size]).to(torch.device(job.device))
            with _autocast(job):
                output = model(
                    input_ids=batch.input_ids, labels=batch.labels, use_cache=False, num_items_in_batch=num_items
                )
            scaler.scale(output.loss).backward()
            losses.append(output.loss.detach())
        return float(torch.stack(losses).sum())

    return _train(job, list(model.parameters()), dataset, run_step, lambda _: None)


def train_sharded(rank: int, job: JobSpec, shape: tuple[int, int], directory: Path) -> StepTimes:
    """Train with each block's weights and gradients shared out by the devices of a node, and copied across nodes.

    `shape` is (nodes, devices).
    """
    torch.set_num_threads(1)
    world = shape[0] * shape[1]
    store = FileStore(str(directory / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=100))
    dataset, model = _prepare(job, directory)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("nodes", "devices"))
    whole: Any = model
    for module in (*whole.transformer.h, model):
        sharded: Any = fully_shard(module, mesh=mesh)
        # Losses are divided by the step's tokens, so gradients are sums.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    num_items, each = job.global_batch_size * dataset.items_per_sample, job.global_batch_size // world

    def run_step(samples: Sequence[int], _scaler: torch.amp.GradScaler) -> float:
        losses: list[torch.Tensor] = []
        for first in range(rank * each, (rank + 1) * each, job.microbatch_size):
            whole.set_requires_all_reduce(first + job.microbatch_size == (rank + 1) * each)
            batch = dataset.batch(samples[first : first + job.microbatch_size])
            output = whole(
                input_ids=batch.input_ids, labels=batch.labels, use_cache=False, num_items_in_batch=num_items
            )
            output.loss.backward()
            losses.append(output.loss.detach())
        return float(torch.stack(losses).sum())

    def agree(values: torch.Tensor) -> None:
        values[1] /= shape[0]  # each node has all gradients
        dist.all_reduce(values)

    return _train(job, list(model.parameters()), dataset, run_step, agree)


def _prepare(job: JobSpec, directory: Path) -> tuple[Dataset, PreTrainedModel]:
    """Return the data and the whole model with Oobleck's initial values."""
    dataset = prepare_dataset(job.data, cache_dir=directory / "cache")
    structure = ModelStructure.from_spec(
        job.model, vocab_size=dataset.vocab_size, sequence_length=job.data.sequence_length
    )
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(copy.deepcopy(structure.config), dtype=Precision.of(job.dtype).parameters).train()
    ours = StageModel(structure, dtype=torch.float32, device="cpu")
    ours.adopt(0, structure.num_layers, {})
    ours.initialize(range(structure.num_layers), seed=job.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(ours.parameters[name])
    return dataset, model.to(job.device)


def _autocast(job: JobSpec) -> torch.autocast:
    dtype = Precision.of(job.dtype).autocast
    return torch.autocast(job.device, dtype=dtype, enabled=dtype is not None)


def _train(
    job: JobSpec,
    parameters: list[nn.Parameter],
    dataset: Dataset,
    run_step: Callable[[Sequence[int], torch.amp.GradScaler], float],
    agree: Callable[[torch.Tensor], None],
) -> StepTimes:
    """Run the job's steps; `agree` sums a vector over all processes."""
    spec = job.optimizer
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": spec.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(spec.adam_beta1, spec.adam_beta2), eps=spec.adam_epsilon, fused=True)
    is_scaled = Precision.of(job.dtype).scales_loss
    scaler = torch.amp.GradScaler(job.device, init_scale=job.initial_loss_scale, enabled=is_scaled)
    times: StepTimes = []
    began_s = time.monotonic()
    for step in range(1, job.max_steps + 1):
        loss = run_step(samples_of_step(job.seed, step, job.global_batch_size, dataset.num_samples), scaler)
        scaler.unscale_(optimizer)
        gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        agreed = torch.stack([torch.tensor(loss), torch.stack(torch._foreach_norm(gradients)).square().sum().cpu()])
        agree(agreed)
        clip = min(1.0, spec.max_grad_norm / (float(agreed[1]) ** 0.5 + 1e-6))
        torch._foreach_mul_(gradients, clip)
        for group in optimizer.param_groups:
            group["lr"] = spec.learning_rate * rate_factor(spec, step=step, max_steps=job.max_steps)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        now_s = time.monotonic()
        times.append((now_s - began_s, float(agreed[0])))
        began_s = now_s
    return times


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
