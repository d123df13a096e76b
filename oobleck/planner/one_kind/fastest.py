"""Faster pipelines by their event-exact time, where bounds choose too coarsely.

A bound may be far from the step time where messages are slow or stages uneven. So the search cuts the pipelines that
the bounds choose again for their microbatches; it also chooses the sizes once more. The fastest wins, if its step is
truly shorter.
tools/bench/fastest_plan.py measures this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from oobleck.plan import PipelineTemplate
from oobleck.planner.costs import StageCosts, Timing
from oobleck.planner.instantiation import SizeOption, Sizing, bytes_reduction_s, choose_sizes, reduction_s
from oobleck.planner.makespan import MOST_ROUNDS, PassTimes
from oobleck.planner.templates import MOST_STAGES, Recut
from oobleck.planner.values import Cutter
from oobleck.planner.zero_bubble import LEAST_GAIN

# Other pipelines have to save this share of a step: a plan should not depend on the last digits of a profile.
_LEAST_GAIN = 0.005
# Templates of fewer bytes to reduce are tried where the reduction takes at least the one share of a step, and they save
# the other by their bound.
_LEAST_REDUCTION = 0.1
_LEAST_LIGHTER = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class FastPipelines:
    """Pipelines with their microbatches, and the event-exact time of their step, reduction included."""

    are_chosen: bool
    """Whether these are the ones that bounds choose, as they are."""
    templates: tuple[PipelineTemplate, ...]
    num_microbatches: tuple[int, ...]
    step_s: float


class ExactTimes:
    """Cached event-exact times of the templates of one cost table, under the fastest schedule that is allowed."""

    def __init__(
        self,
        costs: StageCosts,
        lighter: Callable[[PipelineTemplate], Sequence[PipelineTemplate]],
        cutter: Cutter | None = None,
    ) -> None:
        """Take what returns the templates of a template's nodes with fewer bytes to reduce."""
        self._costs, self._lighter, self._cutter = costs, lighter, cutter
        self._is_open = cutter is not None and cutter.is_open
        self._times = PassTimes(costs, splits=self._is_open)
        self._recut = Recut(costs, self._times)
        self._best: dict[tuple[object, ...], PipelineTemplate] = {}
        self._steps_s: dict[tuple[object, ...], float] = {}

    def step_s(
        self, template: PipelineTemplate, num_microbatches: int, speeds: tuple[float, ...] = (), *, reduce_s: float
    ) -> float:
        """Return the event-exact seconds of a step of one pipeline, without the reduction of `reduce_s`."""
        key = template, num_microbatches, speeds, reduce_s if self._is_open else 0.0
        if key not in self._steps_s:
            if template.num_chunks > 1:
                assert self._cutter is not None, "it has cut the chunks"
                self._steps_s[key] = self._cutter.step_s(template, num_microbatches, speeds or None)
            else:
                self._steps_s[key] = self._times.step_s(template, num_microbatches, speeds, reduce_s=key[-1])
        return self._steps_s[key]

    def cut_again(
        self,
        template: PipelineTemplate,
        num_microbatches: int,
        num_pipelines: int = 1,
        speeds: tuple[float, ...] = (),
    ) -> PipelineTemplate:
        """Return the template's devices with the fastest cut found for that many microbatches, reduction included."""
        rounded = _rounded(num_microbatches, template.num_stages)
        # A pipeline more or less needs no other cut either: a ring's share hardly depends on their number.
        reduction_s = bytes_reduction_s(self._costs.profile.network, 1 << round(math.log2(num_pipelines)))
        key = template, rounded, reduction_s, speeds
        if key not in self._best:
            starts = [template, *(() if speeds else self._light_start(template, rounded, reduction_s))]
            cuts = [self._recut.best(each, rounded, reduction_s=reduction_s, speeds=speeds) for each in starts]
            best = min(cuts, key=lambda cut: self._whole_s(cut, rounded, reduction_s)) if cuts[1:] else cuts[0]
            if self._is_open and not speeds:
                best = self.in_chunks(best, rounded, reduction_s * self._costs.reduced_bytes(best))
            self._best[key] = best
        return self._best[key]

    def in_chunks(self, template: PipelineTemplate, num_microbatches: int, reduce_s: float) -> PipelineTemplate:
        """Return the template cut into chunks where that saves time, or has to be."""
        if self._cutter is None or template.num_stages == 1 or template.num_chunks > 1:
            return template
        if self._is_open:
            # At best, chunks are as even as layers allow, and stages wait as much less as there are chunks.
            least_s, whole_s = self._costs.least_slowest_s(template), self._costs.timing(template).first_s
            waits_s = whole_s * (1 - 1 / template.num_stages) / self._cutter.num_chunks
            own_s = self.step_s(template, num_microbatches, reduce_s=reduce_s)
            if num_microbatches * least_s + waits_s > own_s * (1 - LEAST_GAIN):
                return template
        return self._cutter.cut(template, num_microbatches)

    def _light_start(
        self, template: PipelineTemplate, num_microbatches: int, reduction_s: float
    ) -> Sequence[PipelineTemplate]:
        """Return the template of fewer bytes to reduce that is best by its bound, if it is better than this one."""

        def bound_s(each: PipelineTemplate) -> float:
            return self._costs.timing(each).step_s(num_microbatches) + reduction_s * self._costs.reduced_bytes(each)

        # No lighter template is much better if the reduction takes hardly any time.
        own_s = bound_s(template)
        if reduction_s * self._costs.reduced_bytes(template) < _LEAST_REDUCTION * own_s:
            return ()
        best = min(self._lighter(template), key=bound_s, default=template)
        return (best,) if bound_s(best) < own_s * (1 - _LEAST_LIGHTER) else ()

    def _whole_s(self, template: PipelineTemplate, num_microbatches: int, reduction_s: float) -> float:
        reduce_s = reduction_s * self._costs.reduced_bytes(template)
        return self.step_s(template, num_microbatches, reduce_s=reduce_s) + reduce_s

    def fastest(
        self,
        templates: Mapping[int, PipelineTemplate],
        options: Mapping[int, SizeOption],
        chosen: Sizing,
        *,
        num_nodes: int,
        fewest: int,
        most: int,
    ) -> FastPipelines:
        """Return the chosen pipelines, or others if their step is truly shorter; O(sizes of up to 12 stages)."""
        total = sum(chosen.num_microbatches)
        as_chosen = self._pipelines(templates, chosen, again=False)
        measured = {
            size: self._option(
                templates[size], option, max(1, round(total * size / num_nodes)), len(chosen.num_microbatches)
            )
            for size, option in options.items()
        }
        others = choose_sizes(
            measured,
            num_nodes=num_nodes,
            num_microbatches=total,
            network=self._costs.profile.network,
            fewest=fewest,
            most=most,
        )
        sizings = (chosen, others) if others.sizes else (chosen,)
        candidates = [self._pipelines(templates, sizing, again=True) for sizing in sizings]
        best = min(candidates, key=lambda each: each.step_s)
        return best if best.step_s < as_chosen.step_s * (1 - _LEAST_GAIN) else as_chosen

    def _option(
        self, template: PipelineTemplate, option: SizeOption, num_microbatches: int, num_pipelines: int
    ) -> SizeOption:
        best = self.cut_again(template, num_microbatches, num_pipelines)
        if best is template and template.num_stages > MOST_STAGES and not self._is_open:
            return option
        reduced_bytes = self._costs.reduced_bytes(best)
        reduce_s = reduction_s(self._costs.profile.network, reduced_bytes, num_pipelines)
        return SizeOption(timing=self.timing(best, num_microbatches, reduce_s=reduce_s), reduced_bytes=reduced_bytes)

    def timing(
        self, template: PipelineTemplate, num_microbatches: int, speeds: tuple[float, ...] = (), *, reduce_s: float
    ) -> Timing:
        """Return the line through the event-exact times of that many microbatches and of twice as many."""
        step_s = self.step_s(template, num_microbatches, speeds, reduce_s=reduce_s)
        twice_s = self.step_s(template, 2 * num_microbatches, speeds, reduce_s=reduce_s)
        next_s = (twice_s - step_s) / num_microbatches
        # The first microbatch passes all stages, a further one only waits for the slowest.
        return Timing(
            first_s=max(next_s, step_s - (num_microbatches - 1) * next_s),
            next_s=next_s,
            most_microbatches=self.most_microbatches(template),
        )

    def most_microbatches(self, template: PipelineTemplate) -> float:
        """Return how many microbatches of its own a pipeline has memory for; infinity for any number."""
        if template.num_chunks > 1 and self._cutter is not None:
            return self._cutter.most_microbatches(template)
        return self._costs.most_microbatches(template)

    def _pipelines(self, templates: Mapping[int, PipelineTemplate], sizing: Sizing, *, again: bool) -> FastPipelines:
        """Return the pipelines of a sizing, with their templates as they are or cut again for their microbatches."""
        pairs = list(zip(sizing.sizes, sizing.num_microbatches, strict=True))
        found = {
            (size, count): self.cut_again(templates[size], count, len(pairs)) if again else templates[size]
            for size, count in sorted(set(pairs))
        }
        reduced_bytes = max(self._costs.reduced_bytes(template) for template in found.values())
        reduce_s = reduction_s(self._costs.profile.network, reduced_bytes, len(pairs))
        slowest_s = max(self.step_s(template, count, reduce_s=reduce_s) for (_, count), template in found.items())
        return FastPipelines(
            are_chosen=not again,
            templates=tuple(found[pair] for pair in pairs),
            num_microbatches=sizing.num_microbatches,
            step_s=slowest_s + reduce_s,
        )


def _rounded(num_microbatches: int, num_stages: int) -> int:
    """Return a number close to that of a step, so that a few microbatches more or fewer need no other cut."""
    # Up to here each microbatch is timed; from here on a further one takes a constant time.
    exact = MOST_ROUNDS * num_stages
    if num_microbatches <= exact:
        return num_microbatches
    return round(exact * 2 ** (round(4 * math.log2(num_microbatches / exact)) / 4))
