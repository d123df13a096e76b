"""How a run begins: once all workers are ready and the profile is known, from a checkpoint or from initial values.

Until then any failure of a node ends the run, because nothing is lost by it. The run ends a moment later, to report
all failures together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from oobleck.control.checkpoints import Candidate, Restoring, Saving
from oobleck.control.data import Sharding
from oobleck.control.events import Turn
from oobleck.control.journal import Loss, PipelinesFormed, WorkerEnded
from oobleck.control.nodes import Membership, starting_s
from oobleck.control.speed import LinkTiming
from oobleck.control.steps import Verdict
from oobleck.errors import ExitCode, PlanningError
from oobleck.job import MAX_KINDS, JobSpec, NodeSpec
from oobleck.planner import NodeKind, WorkerId

from .decision import Choice, to_checkpoint
from .preparation import Preparation
from .reconfiguration import Reconfiguration
from .replanning import Replanning, profile_known

CONTINUING = frozenset({"auto", "newest"})
"""Words of --resume with which a run takes over, or continues, the one of its tag."""
NOTHING_TO_CONTINUE = "no node has a checkpoint of this run to continue from"
_SETTLE_S = 1.0
"""How long to wait for further failures, to report all at once."""
_NAMES_SHOWN = 8


def finished_text(name: str, step: int, *, has_read_all: bool = False) -> str:
    """Return the message for a run that has nothing left to train."""
    what = f"all data is read, in {step} steps" if has_read_all else f"all {step} steps are committed"
    more = "data.epochs" if has_read_all else "--steps"
    return (
        f"already finished: {what}, and saved as {name}. Raise {more} to continue from it, use another --tag to train "
        "another model, or --resume never to start over; what is saved stays"
    )


@dataclass(slots=True, eq=False)
class Startup:
    """Leads to the first plan, or to the end of a run that cannot begin."""

    _job: JobSpec
    _nodes: Sequence[NodeSpec]
    _members: Membership
    _preparation: Preparation
    _link_timing: LinkTiming
    _saving: Saving
    _restoring: Restoring
    _sharding: Sharding
    _replanning: Replanning
    _reconfiguration: Reconfiguration
    _resume: str
    """As in `Coordinator`."""
    _failures: StartupFailures = field(init=False)
    _forming: set[WorkerId] = field(default_factory=set, init=False)
    """The workers of the first plan that do not compute yet."""
    deadline_s: float = math.inf

    def __post_init__(self) -> None:
        self._failures = StartupFailures(len(self._nodes))

    def forgive(self, late_s: float, soon_s: float) -> None:
        """Extend the deadline: this master was held up for `late_s`, and reads the messages until `soon_s`."""
        self.deadline_s = max(self.deadline_s + late_s, soon_s)

    def expect_all(self, now_s: float) -> None:
        self.deadline_s = now_s + self._limit_s

    @property
    def _limit_s(self) -> float:
        return starting_s(self._job.control.start_timeout_s, len(self._nodes))

    def node_failed(self, node: str, loss: Loss, now_s: float) -> None:
        """End the run in a moment: a node cannot start, and others may be about to fail alike."""
        self._failures.note(node, loss)
        self.deadline_s = min(self.deadline_s, now_s + _SETTLE_S)

    def handle_deadline(self, turn: Turn) -> None:
        """End a run that cannot begin in time."""
        if turn.now_s < self.deadline_s:
            return
        if self._failures:
            turn.end(str(self._failures), self._failures.exit_code)
        limit_s, missing = self._limit_s, self._preparation.waiting_for()
        turn.end(f"not ready within {limit_s:g} s: {missing}{self._silence(turn.now_s)}")

    def _silence(self, now_s: float) -> str:
        # Named in the error message alone: while the run starts, silence loses no node.
        since_s, heard_s = now_s - self._job.control.lease_s, self._members.heard_s
        silent = [node for node in self._members.living_names if heard_s[node] < since_s]
        return f"; nothing is heard of {', '.join(silent)}" if silent else ""

    def look(self, turn: Turn) -> None:
        """Begin training once all that the first plan needs is known; ask for the rest."""
        kinds = self._preparation.kinds
        if not kinds or not self._preparation.is_complete or self._failures:
            return
        if len(kinds) > MAX_KINDS:
            names = ", ".join(kind.name for kind in kinds)
            text = f"the nodes are of {len(kinds)} kinds: {names}; a run may have {MAX_KINDS}: change device= or slots="
            turn.end(text, ExitCode.CONFIG)
        worker_ids = self._members.ready_worker_ids
        if self._saving.is_enabled and not self._restoring.is_answered(worker_ids):
            if not self._restoring.is_asked(worker_ids):
                self._restoring.ask(turn, worker_ids)
            return
        network = kinds[0].profile.network
        if self._link_timing.is_needed(network):
            self._link_timing.go_on(turn, network)
            if self._link_timing.is_needed(network):
                return
        kinds = tuple(replace(kind, profile=self._link_timing.applied_to(kind.profile)) for kind in kinds)
        self.deadline_s = math.inf
        for kind in kinds:
            turn.record(profile_known(kind, turn.now_s))
        self._begin(turn, kinds, self._candidate(turn, kinds[0].profile.num_layers))

    def note_resumed(self, turn: Turn, worker_ids: Sequence[WorkerId]) -> None:
        """Record that all workers of the first plan compute, once the last of them does."""
        if not self._forming:
            return
        self._forming.difference_update(worker_ids)
        if not self._forming:
            generation = self._reconfiguration.generations.current
            turn.record(PipelinesFormed(t_s=turn.now_s, generation=generation))

    # --- what it begins from -----------------------------------------------------------------------------------

    def _candidate(self, turn: Turn, num_layers: int) -> Candidate | None:
        """Return the checkpoint to begin with; None for initial values. Ends a run that has nothing to do."""
        candidate = None if self._resume == "never" else self._restoring.newest(num_layers)
        self._restoring.report_problems(turn)
        if candidate is None:
            self._check_scratch(turn)
        else:
            self._check_fits(turn, candidate)
            if candidate.position is None and self._sharding.is_on:
                text = f"the checkpoint of step {candidate.step} knows no place in the shards"
                turn.note("warning", f"{text}: they are read from their beginning")
        self._look_after_others(turn, candidate)
        return candidate

    def _check_scratch(self, turn: Turn) -> None:
        if self._resume == "never":
            return
        if self._resume not in CONTINUING:
            turn.end(f"--resume {self._resume}: there is no checkpoint that can be used", ExitCode.CONFIG)
        if misfits := self._restoring.misfits():
            text = f"this tag has trained another model: {misfits[0]}"
            keep = "--resume never trains from the beginning and keeps what is there"
            turn.end(f"{text}; choose another --tag, or {keep}", ExitCode.CONFIG)
        if self._resume == "newest":
            turn.end(f"{NOTHING_TO_CONTINUE}: name one by its path, or train from the beginning", ExitCode.CONFIG)

    def _check_fits(self, turn: Turn, candidate: Candidate) -> None:
        """End a run whose checkpoint does not fit its data, or has all that was asked for on disk already."""
        has_read_all = self._sharding.has_read_all(candidate.position)
        # A finished model that only memory has is written first.
        if (
            self._resume in CONTINUING
            and candidate.is_on_disk
            and (has_read_all or candidate.step >= self._job.max_steps)
        ):
            turn.end(finished_text(candidate.name, candidate.step, has_read_all=has_read_all), ExitCode.DONE)
        misfit = self._sharding.misfit(candidate.position)
        if misfit is not None:
            text = f"the checkpoint of step {candidate.step} cannot be resumed: {misfit}"
            turn.end(f"{text}; --resume never starts from scratch", ExitCode.CONFIG)

    def _look_after_others(self, turn: Turn, candidate: Candidate | None) -> None:
        """Leave to `Saving` the checkpoints that this run may prune, and name those of other runs, which stay."""
        is_private = self._job.checkpoint.directory is None
        complete, others = self._restoring.complete(candidate)
        self._saving.know(turn, complete, self._restoring.unfinished(candidate, is_private=is_private))
        if others:
            text = f"{len(others)} checkpoints of other runs lie in the same directory and stay, from {others[0]}"
            advice = f"`oobleck checkpoint list {self._job.tag}` shows them; remove those that you do not need"
            turn.note("info", f"{text} to {others[-1]}; {advice}")

    # --- the first plan ----------------------------------------------------------------------------------------

    def _begin(self, turn: Turn, kinds: tuple[NodeKind, ...], candidate: Candidate | None) -> None:
        nodes = [member.spec.name for member in self._members.ready]
        self._saving.begin([layer.name for layer in kinds[0].profile.layers])
        try:
            self._replanning.begin(turn, kinds, nodes)
            decision = self._replanning.first_plan(nodes)
            if candidate is None:
                choice = Choice(decision=decision, verdict=Verdict(applied=0, catch_up=None, adopted=None, held={}))
            else:
                moved = self._replanning.replan(decision.plan, candidate.held, lost=frozenset(), now_s=turn.now_s)
                reason = f"{decision.reason}; from the checkpoint of step {candidate.step}"
                choice = to_checkpoint(replace(moved, action=decision.action, reason=reason), candidate)
            self._reconfiguration.order_first(turn, choice)
            self._forming = set(self._reconfiguration.generations.plan.worker_ids)
        except PlanningError as error:
            turn.end(str(error), ExitCode.CONFIG)


@dataclass(slots=True)
class StartupFailures:
    """Nodes that failed before training began. The message gives each reason once, with all of its nodes."""

    num_nodes: int
    _losses: dict[str, Loss] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._losses)

    def note(self, node: str, loss: Loss) -> None:
        self._losses[node] = loss

    @property
    def exit_code(self) -> int:
        is_users = all(isinstance(loss, WorkerEnded) and loss.is_users for loss in self._losses.values())
        return ExitCode.CONFIG if is_users else ExitCode.FAILED

    def __str__(self) -> str:
        nodes_of: dict[str, list[str]] = {}
        for node, loss in sorted(self._losses.items()):
            nodes_of.setdefault(loss.text, []).append(node)
        return "\n".join(("cannot start:", *(f"{self._named(nodes)}: {why}" for why, nodes in nodes_of.items())))

    def _named(self, nodes: list[str]) -> str:
        if len(nodes) == self.num_nodes > 1:
            return f"all {len(nodes)} nodes"
        if len(nodes) > _NAMES_SHOWN:
            return f"{', '.join(nodes[:_NAMES_SHOWN])} and {len(nodes) - _NAMES_SHOWN} more nodes"
        return ", ".join(nodes)
