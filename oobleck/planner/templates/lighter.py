"""Templates whose nodes reduce fewer bytes of gradients, for slow networks.

The template search takes no account of the reduction, which takes as long as the node with most bytes: how much that
matters depends on the number of pipelines, and on their microbatches. So the search is repeated under limits on a
node's bytes, each tighter than the last, and the caller, who knows those numbers, chooses among the results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from oobleck.plan import PipelineTemplate
from oobleck.planner.costs import StageCosts

from .templates import find_templates

# Each limit is this share of the one before, so that a reduction is about so close to the best.
_LIGHTER = 0.9


def lighter_templates(
    costs: StageCosts, templates: Mapping[int, PipelineTemplate], *, microbatches_per_device: int
) -> Mapping[int, Sequence[PipelineTemplate]]:
    """Return templates with ever fewer bytes on the node with most, by size; one search of templates for each limit."""
    found: defaultdict[int, list[PipelineTemplate]] = defaultdict(list)
    # Where all is frozen, nothing is reduced.
    heaviest = {size: held for size, each in templates.items() if (held := costs.reduced_bytes(each))}
    # The limits are the same for all sizes, so that no size depends on which others were asked for with it.
    limit: float = sum(layer.trained_bytes for layer in costs.profile.layers)
    while heaviest:
        limit *= _LIGHTER
        wanted = [size for size, held in heaviest.items() if held > limit]
        if not wanted:
            continue
        lighter = find_templates(costs.no_heavier_than(limit), wanted, microbatches_per_device=microbatches_per_device)
        for size in wanted:
            if size in lighter:
                found[size].append(lighter[size])
                heaviest[size] = costs.reduced_bytes(lighter[size])
            else:
                del heaviest[size]
    return found
