"""Incidents as sentences for people: what was at fault, how that is known, what was done, and what to do."""

from __future__ import annotations

from typing import assert_never

from oobleck.control.protocol import Raised, end_text

from .failures import Failure, Remedy
from .incidents import Finding, Incident, Measure, Response
from .losses import WorkerEnded
from .node_entries import ForkServerDown, NodeLost, NodeUnfit, PaceChanged, TerminationNoticed, WorkerDown
from .plan_entries import HangExplained, PlanCause, RecoveryStarted
from .ranks import RankDown, RanksHung
from .run_entries import JobEnded, JournalGap, MasterResumed
from .sentences import fork_server_text, hang_text, loss_text, rank_end_text, sentence
from .state_entries import SaveFailed, ShardQuarantined
from .step_entries import ReplicasDiffer, StepDone

_FAILURES = {
    Failure.USER_EXCEPTION: "an error in the training code",
    Failure.JOB_ERROR: "the job cannot be run as it is",
    Failure.DATA_ERROR: "data that cannot be used",
    Failure.OUT_OF_MEMORY: "out of memory",
    Failure.DEVICE: "a device failed",
    Failure.KILLED: "a process was killed from outside",
    Failure.CRASHED: "a process crashed",
    Failure.EXITED: "a process ended",
    Failure.FORK_SERVER: "the process that starts workers ended",
    Failure.NO_WORKER: "no worker can be started",
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
    Failure.REQUESTED: "taken out on request",
    Failure.JOB_FAILED: "the job failed",
}

_REMEDIES = {
    Remedy.NOTHING: "Nothing to do.",
    Remedy.NOTHING_HANDED_OVER: "Nothing to do: the node hands its state over before it goes.",
    Remedy.NOTHING_CONTINUED: "Nothing to do: training continued meanwhile.",
    Remedy.READ_TRACEBACK: "Read the traceback in the agent's log; the same code will fail again.",
    Remedy.READ_LOG: "See the end of the agent's log on that node.",
    Remedy.READ_STACKS: "See the stacks in the agents' logs; a hang that comes back is a bug in the training code.",
    Remedy.READ_STACK: "See where its training thread was; a hang that comes back is a bug in the training code.",
    Remedy.READ_REASON: "See the reason above.",
    Remedy.CORRECT_JOB: "Change the job as the message says; it must be the same on every node.",
    Remedy.CORRECT_DATA: "Correct data.paths or data.shards, or what they name; it must be the same on every node.",
    Remedy.USE_LESS_MEMORY: "Make microbatch_size smaller, or turn activation_checkpointing on.",
    Remedy.LOOK_AT_DEVICE: (
        "Look for the GPU's own error on that node: dmesg -T | grep -i xid. A device-side assert is a mistake in the "
        "model or its data: CUDA_LAUNCH_BLOCKING=1 names the line."
    ),
    Remedy.LOWER_LEARNING_RATE: "Lower the learning rate, or begin again from before that step.",
    Remedy.LOOK_FOR_OOM_KILLER: (
        "If nobody killed it, look for the kernel's out-of-memory killer: dmesg -T | grep -i oom."
    ),
    Remedy.LOOK_FOR_CORE_DUMP: "A crash in native code: look for a core dump, and compare driver and torch versions.",
    Remedy.REACH_MACHINE: "See whether the machine is up and SSH answers.",
    Remedy.LOOK_AT_LOAD: "See whether the machine swaps, or was suspended.",
    Remedy.CHECK_SPEED: "Look for other work on it, and for clocks that are throttled: `oobleck check` measures it.",
    Remedy.CHECK_NETWORK: "See the network between it and the others: `oobleck check` names the link or the node.",
    Remedy.CHECK_IF_REPEATED: "Nothing to do unless it comes back; then check the network with `oobleck check`.",
    Remedy.CHECK_REPEATED_NODE: (
        "{node} was at fault {repeated} times within ten minutes: look at it with `oobleck check`; "
        "`oobleck drain {node}` takes it out if it is still in, `oobleck add` brings it back."
    ),
    Remedy.TEST_MEMORY: "If it comes back, test the machine's memory: the copy was replaced, the cause was not.",
    Remedy.REPAIR_NODE: "Repair the node: the evidence says what is wrong with it.",
    Remedy.MAKE_ROOM: "Make room on that disk, or in its shared memory; the next save is tried automatically.",
    Remedy.MAKE_ROOM_FOR_JOURNAL: "Make room where the run's directory is: what is kept in memory is written then.",
    Remedy.IS_TRIED_AGAIN: "The node is tried again automatically.",
    Remedy.ADD_NODE: "The node is not tried again: `oobleck add {node}` brings it back.",
}


def title(incident: Incident) -> str:
    """What was at fault, in a few words."""
    what = failure_text(incident.root.failure)
    return f"{incident.root.node}: {what}" if incident.root.node else what


def failure_text(failure: Failure) -> str:
    """A failure in a few words."""
    return _FAILURES[failure]


def advice(incident: Incident) -> str:
    """What a person should do now."""
    node, repeated = incident.root.node or "", incident.repeated
    return " ".join(remedy_text(remedy, node=node, repeated=repeated) for remedy in incident.remedies)


def remedy_text(remedy: Remedy, *, node: str, repeated: int) -> str:
    """A remedy as a sentence; of a node that was at fault `repeated` times."""
    return _REMEDIES[remedy].format(node=node, repeated=repeated)


def response_text(response: Response) -> str:
    """What was done, as a sentence."""
    subject = response.subject
    match response.measure:
        case Measure.WORKER_RESTARTED:
            return f"the worker of {subject} is started again"
        case Measure.NODE_LEFT_OUT:
            return f"the run continues without {subject}"
        case Measure.SHARD_LEFT_OUT:
            return f"the run continues without {subject}, from record position {response.position} on"
        case Measure.FORK_SERVER_RESTARTED:
            return "workers that live train on; the fork server is started again"
        case Measure.WORKERS_KEPT:
            return "workers that live train on; the fork server is not started again"
        case Measure.MASTER_REPLACED:
            return "another master took the run over"
        case Measure.PLAN_CHANGED | Measure.RANKS_RESTARTED:
            return response.reason
        case Measure.TRAINING_CONTINUED:
            return "training continues"
        case Measure.NOTHING:
            return "none: training continues"
        case Measure.JOB_ENDED:
            return f"the job ended: {response.reason.splitlines()[0]}"
        case _:
            assert_never(response.measure)


def evidence_text(finding: Finding) -> str:
    """What a finding is known by."""
    entry = finding.evidence
    match entry:
        case NodeLost():
            return loss_text(entry.loss)
        case WorkerDown():
            return end_text(entry.end)
        case RankDown():
            return f"rank {entry.rank}: {rank_end_text(entry)}"
        case RanksHung():
            return hang_text(entry)
        case NodeUnfit():
            return entry.fault
        case TerminationNoticed():
            return entry.reason
        case ForkServerDown():
            return fork_server_text(entry)
        case HangExplained() if finding.worker_id is not None:
            return f"all wait for {finding.worker_id}, and it waits for nobody"
        case RecoveryStarted():
            return _regrouping_text(entry.cause)
        case StepDone(record=record):
            return f"step {record.step} was committed with a loss of {record.loss}"
        case ShardQuarantined():
            return f"{entry.shard}: {entry.problem}"
        case (
            HangExplained()
            | PaceChanged()
            | ReplicasDiffer()
            | SaveFailed()
            | JournalGap()
            | MasterResumed()
            | JobEnded()
        ):
            return sentence(entry)
        case _:
            assert_never(entry)


def _regrouping_text(cause: PlanCause) -> str:
    match cause:
        case PlanCause.PEER_FAILED:
            return "a collective failed, and no node was lost"
        case PlanCause.DATA_UNREADABLE:
            return "a record of the step in flight could not be read"
        case PlanCause.HANG:
            return "no step was committed for many times as long as one takes"
        case PlanCause.CORRUPTION:
            return "copies of a layer differ"
        case (
            PlanCause.LOSS
            | PlanCause.NETWORK
            | PlanCause.MASTER_LOST
            | PlanCause.CHECKPOINT_BROKEN
            | PlanCause.SLOW
            | PlanCause.JOINED
            | PlanCause.DRAINED
            | PlanCause.SCALED
            | PlanCause.RETRIED
        ):
            return f"there is a new plan: {cause.value}"
        case _:
            assert_never(cause)


def evidence_detail(finding: Finding) -> str:
    """What more there is of many lines: a traceback, a stack; empty where there is nothing."""
    match finding.evidence:
        case NodeLost(loss=WorkerEnded(end=Raised(traceback=traceback))):
            return traceback
        case WorkerDown(end=Raised(traceback=traceback)):
            return traceback
        case RankDown(error=error) if error is not None:
            return error.detail
        case RanksHung(culprits=(first, *_)):
            return first.stack
        case HangExplained(stacks=stacks) if finding.worker_id is not None:
            return dict(stacks).get(finding.worker_id, "")
        case _:
            return ""
