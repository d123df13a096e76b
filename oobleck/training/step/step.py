"""The step in flight: this worker's results, until the step is applied or forgotten."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field

import torch

from oobleck.control.steps import FAILURES, CommitState, Compute
from oobleck.job import JobSpec
from oobleck.schedule import compile_schedule
from oobleck.training.comm import DeviceWork, StageSums, Waiter
from oobleck.training.data import Dataset
from oobleck.training.model import StageModel
from oobleck.training.weight_gradients import WeightGradients

from .executor import Execution
from .node_sums import NodeSums
from .reading import BatchReader
from .reduction import GradientReducer
from .sections import SectionSums
from .stage_state import StageState
from .step_timer import StepTimer
from .step_work import GlobalBatch, PipelineRank, StepWork


@dataclass(slots=True)
class StepInFlight:
    """Runs one step after the other. Gradients are in the parameters' `grad`, other results in `work`."""

    job: JobSpec
    dataset: Dataset
    state: StageState
    _: KW_ONLY
    node_sums: NodeSums | None
    """None unless the stage is sharded."""
    sections: SectionSums
    commit_state: CommitState
    waiter: Waiter
    step_timer: StepTimer
    device_work: DeviceWork | None
    """None where the host computes."""
    stage_sums: StageSums
    reduced: dict[str, torch.Tensor] = field(init=False, default_factory=dict)
    """The step's gradients, keyed by parameter, once they are summed over their owners."""
    model: StageModel = field(init=False)
    _reader: BatchReader = field(init=False)
    _put_off: WeightGradients | None = field(init=False, default=None)
    _batch: GlobalBatch | None = field(init=False, default=None)
    _work: StepWork | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.model = self.state.model
        self._reader = BatchReader(self.dataset, self.model)
        # Modules of a traced model may run several times in a microbatch: their backward passes stay in one part.
        if self.job.may_split_backward and self.model.structure.whole_loss is None:
            self._put_off = WeightGradients()
            for layer in range(self.model.structure.num_layers):
                for module in self.model.modules_of(layer):
                    self._put_off.put_off(module)

    @property
    def batch(self) -> GlobalBatch:
        assert self._batch is not None
        return self._batch

    @property
    def work(self) -> StepWork:
        assert self._work is not None
        return self._work

    def begin(self, step: int, *, scale: float) -> None:
        """Begin a step; its loss is multiplied by `scale`. Raises Interrupted if its records never arrive."""
        self.model.loss_scale = scale
        samples, divisor = self._samples_of(step)
        self._batch = GlobalBatch(
            dataset=self.dataset,
            step=step,
            samples=samples,
            divisor=divisor,
            microbatch_size=self.job.microbatch_size,
            seed=self.job.seed,
            lane=self.state.share.lane,
            part=self.state.share.part,
        )
        self._work = StepWork(step)

    def forget(self) -> None:
        """Drop the step's results, except its committed sections."""
        self.state.forget_gradients()
        self._batch, self._work = None, None
        self.reduced = {}
        self.step_timer.forget_step()

    def _samples_of(self, step: int) -> tuple[Sequence[int], int]:
        """Return a step's samples, and the divisor of its losses; of shards, once its records are known."""
        # The divisor is the number of predicted tokens, as far as it is known without reading the samples:
        # `item_share_of` corrects it once all tokens are counted.
        batch, records = self.job.global_batch_size, self.dataset.records
        if records is None:
            samples = self.dataset.samples_of_step(self.job.seed, step, batch)
            return samples, self.dataset.divisor_of(step, samples)
        self.waiter.wait(lambda: records.is_told(step), self.commit_state.is_pipeline_stopped)
        numbers, num_items = records.numbers_of(step, batch)
        # If no token counts, the sums are zero, whatever divides them.
        return numbers, max(1, num_items)

    def execute(self, pipeline_rank: PipelineRank, program: Compute, reducer: GradientReducer) -> None:
        """Run this stage's program for some microbatches; if the step ends under the plan, `reducer` sums them.

        Raises Interrupted, PeerLost or ShardUnreadable.
        """
        try:
            self._run(pipeline_rank, program, reducer)
        except FAILURES:
            # No plan keeps a pipeline that failed. Messages of this attempt may be stuck on its edges, and must never
            # meet those of another.
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
            commits=program.ends_under_plan,
        )
        if self._put_off is not None:
            self._put_off.engage(is_on=pipeline_rank.splits_backward)
        execution = Execution(
            batch=self.batch,
            work=self.work,
            pipeline_rank=pipeline_rank,
            model=self.model,
            commit_state=self.commit_state,
            put_off=self._put_off if pipeline_rank.splits_backward else None,
            sections=self.sections if program.num_sections > 1 and program.ends_under_plan else None,
            device_work=self.device_work,
            reader=self._reader,
            node_sums=self.node_sums,
        )
        # Sums are posted early only where the plan's own reduction comes next: a step that a committee finishes without
        # some nodes is reduced in other groups.
        around_last = self._overlapping(reducer, pipeline_rank) if program.ends_under_plan else nullcontext()
        self.waiter.take_longest_s()  # discards the longest wait of what came before
        began_s, waited_s = time.monotonic(), self.waiter.waited_s
        execution.run(schedule.programs[pipeline_rank.stage], program.microbatches, around_last=around_last)
        waited_s, longest_wait_s = self.waiter.waited_s - waited_s, self.waiter.take_longest_s()
        # The host has launched kernels that the GPU may not have computed: the timer counts until they are done.
        if self.device_work is not None:
            self.waiter.call(self.device_work.mark(), self.commit_state.is_pipeline_stopped, self.stage_sums.others)
        self.stage_sums.conclude()
        ended_s = time.monotonic()
        # Whenever the GPU did not compute, it waited for others.
        if self.device_work is not None:
            waited_s = max(0.0, ended_s - began_s - self.device_work.seconds())
        self.step_timer.add(
            began_s,
            ended_s,
            waited_s=waited_s,
            longest_wait_s=longest_wait_s,
            num_microbatches=len(program.microbatches),
        )

    @contextmanager
    def _overlapping(self, reducer: GradientReducer, pipeline_rank: PipelineRank) -> Iterator[None]:
        """Post buckets as their gradients become final in the block, the last backward pass."""
        self.sections.look()
        # Not while a section is under way: all members of a group must post their sums in the same order, the section's
        # first. Nor with split backward passes: a gradient that is put off arrives without a hook, and a tied weight
        # would seem final too early.
        # Nor where a stage is sharded, whose shares have their gradients only once the node has summed them.
        is_final = not pipeline_rank.splits_backward and self.node_sums is None
        overlaps = is_final and self.sections.begin_step_sums()
        structure = self.model.structure
        # The last backward pass of a step is always that of the first chunk; all other gradients are final.
        changing = {name for layer in self.model.chunks[0] for name in structure.trained_parameters(layer)}
        with reducer.overlapping(changing) if overlaps else nullcontext():
            yield

    def reduce(self, reducer: GradientReducer) -> None:
        """Sum the step's gradients over their owners, plus the committed sums. Raises Interrupted or PeerLost."""
        self.reduced = reducer.finish(self.commit_state.is_fenced, plus=self.sections.sums)
