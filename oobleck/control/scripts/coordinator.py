"""The coordinator of `oobleck run`: events in, commands out, as the one of training has it. Pure.

Which nodes take part is decided as for training, by the same parts (`NodeLifecycle`, `Silence`); when ranks start and
end, by the machine beside this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import assert_never

from oobleck import __version__
from oobleck.control import events, journal, protocol
from oobleck.control.nodes import Leases, Membership, MemberState, NodeRetry
from oobleck.control.training import (
    GiveUp,
    LifecycleEffect,
    NodeLifecycle,
    NodeTakenIn,
    Silence,
    misfit_of,
)
from oobleck.errors import PeerError
from oobleck.job import NodeSpec
from oobleck.job.ranks import RanksSpec

from . import states
from .hang import HangWatch
from .machine import deadline, start, step

_PATIENCE_S = 30.0
"""For an agent that kills its ranks: a process in the kernel's hands may take its time."""


_MOST_CULPRITS = 4
"""In an entry, with their stacks."""


@dataclass(slots=True)
class _Formed:
    """The newest generation, as far as it is on its way."""

    begin: states.Begin
    since_s: float
    """When the one before ended."""
    hang: HangWatch
    is_ended: bool = False
    """Its end is in the journal."""
    port: int = 0
    address: str = ""
    warm: dict[str, bool] = field(default_factory=dict)
    """By node whose ranks exist."""
    down: set[int] = field(default_factory=set)
    """Ranks that have failed, by process id: an agent that is reached again may repeat itself."""


class RanksCoordinator:
    """Makes all decisions of a run of a script. Only `start`, `handle` and `handle_deadline` change it."""

    def __init__(self, run: RanksSpec, nodes: tuple[NodeSpec, ...], *, started_at: str, python_version: str) -> None:
        self._run = run
        self._nodes = nodes
        self._started_at = started_at
        self._run_digits = "".join(each for each in started_at if each.isdecimal())
        self._python_version = python_version
        self._members = Membership(nodes)
        self._lifecycle = NodeLifecycle(
            self._members, NodeRetry(first_wait_s=run.control.rejoin_after_s), most_kinds=None
        )
        self._silence = Silence(run.control, Leases(run.control, self._members))
        self._rules = states.Rules(
            min_nodes=run.min_nodes,
            max_nodes=run.max_nodes,
            max_restarts=run.max_restarts,
            node_unit=run.node_unit,
            waits_for_all_s=run.control.start_timeout_s,
            waits_for_min_s=run.join_timeout_s,
            grace_s=run.shutdown_timeout_s,
            patience_s=_PATIENCE_S,
        )
        self._state = start(0.0)
        self._ready: dict[str, protocol.RanksReady] = {}
        """By node on which no rank runs."""
        self._losses: dict[str, str] = {}
        """By node: what it was lost for, before anything ran."""
        self._formed: _Formed | None = None
        self._ended_s = 0.0
        self._commands: list[events.Command] = []

    # --- the machine's interface -------------------------------------------------------------------------------------

    def start(self, now_s: float) -> list[events.Command]:
        """Begin: reach all nodes."""
        self._state = start(now_s)
        entry = journal.ScriptStarted(
            t_s=now_s,
            version=__version__,
            run=self._run.without_values(),
            nodes=self._nodes,
            started_at=self._started_at,
        )
        self._record(entry)
        self._commands += [events.Connect(node=spec) for spec in self._nodes]
        return self._take()

    def handle(self, now_s: float, event: events.Event) -> list[events.Command]:
        """Take in an event. Raises nothing: a peer that does wrong is the one that is lost for it."""
        if isinstance(self._state, states.Over):
            return []
        self._silence.note_call(now_s)
        self._take_in(event, now_s)
        return self._take()

    def next_deadline(self) -> float:
        """The latest time at which `handle_deadline` must be called; infinity for never."""
        if isinstance(self._state, states.Over):
            return math.inf
        hang_due_s = self._formed.hang.due_s if self._formed is not None else None
        due_s = min(deadline(self._state, self._rules), self._lifecycle.retries_s, self._silence.due_s)
        return due_s if hang_due_s is None else min(due_s, hang_due_s)

    def handle_deadline(self, now_s: float) -> list[events.Command]:
        """Act on what has not happened in time. Early calls do nothing."""
        self._silence.recount()
        late_s = now_s - self.next_deadline()
        if late_s < 0 or isinstance(self._state, states.Over):
            return []
        self._silence.note_call(now_s)
        if self._silence.forgive(now_s, late_s):
            self._members.forgive(now_s)
        self._do(self._silence.give_up_silent(now_s), now_s)
        self._do(self._lifecycle.retry_lost(now_s), now_s)
        self._give(states.TimePassed(), now_s)
        self._end_hang(now_s)
        return self._take()

    # --- what happens ------------------------------------------------------------------------------------------------

    def _take_in(self, event: events.Event, now_s: float) -> None:
        match event:
            case events.NodeUp(hello=hello):
                misfit = misfit_of(hello, python_version=self._python_version)
                self._do(self._lifecycle.node_up(event, now_s, misfit=misfit, generation=self._generation), now_s)
            case events.NodeFailed(node=node, loss=loss):
                self._do(self._lifecycle.unreachable(node, loss, now_s), now_s)
            case events.NodeLeftOut(node=node, fault=fault):
                self._record(journal.NodeUnfit(t_s=now_s, node=node, fault=fault, is_tried_again=False))
            case events.MessageReceived(node=node, message=message):
                self._hear(node, message, now_s)
            case events.NodesHeard(heard=heard):
                self._members.hear_nodes(heard)
                self._do(self._silence.heard(now_s), now_s)
            case events.StopRequested():
                end = events.EndRun(exit_code=event.exit_code, reason=event.reason)
                self._give(states.StopAsked(end=end, now=event.now), now_s)
            case events.AddRequested(spec=spec, by_itself=by_itself):
                self._do(self._lifecycle.add(spec, now_s, by_itself=by_itself), now_s)
            case events.DrainRequested(node=node):
                self._do(self._lifecycle.drain_idle(node, now_s), now_s)
                if node in self._members and self._members[node].is_draining:
                    self._give(states.Leave(node=node), now_s)
            case events.KillRequested(node=node):
                self._lifecycle.ban(node)
            case events.Remark(level=level, text=text):
                self._do((events.notice(now_s, level, text),), now_s)
            case _:
                raise AssertionError(f"{type(event).__name__} is of training")

    def _hear(self, node: str, message: protocol.AgentMessage, now_s: float) -> None:
        if node not in self._members or self._members[node].state is not MemberState.CONNECTED:
            return  # it was given up, and did not know
        self._members.hear_node(node, now_s)
        self._do(self._silence.heard(now_s), now_s)
        try:
            self._understand(node, message, now_s)
        except PeerError as error:
            self._do((GiveUp(nodes=(node,), loss=journal.ProtocolBroken(problem=str(error))),), now_s)

    def _understand(self, node: str, message: protocol.AgentMessage, now_s: float) -> None:
        match message:
            case protocol.Heartbeat(sequence=sequence):
                if sequence is not None:
                    self._commands.append(events.Send(node=node, message=message))
            case protocol.RanksReady(generation=generation):
                self._ready[node] = message
                self._give(states.Ready(node=node, generation=generation), now_s)
                self._let_go_if_due(node)
            case protocol.RanksStarted():
                self._note_started(node, message, now_s)
            case protocol.RankFailed():
                self._note_failed(node, message, now_s)
            case protocol.RanksCold(problem=problem):
                self._do(
                    (events.notice(now_s, "warning", f"{node}: ranks that start now start cold: {problem}"),), now_s
                )
            case protocol.RanksUnwritten(problem=problem):
                text = f"{node}: {problem}: what ranks print is shown, and is not in their files until there is room"
                self._do((events.notice(now_s, "warning", text),), now_s)
            case protocol.RankOutput():
                pass  # for people
            case protocol.RanksQuiet() | protocol.RankStacks():
                self._note_quiet(node, message, now_s)
            case protocol.RanksFinished(generation=generation):
                self._give(states.Finished(node=node, generation=generation), now_s)
            case protocol.Leaving(reason=reason):
                self._record(journal.TerminationNoticed(t_s=now_s, node=node, reason=reason))
                self._members.note_notice(node)
                self._take_in(events.DrainRequested(node=node), now_s)
            case protocol.ForkServerEnded(end=end, is_restarted=is_restarted):
                self._record(journal.ForkServerDown(t_s=now_s, node=node, end=end, is_restarted=is_restarted))
            case protocol.AgentStopped():
                effects = self._lifecycle.agent_stopped(self._members[node], message, now_s, is_in_plan=False)
                self._do(effects, now_s)
                if self._members[node].state is MemberState.LEFT:
                    self._drop(node, now_s)
            case _:
                raise PeerError(f"said {type(message).__name__}, which has no meaning in a run of a script")

    def _note_started(self, node: str, message: protocol.RanksStarted, now_s: float) -> None:
        formed = self._formed
        if formed is None or message.generation != formed.begin.generation:
            return
        formed.warm[node] = message.is_warm
        if len(formed.warm) == len(formed.begin.nodes):
            away_s, is_warm = now_s - formed.since_s, all(formed.warm.values())
            self._record(
                journal.GenerationRuns(t_s=now_s, generation=message.generation, away_s=away_s, is_warm=is_warm)
            )

    def _note_failed(self, node: str, message: protocol.RankFailed, now_s: float) -> None:
        formed = self._formed
        if formed is None or message.generation != formed.begin.generation or message.pid in formed.down:
            return
        entry = journal.RankDown(
            t_s=now_s,
            generation=message.generation,
            node=node,
            rank=message.rank,
            local_rank=message.local_rank,
            pid=message.pid,
            end=message.end,
            error=message.error,
            is_first=not formed.down and isinstance(self._state, states.Running),
        )
        formed.down.add(message.pid)
        self._record(entry)
        detail = f"\n{message.error.detail}" if message.error is not None and message.error.detail else ""
        given = states.Failed(node=node, generation=message.generation, reason=f"{entry.sentence}{detail}")
        self._give(given, now_s)

    # --- hangs -------------------------------------------------------------------------------------------------------

    def _note_quiet(self, node: str, message: protocol.RanksQuiet | protocol.RankStacks, now_s: float) -> None:
        """Ask all ranks where they are, once none shows a sign of life."""
        formed = self._formed
        if formed is None or message.generation != formed.begin.generation:
            return
        if isinstance(message, protocol.RankStacks):
            formed.hang.answer(node, message)
            self._end_hang(now_s)
            return
        formed.hang.hear(node, message)
        nodes = self._unfinished
        if formed.hang.suspects(nodes) and formed.hang.ask(now_s):
            order = protocol.TraceRanks(generation=message.generation)
            self._commands += [events.Send(node=each, message=order) for each in nodes]

    def _end_hang(self, now_s: float) -> None:
        """Have all start again once it is known where ranks are, or will not be."""
        formed, nodes = self._formed, self._unfinished
        if formed is None or not nodes or not formed.hang.is_answered(nodes, now_s):
            return
        formed.hang.due_s = None
        if not formed.hang.suspects(nodes):
            return
        ranks = formed.hang.ranks()
        num_waiting = sum(each.is_waiting for each in ranks)
        others = tuple(each for each in ranks if not each.is_waiting)
        entry = journal.RanksHung(
            t_s=now_s,
            generation=formed.begin.generation,
            quiet_s=self._run.hang_timeout_s,
            culprits=others[:_MOST_CULPRITS] if num_waiting else (),
            num_waiting=num_waiting,
        )
        self._record(entry)
        node = entry.culprits[0].node if entry.culprits else nodes[0]
        self._give(states.Failed(node=node, generation=entry.generation, reason=entry.sentence, is_hang=True), now_s)

    @property
    def _unfinished(self) -> tuple[str, ...]:
        """Nodes of the generation whose ranks have not all ended well."""
        state = self._state
        return (
            tuple(node for node in state.names if node not in state.finished)
            if isinstance(state, states.Running)
            else ()
        )

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _do(self, effects: Iterable[LifecycleEffect], now_s: float) -> None:
        """Carry out what the parts ask for that know the nodes."""
        for effect in effects:
            match effect:
                case events.Connect() | events.Send() | events.Disconnect() | events.Record():
                    self._commands.append(effect)
                case GiveUp(nodes=nodes, loss=loss):
                    for node in nodes:
                        self._losses[node] = loss.text
                        self._do(self._lifecycle.give_up(node, loss, now_s, is_begun=True), now_s)
                        self._drop(node, now_s)
                case NodeTakenIn(event=event):
                    self._configure(event, now_s)
                case events.EndRun():
                    self._give(states.StopAsked(end=effect, now=True), now_s)
                case _:
                    pass  # of plans, workers and their states: nothing of a script

    def _configure(self, event: events.NodeUp, now_s: float) -> None:
        """Tell an agent what it is to run; one that is reached again may not have heard it, or what came after it."""
        node = event.node
        self._members.meet(node, event.hello, address=event.address, now_s=now_s)
        self._losses.pop(node, None)
        spec = self._members[node].spec
        configure = protocol.ConfigureRanks(run=self._run, devices=spec.devices, generation=self._generation)
        self._commands.append(events.Send(node=node, message=configure))
        formed, state = self._formed, self._state
        if formed is not None and isinstance(state, states.Running) and node in state.names:
            self._commands.append(events.Send(node=node, message=self._orders(formed)[node]))
        elif isinstance(state, states.Ending) and node in state.waits_for:
            again = protocol.EndRanks(generation=state.past.generation, grace_s=0.0)
            self._commands.append(events.Send(node=node, message=again))

    def _drop(self, node: str, now_s: float) -> None:
        self._ready.pop(node, None)
        self._give(states.Gone(node=node), now_s)

    @property
    def _generation(self) -> int:
        return self._state.past.generation

    @property
    def _roster(self) -> states.Roster:
        candidates, num_expected = [], 0
        for member in self._members.in_state(MemberState.CONNECTING, MemberState.CONNECTED):
            ready = self._ready.get(member.spec.name)
            if member.is_draining:
                continue
            if ready is not None and ready.generation >= self._generation:
                candidates.append(states.Candidate(node=member.spec.name, num_ranks=ready.num_ranks))
            else:
                num_expected += 1
        return states.Roster(candidates=tuple(candidates), num_expected=num_expected)

    # --- generations -------------------------------------------------------------------------------------------------

    def _give(self, given: states.Input, now_s: float) -> None:
        """Give the machine an input, and do what it asks for."""
        self._state, effects = step(self._state, given, now_s, roster=self._roster, rules=self._rules)
        for effect in effects:
            match effect:
                case states.Begin():
                    self._begin(effect, now_s)
                case states.Clear():
                    self._clear(effect, now_s)
                case states.LetGo(node=node):
                    self._let_go(node)
                case states.GiveUpSilent(nodes=nodes, waited_s=waited_s):
                    loss = journal.Silent(silent_s=waited_s, is_worker=True)
                    self._do((GiveUp(nodes=nodes, loss=loss),), now_s)
                case states.TooFew(num_missing=missing, until_s=until_s):
                    what = f"{missing} more node{'' if missing == 1 else 's'}"
                    text = f"waiting for {what}, for {until_s - now_s:.0f} s at most"
                    self._do((events.notice(now_s, "info", text),), now_s)
                case events.EndRun():
                    self._end(effect, now_s)
                case _:
                    assert_never(effect)

    def _begin(self, begin: states.Begin, now_s: float) -> None:
        first = begin.nodes[0].node
        formed = _Formed(
            begin,
            self._ended_s,
            port=self._run.master_port or self._ready[first].port,
            address=self._members[first].address,
            hang=HangWatch(begin.generation),
        )
        self._formed = formed
        for each in begin.nodes:
            del self._ready[each.node]  # ranks run there now
        self._record(
            journal.GenerationFormed(
                t_s=now_s,
                generation=begin.generation,
                cause=begin.cause,
                nodes=begin.nodes,
                num_failures=begin.num_failures,
            )
        )
        self._commands += [events.Send(node=node, message=order) for node, order in self._orders(formed).items()]

    def _orders(self, formed: _Formed) -> Mapping[str, protocol.StartRanks]:
        nodes = formed.begin.nodes
        return {
            each.node: protocol.StartRanks(
                generation=formed.begin.generation,
                group_rank=number,
                num_groups=len(nodes),
                first_rank=each.first_rank,
                num_ranks=each.num_ranks,
                world_size=sum(node.num_ranks for node in nodes),
                master_address=formed.address,
                master_port=formed.port,
                start=f"{self._run_digits}-{formed.begin.generation:06d}",
            )
            for number, each in enumerate(nodes)
        }

    def _clear(self, clear: states.Clear, now_s: float) -> None:
        self._ended_s = now_s
        if self._formed is not None:
            self._formed.is_ended = True
        self._record(
            journal.GenerationEnded(t_s=now_s, generation=clear.generation, cause=clear.cause, nodes=clear.about)
        )
        order = protocol.EndRanks(generation=clear.generation, grace_s=clear.grace_s)
        self._commands += [events.Send(node=node, message=order) for node in clear.nodes]

    def _let_go_if_due(self, node: str) -> None:
        if self._members[node].is_draining and node in self._ready:
            self._let_go(node)

    def _let_go(self, node: str) -> None:
        if self._members[node].state is MemberState.CONNECTED:
            stop = protocol.StopAgent(reason="drained", is_dismissal=True)
            self._commands.append(events.Send(node=node, message=stop))

    def _end(self, end: events.EndRun, now_s: float) -> None:
        reason = end.reason
        if not self._generation and self._losses:
            reason = "\n".join((reason, *(f"{node}: {why}" for node, why in sorted(self._losses.items()))))
        if self._formed is not None and end.exit_code == 0 and not self._formed.is_ended:
            entry = journal.GenerationEnded(
                t_s=now_s, generation=self._generation, cause=journal.GenerationCause.FINISHED
            )
            self._record(entry)
        stop = protocol.StopAgent(reason="the run is over")
        self._commands += [events.Send(node=member.spec.name, message=stop) for member in self._members.living]
        exit_code = int(end.exit_code)
        self._record(journal.JobEnded(t_s=now_s, exit_code=exit_code, reason=reason))
        self._commands.append(events.End(exit_code=exit_code, reason=reason))

    def _record(self, entry: journal.JournalEntry) -> None:
        self._commands.append(events.Record(entry=entry))

    def _take(self) -> list[events.Command]:
        commands, self._commands = self._commands, []
        return commands
