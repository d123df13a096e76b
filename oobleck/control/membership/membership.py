"""Who is in the job: each node's state, and the workers on it.

CONNECTING -> CONNECTED -> READY -> LOST | LEFT
     └────────────┴──────────────────^
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from oobleck.control.journal import WorkerUp
from oobleck.control.protocol import Hello, WorkerAddress
from oobleck.errors import PeerError, UsageError
from oobleck.job import NodeSpec
from oobleck.planner import WorkerId

__all__ = ["Member", "MemberState", "Membership"]


_RESTARTS_KEPT = 16


class MemberState(StrEnum):
    CONNECTING = "connecting"
    CONNECTED = "connected"
    """Its agent speaks to us; not all of its workers are ready."""
    READY = "ready"
    LOST = "lost"
    LEFT = "left"


_ALLOWED = {
    MemberState.CONNECTING: {MemberState.CONNECTED, MemberState.LOST},
    MemberState.CONNECTED: {MemberState.READY, MemberState.LOST, MemberState.LEFT},
    MemberState.READY: {MemberState.CONNECTED, MemberState.LOST, MemberState.LEFT},
    MemberState.LOST: set(),
    MemberState.LEFT: set(),
}


@dataclass(slots=True)
class Member:
    """One node, as far as the coordinator knows."""

    spec: NodeSpec
    state: MemberState = MemberState.CONNECTING
    hello: Hello | None = None
    address: str = ""
    clock_offset_s: float = 0.0
    """Add to the node's monotonic clock to get ours."""
    last_heard_s: float = 0.0
    agent_pid: int = 0
    """Distinguishes the agent that was taken in from another that was started since."""
    ready: dict[int, WorkerUp] = field(default_factory=dict)
    """By device."""
    ready_since: int = 0
    """The generation in force when it became ready: it has no part in plans up to that one."""
    is_draining: bool = False
    is_leaving: bool = False
    """It has had notice of its end, and is to be drained as soon as it trains."""
    is_dismissed: bool = False
    """Drained, and asked to end."""
    restarts: tuple[tuple[float, int], ...] = ()
    """When its workers were started again, each with the newest step that was ever committed by then; the last few."""
    last_words: str = ""
    """Why its workers were given up, if they were."""
    gone: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By device, until another worker is ready there: the process ids of those whose end was taken in.

    All of them are reported again to a new master.
    """
    shutdown: set[int] = field(default_factory=set)
    """Devices whose worker was asked to end, to be started again once it has."""
    is_banned: bool = False
    """The user wants it gone: it is not tried again."""
    worker_ids: tuple[WorkerId, ...] = field(init=False)
    """Its workers."""
    when_moved: Callable[[], None] = field(default=lambda: None, repr=False)
    """Called after each change of the state."""

    @property
    def is_ready(self) -> bool:
        return self.state is MemberState.READY

    def __post_init__(self) -> None:
        self.worker_ids = tuple(WorkerId(node=self.spec.name, device=device) for device in range(self.spec.num_devices))

    def meet(self, hello: Hello, *, address: str, now_s: float) -> None:
        """Note who speaks for the node; `address` is where SSH reached it."""
        self.hello = hello
        self.agent_pid = hello.pid
        self.address = self.spec.address or address
        self.clock_offset_s = now_s - hello.clock_s
        self.last_heard_s = now_s

    def note_ready(self, worker: WorkerUp, *, generation: int) -> None:
        """Note a worker that became ready in `generation`; the last one makes the node ready."""
        self.ready[worker.device] = worker
        self.gone.pop(worker.device, None)
        if len(self.ready) == self.spec.num_devices:
            self.ready_since = generation
            self.move_to(MemberState.READY)

    @property
    def taken_along(self) -> tuple[int, ...]:
        """Devices whose workers end with any other one: those that train, for a plan has all of a node or nothing."""
        return tuple(sorted(self.ready)) if self.is_ready else ()

    @property
    def is_returning(self) -> bool:
        """Whether its agent speaks to us, and is to have its workers ready."""
        return self.state is MemberState.CONNECTED and not self.is_dismissed

    def num_restarts(self, now_s: float, *, within_s: float, step: int) -> int:
        """How often its workers were started again of late, or since `step`, the newest that was ever committed."""
        return sum(t_s > now_s - within_s or before == step for t_s, before in self.restarts)

    def note_restart(self, device: int, pid: int, *, now_s: float, step: int, also: Iterable[int] = ()) -> None:
        """A worker has ended, and is started again, and so are those of `also`: until then the node is not ready.

        `step` is the newest that was ever committed.
        """
        self.restarts = (*self.restarts, (now_s, step))[-_RESTARTS_KEPT:]
        self.ready.pop(device, None)
        self.shutdown.discard(device)
        self._note_gone(device, pid)
        for other in also:
            self._note_gone(other, self.ready.pop(other).pid)
            self.shutdown.add(other)
        if self.is_ready:
            self.move_to(MemberState.CONNECTED)

    def _note_gone(self, device: int, pid: int) -> None:
        self.gone[device] = (*self.gone.get(device, ()), pid)

    def ban(self) -> None:
        """The user wants the node gone."""
        self.is_banned = True

    def stay(self) -> None:
        """The node is not drained after all."""
        self.is_draining = False

    def dismiss(self) -> None:
        """The node is drained: its agent is there until it says goodbye; its workers are not."""
        self.is_dismissed = True
        self.move_to(MemberState.CONNECTED)

    def move_to(self, state: MemberState) -> None:
        """Change the state. Raises PeerError when the node's own words ask for what cannot be."""
        if state not in _ALLOWED[self.state]:
            raise PeerError(f"{self.spec.name} cannot become {state} while it is {self.state}")
        self.state = state
        self.when_moved()


class Membership:
    """All nodes of the job, in the hostfile's order."""

    def __init__(self, nodes: tuple[NodeSpec, ...]) -> None:
        self._members: dict[str, Member] = {}
        self._in_state: dict[tuple[MemberState, ...], tuple[Member, ...]] = {}
        self._without_part: dict[int, tuple[str, ...]] = {}
        """What `in_state` has answered since any of them changed its state."""
        self._ready_names: frozenset[str] | None = None
        self._all_save: bool | None = None
        self._on_host: defaultdict[str, list[Member]] = defaultdict(list)
        """The nodes of each machine once somebody has asked, for thousands ask when a run begins."""
        for spec in nodes:
            self._take(spec)

    def __getitem__(self, node: str) -> Member:
        return self._members[node]

    def __contains__(self, node: str) -> bool:
        return node in self._members

    def add(self, spec: NodeSpec) -> Member:
        """Take in a node that is new, or that was lost or has left. Raises UsageError for one that is here."""
        known = self._members.get(spec.name)
        if known is not None and known.state not in (MemberState.LOST, MemberState.LEFT):
            raise UsageError(f"{spec.name} is in the job already ({known.state})")
        return self._take(spec)

    def _take(self, spec: NodeSpec) -> Member:
        self._members[spec.name] = member = Member(spec, when_moved=self._forget)
        self._forget()
        self._on_host.clear()
        return member

    def _near(self, member: Member) -> Sequence[Member]:
        """Return the nodes of a node's machine, itself included."""
        if not self._on_host:
            for each in self._members.values():
                self._on_host[each.spec.host].append(each)
        return self._on_host[member.spec.host]

    def _forget(self) -> None:
        """What is remembered of who is in which state is not true any more."""
        self._in_state.clear()
        self._without_part.clear()
        self._ready_names = self._all_save = None

    def in_state(self, *states: MemberState) -> tuple[Member, ...]:
        known = self._in_state.get(states)
        if known is None:
            # A list, which is quicker than a generator: thousands of nodes are asked for at every change.
            known = tuple([member for member in self._members.values() if member.state in states])
            self._in_state[states] = known
        return known

    @property
    def all(self) -> tuple[Member, ...]:
        return tuple(self._members.values())

    def took_part(self, node: str, generation: int) -> bool:
        """Return whether a node has lived, as the same worker, ever since the plan of `generation` was ordered."""
        member = self._members[node]
        return member.state is MemberState.READY and member.ready_since < generation

    def without_part(self, generation: int) -> tuple[str, ...]:
        """Return the nodes for which `took_part` is false; remembered until one of them moves."""
        known = self._without_part.get(generation)
        if known is None:
            ready, members = MemberState.READY, self._members.items()
            known = tuple(name for name, each in members if each.state is not ready or each.ready_since >= generation)
            self._without_part[generation] = known
        return known

    def hear(self, worker_ids: Iterable[WorkerId], now_s: float) -> list[WorkerId]:
        """Note that workers spoke; return those of them whose node was not given up."""
        members = self._members
        living = (MemberState.READY, MemberState.CONNECTED)
        heard = []
        for worker_id in worker_ids:
            member = members[worker_id.node]
            if member.state in living:
                if member.last_heard_s < now_s:
                    member.last_heard_s = now_s
                heard.append(worker_id)
        return heard

    @property
    def clock_offsets_s(self) -> Mapping[str, float]:
        """By node: what its clock has to be given to say what ours does."""
        return {name: member.clock_offset_s for name, member in self._members.items()}

    @property
    def first_ready_worker(self) -> WorkerUp | None:
        """Any worker that is ready, on a node whose agent speaks to us."""
        for member in self._members.values():
            if member.state in (MemberState.CONNECTED, MemberState.READY) and member.ready:
                return next(iter(member.ready.values()))
        return None

    @property
    def living(self) -> tuple[Member, ...]:
        """Those whose agent speaks to us."""
        return self.in_state(MemberState.CONNECTED, MemberState.READY)

    @property
    def returning(self) -> tuple[Member, ...]:
        """Those whose workers are on their way."""
        return tuple(member for member in self.in_state(MemberState.CONNECTED) if member.is_returning)

    @property
    def ready(self) -> tuple[Member, ...]:
        return self.in_state(MemberState.READY)

    @property
    def ready_names(self) -> frozenset[str]:
        """The names of the nodes that are ready; remembered until one of them moves."""
        if self._ready_names is None:
            self._ready_names = frozenset(member.spec.name for member in self.ready)
        return self._ready_names

    @property
    def addresses(self) -> tuple[WorkerAddress, ...]:
        """Where the workers listen that are ready."""
        workers = (worker for member in self.ready for worker in member.ready.values())
        return tuple(worker.address for worker in workers if worker.address is not None)

    @property
    def all_save(self) -> bool:
        """Whether each worker that is ready has a place to save in, and there is one; remembered until a node moves."""
        if self._all_save is None:
            workers = [worker for member in self.ready for worker in member.ready.values()]
            self._all_save = bool(workers) and all(worker.saves for worker in workers)
        return self._all_save

    def sharing_device(self, member: Member) -> int:
        """How many workers at most compute on one of a node's devices, over all nodes of its machine."""
        near = self._near(member)
        return max(sum(each.spec.devices.count(device) for each in near) for device in member.spec.devices)

    def sharing_host(self, member: Member) -> int:
        """How many workers the machine of a node runs, over all of its nodes."""
        return sum(each.spec.num_devices for each in self._near(member))
