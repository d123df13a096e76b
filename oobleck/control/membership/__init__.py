"""Who is in the job: nodes and workers, whose messages count, and which lost nodes are tried again."""

from __future__ import annotations

from .leases import Leases, are_most, patience_s
from .membership import Member, MemberImage, Membership, MemberState
from .message_checks import check_device, is_of_training, is_of_worker_that_ends
from .node_retry import QUARANTINE_LOSSES, NodeRetry
from .startup_failures import StartupFailures

__all__ = [
    "QUARANTINE_LOSSES",
    "Leases",
    "Member",
    "MemberImage",
    "MemberState",
    "Membership",
    "NodeRetry",
    "StartupFailures",
    "are_most",
    "check_device",
    "is_of_training",
    "is_of_worker_that_ends",
    "patience_s",
]
