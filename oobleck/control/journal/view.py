"""The journal as a person sees it: a machine that follows the entries and gives snapshots.

Pure: time comes with the entries and as an argument. It decides nothing; it only puts together what
others have decided.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import assert_never

from oobleck.errors import ExitCode
from oobleck.job import JobSpec
from oobleck.planner import ExecutionPlan, Stage

from . import node_entries, ranks, run_entries, snapshot
from .data_view import DataImage, DataView
from .entries import JournalEntry
from .goodput import TimeAccount, TimeImage
from .plan_entries import HangExplained, LayersArriving, PlanAdopted, RecoveryDone, RecoveryStarted
from .sentences import sentence
from .state_entries import CheckpointSaved, DataPlaced, RecordsDealt, SaveFailed, ShardQuarantined, ShardsKnown
from .step_entries import Evaluated, ReplicasDiffer, StepDone, StepRunsLong, StepsDone

_RECENT_STEPS = 20
_RECENT_EVENTS = 100
StageKey = tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewImage:
    """All that a `RunView` knows from entries, but for its job and the newest plan."""

    account: TimeImage
    scaling: str
    step: int
    loss: float | None
    recent: tuple[tuple[float, int], ...]
    nodes: tuple[tuple[str, snapshot.NodeState], ...]
    origins: tuple[tuple[str, str], ...]
    kinds: tuple[tuple[str, str], ...]
    changing: tuple[StageKey, ...]
    recovering: tuple[int, ...]
    num_recoveries: int
    events: tuple[snapshot.EventLine, ...]
    ended: run_entries.JobEnded | None
    data: DataImage


class RunView:
    """Follows a run's journal. `apply` takes the next entry; `at` returns what the run looks like.

    Applying costs O(1) but for a new plan (O(stages)); a snapshot costs O(stages + nodes).
    """

    def __init__(self) -> None:
        self._account = TimeAccount()
        self._job: JobSpec | None = None
        self._plan = ExecutionPlan(pipelines=())
        self._generation = 0
        self._redundant = True
        self._scaling = ""
        self._step = 0
        self._loss: float | None = None
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT_STEPS)  # (seconds, tokens) of steps
        self._nodes: dict[str, snapshot.NodeState] = {}
        self._origins: dict[str, str] = {}
        self._kinds: dict[str, str] = {}
        self._heard_s: dict[str, float] = {}
        self._changing: frozenset[StageKey] = frozenset()
        self._recovering: set[int] = set()
        self._num_recoveries = 0
        self._events: deque[snapshot.EventLine] = deque(maxlen=_RECENT_EVENTS)
        self._ended: run_entries.JobEnded | None = None
        self._data = DataView()
        self._ranks = ranks.RanksView()

    @classmethod
    def of_image(cls, image: ViewImage, started: run_entries.JobStarted | None, newest: PlanAdopted | None) -> RunView:
        """Continue from what another one has come to; `newest` is the newest plan."""
        view = cls()
        view._account = TimeAccount.of_image(image.account)
        view._job = None if started is None else started.job
        if newest is not None:
            view._plan, view._generation, view._redundant = newest.plan, newest.generation, newest.redundant
        view._scaling, view._step, view._loss = image.scaling, image.step, image.loss
        view._recent.extend(image.recent)
        view._nodes, view._origins, view._kinds = dict(image.nodes), dict(image.origins), dict(image.kinds)
        view._changing, view._recovering = frozenset(image.changing), set(image.recovering)
        view._num_recoveries = image.num_recoveries
        view._events.extend(image.events)
        view._ended = image.ended
        view._data = DataView.of_image(image.data)
        return view

    def image(self) -> ViewImage:
        """Return all that it knows from entries, for `of_image`."""
        return ViewImage(
            account=self._account.image(),
            scaling=self._scaling,
            step=self._step,
            loss=self._loss,
            recent=tuple(self._recent),
            nodes=tuple(self._nodes.items()),
            origins=tuple(self._origins.items()),
            kinds=tuple(self._kinds.items()),
            changing=tuple(sorted(self._changing)),
            recovering=tuple(sorted(self._recovering)),
            num_recoveries=self._num_recoveries,
            events=tuple(self._events),
            ended=self._ended,
            data=self._data.image(),
        )

    @property
    def has_ended(self) -> bool:
        return self._ended is not None

    def heard(self, node: str, now_s: float) -> None:
        """Note that a node was heard of: heartbeats are no journal entries."""
        self._heard_s[node] = now_s

    def apply(self, entry: JournalEntry) -> None:
        """Take the next entry of the journal."""
        self._account.apply(entry)
        if not isinstance(entry, StepDone | run_entries.ProfileKnown | RecordsDealt):
            self._events.append(snapshot.EventLine(t_s=entry.t_s, level=level_of(entry), text=sentence(entry)))
        match entry:
            case run_entries.JobStarted():
                self._job = entry.job
                for node in entry.nodes:
                    self._nodes.setdefault(node.name, snapshot.NodeState.CONNECTING)
                    self._origins[node.name], self._kinds[node.name] = node.origin, node.kind
            case node_entries.NodeConnected():
                self._nodes[entry.node] = snapshot.NodeState.CONNECTED
            case node_entries.WorkerUp():
                if self._nodes.get(entry.node) is not snapshot.NodeState.TRAINING:
                    self._nodes[entry.node] = snapshot.NodeState.READY
            case node_entries.NodeLost():
                self._nodes[entry.node] = snapshot.NodeState.LOST
            case node_entries.NodeLeft():
                self._nodes[entry.node] = snapshot.NodeState.ENDED
            case node_entries.NodeAdded():
                self._nodes[entry.node.name] = snapshot.NodeState.CONNECTING
                self._origins[entry.node.name], self._kinds[entry.node.name] = entry.node.origin, entry.node.kind
            case node_entries.WorkerDown():
                self._nodes[entry.node] = snapshot.NodeState.CONNECTED
            case PlanAdopted():
                self._adopt(entry)
            case run_entries.ScalingDecided():
                self._scaling = sentence(entry)
            case StepDone():
                self._commit(entry)
            case RecoveryStarted():
                self._recovering.add(entry.generation)
            case RecoveryDone():
                self._recovering = {g for g in self._recovering if g > entry.generation}
                self._num_recoveries += not entry.cause.is_calm
                self._changing = frozenset()
            case (
                run_entries.Notice()
                | LayersArriving()
                | StepRunsLong()
                | StepsDone()
                | Evaluated()
                | run_entries.MasterResumed()
                | run_entries.ProfileKnown()
                | HangExplained()
                | node_entries.NodeUnfit()
                | node_entries.TerminationNoticed()
                | node_entries.ForkServerDown()
                | ReplicasDiffer()
                | CheckpointSaved()
                | SaveFailed()
                | run_entries.JournalGap()
                | node_entries.PaceChanged()
            ):
                pass
            case ranks.ScriptStarted():
                self._ranks.apply(entry)
                for node in entry.nodes:
                    self._nodes.setdefault(node.name, snapshot.NodeState.CONNECTING)
                    self._origins[node.name], self._kinds[node.name] = node.origin, node.kind
            case ranks.GenerationFormed():
                self._ranks.apply(entry)
                self._form(entry)
            case ranks.GenerationRuns() | ranks.RankDown() | ranks.RanksHung() | ranks.GenerationEnded():
                self._ranks.apply(entry)
            case ShardsKnown() | DataPlaced() | RecordsDealt() | ShardQuarantined():
                self._data.apply(entry)
            case run_entries.JobEnded():
                self._ended = entry
            case _:
                assert_never(entry)

    def at(self, now_s: float) -> snapshot.RunSnapshot:
        """Return what the run looks like `now_s` seconds after its start, or at its end if that was before."""
        elapsed_s = self._ended.t_s if self._ended else now_s
        job = self._job
        step_s = median(seconds for seconds, _ in self._recent) if self._recent else None
        remaining = job.max_steps - self._step if job else 0
        has_kinds = len(set(self._kinds.values())) > 1
        return snapshot.RunSnapshot(
            tag=job.tag if job else self._ranks.tag,
            model=job.model.type if job else self._ranks.command,
            state=self._state(),
            generation=self._generation or self._ranks.generation,
            step=self._step,
            max_steps=job.max_steps if job else 0,
            loss=self._loss,
            tokens_per_s=median(tokens / seconds for seconds, tokens in self._recent) if self._recent else None,
            step_time_s=step_s,
            goodput=self._account.at(elapsed_s).goodput,
            elapsed_s=elapsed_s,
            remaining_s=None if step_s is None or self._ended else step_s * remaining,
            redundant=self._redundant,
            fault_threshold=job.fault_threshold if job else 0,
            num_recoveries=self._num_recoveries + self._ranks.num_restarts,
            scaling=self._scaling,
            pipelines=tuple(self._pipelines()),
            nodes=tuple(self._node_view(name, elapsed_s, has_kinds=has_kinds) for name in self._nodes),
            events=tuple(self._events),
            exit_code=self._ended.exit_code if self._ended else None,
            data=self._data.text(has_ended=self._ended is not None),
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
        if self._generation and not self._plan.pipelines:
            return snapshot.RunState.WAITING
        if self._recovering:
            return snapshot.RunState.RECONFIGURING
        return snapshot.RunState.TRAINING if self._step else snapshot.RunState.STARTING

    def _adopt(self, entry: PlanAdopted) -> None:
        before = {key for pipeline in self._plan.pipelines for stage in pipeline.stages for key in _keys(stage)}
        after = {key for pipeline in entry.plan.pipelines for stage in pipeline.stages for key in _keys(stage)}
        self._changing = frozenset(after - before)
        self._plan = entry.plan
        self._generation = entry.generation
        self._redundant = entry.redundant
        training = set(entry.plan.nodes)
        for name, state in self._nodes.items():
            if name in training:
                self._nodes[name] = snapshot.NodeState.TRAINING
            elif name in entry.plan.spares:
                self._nodes[name] = snapshot.NodeState.SPARE
            elif state in (snapshot.NodeState.TRAINING, snapshot.NodeState.SPARE):
                self._nodes[name] = snapshot.NodeState.READY

    def _form(self, entry: ranks.GenerationFormed) -> None:
        """Nodes with ranks take part; others that are there are spares."""
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
        if record.generation == self._generation:
            self._changing = frozenset()

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
        """A stage of a broken pipeline waits for a new plan; a whole pipeline continues during a recovery."""
        if self._nodes.get(_node(stage)) is snapshot.NodeState.LOST:
            return snapshot.WorkState.LOST
        if self._ended is not None:
            return snapshot.WorkState.ENDED
        if not self._step:
            return snapshot.WorkState.STARTING
        return (
            snapshot.WorkState.RECONFIGURING
            if broken or not self._changing.isdisjoint(_keys(stage))
            else snapshot.WorkState.TRAINING
        )

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
        )


def level_of(entry: JournalEntry) -> str:
    """How much an entry should alarm: info, warning or error."""
    match entry:
        case run_entries.Notice():
            return entry.level
        case ShardQuarantined() | run_entries.JournalGap() | ReplicasDiffer():
            return "error"
        case SaveFailed():
            return "warning" if entry.is_our_doing else "error"
        case RecoveryDone():
            return "warning" if entry.unfinished else "info"
        case ranks.GenerationEnded():
            return "warning" if entry.cause.is_failure else "info"
        case (
            node_entries.NodeLost()
            | node_entries.WorkerDown()
            | ranks.RankDown()
            | ranks.RanksHung()
            | run_entries.MasterResumed()
            | HangExplained()
        ):
            return "warning"
        case node_entries.NodeUnfit() | node_entries.TerminationNoticed() | node_entries.ForkServerDown():
            return "warning"
        case node_entries.PaceChanged():
            return "warning" if entry.factor > 1 else "info"
        case RecoveryStarted():
            return "info" if entry.cause.is_planned else "warning"
        case PlanAdopted():
            return "info" if entry.redundant else "warning"
        case run_entries.JobEnded():
            return "info" if entry.exit_code == ExitCode.DONE else "error"
        case _:
            return "info"


def _node(stage: Stage) -> str:
    return stage.worker_ids[0].node


def _keys(stage: Stage) -> list[StageKey]:
    """Of each chunk."""
    return [(_node(stage), chunk.start, chunk.stop) for chunk in stage.chunks]
