"""The costs of losses, plans, starts and commits in both modes of simulation, by the numbers of workers and nodes.

The time of a recovery is the sum of

    noticing       `detect_s`, or the lease where no connection breaks; independent of N
    settling       the coordinator's own window for losses that belong together
    asking         `asking_s`: the master sends a fence to every survivor, and reads its answer
    deciding       `deciding_s`: the coordinator's and the planner's time
    ordering       `ordering_s`: the master encodes an update for every worker, and each reads its own
    finishing      the rest of the step in flight in whole pipelines, from the schedule's timeline
    forming        `forming_s`: process groups and links of changed workers
    copying        the bytes of the busiest link over the profile's bandwidth (planner.what_if.transfer_s)
    warming up     `warm_up_s`: the first step under a new plan, on top of an ordinary one

and whole pipelines make progress until the end of "finishing". `committing_s` is a part of each step.

Each cost is made of named, settable numbers. The master's are those of `tools/bench/scale.py` (GPT-2 medium, pipelines
of 8 workers, a slow processor), which `tools/bench/fit_costs.py` fits and checks. They leave out the time of an
update's bytes on the master's own link.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields, replace

from oobleck.errors import ConfigError
from oobleck.json_table import JsonTable, parse_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The numbers, all finite and at least 0."""

    # Noticing.
    detect_s: float = 0.005
    """From the end of a node to that of its connection, in the kernel and SSH (tools/bench/recovery.py)."""
    lease_s: float = 3.0
    """The longest silence of a living node: the job's default."""

    # Asking.
    fence_s: float = 0.002
    """One round trip through a tunnel, and the workers' own time (tools/bench/recovery.py, four local nodes)."""
    fence_worker_s: float = 1.1e-5
    """The master's time for one worker: a fence of 70 bytes, and reading the answer (scale.py: 0.0112 s of 1,024)."""

    # Deciding.
    decide_s: float = 0.004
    decide_worker_s: float = 2.5e-5
    """The master's time, in all and for one worker (scale.py: 0.0099 s of 256, 0.030 s of 1,024, 0.059 s of 2,048)."""

    # Ordering.
    update_bytes: float = 600.0
    """The bytes of a worker's update: the change, and its own work (scale.py: 0.59 MB for 1,024 of them)."""
    encode_byte_s: float = 2e-8
    """The master's time for a byte of an update (scale.py: 2.1 s for 90 MB of 1,024)."""
    read_byte_s: float = 6e-8
    """A worker's time for a byte of its update (scale.py: 0.0093 s for 173 KB of 2,048)."""

    # Forming.
    form_s: float = 0.015
    """Forming groups of any size (tools/bench/recovery.py, four local nodes). A recovery that finishes the step does so
    twice: for the step, and for the next plan, whose layers have other owners."""
    form_link_s: float = 1.4e-4
    """A worker's time for a link to one member of a new group (128 ranks of Gloo: 2.3 s for 16,256 of them)."""
    form_links: float = 8.0
    """The most links that a worker makes; it keeps the others, and a group that sums is a ring."""

    # Committing.
    commit_hop_s: float = 5e-5
    """A message of a few numbers between workers (Gloo between two processes, half a ping-pong)."""
    commit_hops_doubling: float = 2.0
    """Hops for each doubling of N, rounded up: one up and one down."""
    commit_hops: float = 4.0
    """Hops at any N: the way inside a node, and from the root."""

    # Starting.
    node_start_s: float = 15.0
    """From a present node to ready workers: a process imports torch from a local disk."""
    node_start_node_s: float = 0.011
    """The master's time for each further node of a starting job (tools/bench/control_plane.py: 2.8 s of 256)."""
    worker_start_s: float = 0.05
    """A fork of a warm process."""
    warm_up_s: float = 0.0
    checkpoint_read_s: float = 10.0
    """Reading the newest checkpoint, when all copies of a layer are lost: an assumption."""

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{part.name} is {value!r}; it must be a number of at least 0")

    def asking_s(self, num_workers: int) -> float:
        """Return the seconds from a fence to the last survivor's answer; O(N)."""
        return self.fence_s + self.fence_worker_s * num_workers

    def deciding_s(self, num_workers: int) -> float:
        """Return the seconds from the last answer to a plan; O(N)."""
        return self.decide_s + self.decide_worker_s * num_workers

    def ordering_s(self, num_workers: int) -> float:
        """Return the seconds from a plan to the last worker that has read it; the master encodes in sequence."""
        return self.update_bytes * (self.encode_byte_s * num_workers + self.read_byte_s)

    def forming_s(self, group_sizes: Collection[int]) -> float:
        """Return the seconds in which a worker forms its new groups."""
        return self.form_s + self.form_link_s * min(self.form_links, sum(size - 1 for size in group_sizes))

    def committing_s(self, num_workers: int) -> float:
        """Return the seconds of each step in which all workers agree on its commit."""
        if num_workers < 2:
            return 0.0
        doublings = (num_workers - 1).bit_length()
        return self.commit_hop_s * (self.commit_hops + self.commit_hops_doubling * doublings)

    def starting_s(self, num_nodes: int) -> float:
        """Return the seconds until the workers of nodes that start together are ready."""
        return self.node_start_s + self.node_start_node_s * (num_nodes - 1)


def costs_from_json(text: str, base: Costs, *, source: str) -> Costs:
    """Return `base` with the costs of a file, a JSON object of numbers. Raises ConfigError that names the key."""
    try:
        table = JsonTable(parse_json(text), "the file")
        table.check_keys((), [part.name for part in fields(Costs)])
        return replace(base, **{name: table.number(name) for name in table.items})
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
