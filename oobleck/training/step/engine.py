"""The training thread's work: a driver of the follower, with torch and process groups.

`control.steps.Follower` decides what to do with an order, and in which sequence; the engine carries out its effects and
never chooses. The results of the step in flight (`step.py`) last until the step is applied or forgotten, its committed
sums (`sections.py`) until it is applied; plans add and remove layers (`layer_store.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NoReturn, assert_never

import torch

from oobleck.control import protocol, steps
from oobleck.host.script import GATHERS
from oobleck.job import JobSpec
from oobleck.planner import WorkerId
from oobleck.training.assembly import Assembly
from oobleck.training.checkpoint import LayerSaver
from oobleck.training.comm import DeviceWork, GroupTable, PeerAgreements, StageSums
from oobleck.training.likeness import EpochThings
from oobleck.training.model import Precision, Share, StageModel, install
from oobleck.training.worker_log import WorkerLog

from .effect_log import logged, update_text
from .evaluation import Evaluator
from .layer_store import LayerStore
from .node_sums import NodeSums
from .reduction import Reducers, squared_norm
from .sections import SectionSums
from .stage_state import StageState
from .step import StepInFlight
from .step_timer import StepTimer
from .step_work import PipelineRank, item_share_of


class Engine:
    """Everything that one worker trains with. Only the training thread touches it, by `run`."""

    def __init__(
        self,
        assembly: Assembly,
        share: Share,
        *,
        groups: GroupTable,
        agreements: PeerAgreements,
        commit_state: steps.CommitState,
        consents: steps.StepBoard,
        saving: LayerSaver | None,
        next_update: Callable[[], protocol.PlanUpdate],
        report: Callable[[protocol.WorkerReport], None],
    ) -> None:
        """`share` is this device's share of the assembly's model; `saving` is None where nothing is saved.

        `next_update` waits for the next order; `report` sends to the master.
        """
        job, worker_id, dataset = assembly.job, commit_state.worker_id, assembly.train
        self._worker_id = worker_id
        self._log = WorkerLog(__name__, worker_id, lambda: commit_state.generation)
        self._share = share
        self._groups = groups
        self._agreements = agreements
        self._commit_state = commit_state
        self._saving = saving
        self._next_update = next_update
        self._report = report
        self._records = dataset.records
        # Samples of a script's trainer are in no shards.
        self._board = consents if job.needs_consent else dataset.records
        self._epoch_things = EpochThings(job, dataset)
        self._precision = Precision.of(job.dtype)
        self._optimizer = assembly.optimizer
        self._model = _stage_model(job, share, self._precision, groups.waiter.device)
        self._recompute = job.recompute
        # Devices of other nodes may wait for this one's part of a section.
        self._stage_sums = StageSums(commit_state.is_pipeline_stopped, meanwhile=self._look_until)
        install(self._model, share, self._stage_sums)
        state = StageState(self._model, share)
        self._node_sums = NodeSums(state, self._stage_sums) if share.is_sharded else None
        self._evaluator: Evaluator | None = None
        self._gathers = job.script is not None and GATHERS in job.script.provides
        if assembly.validation is not None and job.eval_steps:
            self._evaluator = Evaluator(
                job,
                assembly.validation,
                self._model,
                groups.waiter,
                node_sums=self._node_sums,
                interrupted=commit_state.is_fenced,
                on_progress=self._is_evaluating,
            )
        self._follower = steps.Follower(
            job, commit_state, board=self._board, evaluates=self._gathers or self._evaluator is not None
        )
        self._layer_store = LayerStore(job, worker_id, state=state, optimizer=self._optimizer)
        self._reducers = Reducers(worker_id, share, state, groups)
        self._sections = SectionSums(
            self._follower.partial_commit, commit_state, groups.waiter, agreements, drive=self._drive
        )
        self._step_timer = StepTimer(worker_id.device)
        self._step = StepInFlight(
            job,
            dataset,
            state,
            node_sums=self._node_sums,
            sections=self._sections,
            commit_state=commit_state,
            waiter=groups.waiter,
            step_timer=self._step_timer,
            device_work=DeviceWork.on(groups.waiter.device),
            stage_sums=self._stage_sums,
        )
        self._pipeline_rank: PipelineRank | None = None  # for a spare
        self._formed_s = 0.0
        self._transfer_s = 0.0
        self._received_bytes = 0

    def run(self) -> NoReturn:
        """Follow orders until the process ends."""
        self._drive(self._follower.run())
        raise AssertionError("the follower never ends")

    def _drive(self, effects: steps.WorkerEffects) -> None:
        steps.drive(effects, self._carry_out)

    def _carry_out(self, effect: steps.WorkerEffect) -> steps.EffectOutcome:
        with logged(self._log, effect, self._worker_id):
            return self._do(effect)

    def _do(self, effect: steps.WorkerEffect) -> steps.EffectOutcome:
        match effect:
            case (
                steps.PostSection()
                | steps.TakeSums()
                | steps.PostTotals()
                | steps.TakeTotals()
                | steps.AwaitSection()
                | steps.GiveBack()
            ):
                return self._sections.carry_out(effect)
            case steps.Fold():
                self._sections.carry_out(effect)
                # All workers that committed the section have adopted the plan.
                self._layer_store.drop_kept()
            case steps.Compute():
                assert self._pipeline_rank is not None
                assert self._reducers.in_force is not None
                self._step.execute(self._pipeline_rank, effect, self._reducers.in_force.reducer)
            case steps.Reduce(committee=committee):
                self._step.reduce(self._reducers.of(committee))
            case steps.Agree():
                return self._agree(effect)
            case steps.Apply(record=record):
                self._apply(record)
            case steps.ForgetStep():
                self._step.forget()
            case steps.BeginStep(step=step):
                self._begin_step(step)
            case steps.Save() | steps.SaveEnd() | steps.PrepareToSave():
                if self._saving is not None:
                    self._save(effect, self._saving)
            case steps.Say() | steps.ReportResumed() | steps.ReportFinished() | steps.CompareReplicas():
                self._report(self._message_of(effect))
            case steps.AwaitStep(step=step):
                self._await_step(step)
            case steps.Evaluate():
                return self._evaluate(effect)
            case steps.AwaitPlanUpdate():
                # Sums that are still open were given up: no worker waits for them.
                self._groups.abort_sums()
                self._groups.abandon_forming()
                update = self._next_update()
                self._log.info("follows a plan: %s", update_text(update))
                return update
            case steps.FormGroups(keys=keys, committee=committee):
                if committee is not None:
                    # Before the groups form: from here on, a peer's lost link counts.
                    self._agreements.join(committee)
                is_forming = self._groups.form(
                    keys,
                    self._commit_state.is_fenced,
                    generation=self._commit_state.generation,
                    # No worker needs these before the first sums of a step.
                    beside=self._reducers.keys_of(committee),
                    largest=self._reducers.largest_of(committee),
                )
                self._formed_s = time.monotonic()  # transfers begin here
                return is_forming
            case steps.AwaitGroups():
                self._groups.await_formed(self._commit_state.is_fenced)
            case steps.KeepGroups(keys=keys, committee=committee, generation=generation):
                self._groups.keep_only([*keys, *self._reducers.keys_of(committee)], generation=generation)
            case steps.EndTransfers(keys=keys):
                self._groups.put_aside(keys)
            case steps.ReadCheckpoint(update=update, layers=layers):
                assert update.restore is not None
                assert self._saving is not None
                self._layer_store.read(update.restore, layers, update.transfers, self._saving)
            case steps.Exchange():
                self._exchange(effect)
            case steps.ShareLossScale(committee=committee, is_current=is_current):
                sum_up = None if committee is None else partial(self._sum_over, committee, effect.subject)
                self._layer_store.agree_on_loss_scale(sum_up, is_current=is_current)
            case steps.Adopt():
                self._adopt(effect)
            case _:
                assert_never(effect)
        return None

    def _await_step(self, step: int) -> None:
        """Wait until a step may begin, or until it is known that none follows. Raises Interrupted."""
        board = self._board
        assert board is not None
        self._groups.waiter.wait(
            lambda: board.is_told(step) or board.over_after(step - 1) is not None, self._commit_state.is_fenced
        )
        self._step_timer.begin_step()

    def _begin_step(self, step: int) -> None:
        if (entered := self._epoch_things.enter(step)) is not None:
            epoch, alike = entered
            self._report(protocol.EpochEntered(device=self._worker_id.device, epoch=epoch, alike=alike))
        self._step.begin(step, scale=self._layer_store.scale)

    def _message_of(
        self, effect: steps.Say | steps.ReportResumed | steps.ReportFinished | steps.CompareReplicas
    ) -> protocol.WorkerReport:
        device = self._worker_id.device
        match effect:
            case steps.Say(message=message):
                return message
            case steps.ReportResumed(generation=generation):
                return protocol.Resumed(
                    device=device,
                    generation=generation,
                    transfer_s=self._transfer_s,
                    received_bytes=self._received_bytes,
                    resumed_s=time.monotonic(),
                    busy_s=self._step_timer.busy_s,
                )
            case steps.ReportFinished():
                computed_s, waited_s = self._step_timer.spent()
                applied = self._commit_state.applied
                return protocol.Finished(device=device, applied=applied, computed_s=computed_s, waited_s=waited_s)
            case steps.CompareReplicas(record=record):
                return protocol.ReplicaDigests(
                    device=device,
                    step=record.step,
                    generation=record.generation,
                    layers=tuple(self._model.layers),
                    digests=self._layer_store.digests(),
                )
            case _:
                assert_never(effect)

    def _sum_over(
        self, committee: steps.Committee, subject: protocol.Subject, numbers: tuple[float, ...]
    ) -> tuple[float, ...]:
        """Sum numbers over the workers of a committee. Raises Interrupted or PeerLost."""
        part, interrupted = protocol.Totals(numbers), self._commit_state.is_fenced
        return self._agreements.total(committee, subject, part, interrupted).numbers

    def _agree(self, effect: steps.Agree) -> steps.Agreed:
        """Commit the step with all others. Raises Interrupted or PeerLost."""
        work, scale, committee = self._step.work, self._layer_store.scale, effect.committee
        own_norm = squared_norm(self._reducers.buckets_of(committee), self._step.reduced, self._worker_id)
        loss, norm = work.loss_and(own_norm)
        saves = self._saving is not None and self._saving.is_wanted(effect.step)
        # Before the agreement, since a wait for others does not count.
        took_s = self._step_timer.post_step()
        numbers = (loss, float(work.num_items), norm, float(effect.stop), float(saves), took_s)
        part = protocol.Totals(numbers, protocol.Tally.of(work.counted))
        # Once this returns, all workers have reduced all their gradients. If it raises, this worker cannot know whether
        # others have the total: the coordinator decides from all their answers.
        total = self._agreements.total(committee, effect.subject, part, self._commit_state.is_fenced)
        loss, num_items, norm, stops, saving, took_s = total.numbers
        grad_norm = norm**0.5
        partial = self._follower.partial_commit
        item_share = item_share_of(partial.num_items + num_items, divisor=self._step.batch.divisor)
        record = protocol.CommitRecord(
            step=effect.step,
            generation=committee.generation,
            loss=(partial.loss + loss) / item_share,
            # Reduced gradients are those of the loss times the scale, over the divisor.
            grad_norm=grad_norm / scale / item_share,
            loss_scale=scale,
            item_share=item_share,
            # All have the same total, so all skip a step whose float16 gradients overflow, or none does.
            is_skipped=not math.isfinite(grad_norm + loss) and self._layer_store.can_skip,
            learning_rate=self._optimizer.learning_rate(effect.step),
            num_samples=self._step.batch.num_samples,
            samples_repeated=0,
            samples_missing=0,
            # The total is a sum over the members, and the duration their mean.
            duration_s=took_s / len(committee.members),
        )
        return steps.Agreed(record, total.counted, stop=stops > 0, save=saving > 0)

    def _apply(self, record: protocol.CommitRecord) -> None:
        # Nothing can interrupt this: the step is committed, and all others apply it as well.
        self._settle()
        self._layer_store.apply(record, self._step.reduced)
        self._step_timer.end_step()
        self._sections.end_step()
        if (pace := self._step_timer.pace.take(time.monotonic())) is not None:
            self._report(pace)

    def _save(self, effect: steps.Save | steps.SaveEnd | steps.PrepareToSave, saving: LayerSaver) -> None:
        plan, tensors_of = effect.committee.plan, self._layer_store.named_state
        match effect:
            case steps.PrepareToSave():
                saving.prepare(plan, tensors_of)
            case steps.Save(step=step, generation=generation, committee=committee):
                position = None if self._records is None else self._records.position
                saving.save(plan, committee.lost, step, generation, tensors_of, position=position)
            case steps.SaveEnd(over=over):
                saving.save(plan, (), over.step, over.generation, tensors_of, position=over.position)
                saving.settle()

    def _settle(self) -> None:
        # A save copies the layers while the next step computes, and has to end before they change.
        if self._saving is not None:
            self._saving.settle()

    def _evaluate(self, effect: steps.Evaluate) -> steps.Evaluation:
        """Evaluate the model, in the evaluation's own groups. Raises Interrupted or PeerLost."""
        committee, pipeline_rank = effect.committee, self._pipeline_rank
        located = committee.plan.locate(self._worker_id)
        assert located is not None
        assert pipeline_rank is not None
        sum_up, began_s = partial(self._sum_over, committee, effect.subject), time.monotonic()
        if self._gathers and self._saving is not None:
            for _ in self._saving.gather(committee.plan, committee.lost, effect.step, self._layer_store.named_state):
                self._is_evaluating(effect.step)
        if self._evaluator is None:
            sum_up((0.0,))  # all have written their layers
            self._step_timer.begin_step()
            return steps.Evaluation(loss=None, num_samples=0, duration_s=time.monotonic() - began_s)
        # In groups that nothing else uses, since a failure may leave messages stuck in them.
        lane, lanes = self._share.lane
        with self._stage_sums.within(self._groups.find(effect.stage_key), self._commit_state.is_fenced):
            if self._node_sums is not None:
                self._node_sums.begin()
            outcome = self._evaluator.run(
                effect.step,
                replace(pipeline_rank, group=self._groups.find(effect.lane_key)),
                share=(located[0] * lanes + lane, len(committee.plan.pipelines) * lanes),
                sum_up=sum_up,
            )
        # An evaluation is no part of the step's time.
        self._step_timer.begin_step()
        return outcome

    def _look_until(
        self, ready: Callable[[], bool], interrupted: Callable[[], bool], waits_for: tuple[WorkerId, ...]
    ) -> None:
        self._sections.look_until(ready, interrupted, waits_for)

    def _is_evaluating(self, step: int) -> None:
        self._report(protocol.Evaluating(device=self._worker_id.device, step=step))

    def _exchange(self, effect: steps.Exchange) -> None:
        update, device = effect.update, self._worker_id.device

        def report(received_bytes: int, all_bytes: int) -> None:
            generation = update.generation
            self._report(
                protocol.LayersMoving(
                    device=device, generation=generation, received_bytes=received_bytes, all_bytes=all_bytes
                )
            )

        self._received_bytes = self._layer_store.exchange(
            update,
            lambda item: self._groups[steps.transfer_key(item, update.generation)],
            self._groups.waiter,
            # In the middle of a step, layers take their committed sums along.
            sums=self._sections.sums if update.partial.microbatches else None,
            interrupted=self._commit_state.is_fenced,
            on_progress=report,
        )
        self._transfer_s = time.monotonic() - self._formed_s
        self._log.debug("has received %.1f MB in %.3f s", self._received_bytes / 1e6, self._transfer_s)

    def _adopt(self, effect: steps.Adopt) -> None:
        """Hold the layers of a plan, which is in force: nothing can interrupt this."""
        update, seat = effect.update, effect.seat
        if self._records is not None:
            self._records.follow(update.assignment_version, step=update.boundary)
        self._step_timer.pace.adopt(len(update.plan.worker_ids))
        if self._pipeline_rank is None:
            # A spare has rested until now.
            self._step_timer.begin_step()
        self._settle()
        sums = self._layer_store.take(
            () if seat is None else seat.chunks,
            keep=effect.keep,
            is_initial=update.initial,
            sums=self._sections.sums if update.partial.microbatches else None,
        )
        if seat is not None and self._recompute == "auto":
            for layer, level in seat.levels(self._model.structure.is_block).items():
                self._model.set_recomputation(layer, level)
        stage = None if seat is None else self._groups.find(seat.stage_key)
        self._stage_sums.adopt(stage)
        # Reducers take the parameters of the layers that the model holds by now.
        self._reducers.adopt(effect.committee, stage)
        self._sections.adopt(self._reducers.in_force, sums)
        self._pipeline_rank = None
        if seat is not None:
            self._pipeline_rank = PipelineRank.of(seat, self._share, self._groups.find(seat.lane_key))


def _stage_model(job: JobSpec, share: Share, precision: Precision, device: torch.device) -> StageModel:
    return StageModel(
        share.computed,
        dtype=precision.parameters,
        device=device,
        autocast=precision.autocast,
        recompute=job.recompute,
        compiles=job.compiles,
        attention=job.attn_implementation,
        cached=share.cached,
        casts_cached=share.sums_in_passes,
    )
