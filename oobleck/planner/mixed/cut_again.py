"""Cutting the stages of pipelines over several kinds of nodes again, for the speeds of the nodes that they have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from oobleck.plan import ExecutionPlan, Pipeline
from oobleck.planner.reconfiguration import LivingNodes
from oobleck.planner.templates import cut_for_speeds

from .catalog import MixedCatalog
from .kinds import MixedTemplate
from .situation import Situation


def cut_again(
    catalog: MixedCatalog,
    living: LivingNodes,
    situation: Situation,
    templates: Sequence[MixedTemplate],
    plan: ExecutionPlan,
) -> Iterator[list[MixedTemplate]]:
    """Yield the templates of a plan's pipelines with some of them cut again; as for nodes of one kind."""
    pairs = list(zip(templates, plan.pipelines, strict=True))
    slowed = [_for_its_nodes(catalog, living, mixed, pipeline) for mixed, pipeline in pairs]
    if slowed != list(templates):
        yield slowed
    if not living.is_whole:
        return
    both = [
        _usual_if_faster(catalog, situation, mixed, pipeline.num_microbatches)
        if living.slow.isdisjoint(pipeline.nodes)
        else mixed
        for mixed, pipeline in zip(slowed, plan.pipelines, strict=True)
    ]
    if both != slowed:
        yield both


def _for_its_nodes(
    catalog: MixedCatalog, living: LivingNodes, mixed: MixedTemplate, pipeline: Pipeline
) -> MixedTemplate:
    template = mixed.template
    if living.slow.isdisjoint(pipeline.nodes) or template.num_chunks > 1 or template.num_stages == 1:
        return mixed
    cut = cut_for_speeds(
        [catalog.costs.of[kind] for kind in mixed.kinds],
        template,
        [living.speeds.get(node, 1.0) for node in pipeline.nodes],
        [living.holdings[node] for node in pipeline.nodes],
        pipeline.num_microbatches,
    )
    return mixed if cut.stages == template.stages else replace(mixed, template=cut)


def _usual_if_faster(
    catalog: MixedCatalog, situation: Situation, mixed: MixedTemplate, num_microbatches: int
) -> MixedTemplate:
    """Return the usual pipeline of the same nodes in the same order, where that is faster."""
    counts = situation.counts(mixed)
    usual = catalog.template(counts, situation.total) if counts in catalog.timings(situation.total) else mixed
    own_s, usual_s = (catalog.timing(each).step_s(num_microbatches) for each in (mixed, usual))
    return usual if usual.kinds == mixed.kinds and usual_s < own_s else mixed
