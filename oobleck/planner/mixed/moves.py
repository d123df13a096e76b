"""The moves that make a plan over several kinds of nodes whole again.

They are fewer than for one kind: pipelines continue with spares of a lost node's kind, or with the nodes left to them;
nodes outside whole pipelines form new ones; or all nodes are planned again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from oobleck.planner.formatting import counted, listed
from oobleck.planner.kinds import Counts, Form
from oobleck.planner.reconfiguration import UNCHANGED, LivingNodes, Move

from .catalog import MixedCatalog

# A pair has the old pipeline that a new one continues, and the new one's nodes.
_Pipeline = tuple[int | None, Counts]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Situation:
    before: tuple[Counts, ...]
    alive: tuple[Counts, ...]
    """The nodes of each old pipeline that may continue in it."""
    free: Counts
    """Spares and joined nodes."""
    total: Counts
    """All living nodes, with a place or without."""

    def is_whole(self, index: int) -> bool:
        return self.alive[index] == self.before[index]

    @property
    def nodes(self) -> Counts:
        return _sum([self.free, *self.alive])


def propose_moves(
    catalog: MixedCatalog, living: LivingNodes, continued: Mapping[int, Form], set_aside: frozenset[str]
) -> Iterator[Move]:
    """Yield the possible moves that leave some nodes out, the gentlest first."""
    alive: list[list[str]] = [[] for _ in living.plan.pipelines]
    for node, index in living.origins.items():
        if node not in set_aside:
            alive[index].append(node)
    situation = _Situation(
        before=tuple(catalog.count(pipeline.nodes) for pipeline in living.plan.pipelines),
        alive=tuple(map(catalog.count, alive)),
        free=catalog.count([node for node in living.free if node not in set_aside]),
        total=catalog.count(living.holdings),
    )
    return _moves(catalog, situation, continued)


def _moves(catalog: MixedCatalog, situation: _Situation, continued: Mapping[int, Form]) -> Iterator[Move]:
    number, exactly = catalog.num_pipelines(situation.total)[0], catalog.settings.num_pipelines is not None
    if (move := _reinstantiate(catalog, situation, continued)) is not None:
        yield move
    num_microbatches, total = catalog.settings.num_microbatches, situation.total
    everything = catalog.choose(situation.nodes, num_microbatches, number, exactly=exactly, total=total)
    # Fewer pipelines than wanted are better than none.
    if everything is None:
        everything = catalog.choose(situation.nodes, num_microbatches, 1, total=total)
    if everything is None:
        return
    whole = [index for index in range(len(situation.before)) if situation.is_whole(index)]
    pool = _sum([situation.free, *(each for i, each in enumerate(situation.alive) if i not in whole)])
    if whole and any(pool):
        # Whole pipelines take what they can within the time of the best plan; the others share the rest.
        taken = sum(
            max(0, min(timing.most_microbatches, int((everything.slowest_s - timing.first_s) / timing.next_s) + 1))
            for timing in (catalog.timing(continued[index], None, 0) for index in whole)
        )
        fewest = max(1, number - len(whole))
        if not (exactly and number <= len(whole)):
            share = max(fewest, num_microbatches - int(taken))
            own = catalog.choose(pool, share, fewest, exactly=exactly, total=total)
            if own is not None:
                kept = [(index, situation.before[index]) for index in whole]
                formed = _place(situation, own.pipelines, kept=whole)
                is_broken = len(whole) < len(situation.before)
                yield Move(
                    action="rebuild" if is_broken else "absorb",
                    pipelines=tuple(sorted([*kept, *formed], key=_by_origin)),
                    detail=f"the other nodes form {counted(len(formed), 'pipeline')}",
                )
    placed = _place(situation, everything.pipelines, kept=())
    detail = f"all nodes are planned again: {counted(len(placed), 'pipeline')}"
    yield Move(action="rebuild", pipelines=tuple(sorted(placed, key=_by_origin)), detail=detail)


def _reinstantiate(catalog: MixedCatalog, situation: _Situation, continued: Mapping[int, Form]) -> Move | None:
    free = situation.free
    pipelines: list[_Pipeline] = []
    shrunk, filled = [], False
    for index, wanted in enumerate(situation.before):
        counts = situation.alive[index]
        if not any(counts):
            shrunk.append(f"the other pipelines take the microbatches of pipeline {index}")
            continue
        taken = tuple(min(have, want - left) for have, want, left in zip(free, wanted, counts, strict=True))
        free = tuple(have - used for have, used in zip(free, taken, strict=True))
        full = _sum([counts, taken])
        if full == wanted:
            filled = filled or any(taken)
            pipelines.append((index, wanted))
            continue
        smaller = _best_within(catalog, full, situation.total, continued[index])
        if smaller is None:
            return None
        pipelines.append((index, smaller))
        shrunk.append(f"pipeline {index} continues with {counted(sum(smaller), 'node')}")
    if not pipelines:
        return None
    detail = "spares take the empty places" if filled else UNCHANGED
    return Move(action="reinstantiate", pipelines=tuple(pipelines), detail=listed(shrunk) if shrunk else detail)


def _best_within(catalog: MixedCatalog, nodes: Counts, total: Counts, before: Form) -> Counts | None:
    """Return the fastest pipeline of some of the nodes, at four microbatches for each stage of the old pipeline."""
    num_microbatches = 4 * before.template.num_stages
    orders = {
        # Of those with too little memory for that, the one that has memory for most.
        counts: (timing.step_s(num_microbatches), -timing.most_microbatches, timing.first_s, counts)
        for counts, timing in catalog.timings(total).items()
        if all(number <= limit for number, limit in zip(counts, nodes, strict=True))
    }
    return min(orders, key=orders.__getitem__, default=None)


def _place(situation: _Situation, pipelines: Sequence[Counts], *, kept: Collection[int]) -> list[_Pipeline]:
    """Assign each new pipeline the old one that it continues: one with equal counts, whole ones first."""
    left = [index for index in range(len(situation.before)) if index not in kept and any(situation.alive[index])]
    left.sort(key=lambda index: (not situation.is_whole(index), index))
    placed: list[_Pipeline] = []
    for counts in pipelines:
        origin = next((index for index in left if situation.before[index] == counts), None)
        if origin is not None:
            left.remove(origin)
        placed.append((origin, counts))
    return placed


def _by_origin(pipeline: _Pipeline) -> tuple[bool, int]:
    origin, _ = pipeline
    return origin is None, origin or 0


def _sum(counts: Sequence[Counts]) -> Counts:
    return tuple(map(sum, zip(*counts, strict=True)))
