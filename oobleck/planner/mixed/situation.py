"""What is left of a plan over several kinds of nodes, after losses and joins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from oobleck.planner.catalog import STILL_FAST
from oobleck.planner.reconfiguration import LivingNodes

from .catalog import MixedCatalog
from .choice import Counts
from .kinds import MixedTemplate

KindOf = Callable[[str], int]
"""From a node to the number of its kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a move starts from: the nodes that may get a place, by kind."""

    before: tuple[MixedTemplate, ...]
    """Of each old pipeline, as it goes on if it goes on with as many nodes."""
    alive: tuple[Counts, ...]
    """Nodes of each old pipeline that may continue in it."""
    free: Counts
    """Spares and joined nodes."""
    total: Counts
    """All living nodes, with a place or without: what templates are found for."""

    def counts(self, mixed: MixedTemplate) -> Counts:
        return tuple(mixed.kinds.count(kind) for kind in range(len(self.free)))

    def is_whole(self, index: int) -> bool:
        return self.alive[index] == self.counts(self.before[index])

    @property
    def nodes(self) -> Counts:
        return sum_counts([self.free, *self.alive])


def count_kinds(nodes: Collection[str], kind_of: KindOf, catalog: MixedCatalog) -> Counts:
    """Return how many of the nodes are of each kind."""
    numbers = Counter(map(kind_of, nodes))
    return tuple(numbers[kind] for kind in range(len(catalog.costs.kinds)))


def look(catalog: MixedCatalog, kind_of: KindOf, living: LivingNodes, set_aside: frozenset[str]) -> Situation:
    """Return what is left of a plan without the nodes that are set aside."""
    total = count_kinds(living.holdings, kind_of, catalog)
    alive: list[list[str]] = [[] for _ in living.plan.pipelines]
    for node, index in living.origins.items():
        if node not in set_aside:
            alive[index].append(node)
    return Situation(
        before=tuple(
            _continued(
                catalog,
                MixedTemplate(template=pipeline.template, kinds=tuple(map(kind_of, pipeline.nodes))),
                total,
                pipeline.num_microbatches,
                is_slowed=not living.slow.isdisjoint(pipeline.nodes),
            )
            for pipeline in living.plan.pipelines
        ),
        alive=tuple(count_kinds(nodes, kind_of, catalog) for nodes in alive),
        free=count_kinds([node for node in living.free if node not in set_aside], kind_of, catalog),
        total=total,
    )


def _continued(
    catalog: MixedCatalog, own: MixedTemplate, total: Counts, num_microbatches: int, *, is_slowed: bool
) -> MixedTemplate:
    """Return the template with which a pipeline goes on if it has as many nodes: its own, if that is still fast.

    One that is slowed by some of its nodes may be cut for them; how fast it is without them says nothing.
    """
    counts = tuple(own.kinds.count(kind) for kind in range(len(total)))
    if own.template.num_layers == catalog.costs.num_layers and catalog.costs.fits(own):
        present = catalog.timings(total).get(counts)
        own_s = catalog.timing(own).step_s(num_microbatches)
        if present is None or is_slowed or own_s <= STILL_FAST * present.step_s(num_microbatches):
            return own
    return catalog.template(counts, total) if counts in catalog.timings(total) else own


def sum_counts(counts: Sequence[Counts]) -> Counts:
    """Return the numbers of nodes of each kind in all."""
    return tuple(map(sum, zip(*counts, strict=True)))
