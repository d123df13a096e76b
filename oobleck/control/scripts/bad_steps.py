"""Decides about steps with bad losses: each is computed again once, with each rank on another node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from oobleck.control import journal, protocol
from oobleck.control.events import Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What follows from a step with bad losses."""

    why: str
    is_final: bool = False
    """Whether it ends the run."""
    at_fault: str = ""
    """The node that computed it wrongly, if that is sure."""


class BadSteps:
    """The step that is computed again, if there is one."""

    def __init__(self) -> None:
        self.num_moved = 0
        """By how many nodes ranks have moved on, so that each is on another one."""
        self._redone: journal.StepRecomputed | None = None
        """What is recorded if the step has good losses now."""

    def judge(self, turn: Turn, bad: protocol.BadLosses, nodes: Sequence[journal.NodeRanks]) -> Verdict:
        """Decide about a step with bad losses of the ranks on these nodes."""
        node_of = {each.first_rank + n: each.node for each in nodes for n in range(each.num_ranks)}
        losses = tuple((node_of.get(rank, ""), rank, loss) for rank, loss in bad.losses)
        now = journal.StepRecomputed(t_s=turn.now_s, step=bad.step, losses=losses, is_sure=len(losses) < len(node_of))
        before, self._redone = self._redone, None
        if not bad.is_redone:
            return Verdict(why="on_bad_step is 'stop'", is_final=True)
        if before is None or before.step != bad.step:
            self._redone = now
            self.num_moved += 1
            return Verdict(why=f"step {bad.step} is computed again, on other nodes")
        ranks, before_ranks = ({rank for _, rank, _ in each.losses} for each in (now, before))
        at_fault = [node for node in now.nodes if node in before.nodes]
        # The same rank takes the same data, wherever it is.
        if len(node_of) > 1 and now.is_sure and before.is_sure and at_fault and not ranks & before_ranks:
            turn.record(replace(before, t_s=turn.now_s, losses=tuple(e for e in losses if e[0] in at_fault)))
            why = f"{at_fault[0]} computes step {bad.step} wrongly, whatever rank it has"
            return Verdict(why=why, at_fault=at_fault[0])
        why = f"step {bad.step} has a bad loss again on the ranks that had it: its data is at fault"
        return Verdict(why=why, is_final=True)

    def note_saved(self, turn: Turn, newest: protocol.ScriptState | None) -> None:
        """Record that the step has good losses on other nodes, once a state that follows it is saved."""
        redone = self._redone
        if redone is not None and newest is not None and newest.step >= redone.step:
            turn.record(replace(redone, t_s=turn.now_s))
            self._redone = None
