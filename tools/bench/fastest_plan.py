"""Measure how much slower a chosen plan is than the best of all, both by their event-exact timelines.

    python tools/bench/fastest_plan.py            200 random profiles, a minute
    python tools/bench/fastest_plan.py --timing   how long plans for many nodes take to choose

All cuts of all sizes that fit the memory, all multisets of sizes, all divisions of the batch are candidates; messages
and the reduction of gradients count. Profiles are drawn from seeds: up to 10 layers and 9 nodes, layers uneven by a
factor of six, messages from none to as long as a pass, memory roomy or tight.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from oobleck.errors import PlanningError
from oobleck.planner import (
    DeviceProfile,
    ExecutionPlan,
    LayerProfile,
    NetworkProfile,
    PipelineTemplate,
    Planner,
    PlannerSettings,
    Profile,
    StageTemplate,
)
from oobleck.planner.costs import StageCosts
from oobleck.planner.instantiation import reduction_s
from oobleck.planner.makespan import PassTimes, stops_of
from oobleck.planner.one_kind import OneKindCatalog
from oobleck.schedule.forecast import forecast
from tools.bench.planner import KINDS, make_profile
from tools.smoke import parse_arguments

MILLION = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A planner's task, and what it chose."""

    profile: Profile
    settings: PlannerSettings
    num_nodes: int
    plan: ExecutionPlan


def draw_profile(draw: random.Random) -> Profile:
    num_layers = draw.randint(4, 10)
    slowness = draw.choice([0.0, 0.01, 0.05, 0.2, 0.5])
    layers = []
    for index in range(num_layers):
        forward_s, param_bytes = draw.uniform(0.3, 2.0), draw.randint(1, 100)
        layers.append(
            LayerProfile(
                name=f"layer {index}",
                forward_s={1: forward_s},
                backward_s={1: forward_s * draw.uniform(1.0, 3.0)},
                param_bytes=param_bytes,
                optimizer_bytes=2 * param_bytes,
                activation_bytes=draw.randint(1, 10),
                output_bytes=int(MILLION * slowness * draw.uniform(0.0, 2.0)),
            )
        )
    return Profile(
        model="random",
        microbatch_size=1,
        sequence_length=1,
        layers=tuple(layers),
        device=DeviceProfile(name="bench", memory_bytes=draw.choice([MILLION, MILLION, 200 * num_layers])),
        network=NetworkProfile(
            inter_node_bytes_per_s=1e6,
            inter_node_latency_s=1e-4,
            intra_node_bytes_per_s=1e7,
            intra_node_latency_s=1e-5,
        ),
    )


def draw_case(seed: int) -> Case | None:
    """Draw a case and plan for it; None where the nodes cannot hold the model."""
    draw = random.Random(seed)
    profile = draw_profile(draw)
    num_nodes = draw.randint(2, 9)
    settings = PlannerSettings(num_microbatches=num_nodes * draw.choice([1, 2, 4]), fault_threshold=draw.randint(0, 1))
    try:
        decision = Planner(profile, settings).initial_plan([f"node{number}" for number in range(num_nodes)])
    except PlanningError:
        return None
    return Case(profile=profile, settings=settings, num_nodes=num_nodes, plan=decision.plan)


def all_cuts(costs: StageCosts, size: int) -> list[PipelineTemplate]:
    """All pipelines of a size that fit."""
    templates = []
    for cuts in itertools.combinations(range(1, costs.num_layers), size - 1):
        stops = (0, *cuts, costs.num_layers)
        template = PipelineTemplate(
            stages=tuple(
                StageTemplate(first_layer=first, stop_layer=stop, node_index=index)
                for index, (first, stop) in enumerate(itertools.pairwise(stops))
            )
        )
        if costs.fits(template):
            templates.append(template)
    return templates


def multisets(sizes: Sequence[int], num_nodes: int, most: int) -> Iterator[tuple[int, ...]]:
    yield ()
    for index, size in enumerate(sizes if most else ()):
        if size <= num_nodes:
            for others in multisets(sizes[index:], num_nodes - size, most - 1):
                yield (size, *others)


def deal(steps_s: Mapping[int, Sequence[float]], sizes: Sequence[int], num_microbatches: int) -> float:
    """The least seconds of the slowest pipeline; steps take longer with each microbatch, so one at a time will do."""
    counts = [1] * len(sizes)
    for _ in range(num_microbatches - len(sizes)):
        index = min(range(len(sizes)), key=lambda each: steps_s[sizes[each]][counts[each] + 1])
        counts[index] += 1
    return max(steps_s[size][count] for size, count in zip(sizes, counts, strict=True))


def best_s(case: Case) -> float:
    """The shortest step of all plans. Each pipeline is cut as is best for its microbatches."""
    catalog, total = OneKindCatalog(case.profile, case.settings), case.settings.num_microbatches
    times = PassTimes(StageCosts(case.profile, max_in_flight=total))
    fewest, most = catalog.num_pipelines((case.num_nodes,))
    steps_s: dict[int, list[float]] = {}
    for size in catalog.options(case.num_nodes):
        templates = all_cuts(catalog.costs.of[0], size)
        stops = np.concatenate([stops_of(template) for template in templates])
        steps_s[size] = [0.0]
        for count in range(1, total + 1):
            steps_s[size].append(float(times.steps_s(templates[0], stops, count).min()))
    return min(
        deal(steps_s, sizes, total)
        + reduction_s(case.profile.network, least_reduced_bytes(case.profile, max(sizes)), len(sizes))
        for sizes in multisets(sorted(steps_s), case.num_nodes, most)
        if max(1, fewest) <= len(sizes) <= total
    )


def least_reduced_bytes(profile: Profile, size: int) -> int:
    """A bound from below for the stage with the most parameters of a pipeline of so many stages."""
    params = [layer.param_bytes for layer in profile.layers]
    return max(max(params), sum(params) // size)


def measure_losses(num_cases: int) -> None:
    losses: list[float] = []
    seeds = itertools.count()
    while len(losses) < num_cases:
        case = draw_case(next(seeds))
        if case is not None:
            losses.append(max(0.0, forecast(case.profile, case.plan).step_s / best_s(case) - 1))  # not -1e-16
    over = sum(loss > 0.01 for loss in losses)
    print(
        f"{num_cases} random profiles: chosen plans take {100 * statistics.mean(losses):.2f} % longer than the best on "
        f"average, {100 * max(losses):.2f} % at most; {over} of them over 1 %"
    )


def measure_timing(node_counts: Sequence[int]) -> None:
    print("an initial plan, 50 layers, the model needs 4 nodes, milliseconds; a loss of 8 nodes after it")
    for kind in KINDS:
        profile = make_profile(kind, 50, seed=1, smallest=4)
        for num_nodes in node_counts:
            planner = Planner(profile, PlannerSettings(num_microbatches=4 * num_nodes))
            start = time.perf_counter()
            plan = planner.initial_plan([f"node{number:05d}" for number in range(num_nodes)]).plan
            planned = time.perf_counter()
            planner.reconfigure(plan, lost=random.Random(0).sample(plan.nodes, 8))
            decided = time.perf_counter()
            print(f"{kind:>10} N={num_nodes}: {1000 * (planned - start):.0f}, {1000 * (decided - planned):.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare chosen plans with the best of all.")
    parser.add_argument("--cases", type=int, default=200, help="random profiles")
    parser.add_argument("--nodes", type=int, nargs="+", default=(64, 1024, 4096), help="for --timing")
    parser.add_argument("--timing", action="store_true", help="measure how long choosing takes instead")
    arguments = parse_arguments(parser, cases=3, nodes=(64,))
    if arguments.smoke or arguments.timing:
        measure_timing(arguments.nodes)
    if arguments.smoke or not arguments.timing:
        measure_losses(arguments.cases)


if __name__ == "__main__":
    main()
