"""Which messages count: a node speaks for the workers that it has, and for none that was asked to end."""

from __future__ import annotations

from oobleck.control.protocol import AgentMessage, CheckpointCommitted, FromWorker, ReplicaDigests
from oobleck.errors import PeerError

from .membership import Member


def is_of_training(message: AgentMessage) -> bool:
    """Whether only a worker that has had a plan, or its agent, can say this."""
    if isinstance(message, FromWorker):
        return message.needs_orders
    return isinstance(message, CheckpointCommitted)


def is_of_worker_that_ends(member: Member, message: AgentMessage) -> bool:
    """Whether this comes from a worker that was asked to end: what it does has no part in the run any more."""
    return isinstance(message, FromWorker) and not message.outlives_worker and message.device in member.shutdown


def check_device(member: Member, message: AgentMessage) -> None:
    """Raise PeerError for a message of a worker that the node does not have."""
    if isinstance(message, FromWorker) and message.device not in range(member.spec.num_devices):
        raise PeerError(f"speaks for device {message.device}; it has {member.spec.num_devices}")
    if isinstance(message, ReplicaDigests) and len(message.layers) != len(message.digests):
        raise PeerError(f"sends {len(message.digests)} digests of {len(message.layers)} layers")
