"""Journal entries: everything that the master sees and decides, in order.

The dashboard renders them, the summary is computed from them, a restarted master recovers from them, and a
test replays them. `t_s` counts seconds since the run started, on the master's clock. What a decision needs is a field;
`sentences` says every entry as one plain sentence.
"""

from __future__ import annotations

from .node_entries import (
    ForkServerDown,
    NodeAdded,
    NodeConnected,
    NodeLeft,
    NodeLost,
    NodeUnfit,
    PaceChanged,
    TerminationNoticed,
    WorkerDown,
    WorkerUp,
)
from .plan_entries import HangExplained, LayersArriving, PlanAdopted, RecoveryDone, RecoveryStarted
from .ranks import GenerationEnded, GenerationFormed, GenerationRuns, RankDown, RanksHung, ScriptStarted
from .run_entries import JobEnded, JobStarted, JournalGap, MasterResumed, Notice, ProfileKnown, ScalingDecided
from .state_entries import CheckpointSaved, DataPlaced, RecordsDealt, SaveFailed, ShardQuarantined, ShardsKnown
from .step_entries import Evaluated, ReplicasDiffer, StepDone, StepRunsLong, StepsDone

JournalEntry = (
    JobStarted
    | MasterResumed
    | ProfileKnown
    | NodeConnected
    | WorkerUp
    | WorkerDown
    | NodeLost
    | NodeUnfit
    | TerminationNoticed
    | ForkServerDown
    | NodeLeft
    | NodeAdded
    | PaceChanged
    | PlanAdopted
    | HangExplained
    | RecoveryStarted
    | LayersArriving
    | RecoveryDone
    | StepDone
    | StepRunsLong
    | StepsDone
    | Evaluated
    | ReplicasDiffer
    | ScalingDecided
    | CheckpointSaved
    | SaveFailed
    | JournalGap
    | ShardsKnown
    | DataPlaced
    | RecordsDealt
    | ShardQuarantined
    | ScriptStarted
    | GenerationFormed
    | GenerationRuns
    | RankDown
    | RanksHung
    | GenerationEnded
    | Notice
    | JobEnded
)
