"""Measure the planner: the time of templates, instantiation and reconfiguration, as median and quickest run.

On a machine with other work the quickest run tells more of the planner, the median more of the machine.

    python tools/bench/planner.py            all of it, a minute or two
    python tools/bench/planner.py --paper    predictions for the models of the Oobleck paper instead

The profiles are made here from seeds: uniform layers; GPT-like ones with a light embedding and a heavier head;
and random ones, uneven in time and in what they send.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from oobleck.planner import (
    DeviceProfile,
    LayerProfile,
    NetworkProfile,
    Planner,
    PlannerSettings,
    Profile,
    device_sheet,
    estimate_profile,
    model_shape,
)
from oobleck.planner.instantiation import choose_sizes
from oobleck.planner.one_kind import OneKindCatalog
from tools.bench.paper_objective import find_paper_templates
from tools.smoke import parse_arguments

KINDS = ("uniform", "gpt-like", "random")
LAYER_BYTES = 10**7

PAPER = {
    # Model: (shape, samples a step, samples a microbatch, tokens a sample, samples/s at 30, 29, … 15 nodes).
    "BERT-Large": (
        "bert-large",
        8192,
        32,
        512,
        (
            368.25,
            362.22,
            328.35,
            327.78,
            329.14,
            307.21,
            304.45,
            278.53,
            285.84,
            260.31,
            261.68,
            243.56,
            228.05,
            209.21,
            214.80,
            192.30,
        ),
    ),
    "GPT-2": (
        "gpt2-medium",
        1024,
        8,
        1024,
        (
            110.01,
            109.67,
            98.84,
            100.07,
            99.48,
            91.02,
            90.52,
            83.40,
            83.33,
            76.95,
            76.71,
            71.59,
            66.75,
            63.02,
            62.75,
            55.92,
        ),
    ),
    "GPT-3 medium": (
        "gpt3-medium",
        819,
        7,
        2048,
        (
            38.468,
            37.186,
            35.904,
            34.622,
            33.339,
            31.666,
            30.241,
            28.964,
            27.775,
            26.685,
            25.689,
            23.825,
            23.034,
            21.577,
            20.865,
            19.103,
        ),
    ),
    "GPT-3 2.7B": (
        "gpt3-2.7b",
        512,
        2,
        2048,
        (
            9.2143,
            8.9072,
            8.6000,
            8.2929,
            7.9857,
            7.6271,
            7.5123,
            7.4354,
            7.0528,
            6.7048,
            6.7973,
            6.1050,
            6.1151,
            5.6307,
            5.6306,
            5.1307,
        ),
    ),
    "GPT-3 6.7B": (
        "gpt3-6.7b",
        1024,
        2,
        2048,
        (
            5.5078,
            5.3242,
            5.1406,
            4.9570,
            4.7734,
            4.8088,
            4.3299,
            4.1852,
            3.9472,
            4.0109,
            4.1544,
            3.7123,
            3.5933,
            3.2840,
            3.5309,
            0.0,
        ),
    ),
}


def make_profile(kind: str, num_layers: int, seed: int, *, smallest: int = 1) -> Profile:
    """A profile whose model needs about `smallest` nodes of one device."""
    draw = random.Random(seed)
    layers = []
    for index in range(num_layers):
        forward_s, output_bytes = 0.01, 10**7
        if kind == "gpt-like":
            forward_s = {0: 0.001, num_layers - 1: 0.013}.get(index, 0.01)
        elif kind == "random":
            forward_s, output_bytes = draw.uniform(0.001, 0.02), draw.randrange(10**8)
        layers.append(
            LayerProfile(
                name=f"layer {index}",
                forward_s={1: forward_s},
                backward_s={1: 2 * forward_s},
                param_bytes=LAYER_BYTES,
                optimizer_bytes=2 * LAYER_BYTES,
                activation_bytes=LAYER_BYTES // 100,
                output_bytes=output_bytes,
            )
        )
    memory_bytes = 4 * LAYER_BYTES * num_layers // smallest + LAYER_BYTES * (num_layers if smallest == 1 else 6)
    return Profile(
        model=kind,
        microbatch_size=1,
        sequence_length=1,
        layers=tuple(layers),
        device=DeviceProfile(name="bench", memory_bytes=memory_bytes),
        network=NetworkProfile(
            inter_node_bytes_per_s=2.5e10,
            inter_node_latency_s=5e-6,
            intra_node_bytes_per_s=5e10,
            intra_node_latency_s=2e-6,
        ),
    )


def measure(run: Callable[[], object], repeats: int) -> str:
    """Milliseconds of a call after one that warms up: the median, and the quickest in brackets."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return show(times)


def show(times: list[float]) -> str:
    return f"{1000 * statistics.median(times):7.1f} ({1000 * min(times):.1f})"


def nodes(count: int) -> list[str]:
    return [f"node{index:05d}" for index in range(count)]


def find_all(profile: Profile, settings: PlannerSettings, num_nodes: int) -> None:
    OneKindCatalog(profile, settings).options(num_nodes)


def bench_templates(repeats: int, layer_counts: Sequence[int], node_counts: Sequence[int]) -> None:
    print("all templates for 1 to N nodes, one device each, milliseconds: median (quickest)")
    print(f"{'profile':>10} {'layers':>7} " + " ".join(f"{'N=' + str(count):>15}" for count in node_counts))
    for kind in KINDS:
        for num_layers in layer_counts:
            row = []
            for count in node_counts:
                profile = make_profile(kind, num_layers, seed=num_layers)
                settings = PlannerSettings(num_microbatches=1024)

                row.append(measure(partial(find_all, profile, settings, count), repeats))
            print(f"{kind:>10} {num_layers:>7} " + " ".join(f"{value:>15}" for value in row))


def bench_paper_objective(repeats: int, num_layers: int, num_nodes: int) -> None:
    print(f"\nthe same for {num_layers} layers and 1 to {num_nodes} nodes under the paper's objective")
    for kind in KINDS:
        profile = make_profile(kind, num_layers, seed=num_layers)
        print(f"{kind:>10} {measure(partial(find_paper_templates, profile, range(1, num_nodes + 1)), repeats)}")


def bench_devices(repeats: int) -> None:
    print("\nall templates for 1 to 8 nodes of g devices, stages of 1 to g, 34 layers, milliseconds: median (quickest)")
    for per_node in (1, 2, 4, 8):
        profile = estimate_profile(
            model_shape("gpt3-6.7b"),
            device_sheet("A100"),
            microbatch_size=1,
            sequence_length=2048,
            device_counts=(1, 2, 4, 8),
        )
        settings = PlannerSettings(num_microbatches=1024, devices_per_node=per_node, max_devices_per_stage=per_node)

        milliseconds = measure(partial(find_all, profile, settings, 8), repeats)
        print(f"{'g=' + str(per_node):>10} {milliseconds}")


def bench_instantiation(repeats: int, node_counts: Sequence[int]) -> None:
    print("\ninstantiation with batches, 50 layers, the model needs 4 nodes, milliseconds: median (quickest)")
    print(f"{'profile':>10} {'batch':>10} " + " ".join(f"{'N=' + str(count):>15}" for count in node_counts))
    for kind in KINDS:
        for share in (4, 16):
            row = []
            for count in node_counts:
                settings = PlannerSettings(num_microbatches=share * count)
                catalog = OneKindCatalog(make_profile(kind, 50, seed=1, smallest=4), settings)
                fewest, most = catalog.num_pipelines((count,))
                choose = partial(
                    choose_sizes,
                    catalog.options(count),
                    num_nodes=count,
                    num_microbatches=settings.num_microbatches,
                    network=catalog.profile.network,
                    fewest=fewest,
                    most=most,
                )
                row.append(measure(choose, repeats))
            print(f"{kind:>10} {f'{share} a node':>10} " + " ".join(f"{value:>15}" for value in row))


def bench_reconfiguration(repeats: int, num_nodes: int) -> None:
    print(f"\na decision with 8 of {num_nodes:,} nodes lost at once, milliseconds: median (quickest) over losses")
    for kind in KINDS:
        planner = Planner(make_profile(kind, 50, seed=1, smallest=4), PlannerSettings(num_microbatches=4 * num_nodes))
        plan = planner.initial_plan(nodes(num_nodes)).plan
        draw = random.Random(0)
        planner.reconfigure(plan, lost=draw.sample(plan.nodes, 8))
        times, actions = [], []
        for _ in range(repeats):
            lost = draw.sample(plan.nodes, 8)
            start = time.perf_counter()
            actions.append(planner.reconfigure(plan, lost=lost).action)
            times.append(time.perf_counter() - start)
        print(f"{kind:>10} {show(times)}   {', '.join(sorted(set(actions)))}")


def predict(model: str, num_nodes: int) -> float:
    """Samples a second that the planner predicts for a model of the paper on A40s, in float32."""
    return PAPER[model][1] / paper_planner(model).initial_plan(nodes(num_nodes)).predicted_step_s


@cache
def paper_planner(model: str) -> Planner:
    """The planner for a model of the paper; templates that it has found serve all numbers of nodes."""
    shape, samples, microbatch, tokens, _ = PAPER[model]
    profile = estimate_profile(
        model_shape(shape),
        device_sheet("A40"),
        microbatch_size=microbatch,
        sequence_length=tokens,
        precision="float32",
        recompute="all",
    )
    return Planner(profile, PlannerSettings(num_microbatches=samples // microbatch))


def measured(model: str, num_nodes: int) -> float:
    """Samples a second that the paper reports."""
    return PAPER[model][4][30 - num_nodes]


def print_paper() -> None:
    print("| nodes | " + " | ".join(PAPER) + " |")
    print("|---" * (len(PAPER) + 1) + "|")
    for count in range(30, 14, -1):
        cells = [f"{predict(model, count):.3g} / {measured(model, count):.3g}" for model in PAPER]
        print(f"| {count} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the planner.")
    parser.add_argument("--paper", action="store_true", help="print predictions for the paper's models instead")
    parser.add_argument("--repeats", type=int, default=7, help="runs of which the median is taken")
    parser.add_argument("--layers", type=int, nargs="+", default=(26, 50, 98), help="of the models with templates")
    parser.add_argument("--nodes", type=int, nargs="+", default=(16, 32, 64), help="up to which there are templates")
    parser.add_argument("--clusters", type=int, nargs="+", default=(64, 512, 4096), help="nodes to instantiate on")
    parser.add_argument("--losing", type=int, default=1024, help="nodes of which eight are lost")
    arguments = parse_arguments(parser, repeats=1, layers=(26,), nodes=(16,), clusters=(64,), losing=64)
    if arguments.paper:
        print_paper()
        return
    bench_templates(arguments.repeats, arguments.layers, arguments.nodes)
    bench_paper_objective(arguments.repeats, arguments.layers[-1], arguments.nodes[0])
    bench_devices(arguments.repeats)
    bench_instantiation(arguments.repeats, arguments.clusters)
    bench_reconfiguration(arguments.repeats, arguments.losing)


if __name__ == "__main__":
    main()
