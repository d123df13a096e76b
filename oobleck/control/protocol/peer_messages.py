"""What workers say to each other over links of their own, past agents and master.

A link begins with three frames by which each side proves that it was told the listener's ticket: see `WorkerAddress`.
"""

from __future__ import annotations

from dataclasses import dataclass

from oobleck.plan import WorkerId

from .commit_messages import CommitMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupValue:
    """What a member of a group that is being formed has others of its members know."""

    generation: int
    """Of the plan update that the sender follows."""
    key: str
    value: bytes


PeerMessage = GroupValue | CommitMessage
"""What a worker says to another once their link is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChallenge:
    """The listener's first word on a connection."""

    nonce: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkHello:
    """The caller's first word: who it is, where it listens itself, and its proof."""

    worker_id: WorkerId
    host: str
    port: int
    nonce: bytes
    proof: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProof:
    """The listener's proof; messages may follow in both directions."""

    proof: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEnd:
    """The sender's last word on a link that it does not need any more. Without it, an end is the end of the peer."""


LinkMessage = LinkChallenge | LinkHello | LinkProof | LinkEnd | PeerMessage
"""Everything that is sent on a link."""
