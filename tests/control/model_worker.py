"""The model's workers: they follow orders move by move as `training.engine` does, around the real `Standing`.

The training thread is a generator that yields wherever the real one may be preempted or has to wait, so that
whoever steps it chooses the interleaving. A layer's state is its history: the steps applied to it, the generation
of each one's commit, and the microbatches that were summed. Losses and tensors have no part in the protocol.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from oobleck.control.messages import (
    AgentMessage,
    CommitRecord,
    Fence,
    Finished,
    FinishStep,
    Order,
    PeerFailed,
    Resumed,
    StepCommitted,
    StorePut,
    WorkerBound,
)
from oobleck.control.standing import Interrupted, PeerLost, Standing
from oobleck.job import JobSpec
from oobleck.planner import ExecutionPlan, Place
from oobleck.schedule import Instruction, Op, ScheduleKind, compile_schedule

from .model_fabric import Fabric, GroupKey, Violation, Wait

__all__ = ["Applied", "VirtualWorker"]

Moves = Generator[Wait, None, None]


@dataclass(frozen=True, slots=True)
class Applied:
    """One step in the history of a layer."""

    step: int
    generation: int
    """Of the commit's group."""
    microbatches: tuple[int, ...]
    """All that were summed, with repetitions."""


@dataclass(slots=True)
class _Work:
    step: int
    microbatches: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Lane:
    key: GroupKey
    stage: int
    places: tuple[Place, ...]


class VirtualWorker:
    """One worker process. `step` makes the training thread's next move, `take` a message of the control thread."""

    def __init__(self, place: Place, job: JobSpec, fabric: Fabric, say: Callable[[AgentMessage], None]) -> None:
        self.place = place
        self.layers: dict[int, tuple[Applied, ...]] = {}
        self.kept: dict[int, tuple[Applied, ...]] = {}
        """Layers of the plan before, until all have adopted the new one."""
        self.standing = Standing(place, lambda: None, lock=nullcontext())
        self.is_stuck = False
        """The process is stopped: neither of its threads does anything, and nobody notices by its connection."""
        self._job = job
        self._fabric = fabric
        self._say = say
        self._board: set[str] = set()
        self._groups: set[GroupKey] = set()
        self._spoiled: set[GroupKey] = set()
        """Groups whose traffic was given up half-way: their messages cannot be told apart any more."""
        self._posted: Counter[GroupKey] = Counter()
        self._plan: ExecutionPlan | None = None
        self._lane: _Lane | None = None
        self._buckets: tuple[tuple[GroupKey, tuple[int, ...]], ...] = ()
        self._commit_key: GroupKey | None = None
        self._work: _Work | None = None
        self._base_done = False
        self._segments_done: set[int] = set()
        self._reduced: dict[int, tuple[int, ...]] = {}
        self._resumed_generation: int | None = None
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
            case Fence():
                self._say(self.standing.answer(message))
            case Order():
                self.standing.give_order(message)
            case FinishStep():
                self.standing.want_stop()
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

    def _follow(self, order: Order) -> Moves:
        yield from _pause("took an order")
        if order.catch_up is not None and self.standing.catch_up(order.catch_up):
            yield from self._apply(order.catch_up)
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
        while self.standing.applied < self._job.max_steps and not stop:
            yield from self._compute(self._plan, self._lane, self.standing.applied + 1)
            stop = yield from self._end_step(self._buckets, self._commit_key)
        return True

    # --- a step ----------------------------------------------------------------------------------------------

    def _compute(self, plan: ExecutionPlan, lane: _Lane, step: int) -> Generator[Wait, None, _Work]:
        work = self._work
        if work is None or work.step != step:
            work = self._begin_step(step)
        if not self._base_done:
            located = plan.locate(self.place)
            assert located is not None
            yield from self._execute(work, lane, plan.microbatches_of(located[0]))
            self._base_done = True
        return work

    def _begin_step(self, step: int) -> _Work:
        self._forget_step()
        self._work = _Work(step)
        return self._work

    def _execute(self, work: _Work, lane: _Lane, microbatches: Sequence[int]) -> Moves:
        schedule = compile_schedule(
            ScheduleKind.ONE_F_ONE_B, num_stages=len(lane.places), num_microbatches=len(microbatches), commits=False
        )
        if self.standing.is_broken:
            raise PeerLost("a program of this step failed half-way before")
        self._say_resumed()
        try:
            for instruction in schedule.programs[lane.stage]:
                assert instruction.microbatch is not None
                yield from self._instruct(instruction, microbatches[instruction.microbatch], work, lane)
        except PeerLost:
            self._spoiled.add(lane.key)
            self.standing.note_broken()
            raise
        except Interrupted:
            self._spoiled.add(lane.key)
            raise

    def _instruct(self, instruction: Instruction, microbatch: int, work: _Work, lane: _Lane) -> Moves:
        stopped = self.standing.is_pipeline_stopped
        match instruction.op:
            case Op.LOAD:
                yield Wait("load", lambda: not stopped(), stopped)
            case Op.RECV_F | Op.RECV_B:
                yield from self._receive(instruction.op, microbatch, work, lane)
            case Op.SEND_F | Op.SEND_B:
                forward = instruction.op is Op.SEND_F
                target = lane.places[lane.stage + (1 if forward else -1)]
                yield Wait("send", lambda: True, can_fail=lambda: self._fabric.lacks_a_member(lane.key))
                tag = 2 * microbatch + (not forward)
                self._fabric.send(lane.key, self.place, target, tag, (work.step, microbatch))
            case Op.BACKWARD:
                yield Wait("backward", lambda: not stopped(), stopped)
                if lane.key in self._spoiled:
                    raise Violation(f"{self.place} computes over {lane.key.name}, which was given up half-way before")
                self.standing.note_microbatch()
                work.microbatches.append(microbatch)

    def _receive(self, op: Op, microbatch: int, work: _Work, lane: _Lane) -> Moves:
        forward = op is Op.RECV_F
        source = lane.places[lane.stage + (-1 if forward else 1)]
        tag = 2 * microbatch + (not forward)
        yield Wait(
            f"{op.value} of microbatch {microbatch} of step {work.step}",
            lambda: self._fabric.has_mail(lane.key, source, self.place, tag),
            self.standing.is_pipeline_stopped,
            lambda: self._fabric.lacks_a_member(lane.key),
            touches_network=True,
        )
        received = self._fabric.receive(lane.key, source, self.place, tag)
        if received != (work.step, microbatch):
            raise Violation(f"{self.place} wants microbatch {microbatch} of step {work.step}, got {received}")

    def _say_resumed(self) -> None:
        generation, self._resumed_generation = self._resumed_generation, None
        if generation is not None:
            self._say(
                Resumed(
                    device=self.place.device,
                    generation=generation,
                    transfer_s=0.0,
                    received_bytes=0,
                    resumed_s=0.0,
                    busy_s=(),
                )
            )

    def _end_step(
        self, buckets: Sequence[tuple[GroupKey, tuple[int, ...]]], key: GroupKey
    ) -> Generator[Wait, None, bool]:
        work = self._work
        assert work is not None
        mine = tuple(work.microbatches)
        posted = [(bucket, layers, self._post(bucket, (work.step, mine))) for bucket, layers in buckets]
        yield from _pause("posted the reductions")
        self._reduced = {}
        for bucket, layers, sequence in posted:
            sums = yield from self._sum(bucket, sequence, work.step)
            self._reduced.update(dict.fromkeys(layers, tuple(sorted(m for part in sums for m in part))))
        yield from _pause("reduced")
        self.standing.note_reduced(work.step)
        yield from _pause("about to commit")
        sequence = self._post(key, (work.step, self.standing.is_stop_wanted))
        stops = yield from self._sum(key, sequence, work.step)
        yield from _pause("agreed to commit")
        record = CommitRecord(
            step=work.step,
            generation=key.generation,
            loss=1.0,
            grad_norm=1.0,
            learning_rate=1.0,
            num_samples=self._job.global_batch_size,
            samples_repeated=0,
            samples_missing=0,
            duration_s=1.0,
        )
        self.standing.begin_apply(record)
        yield from self._apply(record)
        return any(stops)

    def _post(self, key: GroupKey, value: object) -> int:
        if len(key.members) > 1 and key not in self._groups:
            raise Violation(f"{self.place} has not formed {key.name}")
        sequence = self._posted[key]
        self._posted[key] += 1
        self._fabric.post(key, sequence, self.place, value)
        return sequence

    def _sum(self, key: GroupKey, sequence: int, step: int) -> Generator[Wait, None, list]:
        yield Wait(
            f"all-reduce {sequence} of {key.name} in step {step}",
            lambda: self._fabric.is_complete(key, sequence),
            self.standing.is_fenced,
            lambda: self._fabric.lacks_a_member(key),
            touches_network=len(key.members) > 1,
        )
        contributions = self._fabric.contributions(key, sequence)
        if any(other != step for other, _ in contributions):
            raise Violation(f"{key.name} mixes steps: {contributions}")
        return [value for _, value in contributions]

    def _apply(self, record: CommitRecord) -> Moves:
        yield from _pause("applying")
        whole = tuple(range(self._job.num_microbatches))
        for layer, history in self.layers.items():
            summed = self._reduced[layer]
            if summed != whole:
                raise Violation(f"step {record.step}: layer {layer} on {self.place} sums microbatches {summed}")
            self.layers[layer] = (*history, Applied(record.step, record.generation, summed))
        self.kept = {}
        self._forget_step()
        if self._lane is not None and self._lane.stage == 0:
            self._say(StepCommitted(device=self.place.device, record=record))

    def _forget_step(self) -> None:
        self._work = None
        self._base_done = False
        self._segments_done.clear()
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
            self._begin_step(step)
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
        lane: _Lane | None = None
        buckets: tuple[tuple[GroupKey, tuple[int, ...]], ...] = ()
        commit_key: GroupKey | None = None
        if located is not None:
            pipeline = plan.pipelines[located[0]]
            lane_key = GroupKey("pipeline", order.pipeline_generations[located[0]], pipeline.places)
            lane = _Lane(lane_key, located[1], pipeline.places)
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
        self._plan, self._buckets, self._commit_key, self._lane = plan, buckets, commit_key, lane
        self._take_layers(wanted, received, initial=order.initial)
        self.kept = kept
        self._groups &= set(keys)
        self._resumed_generation = order.generation

    def _exchange(self, order: Order, key: GroupKey) -> Generator[Wait, None, dict[int, tuple[Applied, ...]]]:
        for tag, item in enumerate(order.transfers):
            if item.source == self.place:
                self._fabric.send(key, self.place, item.target, tag, self._state(item.layer))
        yield from _pause("sent layers")
        received: dict[int, tuple[Applied, ...]] = {}
        for tag, item in enumerate(order.transfers):
            if item.target == self.place:
                yield Wait(
                    f"layer {item.layer} from {item.source}",
                    lambda item=item, tag=tag: self._fabric.has_mail(key, item.source, self.place, tag),
                    self.standing.is_fenced,
                    lambda: self._fabric.lacks_a_member(key),
                    touches_network=True,
                )
                state = self._fabric.receive(key, item.source, self.place, tag)
                if received.setdefault(item.layer, state) != state:
                    raise Violation(f"{self.place} receives layer {item.layer} in parts of different versions")
        return received

    def _states_to_keep(self, order: Order, wanted: Collection[int]) -> dict[int, tuple[Applied, ...]]:
        if self.standing.applied != order.boundary:
            return {}
        moving = {item.layer for item in order.transfers}.difference(wanted)
        return {layer: self._state(layer) for layer in sorted(moving & (self.kept.keys() | self.layers.keys()))}

    def _state(self, layer: int) -> tuple[Applied, ...]:
        if layer not in self.layers and layer not in self.kept:
            raise Violation(f"{self.place} is to send layer {layer}, which it does not hold")
        return self.kept[layer] if layer in self.kept else self.layers[layer]

    def _take_layers(self, wanted: Collection[int], received: dict[int, tuple[Applied, ...]], *, initial: bool) -> None:
        if initial:
            self.layers = dict.fromkeys(wanted, ())
            return
        missing = [layer for layer in wanted if layer not in self.layers and layer not in received]
        if missing:
            raise Violation(f"{self.place} adopts layers {missing}, which nobody sent")
        self.layers = {layer: received.get(layer, self.layers.get(layer, ())) for layer in wanted}

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
            lambda: self._board.issuperset(awaited),
            self.standing.is_fenced,
            lambda: any(map(self._fabric.lacks_a_member, missing)),
            touches_network=True,
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
