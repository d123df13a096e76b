"""Messages about relays: how agents speak to the master through each other.

master ── BecomeRelay ──> agent                 take in other agents
agent  ── RelayOpen ──> master                  where it listens, and what callers must know
master ── JoinRelay ──> agent                   speak through that relay
agent  ── RelayCall ──> relay ── RelayBeat ──>  the first messages on the link between them
agent  ── RelayJoined ──> master                the agent's last direct message
master ── UseRelay ──> agent                    the master's last direct message
master ── Relayed ──> relay ──> agents          a message for many
agents ──> relay ── RelaySaid, RelayHeard ──>   equal messages of many, and who was heard
agent  ── RelayLeft ──> master                  it speaks directly again
"""

from __future__ import annotations

from dataclasses import dataclass

from .runs import Runs
from .worker_messages import StepCommitted


@dataclass(frozen=True, slots=True, kw_only=True)
class BecomeRelay:
    """Listen for agents that are to speak through this one."""

    position: int
    fanout: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRelay:
    """Speak to the master through another agent."""

    attempt: int
    position: int
    host: str
    port: int
    ticket: bytes
    """The relay's, by which each side proves itself to the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UseRelay:
    """Nothing more is sent directly: listen to the relay from now on."""

    attempt: int
    number: int
    """The number of the newest message to any relay. Messages without a greater number were for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRelay:
    """Speak to the master directly again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relayed:
    """A message for agents of a part of the tree."""

    number: int
    """Greater than those of all messages before it."""
    to: Runs
    """Positions, ascending."""
    devices: tuple[int, ...]
    """The devices on each node that it is for; none where it is for the agents themselves."""
    message: bytes
    """Its frame."""


RelayOrder = BecomeRelay | JoinRelay | UseRelay | LeaveRelay | Relayed


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOpen:
    host: str
    port: int
    ticket: bytes
    """A secret that the master passes on to the callers alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayJoined:
    """The agent has its link to the relay. It sends nothing more until it may use it."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLeft:
    """The agent has no relay any more, or could not reach it."""

    heard: int
    """The greatest number of a relayed message that it received."""
    problem: str
    """Empty where it was asked to leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySaid:
    """Equal messages of several agents."""

    by: Runs
    """Their positions, ascending."""
    devices: tuple[int, ...]
    """The devices of the senders on each node; none where the agents themselves send it."""
    message: bytes
    """Its frame, in which the device is 0."""
    news: str
    """See `news_in`: the master needs the same news once."""


def news_in(message: object) -> str:
    """Return a name that is equal for messages with the same news, that a step is committed; else empty."""
    # The generation is part of it, because a step that was lost is committed again in a later one.
    return f"{message.record.generation} {message.record.step}" if isinstance(message, StepCommitted) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayHeard:
    """Which agents were heard since the last message of this kind, and when."""

    heard: tuple[tuple[int, Runs], ...]
    """(how many ms ago, positions in ascending order)."""


RelayReport = RelayOpen | RelayJoined | RelayLeft | RelaySaid | RelayHeard


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayCall:
    """The first message of an agent to its relay."""

    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayBeat:
    """From a relay to its agents, at first and then often enough for them to notice when it stops."""

    known: str = ""
    """News of this name were passed on from another agent: their sender need not keep them."""
    says_again: bool = False
    """Whether to repeat what is not answered, because the relay may have lost it with its way to the master."""
