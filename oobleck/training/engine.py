"""The training thread's work: run steps, end them together, and follow orders from one plan to the next.

What is decided elsewhere arrives as an order; the engine carries it out and never chooses. What was computed of the
step in flight (`step.py`) lasts until the step is applied or forgotten, what is banked of it (`banking.py`) until it is
applied; a plan gives and takes layers (`holdings.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from oobleck.control.sections import shares_of
from oobleck.control.standing import Interrupted, PeerLost, Standing
from oobleck.job import JobSpec
from oobleck.planner import ExecutionPlan, Place
from oobleck.wire import (
    CommitRecord,
    Evaluating,
    EvaluationDone,
    LayersMoving,
    Order,
    Pace,
    PeerFailed,
    ReplicaDigests,
    Resumed,
    StepCommitted,
)

from .banking import Account, Bank
from .data import Dataset
from .digests import digest_of
from .evaluation import Evaluator
from .executor import Lane
from .groups import Group, GroupKey, GroupTable
from .holdings import Holdings
from .models import ModelStructure, StageModel
from .optimizer import Optimizer
from .place_in_plan import PlaceInPlan
from .precision import Precision
from .reduction import Bucket, GradientReducer, commit, commit_key, make_buckets, squared_norm
from .saving import Saving
from .signals import Signals
from .step import StepInFlight
from .tensor_parallel import Share, install
from .timesheet import Timesheet
from .transfer import exchange_layers, transfer_key

__all__ = ["Engine"]

Report = StepCommitted | Resumed | Evaluating | EvaluationDone | PeerFailed | Pace | LayersMoving | ReplicaDigests


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
        report: Callable[[Report], None],
    ) -> None:
        self._job = job
        self._place = place
        self._share = share
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
        self._model = StageModel(
            self._share.structure,
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
        self._bank = Bank(
            standing,
            groups,
            signals,
            num_microbatches=job.num_microbatches,
            tells=self._share.rank == 0,
            on_banked=lambda: self._holdings.let_go_of_kept(),
            on_failed=self._say_failed,
        )
        self._holdings = Holdings(
            job, place, whole=structure, share=share, model=self._model, optimizer=optimizer, bank=self._bank
        )
        self._timesheet = Timesheet(place.device)
        self._step = StepInFlight(
            job,
            dataset,
            self._model,
            bank=self._bank,
            standing=standing,
            signals=signals,
            timesheet=self._timesheet,
            on_compute=self._say_resumed,
        )
        self._plan: ExecutionPlan | None = None
        self._lane: Lane | None = None
        self._reducer: GradientReducer | None = None
        self._commit_key: GroupKey | None = None
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
        self._bank.give_back(self._step.work)
        if order.finish is None:
            self._step.forget()
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
            self._compute(self._plan, self._lane, self._standing.applied + 1, reducer=self._reducer)
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
        # An evaluation may be given up half-way, which leaves messages and sums that nobody completes: they have groups
        # of their own, that end with the plan.
        pipeline = plan.pipelines[located[0]]
        stage_key = GroupKey("evaluation", key.generation, pipeline.stages[located[1]].places)
        lane_key = GroupKey("forward", key.generation, pipeline.places)
        self._groups.form([stage_key, lane_key], self._standing.is_fenced)
        with self._summing_over(stage_key, self._standing.is_fenced):
            outcome = self._evaluator.run(
                step,
                model=self._model,
                lane=replace(lane, group=None if lane.group is None else self._groups[lane_key]),
                share=(located[0], len(plan.pipelines)),
                everyone=self._groups[key] if len(key.members) > 1 else None,
                interrupted=self._standing.is_fenced,
            )
        self._timesheet.begin_step()
        if lane.is_first or lane.is_last:
            done = EvaluationDone(
                device=self._place.device,
                step=step,
                loss=outcome.loss,
                num_samples=outcome.num_samples,
                duration_s=outcome.duration_s,
            )
            self._report(done)

    def _say_failed(self, generation: int, error: PeerLost) -> None:
        self._report(PeerFailed(device=self._place.device, generation=generation, detail=str(error)))

    def _say_evaluating(self, step: int) -> None:
        self._report(Evaluating(device=self._place.device, step=step))

    def time_spent(self) -> tuple[float, float]:
        """Seconds of the latest steps in which this worker computed, and in which it waited for others."""
        return self._timesheet.spent()

    def _sum_in_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the devices that share the stage, in place. Raises Interrupted or PeerLost."""
        assert self._stage_sums is not None
        self._stage_sums.all_reduce(tensor, self._signals).wait(self._stage_stops)
        return tensor

    @contextmanager
    def _summing_over(self, key: GroupKey, interrupted: Callable[[], bool]) -> Iterator[None]:
        """Within the block the devices of the stage sum in this group, until `interrupted`."""
        if len(key.members) == 1:
            yield
            return
        before = self._stage_sums, self._stage_stops
        self._stage_sums, self._stage_stops = self._groups[key], interrupted
        try:
            yield
        finally:
            self._stage_sums, self._stage_stops = before

    # --- a step ----------------------------------------------------------------------------------------------

    def _compute(self, plan: ExecutionPlan, lane: Lane, step: int, *, reducer: GradientReducer | None = None) -> None:
        """Compute the pipeline's own share of a step, unless that is done. Raises Interrupted or PeerLost."""
        located = plan.locate(self._place)
        assert located is not None
        microbatches = shares_of(plan, self._bank.before)[located[0]]
        self._step.compute(step, lane, microbatches, scale=self._holdings.scale, reducer=reducer)

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
            self._timesheet.begin_step()
        if records.is_told(step + 1):
            return True
        over = records.over_after(step)
        assert over is not None
        if over.save and self._saving is not None:
            self._saving.save(plan, (), step, over.generation, self._holdings.named_state, position=over.position)
            self._settle()
        return False

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
                busy_s=self._timesheet.busy_s,
            )
            self._report(resumed)

    def _end_step(self, reducer: GradientReducer, key: GroupKey, *, lost: Collection[str] = ()) -> bool:
        """Reduce, commit, apply: all workers or none. Returns whether training ends with this step."""
        work = self._step.work
        assert work is not None
        interrupted = self._standing.is_fenced
        self._bank.settle()
        if interrupted():
            raise Interrupted  # it may have left out a section, for which others wait in the same groups
        reduced = self._step.reduced = reducer.finish(interrupted, plus=self._bank.sums)
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
            grad_norm=outcome.grad_norm / self._holdings.scale,
            loss_scale=self._holdings.scale,
            is_skipped=self._precision.scales_loss and not math.isfinite(outcome.grad_norm),
            learning_rate=self._optimizer.learning_rate(work.step),
            num_samples=work.num_samples,
            samples_repeated=outcome.repeated * self._job.microbatch_size,
            samples_missing=outcome.missing * self._job.microbatch_size,
            duration_s=self._timesheet.step_s,
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
            self._saving.save(
                self._plan, lost, record.step, record.generation, self._holdings.named_state, position=position
            )
        elif not lost:
            self._saving.prepare(self._plan, self._holdings.named_state)

    def _settle(self) -> None:
        """Have nothing changed that is still being saved."""
        if self._saving is not None:
            self._saving.settle()

    def _tell_digests(self, record: CommitRecord) -> None:
        """Let the copies of layers be compared, after every so many steps."""
        every = self._job.checkpoint.compare_steps
        if every and record.step % every == 0:
            layers = tuple(self._model.layers)
            digests = tuple(digest_of(self._holdings.named_state(layer).values()) for layer in layers)
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
        scale = self._holdings.loss_scale
        assert scale is not None
        self._settle()
        if not record.is_skipped:
            limit = self._job.optimizer.max_grad_norm
            clip = min(1.0, limit / (record.grad_norm + 1e-6)) if limit else 1.0
            self._optimizer.step(
                record.step, self._step.reduced, clip / record.loss_scale, num_skipped=scale.num_skipped
            )
        self._holdings.loss_scale = scale.after(is_skipped=record.is_skipped)
        self._timesheet.end_step()
        self._holdings.let_go_of_kept()
        self._bank.end_step()
        self._step.forget()
        if (pace := self._timesheet.take_pace()) is not None:
            self._report(pace)
        if self._lane is not None and (self._lane.is_first or self._lane.is_last):
            self._report(StepCommitted(device=self._place.device, record=record))

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
            self._step.begin(step, scale=self._holdings.scale)
        else:
            self._compute(plan, lane, step)
            for segment in order.segments:
                if segment.pipeline == located[0]:
                    self._step.compute_segment(lane, segment)
        self._groups.form([key, *(bucket.key for bucket in buckets)], self._standing.is_fenced)
        self._end_step(self._reducer_of(buckets), key, lost=order.lost)

    def _adopt(self, order: Order) -> None:
        """Form the plan's groups, exchange the layers that change hands, and put the plan in force."""
        plan = order.plan
        place = PlaceInPlan.find(plan, self._place, order.pipeline_generations)
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
            assert self._saving is not None
            self._holdings.read(order.restore, layers, order.transfers, self._saving)
        has_bank = bool(order.banked.microbatches)
        states = exchange_layers(
            order.transfers,
            place=self._place,
            group=None if moving is None else self._groups[moving],
            state_of=partial(self._holdings.state_of, has_bank=has_bank),
            empty_state=partial(self._holdings.empty_state, has_bank=has_bank),
            size_of=partial(self._holdings.state_size, has_bank=has_bank),
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
        is_current = self._standing.applied == order.boundary
        self._holdings.agree_on_loss_scale(
            None if commit_group is None else partial(self._sum_over, commit_group),
            is_current=is_current or order.restore is not None,
        )
        keep = self._holdings.to_keep(order, layers, is_current=is_current)
        self._standing.adopt(order, tuple(layers), tuple(keep))
        if self._records is not None:
            self._records.follow(order.edition, step=order.boundary)
        if self._lane is None:
            self._timesheet.begin_step()  # it has rested until now
        self._plan, self._commit_key, self._lane = plan, commit_group, None
        self._settle()
        sums = self._holdings.take(layers, states, keep=keep, order=order)
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
                schedule=order.schedules[place.pipeline],
            )
            self._stage_sums = self._groups[place.stage_key] if self._share.degree > 1 else None
        self._groups.keep_only(keys, generation=order.generation)
        self._resumed_generation = order.generation

    def _sum_over(self, key: GroupKey, vector: torch.Tensor) -> None:
        """Add a vector up over a group, in place. Raises Interrupted or PeerLost."""
        if len(key.members) > 1:
            self._groups[key].all_reduce(vector, self._signals).wait(self._standing.is_fenced)

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
