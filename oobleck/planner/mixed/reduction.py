"""The pipelines with the shortest step, the reduction of their gradients included.

`Chooser` minimises the slowest pipeline alone. The reduction depends on the most bytes that a node of any pipeline
holds, and on the number of pipelines. The search is exact for few nodes; for many it does not fix that number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping

from oobleck.planner.costs import Timing
from oobleck.planner.instantiation import reduction_s
from oobleck.planner.kinds import Counts
from oobleck.planner.profiles import NetworkProfile

from .choice import Choice, Chooser

# Pipelines are left out in at most this many rounds, for each number of pipelines.
_MOST_CUTS = 12
# Larger numbers of pipelines are not searched exactly: their reductions take about the same time.
_MOST_FIXED = 8
# Numbers of pipelines are searched exactly up to this many combinations of numbers of nodes.
_MOST_STATES = 1 << 7


def choose_with_reduction(
    timings: Mapping[Counts, Timing],
    num_microbatches: int,
    nodes: Counts,
    network: NetworkProfile,
    bytes_of: Callable[[Collection[Counts]], Mapping[Counts, int]],
    all_bytes: int,
    *,
    fewest: int,
    exactly: bool,
) -> Choice | None:
    """Return the `fewest` or more pipelines (or exactly as many) with the shortest step; None for too few nodes.

    `bytes_of` returns the most bytes that a node of each pipeline reduces, and is slow; `all_bytes` are the model's.
    """
    best: Choice | None = None
    best_s = fastest_s = math.inf
    known: dict[Counts, int] = {}
    for number, is_fixed in _numbers(timings, num_microbatches, nodes, fewest, exactly):
        usable, least_s = timings, 0.0 if best is None else fastest_s
        # The smallest of `number` or more pipelines has at most the average number of nodes.
        least_reduction_s = reduction_s(network, all_bytes * number // sum(nodes), number)
        for _ in range(_MOST_CUTS):
            chooser, below_s = Chooser(usable, num_microbatches), best_s - least_reduction_s
            found = chooser.choose(nodes, fewest=number, exactly=is_fixed, least_s=least_s, below_s=below_s)
            if found is None:
                break
            least_s, fastest_s = found.slowest_s, min(fastest_s, found.slowest_s)
            known.update(bytes_of([counts for counts in set(found.pipelines) if counts not in known]))
            most = max(known[counts] for counts in found.pipelines)
            step_s = found.slowest_s + reduction_s(network, most, len(found.pipelines))
            if step_s < best_s:
                best, best_s = found, step_s
            # With the number of pipelines fixed, any faster choice reduces less, so pipelines with as many bytes are
            # left out. A pipeline's bytes are known once its stages are; until then its nodes share all evenly.
            usable = {
                counts: timing
                for counts, timing in usable.items()
                if known.get(counts, all_bytes // sum(counts)) < most
            }
            if not usable:
                break
    return best


def _numbers(
    timings: Mapping[Counts, Timing], num_microbatches: int, nodes: Counts, fewest: int, exactly: bool
) -> Iterator[tuple[int, bool]]:
    """Yield (number of pipelines, whether exactly as many)."""
    yield fewest, exactly
    if exactly or math.prod(number + 1 for number in nodes) > _MOST_STATES:
        return
    most = Chooser(timings, num_microbatches).most_pipelines(nodes)
    for number in range(fewest, min(most, _MOST_FIXED) + 1):
        yield number, True
