"""Before training: nodes come up, workers get ready, and the model's profile on each kind of node becomes known.

    wanted ── a worker is ready ──> looked up ── found ──────────────> known
                                        └── measured by a worker ──────^
                                              └── it is lost: another one, or the next that is ready

It returns commands, and says whether preparation is complete.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from oobleck import __version__
from oobleck.control.events import Command, LookUpProfile, ProfileFound, Send, Store, notice
from oobleck.control.journal import WorkerUp
from oobleck.control.nodes import Alike, Member, Membership, MemberState, difference
from oobleck.control.plans import profile_key
from oobleck.control.protocol import (
    PROTOCOL_VERSION,
    Configure,
    Profiled,
    ProfileRequest,
    StartWorker,
    WorkerReady,
)
from oobleck.errors import ConfigError, PeerError
from oobleck.job import DEFAULT_KIND, JobSpec
from oobleck.planner import NodeKind, Profile, WorkerId, profile_from_json


@dataclass(slots=True)
class _Wanted:
    """Where a kind's profile is to come from."""

    key: str
    num_devices: int
    measures: WorkerId | None = None
    """The worker that was asked to measure it."""
    is_unmeasured: bool = False
    """It was lost, and no other one was there to be asked."""
    workers: set[WorkerId] = field(default_factory=set)
    """Who can be asked."""


class Preparation:
    """Says what to ask of nodes until every worker is ready, and the profile of every kind is known."""

    def __init__(self, job: JobSpec, members: Membership, *, run: str) -> None:
        self._job = job
        self._run = run
        self._members = members
        self._wanted: dict[str, _Wanted] = {}
        """By kind: where its profile is to come from."""
        self._known: dict[str, NodeKind] = {}
        """In the order in which their profiles became known."""
        self._told: dict[str, tuple[int, int]] = {}
        """The threads and the memory that each node's agent was told to give a worker."""
        self._waiting: dict[WorkerId, WorkerUp] = {}
        """Ready while others train, on nodes of kinds that have no profile yet."""

    @property
    def kinds(self) -> tuple[NodeKind, ...]:
        """The kinds whose profile is known, in the order in which they became so."""
        return tuple(self._known.values())

    def restore(self, kinds: tuple[NodeKind, ...]) -> None:
        """Continue with the profiles that an earlier master knew."""
        self._known = {kind.name: kind for kind in kinds}

    def configure(self, node: str) -> tuple[Command, ...]:
        """Tell a node's agent about the job and have its workers started.

        Agents of the same machine are told again where there is less, or more, for each of their workers by now.
        """
        member = self._members[node]
        asks = self._ask_again(node)
        starts = [Send(node=node, message=StartWorker(device=worker_id.device)) for worker_id in member.worker_ids]
        touched = [self._members[name] for name in self._members.machines.touched_by(node)]
        others = [each for each in touched if each in self._members.living]
        changed = [each for each in others if self._told.get(each.spec.name) != self._share(each)]
        return (self._configure(member), *starts, *asks, *map(self._configure, changed))

    def _configure(self, member: Member) -> Send:
        node = member.spec.name
        threads, memory_bytes = self._told[node] = self._share(member)
        configure = Configure(
            protocol=PROTOCOL_VERSION,
            oobleck_version=__version__,
            job=self._job,
            node=node,
            devices=member.spec.devices,
            address=member.address,
            torch_threads=threads,
            device_memory_bytes=memory_bytes,
            num_sharing=self._members.machines.sharing_device(node),
            run=self._run,
        )
        return Send(node=node, message=configure)

    def note_ready(self, member: Member, message: WorkerReady) -> tuple[Command, ...]:
        """Look at a worker that is ready. The first one of a kind settles which profile that needs.

        Raises ConfigError for one that does not have what all must have alike.
        """
        worker_id = WorkerId(node=member.spec.name, device=message.device)
        other = self._members.first_ready_worker  # all others have what it has
        if other is not None:
            first = WorkerId(node=other.node, device=other.device)
            theirs = ((Alike.DATA, other.data_digest), *other.alike)
            differs = difference(worker_id, ((Alike.DATA, message.data_digest), *message.alike), first, theirs)
            if differs is not None:
                raise ConfigError(differs)
        return self._want_profile(member, worker_id, message)

    def _want_profile(self, member: Member, worker_id: WorkerId, message: WorkerReady) -> tuple[Command, ...]:
        """Look for the profile of a worker's kind; of thousands the first one alone is asked for its key."""
        kind = member.spec.kind
        if kind in self._known:
            return ()
        if (wanted := self._wanted.get(kind)) is None:
            key = self._key(member, message)
            self._wanted[kind] = _Wanted(key=key, num_devices=member.spec.num_devices, workers={worker_id})
            return (LookUpProfile(key=key, kind=kind),)
        wanted.workers.add(worker_id)
        return self._ask(wanted, worker_id) if wanted.is_unmeasured else ()

    def _key(self, member: Member, message: WorkerReady) -> str:
        assert member.hello is not None
        threads, memory_bytes = self._share(member)
        named = (member.spec.device,) if member.spec.device != DEFAULT_KIND else ()
        return profile_key(
            self._job,
            layer_names=message.layer_names,
            parameters=message.parameters,
            device=(
                message.device_name,
                message.device_memory_bytes or memory_bytes,
                threads,
                member.hello.num_cores,
                *named,
            ),
            versions=(member.hello.python_version, message.torch_version),
        )

    def take_profile(self, event: ProfileFound) -> tuple[Command, ...]:
        """Use a cached profile, or have a worker measure one."""
        wanted = self._wanted[event.kind]
        if event.profile_json is not None:
            try:
                self._know(event.kind, profile_from_json(event.profile_json, source=f"cached profile {wanted.key}"))
            except ConfigError:
                pass  # torn or of an older version: measured again, and overwritten
            else:
                return ()
        return self._have_measured(event.kind)

    def take_measurement(self, member: Member, message: Profiled) -> tuple[Command, ...]:
        """Use a measured profile, and have it cached. Raises PeerError for one that nobody asked for."""
        kind = member.spec.kind
        wanted = self._wanted.get(kind)
        if wanted is None or kind in self._known:
            raise PeerError("sent a profile that nobody asked for")
        self._know(kind, profile_from_json(message.profile_json, source="measured profile"))
        wanted.measures = None
        return (Store(key=wanted.key, value_json=message.profile_json),)

    def worker_lost(self, worker_id: WorkerId) -> tuple[Command, ...]:
        """A worker has ended, and is started again: have another one measure what it was to."""
        self._waiting.pop(worker_id, None)
        kind = self._members[worker_id.node].spec.kind
        wanted = self._wanted.get(kind)
        if wanted is None or kind in self._known:
            return ()
        wanted.workers.discard(worker_id)
        if wanted.measures is None or wanted.measures.node != worker_id.node:
            return ()
        return self._have_measured(kind)

    def node_lost(self, node: str) -> tuple[Command, ...]:
        """A node is gone: have another one measure what it was to."""
        lost: tuple[Command, ...] = ()
        for worker_id in self._members[node].worker_ids:
            lost = self.worker_lost(worker_id) or lost
        return lost

    def hold_back(self, worker: WorkerUp) -> tuple[Command, ...] | None:
        """Have a worker wait that is ready while others train, until its kind's profile is known; None if it is."""
        kind = self._members[worker.node].spec.kind
        if kind in self._known:
            return None
        is_first = not any(self._members[other.node].spec.kind == kind for other in self._waiting)
        self._waiting[WorkerId(node=worker.node, device=worker.device)] = worker
        text = f"{worker.node} is the first node of kind {kind}: the model's layers are measured there before it trains"
        return (notice(worker.t_s, "info", text),) if is_first else ()

    def refuse_others(self, kinds: tuple[NodeKind, ...]) -> tuple[str, ...]:
        """Forget the profiles of all but these kinds; returns the nodes of the others that wait."""
        nodes = tuple(sorted({worker.node for worker in self.take_waiting()}))
        for name in self._known.keys() - {kind.name for kind in kinds}:
            del self._known[name], self._wanted[name]  # nothing can be planned with them
        return nodes

    def take_waiting(self) -> tuple[WorkerUp, ...]:
        """Return the workers that waited, and whose kind's profile is known now."""
        known = self._known
        due = [each for each in self._waiting if self._members[each.node].spec.kind in known]
        return tuple(self._waiting.pop(worker_id) for worker_id in due)

    @property
    def is_complete(self) -> bool:
        """All nodes that were asked for are ready, and the profile of each kind is known."""
        return self._members.are_all_ready and all(member.spec.kind in self._known for member in self._members.ready)

    def waiting_for(self) -> str:
        """What is missing, for an error message."""
        slow = self._members.in_state(MemberState.CONNECTING, MemberState.CONNECTED)
        if slow:
            return ", ".join(f"{member.spec.name} ({member.state})" for member in slow)
        kinds = {member.spec.kind for member in self._members.ready} - self._known.keys()
        return "the model's profile" + (f" on {', '.join(sorted(kinds))}" if kinds - {DEFAULT_KIND} else "")

    def _share(self, member: Member) -> tuple[int, int]:
        """The threads and the bytes of memory of each of a node's workers: the job's, or their share."""
        share, job = self._members.machines.share(member.spec.name), self._job
        threads = share.num_cores if job.torch_threads is None else job.torch_threads
        return threads, share.memory_bytes if job.device_memory_bytes is None else job.device_memory_bytes

    def _ask_again(self, node: str) -> tuple[Command, ...]:
        """Repeat what was asked of a node, whose agent may not have heard it."""
        asked = [(each, each.measures) for each in self._wanted.values() if each.measures is not None]
        return tuple(command for each, who in asked if who.node == node for command in self._ask(each, who))

    def _know(self, kind: str, profile: Profile) -> None:
        self._known[kind] = NodeKind(name=kind, profile=profile, devices_per_node=self._wanted[kind].num_devices)

    def _have_measured(self, kind: str) -> tuple[Command, ...]:
        """Ask any worker that is ready, or else the first that is."""
        wanted = self._wanted[kind]
        living = {member.spec.name for member in self._members.living if member.spec.kind == kind}
        there = [worker_id for worker_id in sorted(wanted.workers) if worker_id.node in living]
        wanted.is_unmeasured = not there
        wanted.measures = None
        return self._ask(wanted, there[0]) if there else ()

    def _ask(self, wanted: _Wanted, worker_id: WorkerId) -> tuple[Command, ...]:
        wanted.measures, wanted.is_unmeasured = worker_id, False
        return (Send(node=worker_id.node, message=ProfileRequest(device=worker_id.device)),)
