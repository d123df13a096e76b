"""Which agent speaks to the master through which other one, and when that changes.

    direct ── JoinRelay ──> joining ── RelayJoined ──> through ── RelayLeft ──> direct
                                                          └──── LeaveRelay ──> leaving ── RelayLeft ──> direct

The master keeps its own connection to every agent, by which it started it. That is idle while the agent has a relay,
and is the way to fall back on. So a relay is only a shorter way: losses, starts and takeovers work as without relays,
and the master at once speaks directly to an agent whose relay fails.

"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from oobleck.control import protocol
from oobleck.control.events import Send
from oobleck.control.relaying import PATIENCE, children_of, parent_of
from oobleck.job import ControlSpec

_LOOKS = 8
"""How often the master looks at relays in each lease."""
_RESTS = 10
"""For how many leases no agent joins a relay that was silent, or that it could not reach."""
# After this many leases a free position is taken again: messages in its name have arrived by then, or come from a relay
# that was left.
_REUSED_AFTER = 1.0


class _Stage(StrEnum):
    """How the master speaks to an agent: the states of the drawing above."""

    DIRECT = "direct"
    JOINING = "joining"
    THROUGH = "through"
    LEAVING = "leaving"

    @property
    def is_direct(self) -> bool:
        return self in (_Stage.DIRECT, _Stage.JOINING)


@dataclass(slots=True, kw_only=True)
class _Agent:
    """An agent that speaks to the master."""

    node: str
    position: int
    stage: _Stage = _Stage.DIRECT
    relay: str = ""
    """The node of the relay that it joins, speaks through or leaves, or left last. It may be lost by now."""
    attempt: int = 0
    was_asked_to_relay: bool = False
    listening_at: protocol.RelayOpen | None = None
    children: set[str] = field(default_factory=set)
    """The nodes that speak through it, and are not leaving."""
    heard_s: float
    avoids: str = ""
    """The relay that it had to leave, or could not reach."""
    avoids_until_s: float = -math.inf
    rests_until_s: float = -math.inf
    """It was silent: before this, no other agent joins it."""


class RelayTree:
    """Knows the way to each agent. A change costs O(fan-out · depth), a look O(relays), an arrangement O(agents)."""

    def __init__(self, control: ControlSpec) -> None:
        self.fanout = control.relay_fanout
        self._least_agents = control.relay_nodes or math.inf
        self._lease_s = control.lease_s
        self._agents: dict[str, _Agent] = {}
        self._seats: list[str | None] = []
        self._freed_s: dict[int, float] = {}
        """The positions without a node, and since when."""
        self._num_attempts = 0
        self._looks_s = self._arranges_s = math.inf

    # --- the way to an agent -----------------------------------------------------------------------------------

    @property
    def is_needed(self) -> bool:
        """Whether agents may speak through each other: there are enough of them, or were."""
        return math.isfinite(self._looks_s)

    def is_direct(self, node: str) -> bool:
        """Return whether the master speaks to a node's agent by its own connection."""
        agent = self._agents.get(node)
        return agent is None or agent.stage.is_direct

    def position_of(self, node: str) -> int:
        return self._agents[node].position

    def root_of(self, node: str) -> str | None:
        """Return the node to which the master sends what is for this one; None while it, or a relay of it, leaves."""
        agent = self._agents[node]
        while agent.stage is _Stage.THROUGH:
            agent = self._agents[agent.relay]
        return None if agent.stage is _Stage.LEAVING else agent.node

    def speaker(self, position: int, *, through: str) -> str | None:
        """Return the node that spoke through the agent of `through`; None where it speaks another way by now."""
        node = self._seats[position] if 0 <= position < len(self._seats) else None
        # A relay that was left may go on passing messages on, for nodes that speak another way by now.
        return node if node is not None and node != through and self.root_of(node) == through else None

    def below(self, node: str) -> Iterator[str]:
        """Yield the node, and all that speak through it."""
        yield node
        for child in sorted(self._agents[node].children):
            yield from self.below(child)

    # --- what happens ------------------------------------------------------------------------------------------

    def add(self, node: str, now_s: float) -> list[Send]:
        """An agent speaks to the master, for the first time or by a new connection: directly, and it is no relay."""
        before = self._agents.get(node)
        sends = [] if before is None else self._part(before)
        position = self._take_seat(node, now_s) if before is None else before.position
        self._agents[node] = _Agent(node=node, position=position, heard_s=now_s)
        if len(self._agents) >= self._least_agents:
            self._looks_s = min(self._looks_s, now_s + self._lease_s / _LOOKS)
        self._arrange_by(now_s + self._lease_s)
        return sends

    def remove(self, node: str, now_s: float) -> list[Send]:
        """A node is lost, or has left; those that speak through it are called back."""
        agent = self._agents.get(node)
        if agent is None:
            return []
        sends = self._part(agent)
        del self._agents[node]
        self._seats[agent.position] = None
        self._freed_s[agent.position] = now_s
        self._arrange_by(now_s + self._lease_s)
        return sends

    def note_heard(self, node: str, heard_s: float) -> None:
        agent = self._agents.get(node)
        if agent is not None and heard_s > agent.heard_s:
            agent.heard_s = heard_s

    def open(self, node: str, door: protocol.RelayOpen, now_s: float) -> None:
        if node in self._agents:
            self._agents[node].listening_at = door
            self._arrange_by(now_s)

    def join(self, node: str, attempt: int, number: int) -> list[Send]:
        """An agent is linked to a relay, and waits: what follows message `number` goes through the relay."""
        agent = self._agents.get(node)
        if agent is None or agent.stage is not _Stage.JOINING or agent.attempt != attempt:
            return []  # it has given that attempt up
        agent.stage = _Stage.DIRECT
        relay = self._agents.get(agent.relay)
        # The relay may be lost, have another position, leave its own relay, or speak through this very agent by now.
        if relay is None or relay.listening_at is None or self.root_of(relay.node) in (None, node):
            return [Send(node=node, message=protocol.LeaveRelay())]
        agent.stage = _Stage.THROUGH
        relay.children.add(node)
        return [Send(node=node, message=protocol.UseRelay(attempt=attempt, number=number))]

    def leave(self, node: str, left: protocol.RelayLeft, now_s: float) -> None:
        """An agent speaks directly again."""
        agent = self._agents.get(node)
        if agent is None:
            return
        if left.problem:
            agent.avoids, agent.avoids_until_s = agent.relay, now_s + _RESTS * self._lease_s
        self._detach(agent, _Stage.DIRECT)
        self._arrange_by(now_s + self._lease_s)

    # --- time passes -----------------------------------------------------------------------------------------

    @property
    def due_s(self) -> float:
        return min(self._looks_s, self._arranges_s) if self.is_needed else math.inf

    def handle_deadline(self, now_s: float) -> list[Send]:
        """Call back those whose relays are silent, and give relays to those that have none."""
        sends: list[Send] = []
        if self.is_needed and now_s >= self._looks_s:
            sends += self._look(now_s)
        if self.is_needed and now_s >= self._arranges_s:
            sends += self._arrange(now_s)
        return sends

    def _look(self, now_s: float) -> list[Send]:
        is_late = now_s - self._looks_s > self._lease_s / _LOOKS
        self._looks_s = now_s + self._lease_s / _LOOKS
        sends: list[Send] = []
        for agent in [agent for agent in self._agents.values() if agent.children]:
            if is_late:  # this master was held up: messages of relays wait to be read
                agent.heard_s = max(agent.heard_s, now_s - self._lease_s / _LOOKS)
            elif now_s - agent.heard_s >= PATIENCE * self._lease_s:
                agent.rests_until_s = now_s + _RESTS * self._lease_s
                sends += self._call_back(agent)
        return sends

    def _arrange(self, now_s: float) -> list[Send]:
        self._arranges_s = math.inf
        if len(self._agents) < self._least_agents:
            return []
        sends = self._fill_holes(now_s)
        for agent in list(self._agents.values()):
            if agent.stage is not _Stage.DIRECT:
                continue
            above = parent_of(agent.position, self.fanout)
            relay = None if above is None else self._at(above)
            if relay is None:
                continue
            if not relay.was_asked_to_relay:
                relay.was_asked_to_relay = True
                order = protocol.BecomeRelay(position=relay.position, fanout=self.fanout)
                sends.append(Send(node=relay.node, message=order))
            elif relay.listening_at is not None and self._may_join(agent, relay, now_s):
                sends.append(self._ask_to_join(agent, relay, relay.listening_at))
            else:
                self._arrange_by(now_s + self._lease_s)
        return sends

    def _may_join(self, agent: _Agent, relay: _Agent, now_s: float) -> bool:
        return now_s >= relay.rests_until_s and (agent.avoids != relay.node or now_s >= agent.avoids_until_s)

    def _ask_to_join(self, agent: _Agent, relay: _Agent, door: protocol.RelayOpen) -> Send:
        self._num_attempts += 1
        agent.stage, agent.relay, agent.attempt = _Stage.JOINING, relay.node, self._num_attempts
        order = protocol.JoinRelay(
            attempt=agent.attempt, position=agent.position, host=door.host, port=door.port, ticket=door.ticket
        )
        return Send(node=agent.node, message=order)

    # --- positions -------------------------------------------------------------------------------------------

    def _at(self, position: int) -> _Agent | None:
        node = self._seats[position] if position < len(self._seats) else None
        return None if node is None else self._agents[node]

    def _take_seat(self, node: str, now_s: float) -> int:
        """Take the first position that has been free for long enough, or one at the end."""
        position = min(self._free(now_s), default=len(self._seats))
        if position == len(self._seats):
            self._seats.append(node)
        else:
            self._seats[position] = node
            del self._freed_s[position]
        return position

    def _free(self, now_s: float) -> list[int]:
        return [
            position for position, freed_s in self._freed_s.items() if now_s - freed_s >= _REUSED_AFTER * self._lease_s
        ]

    def _fill_holes(self, now_s: float) -> list[Send]:
        """Move agents of the last positions to those of lost relays that had children."""
        # An agent keeps its position while it lives. A lost one leaves a hole, and its children are direct until the
        # hole is filled: by a node that joins, else by the agent of the last position. So a loss changes at most as
        # many edges as a relay has children, however many agents there are.
        sends: list[Send] = []
        for position in sorted(self._free(now_s)):
            if not any(self._at(child) for child in children_of(position, self.fanout)):
                continue
            last = next(agent for index in reversed(range(len(self._seats))) if (agent := self._at(index)) is not None)
            if last.stage is _Stage.DIRECT:
                self._seats[last.position], self._seats[position] = None, last.node
                self._freed_s[last.position] = now_s
                del self._freed_s[position]
                # Its position decides whose relay it is, so what it was asked before does not hold.
                last.position, last.was_asked_to_relay, last.listening_at = position, False, None
            else:
                if last.stage is _Stage.THROUGH:
                    sends += self._call(last)
                self._arrange_by(now_s + self._lease_s)
                break  # one after the other, and it has to be direct first
        return sends

    # --- edges -----------------------------------------------------------------------------------------------

    def _part(self, agent: _Agent) -> list[Send]:
        """No way to an agent is known: neither through others, nor to others through it."""
        self._detach(agent, _Stage.DIRECT)
        return self._call_back(agent)

    def _call_back(self, relay: _Agent) -> list[Send]:
        return [send for child in sorted(relay.children) for send in self._call(self._agents[child])]

    def _call(self, agent: _Agent) -> list[Send]:
        # Until the agent reports that it has left, neither way is sure, and the mail keeps its messages.
        self._detach(agent, _Stage.LEAVING)
        return [Send(node=agent.node, message=protocol.LeaveRelay())]

    def _detach(self, agent: _Agent, stage: _Stage) -> None:
        if agent.relay in self._agents:
            self._agents[agent.relay].children.discard(agent.node)
        agent.stage = stage

    def _arrange_by(self, by_s: float) -> None:
        self._arranges_s = min(self._arranges_s, by_s)
