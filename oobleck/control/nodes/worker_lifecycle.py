"""Which workers take part: they become ready, end and are restarted; and which of their messages count."""

from __future__ import annotations

from dataclasses import replace

from oobleck.control import protocol
from oobleck.control.events import NodeUp, Turn
from oobleck.control.journal import LossCause, WorkerDown, WorkerEnded, WorkerUp
from oobleck.control.protocol import end_text
from oobleck.errors import PeerError
from oobleck.job import NodeSpec
from oobleck.planner import WorkerId

from .membership import Member, Membership
from .node_lifecycle import NodeLifecycle
from .program import WorkerProgram

_MAX_RESTARTS = 3
# A node is given up if its workers end again after `_MAX_RESTARTS` within this time, or without a new step committed in
# between: something there, or in the job, ends them.
_RESTARTS_WITHIN_S = 600.0


class WorkerLifecycle:
    """Decides which workers are restarted. `members` knows which are ready and which have ended."""

    def __init__(self, members: Membership, nodes: NodeLifecycle, program: WorkerProgram) -> None:
        self._members = members
        self._nodes = nodes
        self._program = program

    def meet(self, turn: Turn, event: NodeUp) -> None:
        """An agent with workers meets its next master, or is reached again: messages to it may be lost."""
        node, before = event.node, self._members[event.node]
        if before.hello is not None and not before.ready and not before.gone:  # it may have received nothing yet
            self._nodes.meet(turn, event)
            return
        self._members.meet(node, event.hello, address=event.address, now_s=turn.now_s)
        member, living = self._members[node], {worker.device for worker in event.hello.workers}
        # A worker that is neither ready nor alive was asked for, but the request may be lost.
        missing = sorted({*range(member.spec.num_devices)} - {*member.ready} - living)
        if before.hello is not None:
            turn.note("info", f"{node} is reached again")
            if before.is_dismissed:
                turn.send(node, protocol.StopAgent(reason="drained", is_dismissal=True))
        self._program.node_met(turn, node, is_again=before.hello is not None)
        for device in missing:
            self._start(turn, WorkerId(node=node, device=device))
        for device in sorted(member.shutdown & living):  # the earlier request may be lost
            turn.send(node, protocol.KillWorker(device=device))

    def worker_up(self, member: Member, message: protocol.WorkerReady, now_s: float) -> WorkerUp | None:
        """Return the entry of a worker that is ready; None if it was reported before."""
        known = member.ready.get(message.device)
        # An agent repeats its reports to a new master, even those of workers that have ended since.
        if (known is not None and known.pid == message.pid) or message.pid in member.gone.get(message.device, ()):
            return None
        return WorkerUp(
            t_s=now_s,
            node=member.spec.name,
            device=message.device,
            pid=message.pid,
            data_digest=message.data_digest,
            alike=message.alike,
            address=message.address,
            saves=message.saves,
        )

    def worker_exited(self, turn: Turn, member: Member, message: protocol.WorkerExited) -> None:
        """A worker has ended: restart it, or give its node up."""
        node, known = member.spec.name, member.ready.get(message.device)
        # A drained node ends its workers itself; and the end of a worker that was replaced is old news.
        if member.is_dismissed or (known is not None and known.pid != message.pid):
            return
        worker_id = WorkerId(node=node, device=message.device)
        # The end of this worker is known: it was asked to end, or its agent repeats this to a new master.
        if message.pid in (gone := member.gone.get(message.device, ())):
            if message.device in member.shutdown and message.pid == gone[-1]:
                self._start(turn, worker_id)
            return
        self._program.worker_ended(turn, worker_id, message.end)
        step = self._program.furthest_step
        restarts = member.recent_restarts(turn.now_s, within_s=_RESTARTS_WITHIN_S, step=step)
        # Before training, an error is most likely the job's own, and would end every worker that is started again.
        is_worth_it = not member.is_draining and (self._program.is_begun or message.was_ended_from_outside)
        if is_worth_it and len(restarts) < _MAX_RESTARTS:
            self._restart(turn, member, worker_id, message)
            return
        again = None
        if len(restarts) >= _MAX_RESTARTS:
            words = f"its worker was started again {_MAX_RESTARTS} times, and ended again: {end_text(message.end)}"
            self._members.note_last_words(node, words)
            if is_worth_it and all(each.device == message.device for each in restarts):
                again = self._without_device(turn, member, message)
        self._nodes.give_up(turn, node, WorkerEnded(pid=message.pid, end=message.end), again=again)

    def _without_device(self, turn: Turn, member: Member, message: protocol.WorkerExited) -> NodeSpec | None:
        """Return a node without the device whose worker has ended; None if that is not to blame, or none is left."""
        whole, device = member.spec, message.device
        is_users = isinstance(message.end, protocol.Raised) and message.end.kind.is_users
        if is_users or self._program.is_met_elsewhere(WorkerId(node=whole.name, device=device)):
            return None
        rest = replace(whole, devices=tuple(number for index, number in enumerate(whole.devices) if index != device))
        if not rest.devices or not self._program.is_begun or not self._nodes.is_of_possible_kind(turn, rest):
            return None
        tried = f"{whole.name} is tried with {rest.num_devices} of its {whole.num_devices} devices"
        turn.note("warning", f"{tried}: only the worker of its device {whole.devices[device]} ended, each time")
        return rest

    def _restart(self, turn: Turn, member: Member, worker_id: WorkerId, message: protocol.WorkerExited) -> None:
        """Continue without the node until its worker is back. If no node survives, all wait for restarted workers."""
        # The node's other workers restart too. Others hold what they held, because a node has a part in one pipeline
        # alone, and the survivors may continue without what they have done.
        node, has_trained = worker_id.node, self._program.is_begun and member.is_ready
        also = tuple(device for device in member.taken_along if device != worker_id.device)
        step = self._program.furthest_step
        self._members.note_restart(worker_id, message.pid, now_s=turn.now_s, step=step, also=also)
        turn.record(
            WorkerDown(t_s=turn.now_s, node=node, device=worker_id.device, pid=message.pid, end=message.end, also=also)
        )
        for device in also:
            turn.send(node, protocol.KillWorker(device=device))
        self._start(turn, worker_id)
        self._program.drop_worker(turn, worker_id)
        if has_trained:
            silent_s = turn.now_s - self._members.heard_s[node]
            self._program.go_on_without(turn, member, LossCause.WORKER_EXITED, silent_s)

    def _start(self, turn: Turn, worker_id: WorkerId) -> None:
        self._members.note_started(worker_id)
        turn.send(worker_id.node, protocol.StartWorker(device=worker_id.device))


def is_of_training(message: protocol.AgentMessage) -> bool:
    """Return whether only a worker that has had a plan, or its agent, can send this."""
    if isinstance(message, protocol.FromWorker):
        return message.needs_orders
    return isinstance(message, protocol.CheckpointCommitted)


def is_of_worker_that_ends(member: Member, message: protocol.AgentMessage) -> bool:
    """Return whether this comes from a worker that was asked to end, and has no part in the run any more."""
    return (
        isinstance(message, protocol.FromWorker) and not message.outlives_worker and message.device in member.shutdown
    )


def check_device(member: Member, message: protocol.AgentMessage) -> None:
    """Raise PeerError for a message of a worker that the node does not have."""
    if isinstance(message, protocol.FromWorker) and message.device not in range(member.spec.num_devices):
        raise PeerError(f"speaks for device {message.device}; it has {member.spec.num_devices}")
    if isinstance(message, protocol.ReplicaDigests) and len(message.layers) != len(message.digests):
        raise PeerError(f"sends {len(message.digests)} digests of {len(message.layers)} layers")
