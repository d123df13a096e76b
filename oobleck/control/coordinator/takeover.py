"""How a master takes over a run that an earlier one has left: no worker stops for it, unless orders may be lost."""

from __future__ import annotations

from oobleck.control.events import Connect
from oobleck.control.journal import MasterResumed, PlanCause
from oobleck.job import JobSpec, NodeSpec

from .going_back import Lineage
from .parts import Parts
from .replayed_run import ReplayedRun

__all__ = ["take_over"]


def take_over(parts: Parts, job: JobSpec, nodes: tuple[NodeSpec, ...], replayed: ReplayedRun, now_s: float) -> None:
    """Give each part what the journal knows of it, and reach all nodes again."""
    parts.effects.record(MasterResumed(t_s=now_s, away_s=now_s - replayed.last_s))
    _restore_steps(parts, replayed)
    parts.preparation.restore(replayed.profile)
    parts.reconfiguration.restore(
        replayed.profile,
        replayed.generations,
        _lineage(replayed),
        step_s=replayed.predicted_step_s,
        slow=replayed.slow,
    )
    _restore_checkpoints(parts, replayed)
    parts.sharding.restore(replayed.shards)
    parts.progress.expect(job.control.start_timeout_s)
    for member in parts.members.living:
        member.last_heard_s = now_s + job.control.connect_timeout_s
        parts.effects.command(Connect(node=member.spec, attach=True))
    if not replayed.is_settled:
        parts.reconfiguration.begin([], PlanCause.MASTER_LOST, detect_s=0.0)
    for spec in replayed.interrupted:
        parts.lifecycle.add(spec)
    for spec in nodes:
        if spec.name not in parts.members:
            parts.lifecycle.add(spec)


def _restore_steps(parts: Parts, replayed: ReplayedRun) -> None:
    progress, restored = parts.progress, replayed.restored
    if restored is not None and restored.restored_step is not None:
        progress.go_back(restored.restored_step, generation=restored.generation)
    for record in replayed.records:
        progress.restore(record)
    progress.restore_furthest(replayed.furthest_step)
    progress.restore_evaluated(replayed.evaluated_step)
    progress.foresee(replayed.predicted_step_s)


def _lineage(replayed: ReplayedRun) -> Lineage:
    restored = replayed.restored
    return Lineage(
        restored_generation=restored.generation if restored else 0,
        is_from_scratch=restored is None or restored.restored is None,
        began_from_scratch=replayed.began is None or replayed.began.restored is None,
    )


def _restore_checkpoints(parts: Parts, replayed: ReplayedRun) -> None:
    saving, origin = parts.saving, replayed.origin
    if origin is not None:
        parts.restoring.begin_from(origin)
    saving.begin([layer.name for layer in replayed.profile.layers])
    saving.know(replayed.saved)
    parts.scaling.restore(replayed.target)
    saving.plan_adopted(replayed.generations.plan, boundary=parts.progress.last_step, redundant=True)
    if origin is not None:
        saving.begin_from(origin)
    for known in replayed.saved:
        saving.note_on_disk(known.step)
