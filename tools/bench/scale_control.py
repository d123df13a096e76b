"""The control plane of `scale.py` alone: the real coordinator, and any number of agents and workers that only answer.

There is no socket and no other process. Counted are processor seconds of this process, and the messages that the
master would send, in bytes of the wire. Of messages to very many workers only some are encoded; their size and time
stand for all.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from oobleck import __version__
from oobleck.control.events import (
    Command,
    Event,
    LookUpProfile,
    MessageReceived,
    NodeFailed,
    NodeUp,
    ProfileFound,
    Record,
    Send,
    SendAll,
    SendOrders,
)
from oobleck.control.journal import ConnectionLost, PlanAdopted
from oobleck.control.protocol import (
    PROTOCOL_VERSION,
    AgentMessage,
    CheckpointsFound,
    CommitCheckpoint,
    CommitRecord,
    Fence,
    FindCheckpoints,
    Heartbeat,
    Hello,
    LayersPersisted,
    MasterMessage,
    PlanOrder,
    PlanUpdate,
    Resumed,
    SavedState,
    Shard,
    StateSaved,
    Status,
    StepCommitted,
    WorkerAddress,
    WorkerReady,
)
from oobleck.control.training import Coordinator
from oobleck.job import CheckpointSpec, ControlSpec, DataSpec, JobSpec, NodeSpec
from oobleck.planner import (
    WorkerId,
    device_sheet,
    estimate_profile,
    model_shape,
    profile_to_json,
)
from oobleck.wire import FrameDecoder, encode_frame, encode_json

__all__ = ["ControlPlane", "Loss", "Sent", "measure_loss", "measure_manifest", "statuses_of"]

_SAMPLE = 64
"""So many messages of one kind are encoded, at least."""
_STAGES = 8
_MICROBATCHES_EACH = 8
_APART_S = 1e-4
"""Between two nodes of a rack, as the master hears of them."""
_PROFILE = estimate_profile(model_shape("gpt2-medium"), device_sheet("A40"), microbatch_size=2, sequence_length=1024)
_STEP = 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Messages of one kind, from the master to all."""

    number: int
    bytes: int
    """Of all together."""
    largest_bytes: int
    encode_s: float
    """Processor seconds for all of them, from what the coordinator commands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What losing nodes costs the master, from the first one that is gone to the new plan."""

    nodes: int
    """Of one device each, before the loss."""
    lost: int
    generations: int
    """Begun for it: each asks all survivors."""
    fences: Sent
    answers_decode_s: float
    """Reading an answer to each fence."""
    decide_s: float
    """The coordinator's own processor seconds, for the losses, the answers and the plan."""
    updates: Sent
    update_decode_s: float
    """What it costs one worker to read its plan update."""
    journal_bytes: int
    """The journal's line about the plan."""
    memory_mib: float

    @property
    def master_s(self) -> float:
        """All of the master's processor seconds, those of its sockets and tunnels apart."""
        return self.fences.encode_s + self.answers_decode_s + self.decide_s + self.updates.encode_s

    @property
    def sent_bytes(self) -> int:
        return self.fences.bytes + self.updates.bytes


class ControlPlane:
    """A coordinator whose nodes have one device each, and which has ordered its first plan."""

    def __init__(self, num_nodes: int) -> None:
        num_pipelines = max(2, num_nodes // _STAGES)
        job = JobSpec(
            tag="scale",
            data=DataSpec(sequence_length=1024),
            global_batch_size=2 * _MICROBATCHES_EACH * num_pipelines,
            microbatch_size=2,
            num_pipelines=num_pipelines,
            max_steps=10**6,
            control=ControlSpec(heartbeat_interval_s=1.0, lease_s=5.0),
            checkpoint=CheckpointSpec(save_steps=1),
        )
        self.nodes = [f"node{index}" for index in range(num_nodes)]
        self._specs = tuple(NodeSpec(name=node, host=node) for node in self.nodes)
        self._coordinator = Coordinator(job, self._specs, started_at="2026-01-01T00:00:00Z", python_version="3.12.0")
        self.now_s = 0.0
        self.used_s = 0.0
        """Processor seconds of the coordinator so far."""
        self._start()

    @property
    def update(self) -> PlanUpdate:
        """The newest one."""
        return self._update

    def handle(self, event: Event) -> list[Command]:
        """Feed an event, and what it makes the coordinator ask for."""
        commands = self._timed(lambda: self._coordinator.handle(self.now_s, event))
        if any(isinstance(command, LookUpProfile) for command in commands):
            commands += self.handle(ProfileFound(profile_json=profile_to_json(_PROFILE)))
        for command in commands:
            if isinstance(command, SendOrders):
                self._update = command.update
        return commands

    def hear(self, said: Iterable[tuple[str, AgentMessage]]) -> list[Command]:
        """Feed what nodes say."""
        return [
            command for node, message in said for command in self.handle(MessageReceived(node=node, message=message))
        ]

    def wait(self) -> list[Command]:
        """Let the time pass until the coordinator has to do something."""
        self.now_s = max(self.now_s, self._coordinator.next_deadline())
        commands = self._timed(lambda: self._coordinator.handle_deadline(self.now_s))
        for command in commands:
            if isinstance(command, SendOrders):
                self._update = command.update
        return commands

    def beat(self) -> None:
        """A second later all nodes are heard of."""
        self.now_s += 1.0
        self.hear((node, Heartbeat(sequence=None)) for node in self.nodes)

    def resume(self) -> None:
        """All workers adopt the newest plan."""
        self.hear(
            (
                worker_id.node,
                Resumed(
                    device=worker_id.device,
                    generation=self.update.generation,
                    transfer_s=0.0,
                    received_bytes=0,
                    resumed_s=self.now_s,
                    busy_s=((0.0, 1.0),),
                ),
            )
            for worker_id in self.update.plan.worker_ids
        )

    def _start(self) -> None:
        self._coordinator.start(self.now_s)
        for spec in self._specs:
            self.handle(NodeUp(node=spec.name, address="10.0.0.1", hello=_hello(spec.name)))
        commands = self.hear((node, _ready(node)) for node in self.nodes)
        self.hear(
            (command.node, _nothing_found(command.message))
            for command in commands
            if isinstance(command, Send) and isinstance(command.message, FindCheckpoints)
        )
        self.resume()

    def _timed(self, function: Callable[[], T]) -> T:
        took_s, result = _timed(function)
        self.used_s += took_s
        return result


def measure_loss(plane: ControlPlane, num_lost: int) -> Loss:
    """Lose nodes that follow each other, as those of a rack do; all survivors answer the last fence."""
    plane.beat()
    old_plan = plane.update.plan
    middle = len(plane.nodes) // 2
    lost = plane.nodes[middle : middle + num_lost]
    used_s = plane.used_s
    commands: list[Command] = []
    for node in lost:
        plane.now_s += _APART_S
        commands += plane.handle(NodeFailed(node=node, loss=ConnectionLost()))
    fences = _to_workers(commands, Fence)
    while not fences:  # they may be sent together, once the losses have settled
        commands += plane.wait()
        fences = _to_workers(commands, Fence)
    generation = max(fence.message.generation for fence in fences if isinstance(fence.message, Fence))
    plane.now_s += 0.01
    survivors = [worker_id for worker_id in old_plan.worker_ids if worker_id.node not in lost]
    frames = [encode_frame(status) for status in statuses_of(survivors, plane.update, generation)]
    decoder = FrameDecoder[AgentMessage](AgentMessage)
    answers_decode_s, answers = _timed(lambda: [decoder.feed(frame)[0] for frame in frames])
    after = plane.hear((worker_id.node, answer) for worker_id, answer in zip(survivors, answers, strict=True))
    while not (updates := [command for command in after if isinstance(command, SendOrders)]):
        after += plane.wait()
    fenced = _sent(fences)
    frame = encode_frame(next(updates[0].each()).message)
    (entry,) = (
        command.entry for command in after if isinstance(command, Record) and isinstance(command.entry, PlanAdopted)
    )
    return Loss(
        nodes=len(plane.nodes),
        lost=num_lost,
        generations=len({fence.message.generation for fence in fences if isinstance(fence.message, Fence)}),
        fences=fenced,
        answers_decode_s=answers_decode_s * fenced.number / len(survivors),
        decide_s=plane.used_s - used_s,
        updates=_sent(updates),
        update_decode_s=_timed(lambda: FrameDecoder[MasterMessage](MasterMessage).feed(frame))[0],
        journal_bytes=len(encode_json(entry)),
        memory_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def measure_manifest(plane: ControlPlane) -> Sent:
    """Save the state after a step; returns what gives the checkpoint its manifest."""
    pipeline, generation = plane.update.plan.pipelines[0], plane.update.generation
    plane.beat()
    ends = (pipeline.worker_ids[0], pipeline.worker_ids[-1])
    plane.hear((worker_id.node, _committed(worker_id, generation)) for worker_id in ends)
    name = f"step-{_STEP:08d}.00000000.{generation}"
    state = SavedState(name=name, step=_STEP, generation=generation, saved_at="2026-01-01T00:00:00+00:00")
    commands: list[Command] = []
    for stage in pipeline.stages:
        (worker_id, *_) = stage.worker_ids
        saved = StateSaved(
            device=worker_id.device, state=state, layers=tuple(stage.layers), size_bytes=1 << 20, pause_s=0.0
        )
        shards = tuple(
            Shard(layer=layer, file=f"layer-{layer:05d}.safetensors", size_bytes=1 << 20, sha256="0" * 64)
            for layer in stage.layers
        )
        written = LayersPersisted(device=worker_id.device, name=name, shards=shards, duration_s=1.0)
        commands += plane.hear(((worker_id.node, saved), (worker_id.node, written)))
    return _sent([command for command in commands if isinstance(command, Send) and _is(command, CommitCheckpoint)])


def _hello(node: str) -> Hello:
    return Hello(
        protocol=PROTOCOL_VERSION,
        oobleck_version=__version__,
        python_version="3.12.0",
        node=node,
        pid=1,
        generation=0,
        workers=(),
        num_cores=8,
        memory_bytes=1 << 40,
        clock_s=0.0,
    )


def _ready(node: str) -> WorkerReady:
    return WorkerReady(
        device=0,
        pid=100,
        data_digest="d",
        num_samples=1 << 20,
        layer_names=tuple(layer.name for layer in _PROFILE.layers),
        parameters=1,
        torch_version="2",
        saves=True,
        address=WorkerAddress(
            worker_id=WorkerId(node=node, device=0), host="10.200.100.100", port=40_000, ticket=bytes(range(16))
        ),
    )


def _nothing_found(asked: FindCheckpoints) -> CheckpointsFound:
    return CheckpointsFound(device=asked.device, request=asked.request, found=(), problems=(), unfinished=())


def _committed(worker_id: WorkerId, generation: int) -> StepCommitted:
    record = CommitRecord(
        step=_STEP,
        generation=generation,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=1e-3,
        num_samples=16,
        samples_repeated=0,
        samples_missing=0,
        duration_s=1.0,
    )
    return StepCommitted(device=worker_id.device, record=record)


def statuses_of(survivors: Sequence[WorkerId], adopted: PlanUpdate, generation: int) -> Iterable[Status]:
    """All have computed a part of the first step, and have applied none."""
    layers_at, knows = adopted.plan.layers_at, adopted.ordered.id
    for worker_id in survivors:
        yield Status(
            device=worker_id.device,
            generation=generation,
            applied=0,
            last_record=None,
            reduced=None,
            adopted=adopted.generation,
            knows=knows,
            layers=tuple(sorted(layers_at.get(worker_id, ()))),
            microbatches_done=3,
            broken=False,
            has_open_groups=True,
        )


def _to_workers(commands: Iterable[Command], kind: type) -> list[SendAll]:
    return [command for command in commands if isinstance(command, SendAll) and _is(command, kind)]


def _is(command: Send | SendAll, kind: type) -> bool:
    return isinstance(command.message, kind)


def _sent(commands: Sequence[Send] | Sequence[SendAll] | Sequence[SendOrders]) -> Sent:
    """What the master's channels would write of these; a sample of it is encoded, as they do it."""
    made_s, sends = _timed(
        lambda: [send for command in commands for send in ((command,) if isinstance(command, Send) else command.each())]
    )
    sample = sends[:: max(1, len(sends) // _SAMPLE)]
    # What differs is what a worker exchanges with others: a few have most of it.
    orders = [send.message for send in sends if isinstance(send.message, PlanOrder)]
    largest = max(orders, key=lambda order: len(order.transfers.items), default=None)
    for send in sample[:1]:
        encode_frame(send.message)  # the first of a kind has the codec look at its fields
    encode_s, sizes = _timed(lambda: [len(encode_frame(send.message)) for send in sample])
    share = len(sends) / len(sample) if sample else 0.0
    return Sent(
        number=len(sends),
        bytes=round(sum(sizes) * share),
        largest_bytes=max([*sizes, 0 if largest is None else len(encode_frame(largest))]),
        encode_s=made_s + encode_s * share,
    )


def _timed(function: Callable[[], T]) -> tuple[float, T]:
    """Processor seconds of a call, and what it returns."""
    began_s = time.process_time()
    result = function()
    return time.process_time() - began_s, result
