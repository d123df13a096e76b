"""Which nodes take part: they join, leave, are lost, and are tried again.

    connecting ── hello ──> connected ── workers ready ──> ready ── a drain ──> left
        └───────────────────────┴──────────────┴── a loss ──> lost ── a while later ──> connecting

`routing.py` says what a returned change means for the other parts and for the plan.
"""

from __future__ import annotations

from oobleck.control import events, journal
from oobleck.control.nodes import QUARANTINE_LOSSES, Member, Membership, MemberState, NodeRetry
from oobleck.control.protocol import AgentStopped, KillWorker, StopAgent
from oobleck.control.recovery import BeginRecovery, GiveUp, NodeDrained, NodeGone, NodeReached
from oobleck.errors import UsageError
from oobleck.job import NodeSpec
from oobleck.planner import WorkerId

from .requests import Effects, NodeDropped, NodeHere, NodeTakenIn, PlanWithout, StartAgain

_MAY_COME_BACK = frozenset(
    {journal.LossCause.CONNECTION_LOST, journal.LossCause.LEASE_EXPIRED, journal.LossCause.UNREACHABLE}
)
"""What a node is tried again after."""


class NodeLifecycle:
    """Decides which nodes take part. `members` holds present nodes, `node_retry` those to retry."""

    def __init__(self, members: Membership, node_retry: NodeRetry, *, most_kinds: int | None) -> None:
        """Nodes may be of `most_kinds`; None where it does not matter of which they are."""
        self._members = members
        self._node_retry = node_retry
        self._most_kinds = most_kinds
        self._num_leaving = 0
        """How many nodes have had notice, and do not train yet; some may be lost since."""

    # --- they come ---------------------------------------------------------------------------------------------

    def node_up(self, event: events.NodeUp, now_s: float, *, misfit: str | None, generation: int) -> Effects:
        """A node answers: it is new, or back, or has a new master.

        `misfit` says why its environment does not fit ours; `generation` is the newest one known here.
        """
        node, spec = event.node, self._node_retry.forget(event.node)
        if spec is None:
            return self._take_in(self._members[node], event, now_s, misfit=misfit, generation=generation)
        added = events.Record(entry=journal.NodeAdded(t_s=now_s, node=spec))
        self._members.add(spec)
        return (added, *self._take_in(self._members[node], event, now_s, misfit=misfit, generation=generation))

    def _take_in(
        self, member: Member, event: events.NodeUp, now_s: float, *, misfit: str | None, generation: int
    ) -> Effects:
        node, hello = event.node, event.hello
        if misfit is not None:
            return (GiveUp(nodes=(node,), loss=journal.Misfit(problem=misfit)),)
        if member.state is MemberState.CONNECTING:
            entry = journal.NodeConnected(t_s=now_s, node=node, agent_pid=hello.pid)
            return (events.Record(entry=entry), NodeTakenIn(event=event))
        if member.agent_pid != hello.pid:
            return (GiveUp(nodes=(node,), loss=journal.AgentLost(had_no_master=True)),)
        if hello.generation > generation:
            text = (
                f"{node} trains in generation {hello.generation}, and the journal knows none after {generation}: "
                "its end is lost; start from scratch with --resume never"
            )
            return (events.EndRun(reason=text),)
        if member.hello is not None and not member.ready and not member.gone:  # it may not have heard from us yet
            return (NodeTakenIn(event=event),)
        return self._meet(member, event, now_s)

    def _meet(self, member: Member, event: events.NodeUp, now_s: float) -> Effects:
        """An agent that has workers meets its next master, or is reached again: messages to it may be lost."""
        node, hello = event.node, event.hello
        found: Effects = ()
        if member.hello is not None:
            stop = events.Send(node=node, message=StopAgent(reason="drained", is_dismissal=True))
            dismissal = (stop,) if member.is_dismissed else ()
            found = (events.notice(now_s, "info", f"{node} is reached again"), *dismissal, NodeReached(node=node))
        self._members.meet(node, hello, address=event.address, now_s=now_s)
        member, living = self._members[node], {worker.device for worker in hello.workers}
        missing = sorted({*range(member.spec.num_devices)} - {*member.ready} - living)
        ending = sorted(member.shutdown & living)
        return (
            *found,
            NodeHere(node=node),
            *(StartAgain(worker_id=WorkerId(node=node, device=device)) for device in missing),
            *(
                events.Send(node=node, message=KillWorker(device=device)) for device in ending
            ),  # sent before, and perhaps lost
        )

    def add(self, spec: NodeSpec, now_s: float, *, by_itself: bool = False) -> Effects:
        """Take another node in, or one that was lost. Training continues; it joins once its workers are ready.

        One that comes by itself (`by_itself`) while it is in quarantine is tried once that is over.
        """
        if not by_itself:
            self._node_retry.forgive(spec.name)
        elif not self._node_retry.note_back(spec, now_s):
            return (_stays_out(spec.name, now_s),)
        try:
            self._check_kind(spec)
            self._members.add(spec)
        except UsageError as error:
            return (events.notice(now_s, "warning", str(error)),)
        return (events.Record(entry=journal.NodeAdded(t_s=now_s, node=spec)), events.Connect(node=spec))

    def _check_kind(self, spec: NodeSpec) -> None:
        known = self._members.kinds
        if self._most_kinds is None:
            return
        if known.get(spec.name, spec.kind) != spec.kind:
            # Plans that it has a part in, and that layers are read by, are for the node that it was.
            raise UsageError(
                f"{spec.name} is of kind {spec.kind}, and was {known[spec.name]} before; add it under another name"
            )
        kinds = set(known.values())
        if spec.kind not in kinds and len(kinds) >= self._most_kinds:
            raise UsageError(
                f"{spec.name} is of kind {spec.kind}, and those of the job are {', '.join(sorted(kinds))}; it may have "
                f"{self._most_kinds}"
            )

    @property
    def retries_s(self) -> float:
        """When a lost node is to be tried again; infinity for never."""
        return self._node_retry.due_s

    def retry_lost(self, now_s: float) -> tuple[events.Connect, ...]:
        """Try lost nodes again."""
        return tuple(events.Connect(node=spec) for spec in self._node_retry.take_due(now_s))

    # --- they are lost -----------------------------------------------------------------------------------------

    def unreachable(self, node: str, loss: journal.Loss, now_s: float) -> Effects:
        """A connection failed, or could not be made."""
        if node not in self._node_retry:
            return (GiveUp(nodes=(node,), loss=loss),)
        self._node_retry.note_failed(node, now_s)
        if not isinstance(loss, journal.Unfit):
            return ()
        return (events.Record(entry=journal.NodeUnfit(t_s=now_s, node=node, fault=loss.fault, is_tried_again=True)),)

    def give_up(self, node: str, loss: journal.Loss, now_s: float, *, is_begun: bool) -> Effects:
        """Give a node up, unless it was given up before."""
        member = self._members[node]
        if member.state in (MemberState.LOST, MemberState.LEFT):
            return ()
        self._members.lose(node)
        may_come_back = is_begun and loss.cause in _MAY_COME_BACK and not member.is_banned and not member.is_draining
        is_tried_again = may_come_back and self._node_retry.note_lost(member.spec, now_s)
        entry = journal.NodeLost(
            t_s=now_s,
            node=node,
            loss=loss,
            is_requested=member.is_banned,
            is_tried_again=is_tried_again and self._node_retry.is_on,
        )
        effects: Effects = (events.Disconnect(node=node), events.Record(entry=entry), NodeDropped(node=node, loss=loss))
        if not is_begun:
            return effects
        warning = (_quarantine(node, now_s),) if may_come_back and not is_tried_again else ()
        if not member.is_ready:  # it had no part in any plan
            return (*effects, *warning, NodeGone())
        silent_s = max(0.0, now_s - self._members.heard_s[node])
        return (*effects, *warning, PlanWithout(node=node, loss=loss.cause, detect_s=silent_s))

    def ban(self, node: str) -> None:
        """The user has a node killed: it is not tried again."""
        self._node_retry.forget(node)
        self._members.ban(node)

    # --- they are let go ---------------------------------------------------------------------------------------

    def drain(self, node: str, now_s: float, *, is_begun: bool) -> Effects:
        """Let a node go: it finishes the step in flight, hands over what only it holds, and leaves."""
        if self._node_retry.forget(node) is not None:
            return (events.notice(now_s, "info", f"{node} is lost, and is not tried again"),)
        if not is_begun or node not in self._members or not self._members[node].is_ready:
            return (events.notice(now_s, "warning", f"{node} is not training, so it cannot be drained"),)
        if self._members[node].is_draining:
            return ()
        self._members.drain(node)
        return (BeginRecovery(cause=journal.PlanCause.DRAINED, nodes=(node,)),)

    def drain_idle(self, node: str, now_s: float) -> Effects:
        """Let a node go that holds nothing which others need: once what runs there is ended, its agent is."""
        if self._node_retry.forget(node) is not None:
            return (events.notice(now_s, "info", f"{node} is lost, and is not tried again"),)
        if node not in self._members or self._members[node].state is not MemberState.CONNECTED:
            return (events.notice(now_s, "warning", f"{node} is not connected, so it cannot be drained"),)
        self._members.drain(node)
        return ()

    def noticed(self, member: Member, now_s: float, *, is_begun: bool) -> Effects:
        """A node will be taken away: drain it, now or once it trains."""
        self._members.note_notice(member.spec.name)
        if is_begun and member.is_ready:
            return self.drain(member.spec.name, now_s, is_begun=is_begun)
        self._members.note_leaving(member.spec.name, is_leaving=True)
        self._num_leaving += 1
        return ()

    def drain_noticed(self, now_s: float) -> Effects:
        """Training has begun: drain the nodes that had notice before."""
        if not self._num_leaving:
            return ()
        leaving = [member for member in self._members.living if member.is_leaving]
        ready = [member for member in leaving if member.is_ready]
        for member in ready:
            self._members.note_leaving(member.spec.name, is_leaving=False)
        self._num_leaving = len(leaving) - len(ready)
        return tuple(effect for each in ready for effect in self.drain(each.spec.name, now_s, is_begun=True))

    def keep(self, nodes: tuple[str, ...], now_s: float) -> Effects:
        """Do not let these nodes go after all."""
        for node in nodes:
            self._members.drain(node, is_draining=False)
        return tuple(
            events.notice(now_s, "warning", f"{node} stays: the job cannot continue without it") for node in nodes
        )

    def dismiss_drained(self) -> Effects:
        """The plan in force needs nothing of drained nodes any more: end their agents."""
        drained = [member for member in self._members.ready if member.is_draining]
        for member in drained:
            self._members.dismiss(member.spec.name)
        stop = StopAgent(reason="drained", is_dismissal=True)
        return tuple(events.Send(node=member.spec.name, message=stop) for member in drained)

    def agent_stopped(self, member: Member, message: AgentStopped, now_s: float, *, is_in_plan: bool) -> Effects:
        """An agent has ended, on request or by itself; `is_in_plan`: its node has a part in the newest plan."""
        node, reason = member.spec.name, message.reason
        if not member.is_draining or is_in_plan:
            loss = journal.NoWorkerStarts(problem=reason) if message.is_failure else journal.AgentLeft(reason=reason)
            return (GiveUp(nodes=(node,), loss=loss),)
        self._members.leave(node)
        entry = journal.NodeLeft(t_s=now_s, node=node)
        return (events.Record(entry=entry), events.Disconnect(node=node), NodeDrained(node=node))


def _stays_out(node: str, now_s: float) -> events.Record:
    text = (
        f"{node} is here again and stays out for now: it was lost {QUARANTINE_LOSSES} times within ten minutes; "
        f"`oobleck add {node}` adds it at once"
    )
    return events.notice(now_s, "warning", text)


def _quarantine(node: str, now_s: float) -> events.Record:
    text = (
        f"{node} was lost {QUARANTINE_LOSSES} times within ten minutes and is not tried again; "
        f"test it with `oobleck check`, then `oobleck add {node}` adds it again"
    )
    return events.notice(now_s, "warning", text)
