"""Shards in the run: who is asked what lies in them, which step takes what, and what happens when they cannot be read.

    a worker has answered ──> records known ──> assigned to steps ahead, and sent to all ──> committed with their steps
                                                     │
        a plan goes back, or leaves a shard out:     └── assigned again, in another version

A part of the coordinator's machine. What it assigns is in the journal before it is sent, so that a new master continues
where the one before has stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from oobleck.control import events, protocol
from oobleck.control.journal import DataEntry, DataPlaced, RecordsDealt, ShardQuarantined, ShardsKnown
from oobleck.control.steps import Progress
from oobleck.errors import PeerError
from oobleck.job import JobSpec
from oobleck.planner import WorkerId

from .record_assigner import MAX_LEFT, MAX_OPEN, RecordAssigner

STEPS_AHEAD = 32
"""Steps whose records are sent before they are begun: so many steps workers can run without a master."""
_ATTEMPTS = 3
"""How often a shard is tried before it is in quarantine."""
_RETRY_S = 1.0
"""After the first failure; after the second, twice that."""
_ANSWER_S = 30.0
"""How long a worker may take to look into shards, before another one is asked."""
_POLL_S = 0.25
"""How often shards that grow are looked into while there is nothing new."""

DataEffects = tuple[events.Command | events.EndRun, ...]
"""What is to be done, in this order."""


@dataclass(slots=True)
class ShardRemains:
    """What a journal says of the shards. A value on the wire."""

    names: tuple[str, ...] = ()
    placed: DataPlaced | None = None
    dealt: list[protocol.StepRecords] = field(default_factory=list)
    barred: list[ShardQuarantined] = field(default_factory=list)

    def note(self, entry: DataEntry) -> None:
        """Take the next entry in."""
        match entry:
            case ShardsKnown(names=names):
                self.names = names
            case DataPlaced():
                self.placed = entry
                self.dealt.clear()
            case RecordsDealt(records=records):
                self.dealt.append(records)
                del self.dealt[: -2 * STEPS_AHEAD]
            case ShardQuarantined():
                self.barred.append(entry)


class Sharding:
    """The assigner, what it has assigned to steps that are not committed, and the failures of shards."""

    def __init__(self, job: JobSpec, progress: Progress, *, worker_ids: Callable[[], Iterable[WorkerId]]) -> None:
        """`worker_ids` are the workers of the newest plan that can be spoken to; asked for where there is news."""
        self._job = job
        self._progress = progress
        self._worker_ids = worker_ids
        self._names: tuple[str, ...] = ()
        self._assigner: RecordAssigner | None = None
        self._assignment_version = 0
        self._placed_generation = 0
        """Steps of older generations' plans follow records that were taken back since."""
        self._base = (0, protocol.DataPosition())
        """(step, position) that the newest edition begins with."""
        self._dealt: dict[int, protocol.StepRecords] = {}
        """By step, of the newest edition; those before the newest committed one are forgotten."""
        self._failures: dict[int, int] = {}
        """How often each shard has failed since it was read last."""
        self._must_deal_anew = False
        self._is_dry = True
        self._is_stopped = False
        self._over_told: tuple[int, int] | None = None
        """(generation, step) for which it was said that there are no more."""
        self._request = 0
        self._asked: WorkerId | None = None
        self._answer_due_s = math.inf
        self._asks_from_s = 0.0
        self._regroups_s = math.inf
        self.num_late = 0
        """Reports that came too late to count."""
        self.due_s = math.inf

    @property
    def is_on(self) -> bool:
        """Whether the job's data is in shards."""
        return bool(self._job.data.shards)

    # --- the shards are known ----------------------------------------------------------------------------------

    def know(self, names: tuple[str, ...], now_s: float) -> tuple[events.Record, ...]:
        """A worker is ready, and names the shards; they are the same on all nodes."""
        if not self.is_on or self._names:
            return ()
        self._take_names(names)
        return (events.Record(entry=ShardsKnown(t_s=now_s, names=names)),)

    def misfit(self, position: protocol.DataPosition | None) -> str | None:
        """Why a checkpoint's place in the data means nothing here; None where it fits."""
        if not self.is_on or position is None or position.shards == protocol.digest_of_shards(self._names):
            return None
        return "the checkpoint was made with other shards; name the same data.shards, in the same order"

    def has_read_all(self, position: protocol.DataPosition | None) -> bool:
        """Whether a run that ended there has nothing left to read."""
        if not self.is_on or position is None or position.left or position.open:
            return False
        return position.opened == self._job.data.epochs * len(self._names)

    def restore(self, replayed: ShardRemains) -> None:
        """Continue from what a journal knows."""
        if not self.is_on or replayed.placed is None:
            return
        self._take_names(replayed.names)
        assert self._assigner is not None
        placed = replayed.placed
        self._assignment_version, self._placed_generation = placed.assignment_version, placed.generation
        self._base = (placed.step, placed.position)
        self._dealt = {records.step: records for records in replayed.dealt}
        self._assigner.go_back(replayed.dealt[-1].after if replayed.dealt else placed.position)
        for entry in replayed.barred:
            self._assigner.bar(self._names.index(entry.shard), entry.problem)

    def _take_names(self, names: tuple[str, ...]) -> None:
        data = self._job.data
        self._names = names
        self._assigner = RecordAssigner(
            len(names),
            seed=self._job.seed,
            batch=self._job.global_batch_size,
            chunk=self._job.microbatch_size,
            at_once=min(data.shards_at_once or (MAX_OPEN if data.follow else 1), MAX_OPEN),
            epochs=data.epochs,
            follows=data.follow,
            items_per_record=data.sequence_length - 1,
        )

    # --- plans -------------------------------------------------------------------------------------------------

    def can_finish(self, step: int, generation: int) -> bool:
        """Whether a step in flight under a generation's plan can be finished as it was assigned."""
        if not self.is_on:
            return True
        return step in self._dealt and generation >= self._placed_generation and not self._must_deal_anew

    @property
    def assignment_version(self) -> int:
        """That of the newest plan's steps; 0 where the job's data is not in shards."""
        return self._assignment_version

    def follow(
        self,
        update: protocol.PlanUpdate,
        now_s: float,
        *,
        position: protocol.DataPosition | None,
        goes_back: bool = False,
    ) -> tuple[events.Record, ...]:
        """Note a plan that takes effect: `assignment_version` is the one that it follows.

        `position` is that of the checkpoint that is gone back to; without one, who `goes_back` does to the beginning.
        The order is sent after what this records.
        """
        if not self.is_on:
            return ()
        placed: tuple[events.Record, ...] = ()
        if goes_back or update.restore is not None or not self._assignment_version:
            start = position or protocol.DataPosition(shards=protocol.digest_of_shards(self._names))
            placed = (self._begin_at(update, start.with_another_try(), now_s),)
        elif self._must_deal_anew:
            placed = (self._begin_at(update, self._position_after(update.boundary), now_s),)
        self._must_deal_anew = False
        self._regroups_s = math.inf
        self._asked = None
        self._over_told = None
        return placed

    def tell(self, worker_ids: Iterable[WorkerId]) -> tuple[events.SendAll, ...]:
        """Tell workers again what the steps to come take."""
        to_come = [records for step, records in sorted(self._dealt.items()) if step > self._progress.last_step]
        hearers = tuple(worker_ids) if to_come else ()
        return tuple(events.SendAll(worker_ids=hearers, message=records) for records in to_come)

    def _begin_at(self, update: protocol.PlanUpdate, position: protocol.DataPosition, now_s: float) -> events.Record:
        assert self._assigner is not None
        self._assignment_version += 1
        self._placed_generation = update.generation
        self._base = (update.boundary, position)
        self._dealt.clear()
        self._failures.clear()
        self._assigner.go_back(position)
        entry = DataPlaced(
            t_s=now_s,
            generation=update.generation,
            assignment_version=self._assignment_version,
            step=update.boundary,
            position=position,
        )
        return events.Record(entry=entry)

    def _position_after(self, step: int) -> protocol.DataPosition:
        base_step, position = self._base
        return position if step == base_step else self._dealt[step].after

    # --- what workers say --------------------------------------------------------------------------------------

    def surveyed(self, worker_id: WorkerId, message: protocol.ScanAnswer, now_s: float) -> DataEffects:
        """Take in what lies in shards; an answer to an older question is counted, and nothing else."""
        self._check(message)
        if message.request != self._request or worker_id != self._asked:
            return (self._note_late(now_s),)
        self._asked = None
        # In turn: what one of them takes in counts for the next.
        found = [(self._take_found(each), self._take_failure(each, now_s)) for each in message.found]
        self._asks_from_s = now_s if any(has_news for has_news, _ in found) else now_s + _POLL_S
        return tuple(effect for _, failure in found for effect in failure)

    def _check(self, message: protocol.ScanAnswer) -> None:
        for found in message.found:
            is_in_order = all(before < after for before, after in pairwise(found.bounds))
            if found.shard not in range(len(self._names)) or not found.bounds or not is_in_order:
                raise PeerError(f"reports records {found.bounds[:3]} in shard {found.shard} of {len(self._names)}")
            if found.items and len(found.items) != len(found.bounds) - 1:
                raise PeerError(f"reports {len(found.items)} sizes of {len(found.bounds) - 1} records")

    def _take_found(self, found: protocol.ScanResult) -> bool:
        assert self._assigner is not None
        is_new = found.problem is None and self._assigner.found(found)
        return is_new and (len(found.bounds) > 1 or found.is_end)

    def _take_failure(self, found: protocol.ScanResult, now_s: float) -> DataEffects:
        return () if found.problem is None else self._note_failure(found.shard, found.bounds[0], found.problem, now_s)

    def failed(self, generation: int, message: protocol.RecordsFailed, now_s: float) -> DataEffects:
        """A worker cannot read a record of the step in flight: the step is begun again, without the shard at last."""
        if message.shard not in range(len(self._names)):
            raise PeerError(f"cannot read shard {message.shard} of {len(self._names)}")
        if message.generation != generation or not math.isinf(self._regroups_s):
            return (self._note_late(now_s),)
        effects = self._note_failure(message.shard, message.position, message.problem, now_s)
        assert self._assigner is not None
        if message.shard in self._assigner.barred:
            self._must_deal_anew, self._regroups_s = True, now_s
        else:
            self._regroups_s = now_s + self._failures[message.shard] * _RETRY_S
        return effects

    def _note_failure(self, shard: int, position: int, problem: str, now_s: float) -> DataEffects:
        assert self._assigner is not None
        if shard in self._assigner.barred:
            return ()
        self._failures[shard] = count = self._failures.get(shard, 0) + 1
        name = self._names[shard]
        if count < _ATTEMPTS:
            text = f"{name} cannot be read ({count} of {_ATTEMPTS} attempts): {problem}"
            return (events.notice(now_s, "warning", text),)
        if len(self._assigner.barred) == MAX_LEFT:
            text = f"{MAX_LEFT} shards are in quarantine, and {name} cannot be read either: {problem}"
            return (events.EndRun(exit_code=1, reason=text),)
        self._assigner.bar(shard, problem)
        return (events.Record(entry=ShardQuarantined(t_s=now_s, shard=name, position=position, problem=problem)),)

    def _note_late(self, now_s: float) -> events.Record:
        self.num_late += 1
        return events.notice(now_s, "info", f"a report on the data came too late to count ({self.num_late} in all)")

    def lost(self, node: str) -> None:
        """A node is gone: what it was asked, another one is."""
        if self._asked is not None and self._asked.node == node:
            self._asked = None

    # --- continuing -------------------------------------------------------------------------------------------

    def committed(self, step: int) -> None:
        """A step's records are done: nothing takes them again, unless all goes back."""
        records = self._dealt.get(step)
        for run in records.runs if records is not None else ():
            self._failures.pop(run.shard, None)
        for old in [old for old in self._dealt if old < step]:
            del self._dealt[old]

    def stop(self) -> None:
        """No further step is to be begun."""
        self._is_stopped = True

    def takes_regrouping(self, now_s: float) -> bool:
        """Whether all are to begin the step in flight again now."""
        if now_s < self._regroups_s:
            return False
        self._regroups_s = math.inf
        return True

    def go_on(self, generation: int, now_s: float, *, save: bool) -> DataEffects:
        """Deal what is known, ask for what is not, and say when there is no more. Called whenever anything happened.

        `save`: the newest state is not saved, and is to be if no step comes after it.
        """
        if not self._assignment_version or self._assigner is None:
            return ()
        dealt = () if self._is_stopped else self._deal(self._assigner, now_s)
        last = self._last_dealt
        is_dry = last <= self._progress.last_step < self._job.max_steps
        if is_dry and (self._is_stopped or self._assigner.is_over):
            over = self._say_over(generation, now_s, save=save)
        else:
            over = ()
            self._expect(now_s, is_dry=is_dry)
        return (*dealt, *over, *self._survey(self._assigner, last, now_s))

    @property
    def _last_dealt(self) -> int:
        return max([*self._dealt, self._base[0]])

    def _deal(self, assigner: RecordAssigner, now_s: float) -> DataEffects:
        effects: list[events.Record | events.SendAll] = []
        last = self._last_dealt
        while last < min(self._progress.last_step + STEPS_AHEAD, self._job.max_steps):
            taken = assigner.take()
            if taken is None:
                break
            last += 1
            records = protocol.StepRecords(
                device=0,
                assignment_version=self._assignment_version,
                step=last,
                runs=taken.runs,
                num_items=taken.num_items,
                after=taken.after,
                is_last=taken.is_last,
            )
            self._dealt[last] = records
            entry = RecordsDealt(t_s=now_s, records=records)
            effects += (
                events.Record(entry=entry),
                events.SendAll(worker_ids=tuple(self._worker_ids()), message=records),
            )
        return tuple(effects)

    def _expect(self, now_s: float, *, is_dry: bool) -> None:
        """A step that has no records does not hang; after the last one, all are to say that they have finished."""
        was_dry, self._is_dry = self._is_dry, is_dry
        if is_dry:
            self._progress.expect(math.inf, now_s)
        elif was_dry:  # it may be the first of its plan
            self._progress.expect(self._job.control.start_timeout_s, now_s)

    def _say_over(self, generation: int, now_s: float, *, save: bool) -> DataEffects:
        step = self._progress.last_step
        if self._over_told == (generation, step):
            return ()
        self._over_told = (generation, step)
        over = protocol.RecordsOver(
            device=0,
            assignment_version=self._assignment_version,
            step=step,
            generation=generation,
            position=self._position_after(step),
            save=save,
        )
        # All are to say that they have finished.
        self._progress.expect(self._job.control.start_timeout_s, now_s)
        return (events.SendAll(worker_ids=tuple(self._worker_ids()), message=over),)

    def _survey(self, assigner: RecordAssigner, last: int, now_s: float) -> tuple[events.Send, ...]:
        """Have one worker look into shards, if not enough is known."""
        question: tuple[events.Send, ...] = ()
        if self._asked is not None and now_s >= self._answer_due_s:
            self._asked = None
            if self._is_dry:
                self._regroups_s = now_s  # nothing else would show that it is stuck: a fence does
        if self._asked is None:
            left = min(self._progress.last_step + STEPS_AHEAD, self._job.max_steps) - last
            wants = assigner.wants(left * self._job.global_batch_size) if left > 0 and not self._is_stopped else ()
            worker_ids = tuple(self._worker_ids())
            if wants and worker_ids and now_s >= self._asks_from_s:
                self._request += 1
                self._asked = worker_id = worker_ids[self._request % len(worker_ids)]
                self._answer_due_s = now_s + _ANSWER_S
                request = protocol.ScanRequest(device=worker_id.device, request=self._request, wants=wants)
                question = (events.Send(node=worker_id.node, message=request),)
            self.due_s = self._asks_from_s if wants and self._asked is None else math.inf
        if self._asked is not None:
            self.due_s = self._answer_due_s
        self.due_s = min(self.due_s, self._regroups_s)
        return question

    # --- the end -----------------------------------------------------------------------------------------------

    def outcome(self, steps: str, *, can_resume: bool) -> events.EndRun | None:
        """How a run of so many steps ends, as far as its data says; None where that says nothing."""
        if not self.is_on or self._assigner is None:
            return None
        if self._assigner.barred:
            names = ", ".join(self._names[shard] for shard in self._assigner.barred)
            text = f"{steps}, but not of all data: {names} cannot be read"
            if can_resume:
                return events.EndRun(exit_code=75, reason=f"{text}; `oobleck up` tries again from there")
            return events.EndRun(exit_code=1, reason=text)
        is_committed = self._last_dealt <= self._progress.last_step  # not only dealt
        if is_committed and self._progress.last_step < self._job.max_steps and self._assigner.is_over:
            return events.EndRun(exit_code=0, reason=f"all data is read; {steps}")
        return None
