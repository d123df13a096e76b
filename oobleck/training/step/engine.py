"""The training thread's work: a driver of the follower, with torch and process groups.

What is done with an order, and what comes first, is `control.commit.follower`'s; the engine carries its effects out and
never chooses. What was computed of the step in flight (`step.py`) lasts until the step is applied or forgotten, what is
committed of it (`sections.py`) until it is applied; a plan gives and takes layers (`holdings.py`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NoReturn, assert_never

import torch

from oobleck.control.commit import (
    Adopt,
    Agree,
    Agreed,
    Apply,
    AwaitPlanUpdate,
    AwaitRecords,
    AwaitSection,
    BeginStep,
    CommitState,
    Committee,
    CompareReplicas,
    Compute,
    Effect,
    Effects,
    Evaluate,
    Evaluation,
    Exchange,
    Fold,
    Follower,
    ForgetStep,
    FormGroups,
    GiveBack,
    GroupKey,
    KeepGroups,
    Outcome,
    PlaceInPlan,
    PostSection,
    PostTotals,
    PrepareToSave,
    ReadCheckpoint,
    Reduce,
    ReportFinished,
    ReportResumed,
    Save,
    SaveEnd,
    Say,
    ShareLossScale,
    TakeSums,
    TakeTotals,
    drive,
)
from oobleck.control.protocol import (
    CommitRecord,
    Evaluating,
    Finished,
    LayersMoving,
    PlanUpdate,
    ReplicaDigests,
    Resumed,
    WorkerReport,
)
from oobleck.job import JobSpec
from oobleck.planner import WorkerId
from oobleck.training.checkpoint import LayerSaver, digest_of
from oobleck.training.comm import Group, GroupTable, LayerState, Waiter, exchange_layers
from oobleck.training.data import Dataset
from oobleck.training.model import ModelStructure, Precision, Share, StageModel, install
from oobleck.training.optim import Optimizer
from oobleck.training.worker_log import WorkerLog

from .effect_log import logged, update_text
from .evaluation import Evaluator
from .executor import PipelineRank
from .layer_store import LayerStore
from .reduction import Bucket, GradientReducer, commit, make_buckets, squared_norm
from .sections import SectionGroups, SectionSums
from .step import StepInFlight
from .step_timer import StepTimer

__all__ = ["Engine"]


class Engine:
    """Everything that one worker trains with. Only the training thread touches it; `run` is all that it does."""

    def __init__(
        self,
        job: JobSpec,
        worker_id: WorkerId,
        *,
        device: torch.device,
        dataset: Dataset,
        validation: Dataset | None = None,
        structure: ModelStructure,
        share: Share,
        optimizer: Optimizer,
        groups: GroupTable,
        waiter: Waiter,
        commit_state: CommitState,
        saving: LayerSaver | None,
        next_update: Callable[[], PlanUpdate],
        report: Callable[[WorkerReport], None],
    ) -> None:
        """`next_update` waits for an order and takes it; `report` tells the master."""
        self._job = job
        self._worker_id = worker_id
        self._log = WorkerLog(__name__, worker_id, lambda: commit_state.generation)
        self._share = share
        self._stage_sums: Group | None = None
        """Where the devices that share the stage sum."""
        self._stage_stops = commit_state.is_pipeline_stopped
        """What ends their waiting for each other."""
        self._groups = groups
        self._waiter = waiter
        self._commit_state = commit_state
        self._saving = saving
        self._next_order = next_update
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
            Evaluator(job, validation, waiter=waiter, on_progress=self._say_evaluating)
            if validation is not None and job.eval_steps
            else None
        )
        self._follower = Follower(
            job, worker_id, commit_state, records=dataset.records, evaluates=self._evaluator is not None
        )
        self._sections = SectionSums(
            self._follower.partial_commit,
            commit_state,
            groups,
            waiter,
            num_microbatches=job.num_microbatches,
            tells=self._share.rank == 0,
            work=lambda: self._step.work,
            carry_out=self._drive,
            on_folded=lambda: self._layer_store.let_go_of_kept(),
        )
        self._layer_store = LayerStore(
            job,
            worker_id,
            whole=structure,
            share=share,
            model=self._model,
            optimizer=optimizer,
            sections=self._sections,
        )
        self._step_timer = StepTimer(worker_id.device)
        self._step = StepInFlight(
            job,
            dataset,
            self._model,
            partial_commit=self._follower.partial_commit,
            sections=self._sections,
            commit_state=commit_state,
            waiter=waiter,
            step_timer=self._step_timer,
        )
        self._pipeline_rank: PipelineRank | None = None
        self._buckets: tuple[Committee, tuple[Bucket, ...]] | None = None
        """Those of the newest committee."""
        self._reducer: tuple[Committee, GradientReducer] | None = None
        """Under the plan in force."""
        self._received: dict[int, LayerState] = {}
        """Layers that have come, until a plan that takes them is in force."""
        self._formed_s = 0.0
        self._transfer_s = 0.0
        self._received_bytes = 0

    def run(self) -> NoReturn:
        """Follow orders for ever."""
        self._drive(self._follower.run())
        raise AssertionError("the follower never ends")

    def _drive(self, effects: Effects) -> None:
        drive(effects, self._carry_out)

    def _carry_out(self, effect: Effect) -> Outcome:
        """Carry one effect out, and log it. Raises what the effect may raise."""
        with logged(self._log, effect, self._worker_id):
            return self._do(effect)

    def _do(self, effect: Effect) -> Outcome:
        match effect:
            case PostSection() | TakeSums() | PostTotals() | TakeTotals() | Fold() | AwaitSection() | GiveBack():
                return self._sections.carry_out(effect)
            case Compute():
                self._compute(effect)
            case Reduce(committee=committee):
                self._reduce(committee)
            case Agree():
                return self._agree(effect)
            case Apply(record=record):
                self._apply(record)
            case ForgetStep():
                self._step.forget()
            case BeginStep(step=step):
                self._step.begin(step, scale=self._layer_store.scale)
            case Save(record=record, committee=committee):
                self._save(record, committee)
            case PrepareToSave(committee=committee):
                if self._saving is not None:
                    self._saving.prepare(committee.plan, self._layer_store.named_state)
            case SaveEnd():
                self._save_end(effect)
            case CompareReplicas(record=record):
                self._tell_digests(record)
            case Say(message=message):
                self._report(message)
            case ReportResumed(generation=generation):
                self._report_resumed(generation)
            case ReportFinished():
                self._report_finished()
            case AwaitRecords(step=step):
                self._await_records(step)
            case Evaluate():
                return self._evaluate(effect)
            case AwaitPlanUpdate():
                update = self._next_order()
                self._log.info("follows a plan: %s", update_text(update))
                return update
            case FormGroups(keys=keys, committee=committee):
                self._groups.form([*keys, *self._bucket_keys(committee)], self._commit_state.is_fenced)
                self._formed_s = time.monotonic()
            case KeepGroups(keys=keys, committee=committee, generation=generation):
                self._groups.keep_only([*keys, *self._bucket_keys(committee)], generation=generation)
            case ReadCheckpoint(update=update, layers=layers):
                assert update.restore is not None
                assert self._saving is not None
                self._layer_store.read(update.restore, layers, update.transfers, self._saving)
            case Exchange():
                self._exchange(effect)
            case ShareLossScale(committee=committee, is_current=is_current):
                sum_up = None if committee is None else partial(self._sum_over, committee)
                self._layer_store.agree_on_loss_scale(sum_up, is_current=is_current)
            case Adopt():
                self._adopt(effect)
            case _:
                assert_never(effect)
        return None

    # --- words -----------------------------------------------------------------------------------------------

    def _report_resumed(self, generation: int) -> None:
        resumed = Resumed(
            device=self._worker_id.device,
            generation=generation,
            transfer_s=self._transfer_s,
            received_bytes=self._received_bytes,
            resumed_s=time.monotonic(),
            busy_s=self._step_timer.busy_s,
        )
        self._report(resumed)

    def _report_finished(self) -> None:
        computed_s, waited_s = self._step_timer.spent()
        finished = Finished(
            device=self._worker_id.device,
            applied=self._commit_state.applied,
            computed_s=computed_s,
            waited_s=waited_s,
        )
        self._report(finished)

    def _say_evaluating(self, step: int) -> None:
        self._report(Evaluating(device=self._worker_id.device, step=step))

    def _tell_digests(self, record: CommitRecord) -> None:
        layers = tuple(self._model.layers)
        digests = tuple(digest_of(self._layer_store.named_state(layer).values()) for layer in layers)
        self._report(
            ReplicaDigests(
                device=self._worker_id.device,
                step=record.step,
                generation=record.generation,
                layers=layers,
                digests=digests,
            )
        )

    # --- a step ----------------------------------------------------------------------------------------------

    def _await_records(self, step: int) -> None:
        records = self._records
        assert records is not None
        self._waiter.wait(
            lambda: records.is_told(step) or records.over_after(step - 1) is not None, self._commit_state.is_fenced
        )
        self._step_timer.begin_step()

    def _compute(self, program: Compute) -> None:
        assert self._pipeline_rank is not None
        assert self._reducer is not None
        self._step.execute(self._pipeline_rank, program, self._reducer[1])

    def _sum_in_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the devices that share the stage, in place. Raises Interrupted or PeerLost."""
        assert self._stage_sums is not None
        self._stage_sums.all_reduce(tensor, self._waiter).wait(self._stage_stops)
        return tensor

    def _reduce(self, committee: Committee) -> None:
        """Sum the step's gradients; what is posted already was with the reducer of the plan in force."""
        assert self._reducer is not None
        in_force, reducer = self._reducer
        if committee is not in_force:
            reducer = self._new_reducer(committee)
        self._step.reduced = reducer.finish(self._commit_state.is_fenced, plus=self._sections.sums)

    def _agree(self, effect: Agree) -> Agreed:
        """Take part in the commit's all-reduce. Raises Interrupted or PeerLost."""
        work, committee = self._step.work, effect.committee
        assert work is not None
        outcome = commit(
            committee.key,
            # The other devices of the stage have the same to tell.
            loss=work.loss if self._share.rank == 0 else 0.0,
            squared_grad_norm=squared_norm(self._buckets_of(committee), self._step.reduced, self._worker_id),
            stop=effect.stop,
            save=self._saving is not None and self._saving.is_wanted(effect.step),
            counts=work.counts if self._share.rank == 0 else {},
            num_microbatches=self._job.num_microbatches,
            groups=self._groups,
            waiter=self._waiter,
            interrupted=self._commit_state.is_fenced,
        )
        record = CommitRecord(
            step=effect.step,
            generation=committee.generation,
            loss=self._follower.partial_commit.loss + outcome.loss,
            grad_norm=outcome.grad_norm / self._layer_store.scale,
            loss_scale=self._layer_store.scale,
            is_skipped=self._precision.scales_loss and not math.isfinite(outcome.grad_norm),
            learning_rate=self._optimizer.learning_rate(effect.step),
            num_samples=work.num_samples,
            samples_repeated=0,
            samples_missing=0,
            duration_s=self._step_timer.step_s,
        )
        return Agreed(record, outcome.counted, stop=outcome.stop, save=outcome.save)

    def _apply(self, record: CommitRecord) -> None:
        """Apply the reduced gradients. Nothing can interrupt this: the step is committed."""
        scale = self._layer_store.loss_scale
        assert scale is not None
        self._settle()
        if not record.is_skipped:
            limit = self._job.optimizer.max_grad_norm
            clip = min(1.0, limit / (record.grad_norm + 1e-6)) if limit else 1.0
            self._optimizer.step(
                record.step, self._step.reduced, clip / record.loss_scale, num_skipped=scale.num_skipped
            )
        self._layer_store.loss_scale = scale.after(is_skipped=record.is_skipped)
        self._step_timer.end_step()
        self._layer_store.let_go_of_kept()
        self._sections.end_step()
        if (pace := self._step_timer.take_pace()) is not None:
            self._report(pace)

    def _save(self, record: CommitRecord, committee: Committee) -> None:
        if self._saving is not None:
            position = None if self._records is None else self._records.position
            self._saving.save(
                committee.plan,
                committee.lost,
                record.step,
                record.generation,
                self._layer_store.named_state,
                position=position,
            )

    def _save_end(self, effect: SaveEnd) -> None:
        if self._saving is not None:
            plan, over = effect.committee.plan, effect.over
            self._saving.save(
                plan, (), over.step, over.generation, self._layer_store.named_state, position=over.position
            )
            self._settle()

    def _settle(self) -> None:
        """Have nothing changed that is still being saved."""
        if self._saving is not None:
            self._saving.settle()

    def _evaluate(self, effect: Evaluate) -> Evaluation:
        """Evaluate the model. Raises Interrupted or PeerLost."""
        committee, interrupted = effect.committee, self._commit_state.is_fenced
        located = committee.plan.locate(self._worker_id)
        assert located is not None
        assert self._pipeline_rank is not None
        assert self._evaluator is not None
        pipeline_rank = self._pipeline_rank
        with self._evaluation_sums(effect, interrupted):
            outcome = self._evaluator.run(
                effect.step,
                model=self._model,
                pipeline_rank=replace(
                    pipeline_rank, group=None if pipeline_rank.group is None else self._groups[effect.lane_key]
                ),
                share=(located[0], len(committee.plan.pipelines)),
                everyone=self._groups[committee.key] if len(committee.key.members) > 1 else None,
                interrupted=interrupted,
            )
        self._step_timer.begin_step()
        return outcome

    @contextmanager
    def _evaluation_sums(self, effect: Evaluate, interrupted: Callable[[], bool]) -> Iterator[None]:
        """Within the block the devices of the stage sum in the evaluation's own group, until `interrupted`."""
        key = effect.stage_key
        if len(key.members) == 1:
            yield
            return
        before = self._stage_sums, self._stage_stops
        self._stage_sums, self._stage_stops = self._groups[key], interrupted
        try:
            yield
        finally:
            self._stage_sums, self._stage_stops = before

    # --- from one plan to the next -----------------------------------------------------------------------------

    def _exchange(self, effect: Exchange) -> None:
        """Exchange the layers that change hands. Raises Interrupted or PeerLost."""
        update = effect.update
        has_partial = bool(update.partial.microbatches)
        self._received = {}
        self._received = exchange_layers(
            update.transfers,
            worker_id=self._worker_id,
            group=None if effect.key is None else self._groups[effect.key],
            state_of=partial(self._layer_store.state_of, has_partial=has_partial),
            empty_state=partial(self._layer_store.empty_state, has_partial=has_partial),
            size_of=partial(self._layer_store.state_size, has_partial=has_partial),
            element_bytes=self._precision.parameters.itemsize,
            on_progress=lambda received, whole: self._report(
                LayersMoving(
                    device=self._worker_id.device,
                    generation=update.generation,
                    received_bytes=received,
                    all_bytes=whole,
                )
            ),
            waiter=self._waiter,
            interrupted=self._commit_state.is_fenced,
        )
        self._transfer_s = time.monotonic() - self._formed_s
        self._received_bytes = sum(tensor.nbytes for state in self._received.values() for tensor in state)
        self._log.debug("has received %.1f MB in %.3f s", self._received_bytes / 1e6, self._transfer_s)

    def _sum_over(self, committee: Committee, vector: torch.Tensor) -> None:
        """Add a vector up over all who commit together, in place. Raises Interrupted or PeerLost."""
        if len(committee.key.members) > 1:
            self._groups[committee.key].all_reduce(vector, self._waiter).wait(self._commit_state.is_fenced)

    def _adopt(self, effect: Adopt) -> None:
        """Hold the layers of a plan. Nothing can interrupt this: the plan is in force."""
        update, worker_id, committee = effect.update, effect.worker_id, effect.committee
        if self._records is not None:
            self._records.follow(update.assignment_version, step=update.boundary)
        if self._pipeline_rank is None:
            self._step_timer.begin_step()  # it has rested until now
        self._pipeline_rank = None
        self._settle()
        sums = self._layer_store.take(effect.layers, self._received, keep=effect.keep, update=update)
        self._received = {}
        self._reducer, groups = None, None
        if committee is not None:
            reducer = self._new_reducer(committee)
            self._reducer = committee, reducer
            groups = SectionGroups(parameters=self._model.parameters, reducer=reducer, everyone=committee.key)
        self._sections.adopt(groups, sums)
        if worker_id is not None:
            self._pipeline_rank = self._lane_of(worker_id)
            self._stage_sums = self._groups[worker_id.stage_key] if self._share.degree > 1 else None

    def _lane_of(self, worker_id: PlaceInPlan) -> PipelineRank:
        return PipelineRank(
            stage=worker_id.stage,
            num_stages=worker_id.num_stages,
            group=self._groups[worker_id.lane_key] if len(worker_id.lane_key.members) > 1 else None,
            rank=self._share.rank,
            degree=self._share.degree,
            schedule=worker_id.schedule,
        )

    def _buckets_of(self, committee: Committee) -> tuple[Bucket, ...]:
        """What this worker's gradients are summed in with the others of a committee."""
        if self._buckets is None or self._buckets[0] is not committee:
            buckets = make_buckets(
                committee.plan, self._worker_id, self._share, generation=committee.generation, lost=committee.lost
            )
            self._buckets = committee, buckets
        return self._buckets[1]

    def _bucket_keys(self, committee: Committee | None) -> Sequence[GroupKey]:
        return () if committee is None else [bucket.key for bucket in self._buckets_of(committee)]

    def _new_reducer(self, committee: Committee) -> GradientReducer:
        """What sums the gradients of the layers that are held now."""
        return GradientReducer(self._buckets_of(committee), self._model.parameters, self._groups, self._waiter)
