"""A world for the coordinator: virtual nodes, FIFO tunnels, faults, and the promises checked after every move.

Everything that can happen next has a name ("work n0:0", "up n1", …), so a schedule is a list of names: whoever
chooses them (see `schedules`) decides every interleaving, and a failure can be written down and played again.
The real Coordinator, Planner, Follower and Standing run: only programs and what carries effects out are the model's.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from dataclasses import dataclass, field

from oobleck import __version__
from oobleck.control.events import (
    AddRequested,
    Command,
    Connect,
    Disconnect,
    DrainRequested,
    End,
    Event,
    LookUpProfile,
    MessageReceived,
    NodeFailed,
    NodeUp,
    ProfileFound,
    Record,
    ScriptAnswered,
    Send,
    SendAll,
    SendOrders,
    StopRequested,
)
from oobleck.control.journal import (
    Answers,
    CheckpointSaved,
    ConnectionLost,
    JobEnded,
    JournalEntry,
    MasterResumed,
    PlanAdopted,
    SaveFailed,
    StepDone,
    Unreachable,
)
from oobleck.control.plans.sections import committed_after
from oobleck.control.protocol import (
    PROTOCOL_VERSION,
    AgentMessage,
    AgentStopped,
    CheckpointsFound,
    CommitCheckpoint,
    CommitMessage,
    CommitRecord,
    Configure,
    Fence,
    FindCheckpoints,
    Heartbeat,
    Hello,
    Killed,
    KillWorker,
    PersistState,
    PlanOrder,
    PlanUpdate,
    RecordRun,
    RemoveOld,
    RemoveUnfinished,
    StartWorker,
    StateSaved,
    StopAgent,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
)
from oobleck.control.recovery import Phase
from oobleck.control.training.coordinator import Coordinator
from oobleck.errors import ExitCode
from oobleck.job import CheckpointSpec, ControlSpec, DataSpec, JobSpec, NodeSpec, ScheduleName
from oobleck.job.spec import ShardingChoice
from oobleck.planner import DeviceProfile, LayerProfile, NetworkProfile, Profile, WorkerId, profile_to_json
from oobleck.sim.cluster.fabric import Fabric, Violation
from oobleck.sim.cluster.layers import Version
from oobleck.sim.cluster.records import VirtualShards
from tests.control.journals import replay_run

from .model_disk import VirtualDisk
from .model_worker import SteppedWorker

__all__ = ["Shape", "World"]

_LAST_WAIT_S = 60.0
"""How long a run may wait before its end while nothing happens."""
_MOVE_S = 0.0001
"""How long a move takes, by the coordinator's clock."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the world is made of."""

    num_nodes: int = 4
    devices: int = 1
    sharding_devices: int = 1
    """How many of them hold a stage together."""
    sharding: ShardingChoice = "optimizer"
    """What these share out."""
    context_parallel: int = 1
    """How many of them share each microbatch."""
    num_layers: int = 4
    layers_per_device: int = 4
    """How many layers fit the memory of a device."""
    num_microbatches: int = 4
    layer_s: float = 0.03
    """What a layer takes for one microbatch, there and back."""
    max_steps: int = 3
    fault_threshold: int = 1
    num_pipelines: int | None = None
    reductions: int = 1
    """How often gradients are reduced in a step."""
    eval_steps: int | None = None
    scales_loss: bool = False
    schedule: ScheduleName = "1f1b"
    shards: tuple[int, ...] = ()
    """How many records each shard has; empty where the data is in no shards."""
    follow: bool = False
    epochs: int = 1
    at_once: int | None = None
    asks_every: int | None = None
    """Steps wait for the script's answer after every so many; None where there is no script."""
    stops_at: int | None = None
    """The step after which the script wants training to stop."""
    save_steps: int | None = None
    """Save after every so many steps; None where nothing is ever saved."""
    waits_for_disk: bool = False

    @property
    def nodes(self) -> tuple[NodeSpec, ...]:
        devices = tuple(range(self.devices))
        return tuple(NodeSpec(name=f"n{i}", host=f"host{i}", devices=devices) for i in range(self.num_nodes))

    @property
    def job(self) -> JobSpec:
        return JobSpec(
            tag="model",
            control=ControlSpec(
                heartbeat_interval_s=0.5,
                lease_s=3.0,
                rejoin_after_s=0.0,
                orphan_timeout_s=20.0,
                waits_for_script=self.asks_every is not None,
            ),
            max_steps=self.max_steps,
            global_batch_size=self.num_microbatches * self.sharding_devices // self.context_parallel,
            microbatch_size=1,
            sharding="none" if self.sharding_devices == 1 else self.sharding,
            sharding_devices=self.sharding_devices,
            context_parallel=self.context_parallel,
            fault_threshold=self.fault_threshold,
            num_pipelines=self.num_pipelines,
            reductions_per_step=self.reductions,
            eval_steps=self.eval_steps,
            dtype="float16" if self.scales_loss else "float32",
            schedule=self.schedule,
            data=DataSpec(
                shards=tuple(f"shard{number}" for number in range(len(self.shards))),
                follow=self.follow,
                epochs=self.epochs,
                shards_at_once=self.at_once,
            ),
            checkpoint=CheckpointSpec(save_steps=self.save_steps, waits_for_disk=self.waits_for_disk),
        )

    @property
    def profile(self) -> Profile:
        layer_bytes = 1000
        layers = tuple(
            LayerProfile(
                name=f"layer{i}",
                forward_s={1: self.layer_s / 3},
                backward_s={1: 2 * self.layer_s / 3},
                param_bytes=layer_bytes,
                optimizer_bytes=2 * layer_bytes,
                activation_bytes=1,
                output_bytes=1,
            )
            for i in range(self.num_layers)
        )
        return Profile(
            model="model",
            microbatch_size=1,
            sequence_length=8,
            layers=layers,
            device=DeviceProfile(name="virtual", memory_bytes=int((self.layers_per_device + 0.5) * 4 * layer_bytes)),
            network=NetworkProfile(
                inter_node_bytes_per_s=1e9,
                inter_node_latency_s=1e-5,
                intra_node_bytes_per_s=1e9,
                intra_node_latency_s=1e-5,
            ),
        )


@dataclass(slots=True)
class VirtualNode:
    """A node and its tunnel; queues are first in, first out."""

    spec: NodeSpec
    agent_pid: int
    workers: dict[int, SteppedWorker] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    """By device."""
    disk: VirtualDisk = field(default_factory=VirtualDisk)
    up: deque[AgentMessage | NodeUp | NodeFailed] = field(default_factory=deque)
    down: deque[object] = field(default_factory=deque)
    run: str = ""
    """The digest of the run, which names of checkpoints have."""
    is_dead: bool = False
    is_frozen: bool = False
    is_hung: bool = False
    """Frozen for good."""
    is_cut: bool = False
    """The tunnel is gone; the workers go on, and reach their peers."""
    is_dropped: bool = False
    """The coordinator wants nothing more of it."""

    @property
    def worker_ids(self) -> list[WorkerId]:
        return [worker.worker_id for worker in self.workers.values()]

    @property
    def is_counted(self) -> bool:
        """It takes part, as far as the coordinator can still know."""
        return not (self.is_dead or self.is_cut or self.is_dropped)


class _Script:
    """A script that follows the journal, and answers where it is asked."""

    def __init__(self, shape: Shape) -> None:
        every, last = shape.asks_every, shape.max_steps
        self._answers = Answers(
            is_asked=lambda step: every is not None and step % every == 0, is_evaluated=shape.job.is_evaluated
        )
        self._is_on = every is not None
        self._last = last
        self.answers: deque[tuple[int, int]] = deque()

    def hear(self, entry: JournalEntry) -> None:
        self._answers.note(entry)
        if self._is_on and (answer := self._answers.take()) is not None and answer[0] < self._last:
            self.answers.append(answer)


class World:
    """Nodes, their workers and a coordinator. `moves` names what can happen next, `make` lets it happen."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.job = shape.job
        self.now_s = 0.0
        self._beaten_s = 0.0
        self._idle_s = 0.0
        """For how long nothing has happened, or could have."""
        self.ended: End | None = None
        self.journal: list[JournalEntry] = []
        self.made: list[str] = []
        self._updates: dict[int, PlanUpdate] = {}
        self._copied: frozenset[int] = frozenset()
        self._done: list[CommitRecord] = []
        """The committed steps since what was last gone back to, and those before it."""
        self._restored_generation = 0
        self._back: set[SteppedWorker] = set()
        """Those that hold layers of the past that counts."""
        self._versions: dict[int, Version] = {}
        """By step, as the living had it last: one that only the dead have applied is applied again."""
        self.taken: dict[int, tuple[RecordRun, ...]] = {}
        """The records of each step, as workers that applied it took them."""
        self.shards = VirtualShards(self.job.data.shards, shape.shards)
        self.shards.is_complete = not shape.follow
        self.nodes: dict[str, VirtualNode] = {}
        self._script = _Script(shape)
        self.stopped_at: int | None = None
        """The step after which the script has wanted training to stop."""
        self._fabric = Fabric()
        self._letters: dict[tuple[WorkerId, WorkerId], deque[CommitMessage]] = {}
        """Between workers, by who sent them to whom."""
        self._held: set[tuple[WorkerId, WorkerId]] = set()
        """Whose letters are held up on their way."""
        self._pids = itertools.count(1)
        self.coordinator = Coordinator(
            self.job, shape.nodes, started_at="2026-01-01T00:00:00Z", python_version="3.11.0"
        )
        self._carry_out(self.coordinator.start(0.0))
        self._prepare()

    # --- what can happen ---------------------------------------------------------------------------------------

    def moves(self) -> list[str]:
        """Name everything that can happen next, faults left out."""
        if self.ended is not None:
            return []
        found: list[str] = []
        for name, node in self.nodes.items():
            if node.up and not (node.is_frozen and not isinstance(node.up[0], NodeFailed)):
                found.append(f"up {name}")
            if node.is_dead or node.is_frozen:
                continue
            if node.down:
                found.append(f"down {name}")
            if node.disk.tasks:
                found.append(f"write {name}")
            for worker in node.workers.values():
                if worker.can_step:
                    found.append(f"work {worker.worker_id}")
                elif worker.wait.can_fail() and not worker.is_stuck:
                    found.append(f"fail {worker.worker_id}")
        ways = [pair for pair in self._letters if pair not in self._held and self._hears(pair[1])]
        found += [f"carry {source}>{target}" for source, target in ways]
        found += ["answer"] if self._script.answers else []
        return [*found, "time"]

    def make(self, move: str) -> None:
        """Let a move happen, or a fault.

        Faults are kill, lose, cut, crash, freeze, hang, thaw, stick, blip, hold, join, drain, stop, master and spoil;
        letters that are held up are released; shards grow, and are complete.
        """
        self.made.append(move)
        self.now_s += _MOVE_S
        kind, _, subject = move.partition(" ")
        self._idle_s = self._idle_s if kind == "time" else 0.0
        match kind:
            case "work":
                self._worker(subject).step()
            case "fail" | "blip":
                self._worker(subject).fail()
            case "carry":
                self._deliver_letter(_way(subject))
            case "hold":
                self._held.add(_way(subject))
            case "release":
                self._held.clear()
            case "up":
                self._deliver_up(self.nodes[subject])
            case "down":
                self._deliver_down(self.nodes[subject])
            case "answer":
                self._answer()
            case "write":
                self._write(self.nodes[subject])
            case "time":
                self._pass_time()
            case "kill":
                self._kill(self.nodes[subject])
            case "cut":
                self._cut(self.nodes[subject])
            case "lose":
                self.nodes[subject].up.pop()
            case "crash":
                self._crash(self._worker(subject).worker_id)
            case "freeze" | "hang" | "thaw":
                self._beat()
                self.nodes[subject].is_frozen = kind != "thaw"
                self.nodes[subject].is_hung = kind == "hang"
            case "stick":
                self._worker(subject).is_stuck = True
            case "join":
                name = f"n{len(self.nodes)}"
                self._feed(AddRequested(spec=NodeSpec(name=name, host=name, devices=self.shape.nodes[0].devices)))
            case "drain":
                self._feed(DrainRequested(node=subject))
            case "stop":
                self._feed(StopRequested(now=False, exit_code=130, reason="interrupted"))
            case "master":
                self._replace_master()
            case "spoil":
                shard, _, position = subject.partition(":")
                self.shards.spoiled.setdefault(int(shard), int(position))
            case "grow":
                shard, _, count = subject.partition(":")
                self.shards.lengths[int(shard)] = (self.shards.lengths[int(shard)] or 0) + int(count)
            case "complete":
                self.shards.is_complete = True
            case _:
                raise AssertionError(move)
        self._check(move)

    def can_blip(self, worker_id: WorkerId) -> bool:
        """The network may fail under this worker, although nobody is gone."""
        worker = self._workers().get(worker_id)
        return worker is not None and not worker.is_stuck and worker.wait.touches_network and not worker.can_step

    @property
    def ways(self) -> list[str]:
        """The ways on which a worker's part in a commit, or the total, goes to another."""
        return [f"{source}>{target}" for source, target in self._letters]

    # --- faults ------------------------------------------------------------------------------------------------

    def _kill(self, node: VirtualNode) -> None:
        """All of a node ends; what it said last may be lost as well (by `lose`)."""
        self._end_workers(node)
        node.is_dead = True
        node.up.append(NodeFailed(node=node.spec.name, loss=ConnectionLost()))

    def _cut(self, node: VirtualNode) -> None:
        node.is_cut = True
        node.down.clear()
        node.up.clear()
        node.up.append(NodeFailed(node=node.spec.name, loss=ConnectionLost()))

    def _crash(self, worker_id: WorkerId) -> None:
        node = self.nodes[worker_id.node]
        del node.workers[worker_id.device]
        self._end_worker(worker_id)
        node.up.append(WorkerExited(device=worker_id.device, pid=node.pids[worker_id.device], end=Killed(signal=9)))

    def _replace_master(self) -> None:
        """The master is killed: what it sent may be lost; what it was told is told again to the next one."""
        replayed = replay_run(self.journal)
        if replayed is None:
            return  # nothing is trained yet: its successor starts anew
        for name, node in self.nodes.items():
            node.down.clear()
            node.up = deque(said for said in node.up if not isinstance(said, NodeUp | NodeFailed))
            node.is_dropped = node.is_dropped or name not in {spec.name for spec in replayed.nodes}
        self.coordinator = Coordinator(
            self.job, self.shape.nodes, started_at="2026-01-01T00:00:00Z", python_version="3.11.0", replayed=replayed
        )
        self._script = _Script(self.shape)  # which starts again with its master
        self._carry_out(self.coordinator.start(self.now_s))

    def _end_workers(self, node: VirtualNode) -> None:
        for worker_id in node.worker_ids:
            self._end_worker(worker_id)

    def _end_worker(self, worker_id: WorkerId) -> None:
        """What was for it is lost; what it sent still arrives, or never does."""
        self._fabric.end(worker_id, max(self._updates))
        self._letters = {pair: letters for pair, letters in self._letters.items() if pair[1] != worker_id}

    # --- moves -------------------------------------------------------------------------------------------------

    def _carry(self, source: WorkerId, target: WorkerId, message: CommitMessage) -> None:
        if target in self.nodes[target.node].worker_ids and not self.nodes[target.node].is_dead:
            self._letters.setdefault((source, target), deque()).append(message)

    def _hears(self, worker_id: WorkerId) -> bool:
        node = self.nodes[worker_id.node]
        return not node.is_frozen and not node.workers[worker_id.device].is_stuck

    def _deliver_letter(self, way: tuple[WorkerId, WorkerId]) -> None:
        source, target = way
        letters = self._letters[way]
        self.nodes[target.node].workers[target.device].hear(source, letters.popleft())
        if not letters:
            del self._letters[way]

    def _deliver_up(self, node: VirtualNode) -> None:
        said = node.up.popleft()
        self._feed(
            said if isinstance(said, NodeUp | NodeFailed) else MessageReceived(node=node.spec.name, message=said)
        )

    def _deliver_down(self, node: VirtualNode) -> None:
        message = node.down.popleft()
        match message:
            case Configure(run=run):
                node.run = run
            case Heartbeat():
                pass
            case PersistState() | CommitCheckpoint() | RemoveOld() | RemoveUnfinished():
                node.disk.take(message)
            case FindCheckpoints(device=device, request=request):
                self._say(
                    WorkerId(node=node.spec.name, device=device),
                    CheckpointsFound(device=device, request=request, found=(), problems=(), unfinished=()),
                )
            case StartWorker(device=device):
                self._start_worker(node, device)
            case StopAgent(reason=reason):
                node.up.append(AgentStopped(reason=reason))
                self._end_workers(node)
                node.is_dead = True
            case KillWorker(device=device):
                if device in node.workers:
                    self._crash(WorkerId(node=node.spec.name, device=device))
            case _:
                if message.device in node.workers:
                    node.workers[message.device].take(message)

    def _answer(self) -> None:
        step, through = self._script.answers.popleft()
        if step == self.shape.stops_at:
            self.stopped_at = step
            self._feed(StopRequested(now=False, exit_code=0, reason="the script stops"))
        else:
            self._feed(ScriptAnswered(step=step, through=through))

    def _write(self, node: VirtualNode) -> None:
        said = node.disk.work()
        if said is not None and not (node.is_cut or node.is_dropped):
            node.up.append(said)

    def _pass_time(self) -> None:
        """Go to the coordinator's next deadline, or where healthy nodes say their next heartbeats before."""
        began_s, is_idle = self.now_s, self.moves() == ["time"]
        interval_s = self.job.control.heartbeat_interval_s
        if self.now_s >= self._beaten_s + interval_s:
            self._beat()
        self.now_s = max(self.now_s, min(self._beaten_s + interval_s, self.coordinator.next_deadline()))
        self._carry_out(self.coordinator.handle_deadline(self.now_s))
        self._idle_s = self._idle_s + self.now_s - began_s if is_idle else 0.0

    def _beat(self) -> None:
        self._beaten_s = self.now_s
        for name, node in self.nodes.items():
            if node.is_counted and not node.is_frozen:
                self.coordinator.handle(self.now_s, MessageReceived(node=name, message=Heartbeat(sequence=0)))

    def _feed(self, event: Event) -> None:
        self._carry_out(self.coordinator.handle(self.now_s, event))

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Send():
                    self._deliver(command)
                case SendOrders(update=update):
                    self._check_update(update)
                    for send in command.each():
                        self._deliver(send)
                case SendAll():
                    for send in command.each():
                        self._deliver(send)
                case Connect(node=spec, attach=True):
                    self._attach(self.nodes[spec.name])
                case Connect(node=spec):
                    self._connect(spec)
                case LookUpProfile(kind=kind):
                    self._feed(ProfileFound(profile_json=profile_to_json(self.shape.profile), kind=kind))
                case Record(entry=entry):
                    self._note(entry)
                case Disconnect(node=name):
                    node = self.nodes[name]
                    node.is_dropped = True
                    node.down.clear()
                    node.up.clear()
                case End():
                    self.ended = command
                case _:
                    pass

    def _deliver(self, send: Send) -> None:
        node = self.nodes[send.node]
        if not (node.is_dead or node.is_cut):
            node.down.append(send.message)

    def _prepare(self) -> None:
        """Bring all nodes up; nothing is interleaved here, and it is no part of a schedule."""
        while self.coordinator.phase is Phase.PREPARING:
            for node in list(self.nodes.values()):
                while node.up:
                    self._deliver_up(node)
                while node.down and not isinstance(node.down[0], PlanOrder):
                    self._deliver_down(node)

    def _connect(self, spec: NodeSpec) -> None:
        self.nodes[spec.name] = node = VirtualNode(spec, agent_pid=next(self._pids))
        node.up.append(self._node_up(node))

    def _attach(self, node: VirtualNode) -> None:
        """An agent answers the next master: first of all who it is, then what the one before may not have heard."""
        if node.is_dead or node.is_cut:
            node.up.append(NodeFailed(node=node.spec.name, loss=Unreachable(problem="it does not answer")))
        else:
            node.up.extendleft(
                reversed([self._node_up(node), *itertools.chain.from_iterable(node.disk.reports.values())])
            )

    def _node_up(self, node: VirtualNode) -> NodeUp:
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            oobleck_version=__version__,
            python_version="3.11.0",
            node=node.spec.name,
            pid=node.agent_pid,
            generation=0,
            workers=tuple(WorkerStarted(device=device, pid=node.pids[device]) for device in node.workers),
            num_cores=1,
            memory_bytes=1 << 30,
            clock_s=0.0,
        )
        return NodeUp(node=node.spec.name, hello=hello, address="127.0.0.1")

    def _start_worker(self, node: VirtualNode, device: int) -> None:
        worker_id = WorkerId(node=node.spec.name, device=device)
        node.workers[device] = SteppedWorker(
            worker_id,
            self.job,
            self._fabric,
            lambda message: self._say(worker_id, message),
            lambda target, message: self._carry(worker_id, target, message),
            self.shape.profile,
            self.shards,
            run=None if self.shape.save_steps is None else node.run,
        )
        node.pids[device] = pid = next(self._pids)
        self._say(worker_id, WorkerStarted(device=device, pid=pid))
        ready = WorkerReady(
            device=device,
            pid=pid,
            data_digest="d",
            num_samples=1000,
            layer_names=tuple(layer.name for layer in self.shape.profile.layers),
            parameters=1,
            torch_version="2.9",
            shards=self.job.data.shards,
            address=node.workers[device].address,
            saves=self.shape.save_steps is not None,
        )
        self._say(worker_id, ready)

    def _say(self, worker_id: WorkerId, message: AgentMessage) -> None:
        node = self.nodes[worker_id.node]
        if isinstance(message, StateSaved):
            node.disk.take(message)
        if not (node.is_cut or node.is_dropped):
            node.up.append(message)

    # --- looking -----------------------------------------------------------------------------------------------

    def _worker(self, name: str) -> SteppedWorker:
        worker_id = _worker_id(name)
        return self.nodes[worker_id.node].workers[worker_id.device]

    def _workers(self) -> dict[WorkerId, SteppedWorker]:
        """The workers that count: neither dead nor given up."""
        return {
            worker.worker_id: worker
            for node in self.nodes.values()
            if node.is_counted
            for worker in node.workers.values()
        }

    @property
    def plan_places(self) -> tuple[WorkerId, ...]:
        return self._updates[max(self._updates)].plan.worker_ids

    def standing_still(self) -> str:
        """What everybody waits for, for the message of a violation."""
        waits = [f"{worker_id}: {worker.wait.what}" for worker_id, worker in sorted(self._workers().items())]
        return f"{self.coordinator.phase}; " + "; ".join(waits)

    # --- the promises ------------------------------------------------------------------------------------------

    def _note(self, entry: JournalEntry) -> None:
        if any(isinstance(old, JobEnded) for old in self.journal):
            raise Violation(f"{entry} comes after the end")
        match entry:
            case StepDone(record=record):
                steps = len(self._done)
                if record.step <= steps:
                    raise Violation(f"the journal goes from step {steps} to step {record.step}")
                self._done.append(record)
                self._check_wait(record.step)
            case PlanAdopted(generation=generation, plan=plan):
                if entry.restored_step is not None:
                    self._go_back(entry.restored_step, generation)
                if any(isinstance(old, PlanAdopted) and old.generation >= generation for old in self.journal):
                    raise Violation(f"generation {generation} gets a second plan")
                if plan.num_microbatches != self.shape.num_microbatches:
                    raise Violation(f"{plan.num_microbatches} microbatches are planned")
        self.journal.append(entry)
        self._script.hear(entry)

    def _go_back(self, step: int, generation: int) -> None:
        """What was done after this step is of a past that never was."""
        if self.stopped_at is not None and step < self.stopped_at:
            self.stopped_at = None
        del self._done[step:]
        self._copied = frozenset()
        self._versions = {old: version for old, version in self._versions.items() if old <= step}
        self.taken = {old: runs for old, runs in self.taken.items() if old <= step}
        self._restored_generation = generation
        self._back.clear()

    def _check_update(self, update: PlanUpdate) -> None:
        if self._updates.setdefault(update.generation, update) != update:
            raise Violation(f"generation {update.generation} orders different things")
        for item in update.transfers:
            if self.nodes[item.source.node].is_dropped or self.nodes[item.target.node].is_dropped:
                raise Violation(f"generation {update.generation} moves a layer with a lost node: {item}")

    def _check(self, move: str) -> None:
        workers = {worker_id: worker for worker_id, worker in self._workers().items() if self._has_gone_back(worker)}
        copied = {layer for worker in workers.values() for layer in (*worker.kept, *worker.layers)}
        versions: dict[tuple[int, tuple[int, ...]], Version] = {}
        for worker in workers.values():
            for step, runs in worker.taken.items():
                if self.taken.setdefault(step, runs) != runs:
                    raise Violation(f"step {step} takes {runs} on {worker.worker_id}, elsewhere {self.taken[step]}")
            worker.taken.clear()
            for layer, version in (worker.kept | worker.layers).items():
                known = versions.setdefault((version.step, version.partial), version)
                if known != version:
                    raise Violation(f"layer {layer} on {worker.worker_id} is {version}, elsewhere {known}")
        self._versions |= {step: version for (step, _), version in versions.items()}
        # Without redundancy, whoever is to take a layer may die in the moment in which all others let it go.
        is_redundant = next((old.redundant for old in reversed(self.journal) if isinstance(old, PlanAdopted)), False)
        if self._copied - copied and move.startswith("work") and max(self._versions, default=0) and is_redundant:
            raise Violation(f"{move} drops the last living copy of layers {sorted(self._copied - copied)}")
        self._copied = frozenset(copied)
        if move.startswith("work"):
            self._check_claims(workers)

    def _has_gone_back(self, worker: SteppedWorker) -> bool:
        """Whether what a worker holds is of the past that counts; not yet while it adopts the plan that goes back.

        That may be a later one: the first plan that it gets to adopt since.
        """
        adopted = worker.commit_state.adopted
        if adopted >= self._restored_generation and worker.wait.what != "adopting":
            self._back.add(worker)
        return worker in self._back

    def _check_claims(self, workers: dict[WorkerId, SteppedWorker]) -> None:
        """Hold workers to what they would answer."""
        newest = max((worker.commit_state.adopted for worker in workers.values()), default=0)
        settled = [worker for worker in workers.values() if worker.is_settled]
        longest = max((version.step for worker in settled for version in worker.layers.values()), default=0)
        for worker in workers.values():
            for layer, version in (worker.kept | worker.layers).items():
                if worker.is_settled and version.step != worker.commit_state.applied:
                    raise Violation(
                        f"{worker.worker_id} claims layer {layer} at {worker.commit_state.applied}: {version}"
                    )
                if worker.is_settled and layer in worker.layers:
                    self._check_section_commit(worker, version)
                is_settled = worker.commit_state.adopted == newest and worker.is_settled
                if layer in worker.layers and version.step < longest - 1 and is_settled:
                    raise Violation(f"layer {layer} on {worker.worker_id} is {longest - version.step} steps behind")

    def _check_section_commit(self, worker: SteppedWorker, version: Version) -> None:
        """Hold a worker to what it would answer of the sections that it has committed."""
        status = worker.commit_state.answer(Fence(device=0, generation=0, lost=()))
        update = self._updates.get(status.adopted)
        if update is None:
            return
        before = update.partial.microbatches if status.applied == update.boundary else ()
        number = 0 if status.partial is None else status.partial.number
        claimed = committed_after(update.plan, before, update.num_sections, number)
        if version.partial != claimed:
            raise Violation(f"{worker.worker_id} claims to have committed {claimed}: {version}")

    def check_end(self) -> None:
        """What must hold when the run is over."""
        assert self.ended is not None
        done = self._done
        steps = [record.step for record in done]
        was_stopped = self.ended.exit_code == 130 or self.ended.reason.startswith(("stopped;", "the script stops"))
        if self.stopped_at is not None and "master" not in self.made and len(steps) != self.stopped_at:
            raise Violation(f"the script stops after step {self.stopped_at}, and the run after {steps}")
        num_steps = len(steps) if "all data" in self.ended.reason else self.shape.max_steps
        if self.ended.exit_code == 0 and not was_stopped and steps != list(range(1, num_steps + 1)):
            raise Violation(f"the run ends well after steps {steps}")
        if was_stopped and steps != list(range(1, len(steps) + 1)):
            raise Violation(f"the run stops after steps {steps}")
        for record in done:
            version = self._versions.get(record.step)
            if version is not None and version.generation != record.generation:
                raise Violation(
                    f"step {record.step} is journaled as of generation {record.generation}, but applied in that of "
                    f"{version.generation}"
                )
        self._check_saves()
        if self.shape.shards:
            was_read = "all data is read" in self.ended.reason
            self._check_data(steps, is_read=was_read or ("all data" in self.ended.reason and "stop" not in self.made))
        if "no living node holds" in self.ended.reason and len(self._current_copies()) == self.shape.num_layers:
            raise Violation(f"all layers live, yet: {self.ended.reason}")

    def _check_saves(self) -> None:
        """Hold the end of a run to what is saved: disks work here, and nobody waits for a save that is given up."""
        assert self.ended is not None
        if self.ended.exit_code == ExitCode.FAILED:
            return
        counted = [node for node in self.nodes.values() if node.is_counted]
        is_slow = any(node.disk.tasks or node.up or len(node.down) > 1 for node in counted)  # one message ends each
        if self.ended.exit_code == ExitCode.NOT_SAVED and not is_slow:
            raise Violation(f"all disks work, yet: {self.ended.reason}")
        if self._idle_s > _LAST_WAIT_S:
            raise Violation(f"the run ends {self._idle_s:.0f} s after anything has happened")

    def _check_wait(self, step: int) -> None:
        """Hold a step to save to the save before it, unless another plan or master has come between."""
        every = self.shape.save_steps
        if not self.shape.waits_for_disk or every is None or step % every or step == every:
            return
        for entry in reversed(self.journal):
            match entry:
                case StepDone(record=record) if record.step <= step - every:
                    before = next(old for old in reversed(self.journal) if isinstance(old, PlanAdopted))
                    if record.step > max(before.boundary, before.finish or 0):
                        raise Violation(f"step {step} is to be saved, and begins before the save before it is over")
                    return
                case CheckpointSaved() | SaveFailed() | PlanAdopted() | MasterResumed():
                    return

    def _check_data(self, steps: list[int], *, is_read: bool) -> None:
        """Hold committed steps to their records: each once an epoch, and where the run says so, all."""
        assert self.ended is not None
        runs = [run for step in steps for run in self.taken[step]]
        counts = Counter((run.shard, position) for run in runs for position in run.bounds[:-1])
        all_records = {(shard, at) for shard, length in enumerate(self.shards.lengths) for at in range(length or 0)}
        if not counts.keys() <= all_records or max(counts.values(), default=0) > self.shape.epochs:
            raise Violation(f"records are taken more than {self.shape.epochs} times, or are none: {counts}")
        if is_read:
            readable = {(shard, at) for shard, at in all_records if at < self.shards.spoiled.get(shard, at + 1)}
            incomplete = {shard for shard, _ in all_records - readable}
            missing = {record for record in all_records if counts[record] < self.shape.epochs}
            if not {shard for shard, _ in missing} <= incomplete or (missing and self.ended.exit_code == 0):
                raise Violation(f"the run ends with {self.ended.reason}, without {sorted(missing)}")

    def _current_copies(self) -> set[int]:
        """The layers of which a living worker has the newest version, or what makes it.

        One that is about to let layers go says so already.
        """
        workers = [worker for worker in self._workers().values() if worker.wait.what != "adopting"]
        newest = max((version.step for worker in workers for version in worker.layers.values()), default=0)
        return {
            layer
            for worker in workers
            for layer, version in (worker.kept | worker.layers).items()
            if version.step == newest or (version.step == newest - 1 and worker.holds_reduced)
        }

    @property
    def num_lost(self) -> int:
        return sum(not node.is_counted for node in self.nodes.values())


def _worker_id(name: str) -> WorkerId:
    node, _, device = name.partition(":")
    return WorkerId(node=node, device=int(device))


def _way(name: str) -> tuple[WorkerId, WorkerId]:
    source, _, target = name.partition(">")
    return _worker_id(source), _worker_id(target)
