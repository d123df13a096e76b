"""Pipeline templates: for each number of nodes, the stages with the shortest step.

The objective is the bound of 1F1B, `sum(w) + (m - 1) * max(w)` with w the seconds of a stage, and the search is exact.
Under a bound on max(w), the dynamic programme of `search` gives the least sum(w). It starts with no bound, and with the
tightest that any cut meets; the bounds left to try lie between those two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from oobleck.plan import PipelineTemplate
from oobleck.planner.costs import StageCosts, Timing

from .search import Cut, StageSearch

# The search's sums are exact to this share.
_TOLERANCE = 1e-9


@dataclass(slots=True)
class _Query:
    num_nodes: int
    num_devices: int
    num_microbatches: int
    # No pipeline's slowest stage is faster.
    tightest_s: float
    # No pipeline whose slowest stage is within `bound_s` has a smaller sum.
    least_sum_s: float = 0.0
    bound_s: float = math.inf
    best: Cut | None = None
    best_s: float = math.inf
    # False once a result broke the memory limit: this size needs a search that counts stages.
    is_exact: bool = True

    def narrow(self, found: Timing | None) -> None:
        """Exclude bounds that cannot beat the best; `found` is the result under the bound, None if not run."""
        if found is not None:
            # Cuts with a slowest stage between the found one's and the bound have no smaller sum, so none is better.
            self.least_sum_s = found.first_s
            self.bound_s = math.nextafter(found.next_s, 0.0)
        # Never reached with one microbatch: the least sum is best, and the query done.
        # A better cut has a slowest stage of at most (best - least sum) / (m - 1).
        self.bound_s = min(self.bound_s, (self.best_s - self.least_sum_s) / (self.num_microbatches - 1))

    @property
    def is_done(self) -> bool:
        least_s = self.least_sum_s + (self.num_microbatches - 1) * self.tightest_s
        return self.bound_s <= self.tightest_s or least_s >= self.best_s * (1 - _TOLERANCE)


def find_templates(
    costs: StageCosts, node_counts: Iterable[int], *, microbatches_per_device: int = 4
) -> dict[int, PipelineTemplate]:
    """Return the best template for each number of nodes that can hold the model at all.

    A template of v devices is optimised for `microbatches_per_device * v` microbatches, at most `costs.max_in_flight`:
    with 4, that is the paper's Nb = 4S where stages have one device. Ties, up to one part in 10⁹, go to the most even
    stages. O(V·L·W) for all counts together plus O(V·L·W) for each bound tried.
    """
    per_node = costs.devices_per_node
    largest = costs.device_counts[-1]
    # All devices of a node are used, and every stage has a layer.
    wanted = sorted({count for count in node_counts if count >= 1 and count * per_node <= costs.num_layers * largest})
    if not wanted:
        return {}
    queries = _search(costs, wanted, microbatches_per_device, StageSearch(costs))
    # Only sizes whose result broke the memory limit pay for the search that counts stages.
    broken = [query.num_nodes for query in queries if not query.is_exact]
    if broken:
        counted = _search(costs, broken, microbatches_per_device, StageSearch(costs, counted=True))
        queries = [query for query in queries if query.is_exact] + counted
    return {
        query.num_nodes: query.best.template(costs)
        for query in sorted(queries, key=lambda query: query.num_nodes)
        if query.best is not None
    }


def _search(costs: StageCosts, node_counts: list[int], per_device: int, search: StageSearch) -> list[_Query]:
    per_node = costs.devices_per_node
    tightest = search.tightest(node_counts[-1] * per_node)
    queries = [
        _Query(
            num_nodes=count,
            num_devices=count * per_node,
            num_microbatches=max(1, min(costs.max_in_flight, per_device * count * per_node)),
            tightest_s=float(tightest[count * per_node]),
        )
        for count in node_counts
        if math.isfinite(tightest[count * per_node])
    ]
    if queries:
        found = search.least_sums([query.num_devices for query in queries])
        for query, cut in zip(queries, found, strict=True):
            query.least_sum_s = _keep(costs, query, cut).first_s
    _ask(costs, search, [query for query in queries if not query.is_done], tightest=True)
    pending = queries
    while pending := [query for query in pending if query.is_exact and not query.is_done]:
        _ask(costs, search, pending, tightest=False)
    return queries


def _ask(costs: StageCosts, search: StageSearch, queries: list[_Query], *, tightest: bool) -> None:
    """Run each query under its bound, or the tightest, keep better cuts, and narrow the bound."""
    if not queries:
        return
    bounds = [query.tightest_s if tightest else query.bound_s for query in queries]
    found = search.least_sums_within(bounds, [query.num_devices for query in queries])
    for query, cut in zip(queries, found, strict=True):
        timing = _keep(costs, query, cut)
        query.narrow(None if tightest else timing)


def _keep(costs: StageCosts, query: _Query, cut: Cut) -> Timing:
    """Make a cut the query's best if it is better; return its timing."""
    if costs.device_counts[-1] > 1:
        # The search without counts assumes the fewest stages, and so takes stages for quicker than they may be.
        query.is_exact = query.is_exact and not costs.recomputes and costs.fits(cut.template(costs))
    if cut.timing.step_s(query.num_microbatches) < query.best_s:
        query.best, query.best_s = cut, cut.timing.step_s(query.num_microbatches)
    return cut.timing
