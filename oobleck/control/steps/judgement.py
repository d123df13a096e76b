"""What the survivors' answers to a fence mean for the step in flight. Pure functions; no state.

The rule of the commit (see `commit_state`): a worker applies step k only after an agreement (`agreement`)
in which all took part, each with its gradients of k fully reduced. Hence, once all survivors have answered:

    applied k, all          -> k is committed
    applied k, some         -> k is committed; the others hold its reduced gradients, and catch up
    applied k - 1, all      -> k is not committed; it is finished by the whole pipelines, or forgotten

The dead may have reported a step that no survivor has applied: it is committed all the same. And a worker that
was left out of the plan in force, but has not heard of it yet, still holds the layers of the plan before; it
took no part in what was committed since, as its lack of reduced gradients shows.

Rejected: a commit in two phases, with the master as the one who decides. It costs every step a round trip to the
master, and stops all workers when the master is gone. Here no step waits for the master: the answers to a fence are
enough to find out what was decided without it, since the agreement itself is the vote.

Until the first step under a plan is committed, or the first section of one is committed, workers keep what they sent
away for it. A worker that has still to do that keeps those layers at the version before, so they do not count.

Sections follow the same rule: what some survivor has committed counts, and the others who hold its reduced gradients
commit it too. A section that no survivor has committed does not count, since nothing was made of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from oobleck.control.plans import apportion, shares_of
from oobleck.control.protocol import CommitRecord, SectionRecord, Segment, Status
from oobleck.planner import ExecutionPlan, WorkerId

_Value = TypeVar("_Value")

SectionId = tuple[int, int]
"""What is committed of a step: the generation of the plan under which its newest section was run, and its number."""

NO_SECTION: SectionId = (0, 0)


def _as_it_is(generation: int, step: int, number: int) -> SectionId:
    """What a worker has committed of a step, where no plan came into force in the middle of one."""
    del step
    return (generation, number) if number else NO_SECTION


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is committed, and what survivors hold."""

    applied: int
    """The newest committed step."""
    catch_up: CommitRecord | None
    """Set when some survivor has still to apply that step."""
    adopted: int | None
    """The generation whose plan all who hold layers have in force; None when they differ."""
    held: Mapping[WorkerId, frozenset[int]]
    """The layers that each survivor holds whole, at the version of `applied`, with committed sections of the next."""
    section: SectionId = NO_SECTION
    """What is committed of the step after."""
    partial: SectionRecord | None = None
    """What those say of it who have committed it; None where that was before the plan that they have adopted."""
    is_section_behind: bool = False
    """Some survivor has still to commit it."""


def judge(
    statuses: Mapping[WorkerId, Status],
    committed: CommitRecord | None,
    plans: Mapping[int, ExecutionPlan],
    section_of: Callable[[int, int, int], SectionId] = _as_it_is,
) -> Verdict:
    """Read the survivors' answers; O(workers).

    `committed` is the newest step that was ever reported as committed, `plans` the plans by generation; `section_of`
    says what is committed of a step after so many of its sections under the plan of a generation.
    Spares and newcomers hold no layers: they are ignored here.
    """
    alike = {id(status): status for status in distinct(statuses.values()) if status.layers}
    records = [status.last_record for status in alike.values() if status.last_record is not None]
    newest = max([*records, *([committed] if committed else [])], key=lambda record: record.step, default=None)
    applied = max([newest.step if newest else 0, *(status.applied for status in alike.values())])
    # They catch up from their own sums instead of copying layers: the sums are the same bits on all workers, and the
    # layers with their optimizer state would have to cross the network, from the few that have applied the step.
    behind = {key for key, status in alike.items() if status.reduced == applied}
    late = {key for key, status in alike.items() if status.applied != applied and key not in behind}
    alike = {key: status for key, status in alike.items() if key not in late}
    sections = {key: _newest_section(status, applied, section_of) for key, status in alike.items()}
    section = max(sections.values(), default=NO_SECTION)
    behind_section = {
        key
        for key, status in alike.items()
        if status.section_reduced is not None and (status.adopted, status.section_reduced) == section
    }
    missed = {key for key in alike if sections[key] != section and key not in behind_section}
    generations = {status.adopted for key, status in alike.items() if key not in missed}
    said = (status.partial for key, status in alike.items() if sections[key] == section)
    # Workers that hold the same share one set, so that thousands of them cost little.
    sets = {status.layers: frozenset(status.layers) for status in alike.values()}
    layers = {key: sets[status.layers] for key, status in alike.items() if key not in missed}
    whole = zip(statuses, map(layers.get, map(id, statuses.values())), strict=True)
    held = {worker_id: mine for worker_id, mine in whole if mine is not None}
    held |= {
        worker_id: held[worker_id] & planned_layers(plans[status.adopted], worker_id)
        for worker_id, status in (statuses.items() if behind or behind_section else ())
        if worker_id in held and (id(status) in behind or id(status) in behind_section)
    }
    assert not behind or (newest is not None and newest.step == applied), (newest, applied)
    return Verdict(
        applied=applied,
        catch_up=newest if behind else None,
        adopted=generations.pop() if len(generations) == 1 else None,
        held=held,
        section=section,
        partial=next((record for record in said if record is not None), None),
        is_section_behind=bool(behind_section),
    )


def _newest_section(status: Status, applied: int, section_of: Callable[[int, int, int], SectionId]) -> SectionId:
    """What a worker has committed of the step after `applied`."""
    if status.applied < applied:
        return NO_SECTION  # it has still to apply that step, which all others have to do before they commit
    return section_of(status.adopted, applied + 1, 0 if status.partial is None else status.partial.number)


def distinct(values: Collection[_Value]) -> Collection[_Value]:
    """Return values without those that are the same object: thousands of workers answer with one between them."""
    return dict(zip(map(id, values), values, strict=True)).values()


def planned_layers(plan: ExecutionPlan, worker_id: WorkerId) -> frozenset[int]:
    """The layers that a plan gives a worker; none for a spare."""
    return plan.layers_at.get(worker_id, frozenset())


def broken_pipelines(plan: ExecutionPlan, lost: Collection[str]) -> tuple[int, ...]:
    """Indices of the pipelines that lost a node."""
    return tuple(sorted({plan.pipeline_of[node] for node in lost if node in plan.pipeline_of}))


def reassign_microbatches(
    plan: ExecutionPlan,
    lost: Collection[str],
    segments: Sequence[Segment],
    *,
    next_segment: int,
    shares: Sequence[Sequence[int]] | None = None,
    partial: Collection[int] = (),
) -> tuple[Segment, ...] | None:
    """Give what broken pipelines leave of a step to the whole ones, on top of the segments assigned before.

    `shares` are the microbatches that each pipeline takes of it (the planned ones, by default), of which those
    `partial` are done for good.
    Returns all segments of the step, or None when no pipeline is whole. Segments are never taken back from a
    whole pipeline; those of a pipeline that broke since are assigned again. Whole pipelines take shares in
    proportion to their planned ones, which are in proportion to their speeds; the largest remainder rounds.
    """
    broken = broken_pipelines(plan, lost)
    whole = [index for index in range(len(plan.pipelines)) if index not in broken]
    if not whole:
        return None
    kept = tuple(segment for segment in segments if segment.pipeline in whole)
    done = {microbatch for segment in kept for microbatch in segment.microbatches}.union(partial)
    own = shares_of(plan) if shares is None else shares
    left = [microbatch for index in broken for microbatch in own[index] if microbatch not in done]
    counts = apportion(len(left), [plan.pipelines[index].num_microbatches for index in whole])
    dealt: list[Segment] = []
    for index, share in zip(whole, counts, strict=True):
        if share:
            dealt.append(Segment(segment=next_segment + len(dealt), pipeline=index, microbatches=tuple(left[:share])))
            left = left[share:]
    return (*kept, *dealt)


def rests_of(
    plan: ExecutionPlan,
    lost: Collection[str],
    segments: Sequence[Segment],
    statuses: Mapping[WorkerId, Status],
    *,
    step: int,
    shares: Sequence[Sequence[int]] | None = None,
) -> dict[int, tuple[int, int]]:
    """Return what whole pipelines have left of a step: (of their own microbatches, of segments), by pipeline.

    `shares` are the microbatches that each pipeline takes of it: the planned ones, by default. A pipeline is as far as
    the worker in it that has taken the fewest microbatches backward; one that has still to apply the step before has
    taken none.
    """
    broken = broken_pipelines(plan, lost)
    dealt: Counter[int] = Counter()
    for segment in segments:
        dealt[segment.pipeline] += len(segment.microbatches)
    before = step - 1
    rests = {}
    for index, pipeline in enumerate(plan.pipelines):
        if index not in broken:
            said = map(statuses.__getitem__, pipeline.worker_ids)
            done = min([status.microbatches_done if status.applied == before else 0 for status in said])
            own = pipeline.num_microbatches if shares is None else len(shares[index])
            rests[index] = (max(0, own - done), max(0, dealt[index] - max(0, done - own)))
    return rests


def microbatches_redone(
    plan: ExecutionPlan,
    lost: Collection[str],
    statuses: Mapping[WorkerId, Status],
    *,
    shares: Sequence[Sequence[int]] | None = None,
    partial: Collection[int] = (),
) -> int:
    """How many microbatches the broken pipelines had begun to take backward, as far as survivors know.

    Of their `shares` in the step (the planned ones, by default), those `partial` are not done again.
    """
    total = 0
    for index in broken_pipelines(plan, lost):
        pipeline = plan.pipelines[index]
        known = [statuses[worker_id].microbatches_done for worker_id in pipeline.worker_ids if worker_id in statuses]
        own = plan.microbatches_of(index) if shares is None else shares[index]
        total += max(0, max(known, default=0) - sum(microbatch in partial for microbatch in own))
    return total


def without(interval_s: tuple[float, float], gap_s: tuple[float, float]) -> tuple[tuple[float, float], ...]:
    """What is left of an interval once `gap_s` is cut out of it: up to two intervals, in order."""
    (began_s, ended_s), (from_s, until_s) = interval_s, gap_s
    parts = ((began_s, min(ended_s, from_s)), (max(began_s, until_s), ended_s))
    return tuple((start_s, stop_s) for start_s, stop_s in parts if stop_s > start_s)


def uncovered(began_s: float, ended_s: float, intervals: Sequence[tuple[float, float]]) -> float:
    """The time between `began_s` and `ended_s` that lies in none of the intervals, which are sorted by their starts."""
    total_s = 0.0
    for start_s, stop_s in intervals:
        total_s += max(0.0, min(start_s, ended_s) - began_s)
        began_s = max(began_s, stop_s)
    return total_s + max(0.0, ended_s - began_s)
