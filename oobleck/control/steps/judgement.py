"""What the survivors' answers to a fence mean for the step in flight. Pure functions; no state.

The rule of the commit (see `commit_state`): a worker applies step k only after an agreement (`agreement`)
in which all took part, each with its gradients of k fully reduced. Hence, once all survivors have answered:

    applied k, all          -> k is committed
    applied k, some         -> k is committed; the others hold its reduced gradients, and catch up
    applied k - 1, all      -> k is not committed; it is finished by the whole pipelines, or forgotten

A dead worker may have reported a step that no survivor has applied: it is committed all the same. Sections follow the
same rule, except that a section which no survivor has committed does not count, because nothing depends on it yet.

Rejected: a commit in two phases, decided by the master. It costs every step a round trip to the master, and stops all
workers when the master is lost. Here no step waits for the master: the answers to a fence show what was decided without
it, since the agreement itself is the vote.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from oobleck.control.plans import apportion
from oobleck.control.protocol import CommitRecord, SectionRecord, Segment, Status
from oobleck.planner import ExecutionPlan, WorkerId

_Value = TypeVar("_Value")

SectionId = tuple[int, int]
"""The committed part of a step: the generation of its newest section's plan, and that section's number."""

NO_SECTION: SectionId = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is committed, and what survivors hold."""

    applied: int
    """The newest committed step."""
    catch_up: CommitRecord | None
    """That step's record, if some survivor has still to apply it."""
    adopted: int | None
    """The generation whose plan all holders of layers have in force; None if they differ."""
    held: Mapping[WorkerId, frozenset[int]]
    """The layers that each survivor holds whole, at the version of `applied` and of the committed sections after it."""
    section: SectionId = NO_SECTION
    """The committed part of the next step."""
    partial: SectionRecord | None = None
    """The record of that section; None if it was committed before the plan that its holders have adopted."""
    is_section_behind: bool = False
    """Some survivor has still to commit that section."""


def judge(
    statuses: Mapping[WorkerId, Status],
    committed: CommitRecord | None,
    plans: Mapping[int, ExecutionPlan],
    section_of: Callable[[int, int, int], SectionId],
) -> Verdict:
    """Read the survivors' answers; O(workers).

    `committed` is the newest step that was ever reported as committed, and `plans` are the plans by generation.
    `section_of` says what is committed of a step after a number of its sections under a generation's plan.
    """
    # Spares and newcomers hold no layers, and do not count.
    alike = {id(status): status for status in distinct(statuses.values()) if status.layers}
    records = [status.last_record for status in alike.values() if status.last_record is not None]
    newest = max([*records, *([committed] if committed else [])], key=lambda record: record.step, default=None)
    applied = max([newest.step if newest else 0, *(status.applied for status in alike.values())])
    # Workers that are behind catch up from their own sums instead of copying layers: the sums are the same bits on all
    # workers, and the layers with their optimizer state would have to cross the network.
    behind = {key for key, status in alike.items() if status.reduced == applied}
    # Late workers took no part in the commit, as their lack of reduced gradients shows: the plan in force left them
    # out, they do not know it yet, and hold the layers of the plan before.
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
    # Until the first step or section under a plan is committed, workers keep the layers that they sent away for it. One
    # that has still to catch up has those at the version before, so only its planned layers count.
    held |= {
        worker_id: held[worker_id] & plans[status.adopted].layers_at.get(worker_id, frozenset())
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
    if status.applied < applied:
        return NO_SECTION  # It has still to apply that step, as all others do before they commit a section.
    return section_of(status.adopted, applied + 1, 0 if status.partial is None else status.partial.number)


def distinct(values: Collection[_Value]) -> Collection[_Value]:
    """Return each object once: thousands of workers share one answer."""
    return dict(zip(map(id, values), values, strict=True)).values()


def broken_pipelines(plan: ExecutionPlan, lost: Collection[str]) -> tuple[int, ...]:
    """Return the indices of the pipelines that lost a node."""
    return tuple(sorted({plan.pipeline_of[node] for node in lost if node in plan.pipeline_of}))


def reassign_microbatches(
    plan: ExecutionPlan,
    lost: Collection[str],
    segments: Sequence[Segment],
    *,
    next_segment: int,
    shares: Sequence[Sequence[int]],
    partial: Collection[int] = (),
) -> tuple[Segment, ...] | None:
    """Assign the rest of the broken pipelines' step to the whole ones, in addition to the segments assigned before.

    `shares` are the microbatches of each pipeline; those in `partial` are committed.
    Returns all segments of the step, or None if no pipeline is whole.
    """
    broken = broken_pipelines(plan, lost)
    whole = [index for index in range(len(plan.pipelines)) if index not in broken]
    if not whole:
        return None
    # A whole pipeline keeps its segments, which it may have done already; those of a pipeline that broke since are
    # assigned again.
    kept = tuple(segment for segment in segments if segment.pipeline in whole)
    done = {microbatch for segment in kept for microbatch in segment.microbatches}.union(partial)
    left = [microbatch for index in broken for microbatch in shares[index] if microbatch not in done]
    # Pipelines take shares in proportion to their planned ones, and so to their speeds; the largest remainder rounds.
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
    shares: Sequence[Sequence[int]],
) -> dict[int, tuple[int, int]]:
    """Return what each whole pipeline has left of a step: (of its own microbatches, of segments).

    `shares` as in `reassign_microbatches`.
    """
    broken = broken_pipelines(plan, lost)
    dealt: Counter[int] = Counter()
    for segment in segments:
        dealt[segment.pipeline] += len(segment.microbatches)
    before = step - 1
    rests = {}
    for index, pipeline in enumerate(plan.pipelines):
        if index not in broken:
            # A pipeline is as far as its slowest worker; one that has still to apply the step before has done nothing.
            said = map(statuses.__getitem__, pipeline.worker_ids)
            done = min([status.microbatches_done if status.applied == before else 0 for status in said])
            own = len(shares[index])
            rests[index] = (max(0, own - done), max(0, dealt[index] - max(0, done - own)))
    return rests


def microbatches_redone(
    plan: ExecutionPlan,
    lost: Collection[str],
    statuses: Mapping[WorkerId, Status],
    *,
    shares: Sequence[Sequence[int]],
    partial: Collection[int] = (),
) -> int:
    """Count the microbatches that the broken pipelines had begun to take backward, as far as survivors know.

    `shares` as in `reassign_microbatches`. Those in `partial` are not done again.
    """
    total = 0
    for index in broken_pipelines(plan, lost):
        pipeline = plan.pipelines[index]
        known = [statuses[worker_id].microbatches_done for worker_id in pipeline.worker_ids if worker_id in statuses]
        total += max(0, max(known, default=0) - sum(microbatch in partial for microbatch in shares[index]))
    return total


def without(interval_s: tuple[float, float], gap_s: tuple[float, float]) -> tuple[tuple[float, float], ...]:
    """Cut `gap_s` out of an interval; returns the remaining intervals in order, at most two."""
    (began_s, ended_s), (from_s, until_s) = interval_s, gap_s
    parts = ((began_s, min(ended_s, from_s)), (max(began_s, until_s), ended_s))
    return tuple((start_s, stop_s) for start_s, stop_s in parts if stop_s > start_s)


def uncovered(began_s: float, ended_s: float, intervals: Sequence[tuple[float, float]]) -> float:
    """Return the time between `began_s` and `ended_s` outside the intervals, which are sorted by their starts."""
    total_s = 0.0
    for start_s, stop_s in intervals:
        total_s += max(0.0, min(start_s, ended_s) - began_s)
        began_s = max(began_s, stop_s)
    return total_s + max(0.0, ended_s - began_s)
