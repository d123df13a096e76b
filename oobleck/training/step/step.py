"""The step in flight: what this worker has computed of it, until it is applied or forgotten."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from oobleck.control.steps import FAILURES, CommitState, Compute
from oobleck.job import JobSpec
from oobleck.schedule import compile_schedule
from oobleck.training.comm import DeviceWork, Waiter
from oobleck.training.data import Dataset
from oobleck.training.model import StageModel, WeightGradients

from .executor import Execution
from .reduction import GradientReducer
from .sections import SectionSums
from .step_timer import StepTimer
from .step_work import GlobalBatch, PipelineRank, StepWork

_DEVICE_POLL_S = 2e-4


class StepInFlight:
    """Runs one step after the other. Gradients are in the parameters' `grad`, what is done in `work`."""

    def __init__(
        self,
        job: JobSpec,
        dataset: Dataset,
        model: StageModel,
        *,
        sections: SectionSums,
        commit_state: CommitState,
        waiter: Waiter,
        step_timer: StepTimer,
        device_work: DeviceWork | None,
    ) -> None:
        """`device_work` is None where the host computes."""
        self._job = job
        self._dataset = dataset
        self._model = model
        self._sections = sections
        self._commit_state = commit_state
        self._waiter = waiter
        self._step_timer = step_timer
        self._device_work = device_work
        self._put_off = self._put_off_weights() if job.may_split_backward else None
        self._batch: GlobalBatch | None = None
        self._work: StepWork | None = None
        self.reduced: dict[str, torch.Tensor] = {}
        """Its gradients, by parameter, once they are summed over all."""

    def _put_off_weights(self) -> WeightGradients:
        put_off = WeightGradients()
        for layer in range(self._model.structure.num_layers):
            for module in self._model.modules_of(layer):
                put_off.put_off(module)
        return put_off

    @property
    def batch(self) -> GlobalBatch:
        """The samples of the step in flight."""
        assert self._batch is not None
        return self._batch

    @property
    def work(self) -> StepWork:
        """What is done of it."""
        assert self._work is not None
        return self._work

    def begin(self, step: int, *, scale: float) -> None:
        """Begin a step; its loss is multiplied by `scale`. Raises Interrupted if its records never come."""
        self._model.loss_scale = scale
        samples, divisor = self._samples_of(step)
        self._batch = GlobalBatch(
            dataset=self._dataset,
            step=step,
            samples=samples,
            divisor=divisor,
            microbatch_size=self._job.microbatch_size,
            seed=self._job.seed,
        )
        self._work = StepWork(step)

    def forget(self) -> None:
        """Drop what is done of the step and not committed."""
        for parameter in self._model.parameters.values():
            parameter.grad = None
        self._batch, self._work = None, None
        self.reduced = {}
        self._step_timer.forget_step()

    def _samples_of(self, step: int) -> tuple[Sequence[int], int]:
        """Return a step's samples, and what to divide its losses by: the tokens that they predict, as far as that is
        known without reading them. From shards, once its records are known."""
        batch, records = self._job.global_batch_size, self._dataset.records
        if records is None:
            samples = self._dataset.samples_of_step(self._job.seed, step, batch)
            return samples, len(samples) * self._dataset.items_per_sample
        self._waiter.wait(lambda: records.is_told(step), self._commit_state.is_pipeline_stopped)
        numbers, num_items = records.numbers_of(step, batch)
        return numbers, max(1, num_items)

    def await_records(self, step: int) -> None:
        """Wait until it is known which records a step takes, or that it never comes. Raises Interrupted."""
        records = self._dataset.records
        assert records is not None
        self._waiter.wait(
            lambda: records.is_told(step) or records.over_after(step - 1) is not None, self._commit_state.is_fenced
        )
        self._step_timer.begin_step()

    # --- computing -----------------------------------------------------------------------------------------

    def execute(self, pipeline_rank: PipelineRank, program: Compute, reducer: GradientReducer) -> None:
        """Run this stage's program for some microbatches; where it posts sums, with this reducer.

        Raises Interrupted, PeerLost or ShardUnreadable; then no plan keeps the pipeline, and its edges are ended.
        """
        try:
            self._run(pipeline_rank, program, reducer)
        except FAILURES:
            if pipeline_rank.group is not None:
                pipeline_rank.group.abort()
            raise

    def _run(self, pipeline_rank: PipelineRank, program: Compute, reducer: GradientReducer) -> None:
        schedule = compile_schedule(
            pipeline_rank.schedule,
            num_stages=pipeline_rank.num_stages,
            num_chunks=pipeline_rank.num_chunks,
            num_microbatches=len(program.microbatches),
            num_sections=program.num_sections,
            commits=program.posts_sums,
        )
        if self._put_off is not None:
            self._put_off.engage(is_on=pipeline_rank.splits_backward)
        execution = Execution(
            self.batch,
            self.work,
            pipeline_rank,
            self._model,
            self._commit_state,
            put_off=self._put_off if pipeline_rank.splits_backward else None,
            sections=self._sections if program.num_sections > 1 else None,
            device_work=self._device_work,
        )
        around_last = self._overlapping(reducer, pipeline_rank) if program.posts_sums else nullcontext()
        self._waiter.take_longest_s()
        began_s, waited_s = time.monotonic(), self._waiter.waited_s
        execution.run(schedule.programs[pipeline_rank.stage], program.microbatches, around_last=around_last)
        waited_s, longest_wait_s = self._waiter.waited_s - waited_s, self._waiter.take_longest_s()
        if self._device_work is not None:  # kernels are launched, not yet computed, and times count what is computed
            self._device_work.mark()
            self._waiter.wait(self._device_work.is_done, self._commit_state.is_pipeline_stopped, poll_s=_DEVICE_POLL_S)
        ended_s = time.monotonic()
        if self._device_work is not None:
            waited_s = max(0.0, ended_s - began_s - self._device_work.seconds())
        self._step_timer.add(
            began_s,
            ended_s,
            waited_s=waited_s,
            longest_wait_s=longest_wait_s,
            num_microbatches=len(program.microbatches),
        )

    @contextmanager
    def _overlapping(self, reducer: GradientReducer, pipeline_rank: PipelineRank) -> Iterator[None]:
        """Around the last backward pass: post what is final meanwhile, unless a section is still to be committed."""
        self._sections.look()
        # A weight whose gradient is put off gets it by no hook; a tied one would seem final before it is.
        overlaps = not pipeline_rank.splits_backward and self._sections.begin_step_sums()
        structure = self._model.structure
        changing = {name for layer in self._model.chunks[0] for name in structure.trained_parameters(layer)}
        with reducer.overlapping(changing) if overlaps else nullcontext():
            yield

    def reduce(self, reducer: GradientReducer) -> None:
        """Sum the step's gradients over all, with what is committed of them. Raises Interrupted or PeerLost."""
        self.reduced = reducer.finish(self._commit_state.is_fenced, plus=self._sections.sums)
