"""Journal entries: everything that the master sees and decides, in order.

The dashboard renders them, the summary is computed from them, a restarted master recovers from them, and a
test replays them. `t_s` counts seconds since the run started, on the master's clock. What a decision needs is a field;
`sentences` says every entry as one plain sentence.
"""

from __future__ import annotations

from . import node_entries, run_entries
from .plan_entries import HangExplained, LayersArriving, PlanAdopted, RecoveryDone, RecoveryStarted
from .ranks import GenerationEnded, GenerationFormed, GenerationRuns, RankDown, RanksHung, ScriptStarted
from .state_entries import CheckpointSaved, DataPlaced, RecordsDealt, SaveFailed, ShardQuarantined, ShardsKnown
from .step_entries import Evaluated, ReplicasDiffer, StepDone, StepRunsLong, StepsDone

JournalEntry = (
    run_entries.JobStarted
    | run_entries.MasterResumed
    | run_entries.ProfileKnown
    | node_entries.NodeConnected
    | node_entries.WorkerUp
    | node_entries.WorkerDown
    | node_entries.NodeLost
    | node_entries.NodeUnfit
    | node_entries.TerminationNoticed
    | node_entries.ForkServerDown
    | node_entries.NodeLeft
    | node_entries.NodeAdded
    | node_entries.PaceChanged
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
    | run_entries.ScalingDecided
    | CheckpointSaved
    | SaveFailed
    | run_entries.JournalGap
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
    | run_entries.Notice
    | run_entries.JobEnded
)
