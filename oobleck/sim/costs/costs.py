"""What recoveries cost in a simulation: constants, each with what it stands for and where it comes from.

The time of a recovery is the sum of

    noticing       `detect_s`, or the lease where nothing says that a node is gone
    settling       the coordinator's own window for losses that belong together
    asking         `fence_s`: every survivor says where it stands, at once
    deciding       `decide_s`: the planner's time
    finishing      what whole pipelines have still to compute of the step in flight, from the schedule's timeline
    grouping       `regroup_s`: process groups of those who change
    copying        the bytes of the busiest link over the profile's bandwidth (planner.what_if.transfer_s)
    warming up     `warm_up_s`: the first step under a new plan, over an ordinary one

and training makes progress until the end of "finishing" wherever a pipeline is whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from oobleck.errors import ConfigError

__all__ = ["RecoveryCosts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryCosts:
    """Seconds of each part of a recovery that the profile does not state.

    The defaults are those of four local nodes, as `tools/bench/recovery.py` measures them, rounded up; those of
    nodes that start are for a process that imports torch from a local disk.
    """

    detect_s: float = 0.005
    """From the end of a node to its connection's: what the kernel and SSH take to say so."""
    lease_s: float = 3.0
    """How long a node that says nothing is waited for."""
    fence_s: float = 0.002
    decide_s: float = 0.02
    regroup_s: float = 0.03
    warm_up_s: float = 0.0
    node_start_s: float = 15.0
    """From a node that is there to its workers being ready."""
    worker_start_s: float = 0.05
    """A fork of a warm process."""
    checkpoint_read_s: float = 10.0
    """Reading the newest checkpoint, when all copies of a layer are lost."""

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{part.name} is {value!r}; it must be a number of seconds, at least 0")
