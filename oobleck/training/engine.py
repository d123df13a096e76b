"""The training thread's work: run steps, end them together, and follow orders from one plan to the next.

What is decided elsewhere arrives as an order; the engine carries it out and never chooses. Gradients of the
step in flight live in the parameters' `grad`, what was done of it in `StepWork`, until the step is applied or
forgotten. What is banked of it (`banking.py`) stays until it is applied.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from oobleck.control.sections import shares_of
from oobleck.control.standing import Interrupted, PeerLost, Standing
from oobleck.errors import ShardUnreadable
from oobleck.job import JobSpec
from oobleck.planner import ExecutionPlan, Place
from oobleck.schedule import ScheduleKind, compile_schedule
from oobleck.wire import (
    CommitRecord,
    Evaluating,
    EvaluationDone,
    LayersMoving,
    Order,
    Pace,
    ReplicaDigests,
    Restore,
    Resumed,
    StepCommitted,
)

from .banking import Account, Bank
from .data import Dataset
from .devices import synchronize
from .digests import digest_of
from .evaluation import Evaluator
from .executor import Lane, StepWork, execute
from .groups import Group, GroupKey, GroupTable
from .loss_scale import LossScale
from .models import ModelStructure, StageModel
from .optimizer import Optimizer
from .pace import PaceMeter
from .precision import Precision
from .reduction import Bucket, GradientReducer, commit, commit_key, make_buckets, squared_norm
from .sampling import samples_of_step
from .saving import Saving
from .signals import Signals
from .tensor_parallel import Share, initialize_share, install
from .transfer import LayerState, exchange_layers, fill_state, transfer_key
from .weight_gradients import WeightGradients

__all__ = ["Engine"]

_STEPS_TIMED = 16
"""Over how many steps it is told what was computed and what waited for."""
_LOSS_SCALE = "training.loss_scale"
"""What layers' files call the numbers of `LossScale`."""
_BUSY_TIMES = 16
"""How many stretches of computation are remembered, to tell how long a recovery kept everybody waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlaceInPlan:
    """What a plan gives one worker to do."""

    pipeline: int
    layers: range
    stage: int
    num_stages: int
    lane_key: GroupKey
    """The group that links the pipeline's stages."""
    stage_key: GroupKey
    """The group of the devices that share the stage."""

    @classmethod
    def find(cls, plan: ExecutionPlan, place: Place, pipeline_generations: Sequence[int]) -> _PlaceInPlan | None:
        """None for a spare."""
        located = plan.locate(place)
        if located is None:
            return None
        pipeline = plan.pipelines[located[0]]
        return cls(
            pipeline=located[0],
            layers=pipeline.stages[located[1]].layers,
            stage=located[1],
            num_stages=len(pipeline.stages),
            lane_key=GroupKey("pipeline", pipeline_generations[located[0]], pipeline.places),
            stage_key=GroupKey("stage", pipeline_generations[located[0]], pipeline.stages[located[1]].places),
        )


class Engine:
    """Everything that one worker trains with. Only the training thread touches it."""

    def __init__(
        self,
        job: JobSpec,
        place: Place,
        *,
        device: torch.device,
        dataset: Dataset,
        validation: Dataset | None = None,
        structure: ModelStructure,
        share: Share,
        optimizer: Optimizer,
        groups: GroupTable,
        signals: Signals,
        standing: Standing,
        saving: Saving | None,
        report: Callable[
            [StepCommitted | Resumed | Evaluating | EvaluationDone | Pace | LayersMoving | ReplicaDigests], None
        ],
    ) -> None:
        self._job = job
        self._place = place
        self._dataset = dataset
        self._whole = structure
        self._share = share
        self._structure = self._share.structure
        self._stage_sums: Group | None = None
        """Where the devices that share the stage sum."""
        self._stage_stops = standing.is_pipeline_stopped
        """What ends their waiting for each other."""
        self._groups = groups
        self._signals = signals
        self._standing = standing
        self._saving = saving
        self._report = report
        self._records = dataset.records
        self._precision = Precision.of(job.dtype)
        self._loss_scale: LossScale | None = LossScale(scale=job.initial_loss_scale)
        """None where others went on without this worker: it must be told before it takes part again."""
        self._model = StageModel(
            self._structure,
            dtype=self._precision.parameters,
            device=device,
            autocast=self._precision.autocast,
            activation_checkpointing=job.activation_checkpointing,
            compiles=job.compile,
        )
        install(self._model, self._share, self._sum_in_stage)
        self._optimizer = optimizer
        self._evaluator = (
            Evaluator(job, validation, signals=signals, on_progress=self._say_evaluating)
            if validation is not None and job.eval_steps
            else None
        )
        self._schedule = ScheduleKind.ONE_F_ONE_B
        """Of the plan in force."""
        self._put_off = self._put_off_weights() if job.may_split_backward else None
        self._plan: ExecutionPlan | None = None
        self._lane: Lane | None = None
        self._reducer: GradientReducer | None = None
        self._commit_key: GroupKey | None = None
        self._work: StepWork | None = None
        self._base_done = False
        self._segments_done: set[int] = set()
        self._reduced: dict[str, torch.Tensor] = {}
        self._kept: dict[int, LayerState] = {}
        self._bank = Bank(
            standing,
            groups,
            signals,
            num_microbatches=job.num_microbatches,
            tells=self._share.rank == 0,
            on_banked=self._let_go_of_kept,
        )
        self._pace = PaceMeter(place.device)
        self._step_ended_s = time.monotonic()
        self._busy_s: deque[tuple[float, float]] = deque(maxlen=_BUSY_TIMES)
        self._busy_in_step: list[tuple[float, float]] = []
        self._spent_s: deque[tuple[float, float]] = deque(maxlen=_STEPS_TIMED)
        self._resumed_generation: int | None = None
        self._transfer_s = 0.0
        self._received_bytes = 0

    def follow(self, order: Order) -> None:
        """Carry an order out up to the point where its plan is in force.

        Raises Interrupted or PeerLost, and CorruptCheckpoint where an order to restore one cannot be followed.
        """
        if order.catch_up is not None and self._standing.catch_up(order.catch_up):
            self._apply(order.catch_up)
        if order.catch_up_bank is not None:
            self._bank.catch_up(order.catch_up_bank)
        self._bank.give_back(self._work)
        if order.finish is None:
            self._forget_step()
        elif self._standing.applied == order.finish - 1:
            self._finish(order, order.finish)
        self._adopt(order)

    def train(self) -> bool:
        """Run steps to the job's last one, or to the one whose commit agrees to stop; False for a spare.

        Raises Interrupted or PeerLost.
        """
        if self._lane is None:
            return False
        assert self._plan is not None
        assert self._reducer is not None
        assert self._commit_key is not None
        stop = False
        if not self._bank.before:  # else in the middle of a step, before which it was done
            self._evaluate(self._plan, self._lane, self._commit_key)
        while not stop and self._has_next(self._plan):
            self._compute(self._plan, self._lane, self._standing.applied + 1, self._reducer)
            stop = self._end_step(self._reducer, self._commit_key)
            if not stop:
                self._evaluate(self._plan, self._lane, self._commit_key)
        return True

    def _evaluate(self, plan: ExecutionPlan, lane: Lane, key: GroupKey) -> None:
        """Evaluate the model if it is due. Raises Interrupted or PeerLost."""
        step = self._standing.applied
        if self._evaluator is None or not self._job.is_evaluated(step):
            return
        located = plan.locate(self._place)
        assert located is not None
        self._say_resumed()
        # An evaluation may be given up half-way, which leaves sums that nobody completes: they have a group of their
        # own, that is not used again then.
        places = plan.pipelines[located[0]].stages[located[1]].places
        with self._summing_over(GroupKey("evaluation", key.generation, places), self._standing.is_fenced):
            outcome = self._evaluator.run(
                step,
                model=self._model,
                lane=lane,
                share=(located[0], len(plan.pipelines)),
                generation=key.generation,
                everyone=self._groups[key] if len(key.members) > 1 else None,
                interrupted=self._standing.is_fenced,
            )
        self._step_ended_s = time.monotonic()
        if lane.is_first or lane.is_last:
            done = EvaluationDone(
                device=self._place.device,
                step=step,
                loss=outcome.loss,
                num_samples=outcome.num_samples,
                duration_s=outcome.duration_s,
            )
            self._report(done)

    def _say_evaluating(self, step: int) -> None:
        self._report(Evaluating(device=self._place.device, step=step))

    def time_spent(self) -> tuple[float, float]:
        """Seconds of the latest steps in which this worker computed, and in which it waited for its neighbours."""
        return sum(computed_s for computed_s, _ in self._spent_s), sum(waited_s for _, waited_s in self._spent_s)

    def _sum_in_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the devices that share the stage, in place. Raises Interrupted or PeerLost."""
        assert self._stage_sums is not None
        self._stage_sums.all_reduce(tensor, self._signals).wait(self._stage_stops)
        return tensor

    @contextmanager
    def _summing_over(self, key: GroupKey, interrupted: Callable[[], bool]) -> Iterator[None]:
        """Within the block the devices of the stage sum in this group, formed if need be, until `interrupted`."""
        if len(key.members) == 1:
            yield
            return
        self._groups.form([key], interrupted)
        before = self._stage_sums, self._stage_stops
        self._stage_sums, self._stage_stops = self._groups[key], interrupted
        try:
            yield
        finally:
            self._stage_sums, self._stage_stops = before

    def _put_off_weights(self) -> WeightGradients:
        put_off = WeightGradients()
        for layer in range(self._structure.num_layers):
            for module in self._model.modules_of(layer):
                put_off.put_off(module)
        return put_off

    # --- a step ----------------------------------------------------------------------------------------------

    def _compute(self, plan: ExecutionPlan, lane: Lane, step: int, reducer: GradientReducer | None = None) -> StepWork:
        """Run this stage's program for its own share of the step; nothing when that is done already.

        With a `reducer`, gradients are banked in sections, and the last section's begin to be reduced with the last
        backward pass.
        """
        work = self._work
        if work is None or work.step != step:
            work = self._begin_step(step)
        if not self._base_done:
            located = plan.locate(self._place)
            assert located is not None
            share = shares_of(plan, self._bank.before)[located[0]]
            if reducer is None:
                self._execute(work, lane, share, nullcontext())
            else:
                around_last = self._overlapping(reducer, lane)
                self._execute(work, lane, share, around_last, num_sections=self._bank.num_sections)
            self._base_done = True
        return work

    @contextmanager
    def _overlapping(self, reducer: GradientReducer, lane: Lane) -> Iterator[None]:
        """Around the last backward pass: post what is final meanwhile, unless a section is still to be banked."""
        self._bank.look()
        # A weight whose gradient is put off gets it by no hook; a tied one would seem final before it is.
        overlaps = not self._splits(lane) and self._bank.is_clear and not self._standing.is_fenced()
        with reducer.overlapping() if overlaps else nullcontext():
            yield

    def _splits(self, lane: Lane) -> bool:
        """Whether this stage takes its backward passes in two parts: the first of a pipeline never does."""
        return self._schedule is ScheduleKind.ZERO_BUBBLE and not lane.is_first

    def _begin_step(self, step: int) -> StepWork:
        self._forget_step()
        self._model.loss_scale = self._scale
        samples, num_items = self._samples_of(step)
        self._work = StepWork(
            step=step,
            samples=samples,
            seed=self._job.seed,
            microbatch_size=self._job.microbatch_size,
            num_items=num_items,
        )
        return self._work

    def _samples_of(self, step: int) -> tuple[Sequence[int], int]:
        """Return the samples of a step, and the tokens they predict; of shards, once they are told."""
        batch, records = self._job.global_batch_size, self._records
        if records is None:
            samples = samples_of_step(self._job.seed, step, batch, self._dataset.num_samples)
            return samples, len(samples) * self._dataset.items_per_sample
        self._signals.wait(lambda: records.is_told(step), self._standing.is_pipeline_stopped)
        numbers, num_items = records.numbers_of(step, batch)
        return numbers, max(1, num_items)

    def _has_next(self, plan: ExecutionPlan) -> bool:
        """Whether another step comes; where that is not known yet, wait. What is not saved at the end is, now."""
        step, records = self._standing.applied, self._records
        if records is None or step >= self._job.max_steps:
            return step < self._job.max_steps
        if not records.is_told(step + 1):
            self._say_resumed()
            self._signals.wait(
                lambda: records.is_told(step + 1) or records.over_after(step) is not None, self._standing.is_fenced
            )
            self._step_ended_s = time.monotonic()  # the step takes from here on
        if records.is_told(step + 1):
            return True
        over = records.over_after(step)
        assert over is not None
        if over.save and self._saving is not None:
            self._saving.save(plan, (), step, over.generation, self._named_state, position=over.position)
            self._settle()
        return False

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
            self._schedule,
            num_stages=lane.num_stages,
            num_microbatches=len(microbatches),
            num_sections=num_sections,
            commits=commits,
        )
        if self._standing.is_broken:
            # It failed after the fence was answered, so the coordinator counts on this pipeline. Say it again, now
            # under the order's generation; what was computed cannot be continued.
            raise PeerLost("a program of this step failed half-way before")
        self._say_resumed()
        if self._put_off is not None:
            self._put_off.engage(is_on=self._splits(lane))
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
                put_off=self._put_off if self._splits(lane) else None,
                bank=self._bank if num_sections > 1 else None,
                signals=self._signals,
                interrupted=self._standing.is_pipeline_stopped,
            )
        except (PeerLost, ShardUnreadable):
            self._standing.note_broken()
            raise
        synchronize(self._model.device)  # what was launched is not computed yet, and times are of what is
        ended_s = time.monotonic()
        self._busy_in_step.append((began_s, ended_s))
        self._pace.add(ended_s - began_s - (self._signals.waited_s - waited_s), len(microbatches))

    def _say_resumed(self) -> None:
        """Report once after each adoption, at the first computation under the new plan."""
        generation, self._resumed_generation = self._resumed_generation, None
        if generation is not None:
            resumed = Resumed(
                device=self._place.device,
                generation=generation,
                transfer_s=self._transfer_s,
                received_bytes=self._received_bytes,
                resumed_s=time.monotonic(),
                busy_s=tuple(self._busy_s),
            )
            self._report(resumed)

    def _end_step(self, reducer: GradientReducer, key: GroupKey, *, lost: Collection[str] = ()) -> bool:
        """Reduce, commit, apply: all workers or none. Returns whether training ends with this step."""
        work = self._work
        assert work is not None
        interrupted = self._standing.is_fenced
        self._bank.settle()
        if interrupted():
            raise Interrupted  # it may have left out a section, for which others wait in the same groups
        reduced = self._reduced = reducer.finish(interrupted, plus=self._bank.sums)
        self._standing.note_reduced(work.step)
        outcome = commit(
            key,
            # The other devices of the stage have the same to tell.
            loss=work.loss if self._share.rank == 0 else 0.0,
            squared_grad_norm=squared_norm(reducer.buckets, reduced, self._place),
            stop=self._standing.is_stop_wanted or (self._records is not None and self._records.is_last(work.step)),
            save=self._saving is not None and self._saving.is_wanted(work.step),
            counts=work.counts if self._share.rank == 0 else {},
            banked=self._bank.microbatches,
            num_microbatches=self._job.num_microbatches,
            groups=self._groups,
            signals=self._signals,
            interrupted=interrupted,
        )
        assert outcome.repeated == outcome.missing == 0, f"step {work.step}: microbatches counted {outcome.counts}"
        record = CommitRecord(
            step=work.step,
            generation=key.generation,
            loss=self._bank.loss + outcome.loss,
            grad_norm=outcome.grad_norm / self._scale,
            loss_scale=self._scale,
            is_skipped=self._precision.scales_loss and not math.isfinite(outcome.grad_norm),
            learning_rate=self._optimizer.learning_rate(work.step),
            num_samples=work.num_samples,
            samples_repeated=outcome.repeated * self._job.microbatch_size,
            samples_missing=outcome.missing * self._job.microbatch_size,
            duration_s=time.monotonic() - self._step_ended_s,
        )
        self._standing.begin_apply(record)
        self._apply(record)
        self._save(lost, record, is_wanted=outcome.save or outcome.stop)
        self._tell_digests(record)
        return outcome.stop

    def _save(self, lost: Collection[str], record: CommitRecord, *, is_wanted: bool) -> None:
        """Save this worker's share after a step, if all agreed to in its commit or training ends with it."""
        if self._saving is None:
            return
        assert self._plan is not None
        if is_wanted or record.step == self._job.max_steps:
            position = None if self._records is None else self._records.position
            self._saving.save(self._plan, lost, record.step, record.generation, self._named_state, position=position)
        elif not lost:
            self._saving.prepare(self._plan, self._named_state)

    def _settle(self) -> None:
        """Have nothing changed that is still being saved."""
        if self._saving is not None:
            self._saving.settle()

    def _tell_digests(self, record: CommitRecord) -> None:
        """Let the copies of layers be compared, after every so many steps."""
        every = self._job.checkpoint.compare_steps
        if every and record.step % every == 0:
            layers = tuple(self._model.layers)
            digests = tuple(digest_of(self._named_state(layer).values()) for layer in layers)
            self._report(
                ReplicaDigests(
                    device=self._place.device,
                    step=record.step,
                    generation=record.generation,
                    layers=layers,
                    digests=digests,
                )
            )

    def _apply(self, record: CommitRecord) -> None:
        """Apply the reduced gradients. Nothing can interrupt this: the step is committed."""
        scale = self._loss_scale
        assert scale is not None
        self._settle()
        if not record.is_skipped:
            limit = self._job.optimizer.max_grad_norm
            clip = min(1.0, limit / (record.grad_norm + 1e-6)) if limit else 1.0
            self._optimizer.step(record.step, self._reduced, clip / record.loss_scale, num_skipped=scale.num_skipped)
        self._loss_scale = scale.after(is_skipped=record.is_skipped)
        self._step_ended_s = time.monotonic()
        self._busy_s.extend(self._busy_in_step)
        if self._work is not None:
            whole_s = sum(end_s - start_s for start_s, end_s in self._busy_in_step)
            self._spent_s.append((whole_s - self._work.waited_s, self._work.waited_s))
        self._let_go_of_kept()
        self._bank.end_step()
        self._forget_step()
        if (pace := self._pace.take()) is not None:
            self._report(pace)
        if self._lane is not None and (self._lane.is_first or self._lane.is_last):
            self._report(StepCommitted(device=self._place.device, record=record))

    @property
    def _scale(self) -> float:
        """What the loss of the step in flight is multiplied with."""
        assert self._loss_scale is not None
        return self._loss_scale.scale if self._precision.scales_loss else 1.0

    def _let_go_of_kept(self) -> None:
        """All have adopted the plan: nobody will ask for the layers that it took away."""
        self._kept = {}

    def _forget_step(self) -> None:
        """Nothing is done of the step in flight but what is banked."""
        for parameter in self._model.parameters.values():
            parameter.grad = None
        self._work = None
        self._base_done = False
        self._segments_done.clear()
        self._busy_in_step = []
        self._reduced = {}
        self._standing.begin_step()

    # --- from one plan to the next -----------------------------------------------------------------------------

    def _finish(self, order: Order, step: int) -> None:
        """Finish the step in flight under the old plan, without the nodes that it lost.

        Members of whole pipelines complete their share and the extra segments; the others contribute zeros, and
        so receive the sums and stay current.
        """
        plan, lane = self._plan, self._lane
        if plan is None or lane is None:
            return  # a spare, or a newcomer: it takes no part in the old plan
        located = plan.locate(self._place)
        assert located is not None
        pipeline = plan.pipelines[located[0]]
        buckets, key = self._reduction_keys(plan, order.generation, order.lost)
        if any(node in order.lost for node in pipeline.nodes):
            self._begin_step(step)
        else:
            work = self._compute(plan, lane, step)
            for segment in order.segments:
                if segment.pipeline == located[0] and segment.segment not in self._segments_done:
                    self._execute(work, lane, segment.microbatches, nullcontext(), commits=False)
                    self._segments_done.add(segment.segment)
        self._groups.form([key, *(bucket.key for bucket in buckets)], self._standing.is_fenced)
        self._end_step(self._reducer_of(buckets), key, lost=order.lost)

    def _adopt(self, order: Order) -> None:
        """Form the plan's groups, exchange the layers that change hands, and put the plan in force."""
        plan = order.plan
        place = _PlaceInPlan.find(plan, self._place, order.pipeline_generations)
        moving = transfer_key(order.transfers, order.generation)
        if moving is not None and self._place not in moving.members:
            moving = None
        buckets: tuple[Bucket, ...] = ()
        commit_group: GroupKey | None = None
        keys = [] if moving is None else [moving]
        if place is not None:
            buckets, commit_group = self._reduction_keys(plan, order.generation)
            keys += [place.lane_key, place.stage_key, commit_group, *(bucket.key for bucket in buckets)]
        self._groups.form(keys, self._standing.is_fenced)
        began_s = time.monotonic()
        layers = place.layers if place is not None else range(0)
        if order.restore is not None:
            assert not order.banked.microbatches, "a checkpoint is of a whole step"
            self._kept = self._restored_layers(order, order.restore, layers)
        has_bank = bool(order.banked.microbatches)
        states = exchange_layers(
            order.transfers,
            place=self._place,
            group=None if moving is None else self._groups[moving],
            state_of=lambda layer: self._layer_state(layer, has_bank=has_bank),
            empty_state=lambda layer: self._empty_state(layer, has_bank=has_bank),
            size_of=lambda layer: self._layer_state_size(layer, has_bank=has_bank),
            element_bytes=self._precision.parameters.itemsize,
            on_progress=lambda received, whole: self._report(
                LayersMoving(
                    device=self._place.device,
                    generation=order.generation,
                    received_bytes=received,
                    all_bytes=whole,
                )
            ),
            signals=self._signals,
            interrupted=self._standing.is_fenced,
        )
        self._transfer_s = time.monotonic() - began_s
        self._received_bytes = sum(tensor.nbytes for state in states.values() for tensor in state)
        self._loss_scale = self._agreed_loss_scale(
            commit_group, is_current=order.restore is not None or self._standing.applied == order.boundary
        )
        states = {layer: state for layer, state in self._kept.items() if layer in layers} | states
        kept = self._states_to_keep(order, layers)
        self._standing.adopt(order, tuple(layers), tuple(kept))
        if self._records is not None:
            self._records.follow(order.edition, step=order.boundary)
        self._kept = kept
        self._plan, self._commit_key, self._lane = plan, commit_group, None
        sums = self._take_layers(layers, states, initial=order.initial, has_bank=has_bank)
        self._reducer = self._reducer_of(buckets)
        self._bank.adopt(self._account_of(order, commit_group, self._reducer), sums)
        if place is not None:
            group = self._groups[place.lane_key] if len(place.lane_key.members) > 1 else None
            self._lane = Lane(
                stage=place.stage,
                num_stages=place.num_stages,
                group=group,
                rank=self._share.rank,
                degree=self._share.degree,
            )
            self._stage_sums = self._groups[place.stage_key] if self._share.degree > 1 else None
            self._schedule = order.schedules[place.pipeline]
        self._groups.keep_only(keys)
        self._resumed_generation = order.generation

    def _agreed_loss_scale(self, key: GroupKey | None, *, is_current: bool) -> LossScale | None:
        """Tell newcomers the loss scale that the others have come to; None for a spare, which is not there to hear it.

        Raises Interrupted or PeerLost.
        """
        if not self._precision.scales_loss:
            return self._loss_scale
        if key is None:
            return None
        known = self._loss_scale is not None and is_current
        numbers = self._loss_scale.as_numbers() if known and self._loss_scale is not None else (0.0, 0.0, 0.0)
        vector = torch.tensor([*numbers, float(known)], dtype=torch.float64)
        if len(key.members) > 1:
            self._groups[key].all_reduce(vector, self._signals).wait(self._standing.is_fenced)
        *sums, count = vector.tolist()
        return (
            LossScale.from_numbers(*(total / count for total in sums))
            if count
            else LossScale(scale=self._job.initial_loss_scale)
        )

    def _restored_layers(self, order: Order, restore: Restore, layers: range) -> dict[int, LayerState]:
        """Read from a checkpoint what this worker is to hold or to send, but for what others send it.

        Raises CorruptCheckpoint.
        """
        assert self._saving is not None
        received = {item.layer for item in order.transfers if item.target == self._place}
        sent = {item.layer for item in order.transfers if item.source == self._place}
        restored: dict[int, LayerState] = {}
        if self._precision.scales_loss:
            self._loss_scale = None
        for layer in sorted(sent | (set(layers) - received)):
            tensors = self._saving.load(restore, layer)
            flat = self._optimizer.flat_state(
                self._structure.layer_parameters(layer),
                tensors,
                shapes=self._structure.shapes,
                dtype=self._precision.parameters,
            )
            restored[layer] = fill_state(self._empty_state(layer), flat)
            if _LOSS_SCALE in tensors:
                self._loss_scale = LossScale.from_numbers(*tensors[_LOSS_SCALE].tolist())
        return restored

    def _reduction_keys(
        self, plan: ExecutionPlan, generation: int, lost: Collection[str] = ()
    ) -> tuple[tuple[Bucket, ...], GroupKey]:
        """The buckets of this worker and the group of the commit, among the nodes that are left."""
        buckets = make_buckets(plan, self._place, self._share, generation=generation, lost=lost)
        return buckets, commit_key(plan, generation=generation, lost=lost)

    def _reducer_of(self, buckets: Sequence[Bucket]) -> GradientReducer:
        return GradientReducer(buckets, self._model.parameters, self._groups, self._signals)

    def _account_of(self, order: Order, key: GroupKey | None, reducer: GradientReducer) -> Account | None:
        if key is None:
            return None
        return Account(
            plan=order.plan,
            generation=order.generation,
            num_sections=order.num_sections,
            before=order.banked,
            parameters=self._model.parameters,
            reducer=reducer,
            key=key,
        )

    def _states_to_keep(self, order: Order, layers: Collection[int]) -> dict[int, LayerState]:
        """The layers that others are to receive, and that this worker holds no longer.

        They may not have arrived, from here or from elsewhere: if a target or another source is lost, a later plan
        has them read from here. A worker that was left out, and missed steps or sections since, has nothing
        worth keeping.
        Nothing is copied: what is let go does not change any more, and a tied parameter that stays here changes with
        the next step, up to which the layers are kept.
        """
        if self._standing.applied != order.boundary or not self._bank.is_at(order.banked):
            return {}
        moving = {item.layer for item in order.transfers}.difference(layers)
        held = moving.intersection(self._model.layers)
        kept = {layer: state for layer, state in self._kept.items() if layer in moving}
        has_bank = bool(order.banked.microbatches)
        return kept | {layer: self._layer_state(layer, has_bank=has_bank) for layer in sorted(held)}

    def _layer_state(self, layer: int, *, has_bank: bool) -> LayerState:
        """What travels of a layer: the optimizer's state and, if there is any, what is banked for its parameters."""
        if layer in self._kept:
            return self._kept[layer]
        names = self._structure.layer_parameters(layer)
        return self._optimizer.layer_tensors(names) + (self._bank.tensors_of(names) if has_bank else ())

    def _empty_state(self, layer: int, *, has_bank: bool = False) -> LayerState:
        shapes = [self._structure.shapes[name] for name in self._structure.layer_parameters(layer)]
        dtype, device = self._precision.parameters, self._model.device
        state = self._optimizer.empty_layer(shapes, dtype=dtype, device=device)
        return state + tuple(torch.empty(shape, dtype=dtype, device=device) for shape in shapes if has_bank)

    def _named_state(self, layer: int) -> dict[str, torch.Tensor]:
        """A layer's state as a file has it."""
        state = self._optimizer.named_state(self._structure.layer_parameters(layer))
        if self._loss_scale is not None and self._precision.scales_loss:
            state[_LOSS_SCALE] = torch.tensor(self._loss_scale.as_numbers(), dtype=torch.float64)
        return state

    def _layer_state_size(self, layer: int, *, has_bank: bool) -> int:
        shapes, layout = self._structure.shapes, self._optimizer.layout(self._model.device)
        counts = [shapes[name].numel() for name in self._structure.layer_parameters(layer)]
        return sum(layout.size(count) + count * has_bank for count in counts)

    def _take_layers(
        self, layers: range, states: Mapping[int, LayerState], *, initial: bool, has_bank: bool
    ) -> dict[str, torch.Tensor]:
        """Make the model hold exactly these layers, with their initial values or the states that were received.

        Returns the banked sums of their parameters, received or held here, if there are any.
        """
        self._settle()
        given: dict[str, tuple[torch.Tensor, ...]] = {}
        sums = dict(self._bank.sums)
        for layer, state in sorted(states.items()):
            names = self._structure.layer_parameters(layer)
            if has_bank:
                state, banked = state[: -len(names)], state[-len(names) :]
                sums |= dict(zip(names, banked, strict=True))
            given |= self._optimizer.split_layer(names, state)
        self._model.adopt(layers.start, layers.stop, {name: tensors[0] for name, tensors in given.items()})
        self._optimizer.adopt(self._model.parameters, given)
        if initial and self._share.degree == 1:
            self._model.initialize(layers, seed=self._job.seed)
        elif initial:
            initialize_share(self._model, self._share, self._whole, layers, seed=self._job.seed)
        return {name: sums[name] for name in self._model.parameters} if has_bank else {}
