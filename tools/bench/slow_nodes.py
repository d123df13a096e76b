"""What a slow node costs: the predicted step where it gets fewer microbatches, is left out, or gets fewer layers.

    python tools/bench/slow_nodes.py

GPT-3 6.7B on A100s, as estimated; one node is slow. All columns are multiples of the step without it: of the plan as it
was, with the batch divided again; of the best plan of the other nodes; of the chosen plan, by the planner's
bound and by the event-exact timeline. `decided` is what it takes to decide, the first time and again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from oobleck.planner import (
    ExecutionPlan,
    Planner,
    PlannerSettings,
    Profile,
    device_sheet,
    estimate_profile,
    model_shape,
    with_speed,
)
from oobleck.planner.one_kind import OneKindCatalog
from oobleck.schedule.forecast import forecast
from tools.smoke import parse_arguments

CASES = ((4, 1), (8, 2), (16, 4), (64, 8))
"""Nodes, and the pipelines that are asked for."""
FACTORS = (1.1, 1.3, 1.5, 2.0, 3.0)
MICROBATCHES_A_PIPELINE = 64


def timeline_s(profile: Profile, plan: ExecutionPlan, node: str, factor: float) -> float:
    """Return the event-exact seconds of a step in which one node is slow."""
    slow = with_speed(profile, 1 / factor)
    return forecast(profile, plan, profile_of=lambda each: slow if each == node else profile).step_s


def row(profile: Profile, num_nodes: int, num_pipelines: int, factor: float) -> str:
    """Return a row of the table."""
    nodes = [f"node{index:02d}" for index in range(num_nodes)]
    settings = PlannerSettings(
        num_microbatches=MICROBATCHES_A_PIPELINE * num_pipelines, num_pipelines=num_pipelines, fault_threshold=0
    )
    planner, catalog = Planner(profile, settings), OneKindCatalog(profile, settings)
    usual = planner.initial_plan(nodes)
    victim = usual.plan.pipelines[0].nodes[1]
    as_it_was = [(catalog.form_of(pipeline), pipeline.nodes) for pipeline in usual.plan.pipelines]
    _, divided_s = catalog.build_plan(as_it_was, (), {victim: 1 / factor})
    without_s = planner.initial_plan([node for node in nodes if node != victim]).bound_step_s
    took_s = []
    for _ in range(2):
        began_s = time.perf_counter()
        decision = planner.reconfigure(usual.plan, slow={victim: factor})
        took_s.append(time.perf_counter() - began_s)
    exact = timeline_s(profile, decision.plan, victim, factor) / forecast(profile, usual.plan).step_s
    bounds = [each / usual.bound_step_s for each in (divided_s, without_s, decision.bound_step_s)]
    cells = [f"{num_nodes}", f"{num_pipelines}", f"{factor:g}", *(f"{each:.3f}" for each in (*bounds, exact))]
    return "| " + " | ".join([*cells, " / ".join(f"{1e3 * each:.0f} ms" for each in took_s)]) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=max(nodes for nodes, _ in CASES), help="leave out larger cases")
    given = parse_arguments(parser, arguments, nodes=4)
    profile = estimate_profile(
        model_shape("gpt3-6.7b"),
        device_sheet("A100"),
        microbatch_size=2,
        sequence_length=2048,
        precision="bfloat16",
        recompute="all",
    )
    print("| nodes | pipelines | factor | fewer microbatches | left out | chosen | by the timeline | decided |")
    print("|---|---|---|---|---|---|---|---|")
    for num_nodes, num_pipelines in CASES:
        for factor in FACTORS if num_nodes <= given.nodes else ():
            print(row(profile, num_nodes, num_pipelines, factor), flush=True)


if __name__ == "__main__":
    main()
