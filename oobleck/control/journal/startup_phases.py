"""What a run does from its start to its first step. Decides nothing. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from oobleck.planner.formatting import counted

from .entries import JournalEntry
from .entry import Worded
from .node_entries import NodeConnected, WorkerUp
from .plan_entries import PipelinesFormed, PlanAdopted
from .rank_entries import GenerationFormed, GenerationRuns, ScriptStarted
from .run_entries import JobEnded, JobStarted, MasterResumed, Measured, MeasurementBegun, ProfileKnown
from .snapshot import PhaseView
from .step_entries import StepDone


class Phase(Worded):
    """In the order in which a run passes through them; it may leave some out."""

    CONNECTING = "connecting", "connecting to {nodes}"
    IMPORTING = "importing", "importing torch and the model on {nodes}"
    LOOKING = "looking", "looking for what earlier runs have measured and saved"
    MEASURING = "measuring", "measuring what the model's layers cost"
    TIMING = "timing", "timing links between {nodes}"
    PLANNING = "planning", "planning for {nodes}"
    FORMING = "forming", "forming pipelines on {nodes}"
    FIRST_STEP = "first_step", "computing the first step of {steps:,}"
    STARTING_RANKS = "starting_ranks", "starting {ranks}"


@dataclass(slots=True, kw_only=True)
class StartupPhases:
    """Follows a journal up to the run's first step, or a script's first ranks. O(1) an entry. A value on the wire."""

    phase: Phase | None = None
    _since_s: float = 0.0
    _num_nodes: int = 0
    _num_workers: int = 0
    _num_steps: int = 0
    _connected: set[str] = field(default_factory=set)
    _ready: set[tuple[str, int]] = field(default_factory=set)
    _measured: Measured | None = None
    """What was begun to be measured last."""
    _runs_ranks: bool = False

    def apply(self, entry: JournalEntry) -> None:
        match entry:
            case JobStarted() | ScriptStarted():
                self._num_nodes = len(entry.nodes)
                if isinstance(entry, JobStarted):
                    self._num_workers = sum(spec.num_devices for spec in entry.nodes)
                    self._num_steps = entry.job.max_steps
                else:
                    self._runs_ranks = True
                self._enter(Phase.CONNECTING, entry.t_s)
                return
            case _ if self.phase is None:
                return
            case NodeConnected(node=node):
                self._connected.add(node)
            case WorkerUp(node=node, device=device):
                self._ready.add((node, device))
            case MeasurementBegun(what=what):
                self._measured = what
            case ProfileKnown():
                self._enter(Phase.PLANNING, entry.t_s)
            case PlanAdopted():
                self._num_nodes = len(entry.plan.nodes)
                self._enter(Phase.FORMING, entry.t_s)
            case PipelinesFormed():
                self._enter(Phase.FIRST_STEP, entry.t_s)
            case GenerationFormed():
                self._num_workers = entry.world_size
                self._enter(Phase.STARTING_RANKS, entry.t_s)
            # A recovery of what has begun is none of its phases: what is lost before is the end of the run.
            case StepDone() | GenerationRuns() | MasterResumed() | JobEnded():
                self.phase = None
            case _:
                pass
        if self.phase is not None and not self._runs_ranks:
            self._enter(max(self.phase, self._prepared(), key=list(Phase).index), entry.t_s)

    def at(self, now_s: float) -> PhaseView | None:
        """Return the phase after `now_s` seconds of the run; None from its first step on."""
        phase = self.phase
        if phase is None:
            return None
        done, of = {
            Phase.CONNECTING: (len(self._connected), self._num_nodes),
            Phase.IMPORTING: (len(self._ready), self._num_workers),
        }.get(phase, (0, 0))
        return PhaseView(
            name=phase.value,
            text=phase.template.format(
                nodes=counted(self._num_nodes, "node"),
                ranks=counted(self._num_workers, "rank"),
                steps=self._num_steps,
            ),
            num_done=done,
            num_all=of,
            elapsed_s=max(0.0, now_s - self._since_s),
        )

    def _prepared(self) -> Phase:
        """Return how far the preparation is, as far as nodes and workers show it."""
        if len(self._connected) < self._num_nodes:
            return Phase.CONNECTING
        if len(self._ready) < self._num_workers:
            return Phase.IMPORTING
        match self._measured:
            case Measured.LAYERS:
                return Phase.MEASURING
            case Measured.LINKS:
                return Phase.TIMING
        return Phase.LOOKING

    def _enter(self, phase: Phase, now_s: float) -> None:
        if phase is not self.phase:
            self.phase, self._since_s = phase, now_s
