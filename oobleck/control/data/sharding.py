"""Shards in the run: which worker is asked what lies in them, which step takes which records, and unreadable shards.

    a worker has answered ──> records known ──> assigned to steps ahead, and sent to all ──> committed with their steps
                                                     │
        a plan goes back, or leaves a shard out:     └── assigned again, in another round

Assignments are in the journal before they are sent, so that a new master continues with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from oobleck.control import protocol
from oobleck.control.events import EndRun, SendAll, Turn
from oobleck.control.journal import DataEntry, DataPlaced, RecordsDealt, ShardQuarantined, ShardsKnown
from oobleck.control.steps import Progress
from oobleck.errors import PeerError
from oobleck.job import JobSpec
from oobleck.planner import WorkerId

from .record_assigner import MAX_LEFT, MAX_OPEN, RecordAssigner

STEPS_AHEAD = 32
"""How many steps ahead records are sent, and so how many steps workers can run without a master."""
_ATTEMPTS = 3
"""How often a shard is tried before it is quarantined."""
_RETRY_S = 1.0
"""The wait after the first failure; it is twice as long after the second."""
_ANSWER_S = 30.0
"""How long a worker may take to look into shards, before another one is asked."""
_POLL_S = 0.25
"""The time between two looks into growing shards that have nothing new."""


@dataclass(slots=True)
class ShardRemains:
    """What a journal knows of the shards. A value on the wire."""

    names: tuple[str, ...] = ()
    placed: DataPlaced | None = None
    dealt: list[protocol.StepRecords] = field(default_factory=list)
    barred: list[ShardQuarantined] = field(default_factory=list)

    def note(self, entry: DataEntry) -> None:
        match entry:
            case ShardsKnown(names=names):
                self.names = names
            case DataPlaced():
                self.placed = entry
                self.dealt.clear()  # what was assigned in the round before is taken back
            case RecordsDealt(records=records):
                self.dealt.append(records)
                # At most STEPS_AHEAD are ahead of the newest committed step, whose position is needed as well.
                del self.dealt[: -2 * STEPS_AHEAD]
            case ShardQuarantined():
                self.barred.append(entry)


@dataclass(slots=True)
class _Round:
    """The records of steps, as assigned from one position in the data on."""

    version: int = 0
    """0 before the first round."""
    generation: int = 0
    """The generation whose plan began the round."""
    boundary: int = 0
    position: protocol.DataPosition = field(default_factory=protocol.DataPosition)
    """The position after the step `boundary`, with which the round begins."""
    steps: dict[int, protocol.StepRecords] = field(default_factory=dict)
    """The assigned steps, from the newest committed one on."""

    @property
    def last_step(self) -> int:
        return max([*self.steps, self.boundary])

    def position_after(self, step: int) -> protocol.DataPosition:
        return self.position if step == self.boundary else self.steps[step].after


@dataclass(slots=True)
class _Survey:
    """The newest question to a worker about what lies in shards."""

    request: int = 0
    asked: WorkerId | None = None
    """The worker that has still to answer."""
    answer_due_s: float = math.inf
    asks_from_s: float = 0.0
    """When the next question may be sent."""


class Sharding:
    """The round of assignment in force, the survey of the shards, and their failures."""

    def __init__(self, job: JobSpec, progress: Progress, *, worker_ids: Callable[[], Iterable[WorkerId]]) -> None:
        """`worker_ids` returns the reachable workers of the newest plan."""
        self._job = job
        self._progress = progress
        self._worker_ids = worker_ids
        self._names: tuple[str, ...] = ()
        self._assigner: RecordAssigner | None = None
        self._round = _Round()
        self._needs_reassignment = False
        """The next plan begins another round, without the quarantined shards."""
        self._regroups_s = math.inf
        """When all are to begin the step in flight again."""
        self._survey = _Survey()
        self._failures: dict[int, int] = {}
        """How often each shard has failed since it was last read."""
        self._has_no_records_left = True
        """The step in flight has none yet, or never will."""
        self._end_announced: tuple[int, int] | None = None
        """(generation, step) for which workers were told that no step follows."""
        self._is_stopped = False
        self.num_late = 0
        """Reports that arrived too late to count."""
        self.due_s = math.inf

    @property
    def is_on(self) -> bool:
        """Whether the job's data is in shards."""
        return bool(self._job.data.shards)

    # --- the shards are known ----------------------------------------------------------------------------------

    def know(self, turn: Turn, names: tuple[str, ...]) -> None:
        """Note the names of the shards, which are the same on all nodes."""
        if self.is_on and not self._names:
            self._take_names(names)
            turn.record(ShardsKnown(t_s=turn.now_s, names=names))

    def misfit(self, position: protocol.DataPosition | None) -> str | None:
        """Why a checkpoint's position in the data means nothing here; None if it fits."""
        if not self.is_on or position is None or position.shards == protocol.digest_of_shards(self._names):
            return None
        return "the checkpoint was made with other shards; name the same data.shards, in the same order"

    def has_read_all(self, position: protocol.DataPosition | None) -> bool:
        """Whether a run that ended at this position has nothing left to read."""
        if not self.is_on or position is None or position.left or position.open:
            return False
        return position.opened == self._job.data.epochs * len(self._names)

    def restore(self, replayed: ShardRemains) -> None:
        if not self.is_on or replayed.placed is None:
            return
        self._take_names(replayed.names)
        assert self._assigner is not None
        placed = replayed.placed
        steps = {records.step: records for records in replayed.dealt}
        self._round = _Round(placed.assignment_version, placed.generation, placed.step, placed.position, steps)
        self._assigner.go_back(self._round.position_after(self._round.last_step))
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
        """Whether a step in flight under a generation's plan can be finished with its records."""
        if not self.is_on:
            return True
        # Steps under older plans may follow records that were taken back since.
        return step in self._round.steps and generation >= self._round.generation and not self._needs_reassignment

    @property
    def assignment_version(self) -> int:
        """The version that the newest plan's steps follow; 0 if the job's data is not in shards."""
        return self._round.version

    def follow(
        self,
        turn: Turn,
        update: protocol.PlanUpdate,
        *,
        position: protocol.DataPosition | None,
        goes_back: bool = False,
    ) -> None:
        """Note a plan that takes effect, and begin another round if it needs one. Its order is sent afterwards.

        `position` is that of the restored checkpoint; without one, a plan that `goes_back` begins with the data.
        """
        if not self.is_on:
            return
        if goes_back or update.restore is not None or not self._round.version:
            start = position or protocol.DataPosition(shards=protocol.digest_of_shards(self._names))
            # A shard that an earlier run left out may be readable by now.
            self._begin_round(turn, update, start.with_another_try())
        elif self._needs_reassignment:
            self._begin_round(turn, update, self._round.position_after(update.boundary))
        self._needs_reassignment = False
        self._regroups_s = math.inf
        # The new plan's workers know of no question, and of no end.
        self._survey.asked = None
        self._end_announced = None

    def send_again(self, turn: Turn, worker_ids: Iterable[WorkerId]) -> None:
        targets = tuple(worker_ids)
        for step, records in sorted(self._round.steps.items()):
            if step > self._progress.last_step:
                turn.do((SendAll(worker_ids=targets, message=records),))

    def _begin_round(self, turn: Turn, update: protocol.PlanUpdate, position: protocol.DataPosition) -> None:
        assert self._assigner is not None
        self._round = _Round(self._round.version + 1, update.generation, update.boundary, position)
        self._failures.clear()
        self._assigner.go_back(position)
        turn.record(
            DataPlaced(
                t_s=turn.now_s,
                generation=update.generation,
                assignment_version=self._round.version,
                step=update.boundary,
                position=position,
            )
        )

    # --- what workers report -----------------------------------------------------------------------------------

    def surveyed(self, turn: Turn, worker_id: WorkerId, message: protocol.ScanAnswer) -> None:
        """Note what lies in shards; of an answer to an older question, only that it is late. Raises PeerError."""
        self._check(message)
        if message.request != self._survey.request or worker_id != self._survey.asked:
            self._note_late(turn)
            return
        self._survey.asked = None
        assert self._assigner is not None
        has_news = False
        for found in message.found:
            if found.problem is not None:
                self._note_failure(turn, found.shard, found.bounds[0], found.problem)
            elif self._assigner.found(found):
                has_news |= len(found.bounds) > 1 or found.is_end
        self._survey.asks_from_s = turn.now_s if has_news else turn.now_s + _POLL_S

    def _check(self, message: protocol.ScanAnswer) -> None:
        for found in message.found:
            is_in_order = all(before < after for before, after in pairwise(found.bounds))
            if found.shard not in range(len(self._names)) or not found.bounds or not is_in_order:
                raise PeerError(f"reports records {found.bounds[:3]} in shard {found.shard} of {len(self._names)}")
            if found.items and len(found.items) != len(found.bounds) - 1:
                raise PeerError(f"reports {len(found.items)} sizes of {len(found.bounds) - 1} records")

    def failed(self, turn: Turn, generation: int, message: protocol.RecordsFailed) -> None:
        """Begin the step in flight again: a worker cannot read a record. After some attempts, leave the shard out."""
        if message.shard not in range(len(self._names)):
            raise PeerError(f"cannot read shard {message.shard} of {len(self._names)}")
        # Several workers may fail at the same record. Only the first report counts until all begin the step again.
        if message.generation != generation or not math.isinf(self._regroups_s):
            self._note_late(turn)
            return
        self._note_failure(turn, message.shard, message.position, message.problem)
        assert self._assigner is not None
        if message.shard in self._assigner.barred:
            self._needs_reassignment, self._regroups_s = True, turn.now_s
        else:
            self._regroups_s = turn.now_s + self._failures[message.shard] * _RETRY_S

    def _note_failure(self, turn: Turn, shard: int, position: int, problem: str) -> None:
        assert self._assigner is not None
        if shard in self._assigner.barred:
            return
        self._failures[shard] = count = self._failures.get(shard, 0) + 1
        name = self._names[shard]
        if count < _ATTEMPTS:
            turn.note("warning", f"{name} cannot be read ({count} of {_ATTEMPTS} attempts): {problem}")
            return
        if len(self._assigner.barred) == MAX_LEFT:
            turn.end(f"{MAX_LEFT} shards are in quarantine, and {name} cannot be read either: {problem}")
        self._assigner.bar(shard, problem)
        turn.record(ShardQuarantined(t_s=turn.now_s, shard=name, position=position, problem=problem))

    def _note_late(self, turn: Turn) -> None:
        self.num_late += 1
        turn.note("info", f"a report on the data came too late to count ({self.num_late} in all)")

    def lost(self, node: str) -> None:
        if self._survey.asked is not None and self._survey.asked.node == node:
            self._survey.asked = None

    # --- continuing --------------------------------------------------------------------------------------------

    def committed(self, step: int) -> None:
        # A shard whose records were read is not broken: only failures in a row lead to quarantine.
        steps = self._round.steps
        for run in steps[step].runs if step in steps else ():
            self._failures.pop(run.shard, None)
        # The newest one stays: its position is where another round may begin.
        for old in [old for old in steps if old < step]:
            del steps[old]

    def stop(self) -> None:
        """Let no further step begin."""
        self._is_stopped = True

    def takes_regrouping(self, now_s: float) -> bool:
        """Whether all are to begin the step in flight again now."""
        if now_s < self._regroups_s:
            return False
        self._regroups_s = math.inf
        return True

    def go_on(self, turn: Turn, generation: int, *, save: bool) -> None:
        """Assign the known records, ask for others, and announce the end of the data. Call it after every event.

        `save`: the newest state is not saved, and has to be if no step follows it.
        """
        assigner = self._assigner
        if not self._round.version or assigner is None:
            return
        if not self._is_stopped:
            self._assign(turn, assigner)
        is_dry = self._round.last_step <= self._progress.last_step < self._job.max_steps
        if is_dry and (self._is_stopped or assigner.is_over):
            self._announce_end(turn, generation, save=save)
        else:
            was_dry, self._has_no_records_left = self._has_no_records_left, is_dry
            if is_dry:
                self._progress.expect(math.inf, turn.now_s)  # A step without records does not hang.
            elif was_dry:  # It may be the first of its plan.
                self._progress.expect(self._job.control.start_timeout_s, turn.now_s)
        self._ask(turn, assigner)

    @property
    def _furthest_step(self) -> int:
        """The last step whose records may be sent by now."""
        return min(self._progress.last_step + STEPS_AHEAD, self._job.max_steps)

    def _assign(self, turn: Turn, assigner: RecordAssigner) -> None:
        while self._round.last_step < self._furthest_step:
            taken = assigner.take()
            if taken is None:
                return
            records = protocol.StepRecords(
                device=0,
                assignment_version=self._round.version,
                step=self._round.last_step + 1,
                runs=taken.runs,
                num_items=taken.num_items,
                after=taken.after,
                is_last=taken.is_last,
            )
            self._round.steps[records.step] = records
            # The journal comes first, so that a new master continues with these records.
            turn.record(RecordsDealt(t_s=turn.now_s, records=records))
            turn.do((SendAll(worker_ids=tuple(self._worker_ids()), message=records),))

    def _announce_end(self, turn: Turn, generation: int, *, save: bool) -> None:
        step = self._progress.last_step
        # This is called after every event. Each plan's workers learn of the end once.
        if self._end_announced == (generation, step):
            return
        self._end_announced = (generation, step)
        over = protocol.StepsOver(
            device=0,
            assignment_version=self._round.version,
            step=step,
            generation=generation,
            position=self._round.position_after(step),
            save=save,
        )
        # All workers have to report that they have finished.
        self._progress.expect(self._job.control.start_timeout_s, turn.now_s)
        turn.do((SendAll(worker_ids=tuple(self._worker_ids()), message=over),))

    def _ask(self, turn: Turn, assigner: RecordAssigner) -> None:
        """Have one worker look into shards, if too few records are known."""
        survey, now_s = self._survey, turn.now_s
        if survey.asked is not None and now_s >= survey.answer_due_s:
            survey.asked = None
            if self._has_no_records_left:
                # Without records no step is due, so none can hang: only a fence shows whether that worker is stuck.
                self._regroups_s = now_s
        if survey.asked is None:
            left = self._furthest_step - self._round.last_step
            wants = assigner.wants(left * self._job.global_batch_size) if left > 0 and not self._is_stopped else ()
            worker_ids = tuple(self._worker_ids())
            if wants and worker_ids and now_s >= survey.asks_from_s:
                survey.request += 1
                # Each question goes to the next worker, so that one that never answers does not hold up the survey.
                survey.asked = worker_id = worker_ids[survey.request % len(worker_ids)]
                survey.answer_due_s = now_s + _ANSWER_S
                request = protocol.ScanRequest(device=worker_id.device, request=survey.request, wants=wants)
                turn.send(worker_id.node, request)
            self.due_s = survey.asks_from_s if wants and survey.asked is None else math.inf
        if survey.asked is not None:
            self.due_s = survey.answer_due_s
        self.due_s = min(self.due_s, self._regroups_s)

    def outcome(self, steps: str, *, can_resume: bool) -> EndRun | None:
        """Return how a run of this many steps ends, if its data decides that."""
        if not self.is_on or self._assigner is None:
            return None
        if self._assigner.barred:
            names = ", ".join(self._names[shard] for shard in self._assigner.barred)
            text = f"{steps}, but not of all data: {names} cannot be read"
            if can_resume:
                return EndRun(exit_code=75, reason=f"{text}; `oobleck up` tries again from there")
            return EndRun(exit_code=1, reason=text)
        is_committed = self._round.last_step <= self._progress.last_step
        if is_committed and self._progress.last_step < self._job.max_steps and self._assigner.is_over:
            return EndRun(exit_code=0, reason=f"all data is read; {steps}")
        return None
