"""How a worker follows its orders: the protocol of all workers, as effects that a driver carries out.

    an order ──> catch up ──> give back ──> finish the step, or forget it ──> adopt the plan ──> train, step by step
       ^                                                                                             │
       └───────────── Interrupted (a fence), or a failure that is reported and answered by a fence ◄─┘

    a step:  compute ──> settle sections ──> reduce ──> note_reduced ──> agree ──> begin_apply ──> apply ──> save
    a plan:  form groups ──> receive layers ──> CommitState.adopt ──> hold the layers ──> drop old groups
                └ those for sums: in the background, up to the first sum ──> note_formed

The sequence is written here, once. The driver knows how, never when: `training/step/engine.py` carries effects out with
torch and sockets, `sim/cluster/worker.py` with virtual time and a fabric with chosen faults. So what the simulator
shows about the sequence holds for workers on real machines.

`CommitState` says what a worker's answers to fences promise; the follower calls it at each moment that it passes.
"""

from __future__ import annotations

from collections.abc import Generator

from oobleck.control import protocol
from oobleck.control.plans import shares_of
from oobleck.errors import CorruptCheckpoint, ShardUnreadable
from oobleck.job import JobSpec
from oobleck.planner import ExecutionPlan

from . import worker_effects
from .commit_state import CommitState, Interrupted, PeerLost
from .groups import Committee, GroupKey, PlaceInPlan, transfer_keys
from .partial_commit import PartialCommit
from .step_board import StepBoard

_Asking = Generator[worker_effects.WorkerEffect, worker_effects.EffectOutcome, bool]


class Follower:
    """The course of the training thread. Its state is the plan in force and the work on the step in flight."""

    def __init__(self, job: JobSpec, commit_state: CommitState, *, board: StepBoard | None, evaluates: bool) -> None:
        """`board` is None if a step follows from its number; `evaluates` says whether there are samples to evaluate."""
        self._job = job
        self._worker_id = commit_state.worker_id
        self._device = commit_state.worker_id.device
        self._commit_state = commit_state
        self._board = board
        self._evaluates = evaluates
        self._whole = protocol.Tally.of(range(job.num_microbatches), num_lanes=job.num_lanes)
        # The driver advances it during programs.
        self.partial_commit = PartialCommit(commit_state, num_lanes=job.num_lanes)
        self._seat: PlaceInPlan | None = None
        """The place in the plan in force; None for a spare."""
        self._committee: Committee | None = None
        self._saves_first = False
        """Whether to save the state with which the plan begins."""
        self._resumed: int | None = None
        """The generation whose resumption is not reported yet."""
        self._transferred: tuple[GroupKey, ...] | None = None
        """Groups in which layers moved; None once a step is committed under the plan."""
        self._step: int | None = None
        """The step in flight, once it is begun."""
        self._share_done = False
        self._segments_done: set[int] = set()

    def run(self) -> worker_effects.WorkerEffects:
        """Follow orders forever."""
        while True:
            update = yield worker_effects.AwaitPlanUpdate()
            assert isinstance(update, protocol.PlanUpdate)
            try:
                yield from self._follow(update)
                if (yield from self._train()):
                    yield worker_effects.ReportFinished()
            except Interrupted:
                continue
            except PeerLost as error:
                yield worker_effects.Say(
                    protocol.PeerFailed(device=self._device, generation=update.generation, detail=str(error))
                )
            except ShardUnreadable as error:
                yield worker_effects.Say(self._unreadable(update, error))
            except CorruptCheckpoint as error:
                yield worker_effects.Say(self._corrupt(update, error))

    def _follow(self, update: protocol.PlanUpdate) -> worker_effects.WorkerEffects:
        # What others have committed comes first: giving back or forgetting would drop the sums for it.
        if update.catch_up is not None and self._commit_state.catch_up(update.catch_up):
            yield from self._apply(update.catch_up)
        if update.catch_up_section is not None:
            yield from self.partial_commit.catch_up(update.catch_up_section)
        yield from self.partial_commit.give_back()
        if update.finish is None:
            yield from self._forget()
        # A worker that the plan in force left out is behind, and has nothing of this step to finish.
        elif self._commit_state.applied == update.finish - 1:
            yield from self._finish(update, update.finish)
        yield from self._adopt(update)

    def _train(self) -> _Asking:
        """Run steps to the job's last one, or to the one whose commit agrees to stop; False for a spare."""
        seat, committee = self._seat, self._committee
        if seat is None or committee is None:
            return False
        stop = False
        if self._saves_first:
            yield worker_effects.Save(self._commit_state.applied, committee.generation, committee)
        if not self.partial_commit.before:  # In the middle of a step, its evaluation is done already.
            yield from self._evaluate(seat, committee)
        while not stop and (yield from self._has_next(committee)):
            yield from self._compute(seat, committee, self._commit_state.applied + 1, ends_under_plan=True)
            stop = yield from self._end_step(committee)
            yield from self._end_transfers()
            if not stop:
                yield from self._evaluate(seat, committee)
        return True

    # --- a step ----------------------------------------------------------------------------------------------

    def _has_next(self, committee: Committee) -> _Asking:
        """Wait until it is known whether another step follows. At the end, save what is not saved yet."""
        step, board = self._commit_state.applied, self._board
        if board is None or step >= self._job.max_steps:
            return step < self._job.max_steps
        if not board.is_told(step + 1):
            # The change of plans is over, although nothing is computed before the step may begin.
            yield from self._resume()
            yield worker_effects.AwaitStep(step + 1)
        if board.is_told(step + 1):
            return True
        over = board.over_after(step)
        assert over is not None
        if over.save:
            yield worker_effects.SaveEnd(over, committee)
        return False

    def _compute(
        self, seat: PlaceInPlan, committee: Committee, step: int, *, ends_under_plan: bool
    ) -> worker_effects.WorkerEffects:
        if self._step != step:
            yield from self._begin(step)
        # A fence came after the computation and before the commit.
        if self._share_done:
            return
        share = shares_of(committee.plan, self.partial_commit.before)[seat.index]
        # Where others of a stage were in the midst of this program when the fence came, they finish it as it is.
        sections = self.partial_commit.num_sections
        yield from self._execute(worker_effects.Compute(step, tuple(share), sections, ends_under_plan=ends_under_plan))
        self._share_done = True

    def _begin(self, step: int) -> worker_effects.WorkerEffects:
        yield from self._forget()
        yield worker_effects.BeginStep(step)
        self._step = step

    def _forget(self) -> worker_effects.WorkerEffects:
        self._step = None
        self._share_done = False
        self._segments_done.clear()
        self._commit_state.begin_step()
        yield worker_effects.ForgetStep()

    def _execute(self, program: worker_effects.Compute) -> worker_effects.WorkerEffects:
        if self._commit_state.is_broken:
            # It failed after the fence was answered, so the coordinator relies on this pipeline. Report it again, now
            # under the order's generation: what was computed cannot be continued.
            raise PeerLost("a program of this step failed half-way before")
        yield from self._resume()
        try:
            yield program
        except (PeerLost, ShardUnreadable):
            self._commit_state.note_broken()
            raise

    def _end_step(self, committee: Committee) -> _Asking:
        """Reduce, commit, apply: all workers or none. Returns whether training ends with this step."""
        step = self._step
        assert step is not None
        # All members of a group post its sums in one order, the step's own after those of its last section.
        yield from self.partial_commit.settle()
        yield from self.partial_commit.await_groups()
        # This fails once fenced: the worker may have left out a section, for which others wait.
        self._commit_state.begin_sums()
        yield worker_effects.Reduce(step, committee)
        # This precedes the worker's part in the agreement: a total means that all have passed this moment.
        self._commit_state.note_reduced(step)
        stop = self._commit_state.is_stop_wanted or (self._board is not None and self._board.is_last(step))
        agreed = yield worker_effects.Agree(step, committee, stop)
        assert isinstance(agreed, worker_effects.Agreed)
        self._check(step, agreed.counted)
        # From here on answers say that the step is applied, so nothing may wait or fail until it is.
        self._commit_state.begin_apply(agreed.record)
        yield from self._apply(agreed.record)
        if agreed.save or agreed.stop or step == self._job.max_steps:
            yield worker_effects.Save(step, agreed.record.generation, committee)
        elif not committee.lost:
            yield worker_effects.PrepareToSave(committee)
        if self._job.checkpoint.compare_steps and step % self._job.checkpoint.compare_steps == 0:
            yield worker_effects.CompareReplicas(agreed.record)
        return agreed.stop

    def _check(self, step: int, counted: protocol.Tally) -> None:
        """Check that each microbatch of a step counts once. Raises AssertionError: a wrong sum is never applied."""
        partial = protocol.Tally.of(self.partial_commit.microbatches, num_lanes=self._job.num_lanes)
        what = f"step {step}: {counted.count} microbatches were counted in addition to {partial.count}"
        assert counted + partial == self._whole, f"{what}; they are not all {self._whole.count}, each once"

    def _apply(self, record: protocol.CommitRecord) -> worker_effects.WorkerEffects:
        # The step is committed, so nothing can interrupt this.
        yield worker_effects.Apply(record)
        self.partial_commit.end_step()
        yield from self._forget()
        if self._seat is not None and (self._seat.is_first or self._seat.is_last):
            yield worker_effects.Say(protocol.StepCommitted(device=self._device, record=record))

    def _evaluate(self, seat: PlaceInPlan, committee: Committee) -> worker_effects.WorkerEffects:
        step = self._commit_state.applied
        if not self._evaluates or not self._job.is_evaluated(step):
            return
        yield from self._resume()
        # An evaluation may be given up half-way, with messages and sums that no worker completes. So it has groups of
        # its own, which end with the plan.
        stage_key = GroupKey("evaluation", committee.generation, seat.stage_key.members)
        lane_key = GroupKey("forward", committee.generation, seat.lane_key.members)
        yield worker_effects.FormGroups((stage_key, lane_key), None)
        outcome = yield worker_effects.Evaluate(step, committee, stage_key, lane_key)
        assert isinstance(outcome, worker_effects.Evaluation)
        if seat.is_first or seat.is_last:
            yield worker_effects.Say(
                protocol.EvaluationDone(
                    device=self._device,
                    step=step,
                    loss=outcome.loss,
                    num_samples=outcome.num_samples,
                    duration_s=outcome.duration_s,
                )
            )

    def _resume(self) -> worker_effects.WorkerEffects:
        # Reported once after each adoption, when the first computation under the new plan begins.
        generation, self._resumed = self._resumed, None
        if generation is not None:
            yield worker_effects.ReportResumed(generation)

    # --- from one plan to the next ---------------------------------------------------------------------------

    def _finish(self, update: protocol.PlanUpdate, step: int) -> worker_effects.WorkerEffects:
        """Finish the step in flight under the old plan, without its lost nodes."""
        seat, in_force = self._seat, self._committee
        if seat is None or in_force is None:
            return  # Spares and newcomers take no part in the old plan.
        committee = self._committee_of(update, in_force.plan, update.lost)
        yield from self._form((), committee)
        if any(node in update.lost for node in seat.pipeline.nodes):
            # Members of a broken pipeline contribute zeros, and so receive the sums and stay current.
            yield from self._begin(step)
        else:
            yield from self._compute(seat, in_force, step, ends_under_plan=False)
            for segment in update.segments:
                if segment.pipeline == seat.index and segment.segment not in self._segments_done:
                    yield from self._execute(worker_effects.Compute(step, segment.microbatches))
                    self._segments_done.add(segment.segment)
        yield from self._end_step(committee)

    def _adopt(self, update: protocol.PlanUpdate) -> worker_effects.WorkerEffects:
        seat = PlaceInPlan.find(update, self._worker_id)
        committee = None if seat is None else self._committee_of(update, update.plan)
        self._transferred = keys = transfer_keys(update.transfers, update.generation, self._worker_id)
        if seat is not None and committee is not None:
            keys += (seat.lane_key, seat.stage_key)
        layers = () if seat is None else seat.layers
        yield from self._form(keys, committee)
        if update.restore is not None:
            assert not update.partial.microbatches, "a checkpoint is of a whole step"
            yield worker_effects.ReadCheckpoint(update, layers)
        yield worker_effects.Exchange(update)
        is_current = self._commit_state.applied == update.boundary
        yield worker_effects.ShareLossScale(committee, is_current or update.restore is not None)
        keep = self._to_keep(update, layers) if is_current else ()
        # From here on answers say that the layers are held, so nothing may wait or fail until they are.
        self._commit_state.adopt(update, layers, keep)
        yield worker_effects.Adopt(update, seat, committee, layers, keep)
        self.partial_commit.adopt(update, is_spare=seat is None)
        self._seat, self._committee = seat, committee
        self._saves_first = update.saves
        self._resumed = update.generation
        yield worker_effects.KeepGroups(keys, committee, update.generation)

    def _form(self, keys: tuple[GroupKey, ...], committee: Committee | None) -> worker_effects.WorkerEffects:
        if (yield worker_effects.FormGroups(keys, committee)):
            self._commit_state.begin_forming()

    def _end_transfers(self) -> worker_effects.WorkerEffects:
        keys, self._transferred = self._transferred, None
        if keys is not None:
            yield worker_effects.EndTransfers(keys)

    def _committee_of(self, update: protocol.PlanUpdate, plan: ExecutionPlan, lost: tuple[str, ...] = ()) -> Committee:
        kept = {} if self._committee is None else self._committee.keys
        return Committee(plan, update.generation, lost, kept=kept, regrouped=frozenset(update.regrouped))

    def _to_keep(self, update: protocol.PlanUpdate, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the moving layers to keep for others, although the plan takes them from this worker."""
        # They may not have arrived: if a target or another source is lost, a later plan has them read from here. But a
        # worker that was left out, and missed steps or sections since, has nothing worth keeping.
        if not self.partial_commit.is_at(update.partial):
            return ()
        kept = self._commit_state.kept
        if update.restore is not None:
            kept = tuple(item.layer for item in update.transfers if item.source == self._worker_id)
        moving = frozenset(update.moving).difference(layers)
        return tuple(sorted(moving.intersection((*self._commit_state.layers, *kept))))

    def _unreadable(self, update: protocol.PlanUpdate, error: ShardUnreadable) -> protocol.RecordsFailed:
        return protocol.RecordsFailed(
            device=self._device,
            generation=update.generation,
            shard=error.shard,
            position=error.position,
            problem=error.problem,
        )

    def _corrupt(self, update: protocol.PlanUpdate, error: CorruptCheckpoint) -> protocol.RestoreFailed:
        assert update.restore is not None
        return protocol.RestoreFailed(
            device=self._device, generation=update.generation, name=update.restore.name, problem=str(error)
        )
