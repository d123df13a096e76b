"""The journal of a run that restarts from a checkpoint whenever its state is lost.

Each start has its own coordinator, which counts generations and steps from zero. This journal numbers them over the
whole run, and runs steps again that no checkpoint holds.
"""

from __future__ import annotations

from dataclasses import replace

from oobleck.control import journal
from oobleck.planner import ExecutionPlan

from .analytic_workers import CommittedSteps


class RunLog:
    def __init__(self, *, checkpoint_interval_s: float) -> None:
        self.entries: list[journal.JournalEntry] = []
        self.connected: set[str] = set()  # nodes without an entry that they are gone
        self.newest_step = 0  # the newest step ever committed, lost ones included
        self._checkpoint_interval_s = checkpoint_interval_s
        self.checkpoint_read_s = 0.0  # of the newest restart
        self._past_generations = 0
        self._generation = 0
        self.past_steps = 0  # those before the current coordinator's checkpoint, which it does not count
        self._step = 0  # the newest that is not lost
        self._saved_step = 0
        self._steps_lost = 0
        self._ended_s = 0.0

    @property
    def is_planned(self) -> bool:
        """Whether the coordinator has adopted a plan."""
        return self._generation > 0

    def record(self, entry: journal.JournalEntry) -> None:
        """Write an entry of the current coordinator, unless that ends with an error: the run continues."""
        match entry:
            case journal.NodeConnected(node=node):
                self.connected.add(node)
            case journal.NodeLost(node=node) | journal.NodeLeft(node=node):
                self.connected.discard(node)
            case journal.WorkerUp():
                return  # one for each device and start, without further information
            case journal.JobEnded(exit_code=code) if code:
                return
            case journal.PlanAdopted() | journal.RecoveryStarted() | journal.RecoveryDone():
                entry = replace(entry, generation=self._past_generations + entry.generation)
            case _:
                pass
        self.entries.append(entry)
        if isinstance(entry, journal.PlanAdopted):
            self._adopted(entry)

    def record_steps(self, entry: journal.StepDone, first_step: int) -> None:
        """Write one entry for many steps, and a separate one for those that had been committed before."""
        first, last = self.past_steps + (first_step or entry.record.step), self.past_steps + entry.record.step
        for start, stop in ((first, min(last, self.newest_step)), (max(first, self.newest_step + 1), last)):
            if start <= stop:
                end_s = entry.t_s - (last - stop) * entry.record.duration_s
                record = replace(entry.record, step=stop, generation=self._past_generations + entry.record.generation)
                steps = journal.StepsDone(t_s=end_s, first_step=start, record=record, tokens_per_step=entry.tokens)
                self.entries.append(steps)
        self.newest_step = max(self.newest_step, last)
        self._step = last

    def save(self, stretch: CommittedSteps) -> None:
        """Note the newest step that is in a checkpoint."""
        number = stretch.end_s // self._checkpoint_interval_s
        saved_s = number * self._checkpoint_interval_s if number else 0.0
        # Steps that ended after the newest checkpoint are not in it.
        since = int((stretch.end_s - saved_s) / stretch.step_s) + 1
        if since <= stretch.last_step - stretch.first_step + 1:
            self._saved_step = self.past_steps + stretch.last_step - since

    def save_all(self) -> None:
        """Note that the newest step is in a checkpoint, which a run writes before it stops."""
        self._saved_step = self._step

    def lose_all(self, now_s: float, reason: str) -> None:
        """Lose all state but the newest checkpoint's, and be without a plan until the next coordinator has one."""
        # The entry without a plan, below, is a generation of its own.
        self._past_generations += self._generation + 1
        self._generation = 0
        self._steps_lost = self._step - self._saved_step
        self.past_steps = self._step = self._saved_step
        self._ended_s = now_s
        self.entries.append(
            journal.PlanAdopted(
                t_s=now_s,
                generation=self._past_generations,
                plan=ExecutionPlan(pipelines=()),
                action=journal.Action.CHECKPOINT,
                reason=reason,
                predicted_step_s=0.0,
                num_layers=0,
                redundant=False,
            )
        )

    def _adopted(self, entry: journal.PlanAdopted) -> None:
        is_restart = not self.is_planned and self._past_generations > 0
        self._generation = entry.generation - self._past_generations
        if not entry.redundant:
            self._saved_step = self._step  # the state is saved at once when it has too few copies
        if is_restart:
            restart = journal.RecoveryDone(
                t_s=entry.t_s,
                began_s=self._ended_s,
                generation=entry.generation,
                nodes=(),
                cause=journal.PlanCause.LOSS,
                loss=journal.LossCause.CONNECTION_LOST,
                action=journal.Action.CHECKPOINT,
                detect_s=0.0,
                decide_s=0.0,
                transfer_s=self.checkpoint_read_s,
                stall_s=entry.t_s - self._ended_s,
                bytes_moved=0,
                layers_moved=entry.num_layers,
                microbatches_redone=0,
                steps_lost=self._steps_lost,
            )
            self.entries.append(restart)
