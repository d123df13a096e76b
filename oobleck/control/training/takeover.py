"""How a master takes over a run from an earlier one. The workers keep training, unless orders may be lost."""

from __future__ import annotations

from dataclasses import replace

from oobleck.control.events import Connect, Turn
from oobleck.control.journal import MasterResumed, PlanCause
from oobleck.control.nodes import attaching_s, starting_s
from oobleck.control.recovery import BeginRecovery
from oobleck.job import JobSpec, NodeSpec

from .decision import Lineage
from .parts import Parts
from .replayed_run import ReplayedRun


def take_over(parts: Parts, turn: Turn, job: JobSpec, nodes: tuple[NodeSpec, ...], replayed: ReplayedRun) -> None:
    """Restore each part from the journal, and connect to all nodes again."""
    now_s = turn.now_s
    turn.record(MasterResumed(t_s=now_s, away_s=now_s - replayed.last_s))
    _restore_steps(parts, replayed)
    parts.preparation.restore(replayed.kinds)
    parts.replanning.take_over(replayed, now_s)
    restored, began = replayed.restored, replayed.began
    lineage = Lineage(
        restored_generation=restored.generation if restored else 0,
        is_from_scratch=restored is None or restored.restored is None,
        began_from_scratch=began is None or began.restored is None,
    )
    parts.reconfiguration.restore(turn, replayed.generations, lineage)
    _restore_checkpoints(parts, turn, replayed)
    parts.sharding.restore(replayed.shards)
    parts.consent.take_over()
    num_nodes = len(parts.members.living)
    parts.progress.expect(starting_s(job.control.start_timeout_s, num_nodes), now_s)
    # No lease lapses before this master can have reached all nodes.
    parts.members.expect_words(now_s + attaching_s(job.control.connect_timeout_s, num_nodes))
    turn.do(Connect(node=member.spec, attach=True) for member in parts.members.living)
    # Some workers may have missed the newest orders, so all are fenced and get others.
    if not replayed.is_settled:
        parts.saving.take_over(replayed.generations.newest)
        parts.reconfiguration.begin(turn, BeginRecovery(cause=PlanCause.MASTER_LOST))
    parts.lifecycle.take_over(now_s)
    for spec in replayed.interrupted:
        parts.lifecycle.add(turn, spec)
    # The user may have listed new nodes since.
    for spec in nodes:
        if spec.name not in parts.members:
            parts.lifecycle.add(turn, spec)


def _restore_steps(parts: Parts, replayed: ReplayedRun) -> None:
    progress, restored = parts.progress, replayed.restored
    # This comes first, because going back forgets the newest step.
    if restored is not None and restored.restored_step is not None:
        progress.go_back(restored.restored_step, generation=restored.generation)
    for record in replayed.records:
        progress.restore(record)
    progress.take_over(replayed.furthest_step, replayed.evaluated_step, step_s=replayed.predicted_step_s)


def _restore_checkpoints(parts: Parts, turn: Turn, replayed: ReplayedRun) -> None:
    saving, origin, generations = parts.saving, replayed.origin, replayed.generations
    if origin is not None:
        parts.restoring.begin_from(origin)
    saving.begin([layer.name for layer in replayed.kinds[0].profile.layers])
    saving.know(turn, replayed.saved)
    boundary = parts.progress.last_step
    ordered = replace(generations.ordered[generations.newest], boundary=boundary)
    saving.plan_adopted(turn, ordered, redundant=True)
    if origin is not None:
        saving.begin_from(origin)
    for known in replayed.saved:
        saving.note_saved(min(known.step, boundary))
