"""Whose words count: a node speaks for the workers that it has, and for none that was told to end."""

from __future__ import annotations

from oobleck.control.protocol import (
    AgentMessage,
    CheckpointCommitted,
    CheckpointsFound,
    Evaluating,
    EvaluationDone,
    Finished,
    LayersMoving,
    LayersPersisted,
    Pace,
    PeerFailed,
    Profiled,
    RecordsFailed,
    ReplicaDigests,
    RestoreFailed,
    Resumed,
    ScanAnswer,
    StateNotSaved,
    StateSaved,
    Status,
    StepCommitted,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
)
from oobleck.errors import PeerError

from .membership import Member

__all__ = ["check_device", "is_of_training", "is_of_worker_that_ends"]


def is_of_training(message: AgentMessage) -> bool:
    """Whether only a worker that has had orders, or its agent, can say this."""
    return isinstance(
        message,
        StepCommitted
        | Evaluating
        | EvaluationDone
        | Status
        | Resumed
        | Pace
        | PeerFailed
        | Finished
        | LayersMoving
        | ReplicaDigests
        | RestoreFailed
        | RecordsFailed
        | ScanAnswer
        | StateSaved
        | LayersPersisted
        | CheckpointCommitted,
    )


def is_of_worker_that_ends(member: Member, message: AgentMessage) -> bool:
    """Whether these are words of a worker that was told to end: what it does has no part in the run any more."""
    match message:
        case (
            StepCommitted(device=device)
            | Evaluating(device=device)
            | EvaluationDone(device=device)
            | Status(device=device)
            | Resumed(device=device)
            | Pace(device=device)
            | LayersMoving(device=device)
            | PeerFailed(device=device)
            | Finished(device=device)
            | ReplicaDigests(device=device)
            | RestoreFailed(device=device)
            | WorkerReady(device=device)
        ):
            return device in member.shutdown
        case _:
            return False


def check_device(member: Member, message: AgentMessage) -> None:
    """Raise PeerError for words of a worker that the node does not have."""
    match message:
        case (
            WorkerStarted(device=device)
            | WorkerReady(device=device)
            | WorkerExited(device=device)
            | Profiled(device=device)
            | StepCommitted(device=device)
            | Evaluating(device=device)
            | EvaluationDone(device=device)
            | Status(device=device)
            | Resumed(device=device)
            | Pace(device=device)
            | LayersMoving(device=device)
            | PeerFailed(device=device)
            | Finished(device=device)
            | StateSaved(device=device)
            | StateNotSaved(device=device)
            | LayersPersisted(device=device)
            | CheckpointsFound(device=device)
            | RestoreFailed(device=device)
            | ReplicaDigests(device=device)
            | ScanAnswer(device=device)
            | RecordsFailed(device=device)
        ) if device not in range(member.spec.num_devices):
            raise PeerError(f"speaks for device {device}; it has {member.spec.num_devices}")
        case ReplicaDigests(layers=layers, digests=digests) if len(layers) != len(digests):
            raise PeerError(f"tells {len(digests)} digests of {len(layers)} layers")
        case _:
            pass
