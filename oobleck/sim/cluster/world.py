"""The world that all virtual nodes of one run share: the network, the tempo of work, and chance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from oobleck.control.protocol import CommitMessage
from oobleck.planner import WorkerId
from oobleck.sim.costs import Costs, NodeKinds

from .determinism import VirtualTime
from .fabric import Fabric
from .tempo import Delays, Tempo


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    kinds: NodeKinds
    delays: Delays
    tempo: Tempo
    rng: Random
    fabric: Fabric = field(default_factory=Fabric)
    time: VirtualTime = field(default_factory=VirtualTime)
    peers: dict[WorkerId, Callable[[WorkerId, CommitMessage], None]] = field(default_factory=dict)
    """Delivers a message of another worker, given with its id, to the worker in each place."""

    @classmethod
    def make(cls, kinds: NodeKinds, delays: Delays, seed: int, costs: Costs | None = None) -> World:
        tempo = Tempo(kinds.profile, profile_of=kinds.own_profile_of, form_group_s=delays.form_group_s, costs=costs)
        return cls(kinds=kinds, delays=delays, tempo=tempo, rng=Random(seed))

    def up_to(self, limit_s: float) -> float:
        """Return random seconds, at most `limit_s`."""
        return self.rng.uniform(0.0, limit_s)
