"""Who is in the job: nodes and workers, whose messages count, and which lost nodes are tried again."""

from __future__ import annotations

from .leases import Leases, are_most, patience_s
from .likeness import (
    DATA,
    FIRST_SAMPLES,
    LOSS,
    ORDER,
    STRUCTURE,
    WEIGHTS,
    EpochLikeness,
    difference,
    version_of,
)
from .machines import Share
from .membership import Member, MemberImage, Membership, MemberState
from .message_checks import check_device, is_of_training, is_of_worker_that_ends
from .node_retry import QUARANTINE_LOSSES, NodeRetry
from .startup_failures import StartupFailures
from .time_limits import adopting_s, attaching_s, reading_s, saying_farewell_s, starting_s

__all__ = [
    "DATA",
    "FIRST_SAMPLES",
    "LOSS",
    "ORDER",
    "QUARANTINE_LOSSES",
    "STRUCTURE",
    "WEIGHTS",
    "EpochLikeness",
    "Leases",
    "Member",
    "MemberImage",
    "MemberState",
    "Membership",
    "NodeRetry",
    "Share",
    "StartupFailures",
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
