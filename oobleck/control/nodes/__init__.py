"""Which nodes and workers are in the job: the decisions that the coordinators of both programs share."""

from __future__ import annotations

from .coordinator import BaseCoordinator
from .likeness import Alike, EpochLikeness, difference, version_of
from .membership import Member, Membership, MemberState
from .node_lifecycle import NodeLifecycle
from .program import Program, WorkerProgram
from .silence import are_most, patience_s
from .time_limits import adopting_s, attaching_s, reading_s, saying_farewell_s, starting_s
from .worker_lifecycle import WorkerLifecycle, check_device, is_of_training, is_of_worker_that_ends

__all__ = [
    "Alike",
    "BaseCoordinator",
    "EpochLikeness",
    "Member",
    "MemberState",
    "Membership",
    "NodeLifecycle",
    "Program",
    "WorkerLifecycle",
    "WorkerProgram",
    "adopting_s",
    "are_most",
    "attaching_s",
    "check_device",
    "difference",
    "is_of_training",
    "is_of_worker_that_ends",
    "patience_s",
    "reading_s",
    "saying_farewell_s",
    "starting_s",
    "version_of",
]
