"""Before training: nodes start, workers get ready, and the model's profile on each kind of node becomes known.

wanted ── a worker is ready ──> looked up ── found ────────────────────────> known
                                    └── unmeasured ── all workers of a ──> measured ^
                                             ^        machine are ready        │
                                             └── one that measures is lost ────┘

Workers of one machine share its memory, its caches and its clock, so a pass takes longer while all compute than where
one does alone. A machine's workers therefore measure at the same time, as they will train. Where torch compiles, one of
them does so before, for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from oobleck import __version__
from oobleck.control.events import LookUpProfile, ProfileFound, Store, Turn
from oobleck.control.journal import Measured, MeasurementBegun, WorkerUp
from oobleck.control.nodes import Alike, Member, Membership, MemberState, difference
from oobleck.control.plans import profile_key
from oobleck.control.protocol import PROTOCOL_VERSION, Configure, Profiled, ProfileRequest, StartWorker, WorkerReady
from oobleck.errors import ConfigError, PeerError
from oobleck.job import DEFAULT_KIND, JobSpec
from oobleck.planner import NodeKind, Profile, WorkerId, profile_from_json, profile_to_json
from oobleck.planner.profiles import typical_profile


@dataclass(slots=True)
class _Wanted:
    """The source of a kind's profile."""

    key: str
    num_devices: int
    is_unmeasured: bool = False
    """No earlier run has left it, and no worker is asked to measure it."""
    is_compiled: bool = False
    """Where torch compiles, one worker has measured before the others of its machine, which use what it compiled."""
    asked: set[WorkerId] = field(default_factory=set)
    """The workers that measure it."""
    measured: dict[WorkerId, Profile] = field(default_factory=dict)
    workers: set[WorkerId] = field(default_factory=set)
    """The ready workers of the kind."""


class Preparation:
    """Decides what to ask of nodes until every worker is ready and the profile of every kind is known."""

    def __init__(self, job: JobSpec, members: Membership, *, run: str) -> None:
        self._job = job
        self._run = run
        self._members = members
        self._wanted: dict[str, _Wanted] = {}
        self._known: dict[str, NodeKind] = {}
        self._configured: dict[str, tuple[int, int]] = {}
        """The threads and the memory in bytes that each node's agent was told to give a worker."""
        self._waiting: dict[WorkerId, WorkerUp] = {}
        """Workers that became ready during training, of kinds that have no profile yet."""

    @property
    def kinds(self) -> tuple[NodeKind, ...]:
        """The kinds whose profile is known, in the order in which it became known."""
        return tuple(self._known.values())

    def restore(self, kinds: tuple[NodeKind, ...]) -> None:
        self._known = {kind.name: kind for kind in kinds}

    def configure(self, turn: Turn, node: str) -> None:
        """Tell a node's agent about the job, and have its workers started."""
        member = self._members[node]
        self._configure(turn, member)
        for worker_id in member.worker_ids:
            turn.send(node, StartWorker(device=worker_id.device))
        for wanted in self._wanted.values():
            # The agent may never have received the request.
            self._ask(turn, [worker_id for worker_id in sorted(wanted.asked) if worker_id.node == node])
        for other in (self._members[name] for name in self._members.machines.touched_by(node)):
            # Agents of the same machine are told again if each of their workers has less by now, or more.
            if other in self._members.living and self._configured.get(other.spec.name) != self._share(other):
                self._configure(turn, other)

    def _configure(self, turn: Turn, member: Member) -> None:
        node = member.spec.name
        threads, memory_bytes = self._configured[node] = self._share(member)
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
            reports_use=self._members.report_use,
        )
        turn.send(node, configure)

    def note_ready(self, turn: Turn, member: Member, message: WorkerReady) -> None:
        """Look at a ready worker. Raises ConfigError if it differs in something that all workers must have alike."""
        worker_id = WorkerId(node=member.spec.name, device=message.device)
        other = self._members.first_ready_worker  # All others are like it.
        if other is not None:
            first = WorkerId(node=other.node, device=other.device)
            theirs = ((Alike.DATA, other.data_digest), *other.alike)
            differs = difference(worker_id, ((Alike.DATA, message.data_digest), *message.alike), first, theirs)
            if differs is not None:
                raise ConfigError(differs)
        kind = member.spec.kind
        if kind in self._known:
            return
        if (wanted := self._wanted.get(kind)) is None:
            key = self._key(member, message)  # The first worker alone decides it, not each of thousands.
            self._wanted[kind] = _Wanted(key=key, num_devices=member.spec.num_devices, workers={worker_id})
            turn.do((LookUpProfile(key=key, kind=kind),))
            return
        wanted.workers.add(worker_id)
        self._have_measured(turn)

    def _key(self, member: Member, message: WorkerReady) -> str:
        assert member.hello is not None
        threads, memory_bytes = self._share(member)
        num_workers = self._members.machines.share(member.spec.name).num_workers
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
                num_workers,
                *named,
            ),
            versions=(member.hello.python_version, message.torch_version),
        )

    def take_profile(self, turn: Turn, event: ProfileFound) -> None:
        """Use a cached profile, or have workers measure one."""
        wanted = self._wanted[event.kind]
        if event.profile_json is not None:
            try:
                self._know(event.kind, profile_from_json(event.profile_json, source=f"cached profile {wanted.key}"))
            except ConfigError:
                pass  # It is torn or of an older version: it is measured again, and overwritten.
            else:
                self._have_measured(turn)  # Another kind of the same machine may have waited for this one.
                return
        wanted.is_unmeasured = True
        self._have_measured(turn)

    def take_measurement(self, turn: Turn, member: Member, message: Profiled) -> None:
        """Use what the workers of a machine measured, once all have. Raises PeerError if it was not asked for."""
        kind, worker_id = member.spec.kind, WorkerId(node=member.spec.name, device=message.device)
        wanted = self._wanted.get(kind)
        if wanted is None or worker_id not in wanted.asked:
            if wanted is not None and worker_id in wanted.measured:
                return  # It was asked twice, as its agent was reached again.
            raise PeerError("sent a profile that it was not asked for")
        wanted.measured[worker_id] = profile_from_json(message.profile_json, source="measured profile")
        wanted.asked.remove(worker_id)
        if wanted.asked:
            return
        if not wanted.is_compiled:
            wanted.is_compiled = wanted.is_unmeasured = True
            wanted.measured.clear()
            self._have_measured(turn)
        else:
            profile = typical_profile([measured for _, measured in sorted(wanted.measured.items())])
            self._know(kind, profile)
            turn.do((Store(key=wanted.key, value_json=profile_to_json(profile)),))

    def worker_lost(self, turn: Turn, worker_id: WorkerId) -> None:
        """Have the others measure again what a lost worker was asked to."""
        self._waiting.pop(worker_id, None)
        kind = self._members[worker_id.node].spec.kind
        wanted = self._wanted.get(kind)
        if wanted is None or kind in self._known:
            return
        wanted.workers.discard(worker_id)
        # All workers of a node start again together, so their requests are lost with any of them.
        if any(each.node == worker_id.node for each in wanted.asked):
            wanted.is_unmeasured, wanted.asked = True, set()
            wanted.measured.clear()
        self._have_measured(turn)

    def node_lost(self, turn: Turn, node: str) -> None:
        for worker_id in self._members[node].worker_ids:
            self.worker_lost(turn, worker_id)
        self._have_measured(turn)  # Others of its machine may have waited for it alone.

    def hold_back(self, turn: Turn, worker: WorkerUp) -> bool:
        """Have a ready worker wait during training until its kind's profile is known; returns whether it waits."""
        kind = self._members[worker.node].spec.kind
        if kind in self._known:
            return False
        is_first = not any(self._members[other.node].spec.kind == kind for other in self._waiting)
        self._waiting[WorkerId(node=worker.node, device=worker.device)] = worker
        if is_first:
            text = "the model's layers are measured there before it trains"
            turn.note("info", f"{worker.node} is the first node of kind {kind}: {text}")
        return True

    def refuse_others(self, kinds: tuple[NodeKind, ...]) -> tuple[str, ...]:
        """Forget the profiles of all other kinds; return the nodes of those kinds that wait."""
        nodes = tuple(sorted({worker.node for worker in self.take_waiting()}))
        for name in self._known.keys() - {kind.name for kind in kinds}:
            del self._known[name], self._wanted[name]  # Nothing can be planned with them.
        return nodes

    def take_waiting(self) -> tuple[WorkerUp, ...]:
        """Return the workers that waited and whose kind's profile is known now."""
        known = self._known
        due = [each for each in self._waiting if self._members[each.node].spec.kind in known]
        return tuple(self._waiting.pop(worker_id) for worker_id in due)

    @property
    def is_complete(self) -> bool:
        """Whether all requested nodes are ready, and the profile of each kind is known."""
        return self._members.are_all_ready and self._members.ready_kinds <= self._known.keys()

    def waiting_for(self) -> str:
        """Name what is missing, for an error message."""
        slow = self._members.in_state(MemberState.CONNECTING, MemberState.CONNECTED)
        if slow:
            return ", ".join(f"{member.spec.name} ({member.state})" for member in slow)
        kinds = self._members.ready_kinds - self._known.keys()
        return "the model's profile" + (f" on {', '.join(sorted(kinds))}" if kinds - {DEFAULT_KIND} else "")

    def _share(self, member: Member) -> tuple[int, int]:
        """Return the threads and the bytes of memory of each of a node's workers: the job's, or their share."""
        share, job = self._members.machines.share(member.spec.name), self._job
        threads = share.num_cores if job.torch_threads is None else job.torch_threads
        return threads, share.memory_bytes if job.device_memory_bytes is None else job.device_memory_bytes

    def _know(self, kind: str, profile: Profile) -> None:
        self._known[kind] = NodeKind(name=kind, profile=profile, devices_per_node=self._wanted[kind].num_devices)

    def _have_measured(self, turn: Turn) -> None:
        """Have each kind that needs it measured on the machine of its first worker, once all workers there are ready.

        A machine with nodes of several kinds measures all of them at once.
        """
        for wanted in self._wanted.values():
            there = self._workers_beside_first(wanted) if wanted.is_unmeasured else []
            if there:
                if self._job.compile and not wanted.is_compiled and len(there) > 1:
                    there = there[:1]
                else:
                    wanted.is_compiled = True
                wanted.is_unmeasured, wanted.asked = False, set(there)
                turn.record(MeasurementBegun(t_s=turn.now_s, what=Measured.LAYERS, workers=tuple(there)))
                self._ask(turn, there)

    def _workers_beside_first(self, wanted: _Wanted) -> list[WorkerId]:
        """Return the ready workers on the machine of the first; none while others there are about to be ready."""
        living = {member.spec.name: member for member in self._members.living}
        there = [worker_id for worker_id in sorted(wanted.workers) if worker_id.node in living]
        if not there:
            return []
        first = living[there[0].node]
        for member in self._members.in_state(MemberState.CONNECTING, MemberState.CONNECTED):
            # A node whose agent has not spoken may be on this machine if the host's name is the same.
            host = first.spec.host if member.hello is None else first.machine
            is_beside = member.machine in (first.machine, host)
            if is_beside and not member.is_dismissed and not self._is_seen(member):
                return []
        return [worker_id for worker_id in there if living[worker_id.node].machine == first.machine]

    def _is_seen(self, member: Member) -> bool:
        """Return whether all workers of a node are ready, taken in or not, and it is known whether they measure."""
        wanted = self._wanted.get(member.spec.kind)
        if wanted is None or not wanted.workers.issuperset(member.worker_ids):
            return False
        return member.spec.kind in self._known or wanted.is_unmeasured or bool(wanted.asked)

    def _ask(self, turn: Turn, workers: Sequence[WorkerId]) -> None:
        for worker_id in workers:
            turn.send(worker_id.node, ProfileRequest(device=worker_id.device))
