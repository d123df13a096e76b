"""What the coordinators of `oobleck up` and `oobleck run` share, as a pure machine.

    handle(now_s, event) -> commands        next_deadline() -> time        handle_deadline(now_s) -> commands

It has no clock, no socket and no randomness: the same events at the same times give the same commands, in the
real master, in the simulator and in a replay. Its parts decide which nodes take part. The derived class is the program
that runs on them (`training/coordinator.py` or `scripts/coordinator.py`), and the parts call it.
"""

from __future__ import annotations

import math
from abc import abstractmethod

from oobleck.control import events, journal, protocol
from oobleck.control.events import RunOver, Turn
from oobleck.errors import ConfigError, ExitCode, PeerError
from oobleck.job import ControlSpec

from .membership import Member, Membership, MemberState
from .node_lifecycle import NodeLifecycle
from .node_retry import NodeRetry
from .program import Program
from .silence import Silence


class BaseCoordinator(Program):
    """Makes all decisions of one run. Only `start`, `handle` and `handle_deadline` change it."""

    def __init__(
        self, control: ControlSpec, members: Membership, *, python_version: str, most_kinds: int | None
    ) -> None:
        self._members = members
        self._lifecycle = NodeLifecycle(
            members,
            NodeRetry(first_wait_s=control.rejoin_after_s),
            self,
            python_version=python_version,
            most_kinds=most_kinds,
        )
        self._silence = Silence(control, members)

    # --- the program ---------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether the run has ended: nothing changes any more."""

    @property
    @abstractmethod
    def due_s(self) -> float:
        """The latest time at which to call `act`; infinity for never."""

    @abstractmethod
    def begin(self, turn: Turn) -> None:
        """Begin, or take over: reach all nodes."""

    @abstractmethod
    def take(self, turn: Turn, event: events.Event) -> None:
        """Take in an event that only this program has."""

    @abstractmethod
    def understand(self, turn: Turn, member: Member, message: protocol.AgentMessage) -> None:
        """Take in what a node's agent reports. Raises PeerError or ConfigError, for which the node is lost."""

    @abstractmethod
    def act(self, turn: Turn, held_up_s: float) -> None:
        """Act on what has not happened in time. This master itself was held up for `held_up_s`, 0 if it was not."""

    def memory_ran_out(self, turn: Turn, node: str) -> None:
        """All processes of a node were killed for their memory; its loss is noticed apart from this."""

    def heard_again(self, turn: Turn) -> None:
        """Most nodes were silent until now."""

    def follow_up(self, turn: Turn) -> None:
        """Do what has become possible; called after every event and deadline."""

    @abstractmethod
    def end(self, turn: Turn, end: events.EndRun) -> None:
        """End the run."""

    # --- the machine's interface ---------------------------------------------------------------------------------

    def start(self, now_s: float) -> list[events.Command]:
        turn = Turn(now_s)
        self.begin(turn)
        return turn.commands

    def handle(self, now_s: float, event: events.Event) -> list[events.Command]:
        """Take in an event. Raises nothing: a peer that breaks a rule is lost for it."""
        turn = Turn(now_s)
        if self.is_over:
            return turn.commands
        self._silence.note_call(now_s)
        try:
            self._take_in(turn, event)
            self._lifecycle.drain_noticed(turn)
            self.follow_up(turn)
        except RunOver as over:
            self.end(turn, over.end)
        return self._up_to_end(turn)

    def next_deadline(self) -> float:
        """The latest time at which `handle_deadline` must be called; infinity for never."""
        if self.is_over:
            return math.inf
        silence_s = self._silence.due_s if self.is_begun else math.inf  # a start has a time limit of its own
        return min(self.due_s, self._lifecycle.retries_s, silence_s)

    def handle_deadline(self, now_s: float) -> list[events.Command]:
        """Act on what has not happened in time. Early calls do nothing."""
        turn = Turn(now_s)
        # `due_s` may be too early, because nodes that were heard since the last count do not move it.
        self._silence.recount()
        late_s = now_s - self.next_deadline()
        if late_s < 0 or self.is_over:
            return turn.commands
        self._silence.note_call(now_s)
        try:
            held_up_s = self._silence.forgive(late_s)
            if held_up_s:  # what nodes have sent meanwhile waits to be read, so no lease may lapse before
                self._members.forgive(now_s)
            self.act(turn, held_up_s)
            self.follow_up(turn)
        except RunOver as over:
            self.end(turn, over.end)
        return self._up_to_end(turn)

    def _up_to_end(self, turn: Turn) -> list[events.Command]:
        # Nothing follows the end of the run, neither on the wire nor in the journal.
        if not self.is_over:
            return turn.commands
        ends = [index for index, command in enumerate(turn.commands) if isinstance(command, events.End)]
        return turn.commands[: ends[0] + 1] if ends else turn.commands

    # --- what happens --------------------------------------------------------------------------------------------

    def _take_in(self, turn: Turn, event: events.Event) -> None:
        nodes = self._lifecycle
        match event:
            case events.NodeUp():
                nodes.node_up(turn, event)
            case events.NodeFailed(node=node, loss=loss):
                nodes.unreachable(turn, node, loss)
            case events.NodeLeftOut(node=node, fault=fault):
                turn.record(journal.NodeUnfit(t_s=turn.now_s, node=node, fault=fault, is_tried_again=False))
            case events.MessageReceived(node=node, message=message):
                self._hear(turn, node, message)
            case events.NodesHeard(heard=heard):
                self._members.hear_nodes(heard)
                self._note_heard(turn)
            case events.StopRequested():
                self.stop(turn, event)
            case events.AddRequested():
                nodes.add_requested(turn, event)
            case events.DrainRequested(node=node):
                nodes.drain(turn, node)
            case events.MemoryRanOut(node=node):
                self.memory_ran_out(turn, node)
            case events.KillRequested(node=node):
                nodes.ban(node)
            case events.Remark(level=level, text=text):
                turn.note(level, text)
            case _:
                self.take(turn, event)

    def _hear(self, turn: Turn, node: str, message: protocol.AgentMessage) -> None:
        if node not in self._members or self._members[node].state not in (MemberState.CONNECTED, MemberState.READY):
            return  # a node that was given up may still send for a while
        self._members.hear_node(node, turn.now_s)
        self._note_heard(turn)
        try:
            self._understand(turn, self._members[node], message)
        except PeerError as error:
            self._lifecycle.give_up(turn, node, journal.ProtocolBroken(problem=str(error)))
        except ConfigError as error:
            if not self.is_begun:
                turn.end(str(error), ExitCode.CONFIG)
            # A node that joins later must fit; the nodes that train are not affected.
            self._lifecycle.give_up(turn, node, journal.Misfit(problem=str(error)))

    def _note_heard(self, turn: Turn) -> None:
        if self._silence.heard(turn):
            self.heard_again(turn)

    def _give_up_silent(self, turn: Turn) -> None:
        for node, silent_s in self._silence.take_silent(turn).items():
            self._lifecycle.give_up(turn, node, journal.Silent(silent_s=silent_s))

    def _understand(self, turn: Turn, member: Member, message: protocol.AgentMessage) -> None:
        node = member.spec.name
        match message:
            case protocol.Heartbeat(sequence=sequence):
                if sequence is not None:
                    turn.send(node, message)
            case protocol.NodeUse():
                pass  # It is for people.
            case protocol.Leaving(reason=reason):
                turn.record(journal.TerminationNoticed(t_s=turn.now_s, node=node, reason=reason))
                self._lifecycle.noticed(turn, node)
            case protocol.ForkServerEnded(end=end, is_restarted=is_restarted):
                entry = journal.ForkServerDown(t_s=turn.now_s, node=node, end=end, is_restarted=is_restarted)
                turn.record(entry)
            case protocol.AgentStopped():
                self._lifecycle.agent_stopped(turn, member, message)
            case protocol.Hello():
                raise PeerError("a second hello on one connection")
            case _:
                self.understand(turn, member, message)
