"""What the journal of a master that died says of a script's run: enough for another master to take over.

Ranks run on without a master. What happened meanwhile, the agents say again to the one that takes over.
"""

from __future__ import annotations

from dataclasses import dataclass

from oobleck.control import journal
from oobleck.control.events import EndRun
from oobleck.control.nodes import Membership, MemberState
from oobleck.errors import ExitCode
from oobleck.job import NodeSpec

from . import machine, states
from .saved_steps import SavedStep


@dataclass(slots=True, kw_only=True)
class ReplayedRanks:
    """A script's run without a master, as its journal knows it. O(1) an entry, and a value on the wire."""

    started: journal.ScriptStarted
    members: Membership
    formed: journal.GenerationFormed | None = None
    """The newest generation."""
    is_settled: bool = False
    """Whether all of its ranks certainly exist."""
    ended: journal.GenerationEnded | None = None
    """Its end, once that was decided."""
    trouble: str = ""
    """How a rank of it has failed, or all hang."""
    has_lost_states: bool = False
    saved_step: int | None = None
    """The newest step that was known to be saved by all ranks."""
    newest_saved: SavedStep | None = None
    """The newest step of this run that was recorded as saved."""
    last_s: float = 0.0
    """When the last entry was made."""
    gap: journal.JournalGap | None = None
    """Why the journal does not know all that happened; None where it does."""

    @classmethod
    def begin(cls, started: journal.ScriptStarted) -> ReplayedRanks:
        """Return the run as its first entry has it."""
        return cls(started=started, members=Membership.of(started.nodes), last_s=started.t_s)

    def apply(self, entry: journal.JournalEntry) -> None:
        self.last_s, members = entry.t_s, self.members
        match entry:
            case journal.GenerationFormed():
                self.formed, self.is_settled, self.ended, self.trouble = entry, False, None, ""
                self.has_lost_states = False
            case journal.GenerationRuns():
                self.is_settled = True
            case journal.RankDown(error=error):
                self.trouble = self.trouble or entry.sentence
                self.has_lost_states |= error is not None and error.has_lost_states
            case journal.RanksHung():
                self.trouble = entry.sentence
            case journal.GenerationEnded(cause=cause, nodes=nodes):
                self.ended = entry
                for node in nodes if cause is journal.GenerationCause.NODE_DRAINED else ():
                    members.drain(node)
            case journal.StatesProtected(newest=newest):
                self.saved_step = newest
            case journal.StepsSaved(generation=generation, step=step):
                self.newest_saved = SavedStep(generation, step)
            case journal.NodeAdded(node=spec):
                members.add(spec)
            case journal.NodeConnected(node=node, agent_pid=pid):
                members.note_connected(node, agent_pid=pid)
            case journal.NodeLost(node=node, is_tried_again=is_tried_again):
                members.lose(node, is_tried_again=is_tried_again)
            case journal.NodeLeft(node=node):
                members.leave(node)
            case journal.JournalGap():
                self.gap = entry if entry.is_open or entry.num_lost else None
            case _:
                pass

    @property
    def nodes(self) -> tuple[NodeSpec, ...]:
        """The nodes that had a part in the run when the journal ended."""
        return tuple(member.spec for member in self.members.living)

    @property
    def began(self) -> states.Begin | None:
        """The generation that runs on; None where the next master has to end it, or none was formed."""
        formed = self.formed
        # An order to start ranks may not have arrived, and whoever gave it knows the port at which they meet.
        if formed is None or not self.is_settled or self.ended is not None or self._missing:
            return None
        return states.Begin(
            generation=formed.generation, cause=formed.cause, nodes=formed.nodes, num_failures=formed.num_failures
        )

    @property
    def _missing(self) -> tuple[str, ...]:
        """The nodes of the newest generation that are lost or have left, by the master's last entries."""
        assert self.formed is not None
        here = set(self.members.living_names)
        return tuple(each.node for each in self.formed.nodes if each.node not in here)

    def state(self, now_s: float, rules: states.Rules, *, reaching_s: float) -> states.State:
        """Return the state of the generations after a master took `reaching_s` to reach all nodes."""
        formed, began = self.formed, self.began
        assert formed is not None
        past = states.Past(generation=formed.generation, num_failures=formed.num_failures)
        if began is not None:
            return states.Running(past=past, nodes=began.nodes)
        cause = journal.GenerationCause.NODE_LOST if self._missing else journal.GenerationCause.MASTER_LOST
        if self.ended is not None:
            cause = self.ended.cause
        if cause in (journal.GenerationCause.RANK_FAILED, journal.GenerationCause.HANG):
            past = states.Past(generation=past.generation, num_failures=past.num_failures + 1)
        then = self._end_after(past, cause, rules)
        if then is None and cause is journal.GenerationCause.STOPPED:
            cause = journal.GenerationCause.MASTER_LOST  # whoever gives the command again wants it to run
        waits_for = frozenset(each.node for each in formed.nodes) - set(self._missing)
        if not waits_for and then is None:
            return states.Gathering(past=past, cause=cause, since_s=now_s, tells_s=now_s)
        waits_for = waits_for or frozenset(self.members.living_names)
        due_s = now_s + reaching_s + rules.patience_s
        return states.Ending(past=past, cause=cause, waits_for=waits_for, due_s=due_s, then=then)

    def _end_after(self, past: states.Past, cause: journal.GenerationCause, rules: states.Rules) -> EndRun | None:
        if cause is journal.GenerationCause.FINISHED:
            return EndRun(exit_code=ExitCode.DONE, reason=machine.ALL_FINISHED)
        if self.has_lost_states:
            return EndRun(reason=self.trouble)
        if past.num_failures > rules.max_restarts:
            is_hang = cause is journal.GenerationCause.HANG
            return machine.too_many_failures(self.trouble, is_hang=is_hang, rules=rules)
        return None

    def interrupt_joining(self) -> tuple[NodeSpec, ...]:
        """Lose the nodes that the dead master had not reached; return them: its successor begins with that again."""
        specs = tuple(member.spec for member in self.members.in_state(MemberState.CONNECTING))
        for spec in specs:
            self.members.lose(spec.name)
        return specs
