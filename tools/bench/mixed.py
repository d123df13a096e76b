"""Measure plans for two kinds of nodes: how long they take to find, and what they save.

    python tools/bench/mixed.py        half a minute

GPT-like layers on A100-like and A40-like nodes, 2.1 times slower and with less memory. Beside the plan over kinds:
pipelines with nodes of one kind each, and a plan that takes all nodes as if they were of the slower kind.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from oobleck.errors import PlanningError
from oobleck.planner import MixedPlanner, NodeKind, PlannerSettings, device_sheet, estimate_profile, model_shape
from tools.smoke import parse_arguments

DEVICES = ("A100", "A40")


def make_kinds(model: str, devices_per_node: int) -> tuple[NodeKind, ...]:
    """The kinds' profiles, estimated from data sheets."""
    return tuple(
        NodeKind(
            name=name,
            profile=estimate_profile(
                model_shape(model),
                device_sheet(name),
                microbatch_size=1,
                sequence_length=2048,
                activation_checkpointing=True,
            ),
            devices_per_node=devices_per_node,
        )
        for name in DEVICES
    )


def measure(model: str, per_kind: int, devices_per_node: int) -> str:
    """A row: seconds of a plan and of a loss, and the step beside those of other plans."""
    kinds = make_kinds(model, devices_per_node)
    settings = PlannerSettings(num_microbatches=8 * per_kind * devices_per_node)
    kind_of = {f"{name}-{number}": name for name in DEVICES for number in range(per_kind)}
    names = list(kind_of)
    planner = MixedPlanner(kinds, settings, kind_of)
    start = time.perf_counter()
    decision = planner.initial_plan(names)
    planned = time.perf_counter()
    planner.reconfigure(decision.plan, lost=[decision.plan.nodes[0]])
    decided = time.perf_counter()
    step_s = decision.predicted_step_s
    apart = predicted_s(MixedPlanner(kinds, settings, kind_of, mixes=False), names)
    slower = dict.fromkeys(names, DEVICES[-1])
    alike = predicted_s(MixedPlanner(kinds, settings, slower), names)
    return (
        f"| {model} | {per_kind} + {per_kind} | {devices_per_node} | {planned - start:.2f} | {decided - planned:.3f} | "
        f"{step_s:.1f} | {compared(apart, step_s)} | {compared(alike, step_s)} |"
    )


def predicted_s(planner: MixedPlanner, names: list[str]) -> float | None:
    try:
        return planner.initial_plan(names).predicted_step_s
    except PlanningError:
        return None


def compared(other_s: float | None, step_s: float) -> str:
    return "–" if other_s is None else f"{other_s / step_s:.2f}×"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure plans for two kinds of nodes.")
    parser.add_argument("--models", nargs="+", default=("gpt3-2.7b", "gpt3-6.7b", "gpt3-13b"))
    parser.add_argument("--nodes", type=int, nargs="+", default=(8, 16, 32), help="of each kind")
    parser.add_argument("--devices", type=int, nargs="+", default=(1, 8), help="of a node")
    arguments = parse_arguments(parser, models=("gpt3-2.7b",), nodes=(4,), devices=(1, 8))
    print("| model | nodes | devices | plan, s | a loss, s | step, s | one kind each | all as the slower |")
    print("|---|---|---|---|---|---|---|---|")
    for model in arguments.models:
        for devices_per_node in arguments.devices:
            for per_kind in arguments.nodes:
                print(measure(model, per_kind, devices_per_node))


if __name__ == "__main__":
    main()
