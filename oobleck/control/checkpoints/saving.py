"""The saves of a run: what has arrived of each, when it is complete, and which are too old.

    idle ── due: SaveState to all ──> wanted ── the first share is in memory ──> under way
     ^                                                                              │
     │                                               all layers on disk: CommitCheckpoint
     └────────────────── complete, or given up <────────────────────────────────────┘

`SaveRequests` is idle or wants one. Training never waits for a save: a failure is reported, and the next save tried
later. With `checkpoint.waits_for_disk` a step to save waits for the end of the save before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from oobleck.control import protocol
from oobleck.control.events import Turn
from oobleck.control.journal import CheckpointSaved, SaveFailed
from oobleck.control.nodes import Membership
from oobleck.job import JobSpec
from oobleck.planner import WorkerId

from .requests import COPY_PATIENCE_S, RETRY_S, SaveRequests
from .restoring import Candidate, KnownCheckpoint, in_order
from .saves import BrokenSaves, Save

_PATIENCE_S = 1800.0
"""A save that is not complete by then is given up."""
# A save may be on disk this many steps after its own, and its manifest still has that step's loss.
_LOSSES_KEPT = 64


@dataclass(slots=True)
class _Reached:
    """The newest steps whose state has come this far."""

    tried: int = 0
    """A save has begun."""
    in_memory: int = 0
    """The state is, or was, whole in the nodes' memory."""
    on_disk: int = 0
    _shares: tuple[int, set[tuple[int, int]]] = field(default_factory=lambda: (0, set()))
    """(newest step with shares in memory, their layers and parts)"""

    def go_back(self, boundary: int, *, is_saving: bool) -> None:
        # A boundary without a save counts as untried, so `is_behind` has it saved even if no step follows.
        is_kept = is_saving or self.on_disk >= boundary
        self.tried = min(self.tried, boundary if is_kept else boundary - 1)
        self.on_disk = min(self.on_disk, boundary)
        self.in_memory = min(self.in_memory, boundary)
        if self._shares[0] > boundary:
            self._shares = (0, set())  # These steps are run again, and saved under other names.

    def note_share(self, step: int, parts: Iterable[tuple[int, int]], *, num_parts: int) -> None:
        # Shares of older steps do not matter, because `in_memory` is only ever compared with the newest step.
        if step > self._shares[0]:
            self._shares = (step, set())
        if step == self._shares[0]:
            self._shares[1].update(parts)
            if len(self._shares[1]) == num_parts:
                self.in_memory = step


class Saving:
    """The policy, the saves under way, and the complete checkpoints."""

    def __init__(
        self,
        job: JobSpec,
        members: Membership,
        *,
        run: str,
        reads_to_the_end: Callable[[protocol.DataPosition | None], bool],
    ) -> None:
        """`reads_to_the_end` says whether a position is the end of data that no longer grows."""
        self._job = job
        self._members = members
        self._run = run
        self._reads_to_the_end = reads_to_the_end
        self._origin: str | None = None
        self._layer_names: tuple[str, ...] = ()
        self._requests = SaveRequests(job, members)
        self._saves_first = False
        """Whether the plan's workers save the state with which they begin."""
        self._losses: dict[int, float] = {}
        self._saves: dict[str, Save] = {}
        self._reached = _Reached()
        self._broken = BrokenSaves()
        self._failure = ""
        """Why the newest save failed; empty if it did not."""
        self._given_up: set[str] = set()
        self.complete: list[KnownCheckpoint] = []
        """Oldest first."""

    @property
    def is_enabled(self) -> bool:
        """Whether the user wants checkpoints, and all workers have a place for them."""
        return self._requests.is_enabled

    @property
    def is_settled(self) -> bool:
        """Whether no save is under way, and one of the newest step is over, successful or not."""
        return (not self._saves and self._reached.tried >= self._requests.last_step) or not self.is_enabled

    @property
    def is_behind(self) -> bool:
        """Whether the newest step is not saved, and no save of it is under way."""
        return self._reached.tried < self._requests.last_step and self.is_enabled

    @property
    def may_be_in_memory(self) -> bool:
        """Whether missing reports may still show that the newest state is whole in memory."""
        return self.is_enabled and self._reached.in_memory < self._requests.last_step

    def let_begin(self) -> float:
        """Return the last step that may begin now, as the job waits for its saves."""
        return self._requests.let_begin(is_saving=bool(self._saves))

    @property
    def lacking(self) -> str | None:
        """Why the newest step is not on disk, and what to do; None if it is, or need not be."""
        if not self._job.checkpoint.enabled or self._reached.on_disk >= self._requests.last_step:
            return None
        if not self.is_enabled and not self._failure:
            return None  # These workers never save.
        why = self._failure or "its save has not come to an end"
        return f"step {self._requests.last_step} is NOT SAVED: {why}; {self._what_is_left}"

    @property
    def _what_is_left(self) -> str:
        if self._reached.in_memory >= self._requests.last_step:
            return (
                "its state stays in the shared memory of the nodes until they are turned off: make room, and give the "
                "same command again, which writes it"
            )
        if self.complete:
            step = self.complete[-1].step
            return f"the same command continues from the checkpoint of step {step}, once what failed is mended"
        return "nothing is left of what was trained: mend what failed, and begin again"

    @property
    def due_s(self) -> float:
        """When to call `handle_deadline`; infinity for never."""
        # While saves are under way only their time limits count: the next is scheduled once they are over.
        if self._saves:
            return min(save.began_s + self._patience_s(save) for save in self._saves.values())
        return self._requests.due_s

    # --- what happens ----------------------------------------------------------------------------------------

    def begin_from(self, origin: str) -> None:
        """Name this checkpoint as the run's origin in its manifests."""
        # The first one stays: a run that goes back to one of its own checkpoints still began from that origin.
        self._origin = self._origin or origin

    def begin(self, layer_names: Sequence[str]) -> None:
        self._layer_names = tuple(layer_names)

    def know(self, turn: Turn, complete: Sequence[KnownCheckpoint], unfinished: Sequence[str] = ()) -> None:
        """Note existing checkpoints, and remove unfinished ones."""
        self.complete = in_order((*self.complete, *complete), run=self._run)
        self._remove(turn, [name for name in unfinished if name not in self._saves])

    def order_made(self, turn: Turn, update: protocol.PlanUpdate) -> None:
        # A commit carries the request to save. A worker that has to catch up missed it, so that save never completes.
        if update.catch_up is not None:
            self._broken.missed(update.catch_up.generation)
        # Nor does one that the plan before began with: some workers may have missed that plan's order.
        if self._saves_first and self._requests.ordered is not None:
            self._broken.missed(self._requests.ordered.generation)
        self._give_up_broken(turn, "another plan came before all had saved")

    def begins_with_save(self, update: protocol.PlanUpdate) -> bool:
        """Whether the workers must save the state with which an order begins, because no step follows it."""
        is_last = update.boundary >= self._job.max_steps and update.finish is None
        # A state of another directory stays there: without a save, this run's own would have no model.
        is_own = update.restore is not None and update.restore.directory is None
        return is_last and not is_own and self.is_enabled and self._reached.on_disk < update.boundary

    def plan_adopted(self, turn: Turn, ordered: protocol.OrderedPlan, *, redundant: bool, saves: bool = False) -> None:
        """Ask the workers of a new plan for the next save, as `SaveRequests.ask_plan` does.

        `saves`: they were ordered to save the state with which they begin.
        """
        self._saves_first = saves
        self._requests.know_plan(ordered)
        self._broken.plan_adopted(ordered.plan.nodes, generation=ordered.generation, boundary=ordered.boundary)
        is_saving = any(save.step == ordered.boundary for save in self._saves.values())
        self._reached.go_back(ordered.boundary, is_saving=is_saving)
        self._requests.ask_plan(turn, ordered, redundant=redundant, is_saving=bool(self._saves))

    def step_done(self, record: protocol.CommitRecord, now_s: float) -> None:
        self._requests.step_done(record.step, now_s)
        self._losses[record.step] = record.loss
        self._losses.pop(record.step - _LOSSES_KEPT, None)

    def note_saved(self, step: int) -> None:
        """Note that the state of a step is on disk, and needs no other save."""
        self._reached.tried = max(self._reached.tried, step)
        self._reached.on_disk = max(self._reached.on_disk, step)

    def keep(self, turn: Turn, candidate: Candidate) -> None:
        """Make sure that the state which all went back to is on disk."""
        if candidate.is_on_disk:
            # The workers of a plan save the last step's of another directory as they begin.
            if candidate.directory is None or candidate.step < self._job.max_steps:
                self.note_saved(candidate.step)
            return
        if not self._is_final(candidate.step, candidate.position):
            self._requests.ask_now(turn)
            return
        # There is nothing more to train, so no worker will save: agents write what an earlier run left in memory.
        name, step = candidate.name, candidate.step
        generation = int(name.rpartition(".")[2])
        save = Save(name, step, generation, turn.now_s, saved_at=candidate.saved_at, position=candidate.position)
        for worker_id, layers in sorted(candidate.held.items()):
            if layers:
                save.note_share(worker_id, tuple(sorted(layers)), num_parts=self._num_parts)
        self._saves[name] = save
        self._reached.tried = max(self._reached.tried, step)
        self._reached.in_memory = max(self._reached.in_memory, step)
        for node in sorted({worker_id.node for worker_id in save.savers}):
            turn.send(node, protocol.PersistState(name=name, step=step))

    def take_over(self, generation: int) -> None:
        """Give up saves up to this generation: an earlier master may have known of a loss or of lost shares."""
        self._broken.missed(generation)

    def restored(self) -> None:
        """Count a failure that needed a checkpoint."""
        self._requests.restored()

    def worker_lost(self, turn: Turn, node: str) -> None:
        """Give up what the lost worker had still to copy; its agent writes what is whole in memory."""
        self._broken.worker_gone(node)
        self._give_up_broken(turn, f"the worker of {node} was lost before all layers were in memory")

    def node_lost(self, turn: Turn, node: str) -> None:
        self.worker_lost(turn, node)
        self._agent_gone(turn, node, f"{node} was lost")

    def node_left(self, turn: Turn, node: str) -> None:
        """A drained node has left, perhaps before it had written its layers."""
        self._broken.worker_gone(node)
        self._give_up_broken(turn, f"{node} left before all layers were in memory")
        self._agent_gone(turn, node, f"{node} left")

    def _give_up_broken(self, turn: Turn, why: str) -> None:
        saves = [save for save in self._saves.values() if self._broken.has(save.generation, save.step)]
        for save in saves:
            # One that is whole in memory completes: agents write it without its workers.
            if len(save.in_memory) < self._num_all_parts:
                self._give_up(turn, save.name, why, soon=True)

    def _agent_gone(self, turn: Turn, node: str, why: str) -> None:
        for save in list(self._saves.values()):
            save.asked.discard(node)
            here = [worker_id for worker_id in save.savers if worker_id.node == node]
            if any(save.unwritten(worker_id, num_parts=self._num_parts) for worker_id in here):
                self._give_up(turn, save.name, f"{why} before it had written its layers", soon=True)
            elif save.is_committing and not save.asked | save.committed:
                # Every node that was asked for the manifest is gone, and none reported that it has it.
                self._give_up(turn, save.name, f"{why} before it had written its manifest", soon=True)
            else:
                # This agent's answer may have been the only one missing.
                self._complete_when_committed(turn, save)

    def handle_deadline(self, turn: Turn) -> None:
        for save in list(self._saves.values()):
            patience_s = self._patience_s(save)
            if turn.now_s >= save.began_s + patience_s:
                self._give_up(turn, save.name, f"it was not complete within {patience_s:g} s")
        if not self._saves and turn.now_s >= self.due_s:
            self._requests.ask_due(turn)

    # --- what workers and agents report ----------------------------------------------------------------------

    def saved(self, turn: Turn, worker_id: WorkerId, message: protocol.StateSaved) -> None:
        """Note that a share is whole in memory; its agent is writing it."""
        state, part = message.state, worker_id.device % self._num_parts
        # Shares of a save that was given up count too, because they stay in memory.
        shares = [(layer, part) for layer in message.layers]
        self._reached.note_share(state.step, shares, num_parts=self._num_all_parts)
        if self._is_over(state.name):
            return
        save = self._saves.get(state.name)
        if save is None:
            save = self._saves[state.name] = Save(state.name, state.step, state.generation, turn.now_s)
            self._reached.tried = max(self._reached.tried, state.step)
            # The loss that breaks a save may be known before the first share of it is reported.
            if self._broken.has(state.generation, state.step):
                self._give_up(turn, state.name, "a worker was lost before all layers were in memory", soon=True)
                return
        self._requests.answered(state.step)
        save.note_share(worker_id, message.layers, num_parts=self._num_parts)
        save.saved_at = max(save.saved_at, state.saved_at)
        save.position = state.position
        save.pause_s = max(save.pause_s, message.pause_s)
        save.copy_s = max(save.copy_s, message.copy_s)
        self._commit_when_written(turn, save)

    def persisted(self, turn: Turn, message: protocol.LayersPersisted) -> None:
        save = self._saves.get(message.name)
        if save is not None:
            save.shards.update(((shard.layer, shard.part), shard) for shard in message.shards)
            self._commit_when_written(turn, save)
        elif message.name in self._given_up:
            self._remove(turn, [message.name])  # It was written after the save was given up.

    def committed(self, turn: Turn, node: str, message: protocol.CheckpointCommitted) -> None:
        save = self._saves.get(message.name)
        if save is not None and save.is_committing:  # Otherwise an earlier master asked the node.
            save.committed.add(node)
            self._complete_when_committed(turn, save)

    def failed(self, turn: Turn, node: str, message: protocol.StateNotSaved) -> None:
        """Give up a save of which a part has failed; training continues."""
        if not message.name:  # The node has no place for checkpoints, so there will be none.
            self._failure = f"{node}: {message.reason}"
            turn.note("error", f"nothing can be saved: {self._failure}; training continues")
        elif not self._is_over(message.name):
            self._reached.tried = max(self._reached.tried, message.step)
            # A failure may be the first report of a save. As it is given up at once, its generation does not matter.
            self._saves.setdefault(message.name, Save(message.name, message.step, 0, turn.now_s))
            self._give_up(turn, message.name, f"{node}: {message.reason}")

    # --- from a save to a checkpoint -------------------------------------------------------------------------

    def _commit_when_written(self, turn: Turn, save: Save) -> None:
        """Send the manifest to all nodes that wrote layers, once all layers are on disk."""
        if save.is_committing or len(save.shards) < self._num_all_parts or not save.savers:
            return
        save.is_committing = True
        save.replaced = self._too_old(in_order((*self.complete, self._known(save)), run=self._run))
        # The manifest names every file, so other nodes' disks have nothing to name. If none of the writers is left, all
        # get it: they may share the directory.
        agents, writers = set(self._agents), {worker_id.node for worker_id in save.savers}
        save.asked.update(agents & writers or agents)
        message = protocol.CommitCheckpoint(manifest=self._manifest(save), remove=save.replaced)
        for node in sorted(save.asked):
            turn.send(node, message)

    def _complete_when_committed(self, turn: Turn, save: Save) -> None:
        if not save.is_committed:
            return
        del self._saves[save.name]
        self._requests.completed(max(save.pause_s, save.copy_s), turn.now_s - save.began_s)
        self.know(turn, [self._known(save)])
        too_old = self._too_old(self.complete)
        del self.complete[: -self._job.checkpoint.save_total_limit]
        self._reached.on_disk, self._failure = max(self._reached.on_disk, save.step), ""
        entry = CheckpointSaved(
            t_s=turn.now_s,
            name=save.name,
            step=save.step,
            saved_at=save.saved_at,
            size_bytes=sum(shard.size_bytes for shard in save.shards.values()),
            pause_s=save.pause_s,
            duration_s=turn.now_s - save.began_s,
        )
        turn.record(entry)
        # If two saves were under way, more are too old by now than the nodes with this manifest were told.
        told = save.asked if set(too_old) <= set(save.replaced) else set()
        for node in self._agents if too_old else ():
            if node not in told:
                turn.send(node, protocol.RemoveOld(names=too_old))
        self._requests.schedule(turn, is_saving=bool(self._saves))

    def _give_up(self, turn: Turn, name: str, why: str, *, soon: bool = False) -> None:
        """Give up a save. `soon`: a loss is the cause, and the next save can follow at once."""
        save = self._saves.pop(name)
        self._given_up.add(name)
        self._failure = why
        newest_step = self.complete[-1].step if self.complete else None
        entry = SaveFailed(t_s=turn.now_s, step=save.step, reason=why, newest_step=newest_step, is_our_doing=soon)
        self._remove(turn, [name])
        turn.record(entry)
        if soon:
            self._requests.ask_again(turn)
        else:  # a disk that is full or too slow is not tried again at once
            self._requests.schedule(turn, is_saving=bool(self._saves), not_before_s=turn.now_s + RETRY_S)

    def _remove(self, turn: Turn, unfinished: Sequence[str]) -> None:
        for node in self._agents if unfinished else ():
            turn.send(node, protocol.RemoveUnfinished(names=tuple(sorted(unfinished))))

    # --- what follows from the state -------------------------------------------------------------------------

    @property
    def _agents(self) -> tuple[str, ...]:
        # Agents serve without workers, too.
        return tuple(member.spec.name for member in self._members.living if not member.is_dismissed)

    @property
    def _num_parts(self) -> int:
        return self._job.devices_per_stage

    @property
    def _num_all_parts(self) -> int:
        return len(self._layer_names) * self._num_parts

    def _patience_s(self, save: Save) -> float:
        return _PATIENCE_S if len(save.in_memory) == self._num_all_parts else COPY_PATIENCE_S

    def _is_over(self, name: str) -> bool:
        return name in self._given_up or any(known.name == name for known in self.complete)

    def _is_final(self, step: int, position: protocol.DataPosition | None) -> bool:
        return step >= self._job.max_steps or self._reads_to_the_end(position)

    def _known(self, save: Save) -> KnownCheckpoint:
        is_final = self._is_final(save.step, save.position)
        return KnownCheckpoint(name=save.name, step=save.step, saved_at=save.saved_at, is_final=is_final)

    def _too_old(self, complete: Sequence[KnownCheckpoint]) -> tuple[str, ...]:
        old = complete[: -self._job.checkpoint.save_total_limit]
        return tuple(known.name for known in old if not known.is_final)

    def _manifest(self, save: Save) -> protocol.Manifest:
        # Any digest will do: workers whose data differs never train together.
        digests = [worker.data_digest for member in self._members.ready for worker in member.ready.values()]
        return protocol.Manifest(
            version=protocol.MANIFEST_VERSION,
            name=save.name,
            tag=self._job.tag,
            run=protocol.run_of(save.name),
            saved_at=save.saved_at,
            step=save.step,
            generation=save.generation,
            loss=self._losses.get(save.step),
            seed=self._job.seed,
            global_batch_size=self._job.global_batch_size,
            samples_seen=save.step * self._job.global_batch_size if save.position is None else save.position.records,
            data_digest=digests[0] if digests else "",
            layer_names=self._layer_names,
            num_parts=self._num_parts,
            shards=tuple(shard for _, shard in sorted(save.shards.items())),
            position=save.position,
            origin=self._origin if protocol.run_of(save.name) == self._run else None,
            is_final=self._is_final(save.step, save.position),
        )
