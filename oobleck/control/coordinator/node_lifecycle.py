"""Which nodes take part: they come, are let go, are lost, and are tried again.

    connecting ── hello ──> connected ── workers ready ──> ready ── a drain ──> left
        └───────────────────────┴──────────────┴── a loss ──> lost ── a while later ──> connecting

What a change means for the plan is `reconfiguration`'s business, and before the first plan `startup`'s.
"""

from __future__ import annotations

from collections.abc import Iterable

from oobleck.control.events import Connect, Disconnect, Effects, NodeUp, RunOver
from oobleck.control.journal import (
    AgentLeft,
    AgentLost,
    Loss,
    LossCause,
    Misfit,
    NodeAdded,
    NodeConnected,
    NodeLeft,
    NodeLost,
    NodeUnfit,
    NoWorkerStarts,
    PlanCause,
    Unfit,
)
from oobleck.control.membership import QUARANTINE_LOSSES, Member, Membership, MemberState, NodeRetry
from oobleck.control.protocol import AgentStopped, KillWorker, StopAgent
from oobleck.errors import UsageError
from oobleck.exit_codes import ExitCode
from oobleck.job import NodeSpec

from .consequences import Consequences
from .preparation import Preparation
from .reconfiguration import Reconfiguration
from .recovery.states import GiveUp
from .worker_lifecycle import start_again

__all__ = ["NodeLifecycle"]

_MAY_COME_BACK = frozenset({LossCause.CONNECTION_LOST, LossCause.LEASE_EXPIRED, LossCause.UNREACHABLE})
"""What a node is tried again after."""


class NodeLifecycle:
    """Mutable through its parts alone: who is there is in `members`, who is to be tried again in `node_retry`."""

    def __init__(
        self,
        members: Membership,
        preparation: Preparation,
        node_retry: NodeRetry,
        reconfiguration: Reconfiguration,
        consequences: Consequences,
        effects: Effects,
        *,
        num_devices: int,
    ) -> None:
        """All nodes have `num_devices`."""
        self._members = members
        self._preparation = preparation
        self._node_retry = node_retry
        self._reconfiguration = reconfiguration
        self._consequences = consequences
        self._effects = effects
        self._num_devices = num_devices
        self._num_leaving = 0
        """How many nodes have had notice, and do not train yet; some may be lost since."""

    # --- nodes -------------------------------------------------------------------------------------------------

    def node_up(self, event: NodeUp) -> None:
        """A node answers: a new one, one that is back, or one that meets its next master. Raises RunOver."""
        node = event.node
        if (spec := self._node_retry.forget(node)) is not None:
            self._members.add(spec)
            self._effects.record(NodeAdded(t_s=self._effects.now_s, node=spec))
        member = self._members[node]
        misfit = self._preparation.misfit(event.hello)
        if misfit is not None:
            self.fail(node, Misfit(problem=misfit))
        elif member.state is MemberState.CONNECTING:
            member.last_heard_s = self._effects.now_s
            self._effects.record(NodeConnected(t_s=self._effects.now_s, node=node, agent_pid=event.hello.pid))
            self._effects.command(*self._preparation.configure(event, self._effects.now_s))
        elif member.agent_pid != event.hello.pid:
            self.fail(node, AgentLost(had_no_master=True))
        elif event.hello.generation > self._reconfiguration.generations.current:
            raise RunOver(
                ExitCode.FAILED,
                f"{node} trains in generation {event.hello.generation}, and the journal knows none after "
                f"{self._reconfiguration.generations.current}: its end is lost; start from scratch with --resume never",
            )
        elif member.hello is not None and not member.ready and not member.gone:  # it may have heard nothing of us yet
            self._effects.command(*self._preparation.configure(event, self._effects.now_s))
        else:
            is_back = member.hello is not None
            member.meet(event.hello, address=event.address, now_s=self._effects.now_s)
            if is_back:
                self._find_again(member)
            self._consequences.met(node)
            for device in sorted({*range(member.spec.num_devices)} - {*member.ready} - {*event.hello.workers}):
                self._effects.command(start_again(member, device))
            for device in sorted(member.shutdown.intersection(event.hello.workers)):
                self._effects.send(node, KillWorker(device=device))  # said before, and lost perhaps

    def _find_again(self, member: Member) -> None:
        """The way to a node was lost, and is found: its agent has not ended, and what was on the way to it is lost."""
        node = member.spec.name
        self._effects.notice("info", f"{node} is reached again")
        self._consequences.way_found()
        if member.is_dismissed:
            self._effects.send(node, StopAgent(reason="drained", is_dismissal=True))
        self._reconfiguration.reach_again(node)

    def unreachable(self, node: str, loss: Loss) -> None:
        """A connection failed, or could not be made."""
        if node in self._node_retry:
            self._node_retry.note_failed(node, self._effects.now_s)
            if isinstance(loss, Unfit):
                now_s = self._effects.now_s
                self._effects.record(NodeUnfit(t_s=now_s, node=node, fault=loss.fault, is_tried_again=True))
        else:
            self.fail(node, loss)

    def fail(self, node: str, loss: Loss) -> None:
        """Give a node up, if that was not done before. Raises RunOver where the run has not begun."""
        member = self._members[node]
        if member.state in (MemberState.LOST, MemberState.LEFT):
            return
        now_s = self._effects.now_s
        silent_s = max(0.0, now_s - member.last_heard_s)
        trained = member.is_ready
        member.move_to(MemberState.LOST)
        self._reconfiguration.forget_pace(node)
        self._effects.command(Disconnect(node=node))
        is_begun = self._reconfiguration.is_begun
        may_come_back = is_begun and loss.cause in _MAY_COME_BACK and not member.is_banned and not member.is_draining
        is_tried_again = may_come_back and self._node_retry.note_lost(member.spec, now_s)
        self._effects.record(
            NodeLost(
                t_s=now_s,
                node=node,
                loss=loss,
                is_requested=member.is_banned,
                is_tried_again=is_tried_again and self._node_retry.is_on,
            )
        )
        self._consequences.node_lost(node, loss)
        if not is_begun:
            return
        if may_come_back and not is_tried_again:
            self._tell_quarantine(node)
        if trained and not self._reconfiguration.can_spare(node):  # else it had no part in any plan
            self._reconfiguration.begin([node], PlanCause.LOSS, loss=loss.cause, detect_s=silent_s)
        else:
            self._reconfiguration.note_gone()

    def _tell_quarantine(self, node: str) -> None:
        self._effects.notice(
            "warning",
            f"{node} was lost {QUARANTINE_LOSSES} times within ten minutes and is not tried again; "
            f"test it with `oobleck check`, then `oobleck add {node}` lets it back",
        )

    def add(self, spec: NodeSpec) -> None:
        """Take another node in. Training continues; it joins once its workers are ready."""
        try:
            self._check_devices(spec)
            self._members.add(spec)
        except UsageError as error:
            self._effects.notice("warning", str(error))
            return
        self._effects.record(NodeAdded(t_s=self._effects.now_s, node=spec))
        self._effects.command(Connect(node=spec))

    def _check_devices(self, spec: NodeSpec) -> None:
        wanted = self._num_devices
        if spec.num_devices != wanted:
            raise UsageError(f"{spec.name} has {spec.num_devices} devices; all nodes of the job have {wanted}")

    def drain(self, node: str) -> None:
        """Let a node go: it finishes the step in flight, gives away what only it holds, and leaves."""
        if self._node_retry.forget(node) is not None:
            self._effects.notice("info", f"{node} is lost, and is not tried again")
        elif not self._reconfiguration.is_begun or node not in self._members or not self._members[node].is_ready:
            self._effects.notice("warning", f"{node} is not training, so it cannot be drained")
        elif not self._members[node].is_draining:
            self._members[node].is_draining = True
            self._reconfiguration.begin([node], PlanCause.DRAINED, detect_s=0.0)

    def noticed(self, member: Member) -> None:
        """A node will be taken away: drain it, or remember that for when it trains."""
        if self._reconfiguration.is_begun and member.is_ready:
            self.drain(member.spec.name)
        else:
            member.is_leaving = True
            self._num_leaving += 1

    def drain_noticed(self) -> None:
        """Drain the nodes that train by now, and had notice before."""
        if not self._num_leaving or not self._reconfiguration.is_begun:
            return
        leaving = [member for member in self._members.living if member.is_leaving]
        for member in leaving:
            if member.is_ready:
                member.is_leaving = False
                self.drain(member.spec.name)
        self._num_leaving = sum(member.is_leaving for member in leaving)

    def agent_stopped(self, member: Member, message: AgentStopped) -> None:
        """An agent has ended as it was told to, or by itself."""
        node = member.spec.name
        if not member.is_draining or node in self._reconfiguration.generations.plan.nodes:
            reason = message.reason
            self.fail(node, NoWorkerStarts(problem=reason) if message.is_failure else AgentLeft(reason=reason))
            return
        member.move_to(MemberState.LEFT)
        self._effects.record(NodeLeft(t_s=self._effects.now_s, node=node))
        self._effects.command(Disconnect(node=node))
        self.give_up(self._reconfiguration.note_left(node))

    def give_up(self, wanted: Iterable[GiveUp]) -> None:
        """Give up nodes that hold up a recovery."""
        for each in wanted:
            for node in each.nodes:
                self.fail(node, each.loss)
