"""Explains failures: gathers the journal's entries that belong together into incidents. Pure.

One failure causes others: when a node dies, the collectives of its peers fail too. So the root of an incident is the
earliest finding that no peer caused; the others follow from it.

    entry                             finding                                       caused by a peer
    WorkerDown                        by how the worker ended                       if a collective ended it
    RankDown                          by how the rank ended                         if another failed before it
    RanksHung                         the rank that all wait for                    no, where one stands out
    NodeLost                          by why it was lost                            the same
    RecoveryStarted                   a failed collective, a hang: no node lost     yes
    HangExplained                     the worker that all wait for, a node cut off  no
    RecoveryStarted, PaceChanged      a slow node, once it is planned for           no
    RecoveryStarted, ReplicasDiffer   a copy of a layer that differs                no
    StepDone                          a loss that is not a number, or infinite      no
    TerminationNoticed, NodeUnfit,    as they say                                   no
    ForkServerDown, MasterResumed,
    SaveFailed, StateUnwritten,
    JournalGap, ShardQuarantined
    JobEnded                          an end that nothing else explains             if a collective did it
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from oobleck.errors import ExitCode
from oobleck.planner import WorkerId

from . import node_entries, rank_entries
from .entries import JournalEntry
from .entry import Entry
from .failures import Failure, failure_of_end
from .incidents import Finding, Incident, Measure, Response
from .losses import Silent
from .plan_entries import Action, HangExplained, PlanAdopted, PlanCause, RecoveryDone, RecoveryStarted
from .run_entries import JobEnded, JobStarted, JournalGap, MasterResumed
from .step_entries import ReplicasDiffer, SaveFailed, ShardQuarantined, StepDone

_BELONGS_TOGETHER_S = 2.0
"""Without a recovery, findings this close to each other are one incident."""
_REPEATED_WITHIN_S = 600.0
_FAILURE_OF_CAUSE = {
    PlanCause.PEER_FAILED: Failure.PEER,
    PlanCause.DATA_UNREADABLE: Failure.DATA_ERROR,
    PlanCause.HANG: Failure.HANG,
}
"""What only the start of a recovery shows. Entries of their own show other causes, and some are no failures."""
_NO_FAILURES = frozenset({ExitCode.DONE, ExitCode.INTERRUPTED, ExitCode.TERMINATED})
"""The exit codes of runs that ended as the user wanted."""


def diagnose(entries: Iterable[JournalEntry]) -> tuple[Incident, ...]:
    """Return the incidents of a journal, whole or cut off, in order: O(entries)."""
    diagnosis = Diagnosis()
    for entry in entries:
        diagnosis.apply(entry)
    return diagnosis.incidents


class Diagnosis:
    """Follows a journal, entry by entry, in O(1) each."""

    def __init__(self) -> None:
        self._incidents: list[Incident] = []
        self._open: Incident | None = None
        self._is_recovering = False
        """Whether the run recovers from the open incident."""
        self._noticed_s = 0.0
        """When its newest finding was noticed; a node that froze did so before."""
        self._has_planned = False
        self._has_bad_loss = False
        self._open_gap_s = -1.0
        self._differing: dict[str, ReplicasDiffer] = {}
        self._slow: dict[str, node_entries.PaceChanged] = {}
        self._origins: dict[str, str] = {}
        self._recent: deque[tuple[float, str]] = deque()  # (when, node) of roots, of the last ten minutes

    @property
    def incidents(self) -> tuple[Incident, ...]:
        # Copies, because an incident that is under way changes with the next entries.
        return tuple(replace(incident) for incident in self._incidents)

    def apply(self, entry: JournalEntry) -> None:
        match entry:
            case JobStarted(nodes=nodes) | rank_entries.ScriptStarted(nodes=nodes):
                self._origins = {node.name: node.origin for node in nodes}
            case node_entries.NodeAdded(node=node):
                self._origins[node.name] = node.origin
            case node_entries.WorkerDown():
                self._find(failure_of_end(entry.end), entry, entry.node)
                self._respond(Measure.WORKER_RESTARTED, entry.node)
            case node_entries.NodeLost():
                self._lose(entry)
            case node_entries.NodeUnfit():
                self._find(Failure.UNFIT_NODE, entry, entry.node, is_tried_again=entry.is_tried_again)
                self._respond(Measure.NODE_LEFT_OUT, entry.node)
            case node_entries.TerminationNoticed():
                self._find(Failure.TERMINATION, entry, entry.node)
            case node_entries.ForkServerDown():
                self._find(Failure.FORK_SERVER, entry, entry.node)
                self._respond(Measure.FORK_SERVER_RESTARTED if entry.is_restarted else Measure.WORKERS_KEPT)
            case node_entries.PaceChanged(node=node, factor=factor):
                self._slow.pop(node, None)
                if factor > 1:
                    self._slow[node] = entry
            case ReplicasDiffer():
                self._differing.update((worker_id.node, entry) for worker_id in entry.odd)
            case RecoveryStarted():
                self._begin_recovery(entry)
            case HangExplained(cut_off=cut_off, stuck=stuck):
                for name in cut_off:
                    self._find(Failure.CUT_OFF, entry, name)
                for worker_id in stuck:
                    self._find(Failure.STUCK, entry, worker_id.node, worker_id=worker_id)
            case PlanAdopted():
                self._has_planned = True
                if self._is_recovering and entry.action is not Action.START:
                    self._respond(Measure.PLAN_CHANGED, reason=entry.reason)
            case RecoveryDone():
                self._end_recovery(entry)
            case rank_entries.RankDown():
                self._find_rank(entry)
            case rank_entries.RanksHung(culprits=culprits):
                self._find(Failure.STUCK if culprits else Failure.HANG, entry, *(each.node for each in culprits[:1]))
            case rank_entries.StepRecomputed():
                suspects: tuple[str | None, ...] = entry.nodes if entry.is_sure else (None,)
                for suspect in suspects:
                    self._find(Failure.WRONG_STEP, entry, suspect)
                self._respond(Measure.TRAINING_CONTINUED)
                if not self._is_recovering:
                    self._close(entry.t_s)
            case rank_entries.GenerationEnded():
                self._is_recovering = self._open is not None
            case rank_entries.GenerationFormed():
                self._has_planned = True
                if self._is_recovering:
                    self._respond(Measure.RANKS_RESTARTED, reason=entry.sentence)
            case rank_entries.GenerationRuns():
                if self._open is not None and self._is_recovering:
                    self._open.stall_s += entry.away_s
                    self._close(entry.t_s)
            case StepDone():
                self._look_at_loss(entry)
            # A save that a loss broke is no failure of its own.
            case SaveFailed(is_our_doing=False) | rank_entries.StateUnwritten():
                place = entry.node if isinstance(entry, rank_entries.StateUnwritten) else None
                self._find(Failure.NOT_SAVED, entry, place)
                self._respond(Measure.TRAINING_CONTINUED)
            case JournalGap():
                self._find_gap(entry)
            case ShardQuarantined():
                self._find(Failure.DATA_ERROR, entry)
                self._respond(Measure.SHARD_LEFT_OUT, entry.shard, position=entry.position)
            case MasterResumed():
                self._settle()
                self._find(Failure.MASTER_LOST, entry, began_s=entry.t_s - entry.away_s)
                self._respond(Measure.MASTER_REPLACED)
                self._close(entry.t_s)
            case JobEnded():
                self._end(entry)
            case _:
                pass

    # --- what entries say ----------------------------------------------------------------------------------------

    def _find_gap(self, entry: JournalGap) -> None:
        if entry.is_open:
            self._open_gap_s = entry.since_s
        # The end of a gap is an incident of its own only if its beginning could not be written, or entries are lost.
        if entry.is_open or self._open_gap_s != entry.since_s or entry.num_lost:
            self._find(Failure.JOURNAL_GAP, entry)

    def _lose(self, entry: node_entries.NodeLost) -> None:
        self._find(
            entry.failure,
            entry,
            entry.node,
            began_s=entry.t_s - entry.loss.silent_s if isinstance(entry.loss, Silent) else entry.t_s,
            is_tried_again=entry.is_tried_again if self._has_planned else None,
        )
        assert self._open is not None
        self._open.lost += (entry.node,)
        if self._has_planned:
            self._respond(Measure.NODE_LEFT_OUT, entry.node)

    def _begin_recovery(self, entry: RecoveryStarted) -> None:
        slow = [node for node in entry.nodes if node in self._slow] if entry.cause is PlanCause.SLOW else []
        # Plans for nodes that join, leave or are fast again show no failure.
        if entry.cause.is_planned and not slow:
            return
        if self._open is None and self._incidents and self._incidents[-1].ended_s == entry.t_s:
            # This recovery has overtaken one that ended at the same moment: both losses are one incident.
            self._open = self._incidents[-1]
            self._open.ended_s = None
        if (failure := _FAILURE_OF_CAUSE.get(entry.cause)) is not None:
            self._find(failure, entry)
        if entry.cause is PlanCause.CORRUPTION:
            for node in entry.nodes:
                self._find(Failure.CORRUPTION, self._differing.get(node, entry), node, began_s=entry.t_s)
        for node in slow:
            self._find(Failure.SLOW, self._slow[node], node, began_s=entry.t_s)
        self._is_recovering = self._open is not None

    def _end_recovery(self, entry: RecoveryDone) -> None:
        incident = self._open
        if incident is None or not self._is_recovering:
            return
        incident.stall_s += entry.stall_s
        incident.microbatches_redone += entry.microbatches_redone
        incident.steps_lost += entry.steps_lost
        incident.bytes_moved += entry.bytes_moved
        self._close(entry.t_s)

    def _find_rank(self, entry: rank_entries.RankDown) -> None:
        failure = failure_of_end(entry.end)
        # The exit code of an uncaught exception says less than the exception.
        if entry.error is not None and entry.error.is_exception:
            failure = Failure.BAD_LOSS if entry.error.bad is not None else Failure.USER_EXCEPTION
        self._find(failure if entry.is_first else Failure.PEER, entry, entry.node)

    def _look_at_loss(self, entry: StepDone) -> None:
        self._settle(entry.t_s)
        is_bad = not math.isfinite(entry.record.loss)
        # A loss that stays bad is one finding, and not one for each step.
        if is_bad and not self._has_bad_loss:
            self._find(Failure.BAD_LOSS, entry)
            self._respond(Measure.NOTHING)
            if not self._is_recovering:
                self._close(entry.t_s)
        self._has_bad_loss = is_bad

    def _end(self, entry: JobEnded) -> None:
        if entry.exit_code in _NO_FAILURES:
            self._settle()
            self._close(entry.t_s)
            return
        if self._open is None:
            self._find(Failure.JOB_FAILED if entry.error is None else failure_of_end(entry.error.end), entry)
        self._respond(Measure.JOB_ENDED, reason=entry.reason)
        assert self._open is not None
        self._open.is_fatal = True
        self._close(entry.t_s)

    # --- putting incidents together ------------------------------------------------------------------------------

    def _find(
        self,
        failure: Failure,
        evidence: Entry,
        node: str | None = None,
        *,
        worker_id: WorkerId | None = None,
        began_s: float | None = None,
        is_tried_again: bool | None = None,
    ) -> None:
        """Add what the evidence shows; `began_s` if it began before the entry."""
        noticed_s = max(evidence.t_s, evidence.t_s if began_s is None else began_s)
        self._settle(noticed_s)
        if self._open is None:
            self._open = Incident(number=len(self._incidents) + 1)
            self._incidents.append(self._open)
        self._noticed_s = noticed_s
        finding = Finding(
            t_s=max(0.0, evidence.t_s if began_s is None else began_s),
            failure=failure,
            node=node,
            origin=self._origins.get(node or "", ""),
            evidence=evidence,
            worker_id=worker_id,
            is_tried_again=is_tried_again,
        )
        self._open.findings += (finding,)

    def _respond(self, measure: Measure, subject: str = "", *, position: int = 0, reason: str = "") -> None:
        response = Response(measure=measure, subject=subject, position=position, reason=reason)
        if self._open is not None and response not in self._open.responses:
            self._open.responses += (response,)

    def _settle(self, now_s: float = math.inf) -> None:
        """Close an incident that no recovery followed."""
        if not self._is_recovering and now_s - self._noticed_s > _BELONGS_TOGETHER_S:
            self._close(self._noticed_s)

    def _close(self, now_s: float) -> None:
        incident, self._open, self._is_recovering = self._open, None, False
        if incident is None:
            return
        incident.ended_s = now_s
        root = incident.root
        # What the user asks for does not make a node suspicious.
        if root.node is not None and root.failure is not Failure.REQUESTED:
            self._recent.append((root.t_s, root.node))
            while self._recent[0][0] < root.t_s - _REPEATED_WITHIN_S:
                self._recent.popleft()
            incident.repeated = sum(node == root.node for _, node in self._recent)
