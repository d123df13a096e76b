"""The cluster mode: a whole run, with the real master, agents and coordinator, on virtual nodes in virtual time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, assert_never

import trio

from oobleck.control.events import AddRequested, End, Event, ScriptEnded, StopRequested
from oobleck.control.journal import JobEnded, JournalEntry, Summary, summarize
from oobleck.control.replay import BooksImage, RunBooks
from oobleck.control.scripts import ReplayedRanks
from oobleck.control.speed import LINK_KEYS
from oobleck.control.training import ReplayedRun
from oobleck.job import JobSpec
from oobleck.job.ranks import RanksSpec
from oobleck.planner import NodeKind, Profile, profile_to_json
from oobleck.roles.master import Master, RunClock
from oobleck.sim import trace as traces
from oobleck.sim.costs import Costs, NodeKinds
from oobleck.wire import decode_json, encode_json

from .cluster import PYTHON_VERSION, VirtualCluster
from .determinism import run_virtual
from .ranks import VirtualRank, VirtualRankHost, VirtualScript
from .recording import Decided, Recording, ScriptsCoordinator, TrainingCoordinator
from .tempo import Delays
from .world import World

Replayed = TypeVar("Replayed", ReplayedRun, ReplayedRanks)

_STARTED_AT = "2026-01-01T00:00:00Z"
# A run ends at most this long after its trace.
_GRACE_S = 600.0
# Ranks end at most this long after their agents' orphan timeout.
_ORPHANS_END_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRun:
    entries: tuple[JournalEntry, ...]
    end: End
    decisions: tuple[Decided, ...]
    """Empty unless `run_cluster` keeps them."""

    @property
    def digest(self) -> str:
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
    """Run a job through a trace, from virtual second 0, and stop it after the step in flight when the trace ends.

    The same arguments give the same journal. Raises trio.TooSlowError when the run does not end within ten minutes of
    its trace, and an `ExceptionGroup` of Violations for broken promises of the protocol.

    Arguments:
        profile: the times of the job's layers; nothing reads the job's own model and text.
        kinds: the kinds that the trace names, if it names any; their profiles are never cached.
        costs: the times of orders, groups and commits, on top of `delays`; by default, orders and commits take none.
        has_profile: whether the profile is cached; otherwise a worker measures it first.
        observe: receives each journal entry.
    """
    nodes = (
        NodeKinds(kinds, trace.kinds, trace.domains)
        if kinds
        else NodeKinds.alike(profile, devices_per_node=devices_per_node, domain_of=trace.domains)
    )
    cached = profile_to_json(nodes.profile) if has_profile and not kinds else None
    simulation = _Simulation(trace, job, nodes, World.make(nodes, delays or Delays(), seed, costs), _Profiles(cached))
    simulation.observers = [observe] if observe else []
    simulation.keeps_decisions = keep_decisions
    time = simulation.world.time
    end = run_virtual(simulation.run, seed=seed, horizon_s=trace.duration_s + _GRACE_S, time=time)
    return ClusterRun(entries=tuple(simulation.journal.entries), end=end, decisions=tuple(simulation.decisions))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptsRun:
    entries: tuple[JournalEntry, ...]
    end: End
    ranks: tuple[VirtualRank, ...]
    """All ranks that ever ran, in the order of their starts."""
    left_at_end: tuple[VirtualRank, ...]
    left: tuple[VirtualRank, ...]
    """The ranks that still lived after all nodes had been well again for longer than the orphan timeout."""


def run_scripts(
    trace: traces.Trace,
    *,
    run: RanksSpec,
    script: VirtualScript,
    seed: int = 0,
    devices_per_node: int = 1,
    profile: Profile,
) -> ScriptsRun:
    """Run a script's ranks through a trace with the real master, agents and coordinator, like `run_cluster`.

    When the trace ends, the run is stopped. `profile` describes the nodes, and no rank uses it. Raises
    trio.TooSlowError when the run does not end within ten minutes of its trace, or orphans outlive that.
    """
    nodes = NodeKinds.alike(profile, devices_per_node=devices_per_node)
    simulation = _Simulation(trace, run, nodes, World.make(nodes, Delays(), seed), _Profiles(None), script)
    horizon_s = trace.duration_s + run.control.orphan_timeout_s + _GRACE_S
    end = run_virtual(simulation.run, seed=seed, horizon_s=horizon_s, time=simulation.world.time)
    return ScriptsRun(
        entries=tuple(simulation.journal.entries),
        end=end,
        ranks=tuple(simulation.ranks),
        left_at_end=simulation.left_at_end,
        left=simulation.left,
    )


class _Journal:
    """Implements `roles.master_ports.Journal`."""

    def __init__(self) -> None:
        self.entries: list[JournalEntry] = []

    def append(self, entry: JournalEntry) -> None:
        self.entries.append(entry)


class _Profiles:
    """Implements `roles.master_ports.ProfileCache`: with `profile_json` under every key, if there is one."""

    def __init__(self, profile_json: str | None) -> None:
        self._profile_json = profile_json
        self._stored: dict[str, str] = {}

    def load(self, key: str) -> str | None:
        # A link's key stands for a link's speed, which is no profile.
        return self._stored.get(key, None if key.startswith(LINK_KEYS) else self._profile_json)

    def store(self, key: str, profile_json: str) -> None:
        self._stored[key] = profile_json


def journal_digest(entries: Iterable[JournalEntry]) -> str:
    """Return a digest that is equal for equal journals, in any process."""
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(encode_json(entry) + b"\n")
    return digest.hexdigest()


class _Simulation:
    """One run; call `run` once."""

    def __init__(
        self,
        trace: traces.Trace,
        job: JobSpec | RanksSpec,
        kinds: NodeKinds,
        world: World,
        profiles: _Profiles,
        script: VirtualScript | None = None,
    ) -> None:
        self.world = world
        self.journal = _Journal()
        self.decisions: list[Decided] = []
        self.keeps_decisions = False
        self.observers: Sequence[Callable[[JournalEntry], None]] = ()
        self._trace = trace
        self._job = job
        self._kinds = kinds
        self._profiles = profiles
        self._script = script
        self.ranks: list[VirtualRank] = []
        self.left_at_end: tuple[VirtualRank, ...] = ()
        self.left: tuple[VirtualRank, ...] = ()
        self._master: Master | None = None
        self._life = trio.CancelScope()
        self._down_s = 0.0
        self._num_starts = 0
        self._waiting: list[Event] = []  # submitted while there was no master, or while it was frozen
        self._coordinator: Recording | None = None

    async def run(self) -> End:
        async with trio.open_nursery() as nursery:
            new_host = None
            if self._script is not None:
                new_host = partial(VirtualRankHost, self.world, script=self._script, note=self.ranks.append)
            cluster = VirtualCluster(self._job.tag, self._trace.nodes, self.world, nursery, new_host)
            for node in self._trace.start:
                cluster.join(node)
            playing = trio.CancelScope()
            nursery.start_soon(self._play, cluster, nursery, playing)
            end = await self._run_masters(cluster)
            if self._script is not None:
                # Once the trace no longer disturbs nodes, agents without a master end their ranks.
                playing.cancel()
                self.left_at_end = self.living_ranks
                cluster.heal()
                for node in self._trace.nodes:
                    cluster.thaw(node)
                await trio.sleep(self._job.control.orphan_timeout_s + _ORPHANS_END_S)
            self.left = self.living_ranks
            nursery.cancel_scope.cancel()
        return end

    @property
    def living_ranks(self) -> tuple[VirtualRank, ...]:
        return tuple(rank for rank in self.ranks if rank.end is None)

    async def _run_masters(self, cluster: VirtualCluster) -> End:
        """Run a master, and a successor after each crash, until the run ends."""
        while True:
            # A successor is not frozen, whatever its predecessor was.
            cluster.freeze_master(0.0)
            master = self._make_master(cluster)
            self._submit_waiting(master)
            # A crash cancels this scope; otherwise the master returns from within it.
            with trio.CancelScope() as self._life:
                self._master = master
                return await master.run()
            self._master = None
            if self.journal.entries and isinstance(entry := self.journal.entries[-1], JobEnded):
                return End(exit_code=entry.exit_code, reason=entry.reason)  # the run was over before the crash
            await trio.sleep(self._down_s)

    async def _play(self, cluster: VirtualCluster, nursery: trio.Nursery, playing: trio.CancelScope) -> None:
        with playing:
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
                self._submit(AddRequested(spec=self._kinds.spec(node)))
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
                self._down_s = down_s
                self._life.cancel()
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
        """Return a master that takes over the run, or starts it where no agent is left."""
        job, specs = self._job, tuple(map(self._kinds.spec, self._trace.start))
        coordinator: Recording
        replayed: ReplayedRun | ReplayedRanks | None
        if isinstance(job, RanksSpec):
            ranks = replayed = _left(_replay(self.journal.entries).ranks, cluster)
            self._num_starts += ranks is None
            coordinator = ScriptsCoordinator(
                job,
                specs,
                # No two runs begin at one time.
                started_at=_STARTED_AT.replace("00:00:00", f"00:00:{self._num_starts - 1:02d}"),
                python_version=PYTHON_VERSION,
                replayed=ranks,
            )
        else:
            trained = replayed = _left(_replay(self.journal.entries).finish(), cluster)
            coordinator = TrainingCoordinator(
                job, specs, started_at=_STARTED_AT, python_version=PYTHON_VERSION, replayed=trained
            )
        if replayed is None:
            cluster.end_all()
            # The run starts over, and its journal with it.
            self.journal.entries.clear()
        self._coordinator = coordinator
        coordinator.decisions = self.decisions if self.keeps_decisions else None
        master = Master(
            coordinator,
            self._job,
            cluster=cluster,
            journal=self.journal,
            profiles=self._profiles,
            clock=RunClock(elapsed_s=trio.current_time()),
        )
        for observer in self.observers:
            master.observe(observer)
        if self._job.control.waits_for_script:
            master.submit(ScriptEnded())  # there is none here, and no step waits for it
        return master

    def _submit(self, event: Event) -> None:
        """Submit an event to the master, or keep it while there is none, or it is frozen."""
        is_frozen = self._coordinator is not None and self._coordinator.frozen_until_s
        if self._master is not None and not is_frozen:
            self._master.submit(event)
        else:
            self._waiting.append(event)

    def _submit_waiting(self, master: Master) -> None:
        for event in self._waiting:
            master.submit(event)
        self._waiting.clear()

    def _freeze_master(self, cluster: VirtualCluster, nursery: trio.Nursery, frozen_s: float) -> None:
        coordinator = self._coordinator
        if self._master is None or coordinator is None:
            return
        # Freezes may overlap: the last one to end counts.
        until_s = max(coordinator.frozen_until_s, trio.current_time() + frozen_s)
        coordinator.frozen_until_s = until_s
        cluster.freeze_master(until_s)
        nursery.start_soon(self._thaw_master, cluster, coordinator, until_s)

    async def _thaw_master(self, cluster: VirtualCluster, coordinator: Recording, until_s: float) -> None:
        await trio.sleep_until(until_s)
        if self._coordinator is not coordinator or self._master is None or coordinator.frozen_until_s > until_s:
            return  # another master has taken over, or this one was frozen once more
        cluster.freeze_master(0.0)
        self._submit_waiting(self._master)


def _left(replayed: Replayed | None, cluster: VirtualCluster) -> Replayed | None:
    """Return a run that lives on; without an agent there is nothing to take over."""
    return replayed if replayed is not None and any(map(cluster.is_alive, replayed.nodes)) else None


def _replay(entries: Sequence[JournalEntry]) -> RunBooks:
    """Read a journal as a real master does: an image of its first half, and the entries after it."""
    books, place = RunBooks(), len(entries) // 2
    for entry in entries[:place]:
        books.apply(entry)
    image = books.image()
    if image is not None:
        books = RunBooks.of_image(decode_json(BooksImage, encode_json(image)))
    for entry in entries[place:]:
        books.apply(entry)
    return books
