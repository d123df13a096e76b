"""Which workers take part: they become ready, end, and are started again in their place."""

from __future__ import annotations

from oobleck.control.commit import Progress
from oobleck.control.events import Effects, RunOver, Send
from oobleck.control.journal import (
    Loss,
    LossCause,
    PlanCause,
    WorkerDown,
    WorkerEnded,
    WorkerUp,
    given_up_text,
)
from oobleck.control.membership import Member, Membership
from oobleck.control.protocol import KillWorker, Raised, StartWorker, WorkerExited, WorkerReady
from oobleck.exit_codes import ExitCode
from oobleck.planner import WorkerId

from .consequences import Consequences
from .preparation import Preparation
from .reconfiguration import Reconfiguration
from .shutdown import Shutdown

__all__ = ["WorkerLifecycle", "start_again"]

_MAX_RESTARTS = 3
_RESTARTS_WITHIN_S = 600.0
"""A node is given up where its workers end again after so many restarts within this time, or without a step that was
never committed before: then something there, or in the job, ends them."""


def start_again(member: Member, device: int) -> Send:
    """Have a worker started in its place."""
    member.shutdown.discard(device)
    return Send(node=member.spec.name, message=StartWorker(device=device))


class WorkerLifecycle:
    """Mutable through its parts alone: which workers are ready, and which have ended, is in `members`."""

    def __init__(
        self,
        members: Membership,
        preparation: Preparation,
        progress: Progress,
        shutdown: Shutdown,
        reconfiguration: Reconfiguration,
        consequences: Consequences,
        effects: Effects,
    ) -> None:
        self._members = members
        self._preparation = preparation
        self._progress = progress
        self._shutdown = shutdown
        self._reconfiguration = reconfiguration
        self._consequences = consequences
        self._effects = effects

    def worker_ready(self, member: Member, message: WorkerReady) -> None:
        """A worker can be given a part. Raises ConfigError if it does not fit the others."""
        known = member.ready.get(message.device)
        if known is not None and known.pid == message.pid:
            return  # said again to a new master
        entry = WorkerUp(
            t_s=self._effects.now_s,
            node=member.spec.name,
            device=message.device,
            pid=message.pid,
            data_digest=message.data_digest,
            weights_digest=message.weights_digest,
            probe_address=message.probe_address,
            saves=message.saves,
        )
        self._effects.record(entry)
        self._effects.command(*self._preparation.note_ready(member, message))
        self._consequences.worker_ready(message.shards)
        member.note_ready(entry, generation=self._reconfiguration.generations.current)
        if self._reconfiguration.is_begun and member.is_ready:
            self._reconfiguration.take_in(member.spec.name)

    def worker_exited(self, member: Member, message: WorkerExited) -> Loss | None:
        """A worker has ended: start it again, or return as what its node is lost."""
        known = member.ready.get(message.device)
        if member.is_dismissed or (known is not None and known.pid != message.pid):
            return None
        if message.pid in (gone := member.gone.get(message.device, ())):
            if message.device in member.shutdown and message.pid == gone[-1]:
                self._effects.command(start_again(member, message.device))
            return None  # else said again to a new master
        worker_id = WorkerId(node=member.spec.name, device=message.device)
        if isinstance(message.end, Raised):
            self._shutdown.note_error(worker_id, message.end)
        if self._is_worth_another_try(member, message):
            self._restart(member, worker_id, message)
            return None
        if self._num_restarts(member) >= _MAX_RESTARTS:
            member.last_words = given_up_text(message.end, num_restarts=_MAX_RESTARTS)
        return WorkerEnded(pid=message.pid, end=message.end)

    def _is_worth_another_try(self, member: Member, message: WorkerExited) -> bool:
        """Whether a worker that ended is started again; before training, only one that was ended from outside."""
        if member.is_draining or self._num_restarts(member) >= _MAX_RESTARTS:
            return False
        return self._reconfiguration.is_begun or message.was_ended_from_outside

    def _num_restarts(self, member: Member) -> int:
        step = self._progress.furthest_step
        return member.num_restarts(self._effects.now_s, within_s=_RESTARTS_WITHIN_S, step=step)

    def _restart(self, member: Member, worker_id: WorkerId, message: WorkerExited) -> None:
        """Go on without the node until its worker is back: a fork of a warm process, not a start from nothing.

        The node's other workers go that way with it. What they hold others hold too, for a node has a part in one
        pipeline alone; and the survivors may go on without what they have done. Where nobody survives, all wait for
        the workers that are started again; but the error that ended every one of them would do so again.
        """
        now_s = self._effects.now_s
        trained = member.is_ready
        also = tuple(device for device in member.taken_along if device != worker_id.device)
        step = self._progress.furthest_step
        member.note_restart(worker_id.device, message.pid, now_s=now_s, step=step, also=also)
        self._reconfiguration.forget_pace(worker_id.node)
        self._effects.record(
            WorkerDown(
                t_s=now_s,
                node=worker_id.node,
                device=worker_id.device,
                pid=message.pid,
                end=message.end,
                also=also,
            )
        )
        for device in also:
            self._effects.send(worker_id.node, KillWorker(device=device))
        self._effects.command(start_again(member, worker_id.device))
        self._consequences.worker_lost(worker_id)
        if not self._reconfiguration.is_begun:
            return
        if not self._members.ready and self._shutdown.is_same_error(self._training_nodes()):
            raise RunOver(ExitCode.FAILED, "the same error ended all workers")
        if trained and not self._reconfiguration.can_spare(worker_id.node):
            detect_s = now_s - member.last_heard_s
            self._reconfiguration.begin(
                [worker_id.node], PlanCause.LOSS, loss=LossCause.WORKER_EXITED, detect_s=detect_s
            )

    def _training_nodes(self) -> tuple[str, ...]:
        """The nodes of the newest plan whose agents live."""
        living = {member.spec.name for member in self._members.living}
        return tuple(node for node in self._reconfiguration.generations.plan.nodes if node in living)
