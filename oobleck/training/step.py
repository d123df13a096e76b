"""The step in flight: what this worker has computed of it, until it is applied or forgotten."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from oobleck.control.standing import PeerLost, Standing
from oobleck.errors import ShardUnreadable
from oobleck.job import JobSpec
from oobleck.schedule import ScheduleKind, compile_schedule
from oobleck.wire import Segment

from .banking import Bank
from .data import Dataset
from .devices import synchronize
from .executor import Lane, StepWork, execute
from .models import StageModel
from .reduction import GradientReducer
from .sampling import samples_of_step
from .signals import Signals
from .timesheet import Timesheet
from .weight_gradients import WeightGradients

__all__ = ["StepInFlight"]


class StepInFlight:
    """Mutable: one step after the other. Gradients are in the parameters' `grad`, what is done in `work`."""

    def __init__(
        self,
        job: JobSpec,
        dataset: Dataset,
        model: StageModel,
        *,
        bank: Bank,
        standing: Standing,
        signals: Signals,
        timesheet: Timesheet,
        on_compute: Callable[[], None],
    ) -> None:
        """`on_compute` is called before anything is computed under a plan."""
        self._job = job
        self._dataset = dataset
        self._model = model
        self._bank = bank
        self._standing = standing
        self._signals = signals
        self._timesheet = timesheet
        self._on_compute = on_compute
        self._put_off = self._put_off_weights() if job.may_split_backward else None
        self.work: StepWork | None = None
        self.reduced: dict[str, torch.Tensor] = {}
        """Its gradients, by parameter, once they are summed over all."""
        self._base_done = False
        self._segments_done: set[int] = set()

    def _put_off_weights(self) -> WeightGradients:
        put_off = WeightGradients()
        for layer in range(self._model.structure.num_layers):
            for module in self._model.modules_of(layer):
                put_off.put_off(module)
        return put_off

    def begin(self, step: int, *, scale: float) -> StepWork:
        """Begin a step anew; its loss is multiplied with `scale`. Raises Interrupted where its records never come."""
        self.forget()
        self._model.loss_scale = scale
        samples, num_items = self._samples_of(step)
        self.work = StepWork(
            step=step,
            samples=samples,
            seed=self._job.seed,
            microbatch_size=self._job.microbatch_size,
            num_items=num_items,
        )
        return self.work

    def forget(self) -> None:
        """Nothing is done of the step but what is banked."""
        for parameter in self._model.parameters.values():
            parameter.grad = None
        self.work = None
        self.reduced = {}
        self._base_done = False
        self._segments_done.clear()
        self._timesheet.forget_step()
        self._standing.begin_step()

    def _samples_of(self, step: int) -> tuple[Sequence[int], int]:
        """Return the samples of a step, and the tokens they predict; of shards, once they are told."""
        batch, records = self._job.global_batch_size, self._dataset.records
        if records is None:
            samples = samples_of_step(self._job.seed, step, batch, self._dataset.num_samples)
            return samples, len(samples) * self._dataset.items_per_sample
        self._signals.wait(lambda: records.is_told(step), self._standing.is_pipeline_stopped)
        numbers, num_items = records.numbers_of(step, batch)
        return numbers, max(1, num_items)

    # --- computing -----------------------------------------------------------------------------------------

    def compute(
        self,
        step: int,
        lane: Lane,
        microbatches: Sequence[int],
        *,
        scale: float,
        reducer: GradientReducer | None = None,
    ) -> None:
        """Run this stage's program for its pipeline's own share of the step; nothing when that is done already.

        With a `reducer`, gradients are banked in sections, and the last section's begin to be reduced with the last
        backward pass. Raises Interrupted, PeerLost or ShardUnreadable.
        """
        work = self.work
        if work is None or work.step != step:
            work = self.begin(step, scale=scale)
        if self._base_done:
            return
        if reducer is None:
            self._execute(work, lane, microbatches, nullcontext())
        else:
            around_last = self._overlapping(reducer, lane)
            self._execute(work, lane, microbatches, around_last, num_sections=self._bank.num_sections)
        self._base_done = True

    def compute_segment(self, lane: Lane, segment: Segment) -> None:
        """Run the program for microbatches of a broken pipeline, once. Raises as `compute` does."""
        assert self.work is not None
        if segment.segment not in self._segments_done:
            self._execute(self.work, lane, segment.microbatches, nullcontext(), commits=False)
            self._segments_done.add(segment.segment)

    @contextmanager
    def _overlapping(self, reducer: GradientReducer, lane: Lane) -> Iterator[None]:
        """Around the last backward pass: post what is final meanwhile, unless a section is still to be banked."""
        self._bank.look()
        # A weight whose gradient is put off gets it by no hook; a tied one would seem final before it is.
        overlaps = not _splits_backward(lane) and self._bank.is_clear and not self._standing.is_fenced()
        with reducer.overlapping() if overlaps else nullcontext():
            yield

    def _execute(
        self,
        work: StepWork,
        lane: Lane,
        microbatches: Sequence[int],
        around_last: AbstractContextManager[None],
        *,
        num_sections: int = 1,
        commits: bool = True,
    ) -> None:
        schedule = compile_schedule(
            lane.schedule,
            num_stages=lane.num_stages,
            num_microbatches=len(microbatches),
            num_sections=num_sections,
            commits=commits,
        )
        if self._standing.is_broken:
            # It failed after the fence was answered, so the coordinator counts on this pipeline. Say it again, now
            # under the order's generation; what was computed cannot be continued.
            raise PeerLost("a program of this step failed half-way before")
        self._on_compute()
        if self._put_off is not None:
            self._put_off.engage(is_on=_splits_backward(lane))
        began_s, waited_s = time.monotonic(), self._signals.waited_s
        try:
            execute(
                schedule.programs[lane.stage],
                microbatches,
                work=work,
                model=self._model,
                dataset=self._dataset,
                lane=lane,
                on_backward=self._standing.note_microbatch,
                around_last=around_last,
                put_off=self._put_off if _splits_backward(lane) else None,
                bank=self._bank if num_sections > 1 else None,
                signals=self._signals,
                interrupted=self._standing.is_pipeline_stopped,
            )
        except (PeerLost, ShardUnreadable):
            self._standing.note_broken()
            raise
        synchronize(self._model.device)  # what was launched is not computed yet, and times are of what is
        self._timesheet.add(
            began_s,
            time.monotonic(),
            waited_s=self._signals.waited_s - waited_s,
            num_microbatches=len(microbatches),
        )


def _splits_backward(lane: Lane) -> bool:
    """Whether a stage takes its backward passes in two parts: the first of a pipeline never does."""
    return lane.schedule is ScheduleKind.ZERO_BUBBLE and not lane.is_first
