"""Virtual workers: they follow orders move by move as `training.engine` does, around the real `Standing`.

The training thread is a generator that yields wherever the real one may be preempted or has to wait, so that
whoever steps it chooses the interleaving. A layer's state is its history: which steps were applied to it, each
under which generation. Losses and tensors have no part in the protocol.

What must never happen, such as a sum that lacks a microbatch, raises `Violation` on the spot.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from oobleck.control.messages import (
    BankRecord,
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
    StorePut,
    Survey,
    Surveyed,
    WorkerBound,
    WorkerMessage,
)
from oobleck.control.sections import num_sections_of, shares_of
from oobleck.control.standing import Interrupted, PeerLost, Standing
from oobleck.errors import ShardUnreadable
from oobleck.job import JobSpec
from oobleck.planner import ExecutionPlan, LayerTransfer, Pipeline, Place
from oobleck.schedule import section_stops

from .bank import Bank, Moves
from .fabric import Contribution, Fabric, GroupKey, Violation, Wait
from .shards import VirtualShards
from .tempo import ProgramTimes, Tempo

__all__ = ["INITIAL", "Lane", "Moves", "Version", "VirtualWorker", "Work"]

_BUSY_TIMES = 16
"""As many stretches of computation are remembered as a real worker remembers."""
_STOP = -1
"""What a commit's contribution contains, beside microbatches, of a worker that is to stop."""


@dataclass(frozen=True, slots=True)
class Version:
    """The state of a layer, as far as the protocol can tell: what was applied to its initial values."""

    step: int
    generation: int
    """Of the commit of that step."""
    digest: int
    """Equal for equal histories."""
    banked: tuple[int, ...] = ()
    """The microbatches whose gradients are banked beside it, sorted."""

    def with_bank(self, microbatches: Sequence[int], record: BankRecord) -> Version:
        """The version after one more section of the step in flight."""
        digest = hash((self.digest, record.step, record.generation, record.number))
        return Version(self.step, self.generation, digest, tuple(sorted((*self.banked, *microbatches))))

    def then(self, record: CommitRecord) -> Version:
        """The version after one more step."""
        return Version(record.step, record.generation, hash((self.digest, record.step, record.generation)))


INITIAL = Version(0, 0, 0)


@dataclass(slots=True)
class Work:
    """What a worker has done of a step, and has not put into a section."""

    step: int
    microbatches: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Lane:
    """A worker's place in its pipeline."""

    key: GroupKey
    stage: int
    pipeline: Pipeline

    @property
    def places(self) -> tuple[Place, ...]:
        return self.pipeline.places


@dataclass(slots=True)
class _Running:
    """A program under way."""

    began_s: float
    times: ProgramTimes
    noted: int = 0
    """Microbatches whose backward pass is noted."""


class VirtualWorker:
    """One worker process. `step` makes the training thread's next move, `take` a message of the control thread."""

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
        self.layers: dict[int, Version] = {}
        self.kept: dict[int, Version] = {}
        """Layers of the plan before, until all have adopted the new one."""
        self.standing = Standing(place, announce, lock=nullcontext())
        self.is_stuck = False
        """The process is stopped: neither of its threads does anything, and nobody notices by its connection."""
        self.taken: dict[int, tuple[RecordRun, ...]] = {}
        """The records of the steps that it has agreed to commit."""
        self._job = job
        self._shards = shards or VirtualShards.of(job)
        self._edition = 0
        self._told: dict[tuple[int, int], StepRecords] = {}
        self._over: dict[int, RecordsOver] = {}
        self._fabric = fabric
        self._say = say
        self._tempo = tempo
        self._clock = clock
        self._announce = announce
        self._board: set[str] = set()
        self._groups: set[GroupKey] = set()
        self._spoiled: set[GroupKey] = set()
        """Groups whose traffic was given up half-way: their messages cannot be told apart any more."""
        self._posted: Counter[GroupKey] = Counter()
        self._plan: ExecutionPlan | None = None
        self._lane: Lane | None = None
        self._buckets: tuple[tuple[GroupKey, tuple[int, ...]], ...] = ()
        self._commit_key: GroupKey | None = None
        self._order: Order | None = None
        """The one whose plan is in force."""
        self._bank = Bank(
            self.standing,
            fabric,
            post=self._post,
            is_last=lambda: self._lane is not None and self._lane.stage == len(self._lane.places) - 1,
        )
        self._work: Work | None = None
        self._base_done = False
        self._segments_done: set[int] = set()
        self._reduced: dict[int, tuple[int, ...]] = {}
        self._whole = tuple(range(job.num_microbatches))
        self._running: _Running | None = None
        self._step_ended_s = clock()
        self._busy_s: deque[tuple[float, float]] = deque(maxlen=_BUSY_TIMES)
        self._busy_in_step: list[tuple[float, float]] = []
        self._resumed_generation: int | None = None
        self._transfer_s = 0.0
        self._received_bytes = 0
        self._thread = self._run()
        self.wait = next(self._thread)

    # --- what the environment does ---------------------------------------------------------------------------

    def take(self, message: WorkerBound) -> None:
        """Handle one message, as the control thread does."""
        if self.is_stuck:
            return
        match message:
            case StorePut(key=key):
                self._board.add(key)
                self._announce()
            case Fence():
                self._note_microbatches()
                self._say(self.standing.answer(message))
            case Order():
                self.standing.give_order(message)
            case FinishStep():
                self.standing.want_stop()
            case Survey(request=request, wants=wants):
                found = tuple(self._shards.survey(want, items=self._job.data.sequence_length - 1) for want in wants)
                self._say(Surveyed(device=self.place.device, request=request, found=found))
            case StepRecords(edition=edition, step=step):
                if self._told.setdefault((edition, step), message) != message:
                    raise Violation(f"step {step} of edition {edition} is told to take other records")
                self._announce()
            case RecordsOver(edition=edition):
                self._over[edition] = message
                self._announce()
            case _:
                raise Violation(f"{self.place} was told {message}")

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
                yield from _pause("report")
                self._say(PeerFailed(device=self.place.device, generation=order.generation, detail=str(error)))
            except ShardUnreadable as error:
                yield from _pause("report")
                failed = RecordsFailed(
                    device=self.place.device,
                    generation=order.generation,
                    shard=error.shard,
                    position=error.position,
                    problem=error.problem,
                )
                self._say(failed)

    def _follow(self, order: Order) -> Moves:
        yield from _pause("took an order")
        if order.catch_up is not None and self.standing.catch_up(order.catch_up):
            yield from self._apply(order.catch_up)
        if order.catch_up_bank is not None:
            self._bank.catch_up(order.catch_up_bank, self._fold)
        given_back = self._bank.give_back()
        if self._work is not None:
            self._work.microbatches += given_back
        if order.finish is None:
            self._forget_step()
        elif self.standing.applied == order.finish - 1:
            yield from self._finish(order, order.finish)
        yield from self._adopt(order)

    def _train(self) -> Generator[Wait, None, bool]:
        if self._lane is None:
            return False
        assert self._plan is not None
        assert self._commit_key is not None
        stop = False
        while not stop and (yield from self._has_next()):
            yield from self._compute(self._plan, self._lane, self.standing.applied + 1, banks=True)
            stop = yield from self._end_step(self._buckets, self._commit_key)
        return True

    # --- a step ----------------------------------------------------------------------------------------------

    def _has_next(self) -> Generator[Wait, None, bool]:
        step = self.standing.applied
        if not self._shards.names or step >= self._job.max_steps:
            return step < self._job.max_steps
        if (self._edition, step + 1) not in self._told:
            self._say_resumed()
            yield Wait(
                f"the records of step {step + 1}",
                lambda: (self._edition, step + 1) in self._told or self._is_over(step),
                self.standing.is_fenced,
            )
        return (self._edition, step + 1) in self._told

    def _is_over(self, step: int) -> bool:
        return self._edition in self._over and self._over[self._edition].step == step

    def _records_of(self, step: int) -> tuple[RecordRun, ...]:
        return self._told[self._edition, step].runs if self._shards.names else ()

    def _compute(
        self, plan: ExecutionPlan, lane: Lane, step: int, *, banks: bool = False
    ) -> Generator[Wait, None, Work]:
        work = self._work
        if work is None or work.step != step:
            work = yield from self._begin_step(step)
        if not self._base_done:
            located = plan.locate(self.place)
            assert located is not None
            self._read(work)
            assert self._order is not None
            before = self._order.banked.microbatches if step == self._order.boundary + 1 else ()
            number = num_sections_of(plan, before, self._order.num_sections) if banks else 1
            yield from self._execute(work, lane, shares_of(plan, before)[located[0]], number)
            self._base_done = True
        return work

    def _begin_step(self, step: int) -> Generator[Wait, None, Work]:
        self._forget_step()
        if self._shards.names:
            yield Wait(
                f"the records of step {step}, to finish it",
                lambda: (self._edition, step) in self._told,
                self.standing.is_pipeline_stopped,
            )
        self._work = Work(step)
        return self._work

    def _read(self, work: Work) -> None:
        problem = self._shards.problem_in(self._records_of(work.step))
        if problem is not None:
            self.standing.note_broken()
            raise ShardUnreadable("spoiled", shard=problem[0], position=problem[1])

    def _execute(self, work: Work, lane: Lane, microbatches: Sequence[int], num_sections: int = 1) -> Moves:
        """Run this stage's program for some microbatches; it ends when the schedule's timeline says.

        At the end of each section but the last, what is done is to be banked.
        """
        if self.standing.is_broken:
            raise PeerLost("a program of this step failed half-way before")
        if lane.key in self._spoiled:
            raise Violation(f"{self.place} computes over {lane.key.name}, which was given up half-way before")
        self._say_resumed()
        times = self._tempo.program(lane.pipeline, lane.stage, len(microbatches))
        self._running = running = _Running(self._clock(), times)
        try:
            done, began_s = 0, 0.0
            for stop in section_stops(len(microbatches), num_sections):
                is_last = stop == len(microbatches)
                ends_s = times.end_s if is_last else times.backward_ends_s[stop - 1]
                yield from self._run_section(work, lane, ends_s - began_s)
                work.microbatches += microbatches[done:stop]
                done, began_s = stop, ends_s
                if not is_last:
                    yield from self._begin_bank(work)
        except (Interrupted, PeerLost) as error:
            self._spoiled.add(lane.key)
            self._end_program()
            if isinstance(error, PeerLost):
                self.standing.note_broken()
            raise
        self._end_program()
        self._busy_in_step.append((running.began_s, self._clock()))

    def _run_section(self, work: Work, lane: Lane, takes_s: float) -> Moves:
        """Compute for a while; with a section on its way, look after it now and then."""
        stopped = self.standing.is_pipeline_stopped
        parts = 3 if self._bank.is_busy else 1
        for part in range(parts):
            yield Wait(
                f"a program of step {work.step}",
                lambda: not stopped(),
                stopped,
                lambda: self._fabric.lacks_a_member(lane.key),
                touches_network=len(lane.places) > 1,
                takes_s=takes_s / parts,
            )
            if part < parts - 1:
                yield from self._look_after_bank()

    def _look_after_bank(self) -> Moves:
        if self._bank.is_busy:
            assert self._commit_key is not None
            yield from self._bank.look(self._commit_key, self._fold)

    def _begin_bank(self, work: Work) -> Moves:
        """Have what is done banked beside what follows; nothing is banked any more once that has failed."""
        assert self._commit_key is not None
        try:
            yield from self._bank.settle(self._commit_key, self._fold)
        except PeerLost:
            return
        except Interrupted:
            if self.standing.is_pipeline_stopped():
                raise
            return
        yield from _pause("about to post a section")
        if not self.standing.is_fenced():
            mine, work.microbatches = tuple(work.microbatches), []
            self._bank.begin(work.step, mine, self._buckets, self._digests)

    def _fold(self, summed: Mapping[int, tuple[int, ...]], record: BankRecord) -> None:
        """Put a section's sums to those of the layers."""
        newer: dict[tuple[int, tuple[int, ...]], Version] = {}
        for layer, version in self.layers.items():
            key = version.digest, summed[layer]
            if key not in newer:
                newer[key] = version.with_bank(summed[layer], record)
            self.layers[layer] = newer[key]
        self.kept = {}

    def _end_program(self) -> None:
        self._note_microbatches()
        self._running = None

    def _note_microbatches(self) -> None:
        """Count what the program under way has done by now."""
        running = self._running
        if running is None:
            return
        done = bisect_right(running.times.backward_ends_s, self._clock() - running.began_s)
        self.standing.note_microbatch(done - running.noted)
        running.noted = done

    def _say_resumed(self) -> None:
        generation, self._resumed_generation = self._resumed_generation, None
        if generation is not None:
            self._say(
                Resumed(
                    device=self.place.device,
                    generation=generation,
                    transfer_s=self._transfer_s,
                    received_bytes=self._received_bytes,
                    resumed_s=self._clock(),
                    busy_s=tuple(self._busy_s),
                )
            )

    def _end_step(
        self, buckets: Sequence[tuple[GroupKey, tuple[int, ...]]], key: GroupKey
    ) -> Generator[Wait, None, bool]:
        work = self._work
        assert work is not None
        yield from self._bank.settle(key, self._fold)
        if self.standing.is_fenced():
            raise Interrupted  # it may have left out a section, for which others wait in the same groups
        mine = tuple(work.microbatches)
        runs = self._records_of(work.step)
        posted = [
            (bucket, layers, self._post(bucket, Contribution(work.step, mine, (*self._digests(layers), hash(runs)))))
            for bucket, layers in buckets
        ]
        yield from _pause("posted the reductions")
        self._reduced = {}
        assert self._plan is not None
        takes_s = self._tempo.reduce_s(self._plan)
        for bucket, layers, sequence in posted:
            summed = yield from self._sum(bucket, sequence, work.step, takes_s=takes_s)
            self._reduced.update(dict.fromkeys(layers, summed))
            takes_s = 0.0  # those of the first one cover all
        yield from _pause("reduced")
        self.standing.note_reduced(work.step)
        yield from _pause("about to commit")
        is_last = bool(runs) and self._told[self._edition, work.step].is_last
        wish = (_STOP,) if self.standing.is_stop_wanted or is_last else ()
        knows_losses = self._lane is not None and self._lane.stage == len(self._lane.places) - 1
        sequence = self._post(key, Contribution(work.step, (*wish, *(mine if knows_losses else ()))))
        said = yield from self._sum(key, sequence, work.step)
        yield from _pause("agreed to commit")
        loss = self._bank.loss + sum(each != _STOP for each in said)
        if loss != self._job.num_microbatches:
            raise Violation(f"step {work.step}: {self.place} knows the losses of {loss} microbatches")
        record = CommitRecord(
            step=work.step,
            generation=key.generation,
            loss=1.0,
            grad_norm=1.0,
            learning_rate=1.0,
            num_samples=self._job.global_batch_size,
            samples_repeated=0,
            samples_missing=0,
            duration_s=self._clock() - self._step_ended_s,
        )
        self.standing.begin_apply(record)
        if runs:
            self.taken[record.step] = runs
        yield from self._apply(record)
        return _STOP in said

    def _digests(self, layers: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.layers[layer].digest for layer in layers)

    def _post(self, key: GroupKey, value: Contribution) -> int:
        if len(key.members) > 1 and key not in self._groups:
            raise Violation(f"{self.place} has not formed {key.name}")
        sequence = self._posted[key]
        self._posted[key] += 1
        self._fabric.post(key, sequence, self.place, value)
        return sequence

    def _sum(
        self, key: GroupKey, sequence: int, step: int, *, takes_s: float = 0.0
    ) -> Generator[Wait, None, tuple[int, ...]]:
        yield Wait(
            f"all-reduce {sequence} of {key.name} in step {step}",
            lambda: self._fabric.is_complete(key, sequence),
            self.standing.is_fenced,
            lambda: self._fabric.lacks_a_member(key),
            touches_network=len(key.members) > 1,
            takes_s=takes_s,
        )
        return self._fabric.total(key, sequence, step)

    def _apply(self, record: CommitRecord) -> Moves:
        yield from _pause("applying")
        newer: dict[int, Version] = {}
        for layer, version in self.layers.items():
            summed = self._reduced[layer]
            if summed != self._whole and tuple(sorted((*version.banked, *summed))) != self._whole:
                what = f"{summed} beside {version.banked}" if version.banked else f"{summed}"
                raise Violation(f"step {record.step}: layer {layer} on {self.place} sums microbatches {what}")
            if version.digest not in newer:
                newer[version.digest] = version.then(record)
            self.layers[layer] = newer[version.digest]
        self._step_ended_s = self._clock()
        self._busy_s.extend(self._busy_in_step)
        self.kept = {}
        self._bank.end_step()
        self._forget_step()
        if self._lane is not None and self._lane.stage in (0, len(self._lane.places) - 1):
            self._say(StepCommitted(device=self.place.device, record=record))

    def _forget_step(self) -> None:
        self._work = None
        self._base_done = False
        self._segments_done.clear()
        self._busy_in_step = []
        self._reduced = {}
        self.standing.begin_step()

    # --- from one plan to the next ---------------------------------------------------------------------------

    def _finish(self, order: Order, step: int) -> Moves:
        plan, lane = self._plan, self._lane
        if plan is None or lane is None:
            return
        located = plan.locate(self.place)
        assert located is not None
        pipeline = plan.pipelines[located[0]]
        buckets, key = self._reduction_keys(plan, order.generation, order.lost)
        if any(node in order.lost for node in pipeline.nodes):
            yield from self._begin_step(step)
        else:
            work = yield from self._compute(plan, lane, step)
            for segment in order.segments:
                if segment.pipeline == located[0] and segment.segment not in self._segments_done:
                    yield from self._execute(work, lane, segment.microbatches)
                    self._segments_done.add(segment.segment)
        yield from self._form([key, *(bucket for bucket, _ in buckets)])
        yield from self._end_step(buckets, key)

    def _adopt(self, order: Order) -> Moves:
        plan = order.plan
        located = plan.locate(self.place)
        members = {place for item in order.transfers for place in (item.source, item.target)}
        moving = GroupKey("transfer", order.generation, tuple(sorted(members)))
        keys = [moving] if self.place in members else []
        lane: Lane | None = None
        buckets: tuple[tuple[GroupKey, tuple[int, ...]], ...] = ()
        commit_key: GroupKey | None = None
        if located is not None:
            pipeline = plan.pipelines[located[0]]
            lane_key = GroupKey("pipeline", order.pipeline_generations[located[0]], pipeline.places)
            lane = Lane(lane_key, located[1], pipeline)
            buckets, commit_key = self._reduction_keys(plan, order.generation, ())
            keys += [lane_key, commit_key, *(bucket for bucket, _ in buckets)]
        yield from self._form(keys)
        received = yield from self._exchange(order, moving)
        yield from _pause("about to adopt")
        wanted = () if located is None else tuple(plan.pipelines[located[0]].stages[located[1]].layers)
        received = {layer: state for layer, state in self.kept.items() if layer in wanted} | received
        kept = self._states_to_keep(order, wanted)
        self.standing.adopt(order, wanted, tuple(kept))
        yield from _pause("adopting")
        self._edition = order.edition
        self._plan, self._buckets, self._commit_key, self._lane = plan, buckets, commit_key, lane
        self._take_layers(wanted, received, initial=order.initial)
        self.kept = kept
        self._order = order
        self._bank.adopt(order.generation, order.banked)
        for layer, version in self.layers.items():
            if version.banked != order.banked.microbatches:
                raise Violation(f"{self.place} adopts layer {layer} with {version.banked} banked, not {order.banked}")
        self._groups &= set(keys)
        self._resumed_generation = order.generation

    def _exchange(self, order: Order, key: GroupKey) -> Generator[Wait, None, dict[int, Version]]:
        for tag, item in enumerate(order.transfers):
            if item.source == self.place:
                self._fabric.send(key, self.place, item.target, tag, self._state(item.layer))
        yield from _pause("sent layers")
        began_s, self._received_bytes = self._clock(), 0
        received: dict[int, Version] = {}
        for tag, item in enumerate(order.transfers):
            if item.target == self.place:
                state = yield from self._receive_layer(key, tag, item)
                if received.setdefault(item.layer, state) != state:
                    raise Violation(f"{self.place} receives layer {item.layer} in parts of different versions")
        self._transfer_s = self._clock() - began_s
        return received

    def _receive_layer(self, key: GroupKey, tag: int, item: LayerTransfer) -> Generator[Wait, None, Version]:
        yield Wait(
            f"layer {item.layer} from {item.source}",
            lambda: self._fabric.has_mail(key, item.source, self.place, tag),
            self.standing.is_fenced,
            lambda: self._fabric.lacks_a_member(key),
            touches_network=True,
            takes_s=self._tempo.transfer_s(item),
        )
        self._received_bytes += self._tempo.part_bytes(item)
        state = self._fabric.receive(key, item.source, self.place, tag)
        assert isinstance(state, Version)
        return state

    def _states_to_keep(self, order: Order, wanted: Collection[int]) -> dict[int, Version]:
        if self.standing.applied != order.boundary or not self._bank.is_at(order.banked):
            return {}
        moving = {item.layer for item in order.transfers}.difference(wanted)
        return {layer: self._state(layer) for layer in sorted(moving & (self.kept.keys() | self.layers.keys()))}

    def _state(self, layer: int) -> Version:
        if layer not in self.layers and layer not in self.kept:
            raise Violation(f"{self.place} is to send layer {layer}, which it does not hold")
        return self.kept[layer] if layer in self.kept else self.layers[layer]

    def _take_layers(self, wanted: Collection[int], received: dict[int, Version], *, initial: bool) -> None:
        if initial:
            self.layers = dict.fromkeys(wanted, INITIAL)
            return
        missing = [layer for layer in wanted if layer not in self.layers and layer not in received]
        if missing:
            raise Violation(f"{self.place} adopts layers {missing}, which nobody sent")
        self.layers = {layer: received.get(layer, self.layers.get(layer, INITIAL)) for layer in wanted}

    def _form(self, keys: Sequence[GroupKey]) -> Moves:
        missing = sorted({key for key in keys if len(key.members) > 1} - self._groups)
        if not missing:
            return
        awaited: list[str] = []
        for key in missing:
            name = f"{key.name}/{self.place}"
            if name in self._board:
                raise Violation(f"{self.place} forms {key.name} twice")
            self._board.add(name)
            nodes = tuple(sorted({place.node for place in key.members}))
            self._say(StorePut(key=name, value=b"", nodes=nodes))
            awaited += [f"{key.name}/{member}" for member in key.members]
        yield Wait(
            f"the groups {', '.join(key.name for key in missing)}",
            lambda: self._board.issuperset(awaited) and all(self._fabric.is_whole(key.members) for key in missing),
            self.standing.is_fenced,
            lambda: any(map(self._fabric.lacks_a_member, missing)),
            touches_network=True,
            takes_s=self._tempo.form_group_s,
        )
        self._groups.update(missing)

    def _reduction_keys(
        self, plan: ExecutionPlan, generation: int, lost: Collection[str]
    ) -> tuple[tuple[tuple[GroupKey, tuple[int, ...]], ...], GroupKey]:
        located = plan.locate(self.place)
        assert located is not None
        by_owners: dict[tuple[Place, ...], list[int]] = {}
        for layer in plan.pipelines[located[0]].stages[located[1]].layers:
            living = tuple(place for place in plan.owners_of(layer) if place.node not in lost)
            by_owners.setdefault(living, []).append(layer)
        buckets = tuple(
            (GroupKey("reduce", generation, members), tuple(layers)) for members, layers in sorted(by_owners.items())
        )
        everyone = tuple(place for place in plan.places if place.node not in lost)
        return buckets, GroupKey("reduce", generation, everyone)


def _pause(what: str) -> Iterator[Wait]:
    """A point where the training thread may be preempted, with nothing to wait for."""
    yield Wait(what, lambda: True)
