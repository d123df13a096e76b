"""A coordinator on the bench: events in by hand, commands out by kind, for what a whole world is too much for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from oobleck import __version__
from oobleck.control.events import (
    Command,
    End,
    Event,
    MessageReceived,
    NodeFailed,
    NodeUp,
    ProfileFound,
    Record,
    Send,
    SendAll,
    SendOrders,
)
from oobleck.control.journal import ConnectionLost, JournalEntry, Loss
from oobleck.control.protocol import (
    PROTOCOL_VERSION,
    AgentMessage,
    Heartbeat,
    Hello,
    MasterMessage,
    PlanUpdate,
    Resumed,
    Status,
    StepCommitted,
    WorkerAddress,
    WorkerReady,
    WorkerStarted,
)
from oobleck.control.training.coordinator import Coordinator
from oobleck.job import JobSpec, NodeSpec
from oobleck.planner import WorkerId, profile_to_json
from tests.control.model import Shape
from tests.control.steps.test_judgement import record

LOST = ConnectionLost()
PID = 8
"""Of a worker of which nothing else is said."""

__all__ = ["PID", "Bench", "hello", "living", "ready", "sends"]

T = TypeVar("T")


def living(*devices: int, pid: int = PID) -> tuple[WorkerStarted, ...]:
    return tuple(WorkerStarted(device=device, pid=pid) for device in devices)


def hello(node: str, **fields) -> Hello:
    defaults = {
        "protocol": PROTOCOL_VERSION,
        "oobleck_version": __version__,
        "python_version": "3.11.4",
        "node": node,
        "pid": 7,
        "generation": 0,
        "workers": (),
        "num_cores": 4,
        "memory_bytes": 1 << 30,
        "clock_s": 100.0,
    }
    return Hello(**(defaults | fields))


def ready(device: int = 0, **fields) -> WorkerReady:
    defaults = {
        "device": device,
        "pid": PID,
        "data_digest": "text",
        "num_samples": 1000,
        "layer_names": ("a", "b", "c", "d"),
        "parameters": 10,
        "torch_version": "2.9",
    }
    return WorkerReady(**(defaults | fields))


def sends(command: Command) -> Iterable[Send]:
    """What a command sends, to each of those it sends it to."""
    match command:
        case Send():
            return [command]
        case SendAll() | SendOrders():
            return command.each()
        case _:
            return []


class Bench:
    """A coordinator, the time, and all that it ever commanded."""

    def __init__(
        self,
        shape: Shape | None = None,
        *,
        nodes: tuple[NodeSpec, ...] | None = None,
        job: JobSpec | None = None,
        resume: str = "auto",
    ) -> None:
        self.shape = shape or Shape()
        self.job = job or self.shape.job
        self.nodes = nodes or self.shape.nodes
        self.now_s = 0.0
        self.commands: list[Command] = []
        self.entries_before: list[JournalEntry] = []
        """What the masters before this one wrote down."""
        self.coordinator = Coordinator(
            self.job, self.nodes, started_at="2026-01-01T00:00:00Z", python_version="3.11.0", resume=resume
        )
        self.commands += self.coordinator.start(0.0)

    def feed(self, *events: Event) -> list[Command]:
        commands: list[Command] = []
        for event in events:
            commands += self.coordinator.handle(self.now_s, event)
        self.commands += commands
        return commands

    def say(self, node: str, *messages: AgentMessage) -> list[Command]:
        return self.feed(*(MessageReceived(node=node, message=message) for message in messages))

    def wait(self, seconds: float) -> list[Command]:
        self.now_s += seconds
        commands = self.coordinator.handle_deadline(self.now_s)
        self.commands += commands
        return commands

    def beat_until(self, end_s: float, *nodes: str) -> None:
        """Let time pass in which these nodes say their heartbeats, and nothing else."""
        while self.now_s < end_s and self.ended is None:
            self.say_all(*nodes)
            self.wait(min(self.job.control.heartbeat_interval_s, end_s - self.now_s))

    def say_all(self, *nodes: str) -> None:
        for node in nodes:
            self.say(node, Heartbeat(sequence=0))

    def up(self, node: str, **fields) -> list[Command]:
        return self.feed(NodeUp(node=node, hello=hello(node, **fields), address="10.0.0.1"))

    def fail(self, node: str, loss: Loss = LOST) -> list[Command]:
        return self.feed(NodeFailed(node=node, loss=loss))

    def prepare(self) -> None:
        """Bring everybody up, and training under way."""
        for spec in self.nodes:
            self.up(spec.name)
            for device in range(spec.num_devices):
                worker_id = WorkerId(node=spec.name, device=device)
                self.say(spec.name, ready(device, address=WorkerAddress(worker_id=worker_id, host="10.0.0.1", port=9)))
        for kind in dict.fromkeys(spec.kind for spec in self.nodes):
            self.feed(ProfileFound(profile_json=profile_to_json(self.shape.profile), kind=kind))

    def commit(self, node: str, step: int, **fields) -> list[Command]:
        return self.say(node, StepCommitted(device=0, record=record(step, **fields)))

    def answer(self, node: str, **fields) -> list[Command]:
        defaults = {
            "device": 0,
            "generation": self.generation,
            "applied": 0,
            "last_record": None,
            "reduced": None,
            "adopted": 0,
            "layers": (),
            "microbatches_done": 0,
            "broken": False,
        }
        return self.say(node, Status(**(defaults | fields)))

    def resume(self, *nodes: str) -> list[Command]:
        said = Resumed(
            device=0,
            generation=self.generation,
            transfer_s=0.1,
            received_bytes=5,
            resumed_s=100.0,
            busy_s=((99.0, 100.0),),
        )
        return [command for node in nodes for command in self.say(node, said)]

    @property
    def generation(self) -> int:
        """The newest that anybody was told of."""
        return max(getattr(message, "generation", 0) for message in self.messages(self.commands))

    @property
    def updates(self) -> list[PlanUpdate]:
        """For each of the workers that were given one."""
        ordered = [command for command in self.commands if isinstance(command, SendOrders)]
        return [command.update for command in ordered for _ in command.worker_ids]

    @property
    def ended(self) -> End | None:
        return next((command for command in self.commands if isinstance(command, End)), None)

    def journal(self, kind: type[T]) -> list[T]:
        return [entry for entry in self.entries(self.commands) if isinstance(entry, kind)]

    @staticmethod
    def entries(commands: Iterable[Command]) -> list[JournalEntry]:
        return [command.entry for command in commands if isinstance(command, Record)]

    @staticmethod
    def messages(commands: Iterable[Command], node: str | None = None) -> list[MasterMessage]:
        sent = (each for command in commands for each in sends(command))
        return [each.message for each in sent if node in (None, each.node)]
