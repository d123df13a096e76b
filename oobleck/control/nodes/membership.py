"""Which nodes are in the job: each node's state, and its workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import chain

from oobleck.control.journal import WorkerUp
from oobleck.control.protocol import Hello, WorkerAddress
from oobleck.errors import PeerError, UsageError
from oobleck.job import NodeSpec, relocated
from oobleck.planner import WorkerId

from .machines import Machines

_RESTARTS_KEPT = 16
_MOST_MEASURED = 64
# More ends than a node can have before all of them are reported.
_ENDS_KEPT = 8
_DERIVED = ("living_names", "ready_names", "ready_kinds", "ready_worker_ids", "all_save")
"""The cached properties of `Membership`, which any change of a member outdates."""


class MemberState(StrEnum):
    CONNECTING = "connecting"
    CONNECTED = "connected"
    """Its agent speaks to the master; not all of its workers are ready."""
    READY = "ready"
    LOST = "lost"
    LEFT = "left"


_ALLOWED = {
    MemberState.CONNECTING: {MemberState.CONNECTED, MemberState.LOST},
    MemberState.CONNECTED: {MemberState.READY, MemberState.LOST, MemberState.LEFT},
    # Back to CONNECTED, while a worker is started again, or once the node is drained.
    MemberState.READY: {MemberState.CONNECTED, MemberState.LOST, MemberState.LEFT},
    # A node that is lost or has left comes back as another member.
    MemberState.LOST: set(),
    MemberState.LEFT: set(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A worker ended, and was started again with the others of its node."""

    t_s: float
    device: int
    """That of the worker that ended."""
    step: int
    """The newest that was ever committed by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One node, as far as the coordinator knows. Only `Membership` replaces it."""

    spec: NodeSpec
    worker_ids: tuple[WorkerId, ...] = field(init=False)
    state: MemberState = MemberState.CONNECTING
    hello: Hello | None = None
    address: str = ""
    clock_offset_s: float = 0.0
    """Added to the node's monotonic clock, this gives the master's."""
    agent_pid: int = 0
    """Distinguishes the agent that was taken in from any that was started since."""
    ready: dict[int, WorkerUp] = field(default_factory=dict)
    """Keyed by device."""
    ready_since: int = 0
    """The generation in force when it became ready; it has no part in plans up to that one."""
    is_draining: bool = False
    has_notice: bool = False
    is_leaving: bool = False
    """It has notice, and is drained as soon as it trains."""
    is_dismissed: bool = False
    restarts: tuple[Restart, ...] = ()
    """The last few."""
    last_words: str = ""
    """Why its workers were given up, if they were."""
    gone: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The process ids of the last few ended workers, keyed by device. An agent may report any of them to a new master
    again, even once others are ready, or have ended, in their place."""
    shutdown: frozenset[int] = frozenset()
    """Devices whose worker was asked to end, and is started again once it has."""
    is_banned: bool = False
    """The user wants the node gone: it is not tried again."""
    is_tried_again: bool = False
    """It is lost, and the master connects to it again after a while."""

    def __post_init__(self) -> None:
        name = self.spec.name
        worker_ids = tuple([WorkerId(node=name, device=device) for device in range(self.spec.num_devices)])
        object.__setattr__(self, "worker_ids", worker_ids)

    @property
    def is_ready(self) -> bool:
        return self.state is MemberState.READY

    @property
    def machine(self) -> str:
        """Equal for nodes of one machine; the host's name until the agent has reported its machine."""
        return (self.hello.machine if self.hello is not None else "") or self.spec.host

    @property
    def taken_along(self) -> tuple[int, ...]:
        """Devices whose workers end with any other one: all, once they train: a plan has all of a node or nothing."""
        return tuple(sorted(self.ready)) if self.is_ready else ()

    @property
    def is_returning(self) -> bool:
        """Whether its agent speaks to the master, and is to have its workers ready."""
        return self.state is MemberState.CONNECTED and not self.is_dismissed

    def recent_restarts(self, now_s: float, *, within_s: float, step: int) -> tuple[Restart, ...]:
        """Return the restarts within `within_s`, and those since `step`, the newest ever committed."""
        return tuple(each for each in self.restarts if each.t_s > now_s - within_s or each.step == step)


@dataclass
class Membership:
    """All nodes of the job, in the hostfile's order. It alone changes what is known of each. A value on the wire."""

    _members: dict[str, Member] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Not a field of `Member`: it changes with every message, and must not discard everything that is derived.
        self._heard_s: dict[str, float] = {}
        self.machines = Machines()
        self._kinds: dict[str, str] = {}
        self._known_kinds: set[str] = set()
        self._domains: dict[str, str] = {}
        # What follows from the members is remembered until one of them changes: thousands of them, asked for often.
        self._counting: dict[str, frozenset[int] | None] = {}
        self._clock_offsets_s: dict[str, float] = {}
        self._addresses: dict[str, tuple[tuple[int, WorkerAddress], ...]] = {}
        self._num_in: Counter[MemberState] = Counter()
        self._in_state: dict[tuple[MemberState, ...], tuple[Member, ...]] = {}
        self._without_part: dict[int, tuple[str, ...]] = {}
        known, self._members = self._members, {}
        for member in known.values():
            self._take(member)

    @classmethod
    def of(cls, nodes: Iterable[NodeSpec]) -> Membership:
        """Return the membership of nodes that none has reached yet."""
        return cls({spec.name: Member(spec=spec) for spec in nodes})

    def __getitem__(self, node: str) -> Member:
        return self._members[node]

    def __contains__(self, node: str) -> bool:
        return node in self._members

    # --- what changes a member ---------------------------------------------------------------------------------

    def add(self, spec: NodeSpec) -> None:
        """Take in a node that is new, or that was lost or has left. Raises UsageError for one that is present."""
        known = self._members.get(spec.name)
        if known is not None and known.state not in (MemberState.LOST, MemberState.LEFT):
            raise UsageError(f"{spec.name} is in the job already ({known.state})")
        self._take(Member(spec=spec))

    def _take(self, member: Member) -> None:
        spec = member.spec
        self._heard_s[spec.name] = 0.0
        self._kinds.setdefault(spec.name, spec.kind)
        self._known_kinds.add(spec.kind)
        self._domains.pop(spec.name, None)
        if spec.domain:
            self._domains[spec.name] = spec.domain
        self._put(member)
        self.machines.put(spec, member.hello)

    def _put(self, member: Member) -> None:
        """Replace what is known of a node, and forget what was derived from all."""
        name = member.spec.name
        before = self._members.get(name)
        states = {each.state for each in (before, member) if each is not None}
        self._members[name] = member
        self._num_in[member.state] += 1
        if before is not None:
            self._num_in[before.state] -= 1
        self._counting[name] = _counting(member)
        self._clock_offsets_s[name] = member.clock_offset_s
        self._addresses[name] = _addresses(member)
        # Members of other states are the same as before: what was remembered of these stays.
        for asked in [asked for asked in self._in_state if not states.isdisjoint(asked)]:
            del self._in_state[asked]
        self._without_part.clear()
        for derived in _DERIVED:
            self.__dict__.pop(derived, None)

    def relocate(self, specs: Mapping[str, NodeSpec]) -> None:
        """Reach nodes by these specs, which may have changed."""
        for member in tuple(self._members.values()):
            spec = relocated(member.spec, specs)
            self._put(replace(member, spec=spec))
            self.machines.put(spec, member.hello)

    def meet(self, node: str, hello: Hello, *, address: str, now_s: float) -> None:
        """Note which agent speaks for the node; `address` is where SSH reached it."""
        member = self._members[node]
        if member.state is MemberState.CONNECTING:  # else it was reached again
            member = _moved(member, MemberState.CONNECTED)
        living = {worker.device: worker.pid for worker in hello.workers}
        member = replace(
            member,
            hello=hello,
            agent_pid=hello.pid,
            address=member.spec.address or address,
            clock_offset_s=now_s - hello.clock_s,
            # A worker that was to end has ended if the agent has another one now.
            shutdown=frozenset(
                device for device in member.shutdown if living.get(device) in (None, member.gone[device][-1])
            ),
        )
        self._put(member)
        self.machines.put(member.spec, hello)
        self._heard_s[node] = now_s

    def note_connected(self, node: str, *, agent_pid: int) -> None:
        # The pid shows later whether the agent that answers is still the one that the earlier master had.
        self._put(replace(_moved(self._members[node], MemberState.CONNECTED), agent_pid=agent_pid))

    def note_ready(self, worker: WorkerUp, *, generation: int) -> None:
        """Note a worker that became ready in `generation`; a node is ready once its last worker is."""
        member = self._members[worker.node]
        shutdown = member.shutdown - {worker.device}
        member = replace(member, ready={**member.ready, worker.device: worker}, shutdown=shutdown)
        if len(member.ready) == member.spec.num_devices:
            member = replace(_moved(member, MemberState.READY), ready_since=generation)
            self._kinds[worker.node] = member.spec.kind
        self._put(member)

    def note_restart(self, worker_id: WorkerId, pid: int, *, now_s: float, step: int, also: Iterable[int] = ()) -> None:
        """Note that a worker has ended and is started again, with those of `also`; until then the node is not ready.

        `step` is the newest that was ever committed.
        """
        member = self._members[worker_id.node]
        # The workers of `also` live until they obey. Their pids are noted now, so that their exits are recognized.
        ended = {worker_id.device: pid} | {device: member.ready[device].pid for device in also}
        member = replace(
            member,
            restarts=(*member.restarts, Restart(t_s=now_s, device=worker_id.device, step=step))[-_RESTARTS_KEPT:],
            ready={device: worker for device, worker in member.ready.items() if device not in ended},
            shutdown=member.shutdown - {worker_id.device} | ended.keys() - {worker_id.device},
            gone={**member.gone, **{device: _with_end(member.gone, device, pid) for device, pid in ended.items()}},
        )
        self._put(_moved(member, MemberState.CONNECTED) if member.is_ready else member)

    def note_started(self, worker_id: WorkerId) -> None:
        """Note that another worker is started in place of one that was asked to end, if it was."""
        member = self._members[worker_id.node]
        if worker_id.device in member.shutdown:
            self._put(replace(member, shutdown=member.shutdown - {worker_id.device}))

    def note_last_words(self, node: str, words: str) -> None:
        self._put(replace(self._members[node], last_words=words))

    def note_notice(self, node: str) -> None:
        self._put(replace(self._members[node], has_notice=True))

    def note_leaving(self, node: str, *, is_leaving: bool) -> None:
        self._put(replace(self._members[node], is_leaving=is_leaving))

    def drain(self, node: str, *, is_draining: bool = True) -> None:
        """Note that a node is to leave, or stays after all."""
        self._put(replace(self._members[node], is_draining=is_draining))

    def dismiss(self, node: str) -> None:
        """Note that a node is drained: its workers are gone, its agent lives until it says goodbye."""
        self._put(replace(_moved(self._members[node], MemberState.CONNECTED), is_dismissed=True))

    def ban(self, node: str) -> None:
        self._put(replace(self._members[node], is_banned=True))

    def lose(self, node: str, *, is_tried_again: bool = False) -> None:
        self._put(replace(_moved(self._members[node], MemberState.LOST), is_tried_again=is_tried_again))

    def leave(self, node: str) -> None:
        """Raises PeerError for a node that was not connected."""
        self._put(_moved(self._members[node], MemberState.LEFT))

    # --- when they were last heard -----------------------------------------------------------------------------

    @property
    def heard_s(self) -> Mapping[str, float]:
        return self._heard_s

    def hear_node(self, node: str, now_s: float) -> None:
        self._heard_s[node] = max(self._heard_s[node], now_s)

    def hear(self, worker_ids: Iterable[WorkerId], now_s: float) -> list[WorkerId]:
        """Note that workers sent something; return those that count: neither they nor their node were given up."""
        counting, heard_s = self._counting, self._heard_s
        heard = []
        for worker_id in worker_ids:  # this runs for thousands of nodes at every step of a recovery
            node, device = worker_id
            if (devices := counting[node]) is not None:
                if heard_s[node] < now_s:
                    heard_s[node] = now_s
                if device in devices:
                    heard.append(worker_id)
        return heard

    def hear_nodes(self, heard: Iterable[tuple[str, float]]) -> None:
        heard_s = self._heard_s
        for node, at_s in heard:
            # A relay's report may be older than what was heard since; a lease never moves back.
            if at_s > heard_s[node]:
                heard_s[node] = at_s

    def forgive(self, now_s: float) -> None:
        """Extend all leases: this master was held up, and the nodes' messages wait to be read."""
        for node in self.living_names:
            self.hear_node(node, now_s)

    def expect_words(self, until_s: float) -> None:
        """Begin all leases at `until_s`: a new master has to reach all nodes before it can hear any."""
        for node in self.living_names:
            self._heard_s[node] = until_s

    # --- what is read ------------------------------------------------------------------------------------------

    def in_state(self, *states: MemberState) -> tuple[Member, ...]:
        known = self._in_state.get(states)
        if known is None:
            # A list is quicker than a generator, and this reads thousands of nodes at every change.
            known = tuple([member for member in self._members.values() if member.state in states])
            self._in_state[states] = known
        return known

    @property
    def kinds(self) -> Mapping[str, str]:
        """The kind of every node that ever was in the job. One that is back with other devices keeps its kind until it
        is ready: plans may still name the node, and its new kind may not have a profile yet."""
        return self._kinds

    @property
    def known_kinds(self) -> Set[str]:
        """All kinds that nodes of the job were ever of."""
        return self._known_kinds

    @property
    def domains(self) -> Mapping[str, str]:
        """The failure domains that are named, by node."""
        return self._domains

    @property
    def clock_offsets_s(self) -> Mapping[str, float]:
        """By node: what its clock's times lack of the master's."""
        return self._clock_offsets_s

    @property
    def are_all_ready(self) -> bool:
        return not self._num_in[MemberState.CONNECTING] and not self._num_in[MemberState.CONNECTED]

    @property
    def all(self) -> tuple[Member, ...]:
        return tuple(self._members.values())

    @property
    def report_use(self) -> bool:
        """Whether agents report what their nodes use; on thousands of nodes no one reads it."""
        return len(self._members) <= _MOST_MEASURED

    def took_part(self, node: str, generation: int) -> bool:
        """Return whether a node has had the same workers ever since the plan of `generation` was ordered."""
        member = self._members[node]
        return member.state is MemberState.READY and member.ready_since < generation

    def without_part(self, generation: int) -> tuple[str, ...]:
        """Return the nodes for which `took_part` is false."""
        known = self._without_part.get(generation)
        if known is None:
            ready, members = MemberState.READY, self._members.items()
            known = tuple([name for name, each in members if each.state is not ready or each.ready_since >= generation])
            self._without_part[generation] = known
        return known

    @property
    def first_ready_worker(self) -> WorkerUp | None:
        """Any ready worker, on a node whose agent speaks to the master."""
        for member in self._members.values():
            if member.state in (MemberState.CONNECTED, MemberState.READY) and member.ready:
                return next(iter(member.ready.values()))
        return None

    @property
    def living(self) -> tuple[Member, ...]:
        """The nodes whose agents speak to the master."""
        return self.in_state(MemberState.CONNECTED, MemberState.READY)

    @cached_property
    def living_names(self) -> tuple[str, ...]:
        return tuple([member.spec.name for member in self.living])

    @property
    def returning(self) -> tuple[Member, ...]:
        """The nodes whose workers are on their way."""
        return tuple(member for member in self.in_state(MemberState.CONNECTED) if member.is_returning)

    @property
    def connecting(self) -> tuple[Member, ...]:
        return self.in_state(MemberState.CONNECTING)

    @property
    def are_all_leaving(self) -> bool:
        """Whether there is a node, and all that are present or on their way have notice of their end."""
        here = (member for member in self._members.values() if member.state not in (MemberState.LOST, MemberState.LEFT))
        first = next(here, None)
        return first is not None and first.has_notice and all(member.has_notice for member in here)

    @property
    def are_taken_away(self) -> bool:
        """Whether all nodes left have notice of their end; if none is left, whether all lost ones had."""
        left = self.living or tuple(member for member in self._members.values() if member.state is MemberState.LOST)
        return bool(left) and all(member.has_notice for member in left)

    @property
    def ready(self) -> tuple[Member, ...]:
        return self.in_state(MemberState.READY)

    @cached_property
    def ready_names(self) -> frozenset[str]:
        return frozenset([member.spec.name for member in self.ready])

    @cached_property
    def ready_kinds(self) -> frozenset[str]:
        """The kinds of the ready nodes."""
        return frozenset([member.spec.kind for member in self.ready])

    @cached_property
    def ready_worker_ids(self) -> tuple[WorkerId, ...]:
        return tuple(chain.from_iterable([member.worker_ids for member in self.ready]))

    @property
    def addresses(self) -> tuple[tuple[int, WorkerAddress], ...]:
        """Where ready workers listen, each with the generation in which its node became ready."""
        return tuple(chain.from_iterable(self._addresses.values()))

    @cached_property
    def all_save(self) -> bool:
        """Whether a worker is ready, and each ready one has a place to save in."""
        workers = (worker for member in self.ready for worker in member.ready.values())
        return bool(self.ready) and all(worker.saves for worker in workers)


def _with_end(gone: Mapping[int, tuple[int, ...]], device: int, pid: int) -> tuple[int, ...]:
    return (*gone.get(device, ()), pid)[-_ENDS_KEPT:]


def _counting(member: Member) -> frozenset[int] | None:
    """The devices of a node whose workers were not asked to end; None where the node was given up."""
    if member.state not in (MemberState.READY, MemberState.CONNECTED):
        return None
    return frozenset(range(len(member.spec.devices))) - member.shutdown


def _addresses(member: Member) -> tuple[tuple[int, WorkerAddress], ...]:
    """Where a node's workers listen, if it is ready, each with the generation in which it became ready."""
    workers = member.ready.values() if member.is_ready else ()
    return tuple([(member.ready_since, worker.address) for worker in workers if worker.address is not None])


def _moved(member: Member, state: MemberState) -> Member:
    """Return the member in another state. Raises PeerError for a move that no message may cause."""
    if state not in _ALLOWED[member.state]:
        raise PeerError(f"{member.spec.name} cannot become {state} while it is {member.state}")
    return replace(member, state=state)
