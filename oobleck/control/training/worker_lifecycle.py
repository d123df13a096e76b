"""Which workers take part: they become ready, end, and are started again."""

from __future__ import annotations

from oobleck.control.events import Record, Send
from oobleck.control.journal import LossCause, WorkerDown, WorkerEnded, WorkerUp
from oobleck.control.nodes import Member, Membership
from oobleck.control.protocol import KillWorker, Raised, WorkerExited, WorkerReady, end_text
from oobleck.control.recovery import GiveUp
from oobleck.control.steps import Progress
from oobleck.planner import WorkerId

from . import requests

_MAX_RESTARTS = 3
_RESTARTS_WITHIN_S = 600.0
"""A node is given up where its workers end again after so many restarts within this time, or without a step that was
never committed before: then something there, or in the job, ends them."""


class WorkerLifecycle:
    """Decides which workers are started again. `members` knows which are ready and which have ended."""

    def __init__(self, members: Membership, progress: Progress) -> None:
        self._members = members
        self._progress = progress

    def worker_up(self, member: Member, message: WorkerReady, now_s: float) -> WorkerUp | None:
        """Return what is known of a worker that is ready; None if it repeats this to a new master."""
        known = member.ready.get(message.device)
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

    def worker_exited(self, member: Member, message: WorkerExited, now_s: float, *, is_begun: bool) -> requests.Effects:
        """A worker has ended: start it again, or give its node up."""
        known = member.ready.get(message.device)
        if member.is_dismissed or (known is not None and known.pid != message.pid):
            return ()
        worker_id = WorkerId(node=member.spec.name, device=message.device)
        if message.pid in (gone := member.gone.get(message.device, ())):
            if message.device in member.shutdown and message.pid == gone[-1]:
                return (requests.StartAgain(worker_id=worker_id),)
            return ()  # repeated to a new master
        raised = (
            (requests.WorkerRaised(worker_id=worker_id, error=message.end),) if isinstance(message.end, Raised) else ()
        )
        num_restarts = self._num_restarts(member, now_s)
        # Before training, only one that was ended from outside is started again.
        is_worth_it = not member.is_draining and (is_begun or message.was_ended_from_outside)
        if is_worth_it and num_restarts < _MAX_RESTARTS:
            return (*raised, *self._restart(member, worker_id, message, now_s, is_begun=is_begun))
        given_up = GiveUp(nodes=(member.spec.name,), loss=WorkerEnded(pid=message.pid, end=message.end))
        if num_restarts < _MAX_RESTARTS:
            return (*raised, given_up)
        words = f"its worker was started again {_MAX_RESTARTS} times, and ended again: {end_text(message.end)}"
        return (*raised, requests.WorkersFail(node=member.spec.name, words=words), given_up)

    def _num_restarts(self, member: Member, now_s: float) -> int:
        return member.num_restarts(now_s, within_s=_RESTARTS_WITHIN_S, step=self._progress.furthest_step)

    def _restart(
        self, member: Member, worker_id: WorkerId, message: WorkerExited, now_s: float, *, is_begun: bool
    ) -> requests.Effects:
        """Continue without the node until its worker is back: a fork of a warm process, not a start from nothing.

        The node's other workers go that way with it. What they hold others hold too, for a node has a part in one
        pipeline alone; and the survivors may go on without what they have done. Where nobody survives, all wait for
        the workers that are started again.
        """
        node, trained = worker_id.node, is_begun and member.is_ready
        also = tuple(device for device in member.taken_along if device != worker_id.device)
        entry = WorkerDown(t_s=now_s, node=node, device=worker_id.device, pid=message.pid, end=message.end, also=also)
        effects: requests.Effects = (
            requests.WorkerRestarted(worker_id=worker_id, pid=message.pid, also=also),
            Record(entry=entry),
            *(Send(node=node, message=KillWorker(device=device)) for device in also),
            requests.StartAgain(worker_id=worker_id),
            requests.WorkerDropped(worker_id=worker_id),
        )
        if not trained:
            return effects
        detect_s = now_s - self._members.heard_s[node]
        return (*effects, requests.PlanWithout(node=node, loss=LossCause.WORKER_EXITED, detect_s=detect_s))
