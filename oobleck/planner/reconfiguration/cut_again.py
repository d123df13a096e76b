"""Cutting the stages of pipelines again, for the speeds of the nodes that they have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from oobleck.plan import ExecutionPlan, PipelineTemplate
from oobleck.planner.catalog import Catalog

from .living_nodes import LivingNodes


def cut_again(
    catalog: Catalog, living: LivingNodes, templates: Sequence[PipelineTemplate], plan: ExecutionPlan
) -> Iterator[list[PipelineTemplate]]:
    """Yield the templates of a plan's pipelines with some of them cut again, where there is something to cut.

    First the pipelines with slow nodes are; then also those whose usual template is faster: they were cut for nodes
    that are slow no longer, or for another share of the batch. Where nodes are lost, the latter keep their templates:
    no more layers than necessary are to move then. Proposals only: whether they repay the bytes is for the caller to
    weigh.
    """
    slowed = (
        [_for_its_nodes(catalog, living, template, plan, index) for index, template in enumerate(templates)]
        if living.slow
        else list(templates)
    )
    if _differ(slowed, templates):
        yield slowed
    if not living.is_whole:
        return
    known: dict[int, PipelineTemplate] = {}
    all_cut = []
    for template, pipeline in zip(slowed, plan.pipelines, strict=True):
        if not living.slow.isdisjoint(pipeline.nodes):
            all_cut.append(template)
            continue
        if id(template) not in known:
            known[id(template)] = catalog.usual_if_faster(template, living.num_nodes, pipeline.num_microbatches)
        all_cut.append(known[id(template)])
    if _differ(all_cut, slowed):
        yield all_cut


def _for_its_nodes(
    catalog: Catalog, living: LivingNodes, template: PipelineTemplate, plan: ExecutionPlan, index: int
) -> PipelineTemplate:
    pipeline = plan.pipelines[index]
    if living.slow.isdisjoint(pipeline.nodes):
        return template
    speeds = [living.speeds.get(node, 1.0) for node in pipeline.nodes]
    holdings = [living.holdings[node] for node in pipeline.nodes]
    own = catalog.cut_for(template, speeds, holdings, pipeline.num_microbatches)
    return template if own.stages == template.stages else own


def _differ(templates: Sequence[PipelineTemplate], others: Sequence[PipelineTemplate]) -> bool:
    return any(one is not other for one, other in zip(templates, others, strict=True))
