"""Measure plans for nodes that are not alike: how long they take to find, and what they save.

    python tools/bench/mixed.py        half a minute; seconds are those of a processor

GPT-like layers on A100-like and A40-like nodes, 2.1 times slower and with less memory. Beside the plan over kinds:
pipelines with nodes of one kind each, and a plan that takes all nodes as if they were of the slower kind.

Then 50 layers in settings that come close to those which other planners have published: few and many nodes of two and
of three kinds, and nodes of one kind of which one has become slow, beside the plan that goes on as it is.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from oobleck.errors import PlanningError
from oobleck.planner import (
    ExecutionPlan,
    NodeKind,
    Planner,
    PlannerSettings,
    Profile,
    device_sheet,
    estimate_profile,
    model_shape,
)
from oobleck.planner.costs import StageCosts
from oobleck.planner.profiles import ModelShape
from tools.smoke import parse_arguments

DEVICES = ("A100", "A40")
THREE = ("H100", "A100", "A40")
NUM_BLOCKS = 48
"""With the embedding and the head, 50 layers."""


def make_kinds(shape: ModelShape, devices_per_node: int, devices: Sequence[str] = DEVICES) -> tuple[NodeKind, ...]:
    """The kinds' profiles, estimated from data sheets."""
    return tuple(
        NodeKind(name=name, profile=make_profile(shape, name), devices_per_node=devices_per_node) for name in devices
    )


def make_profile(shape: ModelShape, device: str) -> Profile:
    return estimate_profile(shape, device_sheet(device), microbatch_size=1, sequence_length=2048, recompute="all")


def measure(model: str, per_kind: int, devices_per_node: int) -> str:
    """A row: seconds of a plan and of a loss, and the step beside those of other plans."""
    kinds = make_kinds(model_shape(model), devices_per_node)
    settings = PlannerSettings(num_microbatches=8 * per_kind * devices_per_node)
    kind_of = {f"{name}-{number}": name for name in DEVICES for number in range(per_kind)}
    names = list(kind_of)
    planner = Planner(kinds, settings, kind_of)
    start = time.process_time()
    decision = planner.initial_plan(names)
    planned = time.process_time()
    planner.reconfigure(decision.plan, lost=[decision.plan.nodes[0]])
    decided = time.process_time()
    step_s = decision.predicted_step_s
    apart = predicted_s(Planner(kinds, settings, kind_of, mixes=False), names)
    slower = dict.fromkeys(names, DEVICES[-1])
    alike = predicted_s(Planner(kinds, settings, slower), names)
    return (
        f"| {model} | {per_kind} + {per_kind} | {devices_per_node} | {planned - start:.2f} | {decided - planned:.3f} | "
        f"{step_s:.1f} | {compared(apart, step_s)} | {compared(alike, step_s)} |"
    )


def predicted_s(planner: Planner, names: list[str]) -> float | None:
    try:
        return planner.initial_plan(names).predicted_step_s
    except PlanningError:
        return None


def compared(other_s: float | None, step_s: float) -> str:
    return "–" if other_s is None else f"{other_s / step_s:.2f}×"


def measure_kinds(devices: Sequence[str], per_kind: int) -> str:
    """A row: 50 layers on so many nodes of each kind, and the step beside that of a plan for the slowest kind alone."""
    shape = replace(model_shape("gpt3-2.7b"), num_blocks=NUM_BLOCKS)
    kinds = make_kinds(shape, 1, devices)
    settings = PlannerSettings(num_microbatches=16 * per_kind * len(devices), fault_threshold=min(1, per_kind - 1))
    kind_of = {f"{name}-{number}": name for name in devices for number in range(per_kind)}
    began_s = time.process_time()
    decision = Planner(kinds, settings, kind_of).initial_plan(list(kind_of))
    took_s = time.process_time() - began_s
    alike = Planner(kinds, settings, dict.fromkeys(kind_of, devices[-1]))
    other_s = predicted_s(alike, list(kind_of))
    where = " + ".join(f"{per_kind} {name}" for name in devices)
    return f"| 50 layers, {where} | {took_s:.2f} | {compared(other_s, decision.predicted_step_s)} |"


def measure_straggler(num_nodes: int, factor: float) -> str:
    """A row: one of several nodes becomes slow; the step that follows beside that of the plan as it is."""
    profile = make_profile(replace(model_shape("gpt3-2.7b"), num_blocks=NUM_BLOCKS), "A100")
    settings = PlannerSettings(num_microbatches=16 * num_nodes)
    names = [f"node{number:02}" for number in range(num_nodes)]
    planner = Planner(profile, settings)
    before = planner.initial_plan(names)
    slow = {before.plan.nodes[0]: factor}
    began_s = time.process_time()
    after = planner.reconfigure(before.plan, slow=slow)
    took_s = time.process_time() - began_s
    reduction_s = before.bound_step_s - slowest_s(profile, settings, before.plan, {})
    as_it_is_s = slowest_s(profile, settings, before.plan, slow) + reduction_s
    ratio = compared(as_it_is_s, after.bound_step_s)
    return f"| 50 layers, {num_nodes} A100, one {factor:g} times slower | {took_s:.2f} | {ratio} |"


def slowest_s(profile: Profile, settings: PlannerSettings, plan: ExecutionPlan, slow: Mapping[str, float]) -> float:
    """The seconds of a plan's slowest pipeline, as the planner counts them, where some nodes are slow."""
    costs = StageCosts(profile, max_in_flight=settings.num_microbatches)
    return max(
        costs.timing(each.template, [1 / slow.get(node, 1.0) for node in each.nodes]).step_s(each.num_microbatches)
        for each in plan.pipelines
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure plans for two kinds of nodes.")
    parser.add_argument("--models", nargs="+", default=("gpt3-2.7b", "gpt3-6.7b", "gpt3-13b"))
    parser.add_argument("--nodes", type=int, nargs="+", default=(8, 16, 32), help="of each kind")
    parser.add_argument("--devices", type=int, nargs="+", default=(1, 8), help="of a node")
    parser.add_argument("--of-two", type=int, nargs="+", default=(16, 32), help="nodes of each of two kinds")
    parser.add_argument("--of-three", type=int, nargs="+", default=(1, 8), help="nodes of each of three kinds")
    parser.add_argument("--stragglers", type=float, nargs="+", default=(2.0, 5.0), help="how slow one of 16 becomes")
    arguments = parse_arguments(
        parser, models=("gpt3-2.7b",), nodes=(4,), devices=(1, 8), of_two=(4,), of_three=(1,), stragglers=(2.0,)
    )
    print("| model | nodes | devices | plan, s | a loss, s | step, s | one kind each | all as the slower |")
    print("|---|---|---|---|---|---|---|---|")
    for model in arguments.models:
        for devices_per_node in arguments.devices:
            for per_kind in arguments.nodes:
                print(measure(model, per_kind, devices_per_node))
    print()
    print("| setting | plan, s | beside the same plan for all, or the plan as it was |")
    print("|---|---|---|")
    for devices, counts in ((DEVICES, arguments.of_two), (THREE, arguments.of_three)):
        for per_kind in counts:
            print(measure_kinds(devices, per_kind))
    for factor in arguments.stragglers:
        print(measure_straggler(16, factor))


if __name__ == "__main__":
    main()
