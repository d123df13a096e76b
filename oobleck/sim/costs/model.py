"""The costs of losses, plans, starts, commits and checkpoints in both modes of simulation, and of other systems.

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

and whole pipelines make progress until the end of "finishing". `committing_s` is a part of each step. Where several
systems do the same (start processes, write and read checkpoints), one number serves them all.

Each cost is made of named, settable numbers. The master's are those of `tools/bench/scale.py` (GPT-2 medium, pipelines
of 8 workers, a slow processor), which `tools/bench/fit_costs.py` fits and checks. They leave out the time of an
update's bytes on the master's own link.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace

from oobleck.errors import ConfigError
from oobleck.json_table import JsonTable, parse_json
from oobleck.planner import KNOWN_DEVICES, Profile, sheet_of_product

_WHOLE = ("swap_spares", "num_learners")


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
    """Forming groups of any size with Gloo (tools/bench/recovery.py, four local nodes). A recovery that finishes the
    step does so twice: for the step, and for the next plan, whose layers have other owners. `costs_for` has NCCL's."""
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

    # Checkpoints, written and read by all nodes, each its share of the state.
    checkpoint_write_s: float = 1.2
    """Training waits for each, in addition to the bytes (DLRover's flash checkpoint, GPT-2 1.5B with Megatron)."""
    checkpoint_read_s: float = 10.0
    """When a job restarts from one, in addition to the bytes: an assumption."""
    checkpoint_bytes_per_s: float = 1e9
    """Of each node, in both directions; 0: bytes take no time (Llama 3: 2 TB/s for 2,048 nodes)."""

    # Other systems (see `oobleck.sim.policies`).
    failover_s: float = 30.0
    """Bamboo: a neighbour takes over, or a node joins (the SOSP'23 artifact)."""
    reroute_s: float = 1.0
    """ReCycle: peers take a lost node's work; the new plan is looked up (an assumption in ReCycle's favour)."""
    in_process_s: float = 120.0
    """HyperPod, checkpointless: all processes restart in place, with a peer's state (AWS: "under 2 minutes")."""
    swap_s: float = 20.0
    """Hot swap: a spare takes a lost node's place (TrainMover: 20 s on 1,024 GPUs; DeadPool: under 40 s on 512)."""
    swap_spares: float = 2.0
    """Hot swap: nodes that stand by: an assumption."""
    discard_s: float = 10.1
    """torchft: after the step that a loss spoils (torchft 0.2.0, four replicas, its default timeouts)."""
    rejoin_s: float = 24.0
    """torchft: until a replica that lost a node trains again (PyTorch's blog, run 1: 29.6 of 30, a loss a minute)."""
    repair_s: float = 2.0
    """ReCoVer: survivors repair their groups inside the step (NCCL's shrink: 1.4 to 2.0 s on 1,024 GPUs)."""
    fewest_replicas: float = 0.5
    """ReCoVer: the share of replicas below which its operator restarts the job (the authors lose half of them)."""
    num_learners: float = 8.0
    """Decoupled DiLoCo: independent learners (the paper's usual number)."""
    learner_pause_s: float = 23.5
    """Decoupled DiLoCo: a learner's stop for a change of its nodes (the paper's 80 % of 2.4 million chips)."""

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{part.name} is {value!r}; it must be a number of at least 0")
            if part.name in _WHOLE and value != int(value):
                raise ConfigError(f"{part.name} is {value!r}; it must be a whole number")

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

    def saving_s(self, num_nodes: int, state_bytes: int) -> float:
        """Return the seconds for which training waits for a checkpoint of a state that all nodes write together."""
        return self.checkpoint_write_s + self._bytes_s(num_nodes, state_bytes)

    def reading_s(self, num_nodes: int, state_bytes: int) -> float:
        """Return the seconds in which all nodes together read a checkpoint."""
        return self.checkpoint_read_s + self._bytes_s(num_nodes, state_bytes)

    def restarting_s(self, num_nodes: int, state_bytes: int) -> float:
        """Return the seconds from a stopped job to training from its newest checkpoint, in new processes."""
        return self.starting_s(num_nodes) + self.reading_s(num_nodes, state_bytes)

    def _bytes_s(self, num_nodes: int, num_bytes: int) -> float:
        return num_bytes / (num_nodes * self.checkpoint_bytes_per_s) if self.checkpoint_bytes_per_s else 0.0


# NVIDIA/nccl#2094: eight H100s take 3.03 s, of which 1.22 s load kernels and 0.24 s allocate, once a process. Other
# sources agree: 2.0 s for each of eight V100s' communicators (#534), 1.4 to 2.0 s to shrink one of 1,024 GPUs.
_NCCL_FORM_S = 1.6


def costs_for(profile: Profile) -> Costs:
    """Return the default costs on the devices of a profile: groups are formed by NCCL on GPUs, by Gloo elsewhere."""
    device = profile.device
    sheet = KNOWN_DEVICES.get(device.name.lower()) or sheet_of_product(device.name)
    is_gpu = device.communication_bytes > 0 or (sheet is not None and not sheet.is_host)
    return replace(Costs(), form_s=_NCCL_FORM_S) if is_gpu else Costs()


def changes_from_json(text: str, *, policies: Collection[str], source: str) -> dict[str, float]:
    """Read a file of costs, a JSON object of numbers by NAME or POLICY.NAME. Raises ConfigError that names the key."""
    try:
        table = JsonTable(parse_json(text), "the file")
        names = [part.name for part in fields(Costs)]
        table.check_keys((), [*names, *(f"{policy}.{name}" for policy in policies for name in names)])
        changes = {name: table.number(name) for name in table.items}
        for policy in ("", *policies):
            with_changes(Costs(), changes, policy=policy)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return changes


def with_changes(base: Costs, changes: Mapping[str, float], *, policy: str) -> Costs:
    """Return the costs of one policy: those of a kind (NAME) are changed for all, POLICY.NAME for this one alone."""
    shared = {name: value for name, value in changes.items() if "." not in name}
    prefix = f"{policy}."
    own = {name.removeprefix(prefix): value for name, value in changes.items() if name.startswith(prefix)}
    return replace(base, **{**shared, **own})
