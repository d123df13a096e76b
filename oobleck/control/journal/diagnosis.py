"""Failures explained: what was at fault, how that is known, what was done about it, and what it cost.

Follows the journal's entries and gathers those that belong together into incidents. One failure makes others: when a
node dies, the collectives of its peers fail too. So the root of an incident is the earliest finding that no peer
caused; the others are told after it. Pure.

    finding                 from                                                  caused by a peer
    worker ended            exit code, signal, last line of its traceback         if a collective ended it
    node lost               connection, lease, worker, user                       no
    nobody lost             a collective that failed, a hang                      yes
    a hang explained        the worker that all wait for, the node that is cut    no
    loss                    not a number, or infinite                             no
    a repair                copies of a layer that differ                         no
    notice, master          a termination that is announced; another master       no
    notice                  the fork server of a node has ended                   no
    notice                  a node that its check finds faulty                    no
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from oobleck.control.protocol import UNSEEN_WORDS
from oobleck.exit_codes import ExitCode

from .entries import (
    DIFFERS_WORDS,
    Action,
    Cause,
    HangExplained,
    JobEnded,
    JournalEntry,
    JournalGap,
    MasterResumed,
    NodeLost,
    Notice,
    PaceChanged,
    PlanAdopted,
    RecoveryDone,
    RecoveryStarted,
    SaveFailed,
    ShardQuarantined,
    StepDone,
    WorkerDown,
)

__all__ = [
    "FORK_SERVER_WORDS",
    "LEFT_OUT_WORDS",
    "TERMINATION_WORDS",
    "Diagnosis",
    "Failure",
    "Finding",
    "Incident",
    "diagnose",
    "failure_of_exit",
]

TERMINATION_WORDS = " is to be terminated: "
"""How the notice of a termination is told in the journal, between the node and the reason."""

FORK_SERVER_WORDS = "'s fork server ended: "
"""How the end of the process that forks workers is told, between the node and the reason."""

LEFT_OUT_WORDS = " is faulty and left out: "
"""How the verdict of the check before a run is told, between the node and the reason."""
_UNFIT = re.compile(rf"(\S+)(?:{LEFT_OUT_WORDS}|: it is not taken in again: )(.*)", re.DOTALL)
_BELONGS_TOGETHER_S = 2.0
"""Findings that follow each other this closely are one incident, if no recovery says more."""
_REPEATED_WITHIN_S = 600.0
_REPEATED_TIMES = 3


class Failure(StrEnum):
    """What was at fault; each with the advice that goes with it."""

    USER_EXCEPTION = "user_exception"
    DATA_ERROR = "data_error"
    OUT_OF_MEMORY = "out_of_memory"
    KILLED = "killed"
    CRASHED = "crashed"
    EXITED = "exited"
    FORK_SERVER = "fork_server"
    CONTACT_LOST = "contact_lost"
    FROZEN = "frozen"
    HANG = "hang"
    STUCK = "stuck"
    CUT_OFF = "cut_off"
    PEER = "peer"
    BAD_LOSS = "bad_loss"
    CORRUPTION = "corruption"
    SLOW = "slow"
    UNFIT_NODE = "unfit_node"
    TERMINATION = "termination"
    MASTER_LOST = "master_lost"
    NOT_SAVED = "not_saved"
    JOURNAL_GAP = "journal_gap"
    REQUESTED = "requested"
    JOB_FAILED = "job_failed"


_SUBJECT = {
    Failure.USER_EXCEPTION: "an error in the training code",
    Failure.DATA_ERROR: "data that cannot be used",
    Failure.OUT_OF_MEMORY: "out of memory",
    Failure.KILLED: "a process was killed from outside",
    Failure.CRASHED: "a process crashed",
    Failure.EXITED: "a process ended",
    Failure.FORK_SERVER: "the process that starts workers ended",
    Failure.CONTACT_LOST: "contact was lost",
    Failure.FROZEN: "a node stopped answering",
    Failure.HANG: "training hung",
    Failure.STUCK: "a worker holds the others up",
    Failure.CUT_OFF: "a node does not reach its peers",
    Failure.PEER: "a collective failed",
    Failure.BAD_LOSS: "the loss is not a number",
    Failure.CORRUPTION: "a copy of a layer differed",
    Failure.SLOW: "a node became slow",
    Failure.UNFIT_NODE: "a node cannot take part",
    Failure.TERMINATION: "a node is about to be taken away",
    Failure.MASTER_LOST: "the master was lost",
    Failure.NOT_SAVED: "the state was not saved",
    Failure.JOURNAL_GAP: "the journal could not be written",
    Failure.REQUESTED: "done on request",
    Failure.JOB_FAILED: "the job failed",
}

_ADVICE = {
    Failure.USER_EXCEPTION: "Read the traceback in the agent's log; the same code will fail again.",
    Failure.DATA_ERROR: "Correct data.paths or data.shards, or what they name; it must be the same on every node.",
    Failure.OUT_OF_MEMORY: "Make microbatch_size smaller, or turn activation_checkpointing on.",
    Failure.KILLED: "If nobody killed it, look for the kernel's out-of-memory killer: dmesg -T | grep -i oom.",
    Failure.CRASHED: "A crash in native code: look for a core dump, and compare driver and torch versions.",
    Failure.EXITED: "See the end of the agent's log on that node.",
    Failure.FORK_SERVER: "If nobody killed it, look for the kernel's out-of-memory killer: dmesg -T | grep -i oom.",
    Failure.CONTACT_LOST: "See whether the machine is up and SSH answers.",
    Failure.FROZEN: "See whether the machine swaps, or was suspended.",
    Failure.HANG: "See the stacks in the agents' logs; a hang that comes back is a bug in the training code.",
    Failure.STUCK: "See where its training thread was; a hang that comes back is a bug in the training code.",
    Failure.CUT_OFF: "See the network between it and the others: `oobleck check` names the link or the node.",
    Failure.PEER: "Nothing to do unless it comes back; then check the network with `oobleck check`.",
    Failure.BAD_LOSS: "Lower the learning rate, or begin again from before that step.",
    Failure.SLOW: "Look for other work on it, and for clocks that are throttled: `oobleck check` measures it.",
    Failure.CORRUPTION: "If it comes back, test the machine's memory: the copy was replaced, the cause was not.",
    Failure.UNFIT_NODE: "Do what the evidence says.",
    Failure.TERMINATION: "Nothing to do: the node hands its state over before it goes.",
    Failure.MASTER_LOST: "Nothing to do: training went on meanwhile.",
    Failure.NOT_SAVED: "Make room on that disk, or in its shared memory; the next save is tried by itself.",
    Failure.JOURNAL_GAP: "Make room where the run's directory is: what is kept in memory is written then.",
    Failure.REQUESTED: "Nothing to do.",
    Failure.JOB_FAILED: "See the reason above.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that went wrong."""

    t_s: float
    """When it happened, as far as it is known: a frozen node is noticed late."""
    failure: Failure
    node: str | None
    """None where it is the whole run's."""
    evidence: str
    is_tried_again: bool | None = None
    """Whether the lost node is, without anybody asking for it; None where none was lost."""

    @property
    def is_caused_by_peer(self) -> bool:
        return self.failure in (Failure.PEER, Failure.HANG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A failure with what it led to."""

    number: int
    """From 1, in the order of the journal."""
    root: Finding
    consequences: tuple[Finding, ...]
    """What went wrong besides, in order; most of it because of the root."""
    actions: tuple[str, ...]
    stall_s: float = 0.0
    """Time in which no microbatch of a committed step made progress anywhere."""
    microbatches_redone: int = 0
    steps_lost: int = 0
    bytes_moved: int = 0
    lost: tuple[str, ...] = ()
    """Nodes that the run goes on without."""
    ended_s: float | None = None
    """None while it is under way."""
    is_fatal: bool = False
    """Whether the job ended over it."""
    repeated: int = 1
    """How often this node was at fault within ten minutes."""

    @property
    def title(self) -> str:
        """What was at fault, in a few words."""
        what = _SUBJECT[self.root.failure]
        return f"{self.root.node}: {what}" if self.root.node else what

    @property
    def advice(self) -> str:
        """What a person should do now."""
        if self.repeated >= _REPEATED_TIMES and self.root.node:
            return (
                f"{self.root.node} was at fault {self.repeated} times within ten minutes: look at it with `oobleck "
                f"check`; `oobleck drain {self.root.node}` takes it out if it is still in, `oobleck add` lets it back. "
                f"{_ADVICE[self.root.failure]}"
            )
        return f"{_ADVICE[self.root.failure]}{self._way_back}"

    @property
    def _way_back(self) -> str:
        """How a node that the run goes on without comes back, as a sentence."""
        if self.is_fatal or self.root.is_tried_again is None:
            return ""
        if self.root.is_tried_again:
            return " The node is tried again by itself."
        return f" The node is not tried again: `oobleck add {self.root.node}` lets it back."


def diagnose(entries: Iterable[JournalEntry]) -> tuple[Incident, ...]:
    """The incidents of a journal, whole or cut off, in order: O(entries)."""
    diagnosis = Diagnosis()
    for entry in entries:
        diagnosis.apply(entry)
    return diagnosis.incidents


@dataclass(slots=True)
class _Draft:
    """An incident that is still being put together."""

    number: int
    findings: list[Finding] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    is_recovering: bool = False
    noticed_s: float = 0.0
    """When the newest finding was; a node that froze did so before."""
    stall_s: float = 0.0
    microbatches_redone: int = 0
    steps_lost: int = 0
    bytes_moved: int = 0
    ended_s: float | None = None
    is_fatal: bool = False
    repeated: int = 1

    @property
    def root(self) -> Finding:
        ordered = sorted(self.findings, key=lambda finding: finding.t_s)
        return next((finding for finding in ordered if not finding.is_caused_by_peer), ordered[0])

    def finish(self) -> Incident:
        root = self.root
        return Incident(
            number=self.number,
            root=root,
            consequences=tuple(finding for finding in self.findings if finding is not root),
            actions=tuple(self.actions),
            stall_s=self.stall_s,
            microbatches_redone=self.microbatches_redone,
            steps_lost=self.steps_lost,
            bytes_moved=self.bytes_moved,
            lost=tuple(self.lost),
            ended_s=self.ended_s,
            is_fatal=self.is_fatal,
            repeated=self.repeated,
        )


class Diagnosis:
    """Mutable: follows a journal, entry by entry, in O(1) each."""

    def __init__(self) -> None:
        self._drafts: list[_Draft] = []
        self._open: _Draft | None = None
        self._has_planned = False
        self._has_bad_loss = False
        self._open_gap_s = -1.0
        self._differing = ""
        """What was last said of copies that differ."""
        self._slow: dict[str, str] = {}
        """What was last said of nodes that are slow."""
        self._recent: deque[tuple[float, str]] = deque()  # (when, node) of roots, of the last ten minutes

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """All so far; the last may be under way."""
        return tuple(draft.finish() for draft in self._drafts)

    def apply(self, entry: JournalEntry) -> None:
        """Take the next entry into account; most say nothing of failures."""
        match entry:
            case WorkerDown():
                failure = failure_of_exit(entry.reason)
                self._find(entry.t_s, failure, entry.node, entry.reason)
                self._act(f"the worker of {entry.node} is started again")
            case NodeLost():
                self._lose(entry)
            case PaceChanged(node=node, factor=factor):
                self._slow.pop(node, None)
                if factor > 1:
                    self._slow[node] = entry.describe()
            case RecoveryStarted():
                self._begin_recovery(entry)
            case HangExplained():
                self._explain_hang(entry)
            case PlanAdopted():
                self._adopt(entry)
            case RecoveryDone():
                self._end_recovery(entry)
            case StepDone():
                self._look_at_loss(entry)
            case SaveFailed() if not entry.is_our_doing:
                self._find(entry.t_s, Failure.NOT_SAVED, None, entry.describe())
                self._act("training goes on")
            case JournalGap():
                self._find_gap(entry)
            case ShardQuarantined():
                self._find(entry.t_s, Failure.DATA_ERROR, None, f"{entry.shard}: {entry.problem}")
                self._act(f"the run goes on without {entry.shard}, from record position {entry.position} on")
            case MasterResumed():
                self._settle()
                self._find(entry.t_s - entry.away_s, Failure.MASTER_LOST, None, entry.describe())
                self._act("another master took the run over")
                self._close(entry.t_s)
            case Notice() if TERMINATION_WORDS in entry.text:
                node, _, reason = entry.text.partition(TERMINATION_WORDS)
                self._find(entry.t_s, Failure.TERMINATION, node, reason)
            case Notice() if FORK_SERVER_WORDS in entry.text:
                node, _, reason = entry.text.partition(FORK_SERVER_WORDS)
                self._find(entry.t_s, Failure.FORK_SERVER, node, reason)
                self._act("workers that live train on; the fork server is started again")
            case Notice() if DIFFERS_WORDS in entry.text:
                self._differing = entry.text
            case Notice() if (found := _UNFIT.fullmatch(entry.text)) is not None:
                self._find(
                    entry.t_s, Failure.UNFIT_NODE, found[1], found[2], is_tried_again=LEFT_OUT_WORDS not in entry.text
                )
                self._act(f"the run goes on without {found[1]}")
            case JobEnded():
                self._end(entry)
            case _:
                pass

    # --- what entries say ----------------------------------------------------------------------------------------

    def _find_gap(self, entry: JournalGap) -> None:
        """One that is over has begun before, and is another incident only where nothing could say so then."""
        if entry.is_open:
            self._open_gap_s = entry.since_s
        if entry.is_open or self._open_gap_s != entry.since_s or entry.num_lost:
            self._find(entry.t_s, Failure.JOURNAL_GAP, None, entry.describe())

    def _lose(self, entry: NodeLost) -> None:
        failure, began_s = Failure.CONTACT_LOST, entry.t_s
        match entry.cause:
            case Cause.WORKER_EXITED:
                failure = failure_of_exit(entry.evidence)
            case Cause.LEASE_EXPIRED:
                failure, began_s = Failure.FROZEN, entry.t_s - _silence_s(entry.evidence)
            case _ if entry.is_requested:
                failure = Failure.REQUESTED
            case Cause.USER:
                failure = Failure.REQUESTED
            case Cause.UNREACHABLE | Cause.UNFIT:
                failure = Failure.UNFIT_NODE
            case Cause.CUT_OFF:
                failure = Failure.CUT_OFF
            case _:
                pass
        self._find(
            began_s,
            failure,
            entry.node,
            entry.evidence,
            noticed_s=entry.t_s,
            is_tried_again=entry.is_tried_again if self._has_planned else None,
        )
        assert self._open is not None
        self._open.lost.append(entry.node)
        if self._has_planned:
            self._act(f"the run goes on without {entry.node}")

    def _begin_recovery(self, entry: RecoveryStarted) -> None:
        slow = [node for node in entry.nodes if node in self._slow] if entry.cause is Cause.SLOW else []
        if entry.cause.is_planned and not slow:
            return
        if self._open is None and self._drafts and self._drafts[-1].ended_s == entry.t_s:
            self._open = self._drafts[-1]  # the recovery of one loss was overtaken by this one
            self._open.ended_s = None
        match entry.cause:
            case Cause.PEER_FAILED:
                self._find(entry.t_s, Failure.PEER, None, "a collective failed, and no node was lost")
            case Cause.DATA_UNREADABLE:
                self._find(entry.t_s, Failure.DATA_ERROR, None, "a record of the step in flight could not be read")
            case Cause.HANG:
                self._find(entry.t_s, Failure.HANG, None, "no step was committed for many times as long as one takes")
            case Cause.CORRUPTION:
                for node in entry.nodes:
                    self._find(entry.t_s, Failure.CORRUPTION, node, self._differing)
            case Cause.SLOW:
                for node in slow:
                    self._find(entry.t_s, Failure.SLOW, node, self._slow[node])
            case _:
                pass
        if self._open is not None:
            self._open.is_recovering = True

    def _explain_hang(self, entry: HangExplained) -> None:
        for node in entry.cut_off:
            self._find(entry.t_s, Failure.CUT_OFF, node, entry.describe())
        stacks = dict(entry.stacks)
        for worker_id in entry.stuck:
            evidence = f"all wait for {worker_id}, and it waits for nobody\n{stacks.get(worker_id, '')}".strip()
            self._find(entry.t_s, Failure.STUCK, worker_id.node, evidence)

    def _adopt(self, entry: PlanAdopted) -> None:
        self._has_planned = True
        if self._open is not None and self._open.is_recovering and entry.action is not Action.START:
            self._act(entry.reason)

    def _end_recovery(self, entry: RecoveryDone) -> None:
        draft = self._open
        if draft is None or not draft.is_recovering:
            return
        draft.stall_s += entry.stall_s
        draft.microbatches_redone += entry.microbatches_redone
        draft.steps_lost += entry.steps_lost
        draft.bytes_moved += entry.bytes_moved
        self._close(entry.t_s)

    def _look_at_loss(self, entry: StepDone) -> None:
        self._settle(entry.t_s)
        is_bad = not math.isfinite(entry.record.loss)
        if is_bad and not self._has_bad_loss:
            evidence = f"step {entry.record.step} was committed with a loss of {entry.record.loss}"
            self._find(entry.t_s, Failure.BAD_LOSS, None, evidence)
            self._act("none: training goes on")
            if self._open is not None and not self._open.is_recovering:
                self._close(entry.t_s)
        self._has_bad_loss = is_bad

    def _end(self, entry: JobEnded) -> None:
        if entry.exit_code in _NO_FAILURES:
            self._settle()
            self._close(entry.t_s)
            return
        if self._open is None:
            failure = failure_of_exit(entry.reason) if "said:\n" in entry.reason else Failure.JOB_FAILED
            self._find(entry.t_s, failure, None, entry.reason)
        self._act(f"the job ended: {entry.reason.splitlines()[0]}")
        assert self._open is not None
        self._open.is_fatal = True
        self._close(entry.t_s)

    # --- putting incidents together ------------------------------------------------------------------------------

    def _find(
        self,
        t_s: float,
        failure: Failure,
        node: str | None,
        evidence: str,
        *,
        noticed_s: float | None = None,
        is_tried_again: bool | None = None,
    ) -> None:
        noticed_s = t_s if noticed_s is None else noticed_s
        self._settle(noticed_s)
        if self._open is None:
            self._open = _Draft(number=len(self._drafts) + 1)
            self._drafts.append(self._open)
        self._open.noticed_s = noticed_s
        self._open.findings.append(
            Finding(t_s=max(0.0, t_s), failure=failure, node=node, evidence=evidence, is_tried_again=is_tried_again)
        )

    def _act(self, action: str) -> None:
        if self._open is not None and action not in self._open.actions:
            self._open.actions.append(action)

    def _settle(self, now_s: float = math.inf) -> None:
        """Close an incident that no recovery followed: it was no part of training."""
        draft = self._open
        if draft is None or draft.is_recovering:
            return
        if now_s - draft.noticed_s > _BELONGS_TOGETHER_S:
            self._close(draft.noticed_s)

    def _close(self, now_s: float) -> None:
        draft = self._open
        if draft is None:
            return
        draft.ended_s = now_s
        draft.is_recovering = False
        self._open = None
        if draft.root.node is not None and draft.root.failure is not Failure.REQUESTED:
            self._recent.append((draft.root.t_s, draft.root.node))
            while self._recent[0][0] < draft.root.t_s - _REPEATED_WITHIN_S:
                self._recent.popleft()
            draft.repeated = sum(node == draft.root.node for _, node in self._recent)


_NO_FAILURES = frozenset({ExitCode.DONE, ExitCode.INTERRUPTED, ExitCode.TERMINATED})
"""Exit codes of runs that ended as they were asked to."""

_MEMORY = re.compile(r"OutOfMemoryError|MemoryError|out of memory|can't allocate memory|Cannot allocate memory", re.I)
_PEERS = re.compile(r"PeerLost|Connection closed by peer|gloo|nccl|Connection reset by peer", re.I)
_DATA = re.compile(r"\bdata\.(paths|shards|sequence_length|vocab_size|max_bytes)\b|text file|tokenizer", re.I)
_SIGNAL = re.compile(r"killed by signal (\d+)")
_EXIT = re.compile(r"exit code -?\d+")
_SILENCE = re.compile(r"for ([\d.]+) s")
_CRASHES = frozenset({4, 6, 7, 8, 11})
"""SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV: what a process brings upon itself."""


def failure_of_exit(reason: str) -> Failure:
    """What ended a process, by the words that the agent found for it; of a traceback the last line counts."""
    lines = reason.strip().splitlines()
    last = lines[-1] if lines else ""
    if (signal := _SIGNAL.search(last)) is not None:
        return Failure.CRASHED if int(signal[1]) in _CRASHES else Failure.KILLED
    if UNSEEN_WORDS in last:
        return Failure.EXITED
    if _MEMORY.search(last):
        return Failure.OUT_OF_MEMORY
    if _PEERS.search(last):
        return Failure.PEER
    if _EXIT.search(last):
        return Failure.EXITED
    return Failure.DATA_ERROR if _DATA.search(last) else Failure.USER_EXCEPTION


def _silence_s(evidence: str) -> float:
    found = _SILENCE.search(evidence)
    return float(found[1]) if found else 0.0
