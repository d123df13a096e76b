"""The saves of a run: when one is due, what is there of it, when it is complete, and which are too old.

    due ── SaveState to all ──> wanted ── the first share is in memory ──> under way
                                  ^                                         │ all layers on disk: CommitCheckpoint
                                  └──── complete, or given up <─────────────┘

A part of the coordinator's machine. Training never waits for it: what fails is said, and tried again later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from oobleck.control import protocol
from oobleck.control.events import Record, Send, notice
from oobleck.control.journal import CheckpointSaved, SaveFailed
from oobleck.control.nodes import Membership
from oobleck.job import JobSpec
from oobleck.planner import ExecutionPlan, WorkerId

from .restoring import Candidate, KnownCheckpoint, in_order
from .saves import BrokenSaves, Save, SavePolicy

_RETRY_S = 30.0
"""After a save that failed, at least."""
_PATIENCE_S = 1800.0
"""A save that is not complete by then never will be."""
_COPY_PATIENCE_S = 120.0
"""One that is not whole in memory by then never will be: a master that took over may not know of a lost share."""
_LOSSES_KEPT = 64


class Saving:
    """The policy, the saves under way, and the checkpoints that are complete."""

    def __init__(
        self,
        job: JobSpec,
        members: Membership,
        *,
        run: str,
        reads_to_the_end: Callable[[protocol.DataPosition | None], bool],
    ) -> None:
        """`reads_to_the_end` says whether data that grows no more is read at a position, so that the run is done."""
        self._job = job
        self._members = members
        self._run = run
        self._num_parts = job.tensor_parallel
        self._policy = SavePolicy(spec=job.checkpoint)
        self._layer_names: tuple[str, ...] = ()
        self._plan: ExecutionPlan | None = None
        self._generation = 0
        self._saves_first = False
        """Whether its workers save the state with which they begin."""
        self._last_step = 0
        self._broken = BrokenSaves()
        self._losses: dict[int, float] = {}
        self._wanted: int | None = None
        """The step after which all were to save."""
        self._saves: dict[str, Save] = {}
        self._tried_step = 0
        """The newest step after which a save has begun."""
        self._origin: str | None = None
        self._reads_to_the_end = reads_to_the_end
        self._saved_step = 0
        """The newest step of which there is a checkpoint on disk."""
        self._in_memory: tuple[int, set[tuple[int, int]]] = (0, set())
        """The newest step that shares in memory were heard of, and which layers and parts these are."""
        self._memory_step = 0
        """The newest step whose state is, or was, whole in the nodes' memory."""
        self._failure = ""
        """Why the newest save failed; empty after one that did not."""
        self._given_up: set[str] = set()
        self.complete: list[KnownCheckpoint] = []
        """Oldest first."""
        self.due_s = math.inf
        """When time has a save made, or one under way given up."""

    @property
    def is_enabled(self) -> bool:
        """Whether the user wants it, and all workers have a place to save in."""
        return self._job.checkpoint.enabled and self._members.all_save

    @property
    def is_settled(self) -> bool:
        """Nothing is under way, and a save after the newest step has come to an end, good or bad."""
        return (not self._saves and self._tried_step >= self._last_step) or not self.is_enabled

    @property
    def is_behind(self) -> bool:
        """The newest step is not saved, and no save of it is under way."""
        return self._tried_step < self._last_step and self.is_enabled

    @property
    def lacking(self) -> str | None:
        """Say that the newest step is not on disk, why, and what to do; None where it is, or is not wanted there."""
        if not self._job.checkpoint.enabled or self._saved_step >= self._last_step:
            return None
        if not self.is_enabled and not self._failure:
            return None  # these workers never save
        why = self._failure or "its save has not come to an end"
        return f"step {self._last_step} is NOT SAVED: {why}; {self._what_is_left}"

    @property
    def may_be_in_memory(self) -> bool:
        """Whether it is not known yet if the newest state is whole in memory: reports of shares may be missing."""
        return self.is_enabled and self._memory_step < self._last_step

    @property
    def _what_is_left(self) -> str:
        if self._memory_step >= self._last_step:
            return (
                "its state stays in the shared memory of the nodes until they are turned off: make room, and give the "
                "same command again, which writes it"
            )
        if self.complete:
            step = self.complete[-1].step
            return f"the same command continues from the checkpoint of step {step}, once what failed is mended"
        return "nothing is left of what was trained: mend what failed, and begin again"

    # --- what happens ----------------------------------------------------------------------------------------

    def begin_from(self, origin: str) -> None:
        """The run continues from this checkpoint: its own will say so."""
        self._origin = self._origin or origin

    def begin(self, layer_names: Sequence[str]) -> None:
        """Training begins, or is taken over."""
        self._layer_names = tuple(layer_names)

    def know(self, complete: Sequence[KnownCheckpoint], unfinished: Sequence[str] = ()) -> tuple[Send, ...]:
        """Note what lies in the directory from before; what was never finished is removed."""
        self.complete = in_order((*self.complete, *complete), run=self._run)
        return self._remove(name for name in unfinished if name not in self._saves)

    def order_made(self, update: protocol.PlanUpdate, now_s: float) -> tuple[Record | Send, ...]:
        """Note an order. A worker that missed a commit or an order did not save, so that save never completes."""
        if update.catch_up is not None:
            self._broken.missed(update.catch_up.generation)
        if self._saves_first:
            self._broken.missed(self._generation)
        return self._give_up_broken("another plan came before all had saved", now_s)

    def begins_with_save(self, update: protocol.PlanUpdate) -> bool:
        """Whether the state with which an order begins has to be saved by those who follow it: no step comes after."""
        is_last = update.boundary >= self._job.max_steps and update.finish is None and update.restore is None
        return is_last and self.is_enabled and self._saved_step < update.boundary

    def plan_adopted(
        self,
        plan: ExecutionPlan,
        now_s: float,
        *,
        generation: int,
        boundary: int,
        redundant: bool,
        saves: bool = False,
    ) -> tuple[Send, ...]:
        """Tell the workers of a new plan what is wanted; without redundancy that is a save, at once.

        `saves`: they were ordered to save the state with which they begin.
        """
        self._plan, self._generation, self._saves_first = plan, generation, saves
        self._broken.plan_adopted(plan.nodes, generation=generation, boundary=boundary)
        self._last_step = boundary
        is_kept = self._saved_step >= boundary or any(save.step == boundary for save in self._saves.values())
        self._tried_step = min(self._tried_step, boundary if is_kept else boundary - 1)
        self._saved_step = min(self._saved_step, boundary)
        self._memory_step = min(self._memory_step, boundary)
        if self._in_memory[0] > boundary:
            self._in_memory = (0, set())  # the steps since are run again, under other names
        if not self.is_enabled:
            return ()
        if not redundant:
            self._wanted = boundary + 1
        return self._arm(now_s) if self._wanted is None else self._orders(self._wanted)

    def step_done(self, record: protocol.CommitRecord) -> None:
        """Note a committed step; one that all were to save after may have been missed."""
        self._last_step = record.step
        self._losses[record.step] = record.loss
        self._losses.pop(record.step - _LOSSES_KEPT, None)

    def note_saved(self, step: int) -> None:
        """The state is that of a checkpoint on disk: it needs no other one."""
        self._tried_step = max(self._tried_step, step)
        self._saved_step = max(self._saved_step, step)

    def keep(self, candidate: Candidate, now_s: float) -> tuple[Send, ...]:
        """See to it that the state which is gone back to is on disk."""
        if candidate.is_on_disk:
            self.note_saved(candidate.step)
            return ()
        if self._is_final(candidate.step, candidate.position):
            return self._rescue(candidate, now_s)
        return self.save_now()

    def _rescue(self, candidate: Candidate, now_s: float) -> tuple[Send, ...]:
        """Have a state written that a run before has left in memory alone.

        It is the state that this run begins from, and there is nothing more to train.
        """
        name, step = candidate.name, candidate.step
        generation = int(name.rpartition(".")[2])
        save = Save(name, step, generation, now_s, saved_at=candidate.saved_at, position=candidate.position)
        held = sorted(candidate.held.items())
        save.savers = {worker_id: tuple(sorted(layers)) for worker_id, layers in held if layers}
        self._saves[name] = save
        self._tried_step = max(self._tried_step, step)
        self._memory_step = max(self._memory_step, step)
        self.due_s = save.began_s + _PATIENCE_S
        nodes = sorted({worker_id.node for worker_id in save.savers})
        return tuple(Send(node=node, message=protocol.PersistState(name=name, step=step)) for node in nodes)

    def take_over(self, generation: int) -> None:
        """A master before may have heard of a loss up to this generation, and of shares that nobody has any more."""
        self._broken.missed(generation)

    def note_on_disk(self, step: int) -> None:
        """A master before has heard that there is a checkpoint of this step."""
        self.note_saved(min(step, self._last_step))

    def restored(self) -> None:
        """Count a failure that needed a checkpoint."""
        self._policy = replace(self._policy, num_failures=self._policy.num_failures + 1)

    def worker_lost(self, node: str, now_s: float) -> tuple[Record | Send, ...]:
        """A worker is gone, its agent is not: what is whole in memory will be written all the same."""
        self._broken.worker_gone(node)
        return self._give_up_broken(f"the worker of {node} was lost before all layers were in memory", now_s)

    def node_lost(self, node: str, now_s: float) -> tuple[Record | Send, ...]:
        """A node is gone, with all that it had not written."""
        return self.worker_lost(node, now_s) + self._agent_gone(node, f"{node} was lost", now_s)

    def node_left(self, node: str, now_s: float) -> tuple[Record | Send, ...]:
        """A node has left as it was asked to, and may have left something unwritten."""
        self._broken.worker_gone(node)
        effects = self._give_up_broken(f"{node} left before all layers were in memory", now_s)
        return effects + self._agent_gone(node, f"{node} left", now_s)

    def _give_up_broken(self, why: str, now_s: float) -> tuple[Record | Send, ...]:
        saves = [save for save in self._saves.values() if self._broken.has(save.generation, save.step)]
        broken = [save for save in saves if not self._is_whole(save)]
        return tuple(effect for save in broken for effect in self._give_up(save.name, why, now_s, soon=True))

    def _is_whole(self, save: Save) -> bool:
        return save.is_in_memory(len(self._layer_names), num_parts=self._num_parts)

    def _agent_gone(self, node: str, why: str, now_s: float) -> tuple[Record | Send, ...]:
        effects: list[Record | Send] = []
        for save in list(self._saves.values()):
            save.asked.discard(node)
            here = [worker_id for worker_id in save.savers if worker_id.node == node]
            if any(save.unwritten(worker_id, num_parts=self._num_parts) for worker_id in here):
                effects += self._give_up(save.name, f"{why} before it had written its layers", now_s, soon=True)
            elif save.is_committing and not save.asked | save.committed:
                effects += self._give_up(save.name, f"{why} before it had written its manifest", now_s, soon=True)
            else:
                effects += self._complete_when_committed(save, now_s)
        return tuple(effects)

    def handle_deadline(self, now_s: float) -> tuple[Record | Send, ...]:
        """Have a save made when one is due; give up what takes for ever."""
        effects: list[Record | Send] = []
        for save in list(self._saves.values()):
            patience_s = self._patience_s(save)
            if now_s >= save.began_s + patience_s:
                effects += self._give_up(save.name, f"it was not complete within {patience_s:g} s", now_s)
        if not self._saves and self._wanted is None and now_s >= self.due_s and self._plan is not None:
            effects += self.save_now()
        else:
            self._be_patient()
        return tuple(effects)

    def _be_patient(self) -> None:
        """Wait for the saves under way, if there are any, and for nothing else."""
        self.due_s = min((save.began_s + self._patience_s(save) for save in self._saves.values()), default=math.inf)

    def save_now(self) -> tuple[Send, ...]:
        """Have the state saved after the next step."""
        if not self.is_enabled or self._plan is None:
            return ()
        self._wanted = self._last_step + 1
        self.due_s = math.inf
        return self._orders(self._wanted)

    # --- what workers and agents say -------------------------------------------------------------------------

    def saved(self, worker_id: WorkerId, message: protocol.StateSaved, now_s: float) -> tuple[Record | Send, ...]:
        """A share is whole in memory; its agent is writing it."""
        state = message.state
        self._note_in_memory(worker_id, message)
        if self._is_over(state.name):
            return ()
        save = self._saves.get(state.name)
        if save is None:
            save = Save(state.name, state.step, state.generation, now_s)
            self._saves[state.name] = save
            self._tried_step = max(self._tried_step, state.step)
            self._be_patient()
            if self._broken.has(state.generation, state.step):
                why = "a worker was lost before all layers were in memory"
                return self._give_up(state.name, why, now_s, soon=True)
        if self._wanted is not None and state.step >= self._wanted:
            self._wanted = None
        save.savers[worker_id] = message.layers
        save.saved_at = max(save.saved_at, state.saved_at)
        save.position = state.position
        save.pause_s = max(save.pause_s, message.pause_s)
        save.copy_s = max(save.copy_s, message.copy_s)
        return self._commit_when_written(save)

    def persisted(self, message: protocol.LayersPersisted) -> tuple[Send, ...]:
        """A share is on disk."""
        save = self._saves.get(message.name)
        if save is not None:
            save.shards.update(((shard.layer, shard.part), shard) for shard in message.shards)
            return self._commit_when_written(save)
        if message.name in self._given_up:
            return self._remove([message.name])  # written after it was given up
        return ()

    def committed(self, node: str, message: protocol.CheckpointCommitted, now_s: float) -> tuple[Record | Send, ...]:
        """A node has the manifest. The checkpoint is complete once all that wrote layers have: each may have a disk."""
        save = self._saves.get(message.name)
        if save is None or not save.is_committing:
            return ()  # what it told a master before this one
        save.committed.add(node)
        return self._complete_when_committed(save, now_s)

    def _complete_when_committed(self, save: Save, now_s: float) -> tuple[Record | Send, ...]:
        if not save.is_committed:
            return ()
        del self._saves[save.name]
        self._policy = replace(self._policy, cost_s=max(save.pause_s, save.copy_s), disk_s=now_s - save.began_s)
        self.know([self._known(save)])
        too_old = self._forget_old()
        self._saved_step, self._failure = max(self._saved_step, save.step), ""
        self._be_patient()
        entry = CheckpointSaved(
            t_s=now_s,
            name=save.name,
            step=save.step,
            saved_at=save.saved_at,
            size_bytes=sum(shard.size_bytes for shard in save.shards.values()),
            pause_s=save.pause_s,
            duration_s=now_s - save.began_s,
        )
        # Where another save was on its way too, more are too old by now than whoever has the manifest was told.
        told = save.asked if set(too_old) <= set(save.replaced) else set()
        others = [node for node in self._agents if too_old and node not in told]
        old = (Send(node=node, message=protocol.RemoveOld(names=too_old)) for node in others)
        return (Record(entry=entry), *old, *self._arm(now_s))

    def failed(self, node: str, message: protocol.StateNotSaved, now_s: float) -> tuple[Record | Send, ...]:
        """A part of a save has failed, so the rest cannot be used. Training continues, and says so."""
        if not message.name:  # a node has no place to save in, and there will be no save
            self._failure = f"{node}: {message.reason}"
            return (notice(now_s, "error", f"nothing can be saved: {self._failure}; training continues"),)
        if self._is_over(message.name):
            return ()
        self._tried_step = max(self._tried_step, message.step)
        self._saves.setdefault(message.name, Save(message.name, message.step, 0, now_s))
        return self._give_up(message.name, f"{node}: {message.reason}", now_s)

    # --- small things ----------------------------------------------------------------------------------------

    def _note_in_memory(self, worker_id: WorkerId, message: protocol.StateSaved) -> None:
        """Shares of a save that was given up are in memory all the same, and may come after it was."""
        step, part = message.state.step, worker_id.device % self._num_parts
        if step > self._in_memory[0]:
            self._in_memory = (step, set())
        if step == self._in_memory[0]:
            self._in_memory[1].update((layer, part) for layer in message.layers)
            if len(self._in_memory[1]) == len(self._layer_names) * self._num_parts:
                self._memory_step = step

    def _is_over(self, name: str) -> bool:
        return name in self._given_up or any(known.name == name for known in self.complete)

    def _remove(self, unfinished: Iterable[str]) -> tuple[Send, ...]:
        """Have agents remove what is on disk of saves that will never be complete."""
        message = protocol.RemoveUnfinished(names=tuple(sorted(unfinished)))
        return tuple(Send(node=node, message=message) for node in self._agents) if message.names else ()

    @property
    def _agents(self) -> tuple[str, ...]:
        """The nodes whose agents can be asked for something: they do so without workers, too."""
        return tuple(member.spec.name for member in self._members.living if not member.is_dismissed)

    def _orders(self, step: int) -> tuple[Send, ...]:
        """Have the plan's workers save after a step."""
        assert self._plan is not None
        return tuple(
            Send(node=worker_id.node, message=protocol.SaveState(device=worker_id.device, step=step))
            for worker_id in self._plan.worker_ids
            if self._members[worker_id.node].is_ready
        )

    def _arm(self, now_s: float, *, not_before_s: float = 0.0) -> tuple[Send, ...]:
        """Settle when the next save is to be made; while one is under way, that is later."""
        if not self.is_enabled or self._saves or self._plan is None or self._wanted is not None:
            return ()
        step = self._policy.next_step(self._last_step)
        if step is None or not_before_s > now_s:
            self.due_s = max(not_before_s, min(self.due_s, now_s + self._policy.interval_s(now_s)))
            return ()
        self._wanted = step
        return self._orders(step)

    def _give_up(self, name: str, why: str, now_s: float, *, soon: bool = False) -> tuple[Record | Send, ...]:
        """Forget a save. `soon`: nothing speaks against the next one, once there is a plan again."""
        save = self._saves.pop(name)
        self._given_up.add(name)
        self._failure = why
        newest_step = self.complete[-1].step if self.complete else None
        entry = SaveFailed(t_s=now_s, step=save.step, reason=why, newest_step=newest_step, is_our_doing=soon)
        told: tuple[Record | Send, ...] = (*self._remove([name]), Record(entry=entry))
        self._be_patient()
        if soon:
            self._wanted = self._last_step + 1
            return told
        return (*told, *self._arm(now_s, not_before_s=now_s + _RETRY_S))

    def _commit_when_written(self, save: Save) -> tuple[Send, ...]:
        """Give the manifest to those who wrote layers. It names every file, and elsewhere there is nothing to name.

        Where none of them is left, all get it: the directory may be one that all share.
        """
        is_written = save.is_written(len(self._layer_names), num_parts=self._num_parts)
        if save.is_committing or not is_written or not save.savers:
            return ()
        save.is_committing = True
        save.replaced = self._too_old(in_order((*self.complete, self._known(save)), run=self._run))
        agents, writers = set(self._agents), {worker_id.node for worker_id in save.savers}
        save.asked.update(agents & writers or agents)
        message = protocol.CommitCheckpoint(manifest=self._manifest(save), remove=save.replaced)
        return tuple(Send(node=node, message=message) for node in sorted(save.asked))

    def _patience_s(self, save: Save) -> float:
        return _PATIENCE_S if self._is_whole(save) else _COPY_PATIENCE_S

    def _known(self, save: Save) -> KnownCheckpoint:
        return KnownCheckpoint(
            name=save.name, step=save.step, saved_at=save.saved_at, is_final=self._is_final(save.step, save.position)
        )

    def _is_final(self, step: int, position: protocol.DataPosition | None) -> bool:
        return step >= self._job.max_steps or self._reads_to_the_end(position)

    def _forget_old(self) -> tuple[str, ...]:
        """Forget all that are older than those to keep; returns which of them no disk is to have any more."""
        too_old = self._too_old(self.complete)
        del self.complete[: -self._job.checkpoint.save_total_limit]
        return too_old

    def _too_old(self, complete: Sequence[KnownCheckpoint]) -> tuple[str, ...]:
        old = complete[: -self._job.checkpoint.save_total_limit]
        return tuple(known.name for known in old if not known.is_final)

    def _manifest(self, save: Save) -> protocol.Manifest:
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
