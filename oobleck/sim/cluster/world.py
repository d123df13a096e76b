"""What all virtual nodes of one run share: the network, the tempo of work, and chance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import trio

from oobleck.control.protocol import CommitMessage
from oobleck.planner import WorkerId
from oobleck.sim.costs import Costs, NodeKinds

from .determinism import VirtualTime
from .fabric import Fabric
from .tempo import Delays, Tempo


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The surroundings of every virtual process."""

    kinds: NodeKinds
    delays: Delays
    tempo: Tempo
    rng: Random
    fabric: Fabric = field(default_factory=Fabric)
    time: VirtualTime = field(default_factory=VirtualTime)
    peers: dict[WorkerId, Callable[[WorkerId, CommitMessage], None]] = field(default_factory=dict)
    """How messages of other workers, whose ids come with them, reach the one in each place."""

    @classmethod
    def make(cls, kinds: NodeKinds, delays: Delays, seed: int, costs: Costs | None = None) -> World:
        tempo = Tempo(kinds.profile, profile_of=kinds.own_profile_of, form_group_s=delays.form_group_s, costs=costs)
        return cls(kinds=kinds, delays=delays, tempo=tempo, rng=Random(seed))

    def up_to(self, limit_s: float) -> float:
        """Seconds by chance, at most so many."""
        return self.rng.uniform(0.0, limit_s)


class Gate:
    """What a frozen process cannot pass."""

    def __init__(self) -> None:
        self._opened: trio.Event | None = None

    @property
    def is_closed(self) -> bool:
        return self._opened is not None

    def close(self) -> None:
        if self._opened is None:
            self._opened = trio.Event()

    def open(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.set()

    async def passed(self) -> None:
        """Wait while it is closed; no checkpoint when it is open."""
        while self._opened is not None:
            await self._opened.wait()
