"""Which nodes take part: they join, leave, are lost, and are tried again.

    connecting ── hello ──> connected ── workers ready ──> ready ── a drain ──> left
        └───────────────────────┴──────────────┴── a loss ──> lost ── a while later ──> connecting

The program decides what a change means for what runs on the nodes.
"""

from __future__ import annotations

from collections.abc import Iterable

from oobleck import __version__
from oobleck.control import events, journal, protocol
from oobleck.control.events import Turn
from oobleck.errors import ExitCode, UsageError
from oobleck.job import NodeSpec

from .membership import Member, Membership, MemberState
from .node_retry import QUARANTINE_LOSSES, NodeRetry
from .program import Program

# Another connection may mend these losses. After any other the user has to add the node again.
_MAY_COME_BACK = frozenset(
    {journal.LossCause.CONNECTION_LOST, journal.LossCause.LEASE_EXPIRED, journal.LossCause.UNREACHABLE}
)


class NodeLifecycle:
    """Decides which nodes take part. `members` holds present nodes, `node_retry` those to retry."""

    def __init__(
        self,
        members: Membership,
        node_retry: NodeRetry,
        program: Program,
        *,
        python_version: str,
        most_kinds: int | None,
    ) -> None:
        """Nodes may be of `most_kinds` different kinds; None for any number."""
        self._members = members
        self._node_retry = node_retry
        self._program = program
        self._python_version = python_version
        self._most_kinds = most_kinds
        self._num_leaving = 0
        """How many nodes have notice and do not train yet; some may be lost since."""
        self._back: dict[str, events.AddRequested] = {}
        """Arrivals of nodes whose loss is not known yet, keyed by node."""
        self._has_notice = False
        self._is_stopped = False

    # --- nodes join --------------------------------------------------------------------------------------------

    def node_up(self, turn: Turn, event: events.NodeUp) -> None:
        """A node answers: it is new or back, or has a new master."""
        node, hello = event.node, event.hello
        # A lost node that was tried again becomes a new member: its old agent and workers are gone.
        if (spec := self._node_retry.forget(node)) is not None:
            self._members.add(spec)
            turn.record(journal.NodeAdded(t_s=turn.now_s, node=spec))
        member = self._members[node]
        if (misfit := misfit_of(hello, python_version=self._python_version)) is not None:
            self.give_up(turn, node, journal.Misfit(problem=misfit))
        elif member.state is MemberState.CONNECTING:
            turn.record(journal.NodeConnected(t_s=turn.now_s, node=node, agent_pid=hello.pid))
            self.meet(turn, event)
        elif member.agent_pid != hello.pid:
            # Another agent was started there, so the workers that the plan counts on are gone.
            self.give_up(turn, node, journal.AgentLost(had_no_master=True))
        elif hello.generation > self._program.generation:
            # The journal has lost its last entries. Without that plan it is unknown what the workers hold.
            turn.end(
                f"{node} trains in generation {hello.generation}, and the journal knows none after "
                f"{self._program.generation}: its end is lost; start from scratch with --resume never"
            )
        else:
            self._program.node_back(turn, event)

    def meet(self, turn: Turn, event: events.NodeUp) -> None:
        """Note which agent speaks for a node, and have it told what to run."""
        self._members.meet(event.node, event.hello, address=event.address, now_s=turn.now_s)
        self._program.configure(turn, event.node)

    def add_requested(self, turn: Turn, event: events.AddRequested) -> None:
        """Take another node in; one that arrives again before its loss is known, as soon as the loss is."""
        node = event.spec.name
        is_here = node in self._members and self._members[node].state not in (MemberState.LOST, MemberState.LEFT)
        if event.has_arrived and is_here:
            # Its old connection is about to break, or its lease to lapse. Until then the node counts as present.
            self._back[node] = event
        else:
            self.add(turn, event.spec, by_itself=event.by_itself)

    def add(self, turn: Turn, spec: NodeSpec, *, by_itself: bool = False) -> None:
        """Take another node in, or one that was lost. Training continues; the node joins once its workers are ready.

        A node that comes `by_itself` while it is in quarantine is tried once that is over.
        """
        if not by_itself:
            self._node_retry.forgive(spec.name)
        elif not self._node_retry.note_back(spec, turn.now_s):
            turn.note(
                "warning",
                f"{spec.name} is back and stays out for now: it was lost {QUARANTINE_LOSSES} times within ten "
                f"minutes; `oobleck add {spec.name}` adds it at once",
            )
            return
        if not self.is_of_possible_kind(turn, spec):
            return
        try:
            self._members.add(spec)
        except UsageError as error:
            turn.note("warning", str(error))
            return
        turn.record(journal.NodeAdded(t_s=turn.now_s, node=spec))
        turn.do((events.Connect(node=spec),))

    def is_of_possible_kind(self, turn: Turn, spec: NodeSpec) -> bool:
        """Return whether the job may have nodes of this one's kind; if not, a warning says why."""
        kinds = self._members.known_kinds
        if self._most_kinds is None or spec.kind in kinds or len(kinds) < self._most_kinds:
            return True
        turn.note(
            "warning",
            f"{spec.name} is of kind {spec.kind}, and the job has nodes of {', '.join(sorted(kinds))}; it may have "
            f"at most {self._most_kinds}",
        )
        return False

    @property
    def retries_s(self) -> float:
        """When to try a lost node again; infinity for never."""
        return self._node_retry.due_s

    def retry_lost(self, turn: Turn) -> None:
        turn.do(events.Connect(node=spec) for spec in self._node_retry.take_due(turn.now_s))

    def take_over(self, now_s: float) -> None:
        """Try the lost nodes again that the master before would have."""
        for member in self._members.in_state(MemberState.LOST):
            if member.is_tried_again:
                self._node_retry.note_lost(member.spec, now_s)

    # --- nodes are lost ----------------------------------------------------------------------------------------

    def unreachable(self, turn: Turn, node: str, loss: journal.Loss) -> None:
        """A connection failed, or could not be made."""
        if node not in self._node_retry:
            self.give_up(turn, node, loss)
            return
        self._node_retry.note_failed(node, turn.now_s)
        if isinstance(loss, journal.Unfit):
            turn.record(journal.NodeUnfit(t_s=turn.now_s, node=node, fault=loss.fault, is_tried_again=True))

    def give_up(self, turn: Turn, node: str, loss: journal.Loss, *, again: NodeSpec | None = None) -> None:
        """Lose a node; `again` takes it in once more at once, with the devices that it names."""
        member, is_begun = self._members[node], self._program.is_begun
        # Several things show the same loss: the connection breaks, the lease lapses, a peer reports it.
        if member.state in (MemberState.LOST, MemberState.LEFT):
            return
        may_come_back = is_begun and loss.cause in _MAY_COME_BACK and not member.is_banned and not member.is_draining
        is_tried_again = may_come_back and self._node_retry.note_lost(member.spec, turn.now_s)
        self._members.lose(node, is_tried_again=is_tried_again and self._node_retry.is_on)
        # The journal has the loss before the program acts on it, and before a node that arrived again is added.
        turn.do((events.Disconnect(node=node),))
        turn.record(
            journal.NodeLost(
                t_s=turn.now_s,
                node=node,
                loss=loss,
                is_requested=member.is_banned,
                is_tried_again=again is not None or self._members[node].is_tried_again,
            )
        )
        self._program.drop_node(turn, node, loss)
        # The program may have nothing left but this node, and waits for one that is on its way.
        if (back := self._back.pop(node, None)) is not None:
            self.add(turn, back.spec, by_itself=back.by_itself)
        elif again is not None:
            self.add(turn, again)
        if is_begun:
            if may_come_back and not is_tried_again:
                turn.note(
                    "warning",
                    f"{node} was lost {QUARANTINE_LOSSES} times within ten minutes and is not tried again; "
                    f"test it with `oobleck check`, then `oobleck add {node}` adds it again",
                )
            silent_s = max(0.0, turn.now_s - self._members.heard_s[node])
            self._program.go_on_without(turn, member, loss.cause, silent_s)
        self._stop_if_all_leave(turn)

    def ban(self, node: str) -> None:
        self._node_retry.forget(node)
        self._members.ban(node)

    # --- nodes leave -------------------------------------------------------------------------------------------

    def drain(self, turn: Turn, node: str) -> None:
        """Let a node leave: it finishes the step in flight, and hands over what only it holds."""
        if self._node_retry.forget(node) is not None:
            turn.note("info", f"{node} is lost, and is not tried again")
        elif node not in self._members or not self._program.is_at_work(self._members[node]):
            turn.note("warning", f"{node} is not {self._program.work}, so it cannot be drained")
        elif not self._members[node].is_draining:
            self._members.drain(node)
            self._program.node_draining(turn, node)

    def noticed(self, turn: Turn, node: str) -> None:
        """A node will be taken away: drain it now, or once it trains."""
        self._members.note_notice(node)
        if self._program.is_at_work(self._members[node]):
            self.drain(turn, node)
        else:
            self._members.note_leaving(node, is_leaving=True)
            self._num_leaving += 1
        self._has_notice = True
        self._stop_if_all_leave(turn)

    def _stop_if_all_leave(self, turn: Turn) -> None:
        # At a time limit all nodes have notice together. None could take over from the others, so the run saves all.
        if self._has_notice and not self._is_stopped and self._members.are_all_leaving:
            self._is_stopped = True
            reason = "all nodes are to be taken away; the same command continues from here"
            self._program.stop(turn, events.StopRequested(now=False, exit_code=ExitCode.RESUMABLE, reason=reason))

    def drain_noticed(self, turn: Turn) -> None:
        """Drain the nodes that had notice before they could be drained."""
        # This runs after every event, so it looks at the nodes only if one of them waits.
        if not self._num_leaving or not self._program.is_begun:
            return
        leaving = [member for member in self._members.living if member.is_leaving]
        ready = [member for member in leaving if self._program.is_at_work(member)]
        self._num_leaving = len(leaving) - len(ready)
        # All of them are marked before the program plans without the first, so that one plan serves for all.
        for member in ready:
            self._members.note_leaving(member.spec.name, is_leaving=False)
            self._members.drain(member.spec.name)
        for member in ready:
            if not member.is_draining:
                self._program.node_draining(turn, member.spec.name)

    def keep(self, turn: Turn, nodes: Iterable[str]) -> None:
        for node in nodes:
            self._members.drain(node, is_draining=False)
            turn.note("warning", f"{node} stays: the job cannot continue without it")

    def dismiss_drained(self, turn: Turn) -> None:
        for member in self._members.ready:
            if member.is_draining:
                self._members.dismiss(member.spec.name)
                turn.send(member.spec.name, protocol.StopAgent(reason="drained", is_dismissal=True))

    def agent_stopped(self, turn: Turn, member: Member, message: protocol.AgentStopped) -> None:
        node, reason = member.spec.name, message.reason
        # A node that ends before it has handed its state over is lost, although it was to leave.
        if not member.is_draining or self._program.needs(node):
            loss = journal.NoWorkerStarts(problem=reason) if message.is_failure else journal.AgentLeft(reason=reason)
            self.give_up(turn, node, loss)
            return
        self._members.leave(node)
        turn.record(journal.NodeLeft(t_s=turn.now_s, node=node))
        turn.do((events.Disconnect(node=node),))
        self._program.node_left(turn, node)


def misfit_of(hello: protocol.Hello, *, python_version: str) -> str | None:
    """Return why an agent's environment does not fit the master's, and what to change; None when it fits."""
    if hello.oobleck_version != __version__ or hello.protocol != protocol.PROTOCOL_VERSION:
        return (
            f"oobleck {hello.oobleck_version} (protocol {hello.protocol}) runs there, {__version__} (protocol "
            f"{protocol.PROTOCOL_VERSION}) here; install the same version on both"
        )
    if _minor(hello.python_version) != _minor(python_version):
        return (
            f"Python {hello.python_version} runs there, {python_version} here; "
            "use the same minor version on both (the job's `python` names the interpreter)"
        )
    return None


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])
