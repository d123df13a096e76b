"""The coordinator of `oobleck run`. Pure.

`machine.py` decides when ranks start and end, `control/nodes` which nodes take part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, assert_never

from oobleck import __version__
from oobleck.control import events, journal, protocol
from oobleck.control.events import Turn
from oobleck.control.nodes import BaseCoordinator, Member, Membership, MemberState, attaching_s
from oobleck.errors import ExitCode, PeerError
from oobleck.job import NodeSpec
from oobleck.job.ranks import RanksSpec
from oobleck.planner.formatting import counted

from . import states
from .bad_steps import BadSteps
from .copies import Copies
from .disks import Disks
from .hang import HangWatch
from .machine import deadline, start, step
from .replayed_ranks import ReplayedRanks
from .saved_steps import SavedSteps

# An agent may take this long to kill its ranks: a process may be stuck in the kernel.
_PATIENCE_S = 30.0
_HAND_ON_S = 20.0


@dataclass(slots=True)
class _Formed:
    """The newest generation: what it was ordered to be, and what the agents have reported of it."""

    begin: states.Begin
    since_s: float
    """When the one before ended."""
    port: int | None
    """None where an earlier master has ordered it: all of its ranks have started."""
    address: str
    hang: HangWatch = field(default_factory=HangWatch)
    started: dict[str, protocol.RanksStarted | None] = field(default_factory=dict)
    """Keyed by node whose ranks exist; None where they told an earlier master."""
    down: set[int] = field(default_factory=set)
    """Process ids of failed ranks."""


class RanksCoordinator(BaseCoordinator):
    """Makes all decisions of a run of a script. Only `start`, `handle` and `handle_deadline` change it."""

    work: ClassVar[str] = "connected"

    def __init__(
        self,
        run: RanksSpec,
        nodes: tuple[NodeSpec, ...],
        *,
        started_at: str,
        python_version: str,
        replayed: ReplayedRanks | None = None,
    ) -> None:
        """Begin a run, or take over the run `replayed`, whose ranks run on without a master."""
        members = Membership.of(nodes) if replayed is None else replayed.members
        super().__init__(run.control, members, python_version=python_version, most_kinds=None)
        self._run = run
        self._replayed = replayed
        self._nodes = nodes
        self._started_at = started_at
        # A run keeps its name under all of its masters: the states of its ranks have it.
        began_at = started_at if replayed is None else replayed.started.started_at
        self._run_digits = "".join(each for each in began_at if each.isdecimal())
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
        """Keyed by node on which no rank runs."""
        self._losses: dict[str, str] = {}
        """Why nodes were lost before anything ran, keyed by node."""
        self._formed: _Formed | None = None
        self._ended_s = 0.0
        self._copies = Copies(run.copies, run.parity_nodes)
        self._handing_on: dict[str, tuple[float, protocol.RanksReady]] = {}
        """Draining nodes that others still copy states of, with the time until which that may take."""
        self._awaits_parts = False
        """Ranks do not start yet: lost parts of the state that they will load are made again."""
        self._uncopied: set[tuple[str, str]] = set()
        """Of which it was said that the first copies nothing to the second."""
        self._disks = Disks()
        recorded = None if replayed is None else replayed.newest_saved
        self._saved_steps = SavedSteps(self._copies, self._run_digits, recorded)
        self._bad_steps = BadSteps()
        self._unmet: set[str] = set()
        """The nodes of an earlier master's generation that are neither reached nor lost yet."""
        self._early: list[tuple[str, protocol.RankFailed]] = []
        """Failures that wait for those, with their nodes: a rank also fails because another node is lost."""

    @property
    def is_over(self) -> bool:
        return isinstance(self._state, states.Over)

    @property
    def is_begun(self) -> bool:
        return True  # a lost node ends no start: fewer may be enough

    @property
    def generation(self) -> int:
        return self._state.past.generation

    def begin(self, turn: Turn) -> None:
        if self._replayed is not None:
            self._take_over(turn, self._replayed)
            return
        self._state = start(turn.now_s)
        turn.record(
            journal.ScriptStarted(
                t_s=turn.now_s,
                version=__version__,
                run=self._run.without_values(),
                nodes=self._nodes,
                started_at=self._started_at,
            )
        )
        turn.do(events.Connect(node=spec) for spec in self._nodes)

    def _take_over(self, turn: Turn, replayed: ReplayedRanks) -> None:
        """Continue from the journal, and connect to all agents again, which say what the journal does not know."""
        now_s, members = turn.now_s, self._members
        turn.record(journal.MasterResumed(t_s=now_s, away_s=now_s - replayed.last_s))
        joining = replayed.interrupt_joining()
        # No lease lapses before this master can have reached all nodes.
        reaching_s = attaching_s(self._run.control.connect_timeout_s, len(members.living))
        members.expect_words(now_s + reaching_s)
        self._state = replayed.state(now_s, self._rules, reaching_s=reaching_s)
        self._ended_s = now_s if replayed.ended is None else replayed.ended.t_s
        self._copies.take_over(members.living_names)
        if (begun := replayed.began) is not None:
            started = dict.fromkeys(each.node for each in begun.nodes)
            self._formed = _Formed(begun, self._ended_s, port=None, address="", started=started)
            self._copies.begin(self._start_of(begun.generation), started)
            self._unmet = set(started)
        elif replayed.ended is None and isinstance(self._state, states.Ending):
            cause, generation = self._state.cause, self._state.past.generation
            turn.record(journal.GenerationEnded(t_s=now_s, generation=generation, cause=cause))
        turn.do(events.Connect(node=member.spec, attach=True) for member in members.living)
        self._lifecycle.take_over(now_s)
        listed = (spec for spec in self._nodes if spec.name not in members)  # the user may have since
        for spec in (*joining, *listed):
            self._lifecycle.add(turn, spec)

    # --- time passes -------------------------------------------------------------------------------------------------

    @property
    def due_s(self) -> float:
        handed_on_s = min((until_s for until_s, _ in self._handing_on.values()), default=math.inf)
        told_s = math.inf if self.is_over else self._saved_steps.due_s
        return min(deadline(self._state, self._rules), handed_on_s, told_s, self._copies.due_s)

    def act(self, turn: Turn, held_up_s: float) -> None:
        self._give_up_silent(turn)
        self._lifecycle.retry_lost(turn)
        self._give(turn, states.Signal.TIME_PASSED)
        self._end_hang(turn)

    def follow_up(self, turn: Turn) -> None:
        while self._early and not self._unmet:
            self._note_failed(turn, *self._early.pop(0))
        if turn.now_s >= self._copies.due_s:
            members = self._members.in_state(MemberState.CONNECTED)
            domains = {member.spec.name: member.spec.failure_domain for member in members}
            for node, order in self._copies.orders(turn.now_s, domains):
                turn.send(node, order)
        if not self.is_over:
            self._saved_steps.tell_lost(turn)
            self._saved_steps.tell_safety(turn)
            self._bad_steps.note_saved(turn, self._copies.newest)
            self._saved_steps.tell_steps(turn)
        for node, (until_s, ready) in sorted(self._handing_on.items()):
            is_needed = self._copies.is_needed(node)
            if is_needed and turn.now_s < until_s:
                continue
            if is_needed:
                turn.note("warning", f"{node} leaves, and no other node has all of its part of the newest saved state")
            del self._handing_on[node]
            self._take_ready(turn, node, ready)
        awaited_parts, self._awaits_parts = self._awaits_parts, self._copies.is_rebuilding
        if awaited_parts and not self._awaits_parts:
            for node, ready in sorted(self._ready.items()):
                self._give(turn, states.Ready(node=node, generation=ready.generation))

    # --- what happens ------------------------------------------------------------------------------------------------

    def take(self, turn: Turn, event: events.Event) -> None:
        raise AssertionError(f"{type(event).__name__} is of training")

    def stop(self, turn: Turn, event: events.StopRequested) -> None:
        end = events.EndRun(exit_code=event.exit_code, reason=event.reason)
        self._give(turn, states.StopAsked(end=end, now=event.now))

    def end(self, turn: Turn, end: events.EndRun) -> None:
        self._give(turn, states.StopAsked(end=end, now=True))

    def understand(self, turn: Turn, member: Member, message: protocol.AgentMessage) -> None:
        node = member.spec.name
        match message:
            case protocol.StatesKept(door=door, order=order):
                self._copies.meet(node, door)
                self._copies.recall(node, order)
            case protocol.StatesHeld(parts=parts, parities=parities, kept=kept):
                self._copies.hold(node, parts, kept=kept, parities=parities)
            case protocol.PartNotCopied():
                self._copies.fail(node, message, turn.now_s)
                # It is tried again and again, and one line for each pair of nodes is enough.
                if not message.is_gone and (node, message.target) not in self._uncopied:
                    self._uncopied.add((node, message.target))
                    what = f"rank {message.rank}'s part of step {message.state.step}"
                    turn.note("warning", f"{node}: {what} is not copied to {message.target}: {message.reason}")
            case protocol.PartNotWritten():
                self._disks.fail(turn, node, message)
            case protocol.RanksReady():
                self._copies.meet(node, message.door)
                if self._members[node].is_draining and self._copies.is_needed(node):
                    self._handing_on.setdefault(node, (turn.now_s + _HAND_ON_S, message))
                else:
                    self._take_ready(turn, node, message)
            case protocol.RanksStarted():
                self._note_started(turn, node, message)
            case protocol.RankFailed():
                self._note_failed(turn, node, message)
            case protocol.RanksCold(problem=problem):
                turn.note("warning", f"{node}: ranks that start now start cold: {problem}")
            case protocol.RanksUnwritten(problem=problem):
                text = f"{node}: {problem}: what ranks print is shown, and is not in their files until there is room"
                turn.note("warning", text)
            case protocol.RankOutput():
                pass  # for people
            case protocol.RanksQuiet() | protocol.RankStacks():
                self._note_quiet(turn, node, message)
            case protocol.RanksFinished(generation=generation):
                self._give(turn, states.Finished(node=node, generation=generation))
            case _:
                raise PeerError(f"sent {type(message).__name__}, which has no meaning in a run of a script")

    def _take_ready(self, turn: Turn, node: str, ready: protocol.RanksReady) -> None:
        self._ready[node] = ready
        self._give(turn, states.Ready(node=node, generation=ready.generation))
        if self._members[node].is_draining and node in self._ready:
            self._let_go(turn, node)

    def _note_started(self, turn: Turn, node: str, message: protocol.RanksStarted) -> None:
        formed = self._formed_in(message.generation)
        if formed is None or node in formed.started:  # an agent that is reached again repeats it
            return
        formed.started[node] = message
        if len(formed.started) == len(formed.begin.nodes):
            started = [each for each in formed.started.values() if each is not None]
            turn.record(
                journal.GenerationRuns(
                    t_s=turn.now_s,
                    generation=message.generation,
                    away_s=turn.now_s - formed.since_s,
                    is_warm=all(each.is_warm for each in started),
                    num_kept=sum(each.num_kept for each in started),
                )
            )

    def _note_failed(self, turn: Turn, node: str, message: protocol.RankFailed) -> None:
        formed = self._formed_in(message.generation)
        # An agent that is reached again may repeat its reports.
        if formed is None or message.pid in formed.down:
            return
        if self._unmet:
            self._early.append((node, message))
            return
        entry = journal.RankDown(
            t_s=turn.now_s,
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
        turn.record(entry)
        detail = f"\n{message.error.detail}" if message.error is not None and message.error.detail else ""
        reason = f"{entry.sentence}{detail}"
        is_final = message.error is not None and message.error.has_lost_states
        bad = message.error.bad if message.error is not None else None
        verdict = None
        if entry.is_first and bad is not None:
            verdict = self._bad_steps.judge(turn, bad, formed.begin.nodes)
            is_final, reason = verdict.is_final, f"{verdict.why}\n{reason}"
        failed = states.Failed(node=node, generation=message.generation, reason=reason, is_final=is_final)
        self._give(turn, failed)
        if verdict is not None and verdict.at_fault:
            self._lifecycle.give_up(turn, verdict.at_fault, journal.Unfit(fault=verdict.why))

    def _formed_in(self, generation: int) -> _Formed | None:
        # Reports of older generations come late.
        formed = self._formed
        return formed if formed is not None and formed.begin.generation == generation else None

    # --- hangs -------------------------------------------------------------------------------------------------------

    def _note_quiet(self, turn: Turn, node: str, message: protocol.RanksQuiet | protocol.RankStacks) -> None:
        formed = self._formed_in(message.generation)
        if formed is None:
            return
        if isinstance(message, protocol.RankStacks):
            formed.hang.answer(node, message)
            self._end_hang(turn)
            return
        formed.hang.hear(node, message)
        # A sign of life ends the question, even of ranks that others need not wait for; then it may be asked again.
        if not message.is_quiet:
            self._give(turn, states.Signal.STIRRED)
        if isinstance(self._state, states.Running) and formed.hang.suspects(self._state.unfinished):
            self._give(turn, states.Signal.QUIET)

    def _end_hang(self, turn: Turn) -> None:
        """Have all start again once all ranks have reported where they are, or their time is over."""
        formed, state = self._formed, self._state
        if formed is None or not isinstance(state, states.Asking):
            return
        nodes = state.unfinished
        if turn.now_s < state.due_s and not formed.hang.has_stacks_of(nodes):
            return
        if not formed.hang.suspects(nodes):
            self._give(turn, states.Signal.STIRRED)
            return
        entry = formed.hang.finding(
            t_s=turn.now_s, generation=formed.begin.generation, quiet_s=self._run.hang_timeout_s
        )
        turn.record(entry)
        node = entry.culprits[0].node if entry.culprits else nodes[0]
        failed = states.Failed(node=node, generation=entry.generation, reason=entry.sentence, is_hang=True)
        self._give(turn, failed)

    # --- nodes -------------------------------------------------------------------------------------------------------

    def is_at_work(self, member: Member) -> bool:
        return member.state is MemberState.CONNECTED

    def needs(self, node: str) -> bool:
        return False  # all start again without it

    def configure(self, turn: Turn, node: str) -> None:
        """Tell an agent what to run; one that is reached again may have missed that, and what followed it."""
        self._losses.pop(node, None)
        self._unmet.discard(node)
        spec = self._members[node].spec
        configure = protocol.ConfigureRanks(
            run=self._run,
            devices=spec.devices,
            generation=self.generation,
            address=self._members[node].address,
            reports_use=self._members.report_use,
        )
        turn.send(node, configure)
        self._copies.remind(node)
        formed, state = self._formed, self._state
        if formed is not None and isinstance(state, states.Running) and node in state.names:
            if formed.port is not None:
                turn.send(node, self._orders(formed)[node])
        elif isinstance(state, states.Ending) and node in state.waits_for:
            turn.send(node, protocol.EndRanks(generation=state.past.generation, grace_s=0.0, keeps=state.keeps))

    def node_back(self, turn: Turn, event: events.NodeUp) -> None:
        self._lifecycle.meet(turn, event)

    def drop_node(self, turn: Turn, node: str, loss: journal.Loss) -> None:
        self._losses[node] = loss.text
        self._ready.pop(node, None)
        self._handing_on.pop(node, None)
        self._copies.drop(node)
        self._unmet.discard(node)

    def go_on_without(self, turn: Turn, member: Member, loss: journal.LossCause, silent_s: float) -> None:
        self._give(turn, states.Gone(node=member.spec.name))

    def node_draining(self, turn: Turn, node: str) -> None:
        self._copies.leave(node)
        self._give(turn, states.Leave(node=node))

    def node_left(self, turn: Turn, node: str) -> None:
        self._ready.pop(node, None)
        self._handing_on.pop(node, None)
        self._copies.drop(node)
        self._unmet.discard(node)
        self._give(turn, states.Gone(node=node))

    @property
    def _roster(self) -> states.Roster:
        candidates, num_expected = [], 0
        for member in self._members.in_state(MemberState.CONNECTING, MemberState.CONNECTED):
            ready = self._ready.get(member.spec.name)
            if member.is_draining:
                continue
            # That no rank of an older generation runs there says nothing of the newest.
            if ready is not None and ready.generation >= self.generation and not self._copies.is_rebuilding:
                candidates.append(states.Candidate(node=member.spec.name, num_ranks=ready.num_ranks))
            else:
                num_expected += 1
        shift = self._bad_steps.num_moved % max(1, len(candidates))
        candidates = [*candidates[shift:], *candidates[:shift]]
        return states.Roster(candidates=tuple(candidates), num_expected=num_expected, has_saved=self._copies.has_saved)

    # --- generations -------------------------------------------------------------------------------------------------

    def _give(self, turn: Turn, given: states.Input) -> None:
        before = self._state
        self._state, effects = step(self._state, given, turn.now_s, roster=self._roster, rules=self._rules)
        for effect in effects:
            match effect:
                case states.Begin():
                    self._begin(turn, effect)
                case states.Ask(generation=generation, nodes=nodes):
                    for node in nodes:
                        turn.send(node, protocol.TraceRanks(generation=generation))
                case states.Clear():
                    self._clear(turn, effect)
                case states.LetGo(node=node):
                    self._let_go(turn, node)
                case states.GiveUpSilent(nodes=nodes, waited_s=waited_s):
                    for node in nodes:
                        self._lifecycle.give_up(turn, node, journal.Silent(silent_s=waited_s, is_worker=True))
                case states.TooFew() if self._copies.is_rebuilding:
                    turn.note("info", "lost parts of the newest saved state are made again from parities")
                case states.TooFew(num_missing=missing, until_s=until_s):
                    what = counted(missing, "more node")
                    turn.note("info", f"waiting for {what}, for {until_s - turn.now_s:.0f} s at most")
                case events.EndRun():
                    self._end(turn, effect, was_running=isinstance(before, states.Running))
                case _:
                    assert_never(effect)

    def _begin(self, turn: Turn, begin: states.Begin) -> None:
        first = begin.nodes[0].node
        formed = _Formed(
            begin,
            self._ended_s,
            port=self._run.master_port or self._ready[first].port,
            address=self._ready[first].address or self._members[first].address,
        )
        self._formed = formed
        self._saved_steps.begin(begin.generation)
        self._copies.begin(self._start_of(begin.generation), [each.node for each in begin.nodes])
        for each in begin.nodes:
            del self._ready[each.node]  # ranks run there now
        turn.record(
            journal.GenerationFormed(
                t_s=turn.now_s,
                generation=begin.generation,
                cause=begin.cause,
                nodes=begin.nodes,
                num_failures=begin.num_failures,
            )
        )
        for node, order in self._orders(formed).items():
            turn.send(node, order)

    def _orders(self, formed: _Formed) -> Mapping[str, protocol.StartRanks]:
        nodes, port = formed.begin.nodes, formed.port
        assert port is not None
        return {
            each.node: protocol.StartRanks(
                generation=formed.begin.generation,
                group_rank=number,
                num_groups=len(nodes),
                first_rank=each.first_rank,
                num_ranks=each.num_ranks,
                world_size=sum(node.num_ranks for node in nodes),
                master_address=formed.address,
                master_port=port,
                start=self._start_of(formed.begin.generation),
                saved_step=self._saved_step,
            )
            for number, each in enumerate(nodes)
        }

    def _start_of(self, generation: int) -> str:
        # No other generation of any run has this name, so no saved state mixes the parts of two.
        return f"{self._run_digits}-{generation:06d}"

    @property
    def _saved_step(self) -> int | None:
        if self._copies.newest is not None:
            return self._copies.newest.step
        return None if self._replayed is None else self._replayed.saved_step

    def _clear(self, turn: Turn, clear: states.Clear) -> None:
        self._ended_s = turn.now_s
        self._copies.end()
        turn.record(
            journal.GenerationEnded(t_s=turn.now_s, generation=clear.generation, cause=clear.cause, nodes=clear.about)
        )
        for node in clear.nodes:
            turn.send(node, protocol.EndRanks(generation=clear.generation, grace_s=clear.grace_s, keeps=clear.keeps))

    def _let_go(self, turn: Turn, node: str) -> None:
        if self._members[node].state is MemberState.CONNECTED:
            turn.send(node, protocol.StopAgent(reason="drained", is_dismissal=True))

    def _end(self, turn: Turn, end: events.EndRun, *, was_running: bool) -> None:
        reason = end.reason
        self._saved_steps.tell_last(turn)
        if not self.generation and self._losses:
            reason = "\n".join((reason, *(f"{node}: {why}" for node, why in sorted(self._losses.items()))))
        if was_running and end.exit_code == ExitCode.DONE:
            cause = journal.GenerationCause.FINISHED
            turn.record(journal.GenerationEnded(t_s=turn.now_s, generation=self.generation, cause=cause))
        for member in self._members.living:
            turn.send(member.spec.name, protocol.StopAgent(reason="the run is over"))
        exit_code, newest = int(end.exit_code), self._copies.newest
        if exit_code == ExitCode.DONE and newest is not None and self._formed is not None:
            why = self._disks.why_lost(newest, self._formed.started)
            if why is not None:
                exit_code = int(ExitCode.NOT_SAVED)
                reason = f"{reason}, but step {newest.step} is NOT SAVED: {why}"
        turn.record(journal.JobEnded(t_s=turn.now_s, exit_code=exit_code, reason=reason))
        turn.do((events.End(exit_code=exit_code, reason=reason),))
