"""The results of a run, from its journal alone: one schema for real and for simulated runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from oobleck.json_table import to_json
from oobleck.planner import ExecutionPlan

from .entries import JournalEntry
from .goodput import NodeAccount, NodeHours
from .plan_entries import PlanAdopted, PlanCause, RecoveryDone
from .rank_entries import ScriptStarted, StepsSaved
from .run_entries import JobEnded, JobStarted, JournalGap
from .step_entries import CheckpointSaved, Evaluated, SaveFailed, StepDone, StepsDone
from .tally import LossTally, StepTally

_CALM = frozenset(cause.value for cause in PlanCause if cause.is_calm)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    median: float
    p95: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySummary:
    """One recovery: what was lost, how the plan changed, and what that cost."""

    t_s: float
    """When the loss was noticed."""
    cause: str
    """A `PlanCause`; for a loss, its `LossCause`."""
    nodes: tuple[str, ...]
    action: str
    detect_s: float
    decide_s: float
    transfer_s: float
    stall_s: float
    """Seconds in which no microbatch of a committed step made progress anywhere."""
    bytes_moved: int
    microbatches_redone: int
    unfinished: str = ""
    """Why it was not completed; empty where it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSummary:
    """A step's loss on samples that the model is not trained on."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSummary(NodeHours):
    """Node-hours: what they went into, and what they yielded."""

    per_step: float | None
    """Hours `there` for each committed step; None without any."""
    per_million_tokens: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """Layers [first_layer, stop_layer) on a node's devices: a stage, or one chunk of it."""

    node: str
    devices: tuple[int, ...]
    first_layer: int
    stop_layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSummary:
    num_microbatches: int
    stages: tuple[StageSummary, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """The plan that the run ended with."""

    pipelines: tuple[PipelineSummary, ...]
    spares: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The end of a run in numbers. Steps are optimizer steps; a step run again is counted once."""

    tag: str
    exit_code: int | None
    """None while the run is active."""
    reason: str
    max_steps: int
    steps_committed: int
    samples_committed: int
    steps_lost: int
    """Committed steps that had to be run again."""
    samples_repeated: int
    samples_missing: int
    losses: tuple[float, ...]
    """The loss of each committed step, in order; of a script, of those that the journal has one of. Empty for a
    simulated run."""
    tokens_per_s: float | None
    """Tokens of committed steps over the time from the end of the start to the last commit, losses included."""
    step_time_s: StepTime | None
    goodput: float
    """Share of the elapsed time that went into steps committed for the first time, 0 to 1."""
    downtime_s: Mapping[str, float]
    """Seconds of every other state; with the useful seconds they sum to the elapsed time."""
    elapsed_s: float
    generations: int
    recoveries: tuple[RecoverySummary, ...]
    seed: int
    plan: PlanSummary | None
    evaluations: tuple[EvaluationSummary, ...] = ()
    node_hours: NodeSummary | None = None
    """None for models of other systems, which keep no journal."""
    begun_after: int = 0
    """The step of the checkpoint that the run began from: earlier runs committed the steps up to it."""
    saved_step: int | None = None
    """The step of the newest checkpoint that the run has made, or began from."""
    saves_failed: int = 0
    journal_lacks: str = ""
    """The sentence of the journal's gap; empty where no entry is missing."""

    @property
    def last_step(self) -> int:
        """The newest committed step, of this run or of those that it continues from."""
        return self.begun_after + self.steps_committed

    @property
    def num_recoveries(self) -> int:
        """The recoveries that a fault caused: nodes that join or leave in order do not count."""
        return sum(done.cause not in _CALM for done in self.recoveries)

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    def to_json(self) -> str:
        """Return the summary as indented JSON. A loss that is not finite becomes null."""
        return to_json(self.to_dict(), indent=2)


def summarize(entries: Iterable[JournalEntry]) -> Summary:
    """Sum up a journal, whole or cut off: O(entries)."""
    account, losses = RunAccount(), LossTally()
    for entry in entries:
        account.apply(entry)
        if isinstance(entry, StepDone | StepsDone):
            losses.add(entry)
        elif isinstance(entry, StepsSaved) and entry.loss is not None:
            losses.add_loss(entry.step, entry.loss)
    return account.summary(losses.losses)


@dataclass(slots=True, kw_only=True)
class RunAccount:
    """A journal's summary as it grows, without the losses. Keeps no entry, and nothing of single steps.

    A value on the wire, which lacks `started` and `newest`: set those again.
    """

    started: JobStarted | None = field(default=None, init=False)
    newest: PlanAdopted | None = field(default=None, init=False)
    _nodes: NodeAccount = field(default_factory=NodeAccount)
    _script: str = ""
    _end: JobEnded | None = None
    _tally: StepTally = field(default_factory=StepTally)
    _recoveries: list[RecoverySummary] = field(default_factory=list)
    _evaluations: dict[int, float] = field(default_factory=dict)
    _steps_lost: int = 0
    _saves_failed: int = 0
    _saved_step: int | None = None
    _gap: JournalGap | None = None
    _elapsed_s: float = 0.0

    def apply(self, entry: JournalEntry) -> None:
        self._nodes.apply(entry)
        self._elapsed_s = max(self._elapsed_s, entry.t_s)
        match entry:
            case JobStarted():
                self.started = entry
            case ScriptStarted(run=run):
                self._script = run.tag
            case PlanAdopted():
                self._adopt(entry)
            case Evaluated(loss=float() as loss):
                self._evaluations[entry.step] = loss
            case StepDone() | StepsDone():
                self._tally.add(entry)
            case StepsSaved():
                self._tally.save(entry)
            case RecoveryDone():
                self._recoveries.append(_recovery(entry))
                self._steps_lost += entry.steps_lost
            case CheckpointSaved(step=step):
                self._saved_step = step
            case SaveFailed():
                self._saves_failed += 1
            case JournalGap():
                # A gap that has ended without a loss leaves the journal complete: its entries only came late.
                self._gap = entry if entry.is_open or entry.num_lost else None
            case JobEnded():
                self._end = entry
            case _:
                pass

    def _adopt(self, plan: PlanAdopted) -> None:
        self.newest, restored = plan, plan.restored_step
        if restored is not None:
            self._tally.begin_after(restored)
            self._saved_step = restored
            # Evaluations of steps that were lost are of a model that no longer exists.
            self._evaluations = {step: loss for step, loss in self._evaluations.items() if step <= restored}

    def summary(self, losses: tuple[float, ...] = ()) -> Summary:
        job, end, plan, gap, tally = self.started, self._end, self.newest, self._gap, self._tally
        split = self._nodes.time.at(self._elapsed_s)
        batch = job.job.global_batch_size if job else 0
        training_s = tally.last_s - split.starting_s if tally.last_s is not None else 0.0
        step_time_s = tally.step_time_s()
        hours = self._nodes.at(self._elapsed_s)
        return Summary(
            tag=job.job.tag if job else self._script,
            exit_code=end.exit_code if end else None,
            reason=end.reason if end else "",
            max_steps=job.job.max_steps if job else 0,
            steps_committed=tally.num_steps,
            samples_committed=tally.num_samples,
            # The recovery's count has lost steps that are not run again yet, but its entry may be missing.
            steps_lost=max(self._steps_lost, tally.num_committed_again),
            samples_repeated=tally.samples_repeated,
            samples_missing=tally.samples_missing + batch * tally.num_missing,
            losses=losses,
            tokens_per_s=tally.tokens / training_s if training_s > 0 else None,
            step_time_s=StepTime(median=step_time_s[0], p95=step_time_s[1]) if step_time_s else None,
            goodput=split.goodput,
            downtime_s=split.downtime_s,
            elapsed_s=self._elapsed_s,
            generations=plan.generation if plan else 0,
            recoveries=tuple(self._recoveries),
            seed=job.job.seed if job else 0,
            plan=_plan(plan.plan) if plan else None,
            evaluations=tuple(
                EvaluationSummary(step=step, loss=loss) for step, loss in sorted(self._evaluations.items())
            ),
            node_hours=NodeSummary(
                **asdict(hours),
                per_step=hours.there / tally.num_steps if tally.num_steps else None,
                per_million_tokens=hours.there / tally.tokens * 1e6 if tally.tokens else None,
            ),
            begun_after=tally.begun_after,
            saved_step=self._saved_step,
            saves_failed=self._saves_failed,
            journal_lacks="" if gap is None else gap.sentence,
        )


def _recovery(done: RecoveryDone) -> RecoverySummary:
    return RecoverySummary(
        t_s=done.began_s,
        cause=done.why.value,
        nodes=done.nodes,
        action=done.action.value,
        detect_s=done.detect_s,
        decide_s=done.decide_s,
        transfer_s=done.transfer_s,
        stall_s=done.stall_s,
        bytes_moved=done.bytes_moved,
        microbatches_redone=done.microbatches_redone,
        unfinished=done.unfinished,
    )


def _plan(plan: ExecutionPlan) -> PlanSummary:
    return PlanSummary(
        pipelines=tuple(
            PipelineSummary(
                num_microbatches=pipeline.num_microbatches,
                stages=tuple(
                    StageSummary(
                        node=stage.worker_ids[0].node,
                        devices=tuple(worker_id.device for worker_id in stage.worker_ids),
                        first_layer=layers.start,
                        stop_layer=layers.stop,
                    )
                    for layers, stage in sorted(
                        ((layers, stage) for stage in pipeline.stages for layers in stage.chunks),
                        key=lambda each: each[0].start,
                    )
                ),
            )
            for pipeline in plan.pipelines
        ),
        spares=plan.spares,
    )
