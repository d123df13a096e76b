"""How a master takes over a run from an earlier one: workers keep training, unless orders may be lost."""

from __future__ import annotations

from oobleck.control.events import Connect, Record
from oobleck.control.journal import MasterResumed, PlanCause
from oobleck.control.nodes import attaching_s, starting_s
from oobleck.control.recovery import BeginRecovery
from oobleck.job import JobSpec, NodeSpec

from .going_back import Lineage
from .parts import Parts
from .replayed_run import ReplayedRun
from .routing import Routing


def take_over(
    parts: Parts, routing: Routing, job: JobSpec, nodes: tuple[NodeSpec, ...], replayed: ReplayedRun, now_s: float
) -> None:
    """Give each part what the journal knows of it, and reach all nodes again."""
    routing.carry_out((Record(entry=MasterResumed(t_s=now_s, away_s=now_s - replayed.last_s)),), now_s)
    _restore_steps(parts, replayed)
    parts.preparation.restore(replayed.kinds)
    parts.replanning.take_over(
        replayed.kinds,
        replayed.generations.plan,
        now_s,
        step_s=replayed.predicted_step_s,
        slow=replayed.slow,
        target=replayed.target,
    )
    routing.carry_out(parts.reconfiguration.restore(replayed.generations, _lineage(replayed), now_s), now_s)
    _restore_checkpoints(parts, routing, replayed, now_s)
    parts.sharding.restore(replayed.shards)
    num_nodes = len(parts.members.living)
    parts.progress.expect(starting_s(job.control.start_timeout_s, num_nodes), now_s)
    parts.members.expect_words(now_s + attaching_s(job.control.connect_timeout_s, num_nodes))
    for member in parts.members.living:
        routing.carry_out((Connect(node=member.spec, attach=True),), now_s)
    if not replayed.is_settled:
        parts.saving.take_over(replayed.generations.newest)
        routing.carry_out((BeginRecovery(cause=PlanCause.MASTER_LOST),), now_s)
    for spec in replayed.interrupted:
        routing.carry_out(parts.lifecycle.add(spec, now_s), now_s)
    for spec in nodes:
        if spec.name not in parts.members:
            routing.carry_out(parts.lifecycle.add(spec, now_s), now_s)


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


def _restore_checkpoints(parts: Parts, routing: Routing, replayed: ReplayedRun, now_s: float) -> None:
    saving, origin, plan = parts.saving, replayed.origin, replayed.generations.plan
    if origin is not None:
        parts.restoring.begin_from(origin)
    saving.begin([layer.name for layer in replayed.kinds[0].profile.layers])
    routing.carry_out(saving.know(replayed.saved), now_s)
    boundary = parts.progress.last_step
    generation = replayed.generations.newest
    adopted = saving.plan_adopted(plan, now_s, generation=generation, boundary=boundary, redundant=True)
    routing.carry_out(adopted, now_s)
    if origin is not None:
        saving.begin_from(origin)
    for known in replayed.saved:
        saving.note_on_disk(known.step)
