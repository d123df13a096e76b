"""Which pipelines make the shortest step, the reduction of their gradients included.

`Chooser` knows the slowest pipeline alone. What a reduction takes depends on the most bytes that a node of any pipeline
holds, and on how many pipelines there are. Among as many pipelines, those that are faster than the best found so far
have less to reduce: so pipelines with as many bytes are left out, and the others are chosen from again, until nothing
is faster. What a pipeline reduces is known once its stages are; before, as little as if its nodes shared all evenly.

Exact for few nodes, within as many rounds as it takes. For many nodes the number of pipelines is not fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping

from oobleck.planner.costs import Timing
from oobleck.planner.instantiation import reduction_s
from oobleck.planner.kinds import Counts
from oobleck.planner.profiles import NetworkProfile

from .choice import Choice, Chooser

_MOST_CUTS = 12
"""Times that pipelines are left out, for each number of pipelines."""
_MOST_FIXED = 8
"""Numbers of pipelines that are looked at one by one, at most: from there on reductions take about the same time."""
_MOST_STATES = 1 << 7
"""With more numbers of nodes than these, numbers of pipelines are not looked at one by one."""


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
    """Return the pipelines of at most so many nodes with the shortest step; None where there are too few.

    At least `fewest` pipelines, or exactly as many. `bytes_of` are the most that a node of each pipeline reduces, which
    takes long to find out, and `all_bytes` what the whole model has.
    """
    best: Choice | None = None
    best_s = fastest_s = math.inf
    known: dict[Counts, int] = {}
    for number, is_fixed in _numbers(timings, num_microbatches, nodes, fewest, exactly):
        usable, least_s = timings, 0.0 if best is None else fastest_s
        # Of so many pipelines or more, the smallest has few nodes.
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
    """Yield numbers of pipelines, and whether they are to be as many exactly."""
    yield fewest, exactly
    if exactly or math.prod(number + 1 for number in nodes) > _MOST_STATES:
        return
    most = Chooser(timings, num_microbatches).most_pipelines(nodes)
    for number in range(fewest, min(most, _MOST_FIXED) + 1):
        yield number, True
