"""How agents speak to the master through each other: the part of the protocol that is about relays.

master ── BecomeRelay ──> agent                 take in other agents
agent  ── RelayOpen ──> master                  where it listens, and what callers must know
master ── JoinRelay ──> agent                   speak to us through that one
agent  ── RelayCall ──> relay ── RelayBeat ──>  the first words on the link between them
agent  ── RelayJoined ──> master                the last word that it says to us directly
master ── UseRelay ──> agent                    the last word that we say to it directly
master ── Relayed ──> relay ──> agents          a message for many
agents ──> relay ── RelaySaid, RelayHeard ──>   what many of them say alike, and who is heard
agent  ── RelayLeft ──> master                  it speaks to us directly again

All of these but the links between agents go through a connection that the master and an agent have to themselves.
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
    """The relay's, which proves each to the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UseRelay:
    """All that was said directly is said: from now on listen to the relay."""

    attempt: int
    number: int
    """Of the newest message that went to any relay. What has no greater number was for others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRelay:
    """Speak to the master directly again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relayed:
    """A message for agents of a part of the tree."""

    number: int
    """Greater than those of all before it."""
    to: Runs
    """Positions, ascending."""
    devices: tuple[int, ...]
    """The devices that it is for, on each of the nodes; none where it is for the agents themselves."""
    message: bytes
    """Its frame. Who passes it on need not read it."""


RelayOrder = BecomeRelay | JoinRelay | UseRelay | LeaveRelay | Relayed
"""What the master says about relays, and through them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayOpen:
    """The agent listens."""

    host: str
    port: int
    ticket: bytes
    """Proves each side to the other: only the master, which sends it to the callers, and they have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayJoined:
    """The agent has its link to the relay. It says nothing more until it may use it."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLeft:
    """The agent has no relay any more, or could not reach it."""

    heard: int
    """The greatest number that it had of a message that was relayed."""
    problem: str
    """Empty where it was asked to leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySaid:
    """What agents say, those who say the same together."""

    by: Runs
    """Their positions, ascending."""
    devices: tuple[int, ...]
    """Of the workers that say it, on each of the nodes; none where the agents do."""
    message: bytes
    """Its frame, in which the device is 0."""
    news: str
    """See `news_in`: the master needs the same news once."""


def news_in(message: object) -> str:
    """Return the name of what many say, each in its own words: that a step is committed. Empty for all else."""
    return f"{message.record.generation} {message.record.step}" if isinstance(message, StepCommitted) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayHeard:
    """Who was heard since this was last said, and when."""

    heard: tuple[tuple[int, Runs], ...]
    """How long before, in ms, and by whom: positions, ascending."""


RelayReport = RelayOpen | RelayJoined | RelayLeft | RelaySaid | RelayHeard
"""What agents say about relays, and through them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayCall:
    """The first message of an agent to its relay."""

    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayBeat:
    """Said by a relay to its agents, first of all and then so often that they notice when it has stopped."""

    known: str = ""
    """News of this name were passed on before, in the words of another: who said them need not keep them."""
    says_again: bool = False
    """The relay has lost its way to the master, and perhaps what it had to pass on: say again what is not answered."""
