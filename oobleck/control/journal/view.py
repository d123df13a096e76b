"""The journal as a person sees it: follows the entries and returns snapshots. Decides nothing. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from oobleck.control.protocol import DataPosition, NodeUse
from oobleck.job import JobSpec
from oobleck.planner import ExecutionPlan, Stage

from . import node_entries, rank_entries, snapshot
from .entries import JournalEntry
from .goodput import TimeAccount
from .plan_entries import PlanAdopted, RecoveryDone, RecoveryStarted
from .run_entries import JobEnded, JobStarted, ProfileKnown, ScalingDecided
from .startup_phases import StartupPhases
from .step_entries import DataEntry, DataPlaced, RecordsDealt, ShardQuarantined, ShardsKnown, StepDone

_RECENT_STEPS = 20
_RECENT_EVENTS = 100
_MOST_POINTS = 256
_USE_KEPT_S = 10.0
StageKey = tuple[str, int, int]


@dataclass(slots=True, kw_only=True)
class DataView:
    """Follows the entries about shards: how far a run is in them. A value on the wire."""

    _num_shards: int = 0
    _quarantined: list[str] = field(default_factory=list)
    _placed: DataPosition = field(default_factory=DataPosition)
    _dealt: list[tuple[int, DataPosition, bool]] = field(default_factory=list)
    """(step, position after it, whether it is the last) of steps with records that are not committed yet."""
    _is_last: bool = False
    """Whether no step follows the newest committed one."""

    def apply(self, entry: DataEntry) -> None:
        match entry:
            case ShardsKnown(names=names):
                self._num_shards = len(names)
            case DataPlaced(position=position):
                self._placed, self._is_last = position, False
                self._dealt.clear()
            case RecordsDealt(records=records):
                self._dealt.append((records.step, records.after, records.is_last))
            case ShardQuarantined(shard=shard):
                self._quarantined.append(shard)

    def commit(self, step: int) -> None:
        while self._dealt and self._dealt[0][0] <= step:
            _, self._placed, self._is_last = self._dealt.pop(0)

    def text(self, *, has_ended: bool) -> str | None:
        """Return what is read by now, in words; None where the data is not in shards."""
        if not self._num_shards:
            return None
        position = self._placed
        done = position.opened - len(position.open) - len(position.left)
        words = [f"{position.records:,} records", f"{done} shards of {self._num_shards} read to the end"]
        if self._quarantined:
            words.append(f"{len(self._quarantined)} in quarantine: {', '.join(self._quarantined)}")
        if not self._dealt and not self._is_last and not has_ended:
            words.append("waiting for more data")
        return "; ".join(words)


@dataclass(slots=True, kw_only=True)
class RanksView:
    """Follows a script's generations. O(1) an entry."""

    tag: str = ""
    command: str = ""
    state: snapshot.RunState | None = None
    """None for a run that trains a job."""
    generation: int = 0
    num_restarts: int = 0
    is_finished: bool = False
    protected: str | None = None

    def apply(self, entry: JournalEntry) -> None:
        match entry:
            case rank_entries.ScriptStarted(run=run):
                self.tag, self.command, self.state = run.tag, run.kinds, snapshot.RunState.STARTING
            case rank_entries.GenerationFormed(generation=generation, cause=cause):
                self.num_restarts += cause.is_failure
                self.generation = generation
            case rank_entries.GenerationRuns():
                self.state = snapshot.RunState.TRAINING
            case rank_entries.GenerationEnded(cause=cause):
                self.state = snapshot.RunState.RECONFIGURING
                self.is_finished = cause is rank_entries.GenerationCause.FINISHED
            case rank_entries.StatesProtected():
                self.protected = entry.text
            case _:
                pass


@dataclass(slots=True, kw_only=True)
class Curve:
    """The course of loss and speed in at most 256 points, each the mean of as many steps. A value on the wire."""

    _steps_per_point: int = 1
    _points: list[tuple[float, float]] = field(default_factory=list)
    _newest: list[tuple[float, float]] = field(default_factory=list)
    """The steps since the last point."""

    def add(self, loss: float, tokens_per_s: float) -> None:
        self._newest.append((loss, tokens_per_s))
        if len(self._newest) < self._steps_per_point:
            return
        self._points.append(_mean(self._newest))
        self._newest.clear()
        if len(self._points) == _MOST_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [_mean(pair) for pair in pairs]
            self._steps_per_point *= 2

    def values(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the losses and the tokens a second."""
        return tuple(loss for loss, _ in self._points), tuple(speed for _, speed in self._points)


def _mean(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return fmean(loss for loss, _ in points), fmean(speed for _, speed in points)


@dataclass(slots=True, kw_only=True)
class RunView:
    """Follows a run's journal. O(1) an entry, O(stages) for a plan; a snapshot costs O(stages + nodes).

    A value on the wire, which lacks the job and the newest plan: `learn` those again.
    """

    _account: TimeAccount = field(default_factory=TimeAccount)
    _scaling: str = ""
    _step: int = 0
    _loss: float | None = None
    _recent: list[tuple[float, int]] = field(default_factory=list)
    """(seconds, tokens) of the newest steps."""
    _curve: Curve = field(default_factory=Curve)
    _nodes: dict[str, snapshot.NodeState] = field(default_factory=dict)
    _origins: dict[str, str] = field(default_factory=dict)
    _kinds: dict[str, str] = field(default_factory=dict)
    _changing: set[StageKey] = field(default_factory=set)
    _recovering: set[int] = field(default_factory=set)
    _num_recoveries: int = 0
    _events: list[snapshot.EventLine] = field(default_factory=list)
    _ended: JobEnded | None = None
    _data: DataView = field(default_factory=DataView)
    _ranks: RanksView = field(default_factory=RanksView)
    _phases: StartupPhases = field(default_factory=StartupPhases)
    _job: JobSpec | None = field(default=None, init=False)
    _plan: ExecutionPlan = field(default=ExecutionPlan(pipelines=()), init=False)
    _generation: int = field(default=0, init=False)
    _redundant: bool = field(default=True, init=False)
    _heard_s: dict[str, float] = field(default_factory=dict, init=False)
    _used: dict[str, tuple[float, NodeUse]] = field(default_factory=dict, init=False)
    """When each node reported its use, and that."""

    def learn(self, started: JobStarted | None, newest: PlanAdopted | None) -> None:
        """Take in the entries that a value from the wire lacks."""
        self._job = None if started is None else started.job
        if newest is not None:
            self._plan, self._generation, self._redundant = newest.plan, newest.generation, newest.redundant

    @property
    def has_ended(self) -> bool:
        return self._ended is not None

    def heard(self, node: str, now_s: float) -> None:
        """Note that a node was heard. Heartbeats are not journal entries."""
        self._heard_s[node] = now_s

    def measured(self, node: str, use: NodeUse, now_s: float) -> None:
        """Note what a node's processes use. It is no journal entry either."""
        self._used[node] = now_s, use

    def apply(self, entry: JournalEntry) -> None:
        self._account.apply(entry)
        # Entries of every step would push all others out of the list.
        if not isinstance(
            entry, StepDone | ProfileKnown | RecordsDealt | rank_entries.StatesProtected | rank_entries.StepsSaved
        ):
            self._events.append(snapshot.EventLine(t_s=entry.t_s, level=entry.level, text=entry.sentence))
            del self._events[:-_RECENT_EVENTS]
        match entry:
            case JobStarted() | rank_entries.ScriptStarted():
                self._job = entry.job if isinstance(entry, JobStarted) else None
                for spec in entry.nodes:
                    self._nodes.setdefault(spec.name, snapshot.NodeState.CONNECTING)
                    self._origins[spec.name], self._kinds[spec.name] = spec.origin, spec.kind
            case node_entries.NodeConnected(node=node) | node_entries.WorkerDown(node=node):
                self._nodes[node] = snapshot.NodeState.CONNECTED
            case node_entries.WorkerUp(node=node):
                if self._nodes.get(node) is not snapshot.NodeState.TRAINING:
                    self._nodes[node] = snapshot.NodeState.READY
            case node_entries.NodeLost(node=node):
                self._nodes[node] = snapshot.NodeState.LOST
            case node_entries.NodeLeft(node=node):
                self._nodes[node] = snapshot.NodeState.ENDED
            case node_entries.NodeAdded(node=spec):
                self._nodes[spec.name] = snapshot.NodeState.CONNECTING
                self._origins[spec.name], self._kinds[spec.name] = spec.origin, spec.kind
            case PlanAdopted():
                self._adopt(entry)
            case ScalingDecided():
                self._scaling = entry.sentence
            case StepDone():
                self._commit(entry)
            case rank_entries.StepsSaved():
                self._step, self._loss = entry.step, entry.loss
                self._recent.append((entry.worked_s / entry.num_steps, 0))
                del self._recent[:-_RECENT_STEPS]
            case RecoveryStarted():
                self._recovering.add(entry.generation)
            case RecoveryDone():
                # It has overtaken the recoveries before it, which have no end of their own.
                self._recovering = {g for g in self._recovering if g > entry.generation}
                self._num_recoveries += not entry.cause.is_calm
                self._changing.clear()
            case ShardsKnown() | DataPlaced() | RecordsDealt() | ShardQuarantined():
                self._data.apply(entry)
            case rank_entries.GenerationFormed():
                self._form(entry)
            case JobEnded():
                self._ended = entry
            case _:
                pass
        # Steps are nearly all entries of a long run, and no script has any.
        if not isinstance(entry, StepDone):
            self._ranks.apply(entry)
        self._phases.apply(entry)

    def at(self, now_s: float) -> snapshot.RunSnapshot:
        """Return the run's state `now_s` seconds after its start, or at its end if that came before."""
        elapsed_s = self._ended.t_s if self._ended else now_s
        job = self._job
        step_s = median(seconds for seconds, _ in self._recent) if self._recent else None
        remaining = job.max_steps - self._step if job else 0
        has_kinds = len(set(self._kinds.values())) > 1
        losses, speeds = self._curve.values()
        return snapshot.RunSnapshot(
            tag=job.tag if job else self._ranks.tag,
            model=job.model.type if job else self._ranks.command,
            state=self._state(),
            generation=self._generation or self._ranks.generation,
            step=self._step,
            max_steps=job.max_steps if job else 0,
            loss=self._loss,
            tokens_per_s=median(tokens / seconds for seconds, tokens in self._recent) if self._recent and job else None,
            step_time_s=step_s,
            losses=losses,
            speeds=speeds,
            goodput=self._account.at(elapsed_s).goodput,
            elapsed_s=elapsed_s,
            remaining_s=None if step_s is None or self._ended or not job else step_s * remaining,
            redundant=self._redundant,
            fault_threshold=job.fault_threshold if job else 0,
            num_recoveries=self._num_recoveries + self._ranks.num_restarts,
            scaling=self._scaling,
            pipelines=tuple(self._pipelines()),
            nodes=tuple(self._node_view(name, elapsed_s, has_kinds=has_kinds) for name in self._nodes),
            events=tuple(self._events),
            phase=self._phases.at(elapsed_s),
            exit_code=self._ended.exit_code if self._ended else None,
            data=self._data.text(has_ended=self._ended is not None),
            protected=self._ranks.protected,
        )

    @property
    def _is_at_last_step(self) -> bool:
        return self._job is not None and self._step >= self._job.max_steps

    def _state(self) -> snapshot.RunState:
        if self._ended is not None:
            is_whole = self._ranks.is_finished if self._ranks.state else self._job is None or self._is_at_last_step
            return snapshot.state_at_end(self._ended.exit_code, is_whole=is_whole)
        if self._ranks.state is not None:
            return self._ranks.state
        # A plan without pipelines waits for nodes, even if its recovery is not over.
        if self._generation and not self._plan.pipelines:
            return snapshot.RunState.WAITING
        if self._recovering:
            return snapshot.RunState.RECONFIGURING
        return snapshot.RunState.TRAINING if self._step else snapshot.RunState.STARTING

    def _adopt(self, entry: PlanAdopted) -> None:
        before, after = (
            {key for pipeline in plan.pipelines for stage in pipeline.stages for key in _keys(stage)}
            for plan in (self._plan, entry.plan)
        )
        self._changing = after - before
        self._plan, self._generation, self._redundant = entry.plan, entry.generation, entry.redundant
        training = set(entry.plan.nodes)
        for name, state in self._nodes.items():
            if name in training:
                self._nodes[name] = snapshot.NodeState.TRAINING
            elif name in entry.plan.spares:
                self._nodes[name] = snapshot.NodeState.SPARE
            elif state in (snapshot.NodeState.TRAINING, snapshot.NodeState.SPARE):
                self._nodes[name] = snapshot.NodeState.READY

    def _form(self, entry: rank_entries.GenerationFormed) -> None:
        part = {each.node for each in entry.nodes}
        for name, state in self._nodes.items():
            if name in part:
                self._nodes[name] = snapshot.NodeState.TRAINING
            elif state in (snapshot.NodeState.TRAINING, snapshot.NodeState.CONNECTED):
                self._nodes[name] = snapshot.NodeState.SPARE

    def _commit(self, entry: StepDone) -> None:
        record = entry.record
        self._step = record.step
        self._loss = record.loss
        self._data.commit(record.step)
        if record.duration_s > 0:
            self._recent.append((record.duration_s, entry.tokens))
            del self._recent[:-_RECENT_STEPS]
            if math.isfinite(record.loss):
                self._curve.add(record.loss, entry.tokens / record.duration_s)
        # A step of an earlier generation says nothing about the stages of the new plan.
        if record.generation == self._generation:
            self._changing.clear()

    def _pipelines(self) -> Iterator[snapshot.PipelineView]:
        for pipeline in self._plan.pipelines:
            broken = any(self._nodes.get(node) is snapshot.NodeState.LOST for node in pipeline.nodes)
            yield snapshot.PipelineView(
                num_microbatches=pipeline.num_microbatches,
                stages=tuple(
                    snapshot.StageView(
                        node=_node(stage),
                        first_layer=stage.chunks[0].start,
                        stop_layer=stage.chunks[0].stop,
                        more_chunks=tuple((layers.start, layers.stop) for layers in stage.chunks[1:]),
                        num_devices=len(stage.worker_ids),
                        state=self._work_state(stage, broken),
                    )
                    for stage in pipeline.stages
                ),
            )

    def _work_state(self, stage: Stage, broken: bool) -> snapshot.WorkState:
        if self._nodes.get(_node(stage)) is snapshot.NodeState.LOST:
            return snapshot.WorkState.LOST
        if self._ended is not None:
            return snapshot.WorkState.ENDED
        if not self._step:
            return snapshot.WorkState.STARTING
        # A stage of a broken pipeline waits for a new plan; a whole pipeline continues during a recovery.
        is_waiting = broken or not self._changing.isdisjoint(_keys(stage))
        return snapshot.WorkState.RECONFIGURING if is_waiting else snapshot.WorkState.TRAINING

    def _node_view(self, name: str, now_s: float, *, has_kinds: bool) -> snapshot.NodeView:
        state = self._nodes[name]
        if self._ended is not None and state is not snapshot.NodeState.LOST:
            state = snapshot.NodeState.ENDED
        heard_s = self._heard_s.get(name)
        return snapshot.NodeView(
            name=name,
            state=state,
            heard_s_ago=None if heard_s is None else max(0.0, now_s - heard_s),
            origin=self._origins.get(name, ""),
            kind=self._kinds.get(name, "") if has_kinds else "",
            use=self._use_of(name, state, now_s),
        )

    def _use_of(self, name: str, state: snapshot.NodeState, now_s: float) -> snapshot.UseView | None:
        at_s, use = self._used.get(name, (-math.inf, None))
        is_gone = state in (snapshot.NodeState.LOST, snapshot.NodeState.ENDED)
        if use is None or is_gone or now_s - at_s > _USE_KEPT_S:
            return None
        return snapshot.UseView(
            cores=use.cores,
            num_cores=use.num_cores,
            used_bytes=use.used_bytes,
            memory_bytes=use.memory_bytes,
            devices=tuple((each.busy, each.used_bytes, each.memory_bytes) for each in use.devices),
        )


def _node(stage: Stage) -> str:
    return stage.worker_ids[0].node


def _keys(stage: Stage) -> list[StageKey]:
    return [(_node(stage), chunk.start, chunk.stop) for chunk in stage.chunks]
