"""Virtual workers: they follow orders move by move as `training.engine` does, around the real `Standing`.

The training thread is a generator that yields wherever the real one may be preempted or has to wait, so that
whoever steps it chooses the interleaving. What must never happen, such as a sum that lacks a microbatch, raises
`Violation` on the spot.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import nullcontext

from oobleck.control.messages import (
    CommitRecord,
    Fence,
    Finished,
    FinishStep,
    Order,
    PeerFailed,
    RecordRun,
    RecordsFailed,
    RecordsOver,
    Resumed,
    StepCommitted,
    StepRecords,
    StoreKeys,
    Survey,
    Surveyed,
    WorkerBound,
    WorkerMessage,
)
from oobleck.control.sections import num_sections_of, shares_of
from oobleck.control.standing import Interrupted, PeerLost, Standing
from oobleck.errors import ShardUnreadable
from oobleck.job import JobSpec
from oobleck.planner import Place

from .bank import Bank
from .fabric import Contribution, Fabric, Violation, Wait
from .groups import GroupTable
from .lane import Lane, Reduction
from .layers import HeldLayers, Version
from .moves import Moves, pause
from .program import Programs, Work
from .records import Records
from .shards import VirtualShards
from .tempo import Tempo
from .transfer import Transfers, transfer_key

__all__ = ["VirtualWorker"]

_STOP = -1
"""What a commit's contribution contains, beside microbatches, of a worker that is to stop."""


class VirtualWorker:
    """One worker process. `step` makes the training thread's next move, `take` a message of the control thread."""

    programs: type[Programs] = Programs
    """What runs its programs."""

    def __init__(
        self,
        place: Place,
        job: JobSpec,
        fabric: Fabric,
        say: Callable[[WorkerMessage], None],
        *,
        tempo: Tempo,
        clock: Callable[[], float],
        announce: Callable[[], None] = lambda: None,
        shards: VirtualShards | None = None,
    ) -> None:
        """`clock` gives seconds; `announce` is called when a message changes what a wait may look for.

        `shards` are those of the job where others than endless ones are wanted.
        """
        self.place = place
        self.standing = Standing(place, announce, lock=nullcontext())
        self.is_stuck = False
        """The process is stopped: neither of its threads does anything, and nobody notices by its connection."""
        self.taken: dict[int, tuple[RecordRun, ...]] = {}
        """The records of the steps that it has agreed to commit."""
        self._job = job
        self._say = say
        self._tempo = tempo
        self._clock = clock
        self._announce = announce
        self._records = Records(shards or VirtualShards.of(job), items=job.data.sequence_length - 1)
        self._layers = HeldLayers(place, num_microbatches=job.num_microbatches)
        self._groups = GroupTable(place, fabric, self.standing, put=say, form_group_s=tempo.form_group_s)
        self._transfers = Transfers(place, fabric, self.standing, tempo=tempo, clock=clock)
        self._bank = Bank(self.standing, fabric, self._groups, self._layers, on_failed=self._say_failed)
        self._programs = self.programs(
            place, fabric, self.standing, self._bank, tempo=tempo, clock=clock, on_begin=self._say_resumed
        )
        self._order: Order | None = None
        """The one whose plan is in force."""
        self._lane: Lane | None = None
        self._reduction: Reduction | None = None
        self._work: Work | None = None
        self._base_done = False
        self._segments_done: set[int] = set()
        self._reduced: dict[int, tuple[int, ...]] = {}
        self._reduce_s = 0.0
        """How long that takes under the plan in force."""
        self._step_ended_s = clock()
        self._resumed_generation: int | None = None
        self._thread = self._run()
        self.wait = next(self._thread)

    # --- what the environment does ---------------------------------------------------------------------------

    def take(self, message: WorkerBound) -> None:
        """Handle one message, as the control thread does."""
        if self.is_stuck:
            return
        match message:
            case StoreKeys(keys=keys):
                for key, _ in keys:
                    self._groups.read(key)
                self._announce()
            case Fence():
                self._programs.note_microbatches()
                self._say(self.standing.answer(message))
            case Order():
                self.standing.give_order(message)
            case FinishStep():
                self.standing.want_stop()
            case Survey(request=request, wants=wants):
                found = self._records.survey(wants)
                self._say(Surveyed(device=self.place.device, request=request, found=found))
            case StepRecords():
                self._records.tell(message)
                self._announce()
            case RecordsOver():
                self._records.end(message)
                self._announce()
            case _:
                raise Violation(f"{self.place} was told {message}")

    @property
    def layers(self) -> dict[int, Version]:
        """What it holds under the plan in force."""
        return self._layers.held

    @property
    def kept(self) -> dict[int, Version]:
        """Layers of the plan before, until all have adopted the new one."""
        return self._layers.kept

    @property
    def holds_reduced(self) -> bool:
        """It can still apply the step that its peers may have applied."""
        return bool(self._reduced)

    @property
    def is_settled(self) -> bool:
        """Its layers are what it answers that they are, not about to become so."""
        return self.wait.what not in ("adopting", "applying")

    @property
    def can_step(self) -> bool:
        return not self.is_stuck and (self.wait.ready() or self.wait.interrupted())

    def step(self) -> None:
        """Go on to the next point where the training thread may be preempted or has to wait."""
        self.wait = next(self._thread) if self.wait.ready() else self._thread.throw(Interrupted())

    def fail(self) -> None:
        """End the wait with an error of the network."""
        self.wait = self._thread.throw(PeerLost(self.wait.what))

    # --- the training thread ---------------------------------------------------------------------------------

    def _run(self) -> Moves:
        while True:
            yield Wait("an order", lambda: self.standing.has_order)
            order = self.standing.take_order()
            assert order is not None
            try:
                yield from self._follow(order)
                if (yield from self._train()):
                    self._say(Finished(device=self.place.device, applied=self.standing.applied))
            except Interrupted:
                continue
            except PeerLost as error:
                yield from pause("report")
                self._say_failed(order.generation, error)
            except ShardUnreadable as error:
                yield from pause("report")
                failed = RecordsFailed(
                    device=self.place.device,
                    generation=order.generation,
                    shard=error.shard,
                    position=error.position,
                    problem=error.problem,
                )
                self._say(failed)

    def _follow(self, order: Order) -> Moves:
        yield from pause("took an order")
        if order.catch_up is not None and self.standing.catch_up(order.catch_up):
            yield from self._apply(order.catch_up)
        if order.catch_up_bank is not None:
            self._bank.catch_up(order.catch_up_bank)
        given_back = self._bank.give_back()
        if self._work is not None:
            self._work.microbatches += given_back
        if order.finish is None:
            self._forget_step()
        elif self.standing.applied == order.finish - 1:
            yield from self._finish(order, order.finish)
        yield from self._adopt(order)

    def _train(self) -> Generator[Wait, None, bool]:
        order, lane, reduction = self._order, self._lane, self._reduction
        if lane is None:
            return False
        assert order is not None
        assert reduction is not None
        stop = False
        while not stop and (yield from self._has_next()):
            yield from self._compute(order, lane, self.standing.applied + 1, banks=True)
            stop = yield from self._end_step(lane, reduction)
        return True

    # --- a step ----------------------------------------------------------------------------------------------

    def _has_next(self) -> Generator[Wait, None, bool]:
        step, records = self.standing.applied, self._records
        if not records.are_needed or step >= self._job.max_steps:
            return step < self._job.max_steps
        if not records.is_told(step + 1):
            self._say_resumed()
            yield Wait(
                f"the records of step {step + 1}",
                lambda: records.is_told(step + 1) or records.is_over(step),
                self.standing.is_fenced,
            )
        return records.is_told(step + 1)

    def _compute(self, order: Order, lane: Lane, step: int, *, banks: bool = False) -> Generator[Wait, None, Work]:
        work = self._work
        if work is None or work.step != step:
            work = yield from self._begin_step(step)
        if not self._base_done:
            self._read(work)
            before = order.banked.microbatches if step == order.boundary + 1 else ()
            number = num_sections_of(order.plan, before, order.num_sections) if banks else 1
            yield from self._programs.execute(work, lane, shares_of(order.plan, before)[lane.index], number)
            self._base_done = True
        return work

    def _begin_step(self, step: int) -> Generator[Wait, None, Work]:
        self._forget_step()
        if self._records.are_needed:
            yield Wait(
                f"the records of step {step}, to finish it",
                lambda: self._records.is_told(step),
                self.standing.is_pipeline_stopped,
            )
        self._work = Work(step)
        return self._work

    def _read(self, work: Work) -> None:
        try:
            self._records.read(work.step)
        except ShardUnreadable:
            self.standing.note_broken()
            raise

    def _say_failed(self, generation: int, error: PeerLost) -> None:
        self._say(PeerFailed(device=self.place.device, generation=generation, detail=str(error)))

    def _say_resumed(self) -> None:
        generation, self._resumed_generation = self._resumed_generation, None
        if generation is not None:
            self._say(
                Resumed(
                    device=self.place.device,
                    generation=generation,
                    transfer_s=self._transfers.took_s,
                    received_bytes=self._transfers.received_bytes,
                    resumed_s=self._clock(),
                    busy_s=self._programs.busy_s,
                )
            )

    def _end_step(self, lane: Lane, reduction: Reduction) -> Generator[Wait, None, bool]:
        """Reduce, commit and apply the step; returns whether all agreed to stop after it."""
        work = self._work
        assert work is not None
        yield from self._bank.settle()
        if self.standing.is_fenced():
            raise Interrupted  # it may have left out a section, for which others wait in the same groups
        mine = tuple(work.microbatches)
        yield from self._reduce(reduction, work.step, mine)
        yield from pause("about to commit")
        wish = (_STOP,) if self.standing.is_stop_wanted or self._records.is_last(work.step) else ()
        key = reduction.commit_key
        sequence = self._groups.post(key, Contribution(work.step, (*wish, *(mine if lane.is_last else ()))))
        said = yield from self._groups.sum(key, sequence, work.step)
        yield from pause("agreed to commit")
        num_stops = said.count(_STOP)
        loss = self._bank.loss + len(said) - num_stops
        if loss != self._job.num_microbatches:
            raise Violation(f"step {work.step}: {self.place} knows the losses of {loss} microbatches")
        record = self._record(work.step, key.generation)
        self.standing.begin_apply(record)
        if runs := self._records.runs_of(record.step):
            self.taken[record.step] = runs
        yield from self._apply(record)
        return num_stops > 0

    def _reduce(self, reduction: Reduction, step: int, mine: tuple[int, ...]) -> Moves:
        runs = hash(self._records.runs_of(step))
        posted = [
            (key, layers, self._groups.post(key, Contribution(step, mine, (*self._layers.digests(layers), runs))))
            for key, layers in reduction.buckets
        ]
        yield from pause("posted the reductions")
        self._reduced = {}
        takes_s = self._reduce_s
        for key, layers, sequence in posted:
            summed = yield from self._groups.sum(key, sequence, step, takes_s=takes_s)
            self._reduced.update(dict.fromkeys(layers, summed))
            takes_s = 0.0  # those of the first one cover all
        yield from pause("reduced")
        self.standing.note_reduced(step)

    def _record(self, step: int, generation: int) -> CommitRecord:
        return CommitRecord(
            step=step,
            generation=generation,
            loss=1.0,
            grad_norm=1.0,
            learning_rate=1.0,
            num_samples=self._job.global_batch_size,
            samples_repeated=0,
            samples_missing=0,
            duration_s=self._clock() - self._step_ended_s,
        )

    def _apply(self, record: CommitRecord) -> Moves:
        yield from pause("applying")
        self._layers.apply(self._reduced, record)
        self._step_ended_s = self._clock()
        self._programs.end_step()
        self._bank.end_step()
        self._forget_step()
        if (pace := self._programs.take_pace()) is not None:
            self._say(pace)
        if self._lane is not None and (self._lane.stage == 0 or self._lane.is_last):
            self._say(StepCommitted(device=self.place.device, record=record))

    def _forget_step(self) -> None:
        self._work = None
        self._base_done = False
        self._segments_done.clear()
        self._programs.forget_step()
        self._reduced = {}
        self.standing.begin_step()

    # --- from one plan to the next ---------------------------------------------------------------------------

    def _finish(self, order: Order, step: int) -> Moves:
        before, lane = self._order, self._lane
        if before is None or lane is None:
            return
        reduction = Reduction.of(before.plan, lane, order.generation, order.lost)
        if any(node in order.lost for node in lane.pipeline.nodes):
            yield from self._begin_step(step)
        else:
            work = yield from self._compute(before, lane, step)
            for segment in order.segments:
                if segment.pipeline == lane.index and segment.segment not in self._segments_done:
                    yield from self._programs.execute(work, lane, segment.microbatches)
                    self._segments_done.add(segment.segment)
        yield from self._groups.form(reduction.keys)
        yield from self._end_step(lane, reduction)

    def _adopt(self, order: Order) -> Moves:
        moving = transfer_key(order)
        keys = [moving] if self.place in moving.members else []
        lane, reduction = Lane.find(order, self.place), None
        if lane is not None:
            reduction = Reduction.of(order.plan, lane, order.generation)
            keys += [lane.key, *reduction.keys]
        yield from self._groups.form(keys)
        received = yield from self._transfers.exchange(order, moving, self._layers)
        yield from pause("about to adopt")
        wanted = () if lane is None else lane.layers
        keeping = self._states_to_keep(order, wanted)
        self.standing.adopt(order, wanted, tuple(keeping))
        yield from pause("adopting")
        self._layers.adopt(wanted, received, keeping, initial=order.initial)
        self._records.edition = order.edition
        if self._lane is None:
            self._step_ended_s = self._clock()  # it has rested until now
        self._order, self._lane, self._reduction = order, lane, reduction
        self._reduce_s = self._tempo.reduce_s(order.plan)
        self._bank.adopt(order.generation, order.banked, reduction, is_last=lane is not None and lane.is_last)
        for layer, version in self.layers.items():
            if version.banked != order.banked.microbatches:
                raise Violation(f"{self.place} adopts layer {layer} with {version.banked} banked, not {order.banked}")
        self._groups.keep(keys)
        self._resumed_generation = order.generation

    def _states_to_keep(self, order: Order, wanted: tuple[int, ...]) -> dict[int, Version]:
        if self.standing.applied != order.boundary or not self._bank.is_at(order.banked):
            return {}
        return self._layers.states({item.layer for item in order.transfers}.difference(wanted))
