"""Training by workers that share a device, beside torch alone: losses, memory and speed.

Sizes and devices are arguments, so that tests run the same small on a CPU.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from oobleck.job import DataSpec, JobSpec, ModelSpec, OptimizerSpec
from oobleck.planner import (
    ExecutionPlan,
    Pipeline,
    PipelineTemplate,
    Profile,
    StageTemplate,
    WorkerId,
)
from oobleck.planner.profiles import shape_from_config, training_flops
from oobleck.schedule import ScheduleKind
from oobleck.schedule.forecast import forecast
from oobleck.training.process.gpu_probe import measure_gpus
from tools.bench.local_workers import LocalWorkers, Trained, fork_context
from tools.bench.pipelining_job import StepTimes, train_alone, train_pipelined
from tools.gpu.checks import Check, Numbers, within
from tools.gpu.prerequisites import Need
from tools.gpu.speed import digest_bytes_per_s

__all__ = ["CHECKS", "WAYS", "Bench", "Size", "measure_memory", "measure_pipeline", "measure_speed", "measure_ways"]

_WARM_UP = 3
"""Steps that are not timed."""
_PEAK_EVERY_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of what is trained."""

    hidden: int
    blocks: int
    length: int
    """Tokens in a sample."""
    microbatch_size: int = 2
    num_microbatches: int = 4
    num_steps: int = 6
    heads: int = 4

    def job(self, device: str, *, type: str = "llama", dtype: str = "float32") -> JobSpec:  # noqa: A002  as in a job
        config: Mapping[str, str | int | float | bool] = {
            "hidden_size": self.hidden,
            "intermediate_size": self.hidden * 11 // 4,
            "num_hidden_layers": self.blocks,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
        }
        if type == "gpt2":  # without a tied head, which torch's stages cannot share, and without dropout
            config = {"n_embd": self.hidden, "n_layer": self.blocks, "n_head": self.heads, "n_positions": self.length}
            config |= {"tie_word_embeddings": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return JobSpec(
            tag="verify",
            model=ModelSpec(type=type, config=dict(config)),
            data=DataSpec(sequence_length=self.length, vocab_size=2048, max_bytes=1_000_000),
            optimizer=OptimizerSpec(learning_rate=1e-3, warmup_steps=1),
            max_steps=self.num_steps,
            global_batch_size=self.num_microbatches * self.microbatch_size,
            microbatch_size=self.microbatch_size,
            fault_threshold=0,
            device=device,  # type: ignore[arg-type]  # checked there
            dtype=dtype,  # type: ignore[arg-type]  # checked there
        )

    def plan(self, num_stages: int, *, degree: int = 1) -> ExecutionPlan:
        """Cut the blocks into equal stages, of `degree` devices each."""
        num_layers, per_stage = self.blocks + 2, self.blocks // num_stages
        cuts = [0, *(1 + per_stage * stage for stage in range(1, num_stages)), num_layers]
        stages = tuple(
            StageTemplate(first_layer=first, stop_layer=stop, node_index=index, num_devices=degree)
            for index, (first, stop) in enumerate(itertools.pairwise(cuts))
        )
        nodes = tuple(f"node{index}" for index in range(num_stages))
        template = PipelineTemplate(stages=stages)
        return ExecutionPlan(
            pipelines=(Pipeline(template=template, nodes=nodes, num_microbatches=self.num_microbatches),)
        )


class Bench:
    """Processes that have torch imported, and a directory for what they read."""

    def __init__(self, directory: Path) -> None:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait sleep
        self.directory = directory
        self._context = fork_context()

    def workers(
        self, job: JobSpec, plan: ExecutionPlan, beside: Callable[[WorkerId], None] | None = None
    ) -> LocalWorkers:
        cache = self.directory / "cache"
        return LocalWorkers(job, plan.worker_ids, context=self._context, cache_dir=cache, threads=1, beside=beside)

    def train(self, job: JobSpec, plan: ExecutionPlan, kind: ScheduleKind = ScheduleKind.ONE_F_ONE_B) -> Trained:
        with self.workers(job, plan) as workers:
            return workers.train(plan, kind)

    def profile(self, job: JobSpec) -> Profile:
        plan = ExecutionPlan(
            pipelines=(
                Pipeline(
                    template=PipelineTemplate(stages=(StageTemplate(first_layer=0, stop_layer=1, node_index=0),)),
                    nodes=("node0",),
                    num_microbatches=1,
                ),
            )
        )
        with self.workers(job, plan) as workers:
            return workers.profile()

    def alone(self, job: JobSpec) -> StepTimes:
        """One process, by torch and transformers alone."""
        with ProcessPoolExecutor(1, mp_context=self._context) as pool:
            return pool.submit(train_alone, job, 1, self.directory).result()

    def pipelined(self, job: JobSpec, num_blocks: int) -> StepTimes:
        """Two processes, by torch's Schedule1F1B over Gloo; the first has so many blocks."""
        with (
            tempfile.TemporaryDirectory(dir=self.directory) as directory,
            ProcessPoolExecutor(2, mp_context=self._context) as pool,
        ):
            (Path(directory) / "cache").symlink_to(self.directory / "cache")
            run = partial(train_pipelined, job=job, cuts=(num_blocks,), threads=1, directory=Path(directory))
            return next(iter(pool.map(run, range(2))))


# --- beside a plain loop ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """A way to train that must come to a plain loop's losses."""

    changes: Mapping[str, object]
    kind: ScheduleKind = ScheduleKind.ONE_F_ONE_B
    degree: int = 1


WAYS: Mapping[str, _Way] = {
    "bfloat16": _Way(changes={"dtype": "bfloat16"}),
    "float16": _Way(changes={"dtype": "float16", "initial_loss_scale": 2.0**26}),
    "compile": _Way(changes={"compile": True}),
    "recompute": _Way(changes={"recompute": "all"}),
    "selective": _Way(changes={"recompute": "selective"}),
    "zero_bubble": _Way(changes={"schedule": "zero-bubble"}, kind=ScheduleKind.ZERO_BUBBLE),
    "tensor_parallel": _Way(changes={"tensor_parallel": 2}, degree=2),
}
_EAGER = tuple(way for way in WAYS if way != "compile")
_LOSS_TOLERANCE = 2e-3
_SMALL = Size(hidden=128, blocks=4, length=64, num_steps=12)


def measure_ways(
    device: str,
    *,
    size: Size = _SMALL,
    ways: Collection[str] = tuple(WAYS),
    plain: Callable[[JobSpec], JobSpec] = lambda job: job,
) -> Numbers:
    """Largest differences between losses of two stages and those of a plain loop, by way; and float16's skipped steps.

    `plain` changes what the plain loop trains: tests have it train something else.
    """
    numbers: dict[str, float] = {}
    expected: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory))
        for name in ways:
            way = WAYS[name]
            job = replace(size.job(device), **way.changes)  # type: ignore[arg-type]  # by name
            if job.dtype not in expected:
                expected[job.dtype] = [loss for _, loss in bench.alone(plain(job))]
            records = bench.train(job, size.plan(2, degree=way.degree), way.kind).records
            pairs = zip(records, expected[job.dtype], strict=True)
            numbers[name] = max(abs(record.loss - loss) for record, loss in pairs)
            if job.dtype == "float16":
                numbers["skipped"] = sum(record.is_skipped for record in records)
    return numbers


# --- memory ----------------------------------------------------------------------------------------------------------


def _keep_peaks(directory: Path, device: str, worker_id: WorkerId) -> None:
    """Have this process write down, now and then, the most memory that it has had: the device's, and pinned."""

    def peaks() -> tuple[int, int]:
        if device == "cpu":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, 0
        pinned = torch.cuda.host_memory_stats() if torch.cuda.is_initialized() else {}  # type: ignore[no-untyped-call]
        return torch.cuda.max_memory_allocated(), pinned.get("allocated_bytes.peak", 0)

    def keep() -> None:
        path = directory / f"{worker_id.node}.json"
        while True:
            path.with_suffix(".new").write_text(json.dumps(peaks()))
            path.with_suffix(".new").rename(path)
            time.sleep(_PEAK_EVERY_S)

    threading.Thread(target=keep, daemon=True, name="peaks").start()


def measure_memory(
    device: str,
    *,
    size: Size = Size(hidden=1024, blocks=8, length=512, num_steps=3, heads=16),
    counts: tuple[int, int] = (8, 64),
) -> Numbers:
    """Peaks of two stages over what the plan says, and with many microbatches over those with few."""
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory))
        job = size.job(device)
        profile = bench.profile(job)
        of_counts = [_peaks(bench, replace(size, num_microbatches=count), device) for count in counts]
    plan = replace(size, num_microbatches=min(counts)).plan(2)
    planned = forecast(profile, plan).pipelines[0].timeline.peak_memory_bytes
    few, many = of_counts
    return {
        "over_plan": max(peak / plan for peaks in of_counts for (peak, _), plan in zip(peaks, planned, strict=True)),
        "growth": max(after / before for (before, _), (after, _) in zip(few, many, strict=True)),
        "pinned_growth": max(after / max(before, 1) for (_, before), (_, after) in zip(few, many, strict=True)),
    }


def _peaks(bench: Bench, size: Size, device: str) -> list[tuple[int, int]]:
    """Bytes on the device and pinned, of each stage."""
    with tempfile.TemporaryDirectory(dir=bench.directory) as directory:
        plan = size.plan(2)
        with bench.workers(size.job(device), plan, partial(_keep_peaks, Path(directory), device)) as workers:
            workers.train(plan, ScheduleKind.ONE_F_ONE_B)
            time.sleep(5 * _PEAK_EVERY_S)
            files = [Path(directory) / f"{worker_id.node}.json" for worker_id in plan.worker_ids]
            return [(peak, pinned) for peak, pinned in (json.loads(file.read_text()) for file in files)]


# --- speed -----------------------------------------------------------------------------------------------------------

_LARGE = Size(hidden=2048, blocks=20, length=2048, microbatch_size=4, num_microbatches=4, num_steps=10, heads=16)
"""1.0 billion parameters."""
_STATE_BYTES = 12
"""For each parameter: it and both moments of Adam, in float32."""
_DIGESTED = {"cuda": 1 << 29, "cpu": 1 << 20}
"""Elements whose digest is timed."""
_HALF = Size(hidden=1024, blocks=16, length=1024, microbatch_size=4, num_microbatches=8, num_steps=10, heads=16)


def measure_speed(device: str, *, size: Size = _LARGE, dtype: str = "bfloat16", rounds: int = 2) -> Numbers:
    """A worker beside a plain loop of transformers and torch: its share of the loop's speed, and of the device's.

    And the share of ten steps that it takes to digest the state, as `checkpoint.compare_steps: 10` does.
    """
    job, ours, plain = size.job(device, dtype=dtype), [], []
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory))
        for _ in range(rounds):
            plain.append(_median([duration_s for duration_s, _ in bench.alone(job)]))
            ours.append(_median([record.duration_s for record in bench.train(job, size.plan(1)).records]))
    shape = shape_from_config({**job.model.config, "model_type": "llama", "vocab_size": job.data.vocab_size})
    flops = training_flops(shape, num_samples=job.global_batch_size, sequence_length=size.length)
    flops_per_s = flops / min(ours)
    digest_s = shape.num_params * _STATE_BYTES / digest_bytes_per_s(device, _DIGESTED[device])
    share = digest_s / (10 * min(ours))
    return {"of_plain": _ratio(plain, ours), "step_s": min(ours), "digest_share": share, **_mfu(device, flops_per_s)}


def _mfu(device: str, flops_per_s: float) -> Numbers:
    """The share of the matrix products that the GPU was measured to do; nothing of a CPU."""
    if device == "cpu":
        return {"flops_per_s": flops_per_s}
    product_flops = measure_gpus()[0].product_flops
    assert product_flops is not None
    return {"flops_per_s": flops_per_s, "mfu": flops_per_s / product_flops}


def measure_pipeline(device: str, *, size: Size = _HALF, rounds: int = 2) -> Numbers:
    """Two workers beside torch's Schedule1F1B with the same cut: their share of its speed, and how losses differ."""
    job, ours, theirs, difference = size.job(device, type="gpt2"), [], [], 0.0
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory))
        for _ in range(rounds):
            records = bench.train(job, size.plan(2)).records
            times = bench.pipelined(job, size.blocks // 2)
            ours.append(_median([record.duration_s for record in records]))
            theirs.append(_median([duration_s for duration_s, _ in times]))
            pairs = zip(records, times, strict=True)
            difference = max(difference, *(abs(record.loss - loss) for record, (_, loss) in pairs))
    return {"of_torch": _ratio(theirs, ours), "difference": difference}


def _median(step_s: Sequence[float]) -> float:
    return statistics.median(step_s[min(_WARM_UP, len(step_s) - 1) :])


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """Of rounds side by side, so that a device that slows down slows both."""
    return statistics.median(their / our for their, our in zip(theirs, ours, strict=True))


CHECKS: Sequence[Check] = (
    Check(
        tier="A",
        name="losses beside a plain loop",
        measure=lambda: measure_ways("cuda", ways=_EAGER),
        judge=within({"skipped": 1}, dict.fromkeys(_EAGER, _LOSS_TOLERANCE)),
        needs=(Need.SHARED_GPU,),
    ),
    Check(
        tier="A",
        name="compiled blocks beside a plain loop",
        measure=lambda: measure_ways("cuda", ways=["compile"]),
        judge=within({}, {"compile": _LOSS_TOLERANCE}),
        needs=(Need.SHARED_GPU, Need.COMPILER),
    ),
    Check(
        tier="A",
        name="memory beside the plan",
        measure=lambda: measure_memory("cuda"),
        judge=within({}, {"over_plan": 1.05, "growth": 1.01, "pinned_growth": 1.01}),
        needs=(Need.SHARED_GPU,),
    ),
    Check(
        tier="C",
        name="Llama of 1B beside a plain loop",
        measure=lambda: measure_speed("cuda"),
        judge=within({"of_plain": 0.97, "mfu": 0.0}, {"digest_share": 0.01}),
        needs=(Need.SHARED_GPU,),
    ),
    Check(
        tier="C",
        name="two workers beside Schedule1F1B",
        measure=lambda: measure_pipeline("cuda"),
        judge=within({"of_torch": 1.0}, {"difference": _LOSS_TOLERANCE}),
        needs=(Need.SHARED_GPU,),
    ),
)
