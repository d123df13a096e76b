"""What losses, plans, starts and commits cost in a simulation, as functions of the workers and of the plan.

All such times stand here, for both modes. The time of a recovery is the sum of

    noticing       `detect_s`, or the lease where nothing says that a node is gone: one connection, whatever N is
    settling       the coordinator's own window for losses that belong together
    asking         `asking_s`: the master sends a fence to every survivor, and reads its answer
    deciding       `deciding_s`: the coordinator's and the planner's time
    ordering       `ordering_s`: the master encodes an update for every worker, and each reads its own
    finishing      what whole pipelines have still to compute of the step in flight, from the schedule's timeline
    forming        `forming_s`: process groups and links of those who change
    copying        the bytes of the busiest link over the profile's bandwidth (planner.what_if.transfer_s)
    warming up     `warm_up_s`: the first step under a new plan, over an ordinary one

and training makes progress until the end of "finishing" wherever a pipeline is whole. `committing_s` is a part of each
step.

A cost is made of named numbers, each of which can be set. `COST_MODELS` has two sets of them: `tree`, whose commit goes
up and down a tree, whose groups and links are kept, and whose updates hold what one worker needs; and `ring`, the
protocol before it, whose steps ended in a ring over all workers, which formed their groups again after each loss. The
master's numbers are those of `tools/bench/scale.py` (GPT-2 medium, pipelines of 8 workers, a slow processor), which
`tools/bench/fit_costs.py` fits and checks again. Not counted: the time of an update's bytes on the master's own link.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from oobleck.errors import ConfigError
from oobleck.json_table import JsonTable, parse_json

_ALL = 1e9
"""More links than a worker has."""
_KEY_BYTES, _KEY_BYTES_EACH = 154, 8
"""What a rank of torch 2.13's Gloo puts up for its peers: so much, and so much for each rank of its group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The numbers; the defaults are those of `tree`. All are at least 0, and finite."""

    # Noticing.
    detect_s: float = 0.005
    """From the end of a node to its connection's: what the kernel and SSH take to say so (tools/bench/recovery.py)."""
    lease_s: float = 3.0
    """How long a node that says nothing is waited for: the job's default."""

    # Asking.
    fence_s: float = 0.002
    """One round trip through a tunnel, and the workers' own time (tools/bench/recovery.py, four local nodes)."""
    fence_worker_s: float = 1.1e-5
    """The master's time for one worker: a fence of 70 bytes, and reading the answer (scale.py: 0.0112 s of 1,024)."""

    # Deciding.
    decide_s: float = 0.004
    decide_worker_s: float = 2.5e-5
    """The master's time, at all and for one worker (scale.py: 0.0099 s of 256, 0.030 s of 1,024, 0.059 s of 2,048)."""

    # Ordering.
    update_bytes: float = 600.0
    """Of each worker's update: what changes, and its own work (scale.py: 0.59 MB for 1,024 of them)."""
    update_worker_bytes: float = 0.0
    """Of each worker's update, for each worker of the plan."""
    update_transfer_bytes: float = 0.0
    """Of each worker's update, for each transfer of the plan."""
    encode_byte_s: float = 2e-8
    """The master's time for a byte of an update (scale.py: 2.1 s for 90 MB of 1,024)."""
    read_byte_s: float = 6e-8
    """A worker's time for a byte of its update (scale.py: 0.0093 s for 173 KB of 2,048)."""

    # Forming.
    form_s: float = 0.015
    """To form groups, however small they are (tools/bench/recovery.py, four local nodes). A recovery that finishes the
    step does so twice: for the step, and for the plan after it, whose layers have other owners."""
    form_key_byte_s: float = 0.0
    """The master's time to pass on a byte of rendezvous keys, where there are any. Each of n members reads the keys of
    all n, of 154 + 8 n bytes each. Without them, addresses come with the answers and the updates."""
    form_link_s: float = 1.4e-4
    """A worker's time for a link to one member of a new group (128 ranks of Gloo: 2.3 s for 16,256 of them)."""
    form_links: float = 8.0
    """A worker makes at most so many links; the others are kept, and a group that sums is a ring."""

    # Committing.
    commit_hop_s: float = 5e-5
    """A message of a few numbers from one worker to the next (Gloo between two processes, half a ping-pong)."""
    commit_hops_worker: float = 0.0
    """Hops one after the other for each worker but one."""
    commit_hops_doubling: float = 2.0
    """Hops for each doubling of N, rounded up: one up and one down."""
    commit_hops: float = 4.0
    """Hops at any N: the way inside a node, and from the root."""

    # Starting.
    node_start_s: float = 15.0
    """From a node that is there to its workers being ready: a process imports torch from a local disk."""
    node_start_node_s: float = 0.011
    """The master's time for each further node of a job that starts (tools/bench/control_plane.py: 2.8 s of 256)."""
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
        """Seconds from the fence to the last survivor's answer; O(N)."""
        return self.fence_s + self.fence_worker_s * num_workers

    def deciding_s(self, num_workers: int) -> float:
        """Seconds from the last answer to a plan; O(N)."""
        return self.decide_s + self.decide_worker_s * num_workers

    def update_size(self, num_workers: int, num_transfers: int) -> float:
        """Bytes of one worker's update: a plan of N workers and all transfers, or what one needs."""
        return self.update_bytes + self.update_worker_bytes * num_workers + self.update_transfer_bytes * num_transfers

    def ordering_s(self, num_workers: int, num_transfers: int) -> float:
        """Seconds from a plan to the last worker that has read it: the master encodes one update after the other."""
        size = self.update_size(num_workers, num_transfers)
        return size * (self.encode_byte_s * num_workers + self.read_byte_s)

    def forming_s(self, group_sizes: Collection[int]) -> float:
        """Seconds in which a worker forms its new groups; without kept links, O(n³) for a group of n members."""
        key_bytes = sum(size * size * (_KEY_BYTES + _KEY_BYTES_EACH * size) for size in group_sizes)
        links = min(self.form_links, sum(size - 1 for size in group_sizes))
        return self.form_s + self.form_key_byte_s * key_bytes + self.form_link_s * links

    def committing_s(self, num_workers: int) -> float:
        """Seconds of each step in which all agree that it is committed."""
        if num_workers < 2:
            return 0.0
        doublings = (num_workers - 1).bit_length()
        hops = self.commit_hops + self.commit_hops_doubling * doublings + self.commit_hops_worker * (num_workers - 1)
        return self.commit_hop_s * hops

    def starting_s(self, num_nodes: int) -> float:
        """Seconds until the workers of so many nodes, which start together, are ready."""
        return self.node_start_s + self.node_start_node_s * (num_nodes - 1)


_TREE = Costs()
_RING = replace(
    _TREE,
    update_bytes=2000.0,
    update_worker_bytes=69.0,  # the whole plan (scale.py)
    update_transfer_bytes=88.0,  # everybody's transfers (scale.py)
    form_key_byte_s=4.4e-9,  # measured with the keys of 64 to 512 agents, plain sockets
    form_links=_ALL,
    commit_hops_worker=2.0,  # a ring over N has 2 (N - 1) (Patarasuk and Yuan 2009)
    commit_hops_doubling=0.0,
    commit_hops=0.0,
)
COST_MODELS: Mapping[str, Costs] = MappingProxyType({"tree": _TREE, "ring": _RING})
DEFAULT_MODEL = "tree"
"""What the code does."""


def costs_from_json(text: str, base: Costs, *, source: str) -> Costs:
    """Return `base` with the costs of a file, a JSON object of numbers by name.

    Raises ConfigError that names the file and the key.
    """
    try:
        table = JsonTable(parse_json(text), "the file")
        table.check_keys((), [part.name for part in fields(Costs)])
        return replace(base, **{name: table.number(name) for name in table.items})
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
