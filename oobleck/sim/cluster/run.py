"""The cluster mode: a whole run, with the real master, agents and coordinator, on virtual nodes in virtual time."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

import trio

from oobleck.control.events import AddRequested, Command, End, Event, StopRequested
from oobleck.control.journal import JobEnded, JournalEntry, Summary, summarize
from oobleck.control.replay import BooksImage, RunBooks
from oobleck.control.speed import LINK_KEYS
from oobleck.control.training import Coordinator, ReplayedRun
from oobleck.job import JobSpec, NodeSpec
from oobleck.planner import NodeKind, Profile, profile_to_json
from oobleck.roles.master import Master, RunClock
from oobleck.sim import trace as traces
from oobleck.sim.costs import Costs, NodeKinds
from oobleck.wire import decode_json, encode_json

from .cluster import PYTHON_VERSION, VirtualCluster
from .determinism import run_virtual
from .tempo import Delays
from .world import World

_STARTED_AT = "2026-01-01T00:00:00Z"
_GRACE_S = 600.0
"""How long a run may take to end once its trace has."""


@dataclass(frozen=True, slots=True)
class Decided:
    """What the coordinator was fed, and what it commanded."""

    now_s: float
    event: Event | None
    """None for a deadline, or the start."""
    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRun:
    """What came of a run."""

    entries: tuple[JournalEntry, ...]
    end: End
    decisions: tuple[Decided, ...]
    """All that went through the coordinator, where it was asked for; else none."""

    @property
    def digest(self) -> str:
        """Equal for equal runs."""
        return journal_digest(self.entries)

    @property
    def summary(self) -> Summary:
        return summarize(self.entries)


def run_cluster(
    trace: traces.Trace,
    *,
    job: JobSpec,
    profile: Profile,
    seed: int = 0,
    devices_per_node: int = 1,
    kinds: Sequence[NodeKind] = (),
    delays: Delays | None = None,
    costs: Costs | None = None,
    has_profile: bool = True,
    observe: Callable[[JournalEntry], None] | None = None,
    keep_decisions: bool = False,
) -> ClusterRun:
    """Run a job through a trace, from virtual second 0; it is stopped, after the step in flight, when the trace ends.

    The same arguments give the same journal. `profile` says how long the job's layers take; the job's own model and
    text are not looked at. `costs` say what orders, groups and commits take, beside the `delays`; without them orders
    and commits take no time. `kinds` are those that the trace's nodes are of, if they are of several: nothing is cached
    then. Without `has_profile` it is not cached, so that a worker measures it first. `observe` gets
    each journal entry. Raises trio.TooSlowError when the run does not end within ten minutes of its trace, and what
    breaks a promise of the protocol as an `ExceptionGroup` of Violations.
    """
    nodes = NodeKinds(kinds, trace.kinds) if kinds else NodeKinds.alike(profile, devices_per_node=devices_per_node)
    simulation = _Simulation(trace, job, nodes, seed, delays or Delays(), costs)
    if not has_profile or kinds:
        simulation.profiles.profile_json = None
    simulation.observers = [observe] if observe else []
    simulation.keeps_decisions = keep_decisions
    end = run_virtual(simulation.run, seed=seed, horizon_s=trace.duration_s + _GRACE_S, time=simulation.time)
    return ClusterRun(entries=tuple(simulation.journal.entries), end=end, decisions=tuple(simulation.decisions))


class _Journal:
    """Implements `roles.master_ports.Journal`."""

    def __init__(self) -> None:
        self.entries: list[JournalEntry] = []

    def append(self, entry: JournalEntry) -> None:
        self.entries.append(entry)


class _Profiles:
    """Implements `roles.master_ports.ProfileCache`."""

    def __init__(self, profile_json: str | None) -> None:
        """`profile_json` is there for every key of a profile; None for none but those that are stored."""
        self.profile_json = profile_json
        self._stored: dict[str, str] = {}

    def load(self, key: str) -> str | None:
        return self._stored.get(key, None if key.startswith(LINK_KEYS) else self.profile_json)

    def store(self, key: str, profile_json: str) -> None:
        self._stored[key] = profile_json


def journal_digest(entries: Iterable[JournalEntry]) -> str:
    """Return a digest of everything that a journal says: equal for equal runs, in any process."""
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(encode_json(entry) + b"\n")
    return digest.hexdigest()


class _RecordingCoordinator(Coordinator):
    """Keeps what goes in and what comes out. While its process is stopped, nothing goes in."""

    decisions: list[Decided] | None = None
    frozen_until_s = 0.0
    unread: deque[Event]
    """What has happened while it was stopped."""

    def start(self, now_s: float) -> list[Command]:
        return self._keep(now_s, None, super().start(now_s))

    def handle(self, now_s: float, event: Event) -> list[Command]:
        if now_s < self.frozen_until_s:
            self.unread.append(event)
            return []
        return [*self._go_on(now_s), *self._keep(now_s, event, super().handle(now_s, event))]

    def handle_deadline(self, now_s: float) -> list[Command]:
        if now_s < self.frozen_until_s:
            return []
        if self.frozen_until_s:
            return self._go_on(now_s)
        return self._keep(now_s, None, super().handle_deadline(now_s))

    def next_deadline(self) -> float:
        return self.frozen_until_s or super().next_deadline()

    def _go_on(self, now_s: float) -> list[Command]:
        """Act on what should have been done long ago, before anything is read: the worst that can happen."""
        if not self.frozen_until_s:
            return []
        self.frozen_until_s = 0.0
        commands = self._keep(now_s, None, super().handle_deadline(now_s))
        while self.unread:
            event = self.unread.popleft()
            commands += self._keep(now_s, event, super().handle(now_s, event))
        return commands

    def _keep(self, now_s: float, event: Event | None, commands: list[Command]) -> list[Command]:
        if self.decisions is not None:
            self.decisions.append(Decided(now_s, event, tuple(commands)))
        return commands


class _Simulation:
    """One run. Only `run` may be called, once."""

    def __init__(
        self, trace: traces.Trace, job: JobSpec, kinds: NodeKinds, seed: int, delays: Delays, costs: Costs | None
    ) -> None:
        self.journal = _Journal()
        self.decisions: list[Decided] = []
        self.keeps_decisions = False
        self.observers: Sequence[Callable[[JournalEntry], None]] = ()
        self._trace = trace
        self._job = job
        self._kinds = kinds
        self.profiles = _Profiles(profile_to_json(kinds.profile))
        self._world = World.make(kinds, delays, seed, costs)
        self.time = self._world.time
        self._master: Master | None = None
        self._life = trio.CancelScope()
        self._down_s = 0.0
        self._unheard: list[Event] = []
        """What was submitted while there was no master, or while it was stopped."""
        self._coordinator: _RecordingCoordinator | None = None

    async def run(self) -> End:
        async with trio.open_nursery() as nursery:
            cluster = VirtualCluster(self._job.tag, self._trace.nodes, self._world, nursery)
            for node in self._trace.start:
                cluster.join(node)
            nursery.start_soon(self._play, cluster, nursery)
            end = await self._run_masters(cluster)
            nursery.cancel_scope.cancel()
        return end

    async def _run_masters(self, cluster: VirtualCluster) -> End:
        """One master, and after each crash another, until the run has ended."""
        while True:
            cluster.thaw_master()
            master = self._make_master(cluster)
            for event in self._unheard:
                master.submit(event)
            self._unheard.clear()
            with trio.CancelScope() as self._life:
                self._master = master
                return await master.run()
            self._master = None
            if self.journal.entries and isinstance(entry := self.journal.entries[-1], JobEnded):
                return End(exit_code=entry.exit_code, reason=entry.reason)  # it was only saying farewell
            await trio.sleep(self._down_s)

    async def _play(self, cluster: VirtualCluster, nursery: trio.Nursery) -> None:
        """Let each event of the trace happen at its time, whatever the run is doing, and then stop the run."""
        for event in self._trace.events:
            await trio.sleep_until(event.t_s)
            self._strike(event, cluster, nursery)
        await trio.sleep_until(self._trace.duration_s)
        self._submit(StopRequested(now=False, exit_code=0, reason="the trace ends"))

    def _strike(self, event: traces.TraceEvent, cluster: VirtualCluster, nursery: trio.Nursery) -> None:
        match event:
            case traces.Lost(node=node):
                cluster.lose(node)
            case traces.Joined(node=node):
                cluster.join(node)
                self._submit(AddRequested(spec=self._spec(node)))
            case traces.Frozen(node=node):
                cluster.freeze(node)
            case traces.Thawed(node=node):
                cluster.thaw(node)
            case traces.Slowed(node=node, factor=factor):
                cluster.slow_down(node, factor)
            case traces.WorkerCrashed(node=node, device=device):
                cluster.crash_worker(node, device)
            case traces.ForkServerCrashed(node=node):
                cluster.crash_fork_server(node)
            case traces.AgentCrashed(node=node):
                cluster.crash_agent(node)
            case traces.AgentFrozen(node=node, frozen_s=frozen_s):
                cluster.freeze_agent(node, frozen_s)
            case traces.MasterCrashed(down_s=down_s):
                self._crash_master(down_s)
            case traces.MasterFrozen(frozen_s=frozen_s):
                self._freeze_master(cluster, nursery, frozen_s)
            case traces.Partitioned(nodes=nodes, spares_master=True):
                cluster.cut_links(nodes)
            case traces.Partitioned(nodes=nodes):
                cluster.separate(nodes)
            case traces.Healed():
                cluster.heal()
            case traces.Noticed(node=node):
                cluster.notice(node)
            case _:
                assert_never(event)

    def _make_master(self, cluster: VirtualCluster) -> Master:
        """A master that takes over what is left of the run, or starts it where nothing is."""
        replayed = _replay(self.journal.entries)
        if replayed is not None and not any(map(cluster.is_alive, replayed.nodes)):
            replayed = None
        if replayed is None:
            cluster.end_all()
            self.journal.entries.clear()
        coordinator = _RecordingCoordinator(
            self._job,
            tuple(map(self._spec, self._trace.start)),
            started_at=_STARTED_AT,
            python_version=PYTHON_VERSION,
            replayed=replayed,
        )
        coordinator.unread = deque()
        self._coordinator = coordinator
        coordinator.decisions = self.decisions if self.keeps_decisions else None
        master = Master(
            coordinator,
            self._job,
            cluster=cluster,
            journal=self.journal,
            profiles=self.profiles,
            clock=RunClock(elapsed_s=trio.current_time()),
        )
        for observer in self.observers:
            master.observe(observer)
        return master

    def _spec(self, name: str) -> NodeSpec:
        return self._kinds.spec(name)

    def _submit(self, event: Event) -> None:
        """Send to the master, or to the next one, if there is none just now."""
        is_frozen = self._coordinator is not None and self._coordinator.frozen_until_s
        if self._master is not None and not is_frozen:
            self._master.submit(event)
        else:
            self._unheard.append(event)

    def _crash_master(self, down_s: float) -> None:
        """The master ends where it stands; another is started after so many seconds."""
        self._down_s = down_s
        self._life.cancel()

    def _freeze_master(self, cluster: VirtualCluster, nursery: trio.Nursery, frozen_s: float) -> None:
        """The master is stopped, and continues where it stood."""
        coordinator = self._coordinator
        if self._master is None or coordinator is None:
            return
        until_s = max(coordinator.frozen_until_s, trio.current_time() + frozen_s)
        coordinator.frozen_until_s = until_s
        cluster.freeze_master(until_s)
        nursery.start_soon(self._thaw_master, cluster, coordinator, until_s)

    async def _thaw_master(self, cluster: VirtualCluster, coordinator: _RecordingCoordinator, until_s: float) -> None:
        await trio.sleep_until(until_s)
        if self._coordinator is not coordinator or self._master is None or coordinator.frozen_until_s > until_s:
            return  # another has taken its place, or it was stopped once more
        cluster.thaw_master()
        for event in self._unheard:
            self._master.submit(event)
        self._unheard.clear()


def _replay(entries: Sequence[JournalEntry]) -> ReplayedRun | None:
    """Read a journal as a real master does: an image of its first part, and the entries after it."""
    books, place = RunBooks(), len(entries) // 2
    for entry in entries[:place]:
        books.apply(entry)
    image = books.image()
    if image is not None:
        books = RunBooks.of_image(decode_json(BooksImage, encode_json(image)))
    for entry in entries[place:]:
        books.apply(entry)
    return books.finish()
