"""A figure of the SOSP'23 paper again: throughput as failures become more frequent, for two systems.

    python examples/failure_rates.py                 # prints the table and writes failure_rates.svg
    python examples/failure_rates.py --model gpt2 --microbatch 8 --global-batch 1024 --samples-per-s 110

The paper loses one of 30 A40s in each interval, until 15 are left, and compares the throughput of systems with a
GPT-3 of 2.7B parameters. This script does the same in the simulator, and shows the library: traces, settings with
costs of one's own, `simulate`, `repeat`, and pictures. Each part can be pasted into a cell of a notebook.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from pathlib import Path

from oobleck.planner import Planner, PlannerSettings, device_sheet, estimate_profile, model_shape, with_speed
from oobleck.schedule.forecast import forecast
from oobleck.sim import repeat, simulate
from oobleck.sim.sweep import SweepSettings
from oobleck.sim.trace import Lost, Trace
from oobleck.ui.pictures import bars_svg, outcomes_svg

INTERVALS_S = {"6h": 21_600.0, "3h": 10_800.0, "1h": 3600.0, "30m": 1800.0, "10m": 600.0}
PAPER = {
    "Oobleck": dict(zip(INTERVALS_S, (7.29, 7.28, 7.23, 7.18, 6.89), strict=True)),
    "Varuna": dict(zip(INTERVALS_S, (7.27, 7.12, 6.54, 5.83, 1.76), strict=True)),
}
"""Samples/s of the 2.7B model, from the paper's simulator."""


# %% Traces: one node is lost in each interval. The seed says which.
def make_trace(interval_s: float, seed: int, *, most: int = 30, fewest: int = 15) -> Trace:
    nodes = tuple(f"node{number}" for number in range(most))
    lost = random.Random(seed).sample(nodes, most - fewest)
    events = tuple(Lost(t_s=interval_s * (index + 1), node=node) for index, node in enumerate(lost))
    return Trace(duration_s=interval_s * (most - fewest + 1), nodes=nodes, start=nodes, events=events)


# %% The job, on a profile that is estimated from data sheets, at the speed that the paper measured on all 30 nodes.
# `oobleck profile` measures a profile of your own.
def make_settings(model: str, *, microbatch_size: int, global_batch_size: int, samples_per_s: float) -> SweepSettings:
    profile = estimate_profile(
        model_shape(model),
        device_sheet("A40"),
        microbatch_size=microbatch_size,
        sequence_length=min(2048, model_shape(model).num_positions or 2048),
        recompute="all",
    )
    settings = SweepSettings(profile=profile, global_batch_size=global_batch_size)
    decision = make_planner(settings).initial_plan([f"node{number}" for number in range(30)])
    usual = global_batch_size / forecast(profile, decision.plan).step_s
    return replace(settings, profile=with_speed(profile, samples_per_s / usual))


def make_planner(settings: SweepSettings) -> Planner:
    return Planner(settings.profile, PlannerSettings(num_microbatches=settings.num_microbatches))


# %% Costs are numbers. These are the paper's for Varuna: a checkpoint stops training for 50 s, a restart for 465 s.
def as_in_the_paper(settings: SweepSettings) -> SweepSettings:
    costs = replace(
        settings.costs,
        checkpoint_write_s=50.0,
        node_start_s=465.0,
        node_start_node_s=0.0,
        checkpoint_read_s=0.0,
        checkpoint_bytes_per_s=0.0,
    )
    # It writes one every ten steps, at the 9 samples/s of 23 to 30 nodes.
    return replace(settings, costs=costs, checkpoint_interval_s=10 * settings.global_batch_size / 9.0)


# %% A plan, and its exact step beside the planner's bound.
def show_plan(settings: SweepSettings, num_nodes: int) -> None:
    decision = make_planner(settings).initial_plan([f"node{number}" for number in range(num_nodes)])
    exact_s = forecast(settings.profile, decision.plan).step_s
    print(f"{decision.reason}\nstep: {exact_s:.2f} s; the planner's bound: {decision.predicted_step_s:.2f} s\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt3-2.7b")
    parser.add_argument("--microbatch", type=int, default=2)
    parser.add_argument("--global-batch", type=int, default=512)
    parser.add_argument("--samples-per-s", type=float, default=9.2143, help="of 30 nodes without failures")
    parser.add_argument("--intervals", default=",".join(INTERVALS_S))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("failure_rates.svg"))
    given = parser.parse_args()
    settings = make_settings(
        given.model,
        microbatch_size=given.microbatch,
        global_batch_size=given.global_batch,
        samples_per_s=given.samples_per_s,
    )
    show_plan(settings, 30)

    # %% Many runs, with confidence intervals.
    systems = {
        "Oobleck": ("oobleck", settings),
        "Varuna, the paper's costs": ("varuna", as_in_the_paper(settings)),
        "Varuna, equal costs": ("varuna", settings),
    }
    intervals = given.intervals.split(",")
    rates: dict[str, list[float]] = {name: [] for name in systems}
    print(f"{'samples/s':26} " + " ".join(f"{interval:>14}" for interval in intervals))
    for name, (policy, own) in systems.items():
        means = [
            repeat(lambda seed, at_s=INTERVALS_S[each]: make_trace(at_s, seed), own, policy, seeds=range(given.seeds))
            for each in intervals
        ]
        rates[name] = [mean.samples_per_s.value for mean in means]
        print(f"{name:26} " + " ".join(f"{mean.samples_per_s!s:>14}" for mean in means))
    for name, published in PAPER.items():
        print(f"{f'{name}, published (2.7B)':26} " + " ".join(f"{published[each]:14.2f}" for each in intervals))

    # %% The figure, and one of its runs over time.
    top = max(rate for each in rates.values() for rate in each)
    shares = {name: [rate / top for rate in each] for name, each in rates.items()}
    given.output.write_text(
        bars_svg(shares, intervals, title="One node lost in each interval", axis="share of the best")
    )
    trace = make_trace(INTERVALS_S[intervals[-1]], 0)
    runs = [simulate(trace, own, policy) for policy, own in systems.values()]
    over_time = given.output.with_stem(f"{given.output.stem}_over_time")
    over_time.write_text(outcomes_svg(runs, trace, title=f"One node lost every {intervals[-1]}"))
    print(f"\nwrote {given.output} and {over_time}")


if __name__ == "__main__":
    main()
